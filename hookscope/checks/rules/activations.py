"""Rules about activation functions: channels that are dead or quiet over all inputs, outputs at their bounds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from hookscope.checks.rules.reading import named
from hookscope.checks.rules.rule import Limit, Objection, RuleTerms, output_of, rule
from hookscope.text import counted

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from hookscope.results.activations import Activations, LayerRow
    from hookscope.results.check import CheckMeasurements
    from hookscope.results.gradients import GradientRow
    from hookscope.results.statistics import TensorStatistics

# From these outputs outwards the slope is at most a sixteenth of its greatest: it is 4s(1-s) of that for the logistic
# function, 1-t² for tanh, (1-|y|)² for softsign. A hard sigmoid has none at its bounds. Of the bounds for which this
# holds, these are where bins of a distribution meet, so that the outputs beyond are counted exactly.
SATURATED_BEYOND: Mapping[str, tuple[float, float]] = {
    "Sigmoid": (1 / 64, 63 / 64),
    "Tanh": (-31 / 32, 31 / 32),
    "Softsign": (-3 / 4, 3 / 4),
    "Hardsigmoid": (0.0, 1.0),
}

# The module that a function stands for. What `clamp` cuts off is not known; at 0 it is what a ReLU cuts off.
_MODULE_OF = {
    "relu": "ReLU",
    "relu6": "ReLU6",
    "hardswish": "Hardswish",
    "threshold": "Threshold",
    "sigmoid": "Sigmoid",
    "expit": "Sigmoid",
    "logsigmoid": "LogSigmoid",
    "tanh": "Tanh",
    "softsign": "Softsign",
    "hardsigmoid": "Hardsigmoid",
    "gelu": "GELU",
    "silu": "SiLU",
    "mish": "Mish",
    "softplus": "Softplus",
    "softmax": "Softmax",
    "layer_norm": "LayerNorm",
    "group_norm": "GroupNorm",
    "batch_norm": "BatchNorm2d",
    "instance_norm": "InstanceNorm2d",
    "clamp": "ReLU",
    "clip": "ReLU",
    "clamp_min": "ReLU",
    "hardtanh": "ReLU",
}

# What is exactly zero over a range of inputs; GELU, SiLU and leaky ReLUs never are.
RECTIFIERS = frozenset({"ReLU", "ReLU6", "Hardswish", "Threshold"})

# A channel of fewer values is often zero by chance: with 32, once in 2**32 for a balanced ReLU. Our choice.
_VALUES_PER_CHANNEL = 32

_OURS_AS_GRADS = "our choice, the same as for `hookscope grads`"


def acts_as(row: LayerRow | GradientRow) -> str:
    """Return the class of the module that computed a row, or of the one that does the same as its operation."""
    return row.kind if row.owner is None else _MODULE_OF.get(row.kind, row.kind)


@rule(
    "dead-channels",
    "warn",
    "forward",
    ("non-finite-activation",),
    max_fraction=Limit(
        0.8,
        "share of a layer's channels that may be zero over all inputs, 0-1",
        f"{_OURS_AS_GRADS}; seeded networks of torchvision stay at or below 0.5 on noise",
        "dead_channel_fraction",
    ),
)
def dead_channels(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[Objection]:
    """Channels behind a ReLU are zero over all inputs.

    A channel behind a ReLU that is zero at every position of every input learns nothing and says nothing. Too large a
    learning rate or too negative a bias does it. Judged are modules of the kinds ReLU, ReLU6, Hardswish and Threshold
    with at least 32 values a channel; a convolution before a ReLU may be as negative as it likes. Channels that are
    zero for two noise images may wake up for a picture: give real ones.
    """
    forward = _forward(measured)
    for row in forward.rows:
        if acts_as(row) in RECTIFIERS and _has_enough_values(row.activation):
            what = f"channels are 0 over {_inputs(forward)}"
            share = row.activation.dead_channel_fraction or 0.0
            yield from _above(terms, share, row, f"of its {row.activation.channel_count} {what}")


@rule(
    "quiet-channels",
    "warn",
    "forward",
    ("non-finite-activation",),
    below=Limit(
        3e-3,
        "magnitude that a quiet channel stays below; of the layer's greatest, where that is below 1",
        "our choice; |GELU(x)| stays below it for x < -3.1, |SiLU(x)| for x < -7.88, where slopes are below 1 %",
    ),
    max_fraction=Limit(
        0.8,
        "share of a layer's channels that may be quiet over all inputs, 0-1",
        "our choice, as for dead-channels; seeded networks of torchvision stay below 0.001 on noise",
    ),
)
def quiet_channels(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[Objection]:
    """Channels behind a smooth activation (GELU, SiLU) are nearly zero over all inputs.

    GELU, SiLU and their like are never exactly zero, but far below zero they are nearly so, and so is their slope. A
    channel is quiet if it stays that near to zero at every position of every input, while others of the layer do not; a
    layer that is small as a whole works in the linear part around zero, where nothing is closed, unless all of it is
    negative. At least 32 values a channel.
    """
    forward = _forward(measured)
    for row in forward.rows:
        peaks = measured.channel_peaks.get(row.label)
        if peaks is None or not peaks.size or not _has_enough_values(row.activation):
            continue
        below = terms.limit("below", output_of(row))
        what = f"channels stay below {below:g} in magnitude over {_inputs(forward)}"
        yield from _above(terms, _quiet_share(peaks, row, below), row, f"of its {peaks.size} {what}")


@rule(
    "saturated-activation",
    "warn",
    "forward",
    ("non-finite-activation",),
    max_fraction=Limit(
        0.8,
        "share of a layer's outputs that may lie where the slope is below 1/16 of its greatest, 0-1",
        f"after Glorot and Bengio 2010, section 3; {_OURS_AS_GRADS}",
        "saturated_fraction",
    ),
)
def saturated_activation(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[Objection]:
    """Most outputs of a bounded activation lie where its slope is nearly gone.

    Behind a sigmoid or tanh at its bounds the gradient is nearly gone, and the output says yes or no to everything.
    Weights are too large, or the input is not normalised. Gates that are open or closed on purpose look the same.
    """
    # Only rows with a distribution, or at least quantiles, can be judged. The source is "Understanding the difficulty
    # of training deep feedforward neural networks".
    forward = _forward(measured)
    for row in forward.rows:
        if acts_as(row) in SATURATED_BEYOND and row.activation.quantiles is not None:
            share = _share_beyond(row.activation, *SATURATED_BEYOND[acts_as(row)])
            yield from _above(terms, share, row, f"of its outputs are saturated over {_inputs(forward)}")


def _quiet_share(peaks: NDArray[np.float32], row: LayerRow, below: float) -> float:
    """Return the share of channels that are closed.

    In a layer that is small as a whole, the function is linear, and half of its outputs are positive. Closed outputs
    are all negative: so a layer without positive ones is held to `below` itself, others to this share of its peak.
    """
    all_negative = row.activation.max is not None and row.activation.max <= 0
    scale = 1.0 if all_negative else min(1.0, float(peaks.max()))
    return float((peaks < below * scale).mean())


def _share_beyond(statistics: TensorStatistics, low: float, high: float) -> float:
    """Return the share of values at or beyond two bounds; without a distribution at least this much, by quantiles."""
    from hookscope.results.statistics import QUANTILE_LEVELS

    if statistics.distribution is not None:
        return statistics.distribution.share_outside(low, high)
    levels = [*zip(QUANTILE_LEVELS, statistics.quantiles or (), strict=True)]
    below = max((level for level, value in levels if value <= low), default=0.0)
    above = min((level for level, value in levels if value >= high), default=1.0)
    return below + 1 - above


def _has_enough_values(statistics: TensorStatistics) -> bool:
    """Tell whether there are channels, each of so many values that zero is no accident."""
    return statistics.element_count >= _VALUES_PER_CHANNEL * (statistics.channel_count or math.inf)


def _above(terms: RuleTerms, share: float, row: LayerRow, what: str) -> Iterator[Objection]:
    limit = terms.limit("max_fraction", output_of(row))
    if share > limit:
        yield Objection(output_of(row), f"{named(row)}: {share:.1%} {what} (limit {limit:.0%}).")


def _inputs(forward: Activations) -> str:
    return f"all {counted(len(forward.inputs), 'input')}" if len(forward.inputs) > 1 else "the only input"


def _forward(measured: CheckMeasurements) -> Activations:
    assert measured.forward is not None  # noqa: S101 - judging skips these rules without one
    return measured.forward
