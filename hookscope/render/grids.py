"""Draw feature maps: one picture per activation and input, every channel a tile, with a caption and a colour bar."""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hookscope.render.lettering import MARGIN, draw_text, drawable, line_height, paragraph, paste, stack
from hookscope.render.palettes import (
    ALL_ZERO,
    BACKGROUND,
    LEVEL_COUNT,
    NON_FINITE,
    Indices,
    colour_levels,
    grid_palette,
    is_diverging,
)
from hookscope.results.activations import FeatureMaps
from hookscope.results.grids import Grid, Tiles
from hookscope.text import slug

# Sizes in pixels.
_CONTENT_MIN = 480
_BAR_HEIGHT = 10
_TITLE_SIZE = 20
_TEXT_SIZE = 13
_NUMBER_SIZE = 11
_DIM = 0.75  # contrast of lesser text

# A grid fills a page 960 pixels wide where it can, the shorter side of a tile is never under 32 (so a 7x7 map is
# readable), and no tile is enlarged beyond 160.
_PAGE_WIDTH = 960
_TILE_MIN = 32
_TILE_MAX = 160
_CELL_MIN = 4
_CELL_MAX = 32

# A grid stays within what viewers open and what Pillow reads back without its decompression-bomb warning (89 million).
MAX_SIDE = 16_384
MAX_PIXELS = 64_000_000

# Values that a canvas can hold.
_MAX_TILES = 65_536
_MAX_CELLS = 1_048_576
_MAX_FRAMES = 4_096
_MAX_EXTRA_TOKENS = 16
_TITLE_LIMIT = 300  # characters
_REMARK_LIMIT = 200  # characters

_NON_FINITE_MARK, _ALL_ZERO_MARK = "non-finite values in", "all-zero channels in"


class _Extent(NamedTuple):
    """The range of each channel's finite values."""

    magnitudes: NDArray[np.float32]  # largest per channel, 0 where no value is finite, (C,)
    all_zero: NDArray[np.bool_]  # whether every value is exactly zero, (C,)
    lowest: float  # of all; +inf where no value is finite
    highest: float  # of all; -inf where no value is finite
    non_finite_count: int


Scale = Literal["channel", "layer"]


def draw_grid(maps: FeatureMaps, *, cmap: str = "auto", scale: Scale = "channel", input_name: str = "") -> Image.Image:
    """Draw the feature maps of one layer for one input as a grid of tiles.

    If no value is negative, the colour map spans 0 to the largest value; otherwise it spans -m to m, where m is the
    largest magnitude, so that zero has the middle colour. Every range includes zero: "no response" then looks the same
    in every channel, and a nearly constant channel does not look like noise. If every channel has only one value, all
    share one range.

    A grid has at most 16,384 pixels a side and 64 million pixels in all, without its caption. Larger maps are averaged
    over square blocks, and the caption reports it.

    Args:
        maps: Maps of any arrangement. Frames are drawn side by side in the tile of their channel, a vector as a wrapped
            strip of cells.
        cmap: A matplotlib colour map. "auto" is viridis, or berlin (perceptually uniform too, dark at zero) where a
            value is negative. A diverging map always has zero in the middle.
        scale: "channel" gives every channel, and every token without a place on the grid, its own range; "layer" uses
            one range.
        input_name: Name of the input in the caption.

    Returns:
        A palette image, mode "P": the colour map at indices 0-240, then one index each for non-finite values and
        all-zero channels, then background to text.

    Raises:
        UsageError: If `cmap` is unknown.
    """
    return draw_for_run(maps, "", cmap=cmap, scale=scale, input_name=input_name)[0]


