"""Small maps in rows in a picture: a row for each block of a network, a column for each of its heads."""

import numpy as np
from PIL import Image, ImageDraw

from hookscope.reporting.document import MapRow, SmallMaps
from hookscope.reporting.lettering import line_height
from hookscope.reporting.overviews.maps import coloured
from hookscope.reporting.overviews.sheet import DIM, INK, INNER, MARGIN, NAME, RED, SMALL, Block, fitting, write

_MOST_ROWS = 24  # that are shown: the first, the last, and evenly between
_MOST_COLUMNS = 24

# Pixels.
_NAMES = 150
_LARGEST = 84
_TWO_LINES = 40  # a row drawn higher has room for where its maps are from


def small_maps(part: SmallMaps) -> Block:
    """Return the maps as a block."""
    rows = [part.rows[place] for place in spread(len(part.rows), _MOST_ROWS)]
    columns = min(_MOST_COLUMNS, max(len(row.maps) for row in rows))
    pitch = min(_LARGEST, (INNER - _NAMES) // columns)
    sizes = [_size(row, pitch - 4) for row in rows]
    heights = [max(height, line_height(SMALL)) + 4 for height, _ in sizes]
    skipped = f"   ·   {len(rows)} of them" if len(rows) < len(part.rows) else ""
    head = line_height(NAME) + line_height(SMALL) + 6

    def draw(image: Image.Image, top: int) -> None:
        pen = ImageDraw.Draw(image)
        write(pen, [(f"{part.title}{skipped}", NAME, INK), (part.legend, SMALL, DIM)], top, MARGIN, INNER)
        at = top + head
        for row, size, height in zip(rows, sizes, heights, strict=True):
            lines = [(row.name, SMALL, INK), (fitting(row.where, SMALL, _NAMES - 10), SMALL, DIM)]
            write(pen, lines[: 1 + (size[0] > _TWO_LINES)], at, MARGIN, _NAMES)
            for place, values in enumerate(row.maps[:columns]):
                left = MARGIN + _NAMES + place * pitch
                pixels = Image.fromarray(coloured(values))
                larger = pixels.width <= size[1] and pixels.height <= size[0]
                way = Image.Resampling.NEAREST if larger else Image.Resampling.BOX
                image.paste(pixels.resize(size[::-1], way), (left, at))
                if row.marked[place]:
                    pen.rectangle([left - 2, at - 2, left + size[1] + 1, at + size[0] + 1], outline=RED, width=2)
            at += height

    return Block(head + sum(heights), draw)


def spread(count: int, most: int) -> list[int]:
    """Return positions spread evenly over so many, the first and the last among them."""
    return [*dict.fromkeys(np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist())]


def _size(row: MapRow, side: int) -> tuple[int, int]:
    """Return height and width at which the maps of a row are drawn."""
    height, width = row.maps[0].shape
    longest = max(height, width)
    return max(1, round(side * height / longest)), max(1, round(side * width / longest))
