"""How values are distributed, as counts over logarithmic bins that are the same for every tensor, batch and process.

A bin holds the values of one sign, between one power of two and the next, in one of 32 equal parts of the way; zero has
a bin of its own. No bin is wider than 1/32 of its smallest magnitude. Bins are named by integers that ascend with the
values: 0 for zero, and otherwise, with the sign of the values, 1 + 32 (e + 1074) + p for magnitudes from 2^e (1 + p/32)
to 2^e (1 + (p + 1)/32). All of float64 has its place, subnormal numbers included.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

EXACT_LIMIT = 1024
"""Up to this many values are kept instead of being counted: 8 KiB at most, about what the bins take."""

QUANTILE_ERROR = 0.03
"""How far a quantile of more values may be off, in units of its magnitude, if it is not within 0.5% of its rank."""

PARTS = 32
_LOWEST_EXPONENT = -1074  # of float64's smallest subnormal number
_CHUNK = 2**18  # so many values are taken apart at a time, in a few MB

# An estimated value is kept so near to both edges of its bin, relative to them: a bin may be 3.1% wide, and the
# guarantee is 3%, of which the interpolation between two neighbours of different sign may need some.
_NEAR_EDGES = 0.028

BIN_COUNT = 24
"""A bar in a table row is three pixels wide."""

# The bars span the values between these shares, so that a single far value does not press all others into one bar.
_TAIL = 0.01

# Interpolating over more overflows float64, whose largest value is 1.8e308.
_WIDEST = 1e300


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """How the finite values of a tensor are distributed; there is at least one.

    Up to `EXACT_LIMIT` values are kept as they are, more are counted in bins. Either way it follows from the values
    alone, whatever the order, the batches or the processes in which they came.

    Attributes:
        values: The values, ascending, (K,); None if they are counted.
        keys: Bins that hold any value, ascending, (B,), see docs/reference/files.md; None if values are kept.
        counts: Values in each bin, (B,); None if values are kept.
    """

    low: float
    high: float
    count: int
    values: NDArray[np.float64] | None = None
    keys: NDArray[np.int32] | None = None
    counts: NDArray[np.int64] | None = None

    def is_of(self, count: int) -> bool:
        """Tell whether this can be the distribution of so many values: a file may be damaged, or a stranger's."""
        if not 0 < count == self.count or not -math.inf < self.low <= self.high < math.inf:
            return False
        if (values := self.values) is not None:
            right = values.shape == (count,) and values.dtype == np.float64
            return bool(right and (np.diff(values) >= 0).all() and (values[0], values[-1]) == (self.low, self.high))
        keys, counts = self.keys, self.counts
        if keys is None or counts is None or keys.ndim != 1 or keys.shape != counts.shape:
            return False
        right = keys.dtype == np.int32 and counts.dtype == np.int64
        return bool(right and (np.diff(keys) > 0).all() and (counts > 0).all() and counts.sum() == count)

    def binned(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the bins that hold any value, ascending, and how many each holds; see `keys` and `counts`."""
        if self.keys is not None and self.counts is not None:
            return self.keys, self.counts
        return bin_values(np.zeros(0) if self.values is None else self.values)

    def spans(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
        """Return where the values lie, ascending: lower and upper ends, equal for kept values and zero, and counts."""
        if self.values is not None:
            return self.values, self.values, np.ones(self.values.size, np.int64)
        keys, counts = self.binned()
        lows, highs = edges_of(keys)
        return lows.clip(self.low, self.high), highs.clip(self.low, self.high), counts

    def histogram(self, edges: NDArray[np.float64]) -> NDArray[np.float64]:
        """Count values between ascending edges, (E + 1,), as `numpy.histogram` does: half-open, but the last closed.

        A bin that an edge divides counts on both sides by its width, so counts, (E,), need not be whole.
        """
        lows, highs, counts = self.spans()
        totals = np.concatenate([[0], np.cumsum(counts)])

        def up_to(points: NDArray[np.float64], side: Literal["left", "right"]) -> NDArray[np.float64]:
            """Count what lies below points, or with side "right" at them as well."""
            last = np.searchsorted(lows, points, side=side) - 1
            inside = last.clip(0)
            widths = (highs - lows)[inside]
            covered = points.clip(lows[inside], highs[inside]) - lows[inside]
            shares = np.divide(covered, widths, out=np.ones(points.size), where=widths > 0)
            return np.where(last < 0, 0.0, totals[inside] + counts[inside] * shares)

        return np.diff(np.append(up_to(edges[:-1], "left"), up_to(edges[-1:], "right")))

    def share_outside(self, low: float, high: float) -> float:
        """Return the share of values at or below `low` or at or above `high`, 0-1."""
        inside = self.histogram(np.array([np.nextafter(low, high), np.nextafter(high, low)]))
        return float(1 - inside[0] / self.count)

    def nonzero(self) -> "Distribution | None":
        """Return the same without zeros; None if all are zero."""
        if self.values is not None:
            return distribution_of(self.values[self.values != 0])
        keys, counts = self.binned()
        kept = keys != 0
        if not kept.any():
            return None
        lows, highs = edges_of(keys[kept][[0, -1]])
        low, high = self.low or float(lows[0]), self.high or float(highs[1])
        return Distribution(low, high, int(counts[kept].sum()), None, keys[kept], counts[kept])


def distribution_of(values: NDArray[np.floating]) -> Distribution | None:
    """Return the distribution of finite values of any number and order; None without any."""
    if not values.size:
        return None
    if values.size <= EXACT_LIMIT:
        ordered = np.sort(values).astype(np.float64)
        return Distribution(float(ordered[0]), float(ordered[-1]), ordered.size, ordered)
    return Distribution(float(values.min()), float(values.max()), values.size, None, *bin_values(values))


def distribution_of_zeros(count: int) -> Distribution:
    """Return the distribution of zeros, one or more."""
    if count <= EXACT_LIMIT:
        return Distribution(0.0, 0.0, count, np.zeros(count))
    return Distribution(0.0, 0.0, count, None, np.zeros(1, np.int32), np.array([count], np.int64))


def key_of(exponent: NDArray[np.int32] | int) -> Any:
    """Return the first bin above a power of two, as an integer or integers."""
    return 1 + PARTS * (exponent - _LOWEST_EXPONENT)


def bin_values(values: NDArray[np.floating]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the bins that finite values fall in, ascending, and how many each holds."""
    pieces = [values[start : start + _CHUNK] for start in range(0, values.size, _CHUNK)]
    keys = np.concatenate([np.zeros(0, np.int64), *map(_keys_of, pieces)])
    lowest = keys.min(initial=0)
    counts = np.bincount(keys - lowest)
    (occupied,) = np.nonzero(counts)
    return (occupied + lowest).astype(np.int32), counts[occupied].astype(np.int64)


def _keys_of(values: NDArray[np.floating]) -> NDArray[np.int64]:
    mantissas, exponents = np.frexp(np.abs(np.asarray(values, np.float64)))  # a magnitude is m 2^e, 0.5 <= m < 1
    keys = key_of(exponents - 1) + (mantissas * (2 * PARTS)).astype(np.int64) - PARTS
    return np.where(values == 0, 0, np.where(values < 0, -keys, keys))


def edges_of(keys: NDArray[np.int32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the lower and the upper edges of bins, each (B,); those of the largest float64 may be infinite."""
    exponents, parts = _places(keys)
    with np.errstate(over="ignore"):
        near, far = (np.sign(keys) * np.ldexp(1 + (parts + end) / PARTS, exponents) for end in (0, 1))
    return np.minimum(near, far), np.maximum(near, far)


def merge_distributions(first: Distribution | None, second: Distribution | None) -> Distribution | None:
    """Return the distribution of the values of both; None is one of no values."""
    if first is None or second is None:
        return first or second
    if first.values is not None and second.values is not None:
        return distribution_of(np.concatenate([first.values, second.values]))
    sides = first.binned(), second.binned()
    keys = np.concatenate([keys for keys, _ in sides])
    order = keys.argsort(kind="stable")  # fast where two sorted runs come together
    keys, counts = keys[order], np.concatenate([counts for _, counts in sides])[order]
    starts = np.flatnonzero(np.diff(keys, prepend=keys[0] - 1))
    low, high = min(first.low, second.low), max(first.high, second.high)
    count = first.count + second.count
    return Distribution(low, high, count, None, keys[starts], np.add.reduceat(counts, starts))


def quantiles(distributions: Sequence[Distribution], levels: Sequence[float]) -> list[tuple[float, ...]]:
    """Return quantiles as `numpy.quantile` defines them by default: linear between the two values next in rank.

    Where values are kept these are theirs. Otherwise each of the two values is placed in its bin by its rank, and the
    result is within 3% of the true quantile or within 0.5% of its rank; its sign is right unless the quantile lies
    between two neighbouring values of different sign. Levels are from 0 to 1; one call for many is faster.
    """
    if not distributions:
        return []
    sizes = np.array([distribution.count for distribution in distributions], np.int64)
    positions = np.multiply.outer(sizes - 1, levels)  # (n, levels)
    below = positions.astype(np.int64)
    above = np.minimum(below + 1, sizes[:, None] - 1)
    bounds = np.empty((2, *positions.shape))
    ranks = np.stack([below, above], axis=1)  # (n, 2, levels)
    for place, at_ranks in ((_kept, True), (_placed, False)):
        rows = [row for row, distribution in enumerate(distributions) if (distribution.values is not None) == at_ranks]
        if rows:
            bounds[:, rows] = place([distributions[row] for row in rows], ranks[rows]).swapaxes(0, 1)
    low, high = bounds
    shares = positions - below
    between = np.where(low == high, low, low * (1 - shares) + high * shares)  # no difference, which may overflow
    return [tuple(row) for row in between.tolist()]


def _kept(distributions: Sequence[Distribution], ranks: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the values at ranks, (n, 2, levels), of distributions that keep them."""
    arrays = [distribution.values for distribution in distributions if distribution.values is not None]
    starts = np.cumsum([0, *(array.size for array in arrays[:-1])])
    values: NDArray[np.float64] = np.concatenate(arrays)[starts[:, None, None] + ranks]
    return values


def _placed(distributions: Sequence[Distribution], ranks: NDArray[np.int64]) -> NDArray[np.float64]:
    """Estimate the values at ranks, (n, 2, levels), of distributions that count them in bins."""
    bins = [distribution.binned() for distribution in distributions]
    keys, counts = np.concatenate([array for array, _ in bins]), np.concatenate([array for _, array in bins])
    ends = np.cumsum(counts)  # over all of them, one after the other
    starts = np.cumsum([0, *(distribution.count for distribution in distributions[:-1])])
    overall = starts[:, None, None] + ranks
    at = np.searchsorted(ends, overall, side="right")
    fractions = 1 - (ends[at] - overall - 0.5) / counts[at]  # of the way through its bin
    bin_keys = keys[at]
    exponents, parts = _places(bin_keys)
    mantissas = 1 + (parts + np.where(bin_keys < 0, 1 - fractions, fractions)) / PARTS
    mantissas = mantissas.clip((1 - _NEAR_EDGES) * (1 + (parts + 1) / PARTS), (1 + _NEAR_EDGES) * (1 + parts / PARTS))
    values: NDArray[np.float64] = np.sign(bin_keys) * np.ldexp(mantissas, exponents)
    lows, highs = np.array([(distribution.low, distribution.high) for distribution in distributions]).T[
        :, :, None, None
    ]
    return values.clip(lows, highs)


def _places(keys: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the exponents of the powers of two below the magnitudes in bins, and the parts above it."""
    exponents, parts = np.divmod(np.abs(keys) - 1, PARTS)
    return exponents + _LOWEST_EXPONENT, parts


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts over equally wide bins.

    Attributes:
        low: Left edge of the first bin, the 1st percentile.
        high: Right edge of the last bin, which includes it, the 99th percentile; equal to `low` if all bins are one.
        counts: In each bin; `below` and `above` count what lies outside.
    """

    low: float
    high: float
    counts: tuple[int, ...]
    below: int
    above: int


def histogram(distribution: Distribution | None) -> Histogram | None:
    """Count values over `BIN_COUNT` equal bins, or one for a range too narrow; None without a distribution."""
    if distribution is None:
        return None
    ((low, high),) = quantiles([distribution], (_TAIL, 1 - _TAIL))
    inner = _even_edges(low, high, BIN_COUNT)
    inner[-1] = math.nextafter(high, math.inf)  # what is equal to it is within
    counts = distribution.histogram(np.array([distribution.low, *inner, max(distribution.high, inner[-1])]))
    below, *inside, above = np.diff(np.rint(np.cumsum(counts)), prepend=0).astype(int).tolist()  # whole, and none lost
    return Histogram(low, high, tuple(inside), below, above)


def _even_edges(low: float, high: float, count: int) -> NDArray[np.float64]:
    """Return the edges of so many equal bins; of one, where a range is too narrow for more or too wide to divide."""
    edges = np.linspace(low, high, count + 1) if high / 2 - low / 2 < _WIDEST / 2 else np.zeros(1)
    return edges if np.unique(edges).size == count + 1 else np.array([low, high])
