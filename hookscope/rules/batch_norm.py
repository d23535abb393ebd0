"""The rule that compares BatchNorm's stored statistics with its input over pictures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from hookscope.rules.activations import one_row_outputs
from hookscope.rules.rule import FindingTarget, RuleFinding, RuleTerms, limit, named, output_of, required, rule
from hookscope.rules.stored import is_weight, is_zero, pruning_masks
from hookscope.text import counted, figure, percent_text

if TYPE_CHECKING:
    from hookscope.results.activations import LayerRow
    from hookscope.results.check import BatchNormInput, CheckMeasurements

FEWEST_INPUTS = 4
"""Least number of pictures. One may vary 4.9 times less than the training data, all sample images 1.5 times less."""

FEWEST_VALUES = 100
"""Least number of values in a channel over all pictures: four maps of 7x7 have 196, four of 4x4 only 64."""

# Layers with fewer values per channel, such as last layers over a few pictures, may have three times the factor and the
# distance: three of 12 small networks with random weights and statistics of different pictures reach 11.9 and 1.1.
_FEW_VALUES = 500
_ALLOWANCE_OF_FEW = 3

# Means are correlated only if there are this many, and half of them differ from their median by this many stored
# standard deviations: otherwise chance decides.
_FEWEST_MEANS = 32
_LEAST_SPREAD = 0.2

_MOST_OF_START = 0.1  # share of the initial values in statistics; torch's momentum of 0.1 exceeds it up to batch 21

# The mismatch begins at an earlier layer if one of its channels has this many times the stored variance: the largest
# ratio of healthy networks is 82, and 450 with different preprocessing.
_STRAY_BEFORE = 1000.0

# A network with this share of zeros in its weights, or of zero filters in half of them, was pruned.
_PRUNED_FRACTION = 0.2
_PRUNED_FILTERS_FRACTION = 0.05


@dataclass(frozen=True, slots=True)
class _Distance:
    """Distance of a BatchNorm's input from the stored statistics; medians are over channels.

    Attributes:
        variance_factor: Median factor between input and stored variances, in either direction; 1 if they are equal.
        variance_ratio: Median ratio of the input's variance to the stored one.
        mean_distance: Median distance of the means, in stored standard deviations.
        mean_correlation: Correlation of input and stored means over channels; None if chance would decide.
        channel_ratio: The greatest ratio of variances of a single channel.
        alike: Whether the variances of most channels differ by about the same factor.
        channel_count: Number of channels that vary, in the input or in the stored statistics.
    """

    variance_factor: float
    variance_ratio: float
    mean_distance: float
    mean_correlation: float | None
    channel_ratio: float
    alike: bool
    channel_count: int


class _Judged(NamedTuple):
    layer: BatchNormInput
    row: LayerRow
    far: _Distance

    @property
    def target(self) -> FindingTarget:
        return output_of(self.row)


def distance(layer: BatchNormInput) -> _Distance | None:
    """Return the distance of a BatchNorm's input from the stored statistics; None if no channel varies.

    Variances include the layer's eps.
    """
    import numpy as np

    varies = (layer.variance > layer.eps) | (layer.running_var > layer.eps)
    if not varies.any():
        return None
    with np.errstate(all="ignore"):  # the rule batchnorm-variance reports a negative variance
        stored = layer.running_var[varies] + layer.eps
        logarithms = np.log((layer.variance[varies] + layer.eps) / stored)
        means, running = layer.mean[varies] / np.sqrt(stored), layer.running_mean[varies] / np.sqrt(stored)
        spread = np.median(np.abs(running - np.median(running)))
        judged = running.size >= _FEWEST_MEANS and spread >= _LEAST_SPREAD
        middle = float(np.median(logarithms))
        return _Distance(
            variance_factor=float(np.exp(np.median(np.abs(logarithms)))),
            variance_ratio=float(np.exp(middle)),
            mean_distance=float(np.median(np.abs(means - running))),
            mean_correlation=float(np.corrcoef(means, running)[0, 1]) if judged and means.std() else None,
            channel_ratio=float(np.exp(logarithms.max())),
            alike=float(np.median(np.abs(logarithms - middle))) < abs(middle) / 2,
            channel_count=int(varies.sum()),
        )


# The 98 healthy networks: three EfficientNet-Lites with ImageNet's weights; eight small networks trained for this; 87
# with random weights, with and without random gains, and statistics of crops of the sample images (torchvision, timm).


@rule("batchnorm-statistics", "fail", "forward", ("non-finite-activation",))
@limit(
    "max_variance_factor",
    5.0,
    "factor by which variances of a layer's input may differ from those stored, median over channels",
    "the largest of 98 healthy networks (11 trained) over the sample images is 2.5, and 9.1 in layers with few values "
    "(limit 15)",
)
@limit(
    "max_mean_distance",
    1.0,
    "distance of means from those stored, in stored standard deviations, median over channels",
    "the largest of 98 healthy networks (11 trained) over the sample images is 0.85, and 0.83 in layers with few "
    "values (limit 3)",
)
@limit(
    "min_mean_correlation",
    0.3,
    "least correlation of means with those stored, over channels",
    "the smallest of 98 healthy networks (11 trained) over the sample images is 0.42",
)
@limit(
    "max_first_ratio",
    2.5,
    "ratio of variances before the first BatchNorm to those stored, median over channels; above it the rule warns",
    "the largest of 98 healthy networks (11 trained) over the sample images is 1.2; EfficientNet-Lite normalised by "
    "ImageNet's mean and std has 3.4",
)
@limit(
    "max_channel_ratio",
    1e4,
    "ratio of the variance of a single channel to that stored; above it the rule warns",
    "the largest of 12 healthy networks (3 trained) over the sample images is 82; EfficientNet-Lite2 normalised by "
    "ImageNet's mean and std has 450",
)
def batchnorm_statistics(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """The statistics stored in BatchNorm do not match its input.

    In training, BatchNorm stores the mean and variance of its input. Pictures like the training pictures give nearly
    the same values. If they do not, the layer or the weights before it were initialised again, scaled, swapped or taken
    from a different network, or the pictures are preprocessed differently. The first such layer in execution order is
    named, and later ones are counted. If it is the first BatchNorm of the network, check the preprocessing first: mean,
    standard deviation, range. The first BatchNorm has a lower limit for a variance that is too large, because pictures
    may be much flatter than photographs, but hardly more varied.

    Needs at least four pictures, and checks layers with at least 100 values per channel; with fewer than 500, three
    times the factor and the distance are allowed. Skipped on noise. If all statistics have their initial values, they
    are only checked if weight and bias of a BatchNorm are trained: they were then never updated. It is a warning if
    weights are pruned, or if the network was trained on so few batches that much of the initial values remains: every
    batch replaces a share of the running statistics, normally a tenth. A single channel whose variance is thousands of
    times the stored one is also a warning: a few filters before it, or its own statistics, are wrong.

    Drawings, scans and microscopy also differ from training photographs: give pictures like those of the training. The
    rule finds a square kernel before a BatchNorm whose input and output channels were exchanged (all 12 in 6 networks
    trained for seconds). It does not find swapped colours, kernels with height and width exchanged, or swaps between
    similar channels.
    """
    forward = required(measured.forward)
    rows, one_row = {row.layer: row for row in reversed(forward.rows)}, one_row_outputs(forward)
    norms = [
        _Judged(layer, row, far)
        for layer in measured.batch_norms
        if (row := rows.get(layer.layer))
        and layer.value_count // (len(forward.inputs) if row.label in one_row else 1) >= FEWEST_VALUES
        and (far := distance(layer))
    ]
    on = [norm for norm in norms if terms.is_on(norm.target)]
    first = norms[0] if norms and norms[0].layer is measured.batch_norms[0] else None
    if off := [norm for norm in on if _is_off(norm, terms)]:
        at = norms.index(off[0])
        strays = (norm for norm in norms[:at] if norm.far.channel_ratio > _STRAY_BEFORE and terms.is_on(norm.target))
        before = next(strays, None)
        yield _mismatch(measured, off[0], terms, _following_words(len(off) - 1, len(norms) - at - 1), first, before)
    elif (
        first
        and terms.is_on(first.target)
        and first.far.alike
        and first.far.variance_ratio > (most := terms.limit("max_first_ratio", first.target))
    ):
        variances = f"{figure(first.far.variance_ratio, 3)} times the stored variances (limit {most:g})"
        message = (
            f"{named(first.row)}, the first BatchNorm: its input has {variances}, median over"
            f" {counted(first.far.channel_count, 'channel')}.{_preparation_words(measured, first)}"
        )
        yield RuleFinding(first.target, message, "warn")
    elif stray := [norm for norm in on if norm.far.channel_ratio > terms.limit("max_channel_ratio", norm.target)]:
        worst = stray[0]
        following = _following_words(len(stray) - 1, len(norms) - norms.index(worst) - 1)
        ratio, limit = figure(worst.far.channel_ratio), figure(terms.limit("max_channel_ratio", worst.target))
        message = (
            f"{named(worst.row)} has an input channel with {ratio} times the stored variance (limit {limit}), though"
            f" half of its channels differ by a factor of less than {figure(worst.far.variance_factor)}. {following}"
        )
        yield RuleFinding(worst.target, message.rstrip(), "warn")


def _following_words(count: int, later: int) -> str:
    if later < 2:
        return "" if not later else "The only later BatchNorm follows." if count else "The only later one does not."
    return f"{count:,} of {later:,} later BatchNorms follow{'s' if count == 1 else ''}."


def _is_off(judged: _Judged, terms: RuleTerms) -> bool:
    far, target = judged.far, judged.target
    correlated = far.mean_correlation is None or far.mean_correlation >= terms.limit("min_mean_correlation", target)
    factor, apart = _limits(judged, terms)
    return not (correlated and far.variance_factor <= factor and far.mean_distance <= apart)


def _limits(judged: _Judged, terms: RuleTerms) -> tuple[float, float]:
    allowance = 1 if judged.layer.value_count >= _FEW_VALUES else _ALLOWANCE_OF_FEW
    limits = (terms.limit(name, judged.target) for name in ("max_variance_factor", "max_mean_distance"))
    factor, apart = (allowance * limit for limit in limits)
    return factor, apart


def _mismatch(
    measured: CheckMeasurements,
    judged: _Judged,
    terms: RuleTerms,
    follow: str,
    first: _Judged | None,
    stray: _Judged | None,
) -> RuleFinding:
    far, target = judged.far, judged.target
    factor, apart = _limits(judged, terms)
    begins = f"The mismatch begins at {_named_with_input(judged)}"
    if stray is not None:
        ratio = figure(stray.far.channel_ratio, 3)
        begins = (
            f"The mismatch begins at {_named_with_input(stray)}, with an input channel that has {ratio} times the"
            f" stored variance, and reaches most channels at {_named_with_input(judged)}"
        )
    correlation = ""
    if far.mean_correlation is not None:
        least = terms.limit("min_mean_correlation", target)
        correlation = f", and correlate by {far.mean_correlation:.2f} with them (limit: at least {least:g})"
    inputs, channels = counted(len(required(measured.forward).inputs), "input"), counted(far.channel_count, "channel")
    message = (
        f"{begins}: over {inputs}, variances of its input differ from the stored ones by a factor of"
        f" {figure(far.variance_factor, 3)} (limit {factor:g}), means by {figure(far.mean_distance)} stored standard"
        f" deviations (limit {apart:g}){correlation}; medians over {channels}. {follow}"
    ).rstrip()
    if judged is first or is_as_new(judged.layer):
        message += _preparation_words(measured, judged)
    if pruned := _pruned_share(measured):
        share = percent_text(pruned, 0)
        message += f" {share} of the weights are 0, as pruning leaves them: the statistics may be older than that."
    if is_young := judged.layer.start_share > _MOST_OF_START:
        share = percent_text(judged.layer.start_share, 0)
        message += f" After so few batches {share} of its statistics are still the initial ones."
    return RuleFinding(target if stray is None else stray.target, message, "warn" if pruned or is_young else "fail")


def is_as_new(norm: Any) -> bool:
    """Tell whether a BatchNorm (module or `BatchNormInput`) stores mean 0 and variance 1 in all channels."""
    return bool((norm.running_mean == 0).all() and (norm.running_var == 1).all())


def _named_with_input(judged: _Judged) -> str:
    row = judged.row
    return named(row) + (f", which '{row.inputs[0]}' feeds" if row.inputs else "")


def _preparation_words(measured: CheckMeasurements, judged: _Judged) -> str:
    """Return a sentence, after a space, on signs of different preprocessing, or of a new layer; "" without any."""
    if is_as_new(judged.layer):
        return " It stores mean 0 and variance 1 in all channels, as a new layer does."
    if not judged.far.alike:
        return ""
    steps = next((record.steps for record in required(measured.forward).inputs if record.steps), ())
    here = f" Here: {steps[-1]}." if steps else ""
    factor = figure(math.sqrt(judged.far.variance_ratio))
    return (
        f" Most of its channels vary {factor} times as much as in training (standard deviation): preprocess the"
        f" pictures as in training (mean, std, range).{here}"
    )


def _pruned_share(measured: CheckMeasurements) -> float:
    """Return the share of zeros in the weights of a pruned network; 0 for other networks."""
    masks, nonzero = pruning_masks(measured.stored), (values for values in measured.stored if not is_zero(values))
    weights = [masks.get(values.name, values) for values in nonzero if is_weight(values)]
    if not weights:
        return 0.0
    share = sum(values.zero_count for values in weights) / sum(values.element_count for values in weights)
    of_filters = [len(values.zero_filters) / values.filter_count for values in weights if values.filter_count]
    is_structured = bool(of_filters) and statistics.median_low(of_filters) >= _PRUNED_FILTERS_FRACTION
    return share if share >= _PRUNED_FRACTION or is_structured else 0.0
