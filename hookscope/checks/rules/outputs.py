"""Rules about what the network returns: its shape, and how it changes with the input, the batch and the time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hookscope.checks.rules.rule import FindingTarget, Limit, Objection, RuleTerms, rule
from hookscope.checks.rules.stored import batch_norm_is_untrained, is_weight, is_zero
from hookscope.errors import UsageError
from hookscope.text import printable

if TYPE_CHECKING:
    from hookscope.results.check import CheckMeasurements, OutputValues

# Machine epsilon: float16 has 11 significant bits, bfloat16 has 8 (IEEE 754, and its first half).
_EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7}

# Our choice: rounding of the output's dtype that differences may always have.
_ROUNDINGS = 16


@rule("output-shape", "fail", "outputs")
def output_shape(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[Objection]:
    """The output has another shape or dtype than expected.

    The shape or dtype of the output is not what shape or dtype below [output] ask for, or the output has another number
    of classes than there are names. With neither asked for nor names known, any output passes.
    """
    settings = terms.settings
    if settings.output_shape is None and settings.output_dtype is None:
        yield from _class_count(measured)
        return
    chosen = _chosen(measured, settings.output_key)
    wanted = settings.output_shape
    if wanted is not None and not _is_of_shape(chosen.shape, wanted, chosen.input_count):
        message = f"The output {_named(chosen)}has shape {_shown(chosen.shape)}, not {_shown(wanted)} as expected."
        yield Objection(_target(measured, chosen), message)
    if settings.output_dtype is not None and chosen.dtype != settings.output_dtype:
        message = f"The output {_named(chosen)}is {chosen.dtype}, not {settings.output_dtype} as expected."
        yield Objection(_target(measured, chosen), message)


@rule(
    "constant-output",
    "fail",
    "outputs",
    ("non-finite-activation",),
    min_difference=Limit(
        1e-6,
        "greatest difference between the outputs for different inputs, in units of the greatest output",
        "our choice, eight roundings of float32; seeded networks of torchvision measure 5e-5 to 1.6, GoogLeNet 0 while"
        " its BatchNorm is untrained",
    ),
)
def constant_output(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[Objection]:
    """The output is the same whatever the input.

    Different inputs come to the same output: the signal dies on the way, and biases are all that is left. A zero
    weight, a dead layer, or a head that was never loaded do it. It is a warning where it is a matter of training: while
    the last weights are all zero, all statistics of BatchNorm are as they start, or hookscope itself drew the weights
    at random. Needs two different inputs.
    """
    known = [(each.input_difference, each) for each in measured.outputs if each.input_difference is not None]
    if not known:
        return
    difference, output = max(known, key=lambda pair: pair[0])
    target = _target(measured, output)
    limit = terms.limit("min_difference", target)
    if not all(each < limit for each, _ in known):  # one of several may be constant; NaN is none
        return
    if output.max_abs is None:
        yield Objection(target, f"The output {_named(output)}is NaN or Inf everywhere, whatever the input.")
        return
    excuse = _excuse(measured)
    message = (
        f"The output {_named(output)}is the same whatever the input: {_difference(difference)} its greatest magnitude"
        f" between inputs (limit: at least {limit:.0e}).{excuse}"
    )
    yield Objection(target, message, "warn" if excuse else "fail")


@rule(
    "repeatability",
    "fail",
    "outputs",
    ("non-finite-activation",),
    max_difference=Limit(
        1e-5,
        "greatest difference between two passes over the same batch, in units of the greatest output",
        "our choice; seeded networks of torchvision repeat exactly, and sums in another order differ by less. For"
        " float16 and bfloat16 at least 16 roundings",
    ),
)
def repeatability(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[Objection]:
    """The same input gives another output the second time.

    Something draws random numbers in eval mode, or keeps state from one pass to the next: functional dropout without
    `training=self.training`, noise, a cache.
    """
    for output in measured.outputs:
        yield from _differs(measured, output, output.repeat_difference, terms, "differs between two identical passes")


@rule(
    "batch-consistency",
    "fail",
    "outputs",
    ("non-finite-activation",),
    max_difference=Limit(
        1e-4,
        "greatest difference between an input in a batch and alone, in units of the greatest output",
        "our choice; seeded networks of torchvision stay below 3e-6, which is rounding. For float16 and bfloat16 at"
        " least 16 roundings",
    ),
)
def batch_consistency(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[Objection]:
    """An input gives another output in a batch than alone.

    Inputs of one batch influence each other: BatchNorm with batch statistics in eval mode (track_running_stats=False),
    normalisation over the wrong axis, a reshape that mixes axis 0. Scores then depend on what else is in the batch.
    """
    for output in measured.outputs:
        what = "differs between an input in a batch and the same input alone"
        yield from _differs(measured, output, output.alone_difference, terms, what)


def _differs(
    measured: CheckMeasurements, output: OutputValues, difference: float | None, terms: RuleTerms, what: str
) -> Iterator[Objection]:
    if difference is None:
        return
    dtypes = (output.dtype, measured.forward.dtype if measured.forward else "")
    rounding = max(_EPSILON.get(dtype, 0.0) for dtype in dtypes) * _ROUNDINGS
    target = _target(measured, output)
    limit = max(terms.limit("max_difference", target), rounding)
    if not difference <= limit:  # NaN is no agreement
        message = f"The output {_named(output)}{what}: they differ by {_difference(difference)} the greatest magnitude"
        yield Objection(target, f"{message} (limit {limit:.1e}).")


def _class_count(measured: CheckMeasurements) -> Iterator[Objection]:
    """Object to a single output of class scores whose classes are not as many as their names."""
    names = len(measured.model.categories)
    if not names or len(measured.outputs) != 1:
        return
    (output,) = measured.outputs
    # (N, classes) of a classifier, (N, classes, H, W) of a segmentation network
    if output.batched and len(output.shape) in (2, 4) and output.shape[1] != names:
        message = (
            f"The output has {output.shape[1]} classes (shape {_shown(output.shape)}), but {names} names are known."
        )
        yield Objection(_target(measured, output), message)


def _chosen(measured: CheckMeasurements, key: str | None) -> OutputValues:
    """Return the output that the settings are about."""
    outputs = measured.outputs
    listed = printable(", ".join(each.label for each in outputs)) or "none"
    if key is None:
        if len(outputs) != 1:
            raise UsageError(f"output_shape and output_dtype ask about one output; name it with output_key: {listed}.")
        return outputs[0]
    path = key.removeprefix("(model)")
    for each in outputs:
        if each.label.removeprefix("(model)") in (path, f"[{path!r}]", f".{path}", f"[{path}]"):
            return each
    raise UsageError(f"output_key '{printable(key, 80)}' names no output; there is: {listed}.")


def _is_of_shape(shape: tuple[int, ...], wanted: tuple[int | str, ...], count: int) -> bool:
    sizes = [count if size == "N" else size for size in wanted]
    return len(shape) == len(sizes) and all(want in ("*", size) for size, want in zip(shape, sizes, strict=True))


def _excuse(measured: CheckMeasurements) -> str:
    """Return what of the network is untrained, so that a constant output is no wonder; "" for nothing."""
    weights = [values for values in measured.stored if is_weight(values)]
    if weights and is_zero(weights[-1]):
        return f" '{weights[-1].name}' is all 0, as an untrained head may be."
    if batch_norm_is_untrained(measured):
        return " BatchNorm does not normalise yet, being untrained."
    return " Its weights are random." if measured.model.random else ""


def _target(measured: CheckMeasurements, output: OutputValues) -> FindingTarget:
    return FindingTarget(output.label, ("",), measured.model.kind)


def _named(output: OutputValues) -> str:
    return "" if output.label == "(model)" else f"'{output.label}' "


def _difference(difference: float) -> str:
    return "NaN beside" if math.isnan(difference) else f"{difference:.1e} of"


def _shown(shape: tuple[int | str, ...]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
