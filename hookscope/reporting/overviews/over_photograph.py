"""Pictures beside each other on a sheet, each with lines of text and a colour bar: a photograph, and maps over it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from hookscope.reporting.document import InputMap, MappedInput
from hookscope.reporting.lettering import drawable, font, line_height
from hookscope.reporting.overlays import bar, colour_scale, outside_dimmed, overlay, seen_part, shrunk
from hookscope.reporting.overviews.sheet import (
    DIM,
    GAP,
    INK,
    INNER,
    LINE,
    MARGIN,
    NAME,
    TEXT,
    Block,
    Line,
    text_block,
    text_height,
    write,
)
from hookscope.reporting.run_facts import short_name, size_words
from hookscope.results.concentration import PlacedMap
from hookscope.results.inputs import InputRecord, Photograph, Region
from hookscope.text import counted

BAR = 14
"""Pixels that a colour bar is high."""

_TALLEST = 560  # pixels, of a photograph
_MOST_MAPS = 24  # of one input; the others have their files
_MOST_DRAWN_MAPS = 12


@dataclass(frozen=True, slots=True)
class Cell:
    """A picture and the lines below it; a colour bar last, with its labels."""

    pixels: NDArray[np.uint8]
    lines: Sequence[Line]
    bar: NDArray[np.uint8] | None = None
    labels: Sequence[str] = ()


def map_blocks(mapped: MappedInput) -> list[Block]:
    """Return an input and its maps: pictures beside each other, signals and volumes under each other."""
    maps, photograph = mapped.maps(), mapped.photograph
    if photograph is None:
        return []
    drawn = [
        _about_map(input_map, np.asarray(input_map.draw(INNER)))
        for input_map in maps[:_MOST_DRAWN_MAPS]
        if input_map.draw is not None
    ]
    if drawn:
        about = text_block(_about_input(mapped.record))
        rows = [cell_row([cell], 1) for cell in drawn]
        return [about, *rows, *_remarks([mapped.remark, photograph.remark], len(maps) - len(drawn))]
    if photograph.remark and not maps:  # nothing is drawn over the grey that stands for the input
        return [text_block(_about_input(mapped.record)), *_remarks([mapped.remark, photograph.remark], 0)]
    shown = maps[:_MOST_MAPS]
    columns, across = _column_count(shown, photograph.region)
    width = (INNER - (columns - 1) * GAP) // columns
    ratio = min(width / photograph.region.width, _TALLEST / photograph.region.height)
    height, width = (max(1, round(side * ratio)) for side in photograph.pixels.shape[:2])
    small = shrunk(photograph, height, width)
    cells = [
        input_cell(mapped.record, small),
        *(_about_map(input_map, map_pixels(input_map.map, small)) for input_map in shown),
    ]
    rows = [cell_row(row, columns) for row in _rows(cells, shown, columns, across)]
    return [*rows, *_remarks([mapped.remark, photograph.remark], len(maps) - len(shown))]


def _remarks(remarks: Sequence[str], left_out: int) -> list[Block]:
    more = [f"{counted(left_out, 'more map')} in the run's folder."] if left_out else []
    lines: list[Line] = [(sentence, TEXT, DIM) for sentence in (*more, *remarks) if sentence]
    return [text_block(lines)] if lines else []


def _rows(cells: Sequence[Cell], maps: Sequence[InputMap], columns: int, across: int) -> list[Sequence[Cell | None]]:
    """Return the cells in rows; the first one is the input's."""
    starts = range(1, len(cells), across)
    if across < columns:  # the input has a column
        return [[None if start > 1 else cells[0], *cells[start : start + across]] for start in starts]
    if len({input_map.where for input_map in maps}) == across > 1:  # it has a row
        return [cells[:1], *(cells[start : start + across] for start in starts)]
    return [cells[start : start + columns] for start in range(0, len(cells), columns)]


def _column_count(maps: Sequence[InputMap], region: Region) -> tuple[int, int]:
    """Return how many pictures stand beside each other, and how many of them are maps in the rows below the input's.

    Of several targets at several layers each target has a row, beside the column of the input or below it.
    """
    wide = region.width / region.height
    if wide > 2.2:
        return 1, 1
    most = max(2, min(4, math.floor(4.6 / wide)))
    layers = len({input_map.where for input_map in maps})
    if 1 < layers <= most and layers < len(maps):
        return (layers + 1 if layers < most else layers), layers
    count = len(maps) + 1
    fitting = range(2, min(most, count) + 1)
    columns = min(fitting, key=lambda fit: (-count % fit, fit if count <= 6 else -fit), default=1)
    return columns, columns


def input_cell(record: InputRecord, photograph: Photograph) -> Cell:
    """Return the photograph of an input, with its name and sizes, and a frame around what the network sees."""
    pixels = outside_dimmed(photograph)
    _outline(pixels, photograph.region)
    return Cell(pixels, _about_input(record))


def _about_input(record: InputRecord) -> list[Line]:
    return [(short_name(record), NAME, INK), (size_words(record), TEXT, DIM)]


def map_pixels(placed_map: PlacedMap, photograph: Photograph) -> NDArray[np.uint8]:
    """Return a map over a photograph, with a frame around what the network sees."""
    pixels = overlay(photograph, placed_map)
    _outline(pixels, photograph.region)
    return pixels


def _outline(pixels: NDArray[np.uint8], region: Region) -> None:
    seen = seen_part(region)
    if seen != (slice(0, len(pixels)), slice(0, pixels.shape[1])):
        part = pixels[seen]
        for edge in (part[:1], part[-1:], part[:, :1], part[:, -1:]):
            edge[:] = LINE


def _about_map(input_map: InputMap, pixels: NDArray[np.uint8]) -> Cell:
    scale = colour_scale(input_map.map.values)
    facts = "   ·   ".join(f"{term} {words}" for term, words in input_map.facts)
    lines: list[Line] = [(input_map.title, NAME, INK), (facts, TEXT, INK)]
    if input_map.where:
        lines.insert(1, (input_map.where, TEXT, DIM))
    if not scale.top:
        return Cell(pixels, [*lines, ("the map is 0 everywhere", TEXT, DIM)])
    return Cell(pixels, lines, bar(scale, 240, BAR), scale.labels)


def cell_row(cells: Sequence[Cell | None], columns: int) -> Block:
    """Return cells beside each other, of so many columns; nothing where there is none."""
    pitch = (INNER + GAP) // columns
    width = pitch - GAP

    def draw(image: Image.Image, top: int) -> None:
        pen = ImageDraw.Draw(image)
        for place, cell in enumerate(cells):
            if cell is not None:
                _draw_cell(image, pen, cell, top, MARGIN + place * pitch, width)

    return Block(max(_cell_height(cell, width) for cell in cells if cell is not None), draw)


def _draw_cell(image: Image.Image, pen: ImageDraw.ImageDraw, cell: Cell, top: int, left: int, width: int) -> None:
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
        pen.text((at, top + 8 + BAR + 3), words, DIM, font(TEXT, words))


def _cell_height(cell: Cell, width: int) -> int:
    scale = 8 + BAR + 3 + line_height(TEXT) if cell.bar is not None else 0
    return len(cell.pixels) + 8 + sum(text_height(*line, width) for line in cell.lines) + scale
