"""Draw feature maps: one picture per activation and input, every channel a tile, with a caption and a colour bar.

The whole canvas is one array of palette indices, put together by array operations and handed to Pillow once.
"""

import io
import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from hookscope.render.palettes import colour_levels, distinct_colour, is_diverging
from hookscope.render.tiles import KEY, Tiles, tiles_text
from hookscope.results.activations import FeatureMaps
from hookscope.text import slug

Indices = NDArray[np.uint8]  # palette indices, (height, width)

# The palette: an odd number of colours, so that zero of a signed map is exactly the middle one; then what no value has.
LEVEL_COUNT = 241
NON_FINITE = 241
ALL_ZERO = 242
BACKGROUND = 243
TEXT = 255  # the entries from BACKGROUND to TEXT fade from one to the other, for smooth letters

_BACKGROUND_COLOUR = (255, 255, 255)
_TEXT_COLOUR = (24, 24, 24)
_NON_FINITE_COLOURS = {
    "magenta": (255, 0, 255),
    "lime": (0, 255, 0),
    "red": (255, 0, 0),
    "cyan": (0, 255, 255),
    "yellow": (255, 255, 0),
    "blue": (0, 0, 255),
    "white": (255, 255, 255),
}
_ALL_ZERO_COLOURS = {
    "grey": (120, 124, 130),
    "steel blue": (70, 120, 200),
    "olive": (128, 128, 0),
    "purple": (110, 60, 180),
    "teal": (0, 128, 128),
    "beige": (225, 215, 180),
    "brown": (120, 70, 20),
}

# Sizes in pixels, our choice: a grid fills a page 960 wide where it can, the shorter side of a tile is never under 32
# (so a 7x7 map is readable), and no tile is enlarged beyond 160.
_PAGE_WIDTH = 960
_TILE_MIN = 32
_TILE_MAX = 160
_CELL_MIN = 4
_CELL_MAX = 32
_CONTENT_MIN = 480
_MARGIN = 14
_BAR_HEIGHT = 10
_TITLE_SIZE = 20
_TEXT_SIZE = 13
_NUMBER_SIZE = 11
_DIM = 0.75  # contrast of lesser text

# A grid stays within what viewers open and what Pillow reads back without its decompression-bomb warning (89 million).
MAX_SIDE = 16_384
MAX_PIXELS = 64_000_000
_MAX_TILES = 65_536
_MAX_CELLS = 1_048_576
_MAX_FRAMES = 4_096
_MAX_EXTRA_TOKENS = 16
_TITLE_LIMIT = 300  # characters
_REMARK_LIMIT = 200  # characters


@dataclass(frozen=True, slots=True)
class _Extent:
    """What the values of each channel span, non-finite ones left out.

    Attributes:
        magnitudes: Largest magnitude per channel, 0 where no value is finite, (C,).
        all_zero: Channels in which every value is exactly zero, (C,).
        lowest: Smallest value of all; +inf where no value is finite.
        highest: Largest value of all; -inf where no value is finite.
        non_finite_count: Values that are NaN or Inf.
    """

    magnitudes: NDArray[np.float32]
    all_zero: NDArray[np.bool_]
    lowest: float
    highest: float
    non_finite_count: int


