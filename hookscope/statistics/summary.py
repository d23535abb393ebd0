"""Turn finished reductions into statistics."""

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from hookscope.results.distribution import Distribution, quantiles
from hookscope.results.frozen import quick_constructor
from hookscope.results.statistics import QUANTILE_LEVELS, TensorStatistics
from hookscope.statistics.native import Fused
from hookscope.statistics.reducer import collect, reduce_tensor
from hookscope.statistics.reduction import Reduction

_new_statistics = quick_constructor(TensorStatistics)  # one for every activation and every gradient


def summarise(reductions: Sequence[Reduction | Fused]) -> list[TensorStatistics]:
    """Turn finished reductions into statistics.

    Args:
        reductions: One per activation, over the whole input.

    Returns:
        One set of statistics for each, in order.
    """
    blocks: dict[int, dict[int, Fused]] = {}  # what lies in one block is computed together
    others: dict[int, Reduction] = {}
    for index, each in enumerate(reductions):
        if isinstance(each, Fused):
            blocks.setdefault(id(each.block), {})[index] = each
        else:
            others[index] = each
    results: dict[int, TensorStatistics] = {}
    for fused in blocks.values():
        results |= zip(fused, _of_block(list(fused.values())), strict=True)
    at_levels = _quantiles([each.distribution for each in others.values()])
    results |= zip(others, map(_statistics, others.values(), at_levels), strict=True)
    return [results[index] for index in range(len(reductions))]


def tensor_statistics(tensor: Tensor, channel_axis: int | None = None) -> TensorStatistics:
    """Return the statistics of one tensor, with its distribution.

    Args:
        tensor: Any shape, dtype, layout and device; only read.
        channel_axis: The axis whose slices count as channels; None for no channel count.

    Returns:
        Its statistics; `unmeasured` says why if there are none.
    """
    return summarise(collect([reduce_tensor(tensor, channel_axis)]))[0]


def _statistics(reduction: Reduction, at_levels: tuple[float, ...] | None) -> TensorStatistics:
    elements = reduction.element_count
    if reduction.unmeasured or not elements:
        return TensorStatistics(reduction.shape, reduction.dtype, elements, unmeasured=reduction.unmeasured)
    count = reduction.finite_count
    nonzero_count, counts = reduction.nonzero_count, reduction.channel_nonzero
    channel_count = dead_channel_count = None
    if counts is not None:
        channel_count = counts.size
        dead_channel_count = 0 if nonzero_count == elements else channel_count - int(np.count_nonzero(counts))
    return _new_statistics(
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
        at_levels,
        None,
        reduction.distribution,
    )


def _of_block(fused: Sequence[Fused]) -> list[TensorStatistics]:
    """Return the statistics of reductions that lie in one block."""
    block = fused[0].block
    rows = [each.row for each in fused]
    counts = np.array([each.known.element_count for each in fused], np.float64)
    means, squared_deviations, lows, highs, abs_sums, square_sums, nonzero = block.found[rows].T
    stds, l2s = np.sqrt(squared_deviations / counts), np.sqrt(square_sums)
    columns = (means, stds, lows, highs, abs_sums / counts, l2s, (counts - nonzero) / counts)
    numbers = zip(*(column.tolist() for column in columns), strict=True)
    distributions = [each.distribution for each in fused]
    statistics = []
    for each, values, distribution, at_levels in zip(
        fused, numbers, distributions, _quantiles(distributions), strict=True
    ):
        known, plan, _, _, channel, _, _ = each
        mean, std, low, high, mean_abs, l2, zero_fraction = values
        channel_count = dead_channel_count = plan.channel_count
        if channel_count is not None:
            live = channel_count if channel < 0 else np.count_nonzero(block.nonzero[channel : channel + channel_count])
            dead_channel_count = channel_count - int(live)
        statistics.append(
            _new_statistics(  # by position, which is cheaper
                known.shape,
                known.dtype,
                known.element_count,
                mean,
                std,
                low,
                high,
                mean_abs,
                l2,
                zero_fraction,
                0,
                0,
                known.channel_axis,
                channel_count,
                dead_channel_count,
                at_levels,
                None,
                distribution,
            )
        )
    return statistics


def _quantiles(distributions: Sequence[Distribution | None]) -> list[tuple[float, ...] | None]:
    """Return each distribution's values at `QUANTILE_LEVELS`; None where there is none."""
    found = iter(quantiles([each for each in distributions if each is not None], QUANTILE_LEVELS))
    return [None if each is None else next(found) for each in distributions]
