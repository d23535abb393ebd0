"""Text in pictures: the letters that the fonts have, in lines as long as there is room."""

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import groupby
from pathlib import Path
from typing import cast
from unicodedata import combining, normalize

from PIL import ImageDraw, ImageFont

Ink = int | tuple[int, int, int]
"""A colour, or an index of a palette."""

# Characters besides ASCII that hookscope's sentences use and Pillow's own font has.
_IN_OWN_FONT = frozenset("·…±°")


def wrap(texts: Sequence[str], size: int, width: int, separator: str) -> list[list[str]]:
    """Return the lines, each in pieces, that `texts` fill; `separator` stands between texts, except where a line ends.

    A text too long for a line, `width` pixels, breaks at spaces outside of 'quoted names', and not between a number and
    its seconds; a word too long for a line breaks after a dot, slash or underscore, else anywhere.
    """
    lines: list[list[str]] = [[]]
    for text in texts:
        whole = text_width([text], size) <= width
        for index, piece in enumerate([text] if whole else _pieces(text, size, width)):
            added = [separator, piece] if separator and lines[-1] and not index else [piece]
            if text_width([*lines[-1], *added], size) <= width:
                lines[-1] += added
                continue
            rest = piece
            while text_width([rest], size) > width:
                end = bisect_right(range(len(rest)), width, key=lambda end: text_width([rest[:end]], size)) - 1
                lines.append([rest[: max(1, end)]])
                rest = rest[max(1, end) :]
            lines.append([rest])
    return [line for line in lines if line]


def _pieces(text: str, size: int, width: int) -> Iterator[str]:
    for word in re.findall(r"(?:(?<!\w)'[^']*'(?!\w)|\S)+(?:(?<=\d) s\b)?\s*|\s+", text):
        fits = text_width([word], size) <= width
        yield from [word] if fits else re.findall(r"[^\s._/]*[\s._/]+|[^\s._/]+", word)


def font(size: int, text: str = "") -> ImageFont.FreeTypeFont:
    """Return the font of pictures: Pillow's own, or DejaVu for letters that it lacks."""
    is_written_whole = all(letter.isascii() or letter in _IN_OWN_FONT for letter in text)
    return _font(size, is_own=is_written_whole)


@lru_cache(maxsize=16)
def _font(size: int, *, is_own: bool) -> ImageFont.FreeTypeFont:
    if is_own:  # given a size, Pillow always returns its own Aileron
        return cast("ImageFont.FreeTypeFont", ImageFont.load_default(size))
    return ImageFont.truetype(_dejavu_file(), size)


def line_height(size: int) -> int:
    """Return the height in pixels of a line of text."""
    return sum(font(size).getmetrics())


def text_width(pieces: Sequence[str], size: int) -> int:
    """Return the width in pixels of text drawn in pieces: letters may reach one pixel out on either side."""
    return sum(_length(piece, size) for piece in pieces) + 2


@lru_cache(maxsize=1024)
def _length(text: str, size: int) -> int:
    return math.ceil(font(size, text).getlength(text))


def write_lines(
    pen: ImageDraw.ImageDraw, lines: Iterable[Sequence[str]], size: int, ink: Ink, top: float, left: float
) -> None:
    """Write lines under each other, each in pieces as `wrap` returns them."""
    for line, pieces in enumerate(lines):
        at, foot = left, top + line * line_height(size) + font(size).getmetrics()[0]
        for drawn, run in groupby(pieces, partial(font, size)):
            words = "".join(run)
            pen.text((at, foot), words, ink, drawn, anchor="ls")
            at += drawn.getlength(words)


def write_line(
    pen: ImageDraw.ImageDraw, text: str, size: int, ink: Ink, top: float, left: float, align: float = 0.0
) -> float:
    """Write a text on one line, and return its right edge; `align` is the share of its width left of `left`."""
    length = font(size, text).getlength(text)
    left -= align * length
    write_lines(pen, [[text]], size, ink, top, left)
    return left + length


def drawable(text: str, limit: int) -> str:
    """Return `text` in one line of Latin, Greek and Cyrillic letters, others escaped, the middle left out if long."""
    composed = normalize("NFC", text)
    escaped = "".join(c if _has_glyph(c) else c.encode("unicode_escape").decode() for c in composed)
    if len(escaped) <= limit:
        return escaped
    half = (limit - 5) // 2
    return f"{escaped[:half]} ... {escaped[-half:]}"


def _has_glyph(letter: str) -> bool:
    """Tell whether the fonts have a letter that does not combine with others; DejaVu is used up to Cyrillic."""
    if letter.isascii() or letter in _IN_OWN_FONT:
        return letter.isprintable()
    return letter.isprintable() and letter < "\u0530" and not combining(letter) and ord(letter) in _in_dejavu()


@lru_cache(maxsize=1)
def _in_dejavu() -> frozenset[int]:
    from matplotlib.ft2font import FT2Font  # noqa: PLC0415 - as below

    return frozenset(FT2Font(_dejavu_file()).get_charmap())


def _dejavu_file() -> str:
    from matplotlib import get_data_path  # noqa: PLC0415 - loads what most pictures do without

    return str(Path(get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"))
