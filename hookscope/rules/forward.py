"""Rules about the forward pass: errors, values that are not finite, and the network's output."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hookscope.errors import UsageError
from hookscope.hooks.patterns import FILLING
from hookscope.parameters import arg
from hookscope.rules.rule import (
    FindingTarget,
    RuleFinding,
    RuleTerms,
    limit,
    listed,
    named,
    non_finite_count,
    non_finite_words,
    of_modules,
    output_of,
    quoted,
    required,
    rule,
)
from hookscope.rules.stored import is_weight, is_zero, untrained_remark
from hookscope.text import are, counted, figure, input_text, position_text, printable, safe_text, some_of

if TYPE_CHECKING:
    from hookscope.results.activations import LayerRow
    from hookscope.results.check import CheckMeasurements, NonFiniteOrigin, OutputValues
    from hookscope.results.gradients import ParameterRow
    from hookscope.results.network import Failure


@rule("forward", "fail", "forward")
def forward_raises(measured: CheckMeasurements, _terms: RuleTerms) -> Iterator[RuleFinding]:
    """The forward pass raises.

    The network cannot run on its inputs. The message names the innermost module that was running, and the shapes that
    it was given. If the input does not fit, set shape, resize, crop or images. Rules that need the forward pass are
    skipped.
    """
    if failure := required(measured.forward).failure:
        target = FindingTarget(failure.layer or "(model)", (failure.layer,), failure.kind)
        yield RuleFinding(target, raised("forward", failure))


def raised(phase: str, failure: Failure) -> str:
    """Return a sentence on where and why a pass raised."""
    shapes = ", ".join(failure.input_shapes) or "no tensor"
    where = f"'{failure.layer or '(model)'}' ({failure.kind})"
    return safe_text(f"The {phase} pass raised in {where}, given {shapes}: {failure.error}{failure.remedy()}")


@rule("non-finite-activation", "fail", "forward")
def non_finite_activation(measured: CheckMeasurements, _terms: RuleTerms) -> Iterator[RuleFinding]:
    """A module makes NaN or Inf out of finite inputs.

    The rule names the first module in execution order that turns finite inputs into NaN or Inf, those of its parameters
    that are not finite, and the operation and line if the module's own code makes them. Modules that only pass NaN or
    Inf on are counted, and the inputs that lead to it are named. Causes: an overflow, a division by zero, a root or
    logarithm of a negative number, or a softmax over nothing but -Inf, which a fully masked row causes. -Inf in an
    attention mask is not reported as long as it has no effect. Rules that would only repeat the cause are skipped.
    `hookscope activations`, `grads` and surveys name the first output with NaN or Inf, and skip no rule.
    """
    all_rows = required(measured.forward).rows
    rows, origin = of_modules(all_rows), measured.origin
    if not measured.origin_searched:
        gradients, broken_weights = measured.gradients, []
        if gradients is not None:
            result, is_finite = "the loss", None if gradients.loss is None else math.isfinite(gradients.loss.value)
            broken_weights = [weight for weight in gradients.parameters if not math.isfinite(weight.weight_l2 or 0)]
            all_rows = gradients.rows
        else:
            result, returned = "what the network returns", [row.activation for row in all_rows if not row.layer]
            is_finite = not any(map(non_finite_count, returned)) if returned else None
        yield from _first_in_forward_order(all_rows, broken_weights, result, is_finite)
    elif origin is None:
        yield from _unexplained(rows, measured.unmeasured.get("non-finite-activation", ""))
        yield from _in_survey(measured, rows)
    else:
        made = next((row for row in rows if row.label == origin.layer), None)
        after = [row for row in rows if made is not None and row.index > made.index]
        later = sum(bool(non_finite_count(row.activation)) for row in after)
        target = output_of(made) if made else FindingTarget(origin.layer, (origin.layer,), origin.kind)
        message = f"{_origin_words(origin)} (limit 0)"
        if names := origin.parameters:
            message += f"; its {listed(names)} {are(len(names))} not finite"
        if later:
            message += f"; {counted(later, 'later output')} {'has' if later == 1 else 'have'} some too, passed on"
        if words := _guilty_inputs(origin):
            message += f"; {words}"
        yield RuleFinding(target, f"{message}.")


def _in_survey(measured: CheckMeasurements, rows: Sequence[LayerRow]) -> Iterator[RuleFinding]:
    """Report the first output with NaN or Inf over a data set; Inf that no later output has is a warning: a mask."""
    if measured.survey is None or any(non_finite_count(row.activation) for row in rows):
        return
    surveyed = measured.survey.by_label()
    broken = [row for row in rows if row.label in surveyed and non_finite_count(surveyed[row.label].activation)]
    if broken:
        first, count = replace(broken[0], activation=surveyed[broken[0].label].activation), len(broken) - 1
        which = f"with any over {counted(measured.survey.input_count, 'input')} of the survey"
        message = _first_output_words(first, named(first), which, _later_words(count))
        yield RuleFinding(output_of(first), message, "fail" if count or first.activation.nan_count else "warn")


def _first_output_words(row: LayerRow, name: str, which: str, remark: str) -> str:
    kind = "NaN" if row.activation.nan_count else "Inf"
    words = non_finite_words(row.activation)
    return f"{kind} starts at {name}, the first output {which}: {words} (limit 0); {remark}."


def _first_in_forward_order(
    rows: Sequence[LayerRow], broken_weights: Sequence[ParameterRow], result: str, is_finite: bool | None
) -> Iterator[RuleFinding]:
    """Report the first output with NaN or Inf; `is_finite`: whether the `result` of the pass is; None if unknown."""
    broken = [row for row in rows if non_finite_count(row.activation)]
    in_modules = of_modules(broken)
    meant, has_effect = _filled_on_purpose(broken), bool(in_modules) or not is_finite
    spread = {label for row in broken for label in row.inputs}
    owners = {module.layer for module in in_modules}
    spread |= {row.label for row in broken if row.owner in owners}
    # Inf of an operation that leads to no further Inf or NaN, also in its module's output, is a mask.
    reported = [row for row in broken if row.owner is None or row.activation.nan_count or row.label in spread - meant]
    if not has_effect:  # operations discard the values, as `torch.where` does
        reported = [row for row in reported if row.activation.nan_count]
    broken = reported or [row for row in broken if is_finite is False and row.label not in meant]
    if not broken:
        return
    first = broken[0]
    culprits = [weight.name for weight in broken_weights if weight.layer == first.layer]
    is_mask = len(in_modules) == 1 and not in_modules[0].activation.nan_count and is_finite
    first = in_modules[0] if is_mask else first
    if culprits:
        remark = f"its {listed(culprits)} {are(len(culprits))} not finite"
    elif is_mask:
        remark = f"every other output and {result} are finite, as with a mask"
    else:
        remark = _later_words(len(broken) - 1)
        remark += "" if has_effect else f"; the outputs of all layers and {result} are finite"
    message = _first_output_words(first, quoted(first), "in forward order with any", remark)
    yield RuleFinding(output_of(first), message, "warn" if is_mask or not has_effect else "fail")


def _later_words(count: int) -> str:
    some = f"{counted(count, 'later output')} {'has' if count == 1 else 'have'} some too"
    return some if count else "no later output has any"


def _filled_on_purpose(broken: Sequence[LayerRow]) -> set[str]:
    """Return the labels of operations that fill in Inf on purpose, as masks do, or pass such Inf on."""
    labels = {row.label for row in broken}
    meant: set[str] = set()
    for row in broken:
        inputs = labels.intersection(row.inputs)
        is_meant = inputs <= meant and (inputs or row.kind in FILLING)
        if is_meant and row.owner is not None and not row.activation.nan_count:
            meant.add(row.label)
    return meant


def _unexplained(rows: Sequence[LayerRow], remark: str) -> Iterator[RuleFinding]:
    """Report NaN in an output, or Inf in the network's result, if no module makes them out of finite inputs."""
    suspects = (row for row in rows if row.activation.nan_count or (not row.layer and row.activation.inf_count))
    if broken := next(suspects, None):
        message = (
            f"The output of '{broken.label}' ({broken.kind}) has {non_finite_words(broken.activation)} (limit 0), but"
            f" no module makes them out of finite inputs: check the inputs.{remark and f' {remark}'}"
        )
        yield RuleFinding(output_of(broken), message)


