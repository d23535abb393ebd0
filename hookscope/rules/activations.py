"""Rules about activations: dead or quiet channels, constant or saturated outputs, values too large for a format."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hookscope.hooks.patterns import FILLING
from hookscope.results.headroom import FORMATS
from hookscope.rules.rule import (
    RuleFinding,
    RuleTerms,
    is_within,
    limit,
    named,
    non_finite_count,
    output_of,
    required,
    rule,
    stored_in,
)
from hookscope.rules.stored import is_untrained, is_weight, untrained_remark, worst_weight
from hookscope.text import are, counted, figure, percent_text, some_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from hookscope.results.activations import LayerRow, Run
    from hookscope.results.check import CheckMeasurements
    from hookscope.results.gradients import GradientRow
    from hookscope.results.statistics import TensorStatistics
    from hookscope.results.survey import SurveyRow

# Beyond these outputs the slope is at most a sixteenth of its maximum: relative to that, it is 4s(1-s) for the logistic
# function, 1-t² for tanh, (1-|y|)² for softsign. A hard sigmoid has slope 0 at its bounds. All these bounds are edges
# of bins of a distribution, so that outputs beyond them are counted exactly.
SATURATED_BEYOND: Mapping[str, tuple[float, float]] = {
    "Sigmoid": (1 / 64, 63 / 64),
    "Tanh": (-31 / 32, 31 / 32),
    "Softsign": (-3 / 4, 3 / 4),
    "Hardsigmoid": (0.0, 1.0),
}

# Rules that report an output whose channels are all dead, or cannot be judged.
_SAY_THE_SAME = ("non-finite-activation", "dead-layer", "constant-activation")

_PROBABILITIES = ("Sigmoid", "Hardsigmoid")

# Operations that select values or resample them: a mask stays a mask.
_RESAMPLING = frozenset(
    [
        *("interpolate", "upsample", "grid_sample", "pad", "cat", "stack"),
        *("avg_pool2d", "max_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d"),
        *("mean", "max", "amax", "min", "amin", "argmax", "topk", "sort", "round", "gt", "ge", "lt", "le"),
        *("index_select", "gather", "masked_select", "masked_fill", "where"),
    ]
)

# The module that computes the same as a function. The bound of `clamp` is not known; at 0 it is a ReLU.
_MODULE_OF = (
    {"relu": "ReLU", "relu6": "ReLU6", "hardswish": "Hardswish", "threshold": "Threshold"}
    | {"sigmoid": "Sigmoid", "tanh": "Tanh", "softsign": "Softsign", "hardsigmoid": "Hardsigmoid"}
    | dict.fromkeys(("clamp", "clip", "clamp_min", "maximum", "hardtanh"), "ReLU")
)
# Modules whose output is exactly zero over a range of inputs, unlike GELU, SiLU and leaky ReLUs.
RECTIFIERS = frozenset({"ReLU", "ReLU6", "Hardswish", "Threshold"})
_RECTIFIER_FUNCTIONS = frozenset({"relu", "relu6", "hardswish", "threshold"})

# On noise, the limit is raised by this share of the channels above it, from 0.8 to 0.88. The greatest share of three
# trained networks, at five sizes and with one to eight noise images, is 0.847.
_ALLOWANCE_ON_NOISE = 0.4


def acts_as(row: LayerRow | GradientRow) -> str:
    """Return the class of a row's module; for an operation, the class of the equivalent module."""
    return row.kind if row.owner is None else _MODULE_OF.get(row.kind, row.kind)


