"""Where an attribution map is concentrated: the smallest box with half of its positive mass."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hookscope.results.inputs import PICTURE_AXES, InputRecord, Region
from hookscope.results.json_form import in_json

# By number of axes, the most cells a side; larger maps are summed in blocks. So the box is exact to a thirtieth of a
# picture, a twelfth of a volume (which has many more boxes), and a thousandth of a signal.
_MOST_CELLS = {1: 1000, 2: 32, 3: 12}

# Above this share of the input, a box locates nothing: an even map has half of its mass in half of the input.
_SPREAD = 0.4

Extent = tuple[float, ...]
"""Where an area begins along each axis of place, then where it ends, as shares of the network's input. It may reach
beyond 0 and 1. (top, left, bottom, right) in a picture, (begin, end) in a signal, (front, top, left, back, bottom,
right) in a volume."""


class PlacedMap(Protocol):
    """A map that can be drawn over a photograph: see `AttributionMap` for its parts."""

    @property
    def values(self) -> NDArray[np.float32]:
        """(h, w)."""

    @property
    def extent(self) -> Extent:
        """The area that the cells fill."""

    @property
    def box(self) -> tuple[float, float, float, float] | None:
        """A box to frame, (left, top, right, bottom) as shares of the network's input."""


class MapValues:
    """A map, with the shape and range of its values for JSON."""

    __slots__ = ()

    values: NDArray[np.float32]

    @property
    @in_json
    def shape(self) -> tuple[int, ...]:
        """Shape of the values."""
        return self.values.shape

    @property
    @in_json
    def range(self) -> tuple[float, float] | None:
        """The least and the greatest finite value; None without one."""
        finite = self.values[np.isfinite(self.values)]
        return (float(finite.min()), float(finite.max())) if finite.size else None


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a signal or a volume, in positions of the network's input along each axis."""

    begin: tuple[float, ...]
    end: tuple[float, ...]
    size: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Concentration:
    """The smallest box, in whole cells of the map, with half of its positive mass.

    Attributes:
        share: The box's share of the network's input, 0-1.
        region: The box, in pixels of the upright picture, or in positions of an input that is no picture.
    """

    share: float
    region: Region | Box

    @property
    @in_json
    def words(self) -> str:
        """Where it lies: "upper left" of a picture, by thirds, "steps 120 to 180 of 1,000"; "spread out" if large."""
        if self.share > _SPREAD:
            return "spread out"
        box = self.region
        if isinstance(box, Region):
            return _third((box.top, box.left), (box.bottom, box.right), (box.height, box.width))
        steps = f"{round(box.begin[0]):,} to {round(box.end[0]):,} of {box.size[0]:,}"
        if len(box.size) == 1:
            return f"steps {steps}"
        return f"planes {steps}, {_third(box.begin[1:], box.end[1:], box.size[1:])}"


def _third(begin: Sequence[float], end: Sequence[float], size: Sequence[int]) -> str:
    """Return in which third of height and of width the middle of a box lies."""
    middles = ((low + high) / 2 / length for low, high, length in zip(begin, end, size, strict=True))
    down, across = (int(min(max(middle, 0), 0.999) * 3) for middle in middles)
    rows = (("upper left", "top", "upper right"), ("left", "centre", "right"), ("lower left", "bottom", "lower right"))
    return rows[down][across]


def concentration(placed: PlacedMap, record: InputRecord) -> Concentration | None:
    """Return the smallest box with half of a map's positive mass; None for a map without positive values."""
    positive = np.maximum(np.nan_to_num(placed.values.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0), 0)
    axes = positive.ndim
    sides = [*zip(placed.extent[:axes], placed.extent[axes:], positive.shape, strict=True)]
    edges = [_edges(*side) for side in sides]
    # A cell counts by the part of it that lies inside the network's input.
    for axis, (begin, end, cells) in enumerate(sides):
        inside = np.minimum(np.diff(edges[axis]) / ((end - begin) / cells), 1)
        positive *= inside.reshape([-1 if place == axis else 1 for place in range(axes)])
    total = positive.sum()
    if not total:
        return None
    cuts = [np.linspace(0, size, min(size, _MOST_CELLS[axes]) + 1).round().astype(int) for size in positive.shape]
    sums = positive / total
    for axis, cut in enumerate(cuts):
        sums = np.add.reduceat(sums, cut[:-1], axis=axis)
    starts, ends = (
        [float(edges[axis][place]) for axis, place in enumerate(corner)] for corner in _smallest_box(sums, cuts)
    )
    size = (getattr(placed, "size", ()) or record.shape)[-axes:]
    if axes == PICTURE_AXES:
        return _in_picture(starts, ends, record.region or Region(0, 0, *size, *size))
    begins, stops = (tuple(np.multiply(shares, size).tolist()) for shares in (starts, ends))
    return Concentration(min(1.0, float(np.prod(np.subtract(ends, starts)))), Box(begins, stops, tuple(size)))