def _origin_words(origin: NonFiniteOrigin) -> str:
    starts = f"{'NaN' if origin.nan_count else 'Inf'} starts"
    values = counted(origin.element_count, "value")
    counts = f"{origin.nan_count:,} NaN and {origin.inf_count:,} Inf in {values}, out of finite inputs"
    module = f"'{origin.layer}' ({origin.kind})"
    code = f"the code of {module} between its modules" if origin.between else module
    if origin.operation:
        source = f" ({origin.source})" if origin.source else ""
        return f"{starts} at '{origin.operation}'{source}: {code} makes {counts}"
    return f"{starts} {'in' if origin.between else 'at'} {code}: {counts}"


def _guilty_inputs(origin: NonFiniteOrigin) -> str:
    if not origin.inputs:
        return ""
    named = [input_text(index, name) for index, name in origin.inputs]
    position = position_text(origin.position)
    if len(named) == 1:
        of = f"of the {origin.input_count} inputs of the batch only " if origin.input_count > 1 else ""
        return f"{of}input {named[0]} leads to it{position and f', at {position}'}"
    where = f", input {origin.inputs[0][0]} at {position}" if position else ""
    if len(named) == origin.input_count:
        return f"every input of the batch leads to it{where}"
    return f"{len(named)} of the {origin.input_count} inputs of the batch lead to it ({some_of(named, 3)}){where}"


