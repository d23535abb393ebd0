"""How two networks differ, in one picture: the answer in words, maps of A-B where it begins, and A-B over depth."""

import math
from collections.abc import Sequence
from pathlib import PurePath

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hookscope.render.axes import block_names
from hookscope.render.differences_text import answer, first_mark, scores_text, sides_text
from hookscope.render.overviews.activations import input_picture, names_of
from hookscope.render.overviews.charts import BLUE, GREY, ORANGE, VERMILION, Chart, Marks, Series
from hookscope.render.overviews.maps import MOST_STAGES, MapColumns
from hookscope.render.overviews.sheet import (
    DIM,
    INK,
    MARGIN,
    SMALL,
    TEXT,
    TITLE,
    Block,
    Line,
    draw_sheet,
    text_block,
)
from hookscope.render.weights_text import weights_answer
from hookscope.results.activations import FeatureMaps, MapSummary
from hookscope.results.differences import Differences, Measures, Side
from hookscope.text import counted

_PICTURE = 200  # pixels a side, the input
_DIGITS = "123456789"
_LONGEST_SIDE = 160  # of a map, as in `MapSummary`

_KEY = (
    "A-B for the first input. Above, the mean of |A-B| over channels; below, A-B in the channel where it is largest. "
    "Each map has its own scale, shown below it; 0 is the darkest colour. NaN and Inf are magenta."
)

_KEY_OF_SEQUENCES = "Of a sequence, each row is a channel and each column a step or a token."


def draw_differences(result: Differences) -> Image.Image:
    """Draw the overview of a run, 1,200 pixels wide."""
    blocks = [text_block(_heading(result)), _answer_block(result)]
    shown = _shown_maps(result)
    numbers = dict(zip([each.row for each in shown], _DIGITS, strict=False))
    if shown:
        columns = MapColumns(
            [summarised(each, _remark(each, result)) for each in shown],
            MARGIN,
            numbers,
            names=("mean of |A-B|", "A-B in channel {}"),
            sequences={each.row for each in shown if each.is_sequence},
        )
        blocks += [Block(columns.height, columns.draw), text_block([(_key(result, shown), SMALL, DIM)])]
    if result.weights:
        measures = [each.measures for each in result.weights]
        names = [each.name for each in result.weights]
        blocks.append(_chart("Difference of the weights, tensor by tensor", measures, names))
    elif result.way != "weights":
        blocks.append(_depth(result, numbers))
    return draw_sheet(blocks)