@dataclass(frozen=True, slots=True)
class _Layout:
    """How the tiles of (C, T, H, W) lie on the canvas.

    Attributes:
        columns: Tiles beside each other.
        down: Canvas pixels per map pixel along H.
        across: Canvas pixels per map pixel along W.
        gap: Background pixels between tiles. The frames inside a tile are one apart.
        stride: Map pixels averaged into one, along H and along W; 1 draws each.
    """

    columns: int
    down: int
    across: int
    gap: int
    stride: int = 1

    def pitch(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return height and width in pixels of one tile with its gap."""
        _, frames, height, width = shape
        tile_height = -(-height // self.stride) * self.down
        tile_width = frames * (-(-width // self.stride) * self.across + 1) - 1
        return tile_height + self.gap, tile_width + self.gap

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Tell whether the whole grid keeps to the limits."""
        pitch_height, pitch_width = self.pitch(shape)
        height, width = -(-shape[0] // self.columns) * pitch_height, self.columns * pitch_width
        return max(height, width) <= MAX_SIDE and height * width <= MAX_PIXELS


def draw_grid(
    maps: FeatureMaps, *, cmap: str = "auto", scale: Literal["channel", "layer"] = "channel", input_name: str = ""
) -> Image.Image:
    """Draw one activation for one input.

    The colour map spans 0 to the largest value when no value is negative; otherwise -m to m, m being the largest
    magnitude, so that zero has the middle colour. Every range holds zero instead of beginning at the smallest value:
    "no response" then looks the same in every channel, and a nearly constant channel is not blown up into noise. Where
    each channel has one value only, a range of its own would say nothing, and one range serves them all.

    A grid is at most 16,384 pixels a side and 64 million in all, without its caption. Larger maps are averaged over
    square blocks, and the caption says so.

    Args:
        maps: Any arrangement. Frames lie side by side in their channel's tile; a vector is a strip of cells, wrapped.
        cmap: A matplotlib colour map. "auto" is viridis, or berlin (perceptually uniform too, dark at zero) where a
            value is negative. A diverging map always has zero in the middle.
        scale: "channel": each channel, and each token apart from the grid, by its own range; "layer": one range.
        input_name: For the caption.

    Returns:
        A palette image, mode "P": the colour map at indices 0-240, then one index each for non-finite values and
        all-zero channels, then background to text. Where its tiles lie is in `info`, as `tiles_text` writes it.

    Raises:
        UsageError: If `cmap` is unknown.
    """
    channels, extra = _channels(maps), _extra_tokens(maps)  # (C, T, H, W), (K, C)
    single = channels[:1].size == 1
    one_range = single or len(channels) == 1 or scale == "layer"
    extent, extra_extent = _extent(channels), _extent(extra)
    lowest, highest = min(extent.lowest, extra_extent.lowest), max(extent.highest, extra_extent.highest)
    largest = max(0.0, highest, -lowest) if lowest <= highest else 0.0
    name = ("berlin" if lowest < 0 else "viridis") if cmap == "auto" else cmap
    palette, non_finite_colour, all_zero_colour = _palette(name)
    centred = lowest < 0 or is_diverging(name)
    layout = _plan(channels.shape, single=single)

    def levels(values: NDArray[np.float32], own: _Extent) -> NDArray[np.uint8]:
        return _levels(values, np.full_like(own.magnitudes, largest) if one_range else own.magnitudes, centred=centred)

    pictures: list[tuple[int, Indices]] = []  # background pixels above it, and a part of the picture
    width = _CONTENT_MIN
    if channels.size:
        tiles = levels(_average(channels, layout.stride) if layout.stride > 1 else channels, extent)
        if not single:
            tiles[extent.all_zero] = ALL_ZERO
        composed = _compose(tiles, layout)
        grid = _numbered(composed, len(tiles), layout.columns, layout.pitch(channels.shape)[0])
        left = grid.shape[1] - composed.shape[1]
        width = max(width, grid.shape[1])
        pictures.append((12, grid))
    if maps.extra_tokens is not None and extra.size:
        pictures += _strips(levels(extra, extra_extent), width, len(maps.extra_tokens))

    remarks = [
        maps.kind,
        input_name,
        f"shape {' x '.join(map(str, maps.shape)) or 'scalar'}",
        _count_remark(maps, channels.shape, layout),
        f"values {lowest:.4g} to {highest:.4g}" if lowest <= highest else "no finite values",
        "one scale for all" if one_range else "each channel scaled to its own maximum",
        f"each pixel the mean of {layout.stride} x {layout.stride} values" if layout.stride > 1 else "",
        maps.note,
    ]
    remarks = [_printable(remark, _REMARK_LIMIT) for remark in remarks if remark]
    title = _paragraph([_printable(maps.label, _TITLE_LIMIT)], _TITLE_SIZE, width)
    caption = _paragraph(remarks, _TEXT_SIZE, width, separator="   ·   ", strength=_DIM)
    marks = []
    if count := extent.non_finite_count + extra_extent.non_finite_count:
        marks.append((NON_FINITE, f"non-finite values in {non_finite_colour}: {count}"))
    if not single and (count := int(extent.all_zero.sum())):
        marks.append((ALL_ZERO, f"all-zero channels in {all_zero_colour}: {count}"))
    bar = _bar_labels(largest, centred=centred, one_range=one_range)
    legend = _legend(bar, marks, width)

    image = Image.fromarray(_stack([(0, title), (3, caption), *pictures, (12, legend)]))
    image.putpalette(palette)  # turns 8-bit grey into palette indices, values unchanged
    if channels.size:
        top = title.shape[0] + 3 + caption.shape[0] + pictures[0][0]
        said = (*remarks, *(text for _, text in marks))
        image.info[KEY] = tiles_text(_tiles(layout, tiles.shape, _MARGIN + left, _MARGIN + top, said, bar))
    return image


def check_cmap(cmap: str) -> None:
    """Raise the UsageError that `draw_grid` would raise, before a model is run for nothing."""
    if cmap != "auto":
        colour_levels(cmap, LEVEL_COUNT)


def encode_png(image: Image.Image) -> bytes:
    """Return the PNG file of a grid. Safe to call from several threads; Pillow lets them run side by side."""
    file = io.BytesIO()
    # Level 1: higher ones take up to three times as long for files 1 to 4 % smaller (36 grids of resnet34).
    texts = PngInfo()
    if KEY in image.info:
        texts.add_text(KEY, image.info[KEY])
    image.save(file, "PNG", compress_level=1, pnginfo=texts)
    return file.getvalue()


def grid_name(maps: FeatureMaps, total: int, *, input_count: int = 1) -> str:
    """Return the file name of a grid: "007-layer1.0.conv2.png", with several inputs "007-layer1.0.conv2-input2.png".

    Both numbers count from 0 and have leading zeros, so that names sort in execution order, then by input.

    Args:
        maps: What is drawn.
        total: Rows in the whole table.
        input_count: Inputs in the whole run.
    """
    index = f"{maps.row:0{max(3, len(str(total - 1)))}d}"
    several = input_count > 1 or maps.input_index > 0
    suffix = f"-input{maps.input_index:0{len(str(input_count - 1))}d}" if several else ""
    return f"{index}-{slug(maps.label)}{suffix}.png"


def _channels(maps: FeatureMaps) -> NDArray[np.float32]:
    """Return the values to draw as (C, T, H, W), a vector as (F, 1, 1, 1), cut to what a canvas can hold."""
    values = maps.values
    if maps.arrangement == "vector":
        return values[:_MAX_CELLS, None, None, None]
    if maps.arrangement == "frames":
        values = values[:, :_MAX_FRAMES]
        return np.ascontiguousarray(values[: max(1, _MAX_TILES // max(1, values.shape[1]))])
    return np.ascontiguousarray(values[:_MAX_TILES, None])


def _extra_tokens(maps: FeatureMaps) -> NDArray[np.float32]:
    """Return the tokens apart from the grid, (K, C); K is 0 without any."""
    if maps.extra_tokens is None:
        return np.empty((0, 0), np.float32)
    return maps.extra_tokens[:_MAX_EXTRA_TOKENS, :_MAX_TILES]


def _extent(values: NDArray[np.float32]) -> _Extent:
    """Measure (C, ...)."""
    if not values.size:
        nothing = np.zeros(len(values), np.float32)
        return _Extent(nothing, nothing > 0, math.inf, -math.inf, 0)
    values = values.reshape(len(values), -1)
    low, high = values.min(axis=1), values.max(axis=1)  # (C,); both are NaN where a value is
    all_zero = (low == 0) & (high == 0)
    non_finite_count = 0
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        finite = np.isfinite(values)
        non_finite_count = int(finite.size - np.count_nonzero(finite))
        low = np.where(finite, values, np.float32(np.inf)).min(axis=1)
        high = np.where(finite, values, np.float32(-np.inf)).max(axis=1)
    magnitudes = np.maximum(np.maximum(high, -low), 0)
    return _Extent(magnitudes, all_zero, float(low.min()), float(high.max()), non_finite_count)


def _average(channels: NDArray[np.float32], stride: int) -> NDArray[np.float32]:
    """Return the means over blocks of `stride` x `stride`, those at the end smaller; a non-finite value spreads."""
    _, _, height, width = channels.shape
    tops, lefts = np.arange(0, height, stride), np.arange(0, width, stride)
    areas = np.outer(np.diff(tops, append=height), np.diff(lefts, append=width))
    with np.errstate(invalid="ignore"):  # inf - inf
        sums = np.add.reduceat(channels, tops, axis=2, dtype=np.float64)
        sums = np.add.reduceat(sums, lefts, axis=3)
        return np.asarray(sums / areas, np.float32)


def _levels(values: NDArray[np.float32], ranges: NDArray[np.float32], *, centred: bool) -> Indices:
    """Return the palette index of every value of (C, ...), given each channel's largest magnitude, (C,)."""
    middle = (LEVEL_COUNT - 1) // 2
    span, origin = (middle, middle) if centred else (LEVEL_COUNT - 1, 0)
    divisors = np.where(ranges > 0, ranges, np.float32(1)).reshape(-1, *[1] * (values.ndim - 1))
    finite = np.isfinite(values)
    all_finite = bool(finite.all())
    # Dividing, not multiplying by the reciprocal: that overflows for the smallest magnitudes.
    scaled = (values if all_finite else np.where(finite, values, np.float32(0))) / divisors
    scaled *= span
    scaled += origin + 0.5  # truncated next: rounds half up
    levels = scaled.astype(np.uint8)
    if not all_finite:
        levels[~finite] = NON_FINITE
    return levels


def _plan(shape: tuple[int, ...], *, single: bool) -> _Layout:
    """Choose the layout for (C, T, H, W): near-square, filling a page, within the limits.

    A map far longer than wide (a signal of shape 1 x W) is enlarged less along its long side: its pixels are not
    square then, but it can be seen.
    """
    count, frames, height, width = shape
    if 0 in shape:
        return _Layout(1, 1, 1, 0)
    if single:  # a strip is twice as wide as it is high, or one row
        columns = count if count * _CELL_MAX <= 2 * _PAGE_WIDTH else _columns(count, 0.5)
        pitch = min(max(_PAGE_WIDTH // columns, _CELL_MIN), _CELL_MAX)
        gap = 1 if pitch >= 8 else 0
        return _Layout(columns, pitch - gap, pitch - gap, gap)

    def laid_out(factor: int, stride: int) -> _Layout:
        sides = -(-height // stride), -(-width // stride)
        down, across = (min(factor, max(1, 8 * _TILE_MIN // side)) for side in sides)
        row = _Layout(count, down, across, 2 if frames == 1 else 6, stride)
        tile_height, tile_width = (pitch - row.gap for pitch in row.pitch(shape))
        return replace(row, columns=_columns(count, tile_width / tile_height))

    factor = _readable_factor(height, width)
    rough = laid_out(factor, 1)
    page_factor = (_PAGE_WIDTH // rough.columns - rough.gap) // frames // width
    factor = max(factor, min(page_factor, _TILE_MAX // max(height, width)))
    stride = 1
    while not (plan := laid_out(factor, stride)).fits(shape) and stride < max(height, width):
        if factor > 1:
            factor -= 1
        else:
            stride += max(1, stride // 4)
            factor = _readable_factor(-(-height // stride), -(-width // stride))
    return plan


def _readable_factor(height: int, width: int) -> int:
    return max(1, -(-_TILE_MIN // min(height, width)))


def _tiles(
    layout: _Layout, shape: tuple[int, ...], left: int, top: int, caption: tuple[str, ...], bar: tuple[str, ...]
) -> Tiles:
    """Say where the tiles of (C, T, H, W), as drawn, lie."""
    count, frames, height, width = shape
    return Tiles(
        *(left, top, min(layout.columns, count), count, frames, height, width),
        *(layout.down, layout.across, layout.gap),
        caption=caption,
        bar=bar,
    )


def _columns(count: int, tile_aspect: float) -> int:
    """Return how many tiles of width / height `tile_aspect` to put in a row.

    A full rectangle between square and about 2:1 is preferred (8 x 8 for 64, 16 x 8 for 128); else as square as can be.
    """
    square = math.sqrt(count / tile_aspect)
    candidates = range(max(1, math.ceil(square - 1e-9)), math.floor(square * 1.5) + 1)
    full = next((columns for columns in candidates if count % columns == 0), None)
    if full is not None:
        return full
    return count if count <= 2 * square else max(1, math.ceil(square))


def _compose(levels: NDArray[np.uint8], layout: _Layout) -> Indices:
    """Lay (C, T, H, W) out, enlarged by nearest neighbour."""
    count, frames, height, width = levels.shape
    rows, columns = -(-count // layout.columns), layout.columns
    padded = np.full((rows * columns, frames, height, width), BACKGROUND, np.uint8)
    padded[:count] = levels
    stretched = padded.repeat(layout.across, axis=3)
    frame_width = stretched.shape[3]
    # Across first, for one canvas row per map row; a last column of background parts the frames.
    framed = np.full((rows, height, columns, frames, frame_width + 1), BACKGROUND, np.uint8)
    framed[..., :frame_width] = stretched.reshape(rows, columns, frames, height, frame_width).transpose(0, 3, 1, 2, 4)
    tile_width = frames * (frame_width + 1) - 1
    lines = np.full((rows, height, columns, tile_width + layout.gap), BACKGROUND, np.uint8)
    lines[..., :tile_width] = framed.reshape(rows, height, columns, tile_width + 1)[..., :tile_width]
    # Then down: whole rows are copied.
    tile_height = height * layout.down
    canvas = np.full((rows, tile_height + layout.gap, lines[0, 0].size), BACKGROUND, np.uint8)
    canvas[:, :tile_height] = lines.reshape(rows, height, -1).repeat(layout.down, axis=1)
    return canvas.reshape(rows * (tile_height + layout.gap), -1)[
        : rows * (tile_height + layout.gap) - layout.gap, : lines[0, 0].size - layout.gap
    ]


def _numbered(grid: Indices, count: int, columns: int, pitch: int) -> Indices:
    """Put the number of its first channel left of each row, or of every few rows where they are too narrow."""
    step = -(-_line_height(_NUMBER_SIZE) // pitch)
    labels = [_ink(str(first), _NUMBER_SIZE, _DIM) for first in range(0, count, columns * step)]
    left = max(label.shape[1] for label in labels) + 4
    height = max(grid.shape[0], labels[0].shape[0])
    result = np.full((height, left + grid.shape[1]), BACKGROUND, np.uint8)
    result[: grid.shape[0], left:] = grid
    for index, label in enumerate(labels):
        centred = index * step * pitch + (min(pitch, height) - label.shape[0]) // 2
        top = min(max(0, centred), height - label.shape[0])
        _paste(result, label, top, left - 4 - label.shape[1])
    return result


def _strips(levels: NDArray[np.uint8], width: int, token_count: int) -> list[tuple[int, Indices]]:
    """Draw tokens apart from the grid, (K, C): a line of text and a wrapped strip of cells for each."""
    count = levels.shape[1]
    pitch = min(max((width - 60) // count, 8 if count <= 4096 else 2), 24)
    gap = 1 if pitch >= 8 else 0
    fitting = min(count, (width - 60) // pitch)
    columns = next((number for number in range(fitting, fitting * 2 // 3, -1) if count % number == 0), fitting)
    layout = _Layout(columns, pitch - gap, pitch - gap, gap)
    parts = []
    for index, token in enumerate(levels):
        text = f"token {index + 1} of {token_count} apart from the grid, one cell per channel, {columns} per row"
        parts.append((12, _paragraph([text], _TEXT_SIZE, width, strength=_DIM)))
        parts.append((4, _numbered(_compose(token[:, None, None, None], layout), count, columns, pitch)))
    return parts


def _count_remark(maps: FeatureMaps, shape: tuple[int, ...], layout: _Layout) -> str:
    """Say how many channels are drawn, of how many, and how they lie."""
    count, frame_count, height, width = shape
    first = f"first {count} of " if count < maps.channel_count else ""
    thing = "value" if maps.arrangement == "vector" else "channel"
    plural = "" if maps.channel_count == 1 else "s"
    per_row = f", {layout.columns} per row" if count > layout.columns else ""
    inside = {"frames": f", {frame_count} frames each, left to right", "tokens": f", each {height} x {width} tokens"}
    return f"{first}{maps.channel_count} {thing}{plural}{per_row}{inside.get(maps.arrangement, '')}"


def _bar_labels(largest: float, *, centred: bool, one_range: bool) -> tuple[str, ...]:
    """Return what stands under the left end, the middle if that is zero, and the right end of the colour bar."""
    if not largest:
        return ()
    low, high = (f"{-largest:.4g}", f"{largest:.4g}") if one_range else ("-max", "+max")
    return (low, "0", high) if centred else ("0", high.lstrip("+"))


def _legend(labels: Sequence[str], marks: Sequence[tuple[int, str]], width: int) -> Indices:
    """Draw the colour bar over its `labels`, none if there are none, and beside it what marked colours mean."""
    blocks = []
    if labels:
        inks = [_ink(label, _TEXT_SIZE, _DIM) for label in labels]
        bar = np.full((_BAR_HEIGHT + 2 + inks[0].shape[0], LEVEL_COUNT), BACKGROUND, np.uint8)
        bar[:_BAR_HEIGHT] = np.arange(LEVEL_COUNT)
        for index, ink in enumerate(inks):
            _paste(bar, ink, _BAR_HEIGHT + 2, index * (LEVEL_COUNT - ink.shape[1]) // (len(inks) - 1))
        blocks.append(bar)
    if marks:
        lines = []
        for colour, text in marks:
            ink = _ink(text, _TEXT_SIZE, _DIM)
            line = np.full((ink.shape[0], ink.shape[1] + 16), BACKGROUND, np.uint8)
            line[3:13, :10] = colour
            _paste(line, ink, 0, 16)
            lines.append((0, line))
        blocks.append(_stack(lines, margin=0))
    if sum(block.shape[1] for block in blocks) + 28 > width:
        return _stack([(8, block) for block in blocks], margin=0)
    result = np.full((max((block.shape[0] for block in blocks), default=0), width), BACKGROUND, np.uint8)
    left = 0
    for block in blocks:
        _paste(result, block, 0, left)
        left += block.shape[1] + 28
    return result


def _stack(parts: Sequence[tuple[int, Indices]], margin: int = _MARGIN) -> Indices:
    """Put parts under each other, each with so much background above it, and a margin around all."""
    height = sum(above + part.shape[0] for above, part in parts) + 2 * margin
    width = max(part.shape[1] for _, part in parts) + 2 * margin
    canvas = np.full((height, width), BACKGROUND, np.uint8)
    top = margin
    for above, part in parts:
        _paste(canvas, part, top + above, margin)
        top += above + part.shape[0]
    return canvas


def _paste(canvas: Indices, part: Indices, top: int, left: int) -> None:
    canvas[top : top + part.shape[0], left : left + part.shape[1]] = part


def _paragraph(texts: Sequence[str], size: int, width: int, *, separator: str = "", strength: float = 1.0) -> Indices:
    """Draw texts one after the other, in lines no longer than `width` pixels; a text breaks only if it must."""
    lines = []
    for pieces in _wrap(texts, size, width, separator):
        line = np.full((_line_height(size), _width(pieces, size)), BACKGROUND, np.uint8)
        left = 0
        for piece in pieces:
            ink = _ink(piece, size, strength)
            place = line[:, left : left + ink.shape[1]]
            np.maximum(place, ink, out=place)
            left += ink.shape[1] - 2
        lines.append((0, line))
    return _stack(lines, margin=0)


def _wrap(texts: Sequence[str], size: int, width: int, separator: str) -> list[list[str]]:
    """Return the lines, each in pieces, that `texts` joined by `separator` fill. No character of a text is lost.

    Args:
        texts: One too long for a line breaks after a space, dot, slash or underscore, else anywhere.
        size: Of the font.
        width: Of a line, in pixels.
        separator: Left out where a line ends.
    """
    lines: list[list[str]] = [[]]
    for text in texts:
        whole = _width([text], size) <= width
        for index, piece in enumerate([text] if whole else re.findall(r"[^\s._/]*[\s._/]+|[^\s._/]+", text)):
            added = [separator, piece] if separator and lines[-1] and not index else [piece]
            if _width([*lines[-1], *added], size) <= width:
                lines[-1] += added
                continue
            rest = piece
            while _width([rest], size) > width:
                end = bisect_right(range(len(rest)), width, key=lambda end: _width([rest[:end]], size)) - 1
                lines.append([rest[: max(1, end)]])
                rest = rest[max(1, end) :]
            lines.append([rest])
    return [line for line in lines if line]


@lru_cache(maxsize=8)
def _font(size: int) -> ImageFont.FreeTypeFont:
    # Given a size, Pillow always returns its own Aileron: ASCII and a few more.
    return cast("ImageFont.FreeTypeFont", ImageFont.load_default(size))


def _line_height(size: int) -> int:
    return sum(_font(size).getmetrics())


@lru_cache(maxsize=1024)
def _length(text: str, size: int) -> int:
    return math.ceil(_font(size).getlength(text))


def _width(pieces: Sequence[str], size: int) -> int:
    """Return the width in pixels of text drawn in pieces: letters may reach one pixel out on either side."""
    return sum(_length(piece, size) for piece in pieces) + 2


@lru_cache(maxsize=1024)
def _ink(text: str, size: int, strength: float = 1.0) -> Indices:
    """Draw one line of text, (height, width); `strength` 0-1 is its contrast with the background."""
    image = Image.new("L", (_width([text], size), _line_height(size)))
    ImageDraw.Draw(image).text((1, 0), text, fill=255, font=_font(size))
    shades = np.asarray(image) * (strength * (TEXT - BACKGROUND) / 255)
    return (shades + (BACKGROUND + 0.5)).astype(np.uint8)


def _printable(text: str, limit: int) -> str:
    """Return `text` in one line of characters the font has, escaped where it has none, the middle left out if long."""
    escaped = "".join(c if c.isprintable() and c.isascii() else c.encode("unicode_escape").decode() for c in text)
    if len(escaped) <= limit:
        return escaped
    half = (limit - 5) // 2
    return f"{escaped[:half]} ... {escaped[-half:]}"


@lru_cache(maxsize=32)
def _palette(cmap: str) -> tuple[bytes, str, str]:
    """Return the 256 colours as bytes, and the names of those for non-finite values and all-zero channels."""
    levels = colour_levels(cmap, LEVEL_COUNT)
    shades = np.linspace(_BACKGROUND_COLOUR, _TEXT_COLOUR, TEXT - BACKGROUND + 1)
    shades = shades.round().astype(np.uint8)
    non_finite_name, non_finite = distinct_colour(np.vstack([levels, shades]), _NON_FINITE_COLOURS)
    all_zero_name, all_zero = distinct_colour(np.vstack([levels, shades[:1], [non_finite]]), _ALL_ZERO_COLOURS)
    colours = np.vstack([levels, [non_finite], [all_zero], shades]).astype(np.uint8)
    return colours.tobytes(), non_finite_name, all_zero_name
