"""One picture that answers where the network looks: an input, a map over it for each target and layer, and scales."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from hookscope.render.columns import number_text, probability_text
from hookscope.render.lettering import drawable, font, line_height, wrap
from hookscope.render.overlays import bar, colour_scale, outside_dimmed, overlay, seen_part, shrunk
from hookscope.results.attributions import AttributionMap, Attributions
from hookscope.results.inputs import Photograph

# Pixels, our choice: read without a magnifier on a page 1,200 wide.
_WIDTH, _MARGIN, _GAP = 1200, 28, 24
_TITLE, _NAME, _TEXT = 26, 20, 16
_BAR = 14
_INK, _DIM, _PAPER, _LINE = (24, 24, 24), (96, 103, 112), (255, 255, 255), (40, 44, 50)
_TALLEST = 560  # of a picture in it
_MOST_MAPS = 24  # of one input; the others have their files


_Line = tuple[str, int, tuple[int, int, int]]  # text, size and colour


@dataclass(frozen=True, slots=True)
class _Cell:
    """A picture and the lines below it; a colour bar last, with its labels."""

    pixels: NDArray[np.uint8]
    lines: Sequence[_Line]
    bar: NDArray[np.uint8] | None = None
    labels: Sequence[str] = ()


def draw_overview(result: Attributions, index: int, photograph: Photograph) -> Image.Image:
    """Draw one input of a result with all its maps, 1,200 pixels wide, dark on white."""
    maps = [each for each in result.maps if each.input_index == index]
    shown = maps[:_MOST_MAPS]
    columns, across = _column_count(shown, photograph)
    width = (_WIDTH - 2 * _MARGIN - (columns - 1) * _GAP) // columns
    ratio = min(width / photograph.region.width, _TALLEST / photograph.region.height)
    height, width = (max(1, round(side * ratio)) for side in photograph.pixels.shape[:2])
    small = shrunk(photograph, height, width)
    cells: list[_Cell] = [_input_cell(result, index, small), *(_map_cell(each, small) for each in shown)]
    if len(shown) < len(maps):
        more = f"{len(maps) - len(shown)} more maps are in the run's folder."
        cells.append(_Cell(np.full((1, width, 3), 255, np.uint8), [(more, _TEXT, _DIM)]))
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


def _heading(result: Attributions) -> Sequence[_Line]:
    model = result.model
    weights = "random weights: nothing here was learned" if model.random else f"weights: {model.weights}"
    return (
        (f"{result.method}: where {model.name} looks", _TITLE, _INK),
        (f"{weights}   -   each map has its own scale, from 0", _TEXT, _DIM),
    )


def _footing(result: Attributions, photograph: Photograph) -> Sequence[_Line]:
    lines = [(sentence, _TEXT, _DIM) for sentence in (photograph.remark,) if sentence]
    failed = [each for each in result.sanity if not each.passed]
    return [*lines, *((f"The {each.name} check failed. {each.meaning}", _TEXT, (150, 40, 30)) for each in failed)]


def _input_cell(result: Attributions, index: int, photograph: Photograph) -> _Cell:
    record = result.inputs[index]
    pixels = outside_dimmed(photograph)
    if (rows_columns := seen_part(photograph.region)) != (slice(0, len(pixels)), slice(0, pixels.shape[1])):
        _outline(pixels, *rows_columns)
    before = f"{record.size[0]} x {record.size[1]} pixels" if record.size else "a tensor"
    seen = f"{before}, to the network as {' x '.join(map(str, record.shape))}"
    return _Cell(pixels, [(PurePath(record.name).name or record.name, _NAME, _INK), (seen, _TEXT, _DIM)])


def _map_cell(each: AttributionMap, photograph: Photograph) -> _Cell:
    target, scale = each.target, colour_scale(each)
    words = f"score {number_text(target.score)}"
    if target.probability is not None:
        words += f"   probability {probability_text(target.probability)}"
    lines = [(target.label, _NAME, _INK), (words, _TEXT, _INK)]
    if each.layer:
        lines.append((f"at {each.layer}, {each.values.shape[0]} x {each.values.shape[1]}", _TEXT, _DIM))
    if not scale.top:
        return _Cell(overlay(photograph, each), [*lines, ("the map is 0 everywhere", _TEXT, _DIM)])
    pixels = overlay(photograph, each)
    if (rows_columns := seen_part(photograph.region)) != (slice(0, len(pixels)), slice(0, pixels.shape[1])):
        _outline(pixels, *rows_columns)
    return _Cell(pixels, lines, bar(scale, 240, _BAR), scale.labels)


def _outline(pixels: NDArray[np.uint8], rows: slice, columns: slice) -> None:
    """Draw a line around the part that the network saw."""
    part = pixels[rows, columns]
    for edge in (part[:1], part[-1:], part[:, :1], part[:, -1:]):
        edge[:] = _LINE


def _put_together(
    heading: Sequence[_Line],
    rows: Sequence[Sequence[_Cell | None]],
    columns: int,
    footing: Sequence[_Line],
) -> Image.Image:
    pitch = (_WIDTH - 2 * _MARGIN + _GAP) // columns
    inner = _WIDTH - 2 * _MARGIN
    width = pitch - _GAP
    heights = [max(_cell_height(cell, width) for cell in row if cell is not None) for row in rows]
    total = 2 * _MARGIN + sum(_text_height(*line, inner) for line in (*heading, *footing))
    total += sum(heights) + len(rows) * _GAP + (_GAP if footing else 0)
    image = Image.new("RGB", (_WIDTH, total), _PAPER)
    pen = ImageDraw.Draw(image)
    top = _write(pen, heading, _MARGIN, _MARGIN, inner) + _GAP
    for row, height in zip(rows, heights, strict=True):
        for place, cell in enumerate(row):
            if cell is not None:
                _draw_cell(image, pen, cell, top, _MARGIN + place * pitch, width)
        top += height + _GAP
    _write(pen, footing, top, _MARGIN, inner)
    return image


def _draw_cell(image: Image.Image, pen: ImageDraw.ImageDraw, cell: _Cell, top: int, left: int, width: int) -> None:
    image.paste(Image.fromarray(cell.pixels), (left, top))
    top = _write(pen, cell.lines, top + len(cell.pixels) + 8, left, width)
    if cell.bar is None:
        return
    image.paste(Image.fromarray(cell.bar), (left, top + 8))
    length = cell.bar.shape[1]
    for place, label in enumerate(cell.labels):
        words = drawable(label, 40)
        size = font(_TEXT).getlength(words)
        at = left + place * (length - size) / (len(cell.labels) - 1)
        pen.text((at, top + 8 + _BAR + 3), words, _DIM, font(_TEXT))


def _cell_height(cell: _Cell, width: int) -> int:
    scale = 8 + _BAR + 3 + line_height(_TEXT) if cell.bar is not None else 0
    return len(cell.pixels) + 8 + sum(_text_height(*line, width) for line in cell.lines) + scale


def _text_height(text: str, size: int, _colour: tuple[int, int, int], width: int) -> int:
    return len(wrap([drawable(text, 400)], size, width, "")) * line_height(size)


def _write(
    pen: ImageDraw.ImageDraw,
    lines: Sequence[_Line],
    top: int,
    left: int,
    width: int,
) -> int:
    """Write lines of text, each broken where it must; return where the next one would begin."""
    for text, size, colour in lines:
        for pieces in wrap([drawable(text, 400)], size, width, ""):
            pen.text((left, top), "".join(pieces), colour, font(size))
            top += line_height(size)
    return top
