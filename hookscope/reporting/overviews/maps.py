"""Maps in an overview: which layers stand for the network, how their two maps are drawn, and rows of small maps."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from hookscope.reporting.axes import spread
from hookscope.reporting.document import MapRow, Maps, SmallMaps
from hookscope.reporting.grids import palette_levels
from hookscope.reporting.lettering import line_height, write_line
from hookscope.reporting.overlays import ColourScale, colour_scale
from hookscope.reporting.overviews.sheet import (
    DIM,
    INK,
    INNER,
    MARGIN,
    NAME,
    RED,
    SMALL,
    Block,
    Cell,
    Line,
    cell_row,
    column_width,
    fitting,
    write,
)
from hookscope.reporting.palettes import colour_levels, palette_image
from hookscope.results.activations import MapSummary
from hookscope.text import figure

MOST_STAGES = 5
"""Layers whose maps are shown beside the input: wide enough to see something, and most networks have five
sizes of maps."""

_LARGE_ENOUGH = 4  # values a side: smaller maps are shown where there are few others
_STRIP = 40  # pixels: the height of a sequence
_TALLEST = 1.4  # a map is drawn at most this many times as high as wide

# Limits of small maps.
_MOST_ROWS = 24  # the first, the last, and others evenly spaced
_MOST_COLUMNS = 24

# Pixels.
_NAMES = 230  # left of small maps
_NUMBER = 11  # font size below a small map
_LARGEST = 84  # a side of a small map, with the gap beside it
_TWO_LINES = 40  # a higher row of small maps has room for a second line of text
_BETWEEN = 12  # between the maps of a column


def chosen_maps(summaries: Sequence[MapSummary]) -> list[MapSummary]:
    """Return the maps that represent the network, in the order of its layers.

    They are the last map of each size; if there are too many sizes, of the largest, the smallest and some between.
    If sizes are few, as in a transformer, the maps farthest from the chosen maps join them.

    Args:
        summaries: Maps of one input, in the order of the layers.
    """
    layers = [summary for summary in summaries if "pad" not in summary.kind.lower()] or list(summaries)
    last = {layer.size: place for place, layer in enumerate(layers)}
    large = {size: place for size, place in last.items() if min(size) >= _LARGE_ENOUGH}
    last = large if len(large) >= MOST_STAGES else last
    sizes = sorted(last, key=lambda size: (-size[0] * size[1], last[size]))
    octaves = [math.log2(height * width) for height, width in sizes]
    chosen = {last[sizes[index]] for index in _with_farthest(octaves, [0, len(sizes) - 1] if sizes else [])}
    return [layers[place] for place in sorted(_with_farthest([layer.row for layer in layers], sorted(chosen)))]


def _with_farthest(values: Sequence[float], chosen: Sequence[int]) -> set[int]:
    """Add positions up to `MOST_STAGES`, each time the one with the value farthest from the chosen values."""
    result = set(chosen)
    while 0 < len(result) < min(MOST_STAGES, len(values)):
        away = [min(abs(value - values[other]) for other in result) for value in values]
        result.add(max(range(len(values)), key=lambda index: (index not in result, away[index])))
    return result


def _palette(scale: ColourScale) -> str:
    return "berlin" if scale.signed else "viridis"


def coloured(values: NDArray[np.float32]) -> Image.Image:
    """Return a map in colours, a pixel for each value; NaN and Inf are magenta."""
    scale = colour_scale(values, clips=False)
    levels = palette_levels(values[None], np.array([scale.top], np.float32), centred=scale.signed)[0]
    return palette_image(levels, _palette(scale)).convert("RGB")


def map_columns(part: Maps) -> list[Block]:
    """Return maps side by side, a layer a column: its name, all channels as one, and the strongest channel below."""
    summaries = part.maps[:MOST_STAGES]
    whole = [_map_cell(summary, part, is_strongest=False) for summary in summaries]
    strongest = [_map_cell(summary, part, is_strongest=True) for summary in summaries if part.with_strongest]
    return [cell_row(whole, MOST_STAGES), *([cell_row(strongest, MOST_STAGES, _BETWEEN)] if strongest else [])]


def _map_cell(summary: MapSummary, part: Maps, *, is_strongest: bool) -> Cell:
    width, is_sequence = column_width(MOST_STAGES), summary.row in part.sequences
    values, name = (summary.combined, part.names[0].format(summary.over_channels))
    heading: list[Line] = []
    if is_strongest:
        values, name = summary.strongest, part.names[1].format(summary.channel, _why(summary))
    else:
        letter = f"{part.letters[summary.row]}  " if summary.row in part.letters else ""
        sides = summary.size[is_sequence or is_strip(summary.size) :]
        size = " x ".join(map(str, (summary.channel_count, *sides)))
        texts = [(f"{letter}{summary.label or '(model)'}", INK), (summary.kind, DIM), (size, DIM)]
        heading = [(fitting(text, SMALL, width), SMALL, colour) for text, colour in texts]
    if is_sequence:
        name = "A-B" if is_strongest else "|A-B|"
    heading.append((name, SMALL, INK))
    scale = colour_scale(values, clips=False)
    bar = colour_levels(_palette(scale), width) if scale.top > 0 else None
    picture = _coloured_at(values, _height(summary.size, width), width)
    return Cell(picture, bar=bar, labels=scale.labels, heading=heading)


def _why(summary: MapSummary) -> str:
    held = "NaN" if np.isnan(summary.strongest).any() else "Inf"
    return "strongest" if np.isfinite(summary.strongest).all() else f"holds {held}"


def is_strip(size: tuple[int, int]) -> bool:
    """Whether a map of this size shows a sequence."""
    return size[0] == 1


def _height(size: tuple[int, int], width: int) -> int:
    if is_strip(size):
        return _STRIP
    return max(12, min(round(width * size[0] / size[1]), round(width * _TALLEST)))


def _coloured_at(values: NDArray[np.float32], height: int, width: int) -> Image.Image:
    """Colour a map and resize it: a small map to squares, a large one by averages."""
    pixels = coloured(values)
    larger = pixels.width <= width and pixels.height <= height
    return pixels.resize((width, height), Image.Resampling.NEAREST if larger else Image.Resampling.BOX)


def small_maps(part: SmallMaps) -> Block:
    """Return maps in rows: a row for each block of a network, a numbered column for each of its heads."""
    rows = [part.rows[place] for place in spread(len(part.rows), _MOST_ROWS)]
    columns = min(_MOST_COLUMNS, max(len(row.maps) for row in rows))
    pitch = min(_LARGEST, (INNER - _NAMES) // columns)
    sizes = [_size(row, pitch - 4) for row in rows]
    heights = [height + line_height(_NUMBER) + 4 for height, _ in sizes]
    skipped = f"   ·   {len(rows)} of them" if len(rows) < len(part.rows) else ""
    head = line_height(NAME) + 2 * line_height(SMALL) + 6

    def draw(image: Image.Image, top: int) -> None:
        pen = ImageDraw.Draw(image)
        write(pen, [(f"{part.title}{skipped}", NAME, INK), (part.legend, SMALL, DIM)], top, MARGIN, INNER)
        at = top + head
        for place in range(columns):
            words = str(place) if place else "head 0" if pitch > _TWO_LINES else "0"
            write_line(pen, words, SMALL, INK, at - line_height(SMALL) - 2, MARGIN + _NAMES + place * pitch)
        for row, size, height in zip(rows, sizes, heights, strict=True):
            lines = [(row.name, SMALL, INK), (fitting(row.where, SMALL, _NAMES - 10), SMALL, DIM)]
            write(pen, lines[: 1 + (size[0] > _TWO_LINES)], at, MARGIN, _NAMES)
            for place, values in enumerate(row.maps[:columns]):
                left = MARGIN + _NAMES + place * pitch
                image.paste(_coloured_at(values, *size), (left, at))
                write_line(pen, figure(float(values.max())), _NUMBER, DIM, at + size[0], left)
                if row.marked[place]:
                    pen.rectangle([left - 2, at - 2, left + size[1] + 1, at + size[0] + 1], outline=RED, width=2)
            at += height

    return Block(head + sum(heights), draw)


def _size(row: MapRow, side: int) -> tuple[int, int]:
    height, width = row.maps[0].shape
    longest = max(height, width)
    return max(1, round(side * height / longest)), max(1, round(side * width / longest))