def draw_for_run(
    maps: FeatureMaps, path: str, *, cmap: str = "auto", scale: Scale = "channel", input_name: str = ""
) -> tuple[Image.Image, Grid]:
    """Draw a grid as `draw_grid` does, with its errors; return it with its record for run.json."""
    tokens = np.empty((0, 0), np.float32) if maps.extra_tokens is None else maps.extra_tokens
    channels, extra = _channels(maps), tokens[:_MAX_EXTRA_TOKENS, :_MAX_TILES]  # (C, T, H, W), (K, C)
    single = channels[:1].size == 1
    one_range = single or len(channels) == 1 or scale == "layer"
    extent, extra_extent = _extent(channels), _extent(extra)
    lowest, highest = min(extent.lowest, extra_extent.lowest), max(extent.highest, extra_extent.highest)
    largest = max(0.0, highest, -lowest) if lowest <= highest else 0.0
    name = ("berlin" if lowest < 0 else "viridis") if cmap == "auto" else cmap
    palette, non_finite_colour, all_zero_colour = grid_palette(name)
    centred = lowest < 0 or is_diverging(name)
    layout = plan(channels.shape, single=single)

    def levels(values: NDArray[np.float32], own: _Extent) -> NDArray[np.uint8]:
        return _levels(values, np.full_like(own.magnitudes, largest) if one_range else own.magnitudes, centred=centred)

    pictures: list[tuple[int, Indices]] = []  # background pixels above it, and a part of the picture
    width = _CONTENT_MIN
    if channels.size:
        tiles = levels(_average(channels, layout.stride) if layout.stride > 1 else channels, extent)
        if not single:
            tiles[extent.all_zero] = ALL_ZERO
        composed = compose(tiles, layout)
        grid = _numbered(composed, len(tiles), layout.columns, layout.pitch(channels.shape)[0])
        left = grid.shape[1] - composed.shape[1]
        width = max(width, grid.shape[1])
        pictures.append((12, grid))
    if extra.size:
        pictures += _strips(levels(extra, extra_extent), width, len(tokens))

    def remarks(per_row: str) -> list[str]:
        values = f"values {lowest:.4g} to {highest:.4g}" if lowest <= highest else "no finite values"
        block = f"each pixel the mean of {layout.stride} x {layout.stride} values" if layout.stride > 1 else ""
        parts = [
            maps.kind,
            input_name,
            f"shape {' x '.join(map(str, maps.shape)) or 'scalar'}",
            _count_remark(maps, channels.shape, per_row),
            values,
            "one scale for all" if one_range else "each channel scaled to its own maximum",
            block,
            maps.note,
        ]
        return [drawable(part, _REMARK_LIMIT) for part in parts if part]

    per_row = f", {layout.columns} per row" if len(channels) > layout.columns else ""
    title = paragraph([drawable(maps.label, _TITLE_LIMIT)], _TITLE_SIZE, width)
    caption = paragraph(remarks(per_row), _TEXT_SIZE, width, separator="   ·   ", strength=_DIM)
    marks = []
    if count := extent.non_finite_count + extra_extent.non_finite_count:
        marks.append((NON_FINITE, f"{_NON_FINITE_MARK} {non_finite_colour}: {count:,}"))
    if not single and (count := int(extent.all_zero.sum())):
        marks.append((ALL_ZERO, f"{_ALL_ZERO_MARK} {all_zero_colour}: {count:,}"))
    bar = _bar_labels(largest, centred=centred, one_range=one_range)
    legend = _legend(bar, marks, width)

    image = Image.fromarray(stack([(0, title), (3, caption), *pictures, (12, legend)]))
    image.putpalette(palette)  # turns 8-bit grey into palette indices, values unchanged
    where = None
    if channels.size:
        count, frames, height, width = tiles.shape
        top = MARGIN + title.shape[0] + 3 + caption.shape[0] + pictures[0][0]
        sizes = (count, frames, height, width, layout.down, layout.across, layout.gap)
        where = Tiles(MARGIN + left, top, min(layout.columns, count), *sizes)
    about = (*remarks(""), *(text for _, text in marks))
    return image, Grid(path, maps.row, maps.label, maps.input_index, about, bar, len(tokens), where)


def colour_marks(grid: Grid) -> tuple[str, ...]:
    """Return the parts of a grid's caption that explain its colours for NaN, Inf and channels of zeros."""
    return tuple(part for part in grid.caption if part.startswith((_NON_FINITE_MARK, _ALL_ZERO_MARK)))


def check_cmap(cmap: str) -> None:
    """Raise the UsageError that `draw_grid` would raise, before a model is run for nothing."""
    if cmap != "auto":
        colour_levels(cmap, LEVEL_COUNT)


