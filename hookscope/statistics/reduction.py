"""Reductions of tensors: numbers that determine the statistics and can be merged over batches.

`reduce_array` uses NumPy in float64, for tensors that compiled code cannot read. No torch.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hookscope.results.distribution import Distribution, distribution_of_zeros, merge_distributions

# Stored values that are read at a time, in a few MB.
PIECE_ELEMENTS = 2**18

# Values that are widened to float64 at a time: they fit a core's own cache.
_WIDENED = 2**15

# Up to this exponent, float64 holds sums of squares of any number of values in memory, with full precision.
SQUARABLE_EXPONENT = 400


class Reduction(NamedTuple):
    """A tensor's reduction as plain numbers, to be merged with the next batch's reduction.

    It is a tuple for speed, because every hook makes one.

    Attributes:
        shape: Shape of the tensor; -1 for a ragged axis.
        dtype: torch's name without the prefix: "float32".
        element_count: Elements of the tensor.
        channel_axis: Axis of `shape` that counts channels; None without one.
        finite_count: Elements that are neither NaN nor Inf; the fields from `mean` to `square_sum` are over them.
        mean: Arithmetic mean.
        squared_deviations: Sum of squared deviations from the mean.
        min: Smallest value; +Inf for none.
        max: Largest value; -Inf for none.
        abs_sum: Sum of absolute values.
        square_sum: Sum of squares.
        nan_count: Elements that are NaN.
        nonzero_count: Elements that are not zero.
        channel_nonzero: The same per channel, (C,); None without channels.
        distribution: Distribution of the finite values; None without any, or if it was not requested.
        unmeasured: Why the other fields are empty; None if they are not.
        kept: Values of inputs, one array per batch, see `kept_values`; None if none were kept.
        exponent: The three sums are over values divided by 2^exponent: float64 cannot hold the square of 1e160.
    """

    shape: tuple[int, ...]
    dtype: str
    element_count: int
    channel_axis: int | None = None
    finite_count: int = 0
    mean: float = 0.0
    squared_deviations: float = 0.0
    min: float = math.inf
    max: float = -math.inf
    abs_sum: float = 0.0
    square_sum: float = 0.0
    nan_count: int = 0
    nonzero_count: int = 0
    channel_nonzero: NDArray[np.float64] | None = None
    distribution: Distribution | None = None
    unmeasured: str | None = None
    kept: tuple[NDArray[np.floating], ...] | None = None
    exponent: int = 0

    def unscaled(self, value: float) -> float:
        """Multiply a mean, a sum of magnitudes, or the root of a sum of squares by 2^exponent."""
        try:
            return math.ldexp(value, self.exponent)
        except OverflowError:
            return math.copysign(math.inf, value)

    def with_exponent(self, exponent: int) -> "Reduction":
        """Return the reduction with sums over values divided by 2^exponent."""
        down = self.exponent - exponent
        return self._replace(
            squared_deviations=math.ldexp(self.squared_deviations, 2 * down),
            abs_sum=math.ldexp(self.abs_sum, down),
            square_sum=math.ldexp(self.square_sum, 2 * down),
            exponent=exponent,
        )


def merge(first: Reduction, second: Reduction) -> Reduction:
    """Return the reduction of the elements of both tensors.

    Args:
        first: The result has its shape, dtype and channel axis.
        second: Usually the same activation for the next batch.

    Returns:
        The reduction of the concatenation. Channels are dropped if their numbers differ.

    Source:
        Chan, Golub, LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
    """
    if not second.element_count and second.unmeasured is None:
        return first
    if not first.element_count and first.unmeasured is None:
        return second._replace(shape=first.shape, dtype=first.dtype)
    if first.exponent != second.exponent:
        exponents = [reduction.exponent for reduction in (first, second) if reduction.min < 0 or reduction.max > 0]
        first, second = (reduction.with_exponent(max(exponents, default=0)) for reduction in (first, second))
    count = first.finite_count + second.finite_count
    centre = math.ldexp(first.mean, -first.exponent)  # the difference of two means may overflow
    delta = math.ldexp(second.mean, -first.exponent) - centre
    share = second.finite_count / count if count else 0.0
    same_channels = (
        first.channel_nonzero is not None
        and second.channel_nonzero is not None
        and first.channel_nonzero.size == second.channel_nonzero.size
    )
    return Reduction(
        first.shape,
        first.dtype,
        first.element_count + second.element_count,
        first.channel_axis if same_channels else None,
        count,
        first.unscaled(centre + delta * share),
        first.squared_deviations + second.squared_deviations + delta * delta * first.finite_count * share,
        min(first.min, second.min),
        max(first.max, second.max),
        first.abs_sum + second.abs_sum,
        first.square_sum + second.square_sum,
        first.nan_count + second.nan_count,
        first.nonzero_count + second.nonzero_count,
        first.channel_nonzero + second.channel_nonzero if same_channels else None,  # type: ignore[operator]
        merge_distributions(first.distribution, second.distribution),
        first.unmeasured or second.unmeasured,
        None if first.kept is None or second.kept is None else first.kept + second.kept,
        first.exponent,
    )


def with_zeros(reduction: Reduction, count: int, *, distributions: bool) -> Reduction:
    """Add `count` zeros that a sparse tensor implies but does not store."""
    zeros = Reduction(reduction.shape, reduction.dtype, count, None, count, min=0.0, max=0.0)
    return merge(reduction, zeros._replace(distribution=distribution_of_zeros(count) if distributions else None))


def reduce_array(values: NDArray[np.floating], template: Reduction) -> Reduction:
    """Reduce flat values, (n,), without channels and distribution; `template` has their shape and dtype."""
    total = template._replace(element_count=0)
    for start in range(0, values.size, _WIDENED):
        total = merge(total, _reduced(values[start : start + _WIDENED]))
    return total


def _reduced(values: NDArray[np.floating]) -> Reduction:
    low, high, nan_count, finite = float(values.min()), float(values.max()), 0, values
    if not (math.isfinite(low) and math.isfinite(high)):
        finite, nan_count = values[np.isfinite(values)], int(np.isnan(values).sum())
        low, high = float(finite.min(initial=math.inf)), float(finite.max(initial=-math.inf))
    count, nonzero_count = finite.size, int(np.count_nonzero(values))
    reduction = Reduction((), "", values.size, None, count, nan_count=nan_count, nonzero_count=nonzero_count)
    if not count:
        return reduction
    finite = finite.astype(np.float64)
    exponent = math.frexp(max(high, -low))[1]
    if abs(exponent) <= SQUARABLE_EXPONENT:
        exponent = 0
    else:
        finite = np.ldexp(finite, -exponent)
    squares, magnitudes = float(np.square(finite).sum()), float(np.abs(finite).sum())
    reduction = reduction._replace(min=low, max=high, abs_sum=magnitudes, square_sum=squares, exponent=exponent)
    if low == high:  # sums of equal values would add rounding errors
        size = math.ldexp(abs(low), -exponent)
        return reduction._replace(mean=low, abs_sum=size * count, square_sum=size * size * count)
    mean = float(finite.mean())
    finite -= mean
    shift = float(finite.mean())  # rounding error of the mean
    finite -= shift
    deviations = float(np.square(finite, out=finite).sum())
    return reduction._replace(mean=math.ldexp(mean + shift, exponent), squared_deviations=deviations)
