"""Rules about loss and gradients that are not finite, zero (everywhere or in a layer), or vanish over time.

No rule about gradients depends on the scale of the loss: limits apply to ratios inside one run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Literal

from hookscope.rules.activations import RECTIFIERS, acts_as
from hookscope.rules.rule import (
    WHOLE_NETWORK,
    RuleFinding,
    RuleTerms,
    arrived_outputs,
    in_forward_order,
    is_within,
    limit,
    listed,
    module_of,
    named,
    non_finite_count,
    non_finite_words,
    output_of,
    parameter_of,
    quoted,
    required,
    rule,
)
from hookscope.text import are, counted, figure

if TYPE_CHECKING:
    from hookscope.results.check import CheckMeasurements
    from hookscope.results.gradients import GradientRow, Gradients, ParameterRow, StepsRow
    from hookscope.results.statistics import TensorStatistics

# Modules whose outputs have a constant sum.
_NORMALISERS = frozenset(
    {"Softmax", "Softmax2d", "LayerNorm", "GroupNorm", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d"}
    | {"InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d"}
)


@rule("non-finite-loss", "off", "gradients")
def non_finite_loss(measured: CheckMeasurements, _terms: RuleTerms) -> Iterator[RuleFinding]:
    """The loss is NaN or Inf.

    Usually the forward pass already made NaN or Inf: look at non-finite-activation. Otherwise the loss takes the
    logarithm of zero, or overflows: use a loss that takes logits, or clamp.
    """
    loss = required(measured.gradients).loss
    if loss is not None and not math.isfinite(loss.value):
        yield RuleFinding(WHOLE_NETWORK, f"The loss ({loss.name}) is {figure(loss.value)}; it must be finite.")


@rule("non-finite-gradient", "off", "gradients", ("non-finite-activation",))
def non_finite_gradient(measured: CheckMeasurements, _terms: RuleTerms) -> Iterator[RuleFinding]:
    """The backward of a layer makes NaN or Inf out of a finite gradient.

    A backward that divides by zero, such as that of a root at 0 or of a norm of zeros, makes NaN out of a finite
    gradient. The layer that makes it is named; layers that pass it on are not. Add a small number under the root or to
    the norm. Needs a finite loss.
    """
    # The consumer of an output makes the output's gradient. It is the next layer in forward order if that layer's own
    # gradient was the last to arrive finite; otherwise the finding is about the output whose gradient broke first.
    gradients = required(measured.gradients)
    arrived = [row for row in gradients.gradients if row.backward_index is not None]
    rows = sorted(arrived, key=lambda row: (row.backward_index, row.index))
    position = next((position for position, row in enumerate(rows) if non_finite_count(row.gradient)), None)
    if position is None:
        yield from _non_finite_parameter(gradients)
        return
    first = rows[position]
    words = f"{non_finite_words(first.gradient)} (limit 0)"
    finite = [row for row in rows[:position] if row.role == "output"]
    if not finite:
        target = WHOLE_NETWORK
        message = f"The loss itself sends NaN or Inf back: the gradient of the output of '{first.label}' has {words}"
    elif first.role == "input":
        target = output_of(replace(first, slot=""))
        message = f"The backward of '{target.where}' is the first to make NaN or Inf: its grad_input has {words}"
    else:
        # Containers that return the broken output are skipped: their gradient is not finite either.
        later = (output for output in arrived_outputs(gradients, of_operations=True) if output.index > first.index)
        consumer = next((output for output in later if not non_finite_count(output.gradient)), None)
        # The last finite gradient may belong to a module that returns the output of its own operation.
        if consumer is not None and (consumer is finite[-1] or consumer.owner == finite[-1].layer):
            target, maker = output_of(consumer), f"{quoted(consumer)} and what leads to it"
        else:
            target, maker = output_of(first), f"the consumer of the output of {quoted(first)}"
        message = (
            f"The gradient of the output of {quoted(first)} is the first in backward order with NaN or Inf: it has"
            f" {words}. The gradient just before it, of '{finite[-1].label}', is finite: look at the backward of"
            f" {maker}"
        )
    yield RuleFinding(target, f"{message}.")


@rule("zero-gradient", "off", "gradients", ("non-finite-gradient",))
@limit(
    "rounding",
    1e-6,
    "‖g‖·‖x‖ below this share of the loss, or of ‖g‖·‖x‖ one layer on, is rounding",
    "ten roundings of float32",
    "rounding",
)
def zero_gradient(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """Every gradient is zero, or no more than rounding.

    Nothing can learn: the loss does not depend on any parameter, or is constant by construction, such as the sum of a
    softmax or of LayerNorm's output. Choose another loss, then look at the layers.
    """
    gradients, rounding = required(measured.gradients), terms.limit("rounding")
    parameters = [parameter for parameter in gradients.parameters if parameter.status in ("gradient", "zero")]
    outputs = arrived_outputs(gradients)
    if {row.status for row in parameters or outputs} == {"zero"}:
        whose = "of a parameter " if parameters else ""
        message = f"Every gradient {whose}is exactly 0 (limit: above 0): the loss does not change with anything"
        yield RuleFinding(WHOLE_NETWORK, f"{message} {'learnt' if parameters else 'in the network'}.")
        return
    loss = abs(gradients.loss.value) if gradients.loss and math.isfinite(gradients.loss.value) else 0.0
    effect = max(((weight.gradient.l2 or 0.0) * (weight.weight_l2 or 0.0) for weight in parameters), default=0.0)
    if 0 < effect < rounding * loss:
        message = (
            f"No parameter changes the loss beyond rounding: ‖g‖·‖w‖ is at most {figure(effect / loss)} of the loss"
            f" (limit {figure(rounding)}); it is at a minimum, or constant by construction as a sum after softmax is."
        )
        yield RuleFinding(WHOLE_NETWORK, message, "warn")
        return
    zero_weights = _gates(gradients)
    reaching = 0.0
    for (row, before), (following, after) in pairwise(effects_of(gradients)):
        reaching = max(reaching, before)
        normalises = following.kind in _NORMALISERS and not _gates_near(zero_weights, row.layer, following.layer)
        if normalises and reaching < rounding * after:
            message = (
                f"Before '{following.label}' ({following.kind}) gradients are only rounding: ‖g‖·‖x‖ of outputs is at"
                f" most {figure(reaching / after)} of its own (limit {figure(rounding)}), because the sum of what it"
                " normalises is constant. Choose another loss."
            )
            yield RuleFinding(output_of(following), message, "warn")
            return


def effects_of(gradients: Gradients) -> list[tuple[GradientRow, float]]:
    """Return module outputs with ‖g‖·‖x‖: how far the loss moves, to first order, if x changes by its own size."""
    sizes = {row.label: row.activation.l2 or 0.0 for row in gradients.rows}
    return [(row, (row.gradient.l2 or 0.0) * sizes.get(row.label, 0.0)) for row in arrived_outputs(gradients)]


def _non_finite_parameter(gradients: Gradients) -> Iterator[RuleFinding]:
    """Report the last parameter in forward order with a non-finite gradient, if no selected layer has one."""
    broken = [row for row in in_forward_order(gradients) if non_finite_count(row.gradient)]
    if broken:
        name, words = broken[-1].name, non_finite_words(broken[-1].gradient)
        message = f"The gradient of '{name}' has {words} (limit 0); those of the selected layers' outputs have none."
        yield RuleFinding(parameter_of(broken[-1]), message)


Takers = Mapping[str, "Sequence[GradientRow | None]"]
"""The outputs that are computed directly from an output, by its label; None stands for the loss."""

# Modules whose hidden state is zero before the first step.
_RECURRENT = frozenset({"RNN", "GRU", "LSTM", "RNNCell", "GRUCell", "LSTMCell"})
_STOCHASTIC_DEPTH = frozenset({"StochasticDepth", "DropPath"})  # drop residual branches at random
_NEAR_UNDERFLOW = 1e-35  # below this L2 norm, the next factor may underflow float32, whose smallest value is 1e-45


@dataclass(slots=True)
class _Stop:
    """The outputs with a zero gradient, in forward order, before one place where the gradient stops.

    The outputs in `last` are next to it: their gradients come from the loss, or from `takers` with nonzero gradients.
    """

    rows: list[GradientRow] = field(default_factory=list)
    last: list[GradientRow] = field(default_factory=list)
    takers: dict[str, GradientRow] = field(default_factory=dict)


@rule("dead-gradient", "off", "gradients", ("non-finite-gradient", "zero-gradient"))
def dead_gradient(measured: CheckMeasurements, _terms: RuleTerms) -> Iterator[RuleFinding]:
    """Layers on the path get a gradient of exactly zero.

    A layer between the loss and the input gets a gradient of exactly zero, so neither it nor the layers before it
    learn. Causes: a dead ReLU, a detached branch, an underflow. It is a warning if a weight that starts at zero blocks
    the path until its first update, if stochastic depth dropped a branch for all inputs by chance, or if the loss
    depends on only some outputs of the network. A module passes if it gets a gradient at a different call or output, or
    if its parallel branch gets one: levels of a detector without an object, experts without a token.

    Recurrent weights without a gradient are a warning, too: the loss depends only on the first step, before which the
    hidden state is zero. In a bidirectional layer, the first step of the backward direction is the last position,
    `output[:, -1]`.
    """
    # Layers whose gradient stops at one place make one finding. A zero weight that gets a gradient blocks the path only
    # until its first update: residual branches and heads often start so. Outputs without a known fault of their own are
    # excused if they lead only to excused outputs that the loss does not depend on.
    gradients = required(measured.gradients)
    activations = {row.label: row.activation for row in gradients.rows}
    zero_weights = _gates(gradients)
    outputs = arrived_outputs(gradients, of_operations=True)
    takers = takers_of(outputs)
    shared = idle_modules(outputs)
    idle = shared | idle_branches(outputs, takers)
    dead = False
    closed: dict[str, ParameterRow] = {}
    gated = 0
    for stop in _stops(outputs, takers):
        following: list[str | None] = [module_of(row) for row in stop.takers.values()] or [None]
        near = [
            gate
            for row in stop.last
            for layer in following
            for gate in _gates_near(zero_weights, module_of(row), layer)
        ]
        closed |= {gate.name: gate for gate in near}
        gated += len(stop.rows) if near else 0
        cause = _known_cause(stop, activations)
        excused = shared if cause else idle
        if not near and not all(row.label in excused for row in (stop.rows if stop.takers else stop.last)):
            finding = _finding_at(stop, cause, gradients.mode == "train")
            dead |= finding.at_most == "fail"
            yield finding
    if closed:
        message = (
            f"{listed([*closed])} {are(len(closed))} all zero and block{'s' if len(closed) == 1 else ''} the gradient"
            f" of {counted(gated, 'output')}: exactly 0 (limit: above 0) until the first update."
        )
        yield RuleFinding(parameter_of(next(iter(closed.values()))), message, "warn")
    if not dead:  # a weight after a dead layer has no other cause
        yield from _dead_weights(gradients, zero_weights)


def _stops(outputs: Sequence[GradientRow], takers: Takers) -> Iterable[_Stop]:
    places: dict[str, str] = {}
    stops: dict[str, _Stop] = {}
    for row in reversed(outputs):
        if row.status != "zero":
            continue
        after = [taker for taker in takers[row.label] if taker is not None]
        alive = [taker for taker in after if taker.status != "zero"]
        beyond = [places[taker.label] for taker in after if taker.label in places]
        is_last = bool(alive) or None in takers[row.label] or not beyond
        places[row.label] = alive[0].label if alive else f"{row.layer}#-1" if is_last else beyond[0]
        stop = stops.setdefault(places[row.label], _Stop())
        stop.rows.insert(0, row)
        stop.last[:0] = [row] if is_last else []
        stop.takers |= {taker.label: taker for taker in alive}
    return reversed(stops.values())


def _known_cause(stop: _Stop, activations: Mapping[str, TensorStatistics]) -> str:
    for row in stop.takers.values():
        activation = activations.get(row.label)
        if acts_as(row) in RECTIFIERS and activation is not None and activation.zero_fraction == 1:
            return f"every output of {named(row)} is 0"
        if (row.gradient.l2 or 0.0) < _NEAR_UNDERFLOW:
            return f"it underflows, ‖grad_output‖ of '{row.label}' being {figure(row.gradient.l2 or 0.0)}"
    return ""


def _finding_at(stop: _Stop, cause: str, is_training: bool) -> RuleFinding:
    last, takers = stop.rows[-1], [*stop.takers.values()]
    level: Literal["fail", "warn"] = "fail"
    others = f" and {counted(len(stop.rows) - 1, 'output')} before it" if stop.rows[1:] else ""
    # Modules inside another taker are skipped: a container has the gradient of the child whose output it returns.
    inner = [row for at, row in enumerate(takers) if not any(is_within(prev.layer, row.layer) for prev in takers[:at])]
    first = ", ".join(map(named, inner[:3]))
    if not takers:
        cause = "the loss does not change with it"
        level = "fail" if last.taken_by is None else "warn"
    elif is_training and all(row.kind in _STOCHASTIC_DEPTH for row in takers):
        cause = f"{first} left the branch out by chance; give more inputs"
        level = "warn"
    elif not cause:
        lost = f"it is lost in {first} or on the way from there"
        cause = lost if last.taken_by is not None else f"nothing gets through {first}"
    message = f"The gradient of the output of '{last.label}'{others} is exactly 0 everywhere (limit: above 0): {cause}."
    return RuleFinding(output_of(last), message, level)


def _dead_weights(gradients: Gradients, zero_weights: Sequence[ParameterRow]) -> Iterator[RuleFinding]:
    alive = {row.layer for row in arrived_outputs(gradients) if row.status == "gradient"}
    dead = [
        parameter
        for parameter in gradients.parameters
        if parameter.status == "zero"
        and parameter.is_matrix
        and parameter.layer in alive
        and not _gates_near(zero_weights, parameter.layer)
    ]
    unused = [weight for weight in dead if weight.kind in _RECURRENT and "weight_hh" in weight.name]
    if starved := [weight for weight in dead if weight not in unused]:
        yield _without_gradient(starved, "the layer's input is zero everywhere", "fail")
    if unused:
        cause = (
            "the hidden state that it multiplies is zero, as the loss depends on the first step alone; of the backward"
            " direction of a bidirectional layer that is output[:, -1]"
        )
        yield _without_gradient(unused, cause, "warn")


def _without_gradient(weights: Sequence[ParameterRow], cause: str, at_most: Literal["fail", "warn"]) -> RuleFinding:
    claim = f"{listed([row.name for row in weights])} {'gets' if len(weights) == 1 else 'get'} a gradient of exactly 0"
    message = f"{claim} (limit: above 0), though the output does not: {cause}."
    return RuleFinding(parameter_of(weights[0]), message, at_most)


# Half a unit in the last place of 1: a term this much smaller than a sum does not change it.
_ROUNDED_AWAY = {"float64": 2.0**-53}
_ROUNDED_AWAY_FLOAT32 = 2.0**-24
# Fewer steps are not judged.
_FEWEST_STEPS = 8


@rule("gradient-over-time", "off", "gradients", ("non-finite-gradient", "zero-gradient"), followers="layer")
@limit(
    "max_fraction",
    0.5,
    "share of the steps whose gradient is rounded away next to the greatest of all steps, 0-1",
    "a term below 2^-24 of a sum does not change it in float32; of 32 networks trained on tasks that need all of 28 "
    "to 100 steps, 31 lose none and one loses 29%; seven that need the last three lose up to 61%; untrained LSTM, GRU "
    "and RNN with a loss at the last step lose up to 44% of 50 steps, 66% to 76% of 120",
    "over-time",
)
def gradient_over_time(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """The gradient vanishes, or explodes, over time.

    A weight that is used at every step gets the sum of the contributions of all steps. A contribution below 2^-24 of
    the greatest (2^-53 in float64) is rounded away, so the network learns nothing from that step. The rule reports a
    recurrent layer or cell, or attention's keys and values, if this is so for most steps. If gradients shrink on the
    way back, the network learns from the last steps only; a greater bias of the forget gate, orthogonal recurrent
    weights, shorter sequences or a loss at every step let it look further back. If they grow, make the recurrent
    weights smaller and clip gradients. Saturated attention reads single positions: scale its scores.

    An untrained LSTM or GRU with a loss at the last step keeps 30 to 40 steps. A network that needs no more may break
    this rule, so it is a warning at most. Steps that the loss does not depend on, or that a mask leaves out, do not
    count.
    """
    gradients = required(measured.gradients)
    rows = {row.layer: row for row in gradients.rows}
    for series in gradients.over_time:
        target = output_of(replace(rows[series.layer], call=0, slot="")) if series.layer in rows else WHOLE_NETWORK
        lost, steps = _lost_steps(series)
        most = terms.limit("max_fraction", target)
        if steps >= _FEWEST_STEPS and lost > most * steps:
            yield RuleFinding(target, _over_time_words(series, lost, steps, most), "warn")


def _lost_steps(row: StepsRow) -> tuple[int, int]:
    """Return how many steps have a gradient that is rounded away next to the greatest, and how many steps count.

    Zeros next to gradients that are rounded away have underflowed, and count. Other zeros do not count: the loss does
    not depend on these steps.
    """
    least = max(row.largest) * _ROUNDED_AWAY.get(row.dtype, _ROUNDED_AWAY_FLOAT32)
    lost = steps = 0
    for is_zero, run in groupby(range(len(row.largest)), lambda step: row.largest[step] == 0):
        places = [*run]
        beside = [row.largest[at] for at in (places[0] - 1, places[-1] + 1) if 0 <= at < len(row.largest)]
        if not is_zero:
            lost += sum(row.largest[step] < least for step in places)
            steps += len(places)
        elif beside and max(beside) < least:
            lost += len(places)
            steps += len(places)
    return lost, steps


def _over_time_words(row: StepsRow, lost: int, steps: int, most: float) -> str:
    values = row.largest
    peak = values.index(max(values))
    lowest = min(range(len(values)), key=lambda step: (values[step], abs(step - peak)))
    calls = "calls" if row.kind.endswith("Cell") else "steps"
    share = _ROUNDED_AWAY.get(row.dtype, _ROUNDED_AWAY_FLOAT32)
    course = f"{figure(values[lowest])} at step {lowest}, {figure(values[peak])} at step {peak}"
    if row.kind == "MultiheadAttention":
        how = "Attention is saturated"
    else:
        how = "The gradient explodes over time" if peak < lowest else "The gradient vanishes over time"
    return (
        f"{how}: {lost:,} of {steps:,} {calls} of '{row.layer}' get less than {figure(share)} of the greatest, which a"
        f" sum in {row.dtype} rounds away ({course}; limit {most * 100:.6g}% of the {calls})."
    )


def takers_of(outputs: Sequence[GradientRow]) -> Takers:
    """Return the outputs computed from each output; inside and before reentrant checkpoints, the next output."""
    labelled = {row.label: row for row in outputs}
    takers: dict[str, Sequence[GradientRow | None]] = {}
    for row, after in zip(outputs, [*outputs, None][1:], strict=True):
        is_traced = row.taken_by is not None and (after is None or after.taken_by is not None)
        takers[row.label] = [labelled.get(label) for label in row.taken_by or ()] if is_traced else [after]
    return takers


def idle_modules(outputs: Sequence[GradientRow]) -> set[str]:
    """Return outputs with a zero gradient whose module has one at a different call or output: detectors' heads."""
    alive = {(row.layer, row.source) for row in outputs if row.status == "gradient"}
    return {row.label for row in outputs if row.status == "zero" and (row.layer, row.source) in alive}


