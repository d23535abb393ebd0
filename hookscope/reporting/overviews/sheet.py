"""The sheet that overviews are drawn on: 1,200 pixels wide, light on a dark slate that suits white and black pages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from PIL import Image, ImageDraw

from hookscope.reporting.lettering import baseline, drawable, font, line_height, text_width, wrap

# Pixels: read without a magnifier on a page 1,200 wide.
WIDTH, MARGIN, GAP = 1200, 28, 24
INNER = WIDTH - 2 * MARGIN
TITLE, NAME, TEXT, SMALL = 26, 20, 16, 14

Colour = tuple[int, int, int]
INK, DIM, PAPER, LINE = (236, 238, 241), (172, 179, 188), (36, 40, 46), (120, 127, 136)
RED, AMBER, GREEN = (255, 142, 126), (245, 190, 75), (112, 207, 142)

Line = tuple[str, int, Colour]
"""Text, size and colour."""

_LONGEST_TEXT = 400  # characters

# Characters in hookscope's sentences that the font lacks.
_SPELLED = str.maketrans({"‖": "||", "×": "x", "≥": ">=", "≤": "<=", "Δ": "A-B", "→": "->"})


@dataclass(frozen=True, slots=True)
class Block:
    """A part of the sheet, `height` pixels high; `draw` gets the sheet and the part's top edge."""

    height: int
    draw: Callable[[Image.Image, int], None]


def draw_sheet(blocks: Sequence[Block]) -> Image.Image:
    """Draw blocks under each other, a gap between them."""
    shown = [block for block in blocks if block.height]
    height = 2 * MARGIN + sum(block.height for block in shown) + GAP * max(0, len(shown) - 1)
    image = Image.new("RGB", (WIDTH, height), PAPER)
    top = MARGIN
    for block in shown:
        block.draw(image, top)
        top += block.height + GAP
    return image


def text_block(lines: Sequence[Line], picture: Image.Image | None = None) -> Block:
    """Return lines of text as a block, with a picture on their left if there is one."""
    left = picture.width + 20 if picture else 0

    def draw(image: Image.Image, top: int) -> None:
        if picture:
            framed(image, picture, MARGIN, top)
        write(ImageDraw.Draw(image), lines, top, MARGIN + left, INNER - left)

    height = sum(text_height(*line, INNER - left) for line in lines)
    return Block(max(height, picture.height if picture else 0), draw)


def framed(image: Image.Image, picture: Image.Image, left: int, top: int) -> None:
    """Put a picture on the sheet, its edge drawn over by a line."""
    image.paste(picture, (left, top))
    box = [left, top, left + picture.width - 1, top + picture.height - 1]
    ImageDraw.Draw(image).rectangle(box, outline=LINE)


def in_font(text: str, limit: int = _LONGEST_TEXT) -> str:
    """Return a text in letters that the font has, the middle left out if it is long."""
    return drawable(text.translate(_SPELLED), limit)


def text_height(text: str, size: int, _colour: Colour, width: int) -> int:
    """Return how high a line of text is, broken where it must."""
    return len(wrap([in_font(text)], size, width, "")) * line_height(size)


def write(pen: ImageDraw.ImageDraw, lines: Sequence[Line], top: int, left: int, width: int) -> int:
    """Write lines of text, each broken where it must; return where the next one would begin."""
    for text, size, colour in lines:
        for pieces in wrap([in_font(text)], size, width, ""):
            at: float = left
            for drawn, run in groupby(pieces, partial(font, size)):
                words = "".join(run)
                pen.text((at, top + baseline(size) - drawn.getmetrics()[0]), words, colour, drawn)
                at += drawn.getlength(words)
            top += line_height(size)
    return top


def fitting(text: str, size: int, width: int) -> str:
    """Return text that `write` writes on one line of a width; "..." stands for the middle of a longer one."""
    shown = whole = in_font(text)
    for kept in range(len(whole) - 1, 3, -1):
        if text_width([shown], size) <= width:
            break
        shown = f"{whole[: kept // 3]}...{whole[len(whole) - (kept - kept // 3) :]}"
    return shown
