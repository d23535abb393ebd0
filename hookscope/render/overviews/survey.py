"""A survey in one picture: the answer, dead channels and ranges over depth, three channels with their crops."""

from collections.abc import Sequence

from PIL import Image, ImageDraw

from hookscope.render.lettering import line_height
from hookscope.render.overviews.activations import model_line, sizes
from hookscope.render.overviews.charts import PALE_BLUE, VERMILION, Chart, Series
from hookscope.render.overviews.sheet import (
    AMBER,
    DIM,
    GREEN,
    INK,
    INNER,
    MARGIN,
    NAME,
    RED,
    SMALL,
    TEXT,
    TITLE,
    Block,
    Colour,
    Line,
    draw_sheet,
    fitting,
    text_block,
    write,
)
from hookscope.render.survey_columns import FLOAT16
from hookscope.render.survey_failures import failure_heading, failure_reasons, wrong_title
from hookscope.render.survey_text import answer, inputs_text, level_of
from hookscope.results.headroom import FORMATS
from hookscope.results.survey import CropSheet, Survey, WrongStrip, channel_counts
from hookscope.text import counted

_SHOWN = 3
_KEY_OF_WRONG = "On the left the wrong input, then right ones with the nearest features."
_KEY = (
    "Left: the inputs of one half of the data that excite the channel most; right: those of the other half. If alike, "
    "that is what it responds to."
)


def draw_survey(
    result: Survey,
    strips: Sequence[tuple[CropSheet, Image.Image]],
    wrong: Sequence[tuple[WrongStrip, Image.Image]] = (),
) -> Image.Image:
    """Draw the overview of a survey, 1,200 pixels wide.

    `strips` are the first lines of sheets of crops, `wrong` inputs that are classified wrong with those near to them.
    """
    blocks = [text_block(_heading(result)), text_block(_answer(result))]
    if wrong:
        title = wrong_title(result.failures) if result.failures is not None else ""
        blocks.append(text_block([(title, NAME, INK), (_KEY_OF_WRONG, SMALL, DIM)]))
        blocks += [_wrong(result, about, picture) for about, picture in wrong[:_SHOWN]]
    if any(row.channels for row in result.rows):
        has_zeros = any(row.dead_channels or row.activation.zero_fraction for row in result.rows)
        blocks += [*([_dead_chart(result).block] if has_zeros else []), _range_chart(result).block]
    shown = _spread(strips)
    blocks += [text_block([("What excites three channels", NAME, INK), (_KEY, SMALL, DIM)])] if shown else []
    return draw_sheet([*blocks, *(_strip(result, about, picture) for about, picture in shown)])


def _wrong(result: Survey, about: WrongStrip, picture: Image.Image) -> Block:
    failures = result.failures
    assert failures is not None  # noqa: S101 - there is a strip of one of them
    each = failures.inputs[about.index]
    return _captioned([failure_heading(each), *failure_reasons(each, failures)], picture)


def _heading(result: Survey) -> list[Line]:
    title = f"{result.model.name} over {inputs_text(result)}"
    what = f"{counted(channel_counts(result.rows), 'channel')} of {counted(len(result.rows), 'output')}"
    return [(title, TITLE, INK), model_line(result.model, what)]


def _answer(result: Survey) -> list[Line]:
    first, *rest = answer(result)
    return [(first, NAME, _colour(result)), *((sentence, TEXT, INK) for sentence in rest)]


def _colour(result: Survey) -> Colour:
    return {"fail": RED, "warn": AMBER, "good": GREEN, "": INK}[level_of(result)]


def _dead_chart(result: Survey) -> Chart:
    rows = result.rows
    dead = [len(row.dead_channels) / len(row.channels) if row.dead_channels else None for row in rows]
    firing = [None if row.activation.zero_fraction is None else 1 - row.activation.zero_fraction for row in rows]
    return Chart(
        title="How often values are not zero, and channels that never fire",
        series=[
            Series("values that are not zero", firing, PALE_BLUE, "area"),
            Series("dead, share of channels", dead, VERMILION, "dots"),
        ],
        count=len(rows),
        axis="percent",
    )


def _range_chart(result: Survey) -> Chart:
    limit = Series("float16's greatest", [FORMATS[FLOAT16].greatest] * len(result.rows), VERMILION)
    return sizes("Range of the values against float16", result.rows, limit)


def _spread(strips: Sequence[tuple[CropSheet, Image.Image]]) -> list[tuple[CropSheet, Image.Image]]:
    """Return a few over depth, of those whose crops are parts of pictures if there are as many."""
    parts = [each for each in strips if not each[0].is_whole]
    parts = parts if len(parts) >= _SHOWN else list(strips)
    if len(parts) <= _SHOWN:
        return parts
    return [parts[round((at + 0.5) * len(parts) / _SHOWN - 0.5)] for at in range(_SHOWN)]


def _strip(result: Survey, about: CropSheet, picture: Image.Image) -> Block:
    row = result.rows[about.row]
    channel = row.channels[about.channels[0]]
    words = f"{row.label or '(model)'}, channel {channel.channel}"
    if channel.best_class and channel.selectivity is not None:
        words += f", most for {channel.best_class} (selectivity {channel.selectivity:.2f})"
    return _captioned([words], picture)


def _captioned(lines: Sequence[str], picture: Image.Image) -> Block:
    shown = picture
    if picture.width > INNER:
        shown = picture.resize((INNER, max(1, picture.height * INNER // picture.width)), Image.Resampling.BOX)

    def draw(image: Image.Image, top: int) -> None:
        fitted = [(fitting(line, TEXT, INNER), TEXT, INK) for line in lines]
        write(ImageDraw.Draw(image), fitted, top, MARGIN, INNER)
        image.paste(shown, (MARGIN, top + height))

    height = len(lines) * line_height(TEXT) + 4  # below the line's underscores
    return Block(height + shown.height, draw)