def _in_picture(begin: Sequence[float], end: Sequence[float], shown: Region) -> Concentration:
    tall, wide = shown.bottom - shown.top, shown.right - shown.left
    box = Region(
        max(shown.top + begin[0] * tall, 0.0),
        max(shown.left + begin[1] * wide, 0.0),
        min(shown.top + end[0] * tall, float(shown.height)),
        min(shown.left + end[1] * wide, float(shown.width)),
        shown.height,
        shown.width,
    )
    return Concentration(min(1.0, (box.bottom - box.top) * (box.right - box.left) / (tall * wide)), box)


def _edges(begin: float, end: float, cells: int) -> NDArray[np.float64]:
    """Return the edges of cells as shares of the input; the outermost edges become 0 and 1."""
    edges = np.linspace(begin, end, cells + 1).clip(0, 1)
    edges[0], edges[-1] = 0, 1
    return edges


def _smallest_box(shares: NDArray[np.float64], cuts: Sequence[NDArray[np.int_]]) -> tuple[list[int], list[int]]:
    """Return where the smallest box with half of the sum begins and ends; among equals, the one with the largest sum.

    All shares sum to 1. `cuts` are the edges of the cells along each axis.
    """
    axes = shares.ndim
    planes, rows, columns = [np.array([0, 1])] * (3 - axes) + [*cuts]
    shares = shares.reshape((1,) * (3 - axes) + shares.shape)
    best = (float("inf"), 0.0)
    begin, end = [0, 0, 0], [int(cut[-1]) for cut in (planes, rows, columns)]
    for front in range(len(shares)):
        for back in range(front + 1, len(shares) + 1):
            area, negative, (top, left, bottom, right) = _smallest_rectangle(shares[front:back].sum(0), rows, columns)
            volume = area * float(planes[back] - planes[front])
            if (volume, negative) < best:
                best = (volume, negative)
                begin, end = [int(planes[front]), top, left], [int(planes[back]), bottom, right]
    return begin[-axes:], end[-axes:]


def _smallest_rectangle(
    shares: NDArray[np.float64], rows: NDArray[np.int_], columns: NDArray[np.int_]
) -> tuple[float, float, tuple[int, int, int, int]]:
    """Return the area of the smallest rectangle with half of the sum, its negated sum, and the rectangle.

    The area is infinite if there is none. `rows` and `columns` are the edges of the cells.
    """
    best = (float("inf"), 0.0, (0, 0, int(rows[-1]), int(columns[-1])))
    for first in range(len(shares)):
        # Sums of all boxes from this row on: to each later row, and from the left to each column.
        sums = np.pad(np.cumsum(np.cumsum(shares[first:], axis=0), axis=1), ((0, 0), (1, 0)))  # (h, w + 1)
        # For each left edge, the first right edge with half of everything between them.
        ends = (sums[:, None, :] < sums[:, :, None] + 0.5 - 1e-9).sum(axis=2)
        lasts, starts = np.nonzero(ends < sums.shape[1])
        if not len(lasts):
            continue
        ends = ends[lasts, starts]
        areas = (rows[first + lasts + 1] - rows[first]) * (columns[ends] - columns[starts])
        held = sums[lasts, ends] - sums[lasts, starts]
        place = int(np.lexsort((-held, areas))[0])
        if (areas[place], -held[place]) < best[:2]:
            last, start, end = lasts[place], starts[place], ends[place]
            box = (int(rows[first]), int(columns[start]), int(rows[first + last + 1]), int(columns[end]))
            best = (float(areas[place]), float(-held[place]), box)
    return best
