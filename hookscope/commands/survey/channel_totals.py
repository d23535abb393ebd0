"""Statistics of channels that merge over batches, then over chunks in their order, and the results from them.

Counts are exact. Means and sums of squared deviations merge by Chan, Golub and LeVeque (1979), in float64: the
same merges in the same order give the same bits.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hookscope.commands.survey.channel_rows import MOST_PLACE_AXES, ChannelRows
from hookscope.results.distribution import Distribution, edges_of
from hookscope.results.survey import ChannelArrays
from hookscope.results.token_norms import MASSIVE_RATIO, MASSIVE_VALUE

HALVES = 2
"""Each half of the data, every second input, has its own lists of the greatest values."""

# A channel with at least this correlation, in magnitude, is a duplicate. With fewer inputs correlations are high by
# chance; with more channels, such as logits of a large vocabulary, there are too many pairs.
_DUPLICATE, _FEWEST_INPUTS, _MOST_CHANNELS = 0.99, 32, 8192
_BLOCK = 512
# A spread below this share of the mean is rounding in float32.
_ROUNDING = 1e-6

_GREATEST = float(np.finfo(np.float32).max)


@dataclass(slots=True)
class Moments:
    """Count, mean and sum of squared deviations of each channel, each (C,) float64."""

    count: NDArray[np.float64]
    mean: NDArray[np.float64]
    deviations: NDArray[np.float64]

    def merge(self, other: "Moments") -> None:
        """Add the moments of other values."""
        count = self.count + other.count
        share = np.divide(other.count, count, out=np.zeros_like(count), where=count > 0)
        delta = other.mean - self.mean
        with np.errstate(over="ignore", invalid="ignore"):  # squares of values above 1e154 are infinite
            between = np.where((self.count > 0) & (other.count > 0), delta * delta * self.count * share, 0.0)
        self.deviations = self.deviations + other.deviations + between
        self.mean = self.mean + delta * share
        self.count = count


def _moments_of(counts: NDArray[np.float64], means: NDArray[np.float64], deviations: NDArray[np.float64]) -> Moments:
    """Return the moments over axis 0 of moments (N, C)."""
    count = counts.sum(0)
    mean = np.divide((counts * means).sum(0), count, out=np.zeros_like(count), where=count > 0)
    with np.errstate(over="ignore", invalid="ignore"):
        return Moments(count, mean, (deviations + counts * (means - mean) ** 2).sum(0))


@dataclass(slots=True)
class TopLists:
    """The inputs with the greatest values of each channel, by half of the data.

    Attributes:
        values: (2, C, k), the greatest first; -Inf where there are fewer inputs.
        inputs: Numbers of these inputs, (2, C, k); -1 where there are fewer.
        positions: Positions of the values, (2, C, k, 3); -1 for axes that the output lacks, and for all if it has more.
    """

    values: NDArray[np.float64]
    inputs: NDArray[np.int64]
    positions: NDArray[np.int32]

    @classmethod
    def empty(cls, channels: int, count: int) -> "TopLists":
        """Return lists of no inputs."""
        shape = (HALVES, channels, count)
        positions = np.full((*shape, MOST_PLACE_AXES), -1, np.int32)
        return cls(np.full(shape, -np.inf), np.full(shape, -1, np.int64), positions)

    @property
    def thresholds(self) -> NDArray[np.float64]:
        """The values above which an input may enter a list, (C,): the lower limit of the two halves."""
        least: NDArray[np.float64] = self.values[:, :, -1].min(0)
        return least

    def add(self, rows: ChannelRows, numbers: NDArray[np.int64]) -> None:
        """Add inputs, (N,), which come after all others so far."""
        for half in range(HALVES):
            (chosen,) = np.nonzero(numbers % HALVES == half)
            (improved,) = np.nonzero((rows.high[chosen] > self.values[half, :, -1]).any(0))
            if not improved.size:
                continue
            at = np.ix_(chosen, improved)
            places = np.full((improved.size, chosen.size, MOST_PLACE_AXES), -1, np.int32)
            if 0 < len(rows.places) <= MOST_PLACE_AXES:
                coords = np.unravel_index(rows.positions[at].T.clip(0), rows.places)
                for axis, place in enumerate(coords):
                    places[:, :, axis] = place
            self._take(half, improved, rows.high[at].T, np.tile(numbers[chosen], (improved.size, 1)), places)

    def renumber(self, offset: int) -> None:
        """Add `offset` to the numbers of inputs; an odd offset swaps the halves."""
        self.inputs[self.inputs >= 0] += offset
        if offset % HALVES:
            self.values, self.inputs, self.positions = self.values[::-1], self.inputs[::-1], self.positions[::-1]

    def merge(self, other: "TopLists") -> None:
        """Add the lists of other inputs, which come after these."""
        everything = np.arange(self.values.shape[1])
        for half in range(HALVES):
            self._take(half, everything, other.values[half], other.inputs[half], other.positions[half])

    def _take(
        self,
        half: int,
        channels: NDArray[np.int64],
        values: NDArray[np.float64],
        inputs: NDArray[np.int64],
        positions: NDArray[np.int32],
    ) -> None:
        """Merge candidates (channels, M), with positions (channels, M, 3), into the lists; listed inputs win ties."""
        both = np.concatenate([self.values[half, channels], values], 1)
        order = np.argsort(-both, 1, kind="stable")[:, : self.values.shape[2]]
        numbers = np.concatenate([self.inputs[half, channels], inputs], 1)
        places = np.concatenate([self.positions[half, channels], positions], 1)
        self.values[half, channels] = np.take_along_axis(both, order, 1)
        self.inputs[half, channels] = np.take_along_axis(numbers, order, 1)
        self.positions[half, channels] = np.take_along_axis(places, order[:, :, None], 1)


@dataclass(slots=True)
class ChannelTotals:
    """The channels of one output over inputs, all arrays by channel, (C,).

    Attributes:
        values: Moments of the finite values.
        high: Greatest finite value; -Inf without any.
        low: Smallest finite value; Inf without any.
        total: Values, finite or not.
        firing: Inputs on which the channel is not zero everywhere.
        input_count: Inputs so far.
        pooled: Moments of the channel's mean over positions, over inputs with a finite value.
        by_class: Count and sum of these means, (2, C), by the number of the class.
        sample: The means of some of the inputs, (S, C) float32; NaN on an input without a finite value.
        is_by_input: Whether axis 0 counts inputs in every batch; else only the first four fields are known.
        is_of_one_size: Whether every batch has the same number of channels; else the totals are dropped.
    """

    values: Moments
    high: NDArray[np.float64]
    low: NDArray[np.float64]
    total: NDArray[np.int64]
    firing: NDArray[np.int64]
    pooled: Moments
    top: TopLists
    input_count: int = 0
    by_class: dict[int, NDArray[np.float64]] = field(default_factory=dict)
    sample: list[NDArray[np.float32]] = field(default_factory=list)
    is_by_input: bool = True
    is_of_one_size: bool = True

    @classmethod
    def empty(cls, channels: int, top: int) -> "ChannelTotals":
        """Return the totals of no inputs."""
        zeros = np.zeros(channels)
        return cls(
            values=Moments(zeros, zeros, zeros),
            high=np.full(channels, -np.inf),
            low=np.full(channels, np.inf),
            total=np.zeros(channels, np.int64),
            firing=np.zeros(channels, np.int64),
            pooled=Moments(zeros, zeros, zeros),
            top=TopLists.empty(channels, top),
        )

    def add(
        self, rows: ChannelRows, numbers: NDArray[np.int64], classes: Sequence[int], sampled: Sequence[int]
    ) -> None:
        """Add a batch, with the numbers of its inputs, (N,), which ascend over all batches, and of their classes.

        `sampled` are the places in the batch of the inputs that belong to the sample.
        """
        self.values.merge(_moments_of(rows.finite, rows.mean, rows.deviations))
        self.high = np.maximum(self.high, rows.high.max(0))
        self.low = np.minimum(self.low, rows.low.min(0))
        place_count = math.prod(rows.places)
        self.total += rows.high.shape[0] * place_count
        if rows.high.shape[0] != numbers.size:
            self.is_by_input = False
            return
        fires = (rows.high > 0) | (rows.low < 0) & np.isfinite(rows.low) | (rows.finite < place_count)
        self.firing += fires.sum(0)
        self.input_count += numbers.size
        has_mean = (rows.finite > 0).astype(np.float64)
        self.pooled.merge(_moments_of(has_mean, rows.mean, np.zeros_like(rows.mean)))
        means = np.stack([has_mean, rows.mean], 1)  # (N, 2, C)
        groups = {label: [index == label for index in classes] for label in classes}
        self._add_classes({label: means[group].sum(0) for label, group in groups.items()})
        if sampled:
            some = np.where(has_mean > 0, rows.mean, np.nan)[list(sampled)]
            self.sample.append(some.clip(-_GREATEST, _GREATEST).astype(np.float32))
        self.top.add(rows, numbers)

    def thin_sample(self) -> None:
        """Keep every second input of the sample."""
        self.sample = [np.concatenate(self.sample)[::2]] if self.sample else []

    def merge(self, other: "ChannelTotals") -> None:
        """Add what the channels did over the inputs of the next chunk."""
        self.values.merge(other.values)
        self.high, self.low = np.maximum(self.high, other.high), np.minimum(self.low, other.low)
        self.total = self.total + other.total
        self.firing = self.firing + other.firing
        self.input_count += other.input_count
        self.is_by_input = self.is_by_input and other.is_by_input
        self.pooled.merge(other.pooled)
        self._add_classes(other.by_class)
        self.sample += other.sample
        self.top.merge(other.top)

    def _add_classes(self, by_class: Mapping[int, NDArray[np.float64]]) -> None:
        for label, sums in by_class.items():
            self.by_class[label] = self.by_class[label] + sums if label in self.by_class else sums


def channel_arrays(totals: ChannelTotals, nonzero: NDArray[np.float64]) -> ChannelArrays:
    """Return the channels of an output; `nonzero` counts the nonzero values of each, (C,)."""
    count = totals.high.size
    values, top, is_by_input = totals.values, totals.top, totals.is_by_input
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

    With K classes, N inputs, and sums of squares B between classes and T in all, it is
    (B - (K - 1) (T - B) / (N - K)) / T; NaN where channels do not vary (Kelley, PNAS 21, 1935, 554-559).
    """
    labels, pooled = sorted(totals.by_class), totals.pooled
    share = np.full(totals.high.size, np.nan)
    if not labels or not totals.is_by_input:
        return np.full(totals.high.size, -1), share
    sizes, sums = np.stack([totals.by_class[label] for label in labels], 1)  # (K, C) each
    means = sums / np.maximum(sizes, 1)
    between = (sizes * (means - pooled.mean) ** 2).sum(0)
    class_count = (sizes > 0).sum(0)
    whole, left = pooled.deviations, pooled.count - class_count
    varies = (class_count > 1) & (left > 0) & (whole > pooled.count * (_ROUNDING * pooled.mean) ** 2)
    excess = between - (class_count - 1) * np.maximum(whole - between, 0) / np.maximum(left, 1)
    # Means and sums of N terms round by about eps sqrt(N): an excess below that is 0.
    rounding = np.finfo(np.float64).eps * (np.sqrt(pooled.count) * whole + pooled.count * abs(pooled.mean) * whole**0.5)
    np.divide(np.where(abs(excess) < rounding, 0.0, excess), whole, out=share, where=varies)
    return np.where(varies, np.array(labels)[np.where(sizes > 0, means, -np.inf).argmax(0)], -1), share


def _duplicates(sample: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the lower-numbered channel that each channel follows most closely, -1 for none, and their correlation.

    The sample has means over positions, (S, C); inputs on which a channel has none are left out.
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
    limit = max(MASSIVE_VALUE, MASSIVE_RATIO * median)
    greatest = np.fmax(np.abs(arrays.min), np.abs(arrays.max))
    return tuple(np.flatnonzero(np.nan_to_num(greatest) > limit).tolist())
