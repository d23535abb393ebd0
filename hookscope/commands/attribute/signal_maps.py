"""Maps of signals: the input as a curve under the map's colours, and below it the map as a curve."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from hookscope.reporting.lettering import drawable, font, line_height
from hookscope.reporting.overlays import ColourScale, colour_scale, overlay
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

_CURVE, _GROUND = (0, 0, 0), 150  # that of colour bars, so that equal values have equal colours
_NON_FINITE = (255, 0, 255)
_TICKS = 5


def draw_signal(signal: NDArray[np.float32], width: int) -> Image.Image:
    """Draw a signal (C, L) by itself, `width` pixels wide."""
    image, top = _lanes(signal, width, None)
    _write_steps(image, signal.shape[1], top)
    return image


def draw_signal_map(samples: NDArray[np.float32] | None, heat_map: AttributionMap, width: int) -> Image.Image:
    """Draw a signal (C, L) under its map's colours, and the map, (l,), below it; the map alone without a signal."""
    length = heat_map.size[0] if heat_map.size else len(heat_map.values)
    signal = np.zeros((0, length), np.float32) if samples is None else samples
    image, top = _lanes(signal, width, heat_map)
    bottom = _draw_map(image, heat_map, top)
    _write_steps(image, length, bottom)
    return image


def channel_remark(signal: NDArray[np.float32]) -> str:
    """Return a sentence about channels that are not drawn; "" if all are."""
    count = len(signal)
    return f"The first {_MOST_CHANNELS} of {count:,} channels are drawn." if count > _MOST_CHANNELS else ""


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
        ground = overlay(
            Photograph(ground, Region(0, 0, height, inner, height, inner)), flat, colour_scale(heat.values)
        )
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
    scale: ColourScale = colour_scale(heat_map.values)
    finite = heat_map.values[np.isfinite(heat_map.values)].astype(np.float64)
    high = float(finite.max(initial=0.0))
    low = float(finite.min(initial=0.0))
    inner = image.width - _LEFT - _RIGHT
    pen = ImageDraw.Draw(image)
    box = (_LEFT, top, inner, _MAP)
    if scale.top:
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
    """Write the steps of a signal under a plot, at fifths of its width."""
    pen = ImageDraw.Draw(image)
    inner = image.width - _LEFT - _RIGHT
    for share in np.linspace(0, 1, _TICKS + 1):
        words = f"{round(share * length):,}"
        size = font(_SMALL, words).getlength(words)
        at = min(max(_LEFT + share * inner - size / 2, _LEFT), image.width - size - 2)
        pen.line((_LEFT + share * (inner - 1), top, _LEFT + share * (inner - 1), top + 4), DIM)
        pen.text((at, top + 5), words, DIM, font(_SMALL, words))
