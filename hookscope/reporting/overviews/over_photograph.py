"""Pictures beside each other on a sheet, each with lines of text and a colour bar: a photograph, and maps over it."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hookscope.reporting.document import InputMap, MappedInput
from hookscope.reporting.overlays import bar, colour_scale, outside_dimmed, overlay, seen_part, shrunk
from hookscope.reporting.overviews.sheet import (
    DIM,
    GAP,
    INK,
    INNER,
    LINE,
    NAME,
    TEXT,
    Block,
    Cell,
    Line,
    cell_row,
    text_block,
)
from hookscope.reporting.run_facts import short_name, size_words
from hookscope.results.inputs import Region
from hookscope.text import counted

_TALLEST = 560  # pixels, of a photograph
_MOST_MAPS = 24  # drawn for one input; the other maps are files
_MOST_DRAWN_MAPS = 12


def map_blocks(mapped: MappedInput) -> list[Block]:
    """Return an input and its maps: pictures beside each other, signals and volumes under each other."""
    maps, photograph = mapped.maps(), mapped.photograph
    if photograph is None:
        return []
    remark = mapped.remark or photograph.remark
    about: list[Line] = [(short_name(mapped.record), NAME, INK), (size_words(mapped.record), TEXT, DIM)]
    drawn = [
        _about_map(input_map, input_map.draw(INNER))
        for input_map in maps[:_MOST_DRAWN_MAPS]
        if input_map.draw is not None
    ]
    if drawn:
        rows = [cell_row([cell], 1) for cell in drawn]
        return [text_block(about), *rows, *_remarks(remark, len(maps) - len(drawn))]
    if photograph.remark and not maps:  # nothing is drawn over the grey that stands for the input
        return [text_block(about), *_remarks(remark, 0)]
    shown = maps[:_MOST_MAPS]
    columns, across = _column_count(shown, photograph.region)
    width = (INNER - (columns - 1) * GAP) // columns
    ratio = min(width / photograph.region.width, _TALLEST / photograph.region.height)
    height, width = (max(1, round(side * ratio)) for side in photograph.pixels.shape[:2])
    small = shrunk(photograph, height, width)
    cells = [
        Cell(_with_frame(outside_dimmed(small), small.region), about),
        *(_about_map(input_map, _with_frame(overlay(small, input_map.map), small.region)) for input_map in shown),
    ]
    rows = [cell_row(row, columns) for row in _rows(cells, shown, columns, across)]
    return [*rows, *_remarks(remark, len(maps) - len(shown))]


def _remarks(remark: str, left_out: int) -> list[Block]:
    more = f"{counted(left_out, 'more map')} in the run's folder." if left_out else ""
    lines: list[Line] = [(sentence, TEXT, DIM) for sentence in (more, remark) if sentence]
    return [text_block(lines)] if lines else []


def _rows(cells: Sequence[Cell], maps: Sequence[InputMap], columns: int, across: int) -> list[Sequence[Cell | None]]:
    starts = range(1, len(cells), across)
    if across < columns:  # the input has a column
        return [[None if start > 1 else cells[0], *cells[start : start + across]] for start in starts]
    if len({input_map.where for input_map in maps}) == across > 1:  # the input has a row
        return [cells[:1], *(cells[start : start + across] for start in starts)]
    return [cells[start : start + columns] for start in range(0, len(cells), columns)]


def _column_count(maps: Sequence[InputMap], region: Region) -> tuple[int, int]:
    """Return the number of columns, and the number of maps in a row of maps.

    With several targets and several layers, each target has a row, right of the input's column or below its row.
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


def _with_frame(pixels: NDArray[np.uint8], region: Region) -> Image.Image:
    seen = seen_part(region)
    if seen != (slice(0, len(pixels)), slice(0, pixels.shape[1])):
        part = pixels[seen]
        for edge in (part[:1], part[-1:], part[:, :1], part[:, -1:]):
            edge[:] = LINE
    return Image.fromarray(pixels)


def _about_map(input_map: InputMap, picture: Image.Image) -> Cell:
    scale = colour_scale(input_map.map.values)
    facts = "   ·   ".join(f"{term} {words}" for term, words in input_map.facts)
    lines: list[Line] = [(input_map.title, NAME, INK), (facts, TEXT, INK)]
    if input_map.where:
        lines.insert(1, (input_map.where, TEXT, DIM))
    return Cell(picture, lines, bar(scale, 240, 1)[0] if scale.top > 0 else None, scale.labels)
