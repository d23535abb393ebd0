"""Maps of volumes and clips: slices through the middle along each axis, and through the map's strongest place."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from hookscope.reporting.lettering import font, line_height
from hookscope.reporting.overlays import colour_scale, overlay
from hookscope.reporting.overviews.sheet import DIM, LINE, PAPER
from hookscope.results.attributions import AttributionMap
from hookscope.results.inputs import Photograph, Region

_GAP, _SMALL = 16, 14  # pixels
_TALLEST = 340
_GREY = 205  # of 255: the ground where the volume itself is not known
_AXES = ("plane", "row", "column")
_COLOURS = 3


def draw_volume(volume: NDArray[np.float32], width: int) -> Image.Image:
    """Draw the three middle slices of a volume (C, D, H, W) by itself, `width` pixels wide."""
    return _row(volume, None, _middle(volume.shape[1:]), volume.shape[1:], width, "middle")


def draw_volume_map(volume: NDArray[np.float32] | None, heat_map: AttributionMap, width: int) -> Image.Image:
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


def volume_remark(volume: NDArray[np.float32]) -> str:
    """Return a sentence about channels that are not drawn; "" if all are."""
    count = len(volume)
    return f"The first of {count:,} channels is drawn." if count not in (1, _COLOURS) else ""


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
            flat = Image.fromarray(np.ascontiguousarray(shades.take(place, axis)))
            ground = np.asarray(
                flat.resize((across, height), Image.Resampling.BOX if factor < 1 else Image.Resampling.NEAREST)
            )
        if heat_map is not None:
            photograph = Photograph(ground, Region(0, 0, height, across, height, across))
            ground = overlay(
                photograph, _slice(heat_map, axis, (place + 0.5) / size[axis]), colour_scale(heat_map.values)
            )
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
