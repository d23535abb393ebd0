"""Turn finished reductions into statistics."""

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from hookscope.results.distribution import quantiles
from hookscope.results.statistics import QUANTILE_LEVELS, TensorStatistics
from hookscope.statistics.reducer import reduce_tensor
from hookscope.statistics.reduction import Reduction


def summarise(reductions: Sequence[Reduction]) -> list[TensorStatistics]:
    """Turn reductions over the whole input, one per activation, into statistics, in order."""
    distributions = [each.distribution for each in reductions if each.distribution is not None]
    at_levels = iter(quantiles(distributions, QUANTILE_LEVELS))
    return [_statistics(each, None if each.distribution is None else next(at_levels)) for each in reductions]


def tensor_statistics(tensor: Tensor, channel_axis: int | None = None) -> TensorStatistics:
    """Return the statistics of one tensor, with its distribution.

    Args:
        tensor: Any shape, dtype, layout and device; only read.
        channel_axis: The axis whose slices count as channels; None for no channel count.

    Returns:
        Its statistics; `unmeasured` says why if there are none.
    """
    return summarise([reduce_tensor(tensor, channel_axis)])[0]


def _statistics(reduction: Reduction, at_levels: tuple[float, ...] | None) -> TensorStatistics:
    elements, count = reduction.element_count, reduction.finite_count
    if reduction.unmeasured or not elements:
        return TensorStatistics(reduction.shape, reduction.dtype, elements, unmeasured=reduction.unmeasured)
    nonzero_count, per_channel = reduction.nonzero_count, reduction.channel_nonzero
    channel_count = dead_channel_count = None
    if per_channel is not None:
        channel_count = per_channel.size
        dead_channel_count = 0 if nonzero_count == elements else channel_count - int(np.count_nonzero(per_channel))
    return TensorStatistics(
        shape=reduction.shape,
        dtype=reduction.dtype,
        element_count=elements,
        mean=reduction.mean if count else None,
        std=math.sqrt(reduction.squared_deviations / count) if count else None,
        min=reduction.min if count else None,
        max=reduction.max if count else None,
        mean_abs=reduction.abs_sum / count if count else None,
        l2=math.sqrt(reduction.square_sum) if count else None,
        zero_fraction=(elements - nonzero_count) / elements,
        nan_count=reduction.nan_count,
        inf_count=elements - count - reduction.nan_count,
        channel_axis=reduction.channel_axis,
        channel_count=channel_count,
        dead_channel_count=dead_channel_count,
        quantiles=at_levels,
        distribution=reduction.distribution,
    )
