"""The rule `drift`: does a network give what its baseline says, and if not, which layer is the first to differ?"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from hookscope.checks.baseline import (
    RENEW,
    Baseline,
    BaselineInput,
    BaselineRow,
    gradients_of,
    inputs_of,
    measured_rows,
)
from hookscope.checks.context import Subject, Terms, output_of
from hookscope.checks.rules import RULES
from hookscope.errors import UsageError
from hookscope.results.check import Examination, Finding
from hookscope.results.distribution import Distribution, quantile_resolution
from hookscope.results.statistics import QUANTILE_LEVELS
from hookscope.text import printable, shape_text

# Share of the rows that must have kept name, type and shape. Below it the network is another one (resnet18 and resnet34
# share 0.5 of theirs), above it a few layers were changed, which are findings. Our choice.
_LEAST_ALIKE = 0.75

# A layer's spread is its std, but at least this share of its greatest magnitude, so that the rounding of a layer whose
# values hardly vary (a sigmoid at 0.5) is no drift. In half precision the default limit then allows ten roundings
# (2**-11 and 2**-8 of the magnitude). Our choice; what was measured is with the limits in `rules.py`.
_LEAST_SPREAD = {"float16": 0.5, "bfloat16": 4.0}
_LEAST_SPREAD_ELSE = 0.01

_QUANTILES = tuple(f"{level:.0%} quantile" for level in QUANTILE_LEVELS)


def require_fit(baseline: Baseline, examination: Examination) -> None:
    """Refuse a baseline that says nothing about this run, because network, inputs or loss are others.

    Raises:
        UsageError: If the network has another class or fewer than three quarters of the rows are alike by name, type
            and shape; if the inputs or their preparation differ; if the baseline holds gradients of another loss or
            mode, or the run was not to take any.
    """
    difference = (
        _other_class(baseline, examination)
        or _other_inputs(baseline, examination)
        or _other_gradients(baseline, examination)
        or _other_rows(baseline, examination)
    )
    if difference:
        raise UsageError(f"The baseline does not fit: {difference}. {RENEW}")


def _other_class(baseline: Baseline, examination: Examination) -> str:
    model = examination.model
    if printable(model.kind) == printable(baseline.kind):
        return ""
    return (
        f"it is of {printable(baseline.model)} ({printable(baseline.kind)}), and this is {printable(model.name)} "
        f"({printable(model.kind)})"
    )


def _other_inputs(baseline: Baseline, examination: Examination) -> str:
    if examination.forward is None or examination.forward.failure is not None:
        return ""
    now = inputs_of(examination.forward.inputs)
    counts = [sum(each.count for each in inputs) for inputs in (baseline.inputs, now)]
    if counts[0] != counts[1]:
        return f"it was made with {counts[0]} inputs, and this run has {counts[1]}"
    for index, (was, given) in enumerate(zip(baseline.inputs, now, strict=False), 1):
        if difference := _other_input(was, given):
            return f"input {index} {difference}"
    return ""


def _other_input(was: BaselineInput, given: BaselineInput) -> str:
    """Return how one input differs; a renamed file does not."""
    if (was.sha256, was.count) != (given.sha256, given.count):
        return f"was {_described(was)}, and is {_described(given)}"
    if was.shape != given.shape:
        return f"was {shape_text(was.shape)}, and is {shape_text(given.shape)}"
    if was.steps != given.steps:
        before, after = ("; ".join(steps) or "nothing" for steps in _where_they_part(was.steps, given.steps))
        return f"was prepared by '{printable(before)}', and now by '{printable(after)}'"
    return ""


def _where_they_part(was: Sequence[str], given: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    return [step for step in was if step not in given], [step for step in given if step not in was]


def _described(entry: BaselineInput) -> str:
    digest = f"sha256 {printable(entry.sha256)[:12]}…" if entry.sha256 else f"{entry.count} of no file"
    return f"'{printable(entry.name)}' ({digest})"


def _other_gradients(baseline: Baseline, examination: Examination) -> str:
    if baseline.gradients is None:
        return ""
    if examination.gradients is None:
        tried = any(rule in RULES and RULES[rule].needs == "gradients" for rule in examination.unmeasured)
        return "" if tried else "it holds gradients, and this run takes none, because no rule about gradients is on"
    now = gradients_of(examination.gradients)
    if now is None or now == baseline.gradients:
        return ""
    was, given = (
        printable(f"{each.loss}, {each.target or 'no target'}, {each.mode}") for each in (baseline.gradients, now)
    )
    return f"its gradients are of the loss '{was}', and these are of '{given}'"


def _other_rows(baseline: Baseline, examination: Examination) -> str:
    if examination.forward is None or examination.forward.failure is not None:
        return ""
    was = {(row.label, row.kind, row.shape) for row in baseline.rows}
    given = {(row.label, row.kind, row.shape) for _, row in measured_rows(examination)}
    alike, count = len(was & given), max(len(was), len(given))
    if alike >= _LEAST_ALIKE * count:
        return ""
    return f"only {alike} of {count} layers have the name, type and shape that it says, so it is of another network"


def drift(examination: Examination, terms: Terms, baseline: Baseline) -> Iterator[Finding]:
    """Compare every layer with the baseline, in execution order; layers that are gone come last.

    Mean, std and quantiles are compared in units of the layer's spread in the baseline: its std, but at least 0.01 of
    its greatest magnitude (0.5 in float16, 4 in bfloat16); of quantiles that are not exact, only what goes beyond
    `quantile_resolution`. Gradients are compared where the baseline has them and this run took them. A layer without a
    counterpart, or with another type, shape, dtype, or count of NaN or Inf, drifts whatever the limits.

    Args:
        examination: Of the network that is checked.
        terms: Of the rule `drift`.
        baseline: One that `require_fit` lets pass.

    Yields:
        One finding per layer that drifts; the first says that it is the first, and of how many.
    """
    known = {row.label: row for row in baseline.rows}
    with_gradients = baseline.gradients is not None and examination.gradients is not None
    drifting: list[tuple[Subject, str, str]] = []
    for measured, now in measured_rows(examination):
        subject, before = output_of(measured), known.pop(now.label, None)
        limits = _Limits(*(terms.limit(field.name, subject) for field in fields(_Limits)))
        change = "it is not in the baseline"
        if before:
            resolution = _resolution(measured.activation.distribution)
            change = _change(before, now, limits, resolution, with_gradients=with_gradients)
        drifting.append((subject, now.kind, change))
    drifting += [(_gone(row), row.kind, "it is in the baseline and does not run") for row in known.values()]
    drifting = [each for each in drifting if each[2] and terms.is_on(each[0])]
    for index, (subject, kind, change) in enumerate(drifting):
        place = "drifts from the baseline"
        if index == 0 and len(drifting) > 1:
            place = f"is the first of {len(drifting)} layers to drift from the baseline"
        message = f"'{printable(subject.where)}' ({printable(kind)}) {place}: {change}."
        yield from terms.object_to(subject, message)


@dataclass(frozen=True, slots=True)
class _Limits:
    """The limits of the rule, for one layer."""

    max_difference: float
    max_dead_difference: float
    max_gradient_ratio: float


def _gone(row: BaselineRow) -> Subject:
    """Return a layer that is in the baseline alone; its name is what its label says without call and slot."""
    name = re.sub(r"(#\d+)?(\[.*)?\Z", "", row.label).removeprefix("(model)")
    return Subject(row.label, (name,), row.kind)


def _change(
    before: BaselineRow, now: BaselineRow, limits: _Limits, resolution: Mapping[str, float], *, with_gradients: bool
) -> str:
    """Return what changed by more than is allowed, in words; "" for nothing."""
    for what, was, given in (
        ("type", before.kind, now.kind),
        ("shape", shape_text(before.shape), shape_text(now.shape)),
        ("dtype", before.dtype, now.dtype),
    ):
        if was != given:
            return f"its {what} went from {printable(was)} to {printable(given)}"
    changes = [
        _changed_count("NaN", before.nan_count, now.nan_count),
        _changed_count("Inf", before.inf_count, now.inf_count),
        _changed_values(before, now, limits.max_difference, resolution),
        _changed_share(before.dead_fraction, now.dead_fraction, limits.max_dead_difference),
        _changed_gradient(before.gradient_l2, now.gradient_l2, limits.max_gradient_ratio) if with_gradients else "",
    ]
    return "; ".join(filter(None, changes))


def _changed_count(what: str, was: int | None, given: int | None) -> str:
    return "" if was == given else f"its count of {what} went from {_number(was)} to {_number(given)}"


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
    return dict(zip(_QUANTILES, quantile_resolution(distribution, QUANTILE_LEVELS), strict=True))


def _values(row: BaselineRow) -> dict[str, float]:
    named = {"mean": row.mean, "std": row.std, **dict(zip(_QUANTILES, row.quantiles or (), strict=False))}
    return {name: value for name, value in named.items() if value is not None}


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