@rule("dead-channels", "warn", "forward", ("non-finite-activation",), followers="layer", yields_to=_SAY_THE_SAME)
@limit(
    "max_fraction",
    0.8,
    "share of a layer's channels that may be zero over all inputs, 0-1",
    "seeded networks of torchvision stay at or below 0.5 on noise; EfficientNet-Lite0 to 2 at 96 to 224 pixels at or "
    "below 0.69 on one picture and 0.53 on four; on noise they reach 0.85",
    "dead_channel_fraction",
)
def dead_channels(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """Channels behind a ReLU are zero over all inputs.

    A channel behind a ReLU that is zero at every position of every input learns nothing and carries no information.
    Causes: too large a learning rate, too negative a bias. The rule checks ReLU, ReLU6, Hardswish and Threshold, as
    modules or as functions, with at least 32 values per channel: fewer values, as in squeeze-and-excitation, may all be
    zero by chance. The convolution before a ReLU is not checked: it may be negative everywhere. A layer that is zero
    everywhere is left to dead-layer, if that rule is on.

    In a trained network, channels that are zero on noise often respond to pictures, so on noise the limit is higher,
    88% instead of 80%. Give pictures.
    """
    forward = forward_of(measured)
    is_noise = bool(forward.inputs) and all(record.is_noise for record in forward.inputs)
    for row in forward.rows:
        if acts_as(row) in RECTIFIERS and row.activation.has_enough_per_channel:
            on_noise = is_noise and _surveyed(measured, row) is None
            symptom = f"channels are 0 over {_inputs_words(measured, row)}{' of noise' if on_noise else ''}"
            share, most = row.activation.dead_channel_fraction or 0.0, terms.limit("max_fraction", output_of(row))
            most += _ALLOWANCE_ON_NOISE * (1 - most) if on_noise else 0.0
            yield from _above(most, share, row, f"of its {row.activation.channel_count} {symptom}")


@rule("dead-layer", "fail", "forward", ("non-finite-activation",), followers="layer")
@limit("min_values", 1024, "outputs of a layer over all inputs; fewer may all be zero by chance", "")
def dead_layer(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """A layer behind a ReLU is zero everywhere, over all inputs.

    A layer that is zero passes nothing on and learns nothing. Causes: shifted biases, a weight with the wrong sign or
    from a different layer, a diverged step. Load the weights again, or go back to an earlier checkpoint. Sound networks
    have no dead layer, except a residual branch that was switched off on purpose. The rule checks ReLU, ReLU6,
    Hardswish and Threshold, as modules or as functions. While weights are random or BatchNorm is untrained, it is a
    warning.
    """
    forward = forward_of(measured)
    for row in forward.rows:
        is_rectifier = row.kind in (RECTIFIERS if row.owner is None else _RECTIFIER_FUNCTIONS)
        statistics = row.activation
        is_large = statistics.element_count >= terms.limit("min_values", output_of(row))
        if is_rectifier and is_large and statistics.zero_fraction == 1:
            channels = f" of its {counted(statistics.channel_count, 'channel')}" if statistics.channel_count else ""
            symptom = f"all {statistics.element_count:,} outputs{channels} are 0 over {_inputs_words(measured, row)}"
            yield RuleFinding(output_of(row), f"{named(row)}: {symptom}.", "warn" if is_untrained(measured) else "fail")


@rule("constant-activation", "off", "forward", ("non-finite-activation",), followers="output")
def constant_activation(measured: CheckMeasurements, _terms: RuleTerms) -> Iterator[RuleFinding]:
    """A layer or an operation returns the same number everywhere, over all inputs.

    No information about the input passes this layer. Causes: a ReLU behind a large negative bias, a factor of 0, a
    sigmoid at its bound. A residual branch that starts switched off, with a last weight of zeros, looks the same. A
    ReLU is checked with at least 32 values, because fewer may all be zero by chance. Not checked: whole numbers, and
    outputs that depend only on parameters, buffers and constants, such as masks. Always a warning.
    """
    forward = forward_of(measured)
    constant: dict[str, tuple[LayerRow, float]] = {}
    for before, row in zip([None, *forward.rows], forward.rows, strict=False):
        value, shown = _constant_of(row), _shown_before(row, before)
        if value is not None and (not shown or shown in constant):
            constant[row.label] = row, value
    fixed = _computed_without_data(forward.rows) if constant else set()
    for row, value in constant.values():
        if row.label not in fixed:
            count = row.activation.element_count
            symptom = f"all {count:,} outputs are {figure(value, 4)} over {_inputs_words(measured, row)}"
            yield RuleFinding(output_of(row), f"{named(row)}: {symptom}.", "warn")


def _shown_before(row: LayerRow, before: LayerRow | None) -> str:
    """Return the label of an earlier row with the same output, such as the last layer of a Sequential; "" for none."""
    if before is None or row.owner is not None or row.layer == before.layer or not is_within(before.layer, row.layer):
        return row.duplicate_of
    earlier, other = before.activation, row.activation
    is_same = (earlier.element_count, earlier.min, earlier.max) == (other.element_count, other.min, other.max)
    return before.label if is_same else row.duplicate_of


def _constant_of(row: LayerRow) -> float | None:
    """Return the finite value of all outputs of a row; None if they differ, are no floats, or are too few to tell."""
    values = row.activation
    if values.min is None or values.min != values.max or "float" not in values.dtype or non_finite_count(values):
        return None
    from hookscope.results.statistics import VALUES_PER_CHANNEL

    fewest = VALUES_PER_CHANNEL if acts_as(row) in RECTIFIERS else 2
    return values.min if values.element_count >= fewest else None


@rule("massive-activation", "off", "forward", ("non-finite-activation",), followers="output")
def massive_activation(measured: CheckMeasurements, _terms: RuleTerms) -> Iterator[RuleFinding]:
    """A few values of a transformer are far larger than all others: massive activations.

    Most large language models and some large vision transformers have them, at fixed channels of one or a few tokens,
    where they work as biases of attention (Sun et al. 2024, arXiv 2402.17762; the definition is theirs: above 100 in
    magnitude, and at least 1,000 times the median magnitude of the output). They are no defect by themselves, but int8
    quantisation and float16 lose the small values next to them: keep such a layer in a wider type. If they are new in a
    small network, training diverges. The rule checks outputs (N, T, D) of 8 tokens or more; with a survey, every output
    with channels, by its median over all inputs. Always a warning; off unless it is selected.
    """
    for row in forward_of(measured).rows:
        surveyed = _surveyed(measured, row)
        if surveyed is not None and surveyed.massive:
            greatest, channels = row.activation.max_abs or 0, some_of(surveyed.massive, 3)
            beyond = f"above 100 and 1,000 times the median over {_inputs_words(measured, row)} in channel {channels}"
            yield RuleFinding(output_of(row), f"{named(row)}: up to {greatest:,.4g}, {beyond}.", "warn")
        elif surveyed is None and row.tokens is not None and row.tokens.massive:
            peak = row.tokens.massive[0]
            often = counted(row.tokens.massive_count, "token")
            words = f"{peak.value:,.4g} in channel {peak.channel} of {row.tokens.place(peak.token)}"
            against = f"the median magnitude is {figure(peak.median, 3)}"
            message = f"{named(row)}: {words}, where {against}; {often} with such a value."
            yield RuleFinding(output_of(row), message, "warn")


def _computed_without_data(rows: Sequence[LayerRow]) -> set[str]:
    """Return the labels of operations that do not depend on the network's input.

    Activation functions of views count as dependent, because the origin of a view is not known.
    """
    labels = {row.label for row in rows}
    fixed: set[str] = set()
    for row in rows:
        takes_data = any(
            (source in labels and source not in fixed) or source.partition("[")[0] == "input" for source in row.inputs
        )
        is_activation = row.kind in _MODULE_OF and "" in row.inputs
        if row.owner is not None and not takes_data and not is_activation:
            fixed.add(row.label)
    return fixed


@rule("quiet-channels", "warn", "forward", ("non-finite-activation",), followers="layer")
@limit(
    "below",
    3e-3,
    "magnitude that a quiet channel stays below; multiplied by the layer's greatest magnitude if that is below 1",
    "|GELU(x)| stays below it for x < -3.1, |SiLU(x)| for x < -7.88, where slopes are below 1%",
)
@limit(
    "max_fraction",
    0.8,
    "share of a layer's channels that may be quiet over all inputs, 0-1",
    "as for dead-channels; seeded networks of torchvision stay below 0.03 on noise, the largest of 60 of timm is 0.36",
)
def quiet_channels(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """Channels behind a smooth activation (GELU, SiLU) are nearly zero over all inputs.

    A quiet channel carries almost no information, and its slope is too small to learn from. Causes: too negative a
    bias, too large a learning rate. GELU, SiLU and similar functions are never exactly zero, but they and their slopes
    are nearly zero for very negative inputs. A channel is quiet if it stays that near to zero at every position of
    every input, while other channels of the layer do not. If all outputs of a layer are small, it works in the linear
    part around zero, and no channel is quiet, unless all outputs are negative and the input is below -1. Needs at least
    32 values per channel.
    """
    forward = forward_of(measured)
    inputs = {row.label: row.activation.max for row in forward.rows}
    for row in forward.rows:
        peaks = _peaks(measured, row)
        if peaks is None or not peaks.size or not row.activation.has_enough_per_channel:
            continue
        below = terms.limit("below", output_of(row))
        symptom = f"channels stay below {below:g} in magnitude over {_inputs_words(measured, row)}"
        greatest_input = inputs.get(row.inputs[0]) if row.inputs else None
        share = _quiet_share(peaks, row, below, greatest_input)
        yield from _above(terms.limit("max_fraction", output_of(row)), share, row, f"of its {peaks.size} {symptom}")


@rule("saturated-activation", "warn", "forward", ("non-finite-activation",), followers="layer")
@limit(
    "max_fraction",
    0.8,
    "share of a layer's outputs that may lie where the slope is below 1/16 of its greatest, 0-1",
    "after Glorot and Bengio 2010, section 3",
    "saturated_fraction",
)
def saturated_activation(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """Most outputs of a bounded activation lie where its slope is nearly zero.

    At the bounds of a sigmoid or tanh the gradient nearly vanishes, and the output hardly depends on the input. Causes:
    weights that are too large, inputs that are not normalised. Gates that are open or closed on purpose look the same.
    A sigmoid whose values the network returns, such as those of a mask, also resized or cropped, is not checked: its
    probabilities should be near 0 and 1.
    """
    # Only rows with quantiles can be judged. Glorot and Bengio 2010 is "Understanding the difficulty of training deep
    # feedforward neural networks".
    forward = forward_of(measured)
    returned = [row.activation for row in forward.rows if not row.layer]
    for at, row in enumerate(forward.rows):
        if acts_as(row) in _PROBABILITIES and (
            any(_has_values_of(row.activation, output) for output in returned) or _is_only_resampled(forward.rows, at)
        ):
            continue
        if acts_as(row) in SATURATED_BEYOND and row.activation.quantiles is not None:
            share = _share_beyond(row.activation, *SATURATED_BEYOND[acts_as(row)])
            most = terms.limit("max_fraction", output_of(row))
            yield from _above(most, share, row, f"of its outputs are saturated over {_inputs_words(measured, row)}")


def _is_only_resampled(rows: Sequence[LayerRow], at: int) -> bool:
    """Tell whether all rows after `at` only resize, crop or select values; False if no operations are observed."""
    return any(row.owner is not None for row in rows) and all(
        row.kind in _RESAMPLING or acts_as(row) in _PROBABILITIES if row.owner is not None else not row.parameter_count
        for row in rows[at + 1 :]
    )


def _has_values_of(stats: TensorStatistics, other: TensorStatistics) -> bool:
    return (
        (stats.element_count, stats.min, stats.max) == (other.element_count, other.min, other.max)
        and None not in (stats.mean, other.mean, stats.std, other.std)
        and math.isclose(stats.mean or 0, other.mean or 0, rel_tol=1e-5)
        and math.isclose(stats.std or 0, other.std or 0, rel_tol=1e-5)
    )


# If all outputs are negative and small, inputs are either near zero (above -0.006) or far below it (below -3.1).
_CLOSED_BELOW = -1.0


def _quiet_share(peaks: NDArray[np.float32], row: LayerRow, below: float, greatest_input: float | None) -> float:
    """Return the share of quiet channels; `greatest_input` is None if it is unknown.

    If all outputs are small, the layer works where the function is linear, and `below` is multiplied by the layer's
    greatest peak. If the outputs are small because all inputs are far below 0, `below` is not multiplied.
    """
    all_negative = row.activation.max is not None and row.activation.max <= 0
    closed = all_negative and (greatest_input is None or greatest_input < _CLOSED_BELOW)
    scale = 1.0 if closed else min(1.0, float(peaks.max()))
    return float((peaks < below * scale).mean())


def _share_beyond(statistics: TensorStatistics, low: float, high: float) -> float:
    """Return the share of values at or beyond two bounds; without a distribution, a lower bound from quantiles."""
    from hookscope.results.statistics import QUANTILE_LEVELS

    if statistics.distribution is not None:
        return statistics.distribution.share_outside(low, high)
    levels = [*zip(QUANTILE_LEVELS, statistics.quantiles or (), strict=True)]
    below = max((level for level, value in levels if value <= low), default=0.0)
    above = min((level for level, value in levels if value >= high), default=1.0)
    return below + 1 - above


def _above(limit: float, share: float, row: LayerRow, symptom: str) -> Iterator[RuleFinding]:
    if share > limit:
        yield RuleFinding(output_of(row), f"{named(row)}: {percent_text(share)} {symptom} (limit {limit * 100:.6g}%).")


def _inputs_words(measured: CheckMeasurements, row: LayerRow) -> str:
    if measured.survey is not None and _surveyed(measured, row) is not None:
        return f"{counted(measured.survey.input_count, 'input')} of the survey"
    forward = required(measured.forward)
    if row.label in one_row_outputs(forward):
        return f"the row that all {counted(len(forward.inputs), 'input')} share"
    return f"all {counted(len(forward.inputs), 'input')}" if len(forward.inputs) > 1 else "the only input"


def forward_of(measured: CheckMeasurements) -> Run[Any]:
    """Return the forward pass, with a survey's statistics for the outputs that it measured.

    Outputs that are the same for all inputs count their values once.
    """
    forward = required(measured.forward)
    surveyed = {} if measured.survey is None else measured.survey.by_label()
    one_row = one_row_outputs(forward)
    if not surveyed and not one_row:
        return forward

    def judged(row: LayerRow) -> LayerRow:
        if row.label in surveyed:
            return replace(row, activation=surveyed[row.label].activation)
        if row.label in one_row:
            count = row.activation.element_count // len(forward.inputs)
            return replace(row, activation=replace(row.activation, element_count=count))
        return row

    return replace(forward, rows=tuple(map(judged, forward.rows)))


def one_row_outputs(forward: Run[Any]) -> frozenset[str]:
    """Return the labels of outputs that depend only on arguments with one row for all inputs, if operations show it."""
    repeated = {f"input{path}" for path in forward.broadcast_inputs}
    if not repeated:
        return frozenset()
    labels = {row.label for row in forward.rows}
    fixed: set[str] = set()
    for row in forward.rows:
        sources = {source for source in row.inputs if source in labels or not source or source.startswith("input[")}
        if sources and sources <= fixed | repeated:
            fixed.add(row.label)
    return frozenset(fixed)


def _surveyed(measured: CheckMeasurements, row: LayerRow) -> SurveyRow | None:
    return None if measured.survey is None else measured.survey.by_label().get(row.label)


def _peaks(measured: CheckMeasurements, row: LayerRow) -> NDArray[np.float32] | None:
    peaks, surveyed = measured.channel_peaks.get(row.label), _surveyed(measured, row)
    if peaks is None or surveyed is None or surveyed.channels.arrays is None:
        return peaks
    import numpy as np

    greatest: NDArray[np.float32] = np.fmax(abs(surveyed.channels.arrays.min), abs(surveyed.channels.arrays.max))
    return greatest


# Dtypes with float32's range of exponents; masks of attention hold their greatest numbers.
_MASKED = ("float32", "bfloat16")


@rule("fp16-headroom", "warn", "forward")
@limit(
    "max_fraction_of_range",
    0.5,
    "greatest magnitude of activations and weights, in units of 65504, the greatest of float16",
    "IEEE 754 binary16; half of it, because another picture may double a value",
)
@limit(
    "max_vanishing_fraction",
    0.1,
    "share of a weight's non-zero values that may become zero in float16 (those of at most 2**-25), 0-1",
    "IEEE 754 binary16; seeded networks of torchvision stay below 0.001, the largest of 60 of timm is 0.025",
)
def fp16_headroom(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """Values come near the greatest number of float16, or become zero in it.

    Values above 65504 become Inf in float16, and weights of at most 2**-25 become zero. The rule checks all weights,
    and all outputs of layers and operations over the given inputs. It leaves out negative values of operations, because
    masks hold them on purpose. Mixed precision, which keeps sums in float32, may do better. Use bfloat16, keep such
    layers in float32, or ignore this rule if float16 is never used.
    """
    yield from _headroom(measured, terms, "float16")
    vanishing = [
        (values.fp16_zero_count / non_zero, values)
        for values in measured.stored
        if is_weight(values) and (non_zero := values.element_count - values.zero_count)
    ]
    flaw = "its values other than 0 become 0 in float16"
    yield from worst_weight(terms, "max_vanishing_fraction", vanishing, flaw)


@rule("overflowing-activation", "fail", "forward")
@limit(
    "max_magnitude",
    1.8e19,
    "greatest magnitude of activations of float32 and bfloat16",
    "the root of 3.4e38, the greatest of float32 (IEEE 754 binary32)",
)
def overflowing_activation(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """The square of an activation overflows float32.

    The square of a number above 1.8e19 is beyond float32, so the next norm, variance or product of two such numbers is
    Inf. A trained network never comes near this. Causes: a flipped bit in the exponent of a weight, wrong units,
    missing normalisation. The first such layer is named, or else the first operation: look at its weights and at its
    input. An operation is only a warning, because it may hold such values on purpose; so is a layer while weights are
    random or BatchNorm is untrained.
    """
    rows = forward_of(measured).rows
    magnitudes = [(_magnitude(row), row) for row in rows if row.activation.dtype in _MASKED]
    beyond = [
        (magnitude, row)
        for magnitude, row in magnitudes
        if terms.is_on(output_of(row))
        and terms.limit("max_magnitude", output_of(row)) < magnitude < FORMATS[row.activation.dtype].greatest
    ]
    if beyond:
        magnitude, first = min(beyond, key=lambda pair: pair[1].owner is not None)
        message = (
            f"{named(first)} reaches {figure(magnitude, 3)}, whose square overflows float32"
            f" (limit {figure(terms.limit('max_magnitude', output_of(first)), 3)});"
            f" {len(beyond)} of {counted(len(magnitudes), 'output')} {are(len(beyond))} above it."
        )
        may_be_meant = first.owner is not None or is_untrained(measured)
        yield RuleFinding(output_of(first), message, "warn" if may_be_meant else "fail")


@rule("bf16-headroom", "warn", "forward")
@limit(
    "max_fraction_of_range",
    0.5,
    "greatest magnitude of activations and weights, in units of 3.39e38, the greatest of bfloat16",
    "(2 - 2**-7) * 2**127; half of it, as for fp16-headroom",
)
def bf16_headroom(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """Values come near the greatest number of bfloat16.

    bfloat16 has nearly the range of float32, so values this large soon overflow float32 too; the rule warns before they
    become Inf. Normalise the input, or look for weights that diverged. The precision of bfloat16, 8 bits, is not
    checked.
    """
    yield from _headroom(measured, terms, "bfloat16")


def _headroom(measured: CheckMeasurements, terms: RuleTerms, dtype: str) -> Iterator[RuleFinding]:
    top = FORMATS[dtype].greatest
    rows = [row for row in forward_of(measured).rows if "float" in row.activation.dtype]
    rows.sort(key=lambda row: row.owner is not None)  # of two equal values, name the layer's
    magnitudes = [(_magnitude(row, dtype), output_of(row), named(row)) for row in rows]
    magnitudes += [
        (values.max_abs or 0.0, stored_in(values), f"'{values.name}' ({values.kind})")
        for values in measured.stored
        if "float" in values.dtype and not values.kind.endswith("Observer")  # observers for quantisation hold counts
    ]
    on = [(magnitude, target, name) for magnitude, target, name in magnitudes if terms.is_on(target)]
    broken = [entry for entry in on if entry[0] > terms.limit("max_fraction_of_range", entry[1]) * top]
    if broken:
        magnitude, worst, name = max(broken, key=lambda entry: entry[0])
        limit = terms.limit("max_fraction_of_range", worst)
        beyond = f"{len(broken)} of {len(on):,} outputs, parameters and buffers {are(len(broken))} above it"
        message = (
            f"{name} reaches {figure(magnitude, 3)}, {figure(magnitude / top, 3)} times the greatest of {dtype}"
            f" (limit {limit:g}); {beyond}.{untrained_remark(measured)}"
        )
        yield RuleFinding(worst, message)


def _magnitude(row: LayerRow, dtype: str = "") -> float:
    """Return the greatest magnitude of an output; Inf if a layer's output is in `dtype` and has overflowed.

    For an operation it is the greatest positive value, because masks hold negative ones; 0 if it fills in or selects.
    """
    statistics = row.activation
    if row.owner is not None:
        return 0.0 if row.kind in FILLING | _RESAMPLING else max(statistics.max or 0.0, 0.0)
    return math.inf if statistics.dtype == dtype and statistics.inf_count else statistics.max_abs or 0.0
