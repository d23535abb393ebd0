"""Judge activation functions by their outputs: saturated, or dead."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from hookscope.checks.verdicts.limits import Limits
from hookscope.checks.verdicts.reading import counted
from hookscope.results.activations import LayerRow
from hookscope.results.gradients import Gradients, Verdict
from hookscope.results.statistics import QUANTILE_LEVELS, TensorStatistics

# From these outputs outwards the slope is at most a sixteenth of its greatest: it is 4s(1-s) of that for the logistic
# function, 1-t² for tanh, (1-|y|)² for softsign. A hard sigmoid has none at its bounds. Of the bounds for which this
# holds, these are where bins of a distribution meet, so that the outputs beyond are counted exactly.
SATURATED_BEYOND: Mapping[str, tuple[float, float]] = {
    "Sigmoid": (1 / 64, 63 / 64),
    "Tanh": (-31 / 32, 31 / 32),
    "Softsign": (-3 / 4, 3 / 4),
    "Hardsigmoid": (0.0, 1.0),
}

# What is exactly zero over a range of inputs; GELU, SiLU and leaky ReLUs never are.
RECTIFIERS = frozenset({"ReLU", "ReLU6", "Hardswish", "Threshold"})

# A channel of fewer values is often zero by chance: with 32, once in 2**32 for a balanced ReLU. Our choice.
_VALUES_PER_CHANNEL = 32


def saturated_activation(inspection: Gradients, limits: Limits) -> Iterator[Verdict]:
    """Object to bounded activation functions most of whose outputs lie where the slope is nearly gone.

    Only rows with a distribution, or at least quantiles, can be judged.

    Source:
        Glorot and Bengio 2010, "Understanding the difficulty of training deep feedforward neural networks", section 3.
    """
    shares = saturated_shares(inspection.rows)
    what = "of its outputs are saturated"
    yield from _worst("saturated-activation", shares, limits.saturated_fraction, "bounded activation", what)


def dead_channels(inspection: Gradients, limits: Limits) -> Iterator[Verdict]:
    """Object to rectifiers most of whose channels are zero at every position of every input."""
    shares = dead_channel_shares(inspection.rows)
    what = "of its channels are 0 over the whole input"
    yield from _worst("dead-channels", shares, limits.dead_channel_fraction, "rectifier", what)


def saturated_shares(rows: Iterable[LayerRow]) -> list[tuple[float, LayerRow]]:
    """Return the bounded activation functions among the rows, each with the share of its outputs that are saturated."""
    return [
        (_share_beyond(row.activation, *SATURATED_BEYOND[row.kind]), row)
        for row in rows
        if row.kind in SATURATED_BEYOND and row.activation.quantiles is not None
    ]


def dead_channel_shares(rows: Iterable[LayerRow]) -> list[tuple[float, LayerRow]]:
    """Return the rectifiers among the rows, each with the share of its channels that are zero, if those can be told."""
    return [
        (row.activation.dead_channel_fraction or 0.0, row)
        for row in rows
        if row.kind in RECTIFIERS and has_enough_values(row.activation)
    ]


def has_enough_values(statistics: TensorStatistics) -> bool:
    """Tell whether there are channels, each of so many values that zero is no accident."""
    return statistics.element_count >= _VALUES_PER_CHANNEL * (statistics.channel_count or math.inf)


def _worst(
    rule: str, shares: Sequence[tuple[float, LayerRow]], limit: float, noun: str, what: str
) -> Iterator[Verdict]:
    """Name the worst of all rows whose share is above the limit, and how many there are."""
    broken = [each for each in shares if each[0] > limit]
    if broken:
        share, row = max(broken, key=lambda each: each[0])
        among = f"{len(broken)} of {counted(len(shares), noun)} {'is' if len(broken) == 1 else 'are'} above the limit"
        message = f"'{row.label}' ({row.kind}): {share:.1%} {what} (limit {limit:.0%}); {among}."
        yield Verdict(rule, "warn", row.label, message)


def _share_beyond(statistics: TensorStatistics, low: float, high: float) -> float:
    """Return the share of values at or beyond two bounds; without a distribution at least this much, by quantiles."""
    if statistics.distribution is not None:
        return statistics.distribution.share_outside(low, high)
    levels = [*zip(QUANTILE_LEVELS, statistics.quantiles or (), strict=True)]
    below = max((level for level, value in levels if value <= low), default=0.0)
    above = min((level for level, value in levels if value >= high), default=1.0)
    return below + 1 - above
