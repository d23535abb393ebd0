"""The rules of a training: rules for every step, and rules of `check` and `grads` for watched steps."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from statistics import median_low
from typing import Literal

from hookscope.commands.check.measuring.training_state import moves_by
from hookscope.commands.watch.activations import saturated_fraction
from hookscope.commands.watch.loss_graph import LossOperations
from hookscope.commands.watch.outside_writes import OutsideChange
from hookscope.commands.watch.ring import Jump, Ring, norm_of
from hookscope.commands.watch.stale_gradients import LastStep
from hookscope.commands.watch.steps import ArrivedStep, is_finite
from hookscope.results.activations import Activations, LayerRow
from hookscope.results.check import CheckMeasurements
from hookscope.results.gradients import Gradients, LossRecord, ParameterRow
from hookscope.results.headroom import FORMATS
from hookscope.results.inputs import InputRecord
from hookscope.results.network import ModelInfo
from hookscope.results.training import TrainingFinding, TrainingStep, WatchedParameter
from hookscope.rules import RULES
from hookscope.rules.rule import listed, non_finite_count, terms_of
from hookscope.rules.settings import CheckSettings
from hookscope.text import are, counted, figure, in_words, safe_text, some_of

Level = Literal["fail", "warn"]


@dataclass(frozen=True, slots=True)
class TrainingRule:
    """A rule for every step; its verdicts end after `patience` judgements in a row that pass."""

    level: Level
    limit: float | None
    patience: int = 20


# Ten healthy trainings of 300 steps, under four seeds, broke none of the limits: a loss grew 5.7-fold at most, and
# losses and norms jumped by 7.1 deviations at most.
TRAINING_RULES: Mapping[str, TrainingRule] = {
    "non-finite-loss": TrainingRule("fail", 0),
    "non-finite-gradient": TrainingRule("fail", 0),
    "non-finite-weight": TrainingRule("fail", 0),
    "loss-jump": TrainingRule("warn", 12),  # robust deviations of the logarithm, over the last 200 steps
    "loss-diverges": TrainingRule("warn", 100),  # times the loss of the first step
    "gradient-jump": TrainingRule("warn", 12),  # the same as for the loss
    "unused-parameter": TrainingRule("warn", 20),  # steps
    "dead-gradient": TrainingRule("warn", 20),  # steps
    "frozen-parameter": TrainingRule("warn", None),
    "unoptimised-parameter": TrainingRule("warn", None, patience=1),
    "skipped-steps": TrainingRule("warn", 10, patience=1),  # in a row
    "gradients-not-reset": TrainingRule("warn", 3, patience=1),  # steps in a row
    "repeated-step": TrainingRule("warn", None),
    "large-update": TrainingRule("warn", 1.0, patience=2),  # share of the weight's norm
}
"""The rules that exist only for trainings, by name; their limits are fixed."""

OF_ONE_PLACE = frozenset(
    ("non-finite-weight", "non-finite-gradient", "non-finite-activation", "overflowing-activation", "fp16-headroom")
)
"""Rules that report only the first or the worst of several places: they pass everywhere when they report none."""

GRADIENT_RULES = {"zero-gradient": "rounding", "vanishing-gradient": "min_ratio", "gradient-imbalance": "max_ratio"}
"""The rules of `hookscope grads`, with their limits; a rule runs only if the rules before it passed."""


def _greatest(row: LayerRow) -> float:
    return max(abs(row.activation.min or 0.0), abs(row.activation.max or 0.0))


# The rules of `hookscope check` on outputs: the limit, or its name, and the value that is compared with it. Other rules
# need the values of weights and channels, or are off by default; those of `grads` need gradients that are not measured.
OUTPUT_RULES: Mapping[str, tuple[str | float | None, Callable[[LayerRow], float | None]]] = {
    "non-finite-activation": (0.0, lambda row: float(non_finite_count(row.activation))),
    "overflowing-activation": ("max_magnitude", _greatest),
    "fp16-headroom": ("max_fraction_of_range", lambda row: _greatest(row) / FORMATS["float16"].greatest),
    "dead-layer": (None, attrgetter("activation.zero_fraction")),
    "dead-channels": ("max_fraction", attrgetter("activation.dead_channel_fraction")),
    "saturated-activation": ("max_fraction", saturated_fraction),
}

WATCHED_PATIENCE = 2
"""Watched steps in a row that must pass before a verdict on them ends."""

_SHOWN_NAMES = 3

# Growth factors of gradients are alike up to this ratio.
_NOT_ALIKE = 3

# A weight is small if its norm has fallen below this share.
_FALLEN = 0.1

# With fewer steps, "as usual" is not claimed.
_FEWEST_USUAL = 5


def finding(rule: str, where: str, value: float | None, message: str) -> TrainingFinding:
    """Return a finding of a rule for every step; `Verdicts` sets the step."""
    level, limit = TRAINING_RULES[rule].level, TRAINING_RULES[rule].limit
    return TrainingFinding(rule, level, where, safe_text(message), step=0, value=value, limit=limit, state="began")


def jump_finding(rule: str, quantity: str, jump: Jump | None, where: str = "") -> list[TrainingFinding]:
    """Return the finding about a loss or norm that is far above the last steps; none below the limit.

    `where` is a sentence on the part that has jumped.
    """
    limit = TRAINING_RULES[rule].limit or math.inf
    if jump is None or jump.deviations <= limit:
        return []
    message = (
        f"The {quantity} is {figure(jump.value, 4)}, {figure(jump.deviations, 3)} robust deviations above "
        f"{figure(jump.usual.median, 4)}, the median of the last {jump.usual.count} steps (limit {limit:g}).{where}"
    )
    return [finding(rule, "", jump.deviations, message)]


def grown_gradients(step: TrainingStep, jump: Jump | None, ring: Ring) -> str:
    """Return a sentence on the parameters whose gradients have grown at a jump of the norm; "" if it is not known.

    Of the ten largest gradients, those with a factor above the square root of the norm's factor have grown. Clipping
    changes the factors, so clipped gradients are only compared with each other.
    """
    if jump is None:
        return ""
    usual = _usual_gradients(ring.before(step))
    times = {name: norm / usual[name] for name, norm in step.largest if usual.get(name) and norm}
    is_clipped = step.norm_before_clipping is not None and step.norm_before_clipping != step.gradient_norm
    least, most = min(times.values(), default=1.0), max(times.values(), default=1.0)
    limit = math.sqrt(least * most) if is_clipped else math.sqrt(jump.value / jump.usual.median)
    names = sorted((name for name in times if times[name] > limit), key=times.__getitem__, reverse=True)
    grown = f"The gradient{'s' if names[1:] else ''} of {listed(names)} {'have' if names[1:] else 'has'}"
    if is_clipped:
        return f" {grown} grown most, compared with the others." if most > _NOT_ALIKE * least else ""
    if not names:
        return ""
    if len(names) == len(times):
        remark = f" All of the largest gradients have grown, the gradient of '{names[0]}' most"
        return f"{remark}: to {figure(most, 3)} times its usual norm."
    others = max(times[name] for name in times if name not in names)
    up_to = "up to " if names[1:] else ""
    return f" {grown} {up_to}{figure(most, 3)} times the usual norm, the others at most {figure(others, 2)} times."


def _usual_gradients(steps: Sequence[TrainingStep]) -> dict[str, float]:
    """Return the median norm of each parameter's gradient; where it is not listed, at most the smallest listed one."""
    names = {name for step in steps for name, _ in step.largest}
    norms: dict[str, list[float]] = {name: [] for name in names}
    for step in steps:
        largest = dict(step.largest)
        for name in names if largest else ():
            norms[name].append(largest.get(name, min(largest.values())))
    return {name: median_low(values) for name, values in norms.items() if values}


