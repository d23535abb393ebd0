"""Inputs that are no pictures, and maps of them, drawn from the numbers that the network was given.

A signal is a curve under the map's colours, and the map is a curve below it. Volumes and clips are shown by slices
through the middle along each axis, and through the map's strongest place.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from hookscope.reporting.lettering import drawable, font, line_height
from hookscope.reporting.overlays import colour_scale, overlay
from hookscope.reporting.overviews.charts import VERMILION
from hookscope.reporting.overviews.sheet import DIM, LINE, PAPER
from hookscope.results.attributions import AttributionMap
from hookscope.results.inputs import Photograph, Region
from hookscope.text import figure

# Pixels. Labels stand at the left of the plots and below them.
_LEFT, _RIGHT, _FOOT = 76, 12, 24
_LANE, _FEWEST_ALONE, _MAP, _BETWEEN = 56, 150, 110, 12
_SMALL = 14
_MOST_CHANNELS = 12
"""Channels that are drawn, each in a lane of its own."""

_CURVE, _GROUND = (0, 0, 0), 150  # the ground of colour bars: equal values have equal colours
_NON_FINITE = (255, 0, 255)
_TICKS = 5
_SIGNAL_AXES = 2  # (C, L)

_GAP = 16
_TALLEST = 340
_GREY = 205  # of 255: the ground where the volume itself is not known
_AXES = ("plane", "row", "column")
_COLOURS = 3


def draw_given(data: NDArray[np.float32], width: int) -> Image.Image:
    """Draw a signal (C, L) as curves, or the middle slices of a volume (C, D, H, W), `width` pixels wide."""
    if data.ndim > _SIGNAL_AXES:
        return _row(data, None, _middle(data.shape[1:]), data.shape[1:], width, "middle")
    image, top = _lanes(data, width, None)
    _write_steps(image, data.shape[1], top)
    return image


def draw_given_map(data: NDArray[np.float32] | None, heat_map: AttributionMap, width: int) -> Image.Image:
    """Draw a map of a signal or a volume over it; by itself where the input is not known, or the map is of words."""
    data = data if data is not None and data.ndim == heat_map.values.ndim + 1 else None
    draw = _signal_map if heat_map.values.ndim == 1 else _volume_map
    return draw(data, heat_map, width)


def given_remark(data: NDArray[np.float32]) -> str:
    """Return a sentence about channels that are not drawn; "" if all are."""
    count = len(data)
    if data.ndim == _SIGNAL_AXES:
        return f"The first {_MOST_CHANNELS} of {count:,} channels are drawn." if count > _MOST_CHANNELS else ""
    return f"The first of {count:,} channels is drawn." if count not in (1, _COLOURS) else ""


def whole_photograph(pixels: NDArray[np.uint8], remark: str = "") -> Photograph:
    """Return a photograph (H, W, 3) that the input covers entirely."""
    height, width = pixels.shape[:2]
    return Photograph(pixels, Region(0, 0, height, width, height, width), remark)


# --- Signals ---


def _signal_map(samples: NDArray[np.float32] | None, heat_map: AttributionMap, width: int) -> Image.Image:
    """Draw a signal (C, L) under its map's colours, and the map, (l,), below it; the map alone without a signal."""
    length = heat_map.size[0] if heat_map.size else len(heat_map.values)
    signal = np.zeros((0, length), np.float32) if samples is None else samples
    image, top = _lanes(signal, width, heat_map)
    bottom = _draw_map(image, heat_map, top)
    _write_steps(image, length, bottom)
    return image


