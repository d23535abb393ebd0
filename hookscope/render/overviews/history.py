"""A run by its checkpoints in one picture: the answer, further verdicts, and layers over files."""

from PIL import Image

from hookscope.render.history_maps import history_maps
from hookscope.render.history_text import answer, decisive, sentence_of
from hookscope.render.overviews.sheet import (
    AMBER,
    DIM,
    GREEN,
    INK,
    NAME,
    RED,
    SMALL,
    TEXT,
    TITLE,
    Line,
    draw_sheet,
    text_block,
)
from hookscope.render.overviews.training import heat_block
from hookscope.results.history import History
from hookscope.text import counted

_MOST_VERDICTS = 8
_MOST_ROWS = 32  # of a heat map

_COLOURS = {"fail": RED, "warn": AMBER}

_KEY = "A column for each file, in order. Magenta: NaN or Inf. Grey: exactly 0. Blank: not read, or nothing to compare."


def draw_history(result: History) -> Image.Image:
    """Draw the overview of a run by its checkpoints, 1,200 pixels wide."""
    named = {place.rpartition(".")[0] or "(model)" for each in result.verdicts for place in each.places}
    named |= {place for each in result.verdicts for place in each.places}
    maps = history_maps(result, _MOST_ROWS, named)
    blocks = [text_block(_heading(result)), text_block(_answer(result))]
    blocks += [text_block([(_KEY, SMALL, DIM)])] if maps else []
    return draw_sheet([*blocks, *map(heat_block, maps)])


def _heading(result: History) -> list[Line]:
    files = result.files
    read = f"{len(result.read)} of {counted(len(files), 'file')} read"
    return [(f"From {files[0].label} to {files[-1].label}", TITLE, INK), (read, SMALL, DIM)]


def _answer(result: History) -> list[Line]:
    most = decisive(result)
    colour = _COLOURS[most.level] if most else INK if result.unreadable else GREEN
    first, *rest = answer(result)
    others = [each for each in result.verdicts if each is not most]
    lines: list[Line] = [(first, NAME, colour)]
    lines += [(sentence_of(each, result), TEXT, _COLOURS[each.level]) for each in others[:_MOST_VERDICTS]]
    more = len(others) - _MOST_VERDICTS
    lines += [(f"and {counted(more, 'more verdict')}", SMALL, DIM)] if more > 0 else []
    return [*lines, *((sentence, TEXT, INK) for sentence in rest)]