def idle_branches(outputs: Sequence[GradientRow], takers: Takers) -> set[str]:
    """Return outputs with a zero gradient that have a parallel module with a gradient: heads, experts.

    Parallel modules have one type, names that differ in one number, and outputs that do not depend on each other.
    """
    zero = [row for row in outputs if row.status == "zero"]
    if not zero:
        return set()
    parallel: dict[tuple[str, str], set[str]] = {}
    for row in outputs:
        if row.status == "gradient":
            for pattern in _patterns(row):
                parallel.setdefault(pattern, set()).add(row.label)
    after = {place: [taker.label for taker in others if taker is not None] for place, others in takers.items()}
    before: dict[str, list[str]] = {}
    for place, others in after.items():
        for other in others:
            before.setdefault(other, []).append(place)
    idle = set()
    for row in zero:
        alike = set().union(*(parallel.get(pattern, ()) for pattern in _patterns(row)))
        if alike and alike - _reached(row.label, after) - _reached(row.label, before):
            idle.add(row.label)
    return idle


def _patterns(row: GradientRow) -> list[tuple[str, str]]:
    """Return keys that parallel modules share: the type, and the name with one number replaced by "*"."""
    parts = row.layer.split(".")
    return [
        (row.kind, ".".join((*parts[:at], "*", *parts[at + 1 :]))) for at, part in enumerate(parts) if part.isdecimal()
    ]


def _reached(start: str, ways: Mapping[str, Sequence[str]]) -> set[str]:
    reached, waiting = {start}, [start]
    while waiting:
        new = set(ways.get(waiting.pop(), ())) - reached
        reached |= new
        waiting += new
    return reached


def _gates(gradients: Gradients) -> list[ParameterRow]:
    """Return the zero parameters that get a gradient, and so block it only until an update; biases block nothing."""
    return [
        parameter
        for parameter in gradients.parameters
        if parameter.weight_l2 == 0 and parameter.status == "gradient" and not parameter.name.endswith("bias")
    ]


def _gates_near(gates: Iterable[ParameterRow], dead: str, following: str | None = None) -> list[ParameterRow]:
    """Return the zero weights in the layer that follows a dead layer, or in the block around the dead layer."""
    return [
        gate
        for gate in gates
        if (following is not None and is_within(gate.layer, following))
        or is_within(dead, gate.layer.rpartition(".")[0] or gate.layer)
    ]
