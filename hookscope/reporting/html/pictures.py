"""Grids as small pictures for a page: each map pixel once, without caption and gaps, which the page draws itself."""

import base64
import io
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image

from hookscope.errors import InputError
from hookscope.reporting.palettes import BACKGROUND, LEVEL_COUNT
from hookscope.results.grids import Grid
from hookscope.text import counted, printable

Shown = dict[str, Any]
"""What a template draws of a part, or of a part of it."""

# Bytes of all pictures together, before base64 makes 4 of 3: a page of 161 layers stays under 6 MB.
BUDGET = 3_500_000

# Limit for a picture that is read: a grid has at most 64 million pixels, and a caption.
_MAX_PIXELS = 100_000_000
_STRIP_GAP = 3


@dataclass(frozen=True, slots=True)
class Fidelity:
    """How pictures are made smaller."""

    step: int = 1  # between the colours that are kept; zero, in the middle or at the end, is always kept
    side: int = 1 << 30  # pixels; longer maps are averaged over squares of 2 × 2, 3 × 3 … pixels
    channels: int = 1 << 30  # the first ones

    @property
    def sentence(self) -> str:
        """A remark for the reader; "" if nothing was given up."""
        parts = []
        if self.step > 1:
            parts.append(f"{(LEVEL_COUNT - 1) // self.step + 1} of {LEVEL_COUNT} colours")
        if self.side < 1 << 30:
            parts.append(f"averages of squares where a map is longer than {self.side} pixels")
        if self.channels < 1 << 30:
            parts.append(f"the first {self.channels} channels")
        if not parts:
            return ""
        return f"To keep this file small, feature maps have {', '.join(parts)}; the run's own grids have all."


# Tried in this order until all pictures fit: indistinguishable colours go first, then what does not fit on a screen.
LADDER = (
    Fidelity(),
    Fidelity(4),
    Fidelity(4, 56),
    Fidelity(4, 56, 256),
    Fidelity(4, 56, 64),
    Fidelity(8, 56, 64),
    Fidelity(8, 28, 64),
    Fidelity(16, 28, 64),
    Fidelity(16, 14, 64),
    Fidelity(16, 7, 16),
    Fidelity(16, 7, 4),
)


@dataclass(frozen=True, slots=True)
class Picture:
    """The maps of one activation for one input, tiles touching each other. Sizes are of a tile, in pixels."""

    png: bytes  # with a palette and a transparent background
    columns: int
    count: int
    height: int
    width: int  # frames lie side by side in it
    frames: int
    colours: str  # a data URI of a line with the colour map from low to high
    caption: tuple[str, ...]
    bar: tuple[str, ...]  # labels under the colour bar

    @property
    def data(self) -> Markup:
        """The file in base64."""
        return Markup(base64.b64encode(self.png).decode("ascii"))  # noqa: S704 - letters, digits, + / =


def shrink_all(
    grids: Sequence[Grid], read: Callable[[str], bytes], budget: int = BUDGET
) -> tuple[list[Picture | None], Fidelity]:
    """Make grids small enough for one page: at most `budget` bytes together. `read` is called from several threads.

    Return the pictures, None for a grid without tiles or room, and how they were made smaller. An InputError is raised
    if a file is not a grid.
    """
    pictures: list[Picture | None] = []
    for fidelity in LADDER:
        pictures, room = [], budget
        # Pillow releases the interpreter lock while it compresses and decompresses.
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            for picture in pool.map(lambda grid, less=fidelity: shrink(read(grid.path), grid, less), grids):
                room -= len(picture.png) if picture else 0
                if room < 0:
                    pool.shutdown(wait=True, cancel_futures=True)
                    break
                pictures.append(picture)
        if len(pictures) == len(grids):
            break
    return pictures + [None] * (len(grids) - len(pictures)), fidelity


