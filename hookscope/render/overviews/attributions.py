"""One picture that answers where the network looks: an input, a map over it for each target and layer, and scales."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from hookscope.render.columns import number_text, probability_text
from hookscope.render.lettering import drawable, font, line_height
from hookscope.render.overlays import bar, colour_scale, outside_dimmed, overlay, seen_part, shrunk
from hookscope.render.overviews.sheet import (
    DIM,
    GAP,
    INK,
    INNER,
    LINE,
    MARGIN,
    NAME,
    PAPER,
    RED,
    TEXT,
    TITLE,
    WIDTH,
    Line,
    text_height,
    write,
)
from hookscope.results.attributions import AttributionMap, Attributions
from hookscope.results.inputs import Photograph

_BAR = 14
_TALLEST = 560  # of a picture in it
_MOST_MAPS = 24  # of one input; the others have their files


@dataclass(frozen=True, slots=True)
class _Cell:
    """A picture and the lines below it; a colour bar last, with its labels."""

    pixels: NDArray[np.uint8]
    lines: Sequence[Line]
    bar: NDArray[np.uint8] | None = None
    labels: Sequence[str] = ()


def draw_overview(result: Attributions, index: int, photograph: Photograph) -> Image.Image:
    """Draw one input of a result with all its maps, 1,200 pixels wide, dark on white."""
    maps = [each for each in result.maps if each.input_index == index]
    shown = maps[:_MOST_MAPS]
    columns, across = _column_count(shown, photograph)
    width = (INNER - (columns - 1) * GAP) // columns
    ratio = min(width / photograph.region.width, _TALLEST / photograph.region.height)
    height, width = (max(1, round(side * ratio)) for side in photograph.pixels.shape[:2])
    small = shrunk(photograph, height, width)
    cells: list[_Cell] = [_input_cell(result, index, small), *(_map_cell(each, small) for each in shown)]
    if len(shown) < len(maps):
        more = f"{len(maps) - len(shown)} more maps are in the run's folder."
        cells.append(_Cell(np.full((1, width, 3), 255, np.uint8), [(more, TEXT, DIM)]))
    rows: list[list[_Cell | None]]
    starts = range(1, len(cells), across)
    if across < columns:  # the input has a column
        rows = [[None if start > 1 else cells[0], *cells[start : start + across]] for start in starts]
    elif len({each.layer for each in shown}) == across > 1:  # it has a row
        rows = [[*cells[:1]]]
        rows += [[*cells[start : start + across]] for start in starts]
    else:
        rows = [[*cells[start : start + columns]] for start in range(0, len(cells), columns)]
    return _put_together(_heading(result), rows, columns, _footing(result, photograph))


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
    lines = [(sentence, TEXT, DIM) for sentence in (photograph.remark,) if sentence]
    failed = [each for each in result.sanity if each.passed is False]
    return [*lines, *((f"The {each.name} check failed. {each.meaning}", TEXT, RED) for each in failed)]


def _input_cell(result: Attributions, index: int, photograph: Photograph) -> _Cell:
    record = result.inputs[index]
    pixels = outside_dimmed(photograph)
    if (rows_columns := seen_part(photograph.region)) != (slice(0, len(pixels)), slice(0, pixels.shape[1])):
        _outline(pixels, *rows_columns)
    before = f"{record.size[0]} x {record.size[1]} pixels" if record.size else "a tensor"
    seen = f"{before}, to the network as {' x '.join(map(str, record.shape))}"
    return _Cell(pixels, [(PurePath(record.name).name or record.name, NAME, INK), (seen, TEXT, DIM)])


def _map_cell(each: AttributionMap, photograph: Photograph) -> _Cell:
    target, scale = each.target, colour_scale(each)
    words = f"score {number_text(target.score)}"
    if target.probability is not None:
        words += f"   probability {probability_text(target.probability)}"
    lines = [(target.label, NAME, INK), (words, TEXT, INK)]
    if each.layer:
        lines.append((f"at {each.layer}, {each.values.shape[0]} x {each.values.shape[1]}", TEXT, DIM))
    if not scale.top:
        return _Cell(overlay(photograph, each), [*lines, ("the map is 0 everywhere", TEXT, DIM)])
    pixels = overlay(photograph, each)
    if (rows_columns := seen_part(photograph.region)) != (slice(0, len(pixels)), slice(0, pixels.shape[1])):
        _outline(pixels, *rows_columns)
    return _Cell(pixels, lines, bar(scale, 240, _BAR), scale.labels)


def _outline(pixels: NDArray[np.uint8], rows: slice, columns: slice) -> None:
    part = pixels[rows, columns]
    for edge in (part[:1], part[-1:], part[:, :1], part[:, -1:]):
        edge[:] = LINE


def _put_together(
    heading: Sequence[Line],
    rows: Sequence[Sequence[_Cell | None]],
    columns: int,
    footing: Sequence[Line],
) -> Image.Image:
    pitch = (INNER + GAP) // columns
    width = pitch - GAP
    heights = [max(_cell_height(cell, width) for cell in row if cell is not None) for row in rows]
    total = 2 * MARGIN + sum(text_height(*line, INNER) for line in (*heading, *footing))
    total += sum(heights) + len(rows) * GAP + (GAP if footing else 0)
    image = Image.new("RGB", (WIDTH, total), PAPER)
    pen = ImageDraw.Draw(image)
    top = write(pen, heading, MARGIN, MARGIN, INNER) + GAP
    for row, height in zip(rows, heights, strict=True):
        for place, cell in enumerate(row):
            if cell is not None:
                _draw_cell(image, pen, cell, top, MARGIN + place * pitch, width)
        top += height + GAP
    write(pen, footing, top, MARGIN, INNER)
    return image


def _draw_cell(image: Image.Image, pen: ImageDraw.ImageDraw, cell: _Cell, top: int, left: int, width: int) -> None:
    image.paste(Image.fromarray(cell.pixels), (left, top))
    top = write(pen, cell.lines, top + len(cell.pixels) + 8, left, width)
    if cell.bar is None:
        return
    image.paste(Image.fromarray(cell.bar), (left, top + 8))
    length = cell.bar.shape[1]
    for place, label in enumerate(cell.labels):
        words = drawable(label, 40)
        size = font(TEXT, words).getlength(words)
        at = left + place * (length - size) / (len(cell.labels) - 1)
        pen.text((at, top + 8 + _BAR + 3), words, DIM, font(TEXT, words))


def _cell_height(cell: _Cell, width: int) -> int:
    scale = 8 + _BAR + 3 + line_height(TEXT) if cell.bar is not None else 0
    return len(cell.pixels) + 8 + sum(text_height(*line, width) for line in cell.lines) + scale
