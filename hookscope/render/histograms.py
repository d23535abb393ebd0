"""How a sample of values is distributed, as counts that a run can keep."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BIN_COUNT = 24
"""Our choice: samples hold a few hundred values, and a bar in a table row is three pixels wide."""

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
        counts: Values in each bin.
        below: Values under `low`.
        above: Values over `high`.
    """

    low: float
    high: float
    counts: tuple[int, ...]
    below: int
    above: int


def histogram(sample: NDArray[np.floating] | None) -> Histogram | None:
    """Count the finite values of a sample; None without any.

    Args:
        sample: Values, (K,).
    """
    values = np.zeros(0) if sample is None else np.asarray(sample, np.float64)
    values = values[np.isfinite(values)]
    if not values.size:
        return None
    low, high = (float(edge) for edge in np.quantile(values, (_TAIL, 1 - _TAIL)))
    inside = values[(values >= low) & (values <= high)]
    # A range too narrow for so many different floats, or wider than arithmetic on the largest of them, is one bin.
    steps = np.linspace(low, high, BIN_COUNT + 1) if high / 2 - low / 2 < _WIDEST / 2 else np.zeros(1)
    if np.unique(steps).size == BIN_COUNT + 1:
        counts = tuple(int(count) for count in np.histogram(inside, steps)[0])
    else:
        counts = (int(inside.size),)
    return Histogram(low, high, counts, int((values < low).sum()), int((values > high).sum()))