def diverging_loss(loss: float | None, first: float | None) -> list[TrainingFinding]:
    """Return the finding about a loss far above that of the first step; `loss-jump` cannot judge the first steps."""
    limit = TRAINING_RULES["loss-diverges"].limit or math.inf
    if loss is None or first is None or loss == math.inf or not loss / first >= limit:
        return []
    message = (
        f"The loss is {figure(loss, 4)}, which is {figure(loss / first, 3)} times the first step's {figure(first, 4)} "
        f"(limit {limit:g}): lower the learning rate, or warm it up."
    )
    return [finding("loss-diverges", "", loss / first, message)]


def loss_below_zero(loss: float, count: int, reason: str) -> list[TrainingFinding]:
    """Return the finding about a loss that has been below 0 for many steps, though by its kind it cannot be."""
    message = f"The loss has been below 0 for {counted(count, 'step')} and is {figure(loss, 4)} (limit 0): {reason}."
    return [replace(finding("loss-diverges", "", loss, message), limit=0.0)]


def first_not_finite(
    arrived: ArrivedStep,
    ring: Ring,
    broken: Sequence[str],
    trained: Sequence[str],
    *,
    stepped_though_skipped: int | None,
    is_distributed: bool,
) -> list[TrainingFinding]:
    """Return the findings about a step with NaN or Inf, the cause first, with the history before it.

    Args:
        arrived: The step.
        ring: The steps before.
        broken: Parameters whose gradient is not finite, in the order of the network.
        trained: Parameters with a gradient, in the order of the network.
        stepped_though_skipped: A step that a GradScaler skipped, but whose gradients the optimiser used.
        is_distributed: Whether the gradients come from several processes, and the loss from one.
    """
    step, bad_weights = arrived.record, arrived.step.bad_weights
    earlier = _first_broken_before(step, ring)
    gradients = f"{len(broken)} of {counted(len(trained), 'gradient')}"
    unexamined = ", and at the weights before it" if bad_weights is None else ""
    history = _history(step, ring, "" if bad_weights else f"look at the batch of step {step.step}{unexamined}")
    findings: list[TrainingFinding] = []
    if bad_weights:
        origin = _origin(step.step, earlier, stepped_though_skipped, is_first=not ring.steps)
        were = "was" if len(bad_weights) == 1 else "were"
        message = f"{listed(bad_weights)} {were} not finite before step {step.step} (limit 0): {origin}. {history}"
        findings.append(finding("non-finite-weight", bad_weights[0], float(len(bad_weights)), message))
    if step.loss is not None and not math.isfinite(step.loss):
        at = next((f" at {place}" for place, loss in step.losses if not math.isfinite(loss)), "")
        weights = ""
        if bad_weights == []:
            weights = f" Weights were finite, so the {figure(step.loss)} came from the batch or the forward pass."
            if arrived.step.bad_input:
                weights = f" Weights were finite, but {arrived.step.bad_input}."
        elif bad_weights and earlier is None:
            weights = " Weights were not finite before the step, so its batch is not the cause."
        counts = f" {gradients} {are(len(broken))} not finite." if broken else ""
        skipped = " GradScaler skips the step." if step.skipped else ""
        message = f"The loss{at} is {figure(step.loss)} (limit: finite).{weights}{counts}{skipped} {history}"
        findings.append(finding("non-finite-loss", "", step.loss, message))
    elif broken:
        is_spread = _is_spread(arrived)
        last, loss = "" if is_spread else broken[-1], "not known" if step.loss is None else figure(step.loss, 4)
        made = (
            f"The last of them in the network is '{last}': the backward pass of its layer, or of a later one, made it"
        )
        if is_spread:
            made = "Clipping by the norm may have spread NaN from one of them to all, so its layer is not known"
            steep = _steep(arrived.step.operations)
            made += f": suspect {some_of(steep, _SHOWN_NAMES)}, or a layer" if steep else ""
        elif not bad_weights and step.loss is not None:
            suspected = _suspected(last, trained[-1], arrived.step.operations)
            made = suspected or made
            history = _history(step, ring, "" if suspected else "look at what follows that layer")
        contain = "contains" if len(broken) == 1 else "contain"
        if is_distributed:
            made += "; or the loss of another process, which is not seen, was not finite: look at its batch too"
        message = f"{gradients} {contain} NaN or Inf (limit 0), while the loss is {loss}. {made}. {history}"
        findings.append(finding("non-finite-gradient", last, float(len(broken)), message))
    return findings


