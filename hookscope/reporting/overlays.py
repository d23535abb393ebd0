"""Maps of where a network looks, drawn over the photograph: crop and resize inverted exactly, nothing drawn outside.

A map's cells and a picture's pixels are squares that touch; values belong to their centres. Between centres, values are
interpolated linearly along both axes; where cells are smaller than pixels, they are averaged with a triangular window,
so that none is passed over. No value is squared, smoothed or stretched: colours reach from zero to the largest value.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hookscope.reporting.palettes import colour_levels
from hookscope.results.activations import Activations
from hookscope.results.concentration import PlacedMap
from hookscope.results.differences import Differences
from hookscope.results.gradients import Gradients
from hookscope.results.inputs import Photograph, Region
from hookscope.text import figure

# By eye: at the top of the scale, a little of the photograph still shows; at a tenth of the scale, it is hardly tinted.
_STRONGEST = 0.82
_RISE = 0.75  # power of the share of the scale
_LEVELS = 255  # on each side of zero
_POSITIVE, _SIGNED = "inferno", "coolwarm"
_FIRST_SHADE = 0.3  # values above zero start here: darker shades would look like shadows
_NON_FINITE = (255, 0, 255)
_GREYED = 5  # eighths of the photograph's colour that an overlay takes away
_BAR_GREY = 150
_BOX, _BOX_EDGE = (255, 255, 255), (20, 20, 20)
_LINES_ACROSS = 400  # a box's line is the photograph's larger side divided by this

# In maps at least this fine, which tell pixels apart, a few values are far larger than all others.
_FINE = 64 * 64  # cells
_FINE_QUANTILE = 0.995

_ROWS_AT_ONCE = 256  # rows of a photograph: keeps its floating-point copies small
_OUTSIDE_GREY = 238
_OUTSIDE_SHARE = 0.62  # how much of that grey is added where the network sees nothing


@dataclass(frozen=True, slots=True)
class ColourScale:
    """The values that a map's colours stand for.

    Attributes:
        top: The value with the strongest colour, above 0; 0 for a map that is zero everywhere, NaN for one without a
            finite value.
        signed: From `-top` to `top`, with nothing drawn at 0; else from 0 to `top`.
        clipped: Whether some values are beyond the top.
    """

    top: float
    signed: bool
    clipped: bool = False

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels at the ends of the colour bar, and at zero if it is signed; without a bar, the reason."""
        if not self.top > 0:
            return ("no finite value" if math.isnan(self.top) else "0 everywhere",)
        top = figure(self.top, 3)
        if self.signed:
            return (f"{'<= ' if self.clipped else ''}-{top}", "0", f"{'>= ' if self.clipped else ''}{top}")
        return ("0", f"{'>= ' if self.clipped else ''}{top}")


def colour_scale(values: NDArray[np.float32], *, clips: bool = True) -> ColourScale:
    """Return the scale of the values of one map; the top of a fine map that clips is the 99.5th percentile."""
    values = values[np.isfinite(values)].astype(np.float64)
    if not values.size:
        return ColourScale(math.nan, signed=False)
    signed = bool(values.min() < 0)
    magnitudes = np.abs(values)
    largest = top = float(magnitudes.max())
    if clips and magnitudes.size >= _FINE:
        top = float(np.quantile(magnitudes, _FINE_QUANTILE)) or largest
    return ColourScale(top, signed, clipped=top < largest)


def shrunk(photograph: Photograph, height: int, width: int) -> Photograph:
    """Return the photograph in another size, with its region; the same one if it has that size."""
    if photograph.pixels.shape[:2] == (height, width):
        return photograph
    picture = Image.fromarray(photograph.pixels).resize((width, height), Image.Resampling.LANCZOS, reducing_gap=3.0)
    return replace(photograph, pixels=np.asarray(picture), region=resized(photograph.region, height, width))


def resized(region: Region, height: int, width: int) -> Region:
    """Return the region of a photograph in another size."""
    down, across = height / region.height, width / region.width
    return Region(region.top * down, region.left * across, region.bottom * down, region.right * across, height, width)