# Machine epsilon: float16 has 11 significant bits, bfloat16 has 8.
_EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
_ROUNDINGS = 16  # a difference of this many roundings in the output's dtype always passes

# By the output's dtype, a difference of a few times this number is rounding: it is the distance of float16's subnormal
# numbers, and in wider dtypes processors may round smaller numbers to zero (IEEE 754).
_SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022}

# A network may have a second head for distillation; if more of the last weights are zero, the file lost its end.
_MOST_HEADS = 2


@rule("output-shape", "fail", "outputs")
def output_shape(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """The output does not have the expected shape or dtype.

    The output differs from the shape or dtype under [output] in the configuration, or its number of classes differs
    from the number of class names. Load the right weights, or correct the configuration. If no shape or dtype is given
    and no class names are known, every output passes.
    """
    settings = terms.settings
    if settings.output_shape is None and settings.output_dtype is None:
        yield from _class_count(measured)
        return
    chosen = _chosen(measured, settings.output_key)
    wanted = settings.output_shape
    sizes = [chosen.input_count if size == "N" else size for size in wanted or ()]
    fits = [want in ("*", size) for size, want in zip(chosen.shape, sizes, strict=False)]
    if wanted is not None and not (len(sizes) == len(chosen.shape) and all(fits)):
        yield _about(chosen, f"has shape {_shown(chosen.shape)}, not {_shown(wanted)} as expected.")
    if settings.output_dtype is not None and chosen.dtype != settings.output_dtype:
        yield _about(chosen, f"is {chosen.dtype}, not {settings.output_dtype} as expected.")


@rule("constant-output", "fail", "outputs", ("non-finite-activation",))
@limit(
    "min_difference",
    1e-6,
    "greatest difference between the outputs for different inputs, in units of the greatest output",
    "eight roundings of float32; seeded networks of torchvision measure 5e-5 to 1.6, GoogLeNet 0 while its BatchNorm "
    "is untrained; the smallest of 60 of timm is 2e-4, heads of zeros and Inception v4 apart",
)
def constant_output(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """The output is the same for every input.

    Different inputs give the same output: the signal is lost on the way, and only biases remain. Causes: a zero weight,
    a dead layer, a head that was never loaded. Findings on weights and layers in the same report show where. It is a
    warning if missing training explains it: the last weight or the last two are zero, which is usual for untrained
    heads; all statistics of BatchNorm have their initial values; or the weights are random (hookscope drew them, or
    nearly all look random, no layer is BatchNorm, and no other normalisation is trained). It is also a warning if the
    output holds whole numbers or truth values, which may agree by chance. Needs two different inputs.
    """
    changes = [(values.input_difference, values) for values in measured.outputs if values.input_difference is not None]
    if not changes:
        return
    difference, output = max(changes, key=lambda pair: (pair[0], _holds_fractions(pair[1])))
    limit = terms.limit("min_difference")
    if not all(change < limit for change, _ in changes):  # some outputs may be constant; NaN is not constant
        return
    if output.max_abs is None:
        yield _about(output, "is NaN or Inf everywhere, for every input.")
        return
    excuse = _excuse(measured, output)
    share = f"{_difference_words(difference)} its greatest magnitude (limit: at least {figure(limit)})"
    finding = _about(output, f"is the same for every input: it changes by {share}.{excuse}")
    yield replace(finding, at_most="warn") if excuse else finding


@rule("repeatability", "fail", "outputs", ("non-finite-activation",), followers="output")
@limit(
    "max_difference",
    1e-5,
    "greatest difference between two passes over the same batch, in units of the greatest output",
    "seeded networks of torchvision repeat exactly, and sums in another order differ by less; at least 16 roundings "
    "for float16 and bfloat16",
)
def repeatability(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """The same input gives a different output the second time.

    The network draws random numbers in eval mode, or keeps state from one pass to the next: functional dropout without
    `training=self.training`, noise, a cache. Turn these off in eval mode. Skipped if outputs differ while observers of
    quantisation-aware training are on, because every pass moves their ranges.
    """
    for output in measured.outputs:
        yield from _differs(measured, output, output.repeat_difference, terms, "differs between two identical passes")


@rule("batch-consistency", "fail", "outputs", ("non-finite-activation",), followers="output")
@limit(
    "max_difference",
    1e-4,
    "greatest difference between an input in a batch and alone, in units of the greatest output",
    "seeded networks of torchvision stay below 3e-6, which is rounding; the largest of 34 of torchvision and timm "
    "whose BatchNorm has statistics is 4.1e-5; at least 16 roundings for float16 and bfloat16",
)
def batch_consistency(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """An input gives a different output in a batch than alone.

    Inputs of one batch influence each other: BatchNorm with batch statistics in eval mode (track_running_stats=False),
    normalisation over the wrong axis, a reshape that mixes axis 0. Scores then depend on the rest of the batch, so
    correct the network. If the network raises on an input alone, the input is compared in two batches. Skipped if
    outputs differ while layers are quantised dynamically, which round by the range of the whole batch, or while
    observers of quantisation-aware training are on.
    """
    for output in measured.outputs:
        claim = "differs between an input in a batch and the same input alone, or in another batch"
        yield from _differs(measured, output, output.alone_difference, terms, claim)


def _differs(
    measured: CheckMeasurements, output: OutputValues, difference: float | None, terms: RuleTerms, claim: str
) -> Iterator[RuleFinding]:
    if difference is None:
        return
    dtypes = (output.dtype, required(measured.forward).dtype)
    rounding = max(_EPSILON.get(dtype, 0.0) for dtype in dtypes) * _ROUNDINGS
    vanishing = _SMALLEST.get(output.dtype, 0.0) * _ROUNDINGS / output.max_abs if output.max_abs else 0.0
    limit = max(terms.limit("max_difference"), rounding, vanishing)
    if not difference <= limit:  # NaN is a difference
        share = f"{_difference_words(difference)} the greatest magnitude (limit {figure(limit)})"
        yield _about(output, f"{claim}: they differ by {share}.")


def _class_count(measured: CheckMeasurements) -> Iterator[RuleFinding]:
    names = len(measured.model.categories)
    if not names or len(measured.outputs) != 1:
        return
    (output,) = measured.outputs
    # (N, classes) of a classifier, (N, classes, H, W) of a segmentation network
    if output.batched and len(output.shape) in (2, 4) and output.shape[1] != names:
        classes = f"{counted(output.shape[1], 'class', 'classes')} (shape {_shown(output.shape)})"
        yield _about(output, f"has {classes}, but {counted(names, 'name')} {are(names)} known.")


def _chosen(measured: CheckMeasurements, key: str | None) -> OutputValues:
    from hookscope.results.network import is_output_of_key

    chosen = [output for output in measured.outputs if key is None or is_output_of_key(output.label, key)]
    if len(chosen) == 1 or (chosen and key is not None):
        return chosen[0]
    listed = printable(", ".join(output.label for output in measured.outputs)) or "none"
    if key is None:
        which = f"name it with {arg('output_key')}: {listed}."
        raise UsageError(f"shape and dtype in [output] ask about one output; {which}")
    raise UsageError(f"{arg('output_key')} '{printable(key, 80)}' names no output; there is: {listed}.")


def _holds_fractions(output: OutputValues) -> bool:
    return "float" in output.dtype or "complex" in output.dtype


def _excuse(measured: CheckMeasurements, output: OutputValues) -> str:
    """Return a sentence, after a space, on a harmless reason for a constant output; "" without one."""
    if not _holds_fractions(output):
        return " Whole numbers, such as the index of a class, may be the same by chance."
    weights = [values for values in measured.stored if is_weight(values) or values.filter_count]
    zeros = [*itertools.takewhile(is_zero, reversed(weights))]
    if 0 < len(zeros) <= _MOST_HEADS:
        return f" '{weights[-1].name}' is all 0, as an untrained head may be."
    return untrained_remark(measured)


def _about(output: OutputValues, claim: str) -> RuleFinding:
    named = "" if output.label == "(model)" else f"'{output.label}' "
    return RuleFinding(FindingTarget(output.label), f"The output {named}{claim}")


def _difference_words(difference: float) -> str:
    """Return the words before a magnitude: "0.013 of" it; "NaN beside" it if an output is NaN."""
    return "NaN beside" if math.isnan(difference) else f"{figure(difference)} of"


def _shown(shape: tuple[int | str, ...]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