def summarised(maps: FeatureMaps, kind: str) -> MapSummary:
    """Return maps of A-B, (C, H, W) or of a clip (C, T, H, W), as two: the mean of |A-B|, and its largest channel."""
    values = maps.values[:, maps.values.shape[1] // 2] if maps.arrangement == "frames" else maps.values
    with np.errstate(invalid="ignore", over="ignore"):
        strength = np.square(values, dtype=np.float64).sum(axis=(1, 2))
        mean = np.abs(values).mean(axis=0, dtype=np.float64)
    channel = int(np.nan_to_num(strength, nan=math.inf).argmax())
    step = -(-max(mean.shape) // _LONGEST_SIDE)
    height, width = mean.shape
    return MapSummary(
        maps.row,
        maps.label,
        kind,
        maps.input_index,
        _averaged(mean, step),
        _averaged(values[channel], step),
        channel,
        maps.channel_count,
        (height, width),
    )


def _averaged(values: NDArray[np.floating], step: int) -> NDArray[np.float32]:
    """Return the means over square blocks, those at the end smaller."""
    if step == 1:
        return np.asarray(values, np.float32)
    tops, lefts = np.arange(0, values.shape[0], step), np.arange(0, values.shape[1], step)
    areas = np.outer(np.diff(tops, append=values.shape[0]), np.diff(lefts, append=values.shape[1]))
    with np.errstate(invalid="ignore"):  # inf - inf
        sums = np.add.reduceat(np.add.reduceat(values, tops, axis=0, dtype=np.float64), lefts, axis=1)
    return np.asarray(sums / areas, np.float32)


def _shown_maps(result: Differences) -> list[FeatureMaps]:
    """Return the maps where differences begin, and the largest others, in the order of running."""
    drawable = [each for each in result.maps if each.arrangement != "vector" and min(each.values.shape[-2:]) > 1]
    begins, sizes = _first_rows(result), {row.index: _size(row.measures) for row in result.rows}
    drawable.sort(key=lambda each: (each.row in begins, sizes.get(each.row, 0.0)), reverse=True)
    return sorted(drawable[:MOST_STAGES], key=lambda each: each.row)


def _size(measures: Measures | None) -> float:
    value = 0.0 if measures is None else measures.relative_l2
    return math.inf if math.isnan(value) else value


def _first_rows(result: Differences) -> set[int]:
    labels = {first.row for first in result.first_differences}
    return {row.index for row in result.rows if row.label in labels}


def _remark(maps: FeatureMaps, result: Differences) -> str:
    return f"{maps.kind}: {first_mark(result)}" if maps.row in _first_rows(result) else maps.kind


def _key(result: Differences, shown: Sequence[FeatureMaps]) -> str:
    more = sum(bool(_size(row.measures)) for row in result.rows) - len(shown)
    key = f"{_KEY} {_KEY_OF_SEQUENCES}" if any(each.is_sequence for each in shown) else _KEY
    return f"{key} {counted(more, 'more row')} {'differs' if more == 1 else 'differ'}." if more > 0 else key


def _heading(result: Differences) -> list[Line]:
    inputs = f", {names_of(result.inputs)}" if result.inputs else ""
    return [
        (f"What differs: {sides_text(result)}{inputs}", TITLE, INK),
        *((f"{letter}: {_about(side)}", TEXT, DIM) for letter, side in (("A", result.a), ("B", result.b))),
    ]


def _about(side: Side) -> str:
    stored = [f"the run {PurePath(side.run).name}"] if side.run else []
    parts = (side.model.name, f"weights: {side.model.weights}", side.dtype, side.device, *side.ways, *stored)
    return "   ·   ".join(parts)


def _answer_block(result: Differences) -> Block:
    """Return the first input beside the answer, and what the difference does to its classes."""
    provenance = result.provenance
    has_picture = bool(result.inputs) and provenance is not None
    picture = input_picture(result, 0, _PICTURE, _PICTURE) if has_picture else None
    sentences = weights_answer(result) if result.way == "weights" else answer(result)
    lines: list[Line] = [(sentence, TEXT, INK) for sentence in sentences]
    for output in result.outputs:
        for letter, best in zip("AB", output.predictions, strict=True):
            lines += [
                (f"{letter}, first input: {scores_text(each)}", TEXT, DIM)
                for each in best
                if each.input_index == 0 and each.classes
            ]

    return text_block(lines, picture)


def _depth(result: Differences, numbers: dict[int, str]) -> Block:
    if not result.rows:
        return text_block([("No row was compared.", TEXT, INK)])
    rows = result.rows
    more = [
        Series("added by the layer", [row.added.relative_l2 if row.added else None for row in rows], VERMILION, "dots"),
        Series("error of A", [row.error for row in rows], GREY, "dots"),
        Series("error of B", [row.error_b for row in rows], ORANGE, "dots"),
    ]
    return _chart(
        "Relative L2 norm of A-B, layer by layer",
        [row.measures for row in rows],
        [row.label or "(model)" for row in rows],
        [each for each in more if any(each.values)],
        letters=[(numbers[row.index], place) for place, row in enumerate(rows) if row.index in numbers],
        ground=[place for place, row in enumerate(rows) if row.index in _first_rows(result)],
        ground_name=first_mark(result),
    )


def _chart(
    title: str,
    measures: Sequence[Measures | None],
    names: Sequence[str],
    more: Sequence[Series] = (),
    *,
    letters: Sequence[tuple[str, int]] = (),
    ground: Sequence[int] = (),
    ground_name: str = "",
) -> Block:
    values = [None if each is None else each.relative_l2 for each in measures]
    if not any(values) and not more:
        return Block(0, lambda _image, _top: None)
    equal = [place for place, value in enumerate(values) if value == 0]
    broken = [place for place, value in enumerate(values) if value is not None and not math.isfinite(value)]
    return Chart(
        title=title,
        series=[Series("A-B", values, BLUE), *more],
        count=len(values),
        marks=[Marks("equal", equal, GREY, "triangle"), Marks("NaN or Inf on one side", broken, VERMILION)],
        letters=letters,
        ground=ground,
        ground_name=ground_name,
        names=block_names(names),
    ).block
