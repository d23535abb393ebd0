"""Count how values are distributed, where compiled code does not; `results.distribution` says in which bins."""

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookscope.results.distribution import PARTS, Distribution, distribution_of, key_of


def distribution_on_cpu(values: NDArray[np.floating], low: float, high: float) -> Distribution | None:
    """Return the distribution of the finite values in an array; None without any.

    Args:
        values: float32 or float64, (n,).
        low: Smallest value; not finite if any value is not.
        high: Largest value; likewise.
    """
    return distribution_of(values if math.isfinite(low) and math.isfinite(high) else values[np.isfinite(values)])


def count_in_bins(rows: Tensor) -> Tensor:
    """Count on an accelerator, without looking at the values or at how many bins hold any.

    Args:
        rows: float32 or float64, one tensor per row, (R, n).

    Returns:
        A copy of the rows where that is no larger than counts would be. Otherwise integers, (R, B): counts in all bins
        of the dtype, ascending. `distribution_of_counts` takes a row of either.
    """
    keys, boundaries = _bins_there(rows.dtype, rows.device)
    if rows.shape[1] * rows.itemsize <= len(keys) * 4:
        return rows.clone()
    ordered = rows.sort(dim=1).values
    together = boundaries.expand(len(rows), -1).contiguous()
    return torch.searchsorted(ordered, together, out_int32=rows.shape[1] < 2**31).diff(dim=1)


def distribution_of_counts(counted: NDArray[Any], dtype: torch.dtype, low: float, high: float) -> Distribution | None:
    """Return the distribution that a row of `count_in_bins` tells; None without a finite value.

    Args:
        counted: The row.
        dtype: Of the values.
        low: Smallest finite value.
        high: Largest finite value.
    """
    if counted.dtype.kind == "f":
        return distribution_on_cpu(counted, math.nan, math.nan)
    (found,) = np.nonzero(counted)
    if not found.size:
        return None
    counts = counted[found].astype(np.int64)
    return Distribution(low, high, int(counts.sum()), None, _bins(dtype)[0][found], counts)


@cache
def _bins(dtype: torch.dtype) -> tuple[NDArray[np.int32], NDArray[np.floating]]:
    """Return all bins of a dtype, ascending, (B,), and the smallest value of each, with Inf behind them, (B + 1,)."""
    limits = np.finfo(np.float32 if dtype == torch.float32 else np.float64)
    lowest = int(limits.minexp) - limits.nmant  # exponent of the smallest subnormal number
    exponents = np.arange(lowest, limits.maxexp).repeat(PARTS)
    parts = np.tile(np.arange(PARTS), limits.maxexp - lowest)
    # Below 2^(lowest + 5) not all edges are numbers of the dtype: the next one above is the smallest value.
    scale = np.minimum(exponents - lowest, 5)
    near = np.ldexp(np.ceil(np.ldexp(1 + parts / PARTS, scale)), exponents - scale).astype(limits.dtype)
    far = np.append(near[1:], limits.dtype.type(np.inf))
    keys = key_of(lowest) + np.arange(near.size)
    smallest_negative = -np.nextafter(np.insert(far, 0, near[0]), limits.dtype.type(0))[::-1]  # and zero's own
    return np.concatenate([-keys[::-1], [0], keys]).astype(np.int32), np.concatenate(
        [smallest_negative, near, far[-1:]]
    )


@cache
def _bins_there(dtype: torch.dtype, device: torch.device) -> tuple[NDArray[np.int32], Tensor]:
    """Return the same with the values on a device."""
    keys, smallest = _bins(dtype)
    with torch.inference_mode(False):
        return keys, torch.from_numpy(smallest).to(device)