def _origin(step: int, earlier: int | None, stepped_though_skipped: int | None, *, is_first: bool) -> str:
    if earlier is not None:
        return "an earlier update made NaN or Inf"
    if stepped_though_skipped == step - 1:
        return f"the optimizer stepped with the gradients of step {stepped_though_skipped}, which GradScaler skipped"
    if is_first:
        return "its batch is not the cause, and no step was watched before it"
    return "its batch is not the cause, but the update before it, or something else that wrote to the weights"


def _is_spread(arrived: ArrivedStep) -> bool:
    """Tell whether clipping by a norm of NaN may have made all gradients NaN that it clipped."""
    clipped = {tensor for members, _ in arrived.step.clips for tensor in members}
    names = {
        name
        for reading in arrived.step.readings.values()
        for name, tensor in zip(reading.names, reading.parameters, strict=True)
        if id(tensor) in clipped
    }
    return math.isnan(arrived.record.norm_before_clipping or 0.0) and len(names) > 1 and names <= {*arrived.broken}


def _steep(operations: Mapping[str, LossOperations]) -> list[str]:
    return [f"{name}{place and f' at {place}'}" for place, operation in operations.items() for name in operation.steep]


def _suspected(last: str, last_trained: str, operations: Mapping[str, LossOperations]) -> str:
    """Return why the loss itself is suspected of NaN in its gradients; "" if nothing points to it."""
    steep = _steep(operations)
    is_behind = last.rpartition(".")[0] == last_trained.rpartition(".")[0]
    if steep:
        layer = "" if is_behind else f", or the backward pass after '{last}', the last of them in the network,"
        its, derivative = ("Their", "derivatives are") if len(steep) > 1 else ("Its", "derivative is")
        return (
            f"The loss itself{layer} made them: suspect {some_of(steep, _SHOWN_NAMES)}. {its} {derivative} infinite at "
            f"0 or at another end of {its.lower()} range, though the loss is finite: keep the input away from there, "
            "for example by adding 1e-8"
        )
    names = [name for operation in operations.values() for name in operation.all]
    if not is_behind or not names:
        return ""
    suspects = some_of(names, _SHOWN_NAMES)
    return f"They reach '{last}' in the last trained layer: the loss itself made them ({suspects}), or what follows it"


