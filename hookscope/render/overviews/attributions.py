"""One picture that answers where the network looks: an input, a map over it for each target and layer, and scales.

Maps of pictures stand side by side; those of signals and volumes take the whole width, under each other.
"""

import math
from collections.abc import Sequence
from pathlib import PurePath

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hookscope.render.attribution_text import target_probability
from hookscope.render.columns import number_text
from hookscope.render.given_maps import draw_given_map, given_remark
from hookscope.render.overlays import bar, colour_scale, overlay, seen_part, shrunk
from hookscope.render.overviews.over_photograph import BAR, Cell, input_cell, outline, put_together
from hookscope.render.overviews.sheet import (
    DIM,
    GAP,
    INK,
    INNER,
    NAME,
    PAPER,
    RED,
    TEXT,
    TITLE,
    Line,
)
from hookscope.results.attributions import AttributionMap, Attributions
from hookscope.results.inputs import PICTURE_AXES, Photograph
from hookscope.text import input_shape_text

_TALLEST = 560  # of a picture in it
_MOST_MAPS = 24  # of one input; the others have their files
_MOST_OF_WIDE_MAPS = 12


def draw_overview(result: Attributions, index: int, photograph: Photograph) -> Image.Image:
    """Draw one input of a result with all its maps, 1,200 pixels wide."""
    maps = [each for each in result.maps if each.input_index == index]
    shown = maps[:_MOST_MAPS]
    if shown and shown[0].values.ndim != PICTURE_AXES:
        return _wide_overview(result, index, maps)
    columns, across = _column_count(shown, photograph)
    width = (INNER - (columns - 1) * GAP) // columns
    ratio = min(width / photograph.region.width, _TALLEST / photograph.region.height)
    height, width = (max(1, round(side * ratio)) for side in photograph.pixels.shape[:2])
    small = shrunk(photograph, height, width)
    cells: list[Cell] = [input_cell(result.inputs[index], small), *(_map_cell(each, small) for each in shown)]
    if len(shown) < len(maps):
        more = f"{len(maps) - len(shown)} more maps are in the run's folder."
        cells.append(Cell(np.full((1, width, 3), PAPER, np.uint8), [(more, TEXT, DIM)]))
    rows: list[list[Cell | None]]
    starts = range(1, len(cells), across)
    if across < columns:  # the input has a column
        rows = [[None if start > 1 else cells[0], *cells[start : start + across]] for start in starts]
    elif len({each.layer for each in shown}) == across > 1:  # it has a row
        rows = [[*cells[:1]]]
        rows += [[*cells[start : start + across]] for start in starts]
    else:
        rows = [[*cells[start : start + columns]] for start in range(0, len(cells), columns)]
    return put_together(_heading(result), rows, columns, _footing(result, photograph))


def _wide_overview(result: Attributions, index: int, maps: Sequence[AttributionMap]) -> Image.Image:
    """Draw an input that is no picture with its maps, each as wide as the sheet; the first map has the input itself."""
    given = result.given.get(index)
    record = result.inputs[index]
    seen = f"a tensor, to the network as {input_shape_text(record.shape, ' x ')}"
    remarks = [(given_remark(given), TEXT, DIM)] if given is not None and given_remark(given) else []
    about = [(PurePath(record.name).name or record.name, NAME, INK), (seen, TEXT, DIM), *remarks]
    cells = [Cell(np.full((1, INNER, 3), PAPER, np.uint8), about)]
    cells += [_about_map(each, np.asarray(draw_given_map(given, each, INNER))) for each in maps[:_MOST_OF_WIDE_MAPS]]
    if more := len(maps) - (len(cells) - 1):
        words = f"{more} more maps are in the run's folder."
        cells.append(Cell(np.full((1, INNER, 3), PAPER, np.uint8), [(words, TEXT, DIM)]))
    footing = [
        (f"The {each.name} check failed. {each.meaning}", TEXT, RED) for each in result.sanity if each.passed is False
    ]
    return put_together(_heading(result), [[cell] for cell in cells], 1, footing)


def _column_count(maps: Sequence[AttributionMap], photograph: Photograph) -> tuple[int, int]:
    """Return how many pictures stand beside each other, and how many of them are maps in the rows below the input's.

    Of several targets at several layers each target has a row, beside the column of the input or below it.
    """
    wide = photograph.region.width / photograph.region.height
    if wide > 2.2:
        return 1, 1
    most = max(2, min(4, math.floor(4.6 / wide)))
    layers = len({each.layer for each in maps})
    if 1 < layers <= most and layers < len(maps):
        return (layers + 1 if layers < most else layers), layers
    count = len(maps) + 1
    fitting = range(2, min(most, count) + 1)
    columns = min(fitting, key=lambda each: (-count % each, each if count <= 6 else -each), default=1)
    return columns, columns


def _heading(result: Attributions) -> Sequence[Line]:
    model = result.model
    weights = "random weights: nothing here was learned" if model.random else f"weights: {model.weights}"
    return (
        (f"{result.method}: where {model.name} looks", TITLE, INK),
        (f"{weights}   ·   each map has its own scale, from 0", TEXT, DIM),
    )


def _footing(result: Attributions, photograph: Photograph) -> Sequence[Line]:
    return [*((sentence, TEXT, DIM) for sentence in (photograph.remark,) if sentence), *_failed_checks(result)]


def _failed_checks(result: Attributions) -> Sequence[Line]:
    failed = [each for each in result.sanity if each.passed is False]
    return [(f"The {each.name} check failed. {each.meaning}", TEXT, RED) for each in failed]


def _map_cell(each: AttributionMap, photograph: Photograph) -> Cell:
    pixels = overlay(photograph, each)
    rows_columns = seen_part(photograph.region)
    if colour_scale(each).top and rows_columns != (slice(0, len(pixels)), slice(0, pixels.shape[1])):
        outline(pixels, *rows_columns)
    return _about_map(each, pixels)


def _about_map(each: AttributionMap, pixels: NDArray[np.uint8]) -> Cell:
    target, scale = each.target, colour_scale(each)
    words = f"score {number_text(target.score)}"
    if probability := target_probability(target):
        words += f"   {probability}"
    lines = [(target.label, NAME, INK), (words, TEXT, INK)]
    if each.layer:
        grid = " x ".join(map(str, each.values.shape))
        lines.append((f"at {each.layer}, {grid}{' cells' if each.values.ndim == 1 else ''}", TEXT, DIM))
    if not scale.top:
        return Cell(pixels, [*lines, ("the map is 0 everywhere", TEXT, DIM)])
    return Cell(pixels, lines, bar(scale, 240, BAR), scale.labels)
