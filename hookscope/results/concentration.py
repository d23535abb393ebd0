"""Where the mass of an attribution map lies: the smallest box that holds half of it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hookscope.results.attributions import AttributionMap
from hookscope.results.inputs import InputRecord, Region

# Larger maps are summed in blocks, so many a side: the box is found to a thirtieth of the picture. Our choice.
_MOST_CELLS = 32

# Above this share of the input, the smallest box does not locate anything: half of an even map lies in half of it.
_SPREAD = 0.4


@dataclass(frozen=True, slots=True)
class Concentration:
    """The smallest box, in whole cells of the map, that holds half of what is above zero in it.

    Attributes:
        share: Of the area of the network's input, 0-1.
        region: The box, in pixels of the upright picture, or of the network's input where that is no picture.
    """

    share: float
    region: Region

    @property
    def words(self) -> str:
        """Where it lies in the picture, by thirds: "upper left"; "spread out" for a large box."""
        if self.share > _SPREAD:
            return "spread out"
        box = self.region
        down = int(min(max((box.top + box.bottom) / 2 / box.height, 0), 0.999) * 3)
        across = int(min(max((box.left + box.right) / 2 / box.width, 0), 0.999) * 3)
        rows = (
            ("upper left", "top", "upper right"),
            ("left", "centre", "right"),
            ("lower left", "bottom", "lower right"),
        )
        return rows[down][across]


def concentration(each: AttributionMap, record: InputRecord) -> Concentration | None:
    """Return where half of a map's positive mass lies; None for a map that is nowhere above zero."""
    positive = np.maximum(np.nan_to_num(each.values.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0), 0)
    top, left, bottom, right = each.extent
    edges = _edges(top, bottom, positive.shape[0]), _edges(left, right, positive.shape[1])
    # Of cells that lie partly or wholly outside of the network's input, only the part inside counts.
    steps = [
        (end - begin) / cells
        for (begin, end), cells in zip(((top, bottom), (left, right)), positive.shape, strict=True)
    ]
    positive *= np.outer(*(np.minimum(np.diff(one) / step, 1) for one, step in zip(edges, steps, strict=True)))
    total = positive.sum()
    if not total:
        return None
    rows, columns = (np.linspace(0, size, min(size, _MOST_CELLS) + 1).round().astype(int) for size in positive.shape)
    sums = np.add.reduceat(np.add.reduceat(positive, rows[:-1], axis=0), columns[:-1], axis=1)
    first, start, last, end = _smallest_box(sums / total, rows, columns)
    shown = record.region or Region(0, 0, *record.shape[-2:], *record.shape[-2:])
    tall, wide = shown.bottom - shown.top, shown.right - shown.left
    box = Region(
        max(shown.top + edges[0][first] * tall, 0.0),
        max(shown.left + edges[1][start] * wide, 0.0),
        min(shown.top + edges[0][last] * tall, float(shown.height)),
        min(shown.left + edges[1][end] * wide, float(shown.width)),
        shown.height,
        shown.width,
    )
    seen = (shown.bottom - shown.top) * (shown.right - shown.left)
    return Concentration(min(1.0, (box.bottom - box.top) * (box.right - box.left) / seen), box)


def _edges(begin: float, end: float, cells: int) -> NDArray[np.float64]:
    """Return where cells begin and end in the input, as shares of it; the outermost are drawn to its edges."""
    edges = np.linspace(begin, end, cells + 1).clip(0, 1)
    edges[0], edges[-1] = 0, 1
    return edges


def _smallest_box(
    shares: NDArray[np.float64], rows: NDArray[np.int_], columns: NDArray[np.int_]
) -> tuple[int, int, int, int]:
    """Return top, left, bottom and right of the smallest box with half of the sum, which is 1; of equals the fullest.

    `rows` and `columns` are the edges of the cells.
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
    return best[2]