def _first_broken_before(step: TrainingStep, ring: Ring) -> int | None:
    return next((past.step for past in ring.before(step) if not is_finite(past)), None)


def _history(step: TrainingStep, ring: Ring, suspect: str) -> str:
    """Return what happened before the first NaN or Inf, and what to do: look at `suspect`, if it is not ""."""
    before = ring.before(step)
    earlier = _first_broken_before(step, ring)
    if earlier is not None:
        return f"The first NaN or Inf came at step {earlier}."
    norms = [norm for past in before if (norm := norm_of(past)) is not None and math.isfinite(norm)]
    losses = [past.loss for past in before if past.loss is not None and math.isfinite(past.loss)]
    if len(norms) < 2:
        return f"There are too few steps before it to compare{suspect and f': lower the learning rate, or {suspect}'}."
    usual = median_low(norms)
    tail = " → ".join(figure(norm, 3) for norm in norms[-4:])
    loss = f", the loss {' → '.join(figure(value, 3) for value in losses[-4:])}" if losses else ""
    if has_exploded(norms) or has_exploded(losses):
        remedy = "lower the learning rate, warm it up or clip gradients"
        return f"Before it the gradient norm went {tail} (median {figure(usual, 3)}){loss}: {remedy}."
    if len(norms) < _FEWEST_USUAL:
        return f"Before it the gradient norm went {tail}{loss}{suspect and f': lower the learning rate, or {suspect}'}."
    return f"Before it the gradient norm went {tail}{loss}, as usual{suspect and f': {suspect}'}."


def has_exploded(values: Sequence[float]) -> bool:
    """Tell whether the last value is more than ten times the median of all, for values that are not negative."""
    usual = median_low(values) if values else 0.0
    return usual > 0 and values[-1] > 10 * usual


def large_updates(rows: Iterable[WatchedParameter], causes: Mapping[str, str]) -> list[TrainingFinding]:
    """Return the findings about weights that one step changes too much.

    `causes` has the known cause of a large update or a small weight, by name of the weight.
    """
    limit = TRAINING_RULES["large-update"].limit or math.inf
    beyond = [(ratio, row.name) for row in rows if (ratio := row.update_ratio) is not None and ratio > limit]
    return [
        finding(
            "large-update",
            name,
            ratio,
            f"The step changes '{name}' by {figure(ratio, 3)} times its norm (limit {limit:g}): "
            f"{causes.get(name, 'the learning rate is too high')}.",
        )
        for ratio, name in sorted(beyond, reverse=True)
    ]


