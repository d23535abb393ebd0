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
    counts = reduction.channel_nonzero
    return TensorStatistics(
        reduction.shape,
        reduction.dtype,
        elements,
        mean=reduction.mean if count else None,
        std=math.sqrt(reduction.squared_deviations / count) if count else None,
        min=reduction.min if count else None,
        max=reduction.max if count else None,
        mean_abs=reduction.abs_sum / count if count else None,
        l2=math.sqrt(reduction.square_sum) if count else None,
        zero_fraction=(elements - reduction.nonzero_count) / elements,
        nan_count=reduction.nan_count,
        inf_count=elements - count - reduction.nan_count,
        channel_axis=reduction.channel_axis,
        channel_count=None if counts is None else counts.size,
        dead_channel_count=None if counts is None else counts.size - int(np.count_nonzero(counts)),
        quantiles=quantiles,
        sample_count=0 if reduction.sample is None else reduction.sample.size,
        sample=reduction.sample,
    )


def _quantiles(samples: Sequence[NDArray[np.floating] | None]) -> list[tuple[float, ...] | None]:
    """Return each sample's values at `QUANTILE_LEVELS`, linearly interpolated; samples of one length share a sort."""
    by_size: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        if sample is not None and sample.size:
            by_size.setdefault(sample.size, []).append(index)
    results: list[tuple[float, ...] | None] = [None] * len(samples)
    for size, indices in by_size.items():
        table = np.stack([sample for index in indices if (sample := samples[index]) is not None])
        table.sort(axis=1)
        position = np.array(QUANTILE_LEVELS) * (size - 1)
        below = position.astype(np.intp)
        low, high = (table[:, at].astype(np.float64) for at in (below, np.minimum(below + 1, size - 1)))
        values = low + (high - low) * (position - below)
        for index, row in zip(indices, values.tolist(), strict=True):
            results[index] = tuple(row)
    return results