def _lanes(signal: NDArray[np.float32], width: int, heat: AttributionMap | None) -> tuple[Image.Image, int]:
    """Draw the channels of a signal under each other; return the image and where the next part begins."""
    shown = signal[:_MOST_CHANNELS]
    lane = max(_LANE, _FEWEST_ALONE // max(len(shown), 1))
    inner = width - _LEFT - _RIGHT
    height = lane * len(shown)
    below = 0 if heat is None else (_BETWEEN if height else 0) + _MAP
    image = Image.new("RGB", (width, height + below + _FOOT), PAPER)
    if not len(shown):
        return image, 0
    ground = np.full((height, inner, 3), _GROUND, np.uint8)
    if heat is not None:
        flat = replace(heat, values=heat.values[None], extent=(0.0, heat.extent[0], 1.0, heat.extent[1]))
        ground = overlay(whole_photograph(ground), flat, colour_scale(heat.values))
    image.paste(Image.fromarray(ground), (_LEFT, 0))
    pen = ImageDraw.Draw(image)
    for place, channel in enumerate(shown):
        finite = channel[np.isfinite(channel)]
        low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)
        _draw_curve(pen, channel, (low, high), (_LEFT, place * lane, inner, lane), _CURVE)
        _write_range(pen, (low, high), place * lane, lane)
    pen.rectangle((_LEFT, 0, _LEFT + inner - 1, height - 1), outline=LINE)
    return image, height + _BETWEEN


def _draw_map(image: Image.Image, heat_map: AttributionMap, top: int) -> int:
    """Draw a map as a curve over the steps that its cells lie at; return where it ends."""
    finite = heat_map.values[np.isfinite(heat_map.values)].astype(np.float64)
    low, high = float(finite.min(initial=0.0)), float(finite.max(initial=0.0))
    inner = image.width - _LEFT - _RIGHT
    pen = ImageDraw.Draw(image)
    box = (_LEFT, top, inner, _MAP)
    if colour_scale(heat_map.values).top:
        begin, end = heat_map.extent
        cells = len(heat_map.values)
        at = (begin + (np.arange(cells) + 0.5) / cells * (end - begin)) * inner
        if cells > inner:
            _draw_curve(pen, heat_map.values, (low, high), box, VERMILION)
        else:
            # Beyond the outermost cells their values go on, as colours do.
            x = np.concatenate([[0.0], at[(at > 0) & (at < inner)], [float(inner)]])
            _draw_line(pen, x, np.interp(x, at, heat_map.values.astype(np.float64)), (low, high), box, VERMILION)
    if low < 0 < high:
        zero = _height(np.array([0.0]), (low, high), top, _MAP)[0]
        pen.line((_LEFT, zero, _LEFT + inner, zero), LINE)
    pen.rectangle((_LEFT, top, _LEFT + inner - 1, top + _MAP - 1), outline=LINE)
    _write_range(pen, (low, high), top, _MAP)
    return top + _MAP


def _draw_curve(
    pen: ImageDraw.ImageDraw,
    values: NDArray[np.float32],
    limits: tuple[float, float],
    box: tuple[int, int, int, int],
    colour: tuple[int, int, int],
) -> None:
    """Draw values over the width of a box (left, top, width, height): each pixel's least and greatest if they are many.

    Where values are not finite there is a mark at the top.
    """
    left, top, width, _ = box
    finite = np.isfinite(values)
    shown = np.where(finite, values, np.nan).astype(np.float64)
    x = (np.arange(len(values)) + 0.5) / len(values) * width
    thickness = 2
    if len(values) > width:
        starts = np.linspace(0, len(values), width + 1).astype(int)[:-1]
        shown = np.stack([np.fmin.reduceat(shown, starts), np.fmax.reduceat(shown, starts)], 1).ravel()
        x, thickness = np.repeat(np.arange(width), 2), 1
    _draw_line(pen, x, shown, limits, box, colour, thickness)
    for place in np.nonzero(~finite)[0].tolist():
        at = left + (place + 0.5) / len(values) * width
        pen.line((at, top + 1, at, top + 6), _NON_FINITE, 2)


