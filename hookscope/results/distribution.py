"""How values are distributed, as counts over logarithmic bins that are the same for every tensor, batch and process.

Each interval from a power of two to the next is cut into 32 equal bins, for each sign; zero has a bin of its own. No
bin is wider than 1/32 of its smallest magnitude. A bin's key is an integer that ascends with the values: 0 for zero,
and otherwise, with the sign of the values, 1 + 32 (e + 1074) + p for magnitudes from 2^e (1 + p/32) to
2^e (1 + (p + 1)/32). All of float64 has a bin, subnormal numbers included.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

EXACT_LIMIT = 1024
"""Up to this many values are kept instead of counted: at most 8 KiB, about as much as the bins take."""

QUANTILE_ERROR = 0.03
"""Largest error of a quantile of counted values, relative to it, unless the quantile is within 0.5% of its rank."""

PARTS = 32
_LOWEST_EXPONENT = -1074  # float64's smallest subnormal number is 2 to this
_CHUNK = 2**18  # values that are split into exponent and mantissa at a time, in a few MB

# Estimated values stay within this share of both edges of their bin, which may be 3.1% wide. The guarantee is 3%:
# interpolating between two neighbours of different sign may add the rest.
_NEAR_EDGES = 0.028

BIN_COUNT = 24
"""A bar in a table row is three pixels wide."""

# The bars span the values between these quantiles, so that one outlier does not squeeze all other values into one bar.
_TAIL = 0.01

# Interpolating over more overflows float64, whose largest value is 1.8e308.
_WIDEST = 1e300


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """How the finite values of a tensor are distributed; there is at least one.

    Up to `EXACT_LIMIT` values are kept; more are counted in bins. The result depends on the values alone, not on their
    order, batches or processes.

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
        """Tell whether this can be the distribution of `count` values: a file may be damaged or hostile."""
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
        """Return the keys of bins that hold any value, ascending, and the number of values in each."""
        if self.keys is not None and self.counts is not None:
            return self.keys, self.counts
        return bin_values(np.zeros(0) if self.values is None else self.values)

    def spans(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
        """Return intervals with the values, ascending: lower ends, upper ends and counts; kept values are points."""
        if self.values is not None:
            return self.values, self.values, np.ones(self.values.size, np.int64)
        keys, counts = self.binned()
        lows, highs = edges_of(keys)
        return lows.clip(self.low, self.high), highs.clip(self.low, self.high), counts

    def histogram(self, edges: NDArray[np.float64]) -> NDArray[np.float64]:
        """Count values between ascending edges, (E + 1,), as `numpy.histogram` does: half-open, but the last closed.

        If an edge divides a bin, its count is divided in proportion, so counts, (E,), need not be whole.
        """
        lows, highs, counts = self.spans()
        totals = np.concatenate([[0], np.cumsum(counts)])

        def up_to(points: NDArray[np.float64], side: Literal["left", "right"]) -> NDArray[np.float64]:
            """Count values below points; with side "right", values at the points too."""
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
    """Return the distribution of finite values; None without any."""
    if not values.size:
        return None
    if values.size <= EXACT_LIMIT:
        ordered = np.sort(values).astype(np.float64)
        return Distribution(float(ordered[0]), float(ordered[-1]), ordered.size, ordered)
    return Distribution(float(values.min()), float(values.max()), values.size, None, *bin_values(values))


def distribution_of_zeros(count: int) -> Distribution:
    """Return the distribution of `count` zeros, 1 or more."""
    if count <= EXACT_LIMIT:
        return Distribution(0.0, 0.0, count, np.zeros(count))
    return Distribution(0.0, 0.0, count, None, np.zeros(1, np.int32), np.array([count], np.int64))


def key_of(exponent: NDArray[np.int32] | int) -> Any:
    """Return the key of the first bin from 2^exponent on."""
    return 1 + PARTS * (exponent - _LOWEST_EXPONENT)


def bin_values(values: NDArray[np.floating]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the keys of bins that finite values fall in, ascending, and the number of values in each."""
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
    """Return the lower and the upper edges of bins, each (B,); the outermost may be infinite."""
    exponents, parts = _places(keys)
    with np.errstate(over="ignore"):
        near, far = (np.sign(keys) * np.ldexp(1 + (parts + end) / PARTS, exponents) for end in (0, 1))
    return np.minimum(near, far), np.maximum(near, far)


def merge_distributions(first: Distribution | None, second: Distribution | None) -> Distribution | None:
    """Merge two distributions; None stands for no values."""
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

    Quantiles of kept values are exact. Otherwise each of the two values is placed in its bin by its rank, and the
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
    between = np.where(low == high, low, low * (1 - shares) + high * shares)  # high - low may overflow
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
    ends = np.cumsum(counts)  # over all distributions, one after the other
    starts = np.cumsum([0, *(distribution.count for distribution in distributions[:-1])])
    overall = starts[:, None, None] + ranks
    at = np.searchsorted(ends, overall, side="right")
    fractions = 1 - (ends[at] - overall - 0.5) / counts[at]  # how far into its bin a rank lies, 0-1
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
    """Return each bin's exponent e and part p, see the head of this module."""
    exponents, parts = np.divmod(np.abs(keys) - 1, PARTS)
    return exponents + _LOWEST_EXPONENT, parts


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts over equally wide bins.

    Attributes:
        low: Left edge of the first bin, the 1st percentile.
        high: Right edge of the last bin, which includes it, the 99th percentile.
        counts: Values in each bin; a range too narrow or too wide to divide has one. `below` and `above` count values
            outside.
    """

    low: float
    high: float
    counts: tuple[int, ...]
    below: int
    above: int


def histogram(distribution: Distribution | None) -> Histogram | None:
    """Count values over `BIN_COUNT` equal bins, or one if they cannot be divided; None without a distribution."""
    if distribution is None:
        return None
    ((low, high),) = quantiles([distribution], (_TAIL, 1 - _TAIL))
    inner = _even_edges(low, high, BIN_COUNT)
    inner[-1] = math.nextafter(high, math.inf)  # the last bin includes `high`
    counts = distribution.histogram(np.array([distribution.low, *inner, max(distribution.high, inner[-1])]))
    below, *inside, above = np.diff(np.rint(np.cumsum(counts)), prepend=0).astype(int).tolist()  # sums to `count`
    return Histogram(low, high, tuple(inside), below, above)


def _even_edges(low: float, high: float, count: int) -> NDArray[np.float64]:
    """Return the edges of `count` equal bins; of one bin, if the range is too narrow or too wide to divide."""
    edges = np.linspace(low, high, count + 1) if high / 2 - low / 2 < _WIDEST / 2 else np.zeros(1)
    return edges if np.unique(edges).size == count + 1 else np.array([low, high])