def shrink(png: bytes, grid: Grid, fidelity: Fidelity) -> Picture | None:
    """Cut the maps out of the file of a grid; None without maps; raise an InputError if it is not a grid."""
    canvas, palette = _read_grid(png, grid)
    tiles = grid.tiles
    if tiles is None:
        return None
    tile_height = tiles.height * tiles.down
    tile_width = tiles.frames * (tiles.width * tiles.across + 1) - 1
    stride = max(1, -(-max(tiles.height, tiles.width) // fidelity.side))
    downs = np.arange(tiles.height) * tiles.down
    acrosses = np.add.outer(
        np.arange(tiles.frames) * (tiles.width * tiles.across + 1), np.arange(tiles.width) * tiles.across
    ).ravel()
    count = min(tiles.count, fidelity.channels)
    rows = -(-count // tiles.columns)
    tops = tiles.top + np.arange(rows) * (tile_height + tiles.gap)
    lefts = tiles.left + np.arange(tiles.columns) * (tile_width + tiles.gap)
    maps = canvas[np.ix_(np.add.outer(tops, downs).ravel(), np.add.outer(lefts, acrosses).ravel())]
    if stride > 1:
        maps = _averaged(maps, tiles.height, tiles.width, stride)
    if fidelity.step > 1:  # colours outside the colour map stay
        table = np.arange(256)
        table[:LEVEL_COUNT] = (table[:LEVEL_COUNT] + fidelity.step // 2) // fidelity.step * fidelity.step
        maps = table.clip(0, 255).astype(np.uint8)[maps]
    return Picture(
        _encode(maps, palette),
        *(tiles.columns, count, -(-tiles.height // stride), -(-tiles.width // stride) * tiles.frames, tiles.frames),
        png_uri(Image.fromarray(np.frombuffer(palette, np.uint8).reshape(1, -1, 3)[:, :LEVEL_COUNT:8])),
        (*grid.caption, *_left_out(grid, tiles.count, stride, count)),
        grid.bar,
    )


def _averaged(maps: NDArray[np.uint8], height: int, width: int, side: int) -> NDArray[np.uint8]:
    """Average squares of `side` pixels within each map; maps touch each other. The last squares may be smaller.

    A colour's index is linear in the value, so the mean of indices is the index of the mean value. A pixel outside the
    colour map, such as NaN, colours its whole square.
    """
    lines = []
    for line in np.split(maps, len(maps) // height):
        tiles = np.split(line, line.shape[1] // width, axis=1)
        lines.append(np.concatenate([_smaller(tile, side) for tile in tiles], axis=1))
    return np.concatenate(lines)


def _smaller(tile: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    small = np.array(Image.fromarray(tile).reduce(side))
    down, across = np.nonzero(tile >= LEVEL_COUNT)
    small[down // side, across // side] = tile[down, across]
    return small


def first_maps(png: bytes, grid: Grid, count: int, side: int) -> tuple[str, int, int, str]:
    """Return the first maps of a grid side by side as a data URI, how many they are, their width together, `colours`.

    Their longer sides have about `side` pixels, and there is a gap between them. An InputError is raised if the file is
    not a grid.
    """
    picture = shrink(png, grid, Fidelity(side=side, channels=1))
    if picture is None:
        return "", 0, 0, ""
    count = min(count, picture.columns, grid.tiles.count if grid.tiles else 0)
    scale = max(1, side // max(picture.height, picture.width))
    height, width = picture.height * scale, picture.width * scale
    strip = Image.new("P", (count * (width + _STRIP_GAP) - _STRIP_GAP, height), BACKGROUND)
    with Image.open(io.BytesIO(picture.png)) as row:
        strip.putpalette(row.getpalette() or ())
        for index in range(count):
            box = (index * picture.width, 0, (index + 1) * picture.width, picture.height)
            strip.paste(row.resize((width, height), Image.Resampling.NEAREST, box), (index * (width + _STRIP_GAP), 0))
    return png_uri(strip, transparency=BACKGROUND), count, strip.width, picture.colours


def _left_out(grid: Grid, channels: int, stride: int, count: int) -> Iterator[str]:
    if grid.extra_token_count:
        apart = counted(grid.extra_token_count, "token")
        yield f"not here but in the run's own grid: {apart} apart, such as a class token"
    if stride > 1:
        yield f"here averages of {stride} × {stride} pixels"
    if count < channels:
        yield f"here the first {counted(count, 'channel')}"


def thumbnail_uri(content: bytes, name: str, side: int) -> str:
    """Return a picture as a data URI, at most `side` pixels a side; InputError if it is neither PNG nor JPEG."""
    small = opened_picture(content, name)
    small.thumbnail((side, side), Image.Resampling.LANCZOS)
    return jpeg_uri(small)


def opened_picture(content: bytes, name: str) -> Image.Image:
    """Return a PNG or JPEG file of a run as RGB; raise an InputError if it is neither."""
    with _opened(content, name) as picture:
        return picture.convert("RGB")


def jpeg_uri(picture: Image.Image) -> str:
    """Return a photograph as a data URI."""
    return _uri(picture, "jpeg", quality=90)


def png_uri(picture: Image.Image, **options: int | bytes) -> str:
    """Return a drawing as a data URI."""
    return _uri(picture, "png", optimize=True, **options)


def _uri(picture: Image.Image, kind: str, **options: int | bytes) -> str:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return data_uri(file.getvalue(), kind)


def data_uri(content: bytes, kind: str = "png") -> str:
    """Return the file of a picture as a data URI."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode('ascii')}"


def _read_grid(png: bytes, grid: Grid) -> tuple[NDArray[np.uint8], bytes]:
    with _opened(png, grid.path) as picture:
        canvas = np.asarray(picture) if picture.mode == "P" else None
        palette = bytes(picture.getpalette() or ())
    if canvas is None or not (grid.tiles is None or grid.tiles.fits(*canvas.shape)):
        raise InputError(
            f"Cannot read '{printable(grid.path)}': its tiles are not where run.json places them. "
            "Run the command that made it again."
        )
    return canvas, palette.ljust(768, b"\0")


@contextmanager
def _opened(content: bytes, name: str) -> Iterator[Image.Image]:
    """Open a PNG or JPEG file; raise an InputError if it is damaged or not a picture."""
    try:
        with Image.open(io.BytesIO(content), formats=["PNG", "JPEG"]) as picture:
            if picture.width * picture.height > _MAX_PIXELS:
                raise ValueError("too many pixels")  # noqa: TRY301 - reported like any other fault
            yield picture
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError(
            f"Cannot read '{printable(name)}': it is no picture of a run. Run the command that made it again."
        ) from error


def _encode(maps: NDArray[np.uint8], palette: bytes) -> bytes:
    image = Image.fromarray(maps)
    image.putpalette(palette)
    file = io.BytesIO()
    # The background fills a last row of tiles; transparent, it suits a light page and a dark one. In feature maps,
    # little but zeros repeats: compressing runs alone takes a tenth of the time, and about as much room.
    transparency = bytes([255] * BACKGROUND + [0])
    image.save(file, "PNG", compress_level=6, compress_type=zlib.Z_RLE, transparency=transparency)
    return file.getvalue()