def _draw_line(
    pen: ImageDraw.ImageDraw,
    x: NDArray[np.float64],
    values: NDArray[np.float64],
    limits: tuple[float, float],
    box: tuple[int, int, int, int],
    colour: tuple[int, int, int],
    thickness: int = 2,
) -> None:
    """Draw values at places of a box, counted from its left edge; there is a gap where they are not finite."""
    left, top, _, height = box
    y = _height(values, limits, top, height)
    for run in np.ma.clump_unmasked(np.ma.masked_invalid(values)):  # type: ignore[no-untyped-call]
        points = [*zip((left + x[run]).tolist(), y[run].tolist(), strict=True)]
        pen.line(points, colour, thickness) if len(points) > 1 else pen.point(points, colour)


def _height(values: NDArray[np.float64], limits: tuple[float, float], top: int, height: int) -> NDArray[np.float64]:
    """Return the pixel rows of values between limits, with a little room above and below."""
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
        pen.text((_LEFT - 6 - font(_SMALL, words).getlength(words), at), words, DIM, font(_SMALL, words))


def _write_steps(image: Image.Image, length: int, top: int) -> None:
    pen = ImageDraw.Draw(image)
    inner = image.width - _LEFT - _RIGHT
    for share in np.linspace(0, 1, _TICKS + 1):
        words = f"{round(share * length):,}"
        size = font(_SMALL, words).getlength(words)
        at = min(max(_LEFT + share * inner - size / 2, _LEFT), image.width - size - 2)
        pen.line((_LEFT + share * (inner - 1), top, _LEFT + share * (inner - 1), top + 4), DIM)
        pen.text((at, top + 5), words, DIM, font(_SMALL, words))


# --- Volumes ---


def _volume_map(volume: NDArray[np.float32] | None, heat_map: AttributionMap, width: int) -> Image.Image:
    """Draw the three middle slices of a volume (C, D, H, W) with a map, (d, h, w), over each.

    Below are the three slices through the cell with the map's greatest magnitude, where those are others.
    """
    size = heat_map.size or heat_map.values.shape
    rows = [_row(volume, heat_map, _middle(size), size, width, "middle")]
    strongest = _strongest(heat_map, size)
    if strongest != _middle(size):
        rows.append(_row(volume, heat_map, strongest, size, width, "strongest"))
    image = Image.new("RGB", (width, sum(row.height for row in rows) + _GAP * (len(rows) - 1)), PAPER)
    top = 0
    for row in rows:
        image.paste(row, (0, top))
        top += row.height + _GAP
    return image


def _middle(size: Sequence[int]) -> tuple[int, ...]:
    return tuple(length // 2 for length in size)


def _strongest(heat_map: AttributionMap, size: Sequence[int]) -> tuple[int, ...]:
    """Return the position of the input in the middle of the cell with the map's greatest magnitude."""
    values = np.where(np.isfinite(heat_map.values), np.abs(heat_map.values), 0)
    cell = np.unravel_index(int(values.argmax()), values.shape)
    begin, end = heat_map.extent[:3], heat_map.extent[3:]
    shares = [b + (at + 0.5) / cells * (e - b) for at, cells, b, e in zip(cell, values.shape, begin, end, strict=True)]
    return tuple(min(max(int(share * length), 0), length - 1) for share, length in zip(shares, size, strict=True))


def _row(
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
            flat = _slice(heat_map, axis, (place + 0.5) / size[axis])
            ground = overlay(whole_photograph(ground), flat, colour_scale(heat_map.values))
        image.paste(Image.fromarray(ground), (left, 0))
        pen.rectangle((left, 0, left + across - 1, height - 1), outline=LINE)
        words = f"{name}: {_AXES[axis]} {place} of {size[axis]}"
        pen.text((left, height + 4), words, DIM, font(_SMALL, words))
        left += across + _GAP
    return image


def _slice(heat_map: AttributionMap, axis: int, share: float) -> AttributionMap:
    """Return a map across an axis, interpolated between its cells where the axis has come to a share of its length."""
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
