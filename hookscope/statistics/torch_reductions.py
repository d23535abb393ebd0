"""Reductions by torch operations, for accelerators: no value is read before all results are fetched together."""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookscope.results.distribution import PARTS, Distribution, distribution_of, key_of
from hookscope.statistics.reduction import SQUARABLE_EXPONENT, Reduction

# The largest e for which a dtype holds both 2^e and 2^-e as normal numbers.
_LARGEST_EXPONENT = {torch.float32: 126, torch.float64: 1022}


def reduce_on_device(rows: Tensor, channels_view: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Reduce any floating values without branching on values, so that Python never waits for the device.

    Args:
        rows: The values, one tensor per row, (R, n).
        channels_view: (before, C, after), see `in_memory_order`.

    Returns:
        (R, 7) of the same dtype, over the finite values: an exponent e, mean, squared deviations, min, max, sum of
        absolute values and sum of squares. All but e, min and max are over values divided by 2^e, so that no square
        overflows or vanishes. And (R, 2 + C) integers: finite count, NaN count, non-zero elements per channel.
    """
    finite = rows - rows == 0
    low, high = rows.nan_to_num(*[math.inf] * 3).amin(1), rows.nan_to_num(*[-math.inf] * 3).amax(1)
    largest = _LARGEST_EXPONENT[rows.dtype]
    exponent = torch.maximum(high, -low).log2().floor().nan_to_num(0.0).clamp(-largest, largest)
    kept = rows.nan_to_num(0.0, 0.0, 0.0) * torch.exp2(-exponent).unsqueeze(1)
    finite_count = finite.sum(1)
    divisor = finite_count.clamp(min=1)
    mean = kept.sum(1) / divisor
    deviations = (kept - mean.unsqueeze(1)) * finite
    shift = deviations.sum(1) / divisor  # rounding error of the mean
    squared_deviations = ((deviations - shift.unsqueeze(1)) * finite).square().sum(1) * (low < high)
    scalars = [exponent, mean + shift, squared_deviations, low, high, kept.abs().sum(1), kept.square().sum(1)]
    counts = torch.stack([finite_count, rows.isnan().sum(1)], 1)
    nonzero = (rows != 0).view(-1, *channels_view).sum((1, 3))
    return torch.stack(scalars, 1), torch.cat([counts, nonzero], 1)


def completed(header: Reduction, scalars: Sequence[float], counts: NDArray[np.int64]) -> Reduction:
    """Complete a reduction, except for its distribution, with one row of the results of `reduce_on_device`."""
    exponent, mean, squared_deviations, low, high, abs_sum, square_sum = scalars
    finite_count, nan_count = counts[:2].tolist()
    scaled = Reduction(
        header.shape,
        header.dtype,
        header.element_count,
        header.channel_axis,
        finite_count,
        math.ldexp(mean, int(exponent)),
        squared_deviations,
        low,
        high,
        abs_sum,
        square_sum,
        nan_count,
        int(counts[2:].sum()),
        None if header.channel_axis is None else counts[2:].astype(np.float64),
        exponent=int(exponent),
    )
    return scaled.with_exponent(0) if abs(exponent) <= SQUARABLE_EXPONENT else scaled


def count_in_bins(rows: Tensor) -> Tensor:
    """Count values by bin on an accelerator, without fetching values or the number of filled bins.

    Args:
        rows: float32 or float64, one tensor per row, (R, n).

    Returns:
        A copy of the rows if it is no larger than the counts. Otherwise integers, (R, B): counts in all bins of the
        dtype, ascending. `distribution_of_counts` accepts a row of either.
    """
    keys, boundaries = _bins_on(rows.dtype, rows.device)
    if rows.shape[1] * rows.itemsize <= len(keys) * 4:
        return rows.clone()
    ordered = rows.sort(dim=1).values
    together = boundaries.expand(len(rows), -1).contiguous()
    return torch.searchsorted(ordered, together, out_int32=rows.shape[1] < 2**31).diff(dim=1)


def distribution_of_counts(counted: NDArray[Any], dtype: torch.dtype, low: float, high: float) -> Distribution | None:
    """Return the distribution of finite values from a row of `count_in_bins`; None without any."""
    if counted.dtype.kind == "f":
        return distribution_of(counted[np.isfinite(counted)])
    (indices,) = np.nonzero(counted)
    if not indices.size:
        return None
    counts = counted[indices].astype(np.int64)
    return Distribution(low, high, int(counts.sum()), None, _bins(dtype)[0][indices], counts)


@cache
def _bins(dtype: torch.dtype) -> tuple[NDArray[np.int32], NDArray[np.floating]]:
    """Return all bins of a dtype, ascending, (B,), and the smallest value of each, with Inf behind them, (B + 1,)."""
    limits = np.finfo(np.float32 if dtype == torch.float32 else np.float64)
    lowest = int(limits.minexp) - limits.nmant  # exponent of the smallest subnormal number
    exponents = np.arange(lowest, limits.maxexp).repeat(PARTS)
    parts = np.tile(np.arange(PARTS), limits.maxexp - lowest)
    # Below 2^(lowest + 5) the dtype does not hold all edges: a bin's smallest value is the next number above its edge.
    scale = np.minimum(exponents - lowest, 5)
    near = np.ldexp(np.ceil(np.ldexp(1 + parts / PARTS, scale)), exponents - scale).astype(limits.dtype)
    far = np.append(near[1:], limits.dtype.type(np.inf))
    keys = key_of(lowest) + np.arange(near.size)
    smallest_negative = -np.nextafter(np.insert(far, 0, near[0]), limits.dtype.type(0))[::-1]  # and zero's bin
    return np.concatenate([-keys[::-1], [0], keys]).astype(np.int32), np.concatenate(
        [smallest_negative, near, far[-1:]]
    )


@cache
def _bins_on(dtype: torch.dtype, device: torch.device) -> tuple[NDArray[np.int32], Tensor]:
    keys, smallest = _bins(dtype)
    with torch.inference_mode(False):
        return keys, torch.from_numpy(smallest).to(device)
