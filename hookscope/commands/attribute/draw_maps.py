"""Inputs that are no pictures, and maps of them, drawn from the numbers that the network was given.

A signal is a curve under the map's colours, and the map is a curve below it. Volumes and clips are shown by slices
through the middle along each axis, and through the map's strongest place.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from hookscope.reporting.lettering import drawable, line_height, text_width, write_line
from hookscope.reporting.overlays import colour_scale, overlay
from hookscope.reporting.overviews.charts import VERMILION
from hookscope.reporting.overviews.sheet import DIM, LINE, PAPER
from hookscope.results.attributions import AttributionMap
from hookscope.results.inputs import whole_photograph
from hookscope.text import figure

# Pixels. Labels stand at the left of the plots and below them.
_LEFT, _RIGHT, _FOOT = 76, 12, 24
_LANE, _FEWEST_ALONE, _MAP, _BETWEEN = 56, 150, 110, 12
_SMALL = 14
_MOST_CHANNELS = 12
"""Channels that are drawn, each in a lane of its own."""

_CURVE, _GROUND = (0, 0, 0), 150  # the ground of colour bars: equal values have equal colours
_CELLS_A_PIXEL = 2  # of the map under a signal, at most
_NON_FINITE = (255, 0, 255)
_TICKS = 5
_SIGNAL_AXES = 2  # (C, L)

_GAP = 16
_TALLEST = 340
_GREY = 205  # grey level, of 255, where the volume itself is not known
_AXES = ("plane", "row", "column")
_COLOURS = 3


def draw_given(data: NDArray[np.float32] | None, heat_map: AttributionMap | None, width: int) -> Image.Image:
    """Draw a signal (C, L) as curves, or slices of a volume (C, D, H, W), `width` pixels wide, with a map over it.

    The map stands by itself where the input is not known, or the map is of words.
    """
    if heat_map is not None:
        data = data if data is not None and data.ndim == heat_map.values.ndim + 1 else None
        size = heat_map.size or heat_map.values.shape
        return (_signal if heat_map.values.ndim == 1 else _volume)(data, heat_map, size, width)
    assert data is not None  # noqa: S101 - there is an input or a map
    return (_signal if data.ndim == _SIGNAL_AXES else _volume)(data, None, data.shape[1:], width)


def given_remark(data: NDArray[np.float32]) -> str:
    """Return a sentence about channels that are not drawn; "" if all are."""
    count = len(data)
    if data.ndim == _SIGNAL_AXES:
        return f"The first {_MOST_CHANNELS} of {count:,} channels are drawn." if count > _MOST_CHANNELS else ""
    return f"The first of {count:,} channels is drawn." if count not in (1, _COLOURS) else ""


# --- Signals ---


def _signal(
    samples: NDArray[np.float32] | None, heat_map: AttributionMap | None, size: Sequence[int], width: int
) -> Image.Image:
    """Draw the channels of a signal under each other and under its map's colours, and the map, (l,), below them."""
    channels = [] if samples is None else [*samples[:_MOST_CHANNELS]]
    lane = max(_LANE, _FEWEST_ALONE // max(len(channels), 1))
    inner, height = width - _LEFT - _RIGHT, lane * len(channels)
    top = height + _BETWEEN if height else 0
    bottom = height if heat_map is None else top + _MAP
    image = Image.new("RGB", (width, bottom + _FOOT), PAPER)
    pen = ImageDraw.Draw(image)
    if channels:
        ground = np.full((height, inner, 3), _GROUND, np.uint8)
        if heat_map is not None:
            begin, end = heat_map.extent
            values = _in_blocks(heat_map.values, _CELLS_A_PIXEL * inner)
            flat = replace(heat_map, values=values[None], extent=(0.0, begin, 1.0, end))
            ground = overlay(whole_photograph(ground), flat, colour_scale(heat_map.values))
        image.paste(Image.fromarray(ground), (_LEFT, 0))
        for place, channel in enumerate(channels):
            _draw_curve(pen, channel, (0.0, 1.0), (_LEFT, place * lane, inner, lane), _CURVE)
        pen.rectangle((_LEFT, 0, _LEFT + inner - 1, height - 1), outline=LINE)
    if heat_map is not None:
        _draw_curve(pen, heat_map.values, heat_map.extent, (_LEFT, top, inner, _MAP), VERMILION, with_zero=True)
        pen.rectangle((_LEFT, top, _LEFT + inner - 1, bottom - 1), outline=LINE)
    _write_steps(image, size[0], bottom)
    return image


def _in_blocks(values: NDArray[np.float32], most: int) -> NDArray[np.float32]:
    """Return at most so many means of neighbours; NaN where fewer than half of them are finite.

    An overlay weighs every cell in every pixel, which takes gigabytes for long recordings.
    """
    if len(values) <= most:
        return values
    starts = np.linspace(0, len(values), most + 1).astype(int)
    finite = np.isfinite(values)
    counts = np.add.reduceat(finite, starts[:-1], dtype=np.float64)
    sums = np.add.reduceat(np.where(finite, values, 0), starts[:-1], dtype=np.float64)
    means = np.full(most, np.nan)
    np.divide(sums, counts, out=means, where=2 * counts >= np.diff(starts))
    return means.astype(np.float32)


def _draw_curve(
    pen: ImageDraw.ImageDraw,
    values: NDArray[np.float32],
    extent: Sequence[float],
    box: tuple[int, int, int, int],
    colour: tuple[int, int, int],
    *,
    with_zero: bool = False,
) -> None:
    """Draw values over the part of a box (left, top, width, height) that they fill, and write their limits beside it.

    With more values than pixels, a pixel shows the least and the greatest of its values; with fewer, the outermost
    values continue to the ends. Values that are not finite leave a gap with a mark at the top. `with_zero` draws 0.
    """
    left, top, width, height = box
    finite, (begin, end) = np.isfinite(values), extent
    shown = np.where(finite, values, np.nan).astype(np.float64)
    ends = np.append(shown[finite], 0.0) if with_zero or not finite.any() else shown[finite]
    low, high = limits = float(ends.min()), float(ends.max())
    at = (begin + (np.arange(len(values)) + 0.5) / len(values) * (end - begin)) * width
    for place in (left + at[~finite]).tolist():
        pen.line((place, top + 1, place, top + 6), _NON_FINITE, 2)
    thickness = 2
    if len(values) > width:
        starts = np.linspace(0, len(values), width + 1).astype(int)[:-1]
        shown = np.stack([np.fmin.reduceat(shown, starts), np.fmax.reduceat(shown, starts)], 1).ravel()
        at, thickness = np.repeat(begin * width + np.arange(width) * (end - begin), 2), 1
        inside = (at >= 0) & (at < width)
        at, shown = at[inside], shown[inside]
    else:
        x = np.concatenate([[0.0], at[(at > 0) & (at < width)], [float(width)]])
        at, shown = x, np.interp(x, at, shown)
    y = _pixel_rows(shown, limits, top, height)
    for run in np.ma.clump_unmasked(np.ma.masked_invalid(shown)):  # type: ignore[no-untyped-call]
        points = [*zip((left + at[run]).tolist(), y[run].tolist(), strict=True)]
        pen.line(points, colour, thickness) if len(points) > 1 else pen.point(points, colour)
    if with_zero and low < 0 < high:
        zero = _pixel_rows(np.array([0.0]), limits, top, height)[0]
        pen.line((left, zero, left + width, zero), LINE)
    _write_range(pen, limits, top, height)


def _pixel_rows(values: NDArray[np.float64], limits: tuple[float, float], top: int, height: int) -> NDArray[np.float64]:
    low, high = limits
    span = high - low
    share = (values - low) / span if span else np.full(values.shape, 0.5)
    return top + 5 + (1 - share) * (height - 10)


def _write_range(pen: ImageDraw.ImageDraw, limits: tuple[float, float], top: int, height: int) -> None:
    low, high = limits
    texts = (
        [(high, top + 2), (low, top + height - line_height(_SMALL) - 1)]
        if low != high
        else [(low, top + height // 2 - 8)]
    )
    for value, at in texts:
        words = drawable(figure(value, 3), 12)
        write_line(pen, words, _SMALL, DIM, at, _LEFT - 6, align=1)


def _write_steps(image: Image.Image, length: int, top: int) -> None:
    pen = ImageDraw.Draw(image)
    inner = image.width - _LEFT - _RIGHT
    for share in np.linspace(0, 1, _TICKS + 1):
        words = f"{round(share * length):,}"
        size = text_width([words], _SMALL)
        at = min(max(_LEFT + share * inner - size / 2, _LEFT), image.width - size)
        pen.line((_LEFT + share * (inner - 1), top, _LEFT + share * (inner - 1), top + 4), DIM)
        write_line(pen, words, _SMALL, DIM, top + 5, at)


# --- Volumes ---


def _volume(
    volume: NDArray[np.float32] | None, heat_map: AttributionMap | None, size: Sequence[int], width: int
) -> Image.Image:
    """Draw the three middle slices of a volume (C, D, H, W), with a map, (d, h, w), over each.

    Below are the three slices through the cell with the map's greatest magnitude, if these are different slices.
    """
    middle = tuple(length // 2 for length in size)
    strongest = middle if heat_map is None else _strongest(heat_map, size)
    places = {middle: "middle"} if strongest == middle else {middle: "middle", strongest: "strongest"}
    rows = [_slices_through(volume, heat_map, place, size, width, name) for place, name in places.items()]
    image = Image.new("RGB", (width, sum(row.height for row in rows) + _GAP * (len(rows) - 1)), PAPER)
    top = 0
    for row in rows:
        image.paste(row, (0, top))
        top += row.height + _GAP
    return image


def _strongest(heat_map: AttributionMap, size: Sequence[int]) -> tuple[int, ...]:
    """Return the position in the input of the centre of the map's strongest cell."""
    values = np.where(np.isfinite(heat_map.values), np.abs(heat_map.values), 0)
    cell = np.unravel_index(int(values.argmax()), values.shape)
    begin, end = heat_map.extent[:3], heat_map.extent[3:]
    shares = [b + (at + 0.5) / cells * (e - b) for at, cells, b, e in zip(cell, values.shape, begin, end, strict=True)]
    return tuple(min(max(int(share * length), 0), length - 1) for share, length in zip(shares, size, strict=True))


def _slices_through(
    volume: NDArray[np.float32] | None,
    heat_map: AttributionMap | None,
    places: Sequence[int],
    size: Sequence[int],
    width: int,
    name: str,
) -> Image.Image:
    """Draw the slices through a position, one across each axis, side by side on one scale, with a label under each."""
    shades = None if volume is None else _shades(volume)
    wide = [size[2], size[2], size[1]]  # across planes (H, W), across rows (D, W), across columns (D, H)
    tall = [size[1], size[0], size[0]]
    room = width - 2 * _GAP
    factor = min(room / sum(wide), _TALLEST / max(tall))
    label = line_height(_SMALL) + 4
    image = Image.new("RGB", (width, max(1, round(max(tall) * factor)) + label), PAPER)
    pen = ImageDraw.Draw(image)
    left = 0
    for axis, place in enumerate(places):
        height, across = max(1, round(tall[axis] * factor)), max(1, round(wide[axis] * factor))
        ground = np.full((height, across, 3), _GREY, np.uint8)
        if shades is not None:
            resampling = Image.Resampling.BOX if factor < 1 else Image.Resampling.NEAREST
            shown = Image.fromarray(np.ascontiguousarray(shades.take(place, axis)))
            ground = np.asarray(shown.resize((across, height), resampling))
        if heat_map is not None:
            flat = _map_slice(heat_map, axis, (place + 0.5) / size[axis])
            ground = overlay(whole_photograph(ground), flat, colour_scale(heat_map.values))
        image.paste(Image.fromarray(ground), (left, 0))
        pen.rectangle((left, 0, left + across - 1, height - 1), outline=LINE)
        words = f"{name}: {_AXES[axis]} {place} of {size[axis]}"
        write_line(pen, words, _SMALL, DIM, height + 4, left)
        left += across + _GAP
    return image


def _map_slice(heat_map: AttributionMap, axis: int, share: float) -> AttributionMap:
    """Return the slice of a map at a share of an axis's length, interpolated between cells."""
    cells = heat_map.values.shape[axis]
    begin, end = heat_map.extent[axis], heat_map.extent[axis + 3]
    place = min(max((share - begin) / (end - begin) * cells - 0.5, 0), cells - 1)
    first = int(place)
    after, part = min(first + 1, cells - 1), np.float32(place - first)
    near, far = heat_map.values.take(first, axis), heat_map.values.take(after, axis)
    values = near if not part else near * (1 - part) + far * part
    extent = tuple(edge for at, edge in enumerate(heat_map.extent) if at % 3 != axis)
    return replace(heat_map, values=np.asarray(values, np.float32), extent=extent, pixels=None)


def _shades(volume: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return a volume (C, D, H, W) as colours (D, H, W, 3), from its least value, black, to its greatest, white."""
    shown = volume if len(volume) == _COLOURS else volume[:1]
    finite = shown[np.isfinite(shown)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    scaled = (np.nan_to_num(shown, nan=low, posinf=high, neginf=low) - low) / ((high - low) or 1.0)
    shades = np.rint(scaled * 255).clip(0, 255).astype(np.uint8).transpose(1, 2, 3, 0)
    return shades if shades.shape[3] == _COLOURS else np.repeat(shades, _COLOURS, axis=3)
