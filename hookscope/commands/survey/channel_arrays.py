"""What is known of the channels of an output after all inputs, from their totals."""

import numpy as np
from numpy.typing import NDArray

from hookscope.commands.survey.channel_totals import ChannelTotals
from hookscope.results.distribution import Distribution, edges_of
from hookscope.results.survey import ChannelArrays

# From this correlation on, in magnitude, a channel counts as a duplicate. Of fewer inputs correlations are high by
# chance; of more channels, as logits of a large vocabulary, pairs are too many to look at.
_DUPLICATE, _FEWEST_INPUTS, _MOST_CHANNELS = 0.99, 32, 8192
_BLOCK = 512
# A spread below this share of the mean is rounding in float32.
_ROUNDING = 1e-6

# Sun et al., "Massive Activations in Large Language Models", arXiv 2402.17762, section 2.
_MASSIVE_MAGNITUDE, _MASSIVE_RATIO = 100.0, 1000.0


def channel_arrays(totals: ChannelTotals, nonzero: NDArray[np.float64], *, has_classes: bool) -> ChannelArrays:
    """Return the channels of an output; `nonzero` counts the values of each that are not zero, (C,)."""
    count = totals.high.size
    values, top, is_by_input = totals.values, totals.top, totals.is_by_input
    best, share = np.full(count, -1), np.full(count, np.nan)
    if has_classes and is_by_input:
        best, share = _selectivity(totals)
    twins, correlation = _duplicates(np.concatenate([np.zeros((0, count), np.float32), *totals.sample]))
    has_any = values.count > 0
    variance = np.divide(values.deviations, values.count, out=np.zeros(count), where=has_any)
    firing = np.full(count, np.nan)
    np.divide(totals.firing, totals.input_count, out=firing, where=is_by_input & (totals.input_count > 0))
    return ChannelArrays(
        firing_inputs=firing,
        firing_positions=nonzero / totals.total,
        mean=np.where(has_any, values.mean, np.nan),
        std=np.where(has_any, np.sqrt(variance), np.nan),
        min=np.where(has_any, totals.low, np.nan),
        max=np.where(has_any, totals.high, np.nan),
        nonfinite_count=(totals.total - values.count).astype(np.int64),
        best_class=best,
        selectivity=share,
        duplicate_of=twins,
        correlation=correlation,
        top_values=top.values,
        top_inputs=top.inputs if is_by_input else np.full_like(top.inputs, -1),
        top_positions=top.positions,
    )


def _selectivity(totals: ChannelTotals) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the best class of each channel, -1 for none, and epsilon squared of the means over positions by class.

    With K classes, N inputs, and the sums of squares between classes B and over all T, it is
    (B - (K - 1) (T - B) / (N - K)) / T; NaN where channels do not vary (Kelley, PNAS 21, 1935, 554-559).
    """
    labels, pooled = sorted(totals.by_class), totals.pooled
    share = np.full(totals.high.size, np.nan)
    if not labels:
        return np.full(totals.high.size, -1), share
    sizes, sums = np.stack([totals.by_class[label] for label in labels], 1)  # (K, C) each
    means = sums / np.maximum(sizes, 1)
    between = (sizes * (means - pooled.mean) ** 2).sum(0)
    class_count = (sizes > 0).sum(0)
    whole, left = pooled.deviations, pooled.count - class_count
    varies = (class_count > 1) & (left > 0) & (whole > pooled.count * (_ROUNDING * pooled.mean) ** 2)
    within = np.maximum(whole - between, 0) / np.maximum(left, 1)
    np.divide(between - (class_count - 1) * within, whole, out=share, where=varies)
    return np.where(varies, np.array(labels)[np.where(sizes > 0, means, -np.inf).argmax(0)], -1), share


def _duplicates(sample: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return for each channel the lower-numbered one that it follows most closely, -1 for none, and their correlation.

    Args:
        sample: Means over positions, (S, C); inputs on which a channel has none are left out.
    """
    lacks = np.isnan(sample)
    sample = sample[~lacks[:, ~lacks.all(0)].any(1)]
    count, channels = sample.shape
    twins, correlation = np.full(channels, -1), np.full(channels, np.nan)
    if count < _FEWEST_INPUTS or not 1 < channels <= _MOST_CHANNELS:
        return twins, correlation
    wide = sample.astype(np.float64)
    centred = wide - wide.mean(0)
    norms = np.sqrt((centred**2).sum(0))
    varies = norms > _ROUNDING * np.sqrt((wide**2).sum(0))
    unit = np.divide(centred, norms, out=np.zeros_like(centred), where=varies)
    for begin in range(0, channels, _BLOCK):
        end = min(begin + _BLOCK, channels)
        correlations = unit[:, begin:end].T @ unit[:, :end]
        later = np.arange(end) >= np.arange(begin, end)[:, None]
        magnitudes = np.where(later, -1.0, np.abs(correlations))
        nearest = magnitudes.argmax(1)
        rows = np.arange(end - begin)
        (chosen,) = np.nonzero(magnitudes[rows, nearest] >= _DUPLICATE)
        twins[begin + chosen] = nearest[chosen]
        correlation[begin + chosen] = correlations[chosen, nearest[chosen]].clip(-1, 1)
    return twins, correlation


def massive(arrays: ChannelArrays | None, spread: Distribution | None) -> tuple[int, ...]:
    """Return the channels with massive activations: see `SurveyRow.massive`."""
    if spread is None or arrays is None:
        return ()
    keys, counts = spread.binned()
    order = np.argsort(np.abs(keys), kind="stable")
    below = np.cumsum(counts[order])
    middle = np.abs(keys)[order][np.searchsorted(below, (below[-1] + 1) // 2)]
    median = float(np.mean(edges_of(np.array([middle], np.int32)))) if middle else 0.0
    limit = max(_MASSIVE_MAGNITUDE, _MASSIVE_RATIO * median)
    greatest = np.fmax(np.abs(arrays.min), np.abs(arrays.max))
    return tuple(np.flatnonzero(np.nan_to_num(greatest) > limit).tolist())
