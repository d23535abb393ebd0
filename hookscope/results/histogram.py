"""How values are distributed, as counts that a run can keep and a picture can draw."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hookscope.results.distribution import Distribution, quantiles

BIN_COUNT = 24
"""Our choice: a bar in a table row is three pixels wide."""

# The bars span the values between these shares, so that a single far value does not press all others into one bar.
_TAIL = 0.01

# Interpolating over more overflows float64, whose largest value is 1.8e308.
_WIDEST = 1e300


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts over equally wide bins.

    Attributes:
        low: Left edge of the first bin, the 1st percentile.
        high: Right edge of the last bin, which includes it, the 99th percentile; equal to `low` if all bins are one.
        counts: Values in each bin; `below` and `above` count what lies outside.
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
    inner = even_edges(low, high, BIN_COUNT)
    inner[-1] = math.nextafter(high, math.inf)  # what is equal to it is within
    counts = distribution.histogram(np.array([distribution.low, *inner, max(distribution.high, inner[-1])]))
    below, *inside, above = np.diff(np.rint(np.cumsum(counts)), prepend=0).astype(int).tolist()  # whole, and none lost
    return Histogram(low, high, tuple(inside), below, above)


def even_edges(low: float, high: float, count: int) -> NDArray[np.float64]:
    """Return the edges of so many equal bins; of one, where a range is too narrow for more or too wide to divide."""
    edges = np.linspace(low, high, count + 1) if high / 2 - low / 2 < _WIDEST / 2 else np.zeros(1)
    return edges if np.unique(edges).size == count + 1 else np.array([low, high])
