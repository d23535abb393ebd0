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
    # Of cells that lie partly or wholly in what the network added to its input, only the part of the picture counts.
    positive *= np.outer(*map(_inside, positive.shape, each.padding))
    total = positive.sum()
    if not total:
        return None
    rows, columns = (np.linspace(0, size, min(size, _MOST_CELLS) + 1).round().astype(int) for size in positive.shape)
    sums = np.add.reduceat(np.add.reduceat(positive, rows[:-1], axis=0), columns[:-1], axis=1)
    top, left, bottom, right = _smallest_box(sums / total, rows, columns)
    height, width = positive.shape
    shown = record.region or Region(0, 0, *record.shape[-2:], *record.shape[-2:])
    tall = (shown.bottom - shown.top) / (1 - each.padding[0]) / height  # pixels of the picture a cell
    wide = (shown.right - shown.left) / (1 - each.padding[1]) / width
    box = Region(
        max(shown.top + top * tall, 0.0),
        max(shown.left + left * wide, 0.0),
        min(shown.top + bottom * tall, shown.bottom, float(shown.height)),
        min(shown.left + right * wide, shown.right, float(shown.width)),
        shown.height,
        shown.width,
    )
    seen = (shown.bottom - shown.top) * (shown.right - shown.left)
    return Concentration(min(1.0, (box.bottom - box.top) * (box.right - box.left) / seen), box)


def _inside(cells: int, padding: float) -> NDArray[np.float64]:
    """Return which share of each row or column of cells lies in the picture."""
    return np.clip(cells * (1 - padding) - np.arange(cells), 0, 1)


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
