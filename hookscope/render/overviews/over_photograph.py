"""Pictures beside each other on a sheet, each with lines of text and a colour bar: a photograph, and maps over it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from hookscope.render.lettering import drawable, font, line_height
from hookscope.render.overlays import outside_dimmed, seen_part
from hookscope.render.overviews.sheet import (
    DIM,
    GAP,
    INK,
    INNER,
    LINE,
    MARGIN,
    NAME,
    PAPER,
    TEXT,
    WIDTH,
    Block,
    Line,
    text_height,
    write,
)
from hookscope.results.inputs import InputRecord, Photograph
from hookscope.text import input_shape_text

BAR = 14
"""Pixels that a colour bar is high."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A picture and the lines below it; a colour bar last, with its labels."""

    pixels: NDArray[np.uint8]
    lines: Sequence[Line]
    bar: NDArray[np.uint8] | None = None
    labels: Sequence[str] = ()


def input_cell(record: InputRecord, photograph: Photograph) -> Cell:
    """Return the photograph of an input, with its name and sizes, and a frame around what the network sees."""
    pixels = outside_dimmed(photograph)
    if (rows_columns := seen_part(photograph.region)) != (slice(0, len(pixels)), slice(0, pixels.shape[1])):
        outline(pixels, *rows_columns)
    before = f"{record.size[0]} x {record.size[1]} pixels" if record.size else "a tensor"
    seen = f"{before}, to the network as {input_shape_text(record.shape, ' x ')}"
    return Cell(pixels, [(PurePath(record.name).name or record.name, NAME, INK), (seen, TEXT, DIM)])


def outline(pixels: NDArray[np.uint8], rows: slice, columns: slice) -> None:
    """Frame a part of a picture."""
    part = pixels[rows, columns]
    for edge in (part[:1], part[-1:], part[:, :1], part[:, -1:]):
        edge[:] = LINE


def put_together(
    heading: Sequence[Line],
    rows: Sequence[Sequence[Cell | None]],
    columns: int,
    footing: Sequence[Line],
    below: Sequence[Block] = (),
) -> Image.Image:
    """Draw a heading, rows of cells, blocks below them and a footing on a sheet."""
    pitch = (INNER + GAP) // columns
    width = pitch - GAP
    heights = [max(_cell_height(cell, width) for cell in row if cell is not None) for row in rows]
    total = 2 * MARGIN + sum(text_height(*line, INNER) for line in (*heading, *footing))
    total += sum(heights) + len(rows) * GAP + (GAP if footing else 0)
    total += sum(block.height + GAP for block in below)
    image = Image.new("RGB", (WIDTH, total), PAPER)
    pen = ImageDraw.Draw(image)
    top = write(pen, heading, MARGIN, MARGIN, INNER) + GAP
    for row, height in zip(rows, heights, strict=True):
        for place, cell in enumerate(row):
            if cell is not None:
                _draw_cell(image, pen, cell, top, MARGIN + place * pitch, width)
        top += height + GAP
    for block in below:
        block.draw(image, top)
        top += block.height + GAP
    write(pen, footing, top, MARGIN, INNER)
    return image


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
