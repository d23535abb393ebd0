"""Rules that compare with what is known: what a network must say about pictures, what its baseline says."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from hookscope.checks.rules.rule import FindingTarget, Objection, RuleTerms, limit, output_of, rule
from hookscope.checks.settings import Expectation
from hookscope.errors import UsageError, nearest
from hookscope.text import printable, shape_text

if TYPE_CHECKING:
    from hookscope.checks.baseline import Baseline, BaselineInput, BaselineRow
    from hookscope.results.check import CheckMeasurements
    from hookscope.results.comparison import Prediction
    from hookscope.results.distribution import Distribution


@rule("expectation", "fail", "expectations", ("non-finite-activation",))
def expectation(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[Objection]:
    """A named picture is not classified as expected.

    A picture whose content is known must be classified so: top1, the classes that the first k must contain,
    min_probability. Nothing else tells shuffled classes, wrong preprocessing or a half-trained network from a good one.
    It is off until the configuration names expectations.
    """
    forward = measured.forward
    inputs = [record.name for record in forward.inputs] if forward else []
    predictions = {each.input_index: each for each in forward.predictions} if forward else {}
    for expected in terms.settings.expectations:
        named = (*(() if expected.top1 is None else (expected.top1,)), *expected.contains)
        wanted = {each: _indices(each, measured.model.categories) for each in named}
        name = str(expected.image)
        prediction = predictions.get(inputs.index(name)) if name in inputs else None
        if prediction is not None:
            messages = _broken(expected, wanted, prediction, measured.model.categories)
        elif name in inputs:
            reason = measured.unmeasured.get("expectation", "the network returned no class scores; name the output.")
            messages = iter([f"cannot be judged: {reason.rstrip('.')}."])
        else:
            messages = iter(["is not among the inputs, so nothing is known about it."])
        for message in messages:
            yield Objection(FindingTarget(name), f"'{name}' {message}")


def _indices(wanted: str | int, categories: tuple[str, ...]) -> frozenset[int]:
    """Return the indices of a class; two of ImageNet's names, "crane" and "maillot", stand for two classes each."""
    if isinstance(wanted, int):
        if wanted < 0 or (categories and wanted >= len(categories)):
            known = f"the network has 0 to {len(categories) - 1}" if categories else "they count from 0"
            raise UsageError(f"The expectations name class {wanted}, but {known}.")
        return frozenset([wanted])
    if not categories:
        raise UsageError(
            f"The expectations name class '{printable(wanted, 80)}', but the names of this network's classes are not"
            " known; give its index."
        )
    found = frozenset(index for index, name in enumerate(categories) if name.casefold() == wanted.casefold())
    if not found:
        hint = nearest(wanted, categories)
        raise UsageError(
            f"The expectations name class '{printable(wanted, 80)}', which the network does not have.{hint}"
        )
    return found


def _broken(
    expected: Expectation,
    wanted: dict[str | int, frozenset[int]],
    prediction: Prediction,
    categories: tuple[str, ...],
) -> Iterator[str]:
    ranked = prediction.class_indices
    first, share = ranked[0], prediction.probabilities[0]
    if expected.top1 is not None and first not in wanted[expected.top1]:
        place = next((str(rank) for rank, each in enumerate(ranked, 1) if each in wanted[expected.top1]), "")
        rank = f"in place {place}" if place else f"not among the first {len(ranked)}"
        yield (
            f"is classified as {_class(first, categories)} with probability {share:.3f}; expected first is"
            f" {_named(expected.top1, categories)}, which is {rank}."
        )
    elif expected.min_probability is not None and not share >= expected.min_probability:  # NaN is no probability
        yield (
            f"is classified as {_class(first, categories)} with probability {share:.3f} (limit: at least"
            f" {expected.min_probability:g})."
        )
    among = ranked[: expected.k]
    # A network of three classes has no first five; then all are known.
    unknown = len(ranked) < expected.k and len(ranked) < len(categories or range(expected.k))
    for each in expected.contains:
        if wanted[each].isdisjoint(among):
            got = ", ".join(_class(index, categories) for index in among[:5])
            known = f"; only the first {len(ranked)} are known" if unknown else ""
            yield (
                f"does not have {_named(each, categories)} among its first {expected.k} classes{known}: they are"
                f" {got}{', …' if len(among) > 5 else ''}."
            )


