"""The sheet that overviews are drawn on: 1,200 pixels wide, light on a dark slate that suits white and black pages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from hookscope.reporting.lettering import Ink, drawable, line_height, text_width, wrap, write_line, write_lines

# Pixels: read without a magnifier on a page 1,200 wide.
WIDTH, MARGIN, GAP = 1200, 28, 24
INNER = WIDTH - 2 * MARGIN
TITLE, NAME, TEXT, SMALL = 26, 20, 16, 14

Colour = tuple[int, int, int]
INK, DIM, PAPER, LINE = (236, 238, 241), (172, 179, 188), (36, 40, 46), (120, 127, 136)
RED, AMBER, GREEN = (255, 142, 126), (245, 190, 75), (112, 207, 142)

Line = tuple[str, int, Colour]
"""Text, size and colour."""

BAR = 10  # pixels that a colour bar is high
SCALE = BAR + 1 + line_height(SMALL)
"""Pixels that a colour bar and its labels are high."""

_LONGEST_TEXT = 400  # characters
_BETWEEN = 8  # pixels between the parts of a cell

# Characters in hookscope's sentences that the font lacks.
_SPELLED = str.maketrans({"‖": "||", "×": "x", "≥": ">=", "≤": "<=", "Δ": "A-B", "→": "->"})


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a sheet, `height` pixels high; `draw` gets the sheet and the part's top edge.

    `above` is the room between it and the part before it, in pixels.
    """

    height: int
    draw: Callable[[Image.Image, int], None]
    above: int = GAP


def draw_sheet(
    blocks: Sequence[Block], width: int = WIDTH, margin: int = MARGIN, mode: str = "RGB", paper: Ink = PAPER
) -> Image.Image:
    """Draw blocks under each other; blocks without a height are left out."""
    shown = [block for block in blocks if block.height]
    height = 2 * margin + sum(block.above + block.height for block in shown) - sum(block.above for block in shown[:1])
    image = Image.new(mode, (width, height), paper)
    top = margin
    for place, block in enumerate(shown):
        top += block.above if place else 0
        block.draw(image, top)
        top += block.height
    return image


def text_block(lines: Sequence[Line], picture: Image.Image | None = None) -> Block:
    """Return lines of text as a block, with a framed picture on their left if there is one."""
    left = picture.width + 20 if picture else 0

    def draw(image: Image.Image, top: int) -> None:
        pen = ImageDraw.Draw(image)
        if picture:
            image.paste(picture, (MARGIN, top))
            pen.rectangle([MARGIN, top, MARGIN + picture.width - 1, top + picture.height - 1], outline=LINE)
        write(pen, lines, top, MARGIN + left, INNER - left)

    height = sum(text_height(*line, INNER - left) for line in lines)
    return Block(max(height, picture.height if picture else 0), draw)


def in_font(text: str, limit: int = _LONGEST_TEXT) -> str:
    """Return a text in letters that the font has, the middle left out if it is long."""
    return drawable(text.translate(_SPELLED), limit)


def text_height(text: str, size: int, _colour: Colour, width: int) -> int:
    """Return how high a line of text is, broken as `write` does."""
    return len(wrap([in_font(text)], size, width, "")) * line_height(size)


def write(pen: ImageDraw.ImageDraw, lines: Sequence[Line], top: int, left: int, width: int) -> None:
    """Write lines of text, each broken where it must."""
    for text, size, colour in lines:
        pieces = wrap([in_font(text)], size, width, "")
        write_lines(pen, pieces, size, colour, top, left)
        top += len(pieces) * line_height(size)


def fitting(text: str, size: int, width: int) -> str:
    """Return text that fits one line of `width` pixels; "..." replaces the middle of a longer text."""
    shown = whole = in_font(text)
    for kept in range(len(whole) - 1, 3, -1):
        if text_width([shown], size) <= width:
            break
        shown = f"{whole[: kept // 3]}...{whole[len(whole) - (kept - kept // 3) :]}"
    return shown


def draw_scale(
    image: Image.Image, colours: NDArray[np.uint8] | None, labels: Sequence[str], top: int, left: int, width: int
) -> None:
    """Draw a colour bar, (length, 3), unless it is None, and labels below it, from one end to the other."""
    pen = ImageDraw.Draw(image)
    if colours is not None:
        bar = Image.fromarray(np.ascontiguousarray(colours[None]))
        image.paste(bar.resize((width, BAR), Image.Resampling.NEAREST), (left, top))
        pen.rectangle([left, top, left + width - 1, top + BAR - 1], outline=LINE)
    for place, label in enumerate(labels):
        share = place / max(1, len(labels) - 1)
        write_line(pen, label, SMALL, DIM, top + BAR + 1, left + share * width, share)


def column_width(columns: int) -> int:
    """Return the width of a column, if there are `columns`."""
    return (INNER + GAP) // columns - GAP


@dataclass(frozen=True, slots=True)
class Cell:
    """A picture, if there is one, with lines above and below it; a colour bar last, (length, 3), with its labels."""

    picture: Image.Image | None
    lines: Sequence[Line] = ()
    bar: NDArray[np.uint8] | None = None
    labels: Sequence[str] = ()
    heading: Sequence[Line] = ()

    def tops(self, width: int) -> list[int]:
        """Return where heading, picture, lines and colour bar begin in a column of `width`, and where the cell ends."""
        heading, lines = (sum(text_height(*line, width) for line in part) for part in (self.heading, self.lines))
        heights = (heading, self.picture.height if self.picture else 0, lines, SCALE * bool(self.labels))
        return [0, *accumulate(height + _BETWEEN * bool(height) for height in heights)]


def cell_row(cells: Sequence[Cell | None], columns: int, above: int = GAP) -> Block:
    """Return cells side by side, in columns; None leaves a column empty."""
    width = column_width(columns)

    def draw(image: Image.Image, top: int) -> None:
        pen = ImageDraw.Draw(image)
        for place, cell in enumerate(cells):
            if cell is None:
                continue
            left = MARGIN + place * (width + GAP)
            heading, picture, lines, scale, _ = (top + begin for begin in cell.tops(width))
            write(pen, cell.heading, heading, left, width)
            if cell.picture:
                image.paste(cell.picture, (left, picture))
            write(pen, cell.lines, lines, left, width)
            if cell.labels:
                draw_scale(image, cell.bar, cell.labels, scale, left, width if cell.bar is None else len(cell.bar))

    return Block(max(cell.tops(width)[-1] for cell in cells if cell is not None) - _BETWEEN, draw, above)