def outside_changes(changes: Iterable[OutsideChange], step: int) -> list[TrainingFinding]:
    """Return the findings about weights that something other than the optimiser has changed too much before a step.

    Clipping or scaling weights in every step undoes at most the last step, and stays below the limit. For older
    values, steps at right angles to the weight give change² = now² - before², and new random values now² + before²:
    the threshold, now² + before² / 4, lies between.
    """
    limit = TRAINING_RULES["large-update"].limit or math.inf
    when = f"between steps {step - 1} and {step}"
    findings = []
    for change in changes:
        now = min(change.before, change.now) if change.is_fresh else change.now
        ratio = change.change / now if now else math.inf if change.change > 0 else 0.0
        is_old = change.is_written and change.change > math.hypot(change.now, change.before / 2)
        if not ratio > limit or not (change.is_fresh or is_old):
            continue
        verb = "is" if change.before else "was"
        by = f"by {figure(ratio, 3)} times its norm" if now else f"and {verb} 0 where compared"
        if change.norm == 0:
            message = f"Something other than the optimizer set '{change.name}' to 0 {when}."
        elif change.is_fresh:
            message = f"Something other than the optimizer changed '{change.name}' {when}, {by} (limit {limit:g})."
        else:
            message = (
                f"Something other than the optimizer wrote to '{change.name}' {when}: it differs from step "
                f"{change.since} {by} (limit {limit:g})."
            )
        findings.append(finding("large-update", change.name, ratio, message))
    return findings


def small_weights(changes: Iterable[OutsideChange]) -> dict[str, str]:
    """Return why an update is large for weights whose norm has fallen much since an earlier step."""
    return {
        change.name: f"its norm has fallen to {figure(change.now / change.before, 2)} of its value at step "
        f"{change.since}; what made it small is at fault, not the learning rate"
        for change in changes
        if 0 <= change.now < _FALLEN * change.before
    }


def _lasting(rule: str, where: str, count: int, fault: str, remedy: str = "") -> list[TrainingFinding]:
    """Return the finding about a fault that has lasted `count` steps; none below the limit."""
    limit = TRAINING_RULES[rule].limit or math.inf
    message = f"{fault} (limit {limit:g}){remedy}."
    return [finding(rule, where, float(count), message)] if count >= limit else []


def idle_parameters(rule: str, counts: Mapping[str, int]) -> list[TrainingFinding]:
    """Return the findings about parameters with no gradient, or a gradient of exactly 0, for many steps."""
    fault = {"unused-parameter": "has had no gradient", "dead-gradient": "has had a gradient of exactly 0"}[rule]
    findings = (_lasting(rule, name, count, f"'{name}' {fault} for {count} steps") for name, count in counts.items())
    return [*chain.from_iterable(findings)]


def newly_frozen(names: Iterable[str], still_stepped: Mapping[str, str]) -> list[TrainingFinding]:
    """Return the findings about trained parameters that are now frozen; `still_stepped` tells why some still move."""
    message = "'{}' was trained before, but is now frozen (requires_grad is False).{}"
    return [
        finding("frozen-parameter", name, None, message.format(name, still_stepped.get(name, ""))) for name in names
    ]


def still_stepped(optimizer: str, group: dict[str, object], *, is_zero: bool) -> str:
    """Return the sentence on a frozen parameter that an optimiser still steps with, because it holds a gradient."""
    by = moves_by(group)
    holds = "is 0, not None" if is_zero else "still holds the gradient of an earlier step"
    moves = "still moves it" if by or not is_zero else "still steps with it"
    words = f", by {in_words(by)}" if by and is_zero else ""
    return f" Its .grad {holds}, so {optimizer} {moves}{words}: set .grad to None, or take it out of the optimizer."


def skipped_steps(count: int, largest: str) -> list[TrainingFinding]:
    """Return the finding about steps that a GradScaler has skipped in a row."""
    where = f", first in '{largest}'" if largest else ""
    remedy = (
        f": gradients overflow{where}. Start with a lower init_scale; if that does not help, the network itself makes "
        "NaN or Inf"
    )
    return _lasting("skipped-steps", largest, count, f"GradScaler has skipped {count} steps in a row", remedy)