def _class(index: int, categories: tuple[str, ...]) -> str:
    return f"'{categories[index]}' ({index})" if index < len(categories) else f"class {index}"


def _named(wanted: str | int | None, categories: tuple[str, ...]) -> str:
    return _class(wanted, categories) if isinstance(wanted, int) else f"'{wanted}'"


# Share of the rows that must have kept name, type and shape. Below it the network is another one (resnet18 and resnet34
# share 0.5 of theirs), above it a few layers were changed, which are findings. Our choice.
_LEAST_ALIKE = 0.75

# A layer's spread is its std, but at least this share of its greatest magnitude, so that the rounding of a layer whose
# values hardly vary (a sigmoid at 0.5) is no drift. In half precision the default limit then allows ten roundings
# (2**-11 and 2**-8 of the magnitude). Our choice; what was measured is with the limits below.
_LEAST_SPREAD = {"float16": 0.5, "bfloat16": 4.0}
_LEAST_SPREAD_ELSE = 0.01


@rule("drift", "fail", "baseline", ("non-finite-activation",))
@limit(
    "max_difference",
    0.01,
    "how far a layer's mean, std or a quantile may move, in units of its spread: its std, but at least 0.01 of its"
    " greatest magnitude (0.5 in float16, 4 in bfloat16)",
    "our choice; on 15 networks other threads, kernels or precision move it by up to 3e-5 (bfloat16 3e-3), one"
    " weight tensor scaled by 1.01 by 0.02 to 0.12, a training step at a rate of 1e-3 by 0.012 or more, and another"
    " picture decoder, one level more or less in every pixel, would by 0.03 to 0.4",
)
@limit(
    "max_dead_difference",
    0.05,
    "how far a layer's share of dead channels may move, 0-1",
    "our choice; on 15 networks other threads or kernels move it by 0 (bfloat16 0.008), one level more or less in"
    " every pixel by up to 0.02, and one batch through BatchNorm by up to 0.5",
)
@limit(
    "max_gradient_ratio",
    1.1,
    "how many times larger or smaller the L2 norm of a layer's gradient may be",
    "our choice; on 15 networks other threads or kernels change it by up to 1.0001 times (bfloat16 1.03), one level"
    " more or less in every pixel by 1.08, a training step at a rate of 1e-3 by 1.001 to 1e10",
)
def drift(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[Objection]:
    """A layer's statistics differ from the baseline.

    The same inputs gave other statistics when the baseline was written. The first layer in execution order that drifts
    is where to look: weights, preprocessing, or a library changed. If the change was meant, renew the baseline with
    --update-baseline. It is off until a baseline is given.
    """
    # Layers are compared in execution order; those that are gone come last. A layer without a counterpart, or with
    # another type, shape, dtype, or count of NaN or Inf, drifts whatever the limits.
    from hookscope.checks.baseline import measured_rows

    baseline = terms.baseline
    assert baseline is not None  # noqa: S101 - judging leaves this rule out without one
    require_fit(baseline, measured)
    known = {row.label: row for row in baseline.rows}
    with_gradients = baseline.gradients is not None and measured.gradients is not None
    drifting: list[tuple[FindingTarget, str, str]] = []
    for row, now in measured_rows(measured):
        target, before = output_of(row), known.pop(now.label, None)
        limits = {name: terms.limit(name, target) for name in terms.rule.limits}
        change = "it is not in the baseline"
        if before:
            before = before if with_gradients else replace(before, gradient_l2=now.gradient_l2)
            change = _change(before, now, limits, _resolution(row.activation.distribution))
        drifting.append((target, now.kind, change))
    drifting += [(_gone(row), row.kind, "it is in the baseline and does not run") for row in known.values()]
    drifting = [each for each in drifting if each[2] and terms.is_on(each[0])]
    for index, (target, kind, change) in enumerate(drifting):
        place = "drifts from the baseline"
        if index == 0 and len(drifting) > 1:
            place = f"is the first of {len(drifting)} layers to drift from the baseline"
        yield Objection(target, f"'{printable(target.where)}' ({printable(kind)}) {place}: {change}.")


def require_fit(baseline: Baseline, measured: CheckMeasurements) -> None:
    """Raise UsageError for a baseline that says nothing about this run.

    That is if the network has another class or fewer than three quarters of the rows are alike by name, type and shape;
    if the inputs or their preparation differ; if it holds gradients of another loss or mode, or the run was to take
    none.
    """
    difference = (
        _other_class(baseline, measured)
        or _other_inputs(baseline, measured)
        or _other_gradients(baseline, measured)
        or _other_rows(baseline, measured)
    )
    if difference:
        from hookscope.checks.baseline import RENEW

        raise UsageError(f"The baseline does not fit: {difference}. {RENEW}")


def _other_class(baseline: Baseline, measured: CheckMeasurements) -> str:
    was, now = printable(baseline.kind), printable(measured.model.kind)
    named = f"it is of {printable(baseline.model)} ({was}), and this is {printable(measured.model.name)} ({now})"
    return "" if was == now else named


def _other_inputs(baseline: Baseline, measured: CheckMeasurements) -> str:
    from hookscope.checks.baseline import inputs_of

    if measured.forward is None or measured.forward.failure is not None:
        return ""
    now = inputs_of(measured.forward.inputs)
    counts = [sum(each.count for each in inputs) for inputs in (baseline.inputs, now)]
    if counts[0] != counts[1]:
        return f"it was made with {counts[0]} inputs, and this run has {counts[1]}"
    for index, (was, given) in enumerate(zip(baseline.inputs, now, strict=False), 1):
        if difference := _other_input(was, given):
            return f"input {index} {difference}"
    return ""


def _other_input(was: BaselineInput, given: BaselineInput) -> str:
    if (was.sha256, was.count) != (given.sha256, given.count):
        return f"was {_described(was)}, and is {_described(given)}"
    if was.shape != given.shape:
        return f"was {shape_text(was.shape)}, and is {shape_text(given.shape)}"
    if was.steps != given.steps:
        before = "; ".join(step for step in was.steps if step not in given.steps) or "nothing"
        after = "; ".join(step for step in given.steps if step not in was.steps) or "nothing"
        return f"was prepared by '{printable(before)}', and now by '{printable(after)}'"
    return ""


def _described(entry: BaselineInput) -> str:
    digest = f"sha256 {printable(entry.sha256)[:12]}…" if entry.sha256 else f"{entry.count} of no file"
    return f"'{printable(entry.name)}' ({digest})"


def _other_gradients(baseline: Baseline, measured: CheckMeasurements) -> str:
    from hookscope.checks.baseline import gradients_of
    from hookscope.checks.rules import RULES

    if baseline.gradients is None:
        return ""
    if measured.gradients is None:
        tried = any(rule in RULES and RULES[rule].needs == "gradients" for rule in measured.unmeasured)
        return "" if tried else "it holds gradients, and this run takes none, because no rule about gradients is on"
    now = gradients_of(measured.gradients)
    if now is None or now == baseline.gradients:
        return ""
    was, given = (
        printable(f"{each.loss}, {each.target or 'no target'}, {each.mode}") for each in (baseline.gradients, now)
    )
    return f"its gradients are of the loss '{was}', and these are of '{given}'"


def _other_rows(baseline: Baseline, measured: CheckMeasurements) -> str:
    from hookscope.checks.baseline import measured_rows

    if measured.forward is None or measured.forward.failure is not None:
        return ""
    was = {(row.label, row.kind, row.shape) for row in baseline.rows}
    given = {(row.label, row.kind, row.shape) for _, row in measured_rows(measured)}
    alike, count = len(was & given), max(len(was), len(given))
    if alike >= _LEAST_ALIKE * count:
        return ""
    return f"only {alike} of {count} layers have the name, type and shape that it says, so it is of another network"


def _gone(row: BaselineRow) -> FindingTarget:
    name = re.sub(r"(#\d+)?(\[.*)?\Z", "", row.label).removeprefix("(model)")
    return FindingTarget(row.label, (name,), row.kind)


def _change(before: BaselineRow, now: BaselineRow, limits: Mapping[str, float], resolution: Mapping[str, float]) -> str:
    """Return what changed by more than is allowed, in words; "" for nothing."""
    for what, was, given in (
        ("type", before.kind, now.kind),
        ("shape", shape_text(before.shape), shape_text(now.shape)),
        ("dtype", before.dtype, now.dtype),
    ):
        if was != given:
            return f"its {what} went from {printable(was)} to {printable(given)}"
    counts = (("NaN", before.nan_count, now.nan_count), ("Inf", before.inf_count, now.inf_count))
    changes = [
        *(f"its count of {each} went from {_number(a)} to {_number(b)}" for each, a, b in counts if a != b),
        _changed_values(before, now, limits["max_difference"], resolution),
        _changed_share(before.dead_fraction, now.dead_fraction, limits["max_dead_difference"]),
        _changed_gradient(before.gradient_l2, now.gradient_l2, limits["max_gradient_ratio"]),
    ]
    return "; ".join(filter(None, changes))


def _changed_values(before: BaselineRow, now: BaselineRow, limit: float, resolution: Mapping[str, float]) -> str:
    """Return which of mean, std and quantiles moved furthest, by more than its resolution, if it is too far."""
    was, given = _values(before), _values(now)
    if lost := next((name for name in {**was, **given} if (name in was) != (name in given)), None):
        return f"its {lost} went from {_number(was.get(lost))} to {_number(given.get(lost))}"
    magnitude = max(map(abs, before.quantiles or (before.mean or 0.0,)))
    spread = max(before.std or 0.0, _LEAST_SPREAD.get(before.dtype, _LEAST_SPREAD_ELSE) * magnitude)
    moved = {
        name: _ratio(max(0.0, abs(value - given[name]) - resolution.get(name, 0.0)), spread)
        for name, value in was.items()
    }
    furthest = max(moved, key=lambda name: moved[name], default=None)
    if furthest is None or moved[furthest] <= limit:
        return ""
    return (
        f"its {furthest} went from {_number(was[furthest])} to {_number(given[furthest])}, "
        f"{'at least ' if resolution.get(furthest) else ''}{moved[furthest]:.3g} of its spread (limit {limit:g})"
    )


def _resolution(distribution: Distribution | None) -> dict[str, float]:
    """Return by how much each quantile must move before bins can tell that it has."""
    if distribution is None:
        return {}
    from hookscope.results.distribution import quantile_resolution
    from hookscope.results.statistics import QUANTILE_LEVELS

    return _by_quantile(quantile_resolution(distribution, QUANTILE_LEVELS))


def _values(row: BaselineRow) -> dict[str, float]:
    named = {"mean": row.mean, "std": row.std, **_by_quantile(row.quantiles or ())}
    return {name: value for name, value in named.items() if value is not None}


def _by_quantile(values: Iterable[float]) -> dict[str, float]:
    from hookscope.results.statistics import QUANTILE_LEVELS

    return dict(zip((f"{level:.0%} quantile" for level in QUANTILE_LEVELS), values, strict=False))


def _changed_share(was: float | None, given: float | None, limit: float) -> str:
    if was == given or (was is not None and given is not None and abs(was - given) <= limit):
        return ""
    return f"its share of dead channels went from {_number(was)} to {_number(given)} (limit {limit:g} apart)"


def _changed_gradient(was: float | None, given: float | None, limit: float) -> str:
    if was == given or (was is not None and given is not None and _ratio(max(was, given), min(was, given)) <= limit):
        return ""
    return f"the L2 norm of its gradient went from {_number(was)} to {_number(given)} (limit {limit:g} times)"


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else (math.inf if part else 0.0)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"