def overlay(photograph: Photograph, placed: PlacedMap, scale: ColourScale | None = None) -> NDArray[np.uint8]:
    """Draw a map over a photograph in its own size, (H, W, 3); what the network did not see is pale and grey.

    The photograph loses most of its colour, so that the map's colours stand out. A map that is part of another map
    is drawn in the other's `scale`.
    """
    scale = scale or colour_scale(placed.values)
    colours, opacities = _premultiplied(scale.signed)
    result = outside_dimmed(photograph)
    columns = seen_part(photograph.region)[1]
    for rows, values in resampled(placed, photograph.region):
        base = photograph.pixels[rows, columns]
        levels, holes = _levels(values, scale)
        shown = 256 - opacities[levels]  # share of the photograph, in 256ths
        grey = _grey(base).astype(np.uint16) * _GREYED
        for channel in range(3):
            faded = (base[..., channel].astype(np.uint16) * (8 - _GREYED) + grey) >> 3
            result[rows, columns, channel] = (faded * shown + colours[:, channel][levels]) >> 8
        if holes is not None:
            result[rows, columns][holes] = _NON_FINITE
    for colour, part in _frame(placed, photograph.region):
        result[part] = colour
    return result


def outside_dimmed(photograph: Photograph) -> NDArray[np.uint8]:
    """Return the photograph with what the network did not see pale and grey."""
    rows, columns = seen_part(photograph.region)
    result = np.empty_like(photograph.pixels)
    for start in range(0, len(result), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        pale = _grey(photograph.pixels[part]) * (1 - _OUTSIDE_SHARE) + _OUTSIDE_GREY * _OUTSIDE_SHARE
        result[part] = (pale + 0.5).astype(np.uint8)[..., None]
    result[rows, columns] = photograph.pixels[rows, columns]
    return result


def input_picture(
    result: Activations | Gradients | Differences, index: int, width: int, height: int
) -> Image.Image | None:
    """Return an input as the network saw it, as large as the place allows; None if it is not a picture."""
    provenance, record = result.provenance, result.inputs[index]
    pixels = None if provenance is None else provenance.pictures.get(record)
    if pixels is None and record.region is not None and provenance is not None and provenance.photographs is not None:
        photograph = provenance.photographs(result.inputs, index)
        pixels = photograph.pixels[seen_part(photograph.region)] if not photograph.remark else None
    if pixels is None or not pixels.size:
        return None
    picture = Image.fromarray(np.ascontiguousarray(pixels)).convert("RGB")
    ratio = min(width / picture.width, height / picture.height)
    size = (max(1, round(picture.width * ratio)), max(1, round(picture.height * ratio)))
    return picture.resize(size, Image.Resampling.LANCZOS, reducing_gap=3.0)


def tint(placed: PlacedMap, region: Region) -> NDArray[np.uint8]:
    """Return the colours of a map alone, (H, W, 4) uint8, transparent where it is low and outside the region."""
    scale = colour_scale(placed.values)
    result = np.zeros((region.height, region.width, 4), np.uint8)
    columns = seen_part(region)[1]
    for rows, values in resampled(placed, region):
        levels, holes = _levels(values, scale)
        result[rows, columns] = _rgba(scale.signed)[levels]
        if holes is not None:
            result[rows, columns][holes] = (*_NON_FINITE, 255)
    for colour, part in _frame(placed, region):
        result[part] = (*colour, 255)
    return result


def tint_colours() -> NDArray[np.uint8]:
    """Return colour and opacity of 256 levels from 0 to the top of a scale without a sign, (256, 4)."""
    return np.ascontiguousarray(_rgba(False)[_LEVELS:])


def _frame(placed: PlacedMap, region: Region) -> Iterator[tuple[tuple[int, int, int], tuple[slice, slice]]]:
    """Yield colours and places of the frame inside the edge of a box: dark, with a white line in the middle."""
    if placed.box is None:
        return
    left, top, right, bottom = placed.box
    high, wide = region.bottom - region.top, region.right - region.left
    top, bottom = (round(region.top + share * high) for share in (top, bottom))
    left, right = (round(region.left + share * wide) for share in (left, right))
    line = max(1, round(max(region.height, region.width) / _LINES_ACROSS))
    for colour, inset, thickness in ((_BOX_EDGE, 0, 3 * line), (_BOX, line, line)):
        rows, columns = (top + inset, bottom - inset), (left + inset, right - inset)
        for begin in (rows[0], rows[1] - thickness):
            yield colour, (_slice(begin, begin + thickness), _slice(*columns))
        for begin in (columns[0], columns[1] - thickness):
            yield colour, (_slice(*rows), _slice(begin, begin + thickness))


def _slice(begin: int, end: int) -> slice:
    """Return a slice that begins at 0 if the box begins left of the picture or above it."""
    return slice(max(0, begin), max(0, end))


def seen_part(region: Region) -> tuple[slice, slice]:
    """Return the rows and columns of the photograph whose centres the network's input covers."""
    rows = slice(max(0, _first_pixel(region.top)), max(0, min(region.height, _first_pixel(region.bottom))))
    return rows, slice(max(0, _first_pixel(region.left)), max(0, min(region.width, _first_pixel(region.right))))


def _first_pixel(edge: float) -> int:
    return math.ceil(edge - 0.5)


def bar(scale: ColourScale, length: int, thickness: int) -> NDArray[np.uint8]:
    """Draw what colours mean over a middle grey, (thickness, length, 3), from the least value to the greatest."""
    levels = np.linspace(-_LEVELS if scale.signed else 0, _LEVELS, length).round().astype(int) + _LEVELS
    colours, opacities = _premultiplied(scale.signed)
    row = (_BAR_GREY * (256 - opacities[levels, None]) + colours[levels]) >> 8
    return np.repeat(row.astype(np.uint8)[None], thickness, axis=0)


def resampled(placed: PlacedMap, region: Region) -> Iterator[tuple[slice, NDArray[np.float32]]]:
    """Yield slices of the photograph's seen rows, and the map's values there; NaN where half of them are not finite."""
    values = placed.values
    top, left, bottom, right = placed.extent
    tall, wide = region.bottom - region.top, region.right - region.left
    seen_rows, seen_columns = seen_part(region)
    down = _cell_weights(region.top + top * tall, (bottom - top) * tall, values.shape[0], seen_rows)
    across = _cell_weights(region.left + left * wide, (right - left) * wide, values.shape[1], seen_columns)
    finite = np.isfinite(values)
    stretched = np.where(finite, values, np.float32(0)) @ across.T  # (h, W)
    holes = None if finite.all() else (~finite).astype(np.float32) @ across.T
    for start in range(0, len(down), _ROWS_AT_ONCE):
        part = down[start : start + _ROWS_AT_ONCE]
        shown = part @ stretched
        if holes is not None:
            shown[part @ holes >= 0.5] = np.nan
        first = seen_rows.start + start
        yield slice(first, first + len(part)), shown


def _cell_weights(begin: float, length: float, cells: int, pixels: slice) -> NDArray[np.float32]:
    """Return the weight of each cell in each pixel, (pixels, cells); the cells begin at `begin` and fill `length`."""
    cells_per_pixel = cells / length
    # Pixel centres, in cells; beyond the outermost cell centres there is nothing to interpolate between.
    places = ((np.arange(pixels.start, pixels.stop) + 0.5 - begin) * cells_per_pixel - 0.5).clip(0, cells - 1)
    reach = max(1.0, cells_per_pixel)
    weights = np.maximum(0.0, 1 - np.abs(places[:, None] - np.arange(cells)) / reach)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True), np.float32)