def encode_png(image: Image.Image) -> bytes:
    """Return the PNG file of a grid. Safe to call from several threads; Pillow lets them run side by side."""
    file = io.BytesIO()
    # Level 1: higher ones take up to three times as long for files 1 to 4% smaller (36 grids of resnet34).
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def grid_name(maps: FeatureMaps, total: int, *, input_count: int = 1) -> str:
    """Return the file name of a grid: "007-layer1.0.conv2.png", with several inputs "007-layer1.0.conv2-input2.png".

    Both numbers have leading zeros for `total` rows and `input_count` inputs, so that names sort in execution order.
    """
    index = f"{maps.row:0{max(3, len(str(total - 1)))}d}"
    several = input_count > 1 or maps.input_index > 0
    suffix = f"-input{maps.input_index:0{len(str(input_count - 1))}d}" if several else ""
    return f"{index}-{slug(maps.label)}{suffix}.png"


def _channels(maps: FeatureMaps) -> NDArray[np.float32]:
    """Return the values that fit a canvas, as (C, T, H, W); a vector as (F, 1, 1, 1)."""
    values = maps.values
    if maps.arrangement == "vector":
        return values[:_MAX_CELLS, None, None, None]
    if maps.arrangement == "frames":
        values = values[:, :_MAX_FRAMES]
        return np.ascontiguousarray(values[: max(1, _MAX_TILES // max(1, values.shape[1]))])
    return np.ascontiguousarray(values[:_MAX_TILES, None])


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


def _numbered(grid: Indices, count: int, columns: int, pitch: int) -> Indices:
    """Put the number of its first channel left of each row, or of every few rows where they are too narrow."""
    step = -(-line_height(_NUMBER_SIZE) // pitch)
    labels = [draw_text(str(first), _NUMBER_SIZE, _DIM) for first in range(0, count, columns * step)]
    left = max(label.shape[1] for label in labels) + 4
    height = max(grid.shape[0], labels[0].shape[0])
    result = np.full((height, left + grid.shape[1]), BACKGROUND, np.uint8)
    result[: grid.shape[0], left:] = grid
    for index, label in enumerate(labels):
        centred = index * step * pitch + (min(pitch, height) - label.shape[0]) // 2
        top = min(max(0, centred), height - label.shape[0])
        paste(result, label, top, left - 4 - label.shape[1])
    return result


def _strips(levels: NDArray[np.uint8], width: int, token_count: int) -> list[tuple[int, Indices]]:
    """Draw tokens apart from the grid, (K, C): a line of text and a wrapped strip of cells for each."""
    count = levels.shape[1]
    pitch = min(max((width - 60) // count, 8 if count <= 4096 else 2), 24)
    gap = 1 if pitch >= 8 else 0
    fitting = min(count, (width - 60) // pitch)
    columns = next((number for number in range(fitting, fitting * 2 // 3, -1) if count % number == 0), fitting)
    layout = Layout(columns, pitch - gap, pitch - gap, gap)
    parts = []
    for index, token in enumerate(levels):
        text = f"token {index + 1} of {token_count} apart from the grid, one cell per channel, {columns} per row"
        parts.append((12, paragraph([text], _TEXT_SIZE, width, strength=_DIM)))
        parts.append((4, _numbered(compose(token[:, None, None, None], layout), count, columns, pitch)))
    return parts


def _count_remark(maps: FeatureMaps, shape: tuple[int, ...], per_row: str) -> str:
    count, frame_count, height, width = shape
    if maps.is_sequence:
        count, per_row = maps.values.shape[1], ""
    first = f"first {count} of " if count < maps.channel_count else ""
    thing = ("value" if maps.arrangement == "vector" else "channel") + "s" * (maps.channel_count != 1)
    inside = {"frames": f", {frame_count} frames each, left to right", "tokens": f", each {height} x {width} tokens"}
    return f"{first}{maps.channel_count} {thing}{per_row}{inside.get(maps.arrangement, '')}"


def _bar_labels(largest: float, *, centred: bool, one_range: bool) -> tuple[str, ...]:
    if not largest:
        return ()
    low, high = (f"{-largest:.4g}", f"{largest:.4g}") if one_range else ("-max", "+max")
    return (low, "0", high) if centred else ("0", high.lstrip("+"))


def _legend(labels: Sequence[str], marks: Sequence[tuple[int, str]], width: int) -> Indices:
    blocks = []
    if labels:
        inks = [draw_text(label, _TEXT_SIZE, _DIM) for label in labels]
        bar = np.full((_BAR_HEIGHT + 2 + inks[0].shape[0], LEVEL_COUNT), BACKGROUND, np.uint8)
        bar[:_BAR_HEIGHT] = np.arange(LEVEL_COUNT)
        for index, ink in enumerate(inks):
            paste(bar, ink, _BAR_HEIGHT + 2, index * (LEVEL_COUNT - ink.shape[1]) // (len(inks) - 1))
        blocks.append(bar)
    if marks:
        lines = []
        for colour, text in marks:
            ink = draw_text(text, _TEXT_SIZE, _DIM)
            line = np.full((ink.shape[0], ink.shape[1] + 16), BACKGROUND, np.uint8)
            line[3:13, :10] = colour
            paste(line, ink, 0, 16)
            lines.append((0, line))
        blocks.append(stack(lines, margin=0))
    if sum(block.shape[1] for block in blocks) + 28 > width:
        return stack([(8, block) for block in blocks], margin=0)
    result = np.full((max((block.shape[0] for block in blocks), default=0), width), BACKGROUND, np.uint8)
    left = 0
    for block in blocks:
        paste(result, block, 0, left)
        left += block.shape[1] + 28
    return result


@dataclass(frozen=True, slots=True)
class Layout:
    """How the tiles of (C, T, H, W) lie on the canvas."""

    columns: int  # tiles beside each other
    down: int  # canvas pixels per map pixel along H
    across: int  # the same along W
    gap: int  # background pixels between tiles; the frames inside a tile are one apart
    stride: int = 1  # map pixels averaged into one, along H and along W

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


def plan(shape: tuple[int, ...], *, single: bool) -> Layout:
    """Choose the layout for (C, T, H, W): near-square, filling a page, within the limits.

    A map far longer than wide (a signal of shape 1 x W) is enlarged less along its long side, to be seen at all.
    """
    count, frames, height, width = shape
    if 0 in shape:
        return Layout(1, 1, 1, 0)
    if single:  # a strip is twice as wide as it is high, or one row
        columns = count if count * _CELL_MAX <= 2 * _PAGE_WIDTH else _columns(count, 0.5)
        pitch = min(max(_PAGE_WIDTH // columns, _CELL_MIN), _CELL_MAX)
        gap = 1 if pitch >= 8 else 0
        return Layout(columns, pitch - gap, pitch - gap, gap)

    def laid_out(factor: int, stride: int) -> Layout:
        sides = -(-height // stride), -(-width // stride)
        down, across = (min(factor, max(1, 8 * _TILE_MIN // side)) for side in sides)
        row = Layout(count, down, across, 2 if frames == 1 else 6, stride)
        tile_height, tile_width = (pitch - row.gap for pitch in row.pitch(shape))
        return replace(row, columns=_columns(count, tile_width / tile_height))

    factor = max(1, -(-_TILE_MIN // min(height, width)))
    rough = laid_out(factor, 1)
    page_factor = (_PAGE_WIDTH // rough.columns - rough.gap) // frames // width
    factor = max(factor, min(page_factor, _TILE_MAX // max(height, width)))
    stride = 1
    while not (plan := laid_out(factor, stride)).fits(shape) and stride < max(height, width):
        if factor > 1:
            factor -= 1
        else:
            stride += max(1, stride // 4)
            factor = max(1, -(-_TILE_MIN // -(-min(height, width) // stride)))
    return plan


def _columns(count: int, tile_aspect: float) -> int:
    """Return how many tiles of width / height `tile_aspect` to put in a row: 8 for 64 squares, 16 for 128."""
    square = math.sqrt(count / tile_aspect)
    candidates = range(max(1, math.ceil(square - 1e-9)), math.floor(square * 1.5) + 1)
    full = next((columns for columns in candidates if count % columns == 0), None)
    if full is not None:
        return full
    return count if count <= 2 * square else max(1, math.ceil(square))


def compose(levels: NDArray[np.uint8], layout: Layout) -> Indices:
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
