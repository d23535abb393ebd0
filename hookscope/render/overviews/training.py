"""A watched training in one picture: the answer, verdicts on a time line, loss and norms, gradients over steps."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from hookscope.render.columns import number_text, percent_text
from hookscope.render.lettering import font, line_height
from hookscope.render.overviews.charts import BLUE, ORANGE, VERMILION, Chart, Marks, Series, Shape
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
    in_font,
    text_block,
    write,
)
from hookscope.render.palettes import colour_levels
from hookscope.render.training_steps import Floats, HeatMap, as_floats, columns_of, heat_maps, kept_runs, round_steps
from hookscope.render.training_text import (
    Objection,
    answer,
    decisive,
    first_step,
    last_step,
    objections,
    places_text,
    steps_in_order,
)
from hookscope.results.training import TrainingLog, TrainingStep
from hookscope.text import counted, some_of

_MOST_OBJECTIONS = 8
_MOST_COLUMNS = 500  # of a chart, about two pixels each

# Pixels.
_NAMES = 330  # left of a time line or a heat map, for the names
_BAR = 12
_MOST_ROWS = 36  # of a heat map
_ROW = 17

_LEVELS = 255
_NON_FINITE, _ZERO, _NOTHING, _GROUND = (255, 0, 255), (120, 124, 130), (48, 53, 60), (84, 91, 100)
_COLOURS = {"fail": RED, "warn": AMBER}


def draw_training(log: TrainingLog) -> Image.Image:
    """Draw the overview of a watched training, 1,200 pixels wide."""
    found = objections(log)
    low = first_step(log)
    high = max(low, last_step(log))
    blocks = [text_block(_heading(log)), text_block(_answer(log, found))]
    if found:
        blocks.append(_time_line(found[:_MOST_OBJECTIONS], len(found), low, high))
    blocks += _charts(steps_in_order(log), low, high)
    named = {place for each in found for place in each.places}
    maps = {each.key: each for each in heat_maps(log, INNER - _NAMES, _MOST_ROWS, named)}
    blocks += [
        heat_block(maps[key]) for key in ("gradient-norm", "dead-share") if key in maps and maps[key].values.any()
    ]
    return draw_sheet(blocks)


def _heading(log: TrainingLog) -> list[Line]:
    networks = list(dict.fromkeys(name for start in log.starts for name in start.networks))
    optimizers = list(dict.fromkeys(name for start in log.starts for name in start.optimizers))
    watched = f"{counted(len(log.steps), 'step')}, {len(log.watched):,} watched in full"
    words = " · ".join([*optimizers[:2], watched])
    return [(f"Training of {some_of(networks, 3) or 'a network'}", TITLE, INK), (words, SMALL, DIM)]


def _answer(log: TrainingLog, found: Sequence[Objection]) -> list[Line]:
    first = decisive(found)
    colour = _COLOURS[first.level] if first else GREEN
    finding, *rest = answer(log)
    return [(finding, NAME, colour), *((sentence, TEXT, INK) for sentence in rest)]


def _time_line(found: Sequence[Objection], count: int, low: int, high: int) -> Block:
    step = line_height(SMALL) + 8
    more = [(f"and {counted(count - len(found), 'more verdict')}", SMALL, DIM)] if count > len(found) else []

    def across(number: float) -> float:
        return MARGIN + _NAMES + (number - low) / (high - low + 1) * (INNER - _NAMES)

    def draw(image: Image.Image, top: int) -> None:
        pen = ImageDraw.Draw(image)
        for each in found:
            words = fitting(f"{each.first.rule}  {places_text(each)}", SMALL, _NAMES - 16)
            write(pen, [(words, SMALL, _COLOURS[each.level])], top, MARGIN, _NAMES)
            middle = top + line_height(SMALL) // 2
            pen.rectangle([across(low), middle - _BAR // 2, across(high + 1), middle + _BAR // 2], _GROUND)
            end = across(high + 1 if each.over is None else each.over)
            begin = across(each.began)
            bar = [begin, middle - _BAR // 2, max(begin + 3, end), middle + _BAR // 2]
            pen.rectangle(bar, _COLOURS[each.level])
            top += step
        write(pen, more, top, MARGIN, _NAMES)
        drawn = font(SMALL)
        for number in round_steps(low, high, 6):
            left = min(across(number), MARGIN + INNER - drawn.getlength(f"{number:,}"))
            pen.text((left, top), f"{number:,}", DIM, drawn)

    return Block(len(found) * step + line_height(SMALL), draw)


def _charts(steps: Sequence[TrainingStep], low: int, high: int) -> list[Block]:
    if not steps:
        return []
    places = np.array([each.step - low for each in steps], np.int64)
    count = high - low + 1
    column = columns_of(places, 0, count - 1, min(count, _MOST_COLUMNS))
    loss, norm, before = (
        as_floats(getattr(each, name) for each in steps) for name in ("loss", "gradient_norm", "norm_before_clipping")
    )
    skipped = np.array([each.skipped for each in steps], np.bool_)

    def series(name: str, values: Floats, colour: Colour) -> Series:
        return Series(name, (), colour, runs=kept_runs(column, places, values))

    def marks(name: str, at: NDArray[np.bool_], colour: Colour, shape: Shape = "cross") -> Marks:
        return Marks(name, places[at].tolist(), colour, shape)

    charts = []
    if not np.isnan(loss).all():
        charts.append(
            Chart(
                title="Loss",
                series=[series("loss", loss, BLUE)],
                count=count,
                axis="linear" if (loss < 0).any() else "log",
                marks=[marks("NaN or Inf", np.isinf(loss), VERMILION)],
            )
        )
    norms = [series("before clipping", before, ORANGE)] if not np.isnan(before).all() else []
    charts.append(
        Chart(
            title="Norm of all gradients",
            series=[*norms, series("as the optimiser got it", norm, BLUE)],
            count=count,
            marks=[marks("NaN or Inf", np.isinf(norm), VERMILION), marks("skipped", skipped, AMBER, "triangle")],
            names=[(step - low, f"{step:,}") for step in round_steps(low, high, 7)],
        )
    )
    return [each.block for each in charts]


def heat_block(heat: HeatMap) -> Block:
    """Return a heat map: a row for each name, the scale above it, and below it which steps or files the columns are."""
    head = line_height(NAME) + 8
    title = heat.title if heat.column_names else f"{heat.title} over watched steps"

    def draw(image: Image.Image, top: int) -> None:
        pen = ImageDraw.Draw(image)
        pen.text((MARGIN, top), in_font(title), INK, font(NAME))
        _draw_scale(image, heat, top)
        size = (INNER - _NAMES, _ROW * len(heat.names))
        picture = Image.fromarray(_coloured(heat)).resize(size, Image.Resampling.NEAREST)
        image.paste(picture, (MARGIN + _NAMES, top + head))
        for row, name in enumerate(heat.names):
            words = [(fitting(name, SMALL, _NAMES - 16), SMALL, INK)]
            write(pen, words, top + head + row * _ROW - 1, MARGIN, _NAMES)
        below = top + head + size[1] + 4
        _write_columns(pen, heat, below)
        if heat.left_out:
            write(pen, [(f"{counted(heat.left_out, 'more row')}", SMALL, DIM)], below, MARGIN, _NAMES)

    return Block(head + _ROW * len(heat.names) + 4 + line_height(SMALL), draw)


def _write_columns(pen: ImageDraw.ImageDraw, heat: HeatMap, top: int) -> None:
    """Write the first and the last step, or as many names of columns as stand clear of each other, the last one too."""
    drawn, right = font(SMALL), MARGIN + INNER
    last = fitting(heat.column_names[-1], SMALL, INNER // 4) if heat.column_names else f"{heat.columns[-1][1]:,}"
    names = heat.column_names or (f"step {heat.columns[0][0]:,}",)
    end = right - drawn.getlength(last)
    pen.text((end, top), last, DIM, drawn)
    left = 0.0
    for place, name in enumerate(names[: len(heat.columns) - 1] if heat.column_names else names):
        at = MARGIN + _NAMES + (INNER - _NAMES) * place / len(heat.columns)
        words = fitting(name, SMALL, INNER // 4)
        if at >= left and at + drawn.getlength(words) + 10 <= end:
            pen.text((at, top), words, DIM, drawn)
            left = at + drawn.getlength(words) + 10


def _draw_scale(image: Image.Image, heat: HeatMap, top: int) -> None:
    if heat.scale is None:
        return
    text = percent_text if heat.share else number_text
    low, high = map(text, heat.scale)
    pen, drawn = ImageDraw.Draw(image), font(SMALL)
    right = MARGIN + INNER - drawn.getlength(high)
    pen.text((right, top + 3), high, DIM, drawn)
    bar = Image.fromarray(colour_levels("viridis", _LEVELS)[None]).resize((200, 10))
    image.paste(bar, (round(right) - 208, top + 7))
    pen.text((right - 216 - drawn.getlength(low), top + 3), low, DIM, drawn)


def _coloured(heat: HeatMap) -> NDArray[np.uint8]:
    """Return the colours of a heat map, (rows, columns, 3)."""
    shares = heat.shares()
    known = ~np.isnan(shares)
    result = np.full((*shares.shape, 3), _NOTHING, np.uint8)
    result[known] = colour_levels("viridis", _LEVELS)[(shares[known] * (_LEVELS - 1) + 0.5).astype(np.int64)]
    if not heat.share:
        result[heat.values == 0] = _ZERO
    result[np.isinf(heat.values)] = _NON_FINITE
    return result
