"""Draw feature maps: one picture per activation and input, every channel a tile, with a caption and a colour bar."""

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from hookscope.reporting.grid_layout import Layout, compose, plan
from hookscope.reporting.lettering import drawable, line_height, text_width, wrap, write_line, write_lines
from hookscope.reporting.overviews.sheet import Block, draw_sheet
from hookscope.reporting.palettes import (
    ALL_ZERO,
    BACKGROUND,
    LEVEL_COUNT,
    NON_FINITE,
    TEXT,
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
_MARGIN = 14
_BETWEEN = 12  # above most parts

_DIM = BACKGROUND + round(0.75 * (TEXT - BACKGROUND))  # for lesser text: the palette fades from BACKGROUND to TEXT

# Limits of a canvas.
_MAX_TILES = 65_536
_MAX_CELLS = 1_048_576
_MAX_FRAMES = 4_096
_MAX_EXTRA_TOKENS = 16
_TITLE_LIMIT = 300  # characters
_REMARK_LIMIT = 200  # characters

_NON_FINITE_MARK, _ALL_ZERO_MARK = "non-finite values in", "all-zero channels in"


class _Extent(NamedTuple):
    magnitudes: NDArray[np.float32]  # largest per channel, 0 where no value is finite, (C,)
    all_zero: NDArray[np.bool_]  # whether every value is exactly zero, (C,)
    lowest: float  # of all channels; +inf where no value is finite
    highest: float  # of all channels; -inf where no value is finite
    non_finite_count: int


Scale = Literal["channel", "layer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Colours:
    """How the values of one grid become colours.

    Attributes:
        of_channels: The ranges of the channels; `of_extra` has the ranges of tokens apart from the grid.
        lowest: The lowest finite value; +inf without one, where `highest` is -inf.
        marks_zeros: Whether channels of zeros have a colour of their own.
        one_range: Whether all channels share one range.
        centred: Whether zero has the middle colour.
        palette: As `grid_palette` returns it, with the names of the colours for NaN and Inf, and for channels of zeros.
    """

    of_channels: _Extent
    of_extra: _Extent
    lowest: float
    highest: float
    marks_zeros: bool
    one_range: bool
    centred: bool
    palette: tuple[bytes, str, str]

    @property
    def largest(self) -> float:
        return max(0.0, self.highest, -self.lowest) if self.lowest <= self.highest else 0.0

    def levels(self, values: NDArray[np.float32], extent: _Extent) -> NDArray[np.uint8]:
        """Return the palette index of every value of (C, ...), whose ranges are `extent`."""
        ranges = np.full_like(extent.magnitudes, self.largest) if self.one_range else extent.magnitudes
        return palette_levels(values, ranges, centred=self.centred)

    def marks(self) -> list[tuple[int, str]]:
        """Return the palette index and the text of the colours for NaN, Inf and channels of zeros."""
        _, non_finite_colour, all_zero_colour = self.palette
        marks = []
        if count := self.of_channels.non_finite_count + self.of_extra.non_finite_count:
            marks.append((NON_FINITE, f"{_NON_FINITE_MARK} {non_finite_colour}: {count:,}"))
        if self.marks_zeros and (count := int(self.of_channels.all_zero.sum())):
            marks.append((ALL_ZERO, f"{_ALL_ZERO_MARK} {all_zero_colour}: {count:,}"))
        return marks

    def bar_labels(self) -> tuple[str, ...]:
        """Return the labels of the colour bar; () without one."""
        largest = self.largest
        if not largest:
            return ()
        low, high = (f"{-largest:.4g}", f"{largest:.4g}") if self.one_range else ("-max", "+max")
        return (low, "0", high) if self.centred else ("0", high.lstrip("+"))


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
    layout = plan(channels.shape, single=_is_single(channels))
    colours = _colours(channels, extra, cmap, scale)
    levels = _levels(channels, colours, layout)
    composed = compose(levels, layout) if levels.size else np.empty((0, 0), np.uint8)
    grid, left = _numbered(composed, len(levels), layout.columns, layout.pitch(channels.shape)[0])
    width = max(_CONTENT_MIN, left + composed.shape[1])
    per_row = f", {layout.columns} per row" if len(channels) > layout.columns else ""
    remarks = _remarks(maps, channels.shape, colours, layout, input_name, per_row)
    bar, marks = colours.bar_labels(), colours.marks()
    heading = [
        _text([drawable(maps.label, _TITLE_LIMIT)], _TITLE_SIZE, width, TEXT),
        _text(remarks, _TEXT_SIZE, width, _DIM, separator="   ·   ", above=3),
    ]
    strips = _strips(colours.levels(extra, colours.of_extra), width, len(tokens)) if extra.size else []
    blocks = [*heading, grid, *strips, _legend(bar, marks, width)]
    image = draw_sheet(blocks, width + 2 * _MARGIN, _MARGIN, "L", BACKGROUND)
    image.putpalette(colours.palette[0])  # turns 8-bit grey into palette indices, values unchanged
    top = _MARGIN + heading[0].height + heading[1].above + heading[1].height + grid.above
    count, frames, height, width = levels.shape
    columns, pixels = min(layout.columns, count), (layout.down, layout.across)
    tiles = Tiles(_MARGIN + left, top, columns, count, frames, height, width, *pixels, layout.gap) if count else None
    about = (*_remarks(maps, channels.shape, colours, layout, input_name, ""), *(text for _, text in marks))
    return image, Grid(path, maps.row, maps.label, maps.input_index, about, bar, len(tokens), tiles)


def colour_marks(grid: Grid) -> tuple[str, ...]:
    """Return the parts of a grid's caption that explain its colours for NaN, Inf and channels of zeros."""
    return tuple(part for part in grid.caption if part.startswith((_NON_FINITE_MARK, _ALL_ZERO_MARK)))


def check_cmap(cmap: str) -> None:
    """Raise the UsageError that `draw_grid` would raise, before a model is run."""
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


def _colours(channels: NDArray[np.float32], extra: NDArray[np.float32], cmap: str, scale: Scale) -> _Colours:
    """Choose the colours for channels (C, T, H, W) and tokens apart from the grid (K, C), as `draw_grid` describes."""
    single = _is_single(channels)
    of_channels, of_extra = _extent(channels), _extent(extra)
    lowest = min(of_channels.lowest, of_extra.lowest)
    name = ("berlin" if lowest < 0 else "viridis") if cmap == "auto" else cmap
    return _Colours(
        of_channels=of_channels,
        of_extra=of_extra,
        lowest=lowest,
        highest=max(of_channels.highest, of_extra.highest),
        marks_zeros=not single,
        one_range=single or len(channels) == 1 or scale == "layer",
        centred=lowest < 0 or is_diverging(name),
        palette=grid_palette(name),
    )


def _is_single(channels: NDArray[np.float32]) -> bool:
    return bool(channels[:1].size == 1)


def _levels(channels: NDArray[np.float32], colours: _Colours, layout: Layout) -> NDArray[np.uint8]:
    """Return the palette index of every drawn value, (C, T, H, W); no channel without values."""
    if not channels.size:
        return np.empty((0, 1, 1, 1), np.uint8)
    averaged = block_means(channels, layout.stride) if layout.stride > 1 else channels
    levels = colours.levels(averaged, colours.of_channels)
    if colours.marks_zeros:
        levels[colours.of_channels.all_zero] = ALL_ZERO
    return levels


def _remarks(
    maps: FeatureMaps, shape: tuple[int, ...], colours: _Colours, layout: Layout, input_name: str, per_row: str
) -> list[str]:
    """Return the parts of the caption; `shape` is (C, T, H, W) of what is drawn."""
    lowest, highest = colours.lowest, colours.highest
    values = f"values {lowest:.4g} to {highest:.4g}" if lowest <= highest else "no finite values"
    block = f"each pixel the mean of {layout.stride} x {layout.stride} values" if layout.stride > 1 else ""
    parts = [
        maps.kind,
        input_name,
        f"shape {' x '.join(map(str, maps.shape)) or 'scalar'}",
        _count_remark(maps, shape, per_row),
        values,
        "one scale for all" if colours.one_range else "each channel scaled to its own maximum",
        block,
        maps.note,
    ]
    return [drawable(part, _REMARK_LIMIT) for part in parts if part]


def _extent(values: NDArray[np.float32]) -> _Extent:
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


def block_means(maps: NDArray[np.floating], stride: int) -> NDArray[np.float32]:
    """Return the means over blocks of `stride` x `stride`, smaller at the edges; a non-finite value fills its block.

    Args:
        maps: (..., H, W).
        stride: The side of a block.
    """
    *_, height, width = maps.shape
    tops, lefts = np.arange(0, height, stride), np.arange(0, width, stride)
    areas = np.outer(np.diff(tops, append=height), np.diff(lefts, append=width))
    with np.errstate(invalid="ignore"):  # inf - inf
        sums = np.add.reduceat(np.add.reduceat(maps, tops, axis=-2, dtype=np.float64), lefts, axis=-1)
        return np.asarray(sums / areas, np.float32)


def palette_levels(values: NDArray[np.float32], ranges: NDArray[np.float32], *, centred: bool) -> Indices:
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


def _text(
    texts: Sequence[str], size: int, width: int, ink: int, *, separator: str = "", above: int = _BETWEEN
) -> Block:
    """Return texts one after the other, in lines no longer than `width` pixels."""
    lines = wrap(texts, size, width, separator)

    def draw(image: Image.Image, top: int) -> None:
        write_lines(ImageDraw.Draw(image), lines, size, ink, top, _MARGIN + 1)

    return Block(len(lines) * line_height(size), draw, above)


def _numbered(tiles: Indices, count: int, columns: int, pitch: int, above: int = _BETWEEN) -> tuple[Block, int]:
    """Return rows of tiles, and the pixels left of them for the number of each row's first channel.

    If rows are low, only every few rows have a number.
    """
    high = line_height(_NUMBER_SIZE)
    step = -(-high // pitch) if pitch else 1
    labels = [str(first) for first in range(0, count, columns * step)]
    left = max((text_width([label], _NUMBER_SIZE) for label in labels), default=0) + 4
    height = max(len(tiles), high) if count else 0

    def draw(image: Image.Image, top: int) -> None:
        image.paste(Image.fromarray(tiles), (_MARGIN + left, top))
        for index, label in enumerate(labels):
            centred = index * step * pitch + (min(pitch, height) - high) // 2
            beside = top + min(max(0, centred), height - high)
            write_line(ImageDraw.Draw(image), label, _NUMBER_SIZE, _DIM, beside, _MARGIN + left - 5, align=1)

    return Block(height, draw, above), left


def _strips(levels: NDArray[np.uint8], width: int, token_count: int) -> Iterator[Block]:
    """Yield a line of text and a wrapped strip of cells for each token apart from the grid, (K, C)."""
    count = levels.shape[1]
    pitch = min(max((width - 60) // count, 8 if count <= 4096 else 2), 24)
    gap = 1 if pitch >= 8 else 0
    fitting = min(count, (width - 60) // pitch)
    columns = next((number for number in range(fitting, fitting * 2 // 3, -1) if count % number == 0), fitting)
    layout = Layout(columns, pitch - gap, pitch - gap, gap)
    for index, token in enumerate(levels):
        text = f"token {index + 1} of {token_count} apart from the grid, one cell per channel, {columns} per row"
        yield _text([text], _TEXT_SIZE, width, _DIM)
        yield _numbered(compose(token[:, None, None, None], layout), count, columns, pitch, above=4)[0]


def _count_remark(maps: FeatureMaps, shape: tuple[int, ...], per_row: str) -> str:
    count, frame_count, height, width = shape
    if maps.is_sequence:
        count, per_row = maps.values.shape[1], ""
    first = f"first {count} of " if count < maps.channel_count else ""
    thing = ("value" if maps.arrangement == "vector" else "channel") + "s" * (maps.channel_count != 1)
    inside = {"frames": f", {frame_count} frames each, left to right", "tokens": f", each {height} x {width} tokens"}
    return f"{first}{maps.channel_count} {thing}{per_row}{inside.get(maps.arrangement, '')}"


def _legend(labels: Sequence[str], marks: Sequence[tuple[int, str]], width: int) -> Block:
    """Return the colour bar with its labels, and right of it, or below it without room, the colours of marks."""
    high = line_height(_TEXT_SIZE)
    bar_width, bar_height = (LEVEL_COUNT + 28, _BAR_HEIGHT + 2 + high) if labels else (0, 0)
    widest = max((text_width([text], _TEXT_SIZE) + 16 for _, text in marks), default=0)
    left, down = (bar_width, 0) if bar_width + widest + 28 <= width else (0, bar_height + 8)

    def draw(image: Image.Image, top: int) -> None:
        pen = ImageDraw.Draw(image)
        bar = np.tile(np.arange(LEVEL_COUNT, dtype=np.uint8), (_BAR_HEIGHT, 1))
        for index, label in enumerate(labels):
            image.paste(Image.fromarray(bar), (_MARGIN, top))
            share = index / (len(labels) - 1)
            write_line(pen, label, _TEXT_SIZE, _DIM, top + _BAR_HEIGHT + 2, _MARGIN + share * LEVEL_COUNT, share)
        for index, (colour, text) in enumerate(marks):
            at, under = _MARGIN + left, top + down + index * high
            pen.rectangle([at, under + 3, at + 9, under + 12], colour)
            write_line(pen, text, _TEXT_SIZE, _DIM, under, at + 17)

    return Block(max(bar_height, (down + len(marks) * high) * bool(marks)), draw, _BETWEEN)
