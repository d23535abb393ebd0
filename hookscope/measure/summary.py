"""Turn finished reductions into statistics."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hookscope.measure.reducing import collect, reduce_tensor
from hookscope.measure.reduction import Reduction
from hookscope.results import QUANTILE_LEVELS, TensorStatistics


def summarise(reductions: Sequence[Reduction]) -> list[TensorStatistics]:
    """Turn finished reductions into statistics.

    Args:
        reductions: One per activation, over the whole input.

    Returns:
        One set of statistics for each, in order.
    """
    quantiles = _quantiles([reduction.sample for reduction in reductions])
    return [_statistics(reduction, values) for reduction, values in zip(reductions, quantiles, strict=True)]


def tensor_statistics(tensor: Tensor, channel_axis: int | None = None) -> TensorStatistics:
    """Return the statistics of one tensor.

    Args:
        tensor: Any shape, dtype, layout and device; only read.
        channel_axis: The axis whose slices count as channels; None for no channel count.

    Returns:
        Its statistics; `unmeasured` says why if there are none.
    """
    return summarise(collect([reduce_tensor(tensor, channel_axis)]))[0]


def _statistics(reduction: Reduction, quantiles: tuple[float, ...] | None) -> TensorStatistics:
    elements = reduction.element_count
    if reduction.unmeasured or not elements:
        return TensorStatistics(reduction.shape, reduction.dtype, elements, unmeasured=reduction.unmeasured)
    count = reduction.finite_count
    nonzero_count, counts = reduction.nonzero_count, reduction.channel_nonzero
    channel_count = dead_channel_count = None
    if counts is not None:
        channel_count = counts.size
        dead_channel_count = 0 if nonzero_count == elements else channel_count - int(np.count_nonzero(counts))
    sample = reduction.sample
    return TensorStatistics(  # by position, which is cheaper: there is one for every activation and every gradient
        reduction.shape,
        reduction.dtype,
        elements,
        reduction.mean if count else None,
        math.sqrt(reduction.squared_deviations / count) if count else None,
        reduction.min if count else None,
        reduction.max if count else None,
        reduction.abs_sum / count if count else None,
        math.sqrt(reduction.square_sum) if count else None,
        (elements - nonzero_count) / elements,
        reduction.nan_count,
        elements - count - reduction.nan_count,
        reduction.channel_axis,
        channel_count,
        dead_channel_count,
        quantiles,
        0 if sample is None else sample.size,
        None,
        sample,
    )


def _quantiles(samples: Sequence[NDArray[np.floating] | None]) -> list[tuple[float, ...] | None]:
    """Return each sample's values at `QUANTILE_LEVELS`, linearly interpolated; all are sorted together."""
    results: list[tuple[float, ...] | None] = [None] * len(samples)
    present = [(index, sample) for index, sample in enumerate(samples) if sample is not None and sample.size]
    if not present:
        return results
    sizes = np.array([sample.size for _, sample in present])
    dtype = np.result_type(*{sample.dtype for _, sample in present})
    table = np.full((len(present), sizes.max()), np.inf, dtype)  # beyond a sample's end, where no position points
    for row, (_, sample) in zip(table, present, strict=True):
        row[: sample.size] = sample
    table.sort(axis=1)
    position = np.multiply.outer(sizes - 1, QUANTILE_LEVELS)  # (n, levels)
    below = position.astype(np.intp)
    low = np.take_along_axis(table, below, 1).astype(np.float64)
    high = np.take_along_axis(table, np.minimum(below + 1, sizes[:, None] - 1), 1)
    for (index, _), row in zip(present, (low + (high - low) * (position - below)).tolist(), strict=True):
        results[index] = tuple(row)
    return results