def gradients_not_reset(count: int) -> list[TrainingFinding]:
    """Return the finding about gradients that nothing has reset for this many steps."""
    fault = f"The gradients of {count} steps in a row contain those of the step before"
    remedy = ": nothing resets them. Call optimizer.zero_grad() in every step"
    return _lasting("gradients-not-reset", "", count, fault, remedy)


def repeated_step(last: LastStep, optimizer: str) -> list[TrainingFinding]:
    """Return the finding about a step with the gradients of the last one."""
    again = f"{optimizer} stepped again with the gradients of step {last.number}, without a backward pass between"
    if last.scaler == "skipped":
        again = (
            f"GradScaler skipped step {last.number}, because its gradients hold NaN or Inf, but then {optimizer} "
            "stepped with them, without a backward pass between"
        )
    remedy = "call optimizer.step() once after each backward pass"
    if last.scaler:
        remedy = "leave out optimizer.step(), because scaler.step(optimizer) calls it"
    message = f"{again}: {remedy}."
    return [finding("repeated-step", "", None, message)]


def judged_layers(model: ModelInfo, rows: Sequence[LayerRow], prefix: str) -> dict[str, list[TrainingFinding]]:
    """Return the findings of rules of `hookscope check` on the outputs of a watched step, by rule that was judged."""
    by_rule: dict[str, list[TrainingFinding]] = {}
    for name in OUTPUT_RULES:
        # Outputs in other dtypes do not overflow in float16.
        judged = tuple(row for row in rows if name != "fp16-headroom" or row.activation.dtype == "float16")
        forward = Activations(model=model, inputs=_inputs_of(rows), rows=judged)
        findings = _judged(name, CheckMeasurements(model, (), forward, origin_searched=False), rows, prefix)
        dead = {finding.where for finding in by_rule.get("dead-layer", ())}
        by_rule[name] = [finding for finding in findings if finding.where not in dead]
        if by_rule["non-finite-activation"]:  # nothing else can be judged
            break
    return by_rule


def judged_parameters(
    model: ModelInfo,
    rows: Sequence[LayerRow],
    parameters: Sequence[ParameterRow],
    loss: float | None,
    prefix: str,
    names: Sequence[str],
) -> dict[str, list[TrainingFinding]]:
    """Return the findings of `names`, rules of `hookscope grads`, on parameters, by rule that was judged."""
    gradients = Gradients(
        model=model,
        inputs=_inputs_of(rows),
        rows=tuple(rows),
        loss=LossRecord("training", "", loss or 0.0),
        gradients=(),
        parameters=tuple(parameters),
        mode="train",
    )
    measured = CheckMeasurements(model, (), None, gradients=gradients, origin_searched=False)
    by_rule: dict[str, list[TrainingFinding]] = {}
    for name in names:
        by_rule[name] = _judged(name, measured, (), prefix)
        if by_rule[name]:
            break
    return by_rule


def _judged(name: str, measured: CheckMeasurements, rows: Sequence[LayerRow], prefix: str) -> list[TrainingFinding]:
    terms = terms_of(RULES[name], CheckSettings())
    by_label = {row.label: row for row in rows}
    limit, value_of = OUTPUT_RULES.get(name, (GRADIENT_RULES.get(name), lambda _: None))
    limit = terms.limit(limit) if isinstance(limit, str) else limit
    findings = []
    for finding in chain.from_iterable(terms.findings([raised]) for raised in RULES[name].evaluate(measured, terms)):
        row = by_label.get(finding.where)
        # The smallest gradient belongs to a different weight at every step.
        where = "" if name == "gradient-imbalance" else finding.where
        value = None if row is None else value_of(row)
        message = f"{prefix and safe_text(f'{prefix[:-1]}: ')}{finding.message}"
        where = f"{prefix}{where or '(model)'}"
        findings.append(
            TrainingFinding(name, finding.level, where, message, step=0, value=value, limit=limit, state="began")
        )
    return findings


def _inputs_of(rows: Sequence[LayerRow]) -> tuple[InputRecord, ...]:
    """Return a record for each input, counted by the first output with a batch axis; rules print the count."""
    shape = next((row.activation.shape for row in rows if len(row.activation.shape) > 1), (1,))
    return (InputRecord("batch", None, None, tuple(shape[1:]), ()),) * max(1, min(shape[0], 100_000))