def _levels(values: NDArray[np.float32], scale: ColourScale) -> tuple[NDArray[np.int16], NDArray[np.bool_] | None]:
    """Return the index of every value in the tables of colours, and the mask of NaN, None without NaN."""
    holes = np.isnan(values)
    lift = np.float32(2.0**100 if scale.top < 2.0**-100 else 1)  # the factor of a smaller top would be infinite
    factor = np.float32(_LEVELS / (scale.top * float(lift))) if scale.top > 0 else np.float32(0)
    scaled = np.clip(values * lift * factor, -_LEVELS, _LEVELS)
    if holes.any():
        return np.rint(np.where(holes, 0, scaled)).astype(np.int16) + _LEVELS, holes
    return np.rint(scaled).astype(np.int16) + _LEVELS, None


@lru_cache(maxsize=2)
def _rgba(signed: bool) -> NDArray[np.uint8]:
    """Return colour and opacity of each level from -255 to 255, (511, 4)."""
    shares = np.linspace(-1, 1, 2 * _LEVELS + 1)
    if signed:
        colours = colour_levels(_SIGNED, 2 * _LEVELS + 1)
    else:
        shades = _FIRST_SHADE + (1 - _FIRST_SHADE) * np.maximum(shares, 0)
        colours = colour_levels(_POSITIVE, 1024)[np.rint(1023 * shades).astype(int)]
    opacity = _STRONGEST * (np.abs(shares) if signed else np.maximum(shares, 0)) ** _RISE
    return np.column_stack([colours, np.rint(opacity * 255)]).astype(np.uint8)


@lru_cache(maxsize=2)
def _premultiplied(signed: bool) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """Return colour times opacity, (511, 3), and opacity, (511,), of each level, both in 256ths."""
    rgba = _rgba(signed).astype(np.float64)
    opacities = np.rint(rgba[:, 3] * 256 / 255)
    return np.rint(rgba[:, :3] * opacities[:, None]).astype(np.uint16), opacities.astype(np.uint16)


def _grey(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the luma of ITU-R BT.601."""
    parts = pixels.astype(np.uint16)
    return ((parts[..., 0] * 77 + parts[..., 1] * 150 + parts[..., 2] * 29) >> 8).astype(np.uint8)
