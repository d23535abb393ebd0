"""Judge gradients that are zero, or as good as zero, or that never came."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal

from hookscope.results import GradientInspection, GradientRow, ParameterRow, TensorStatistics, Verdict
from hookscope.verdicts.activations import RECTIFIERS
from hookscope.verdicts.limits import Limits
from hookscope.verdicts.reading import arrived_outputs, counted, is_matrix, is_within, key, listed, owner

# Sums of their outputs do not depend on their inputs.
_NORMALISERS = frozenset(
    {
        *("Softmax", "Softmax2d", "LayerNorm", "GroupNorm", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d"),
        *("InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d"),
    }
)

# They leave out residual branches by chance: torchvision's, timm's.
_STOCHASTIC_DEPTH = frozenset({"StochasticDepth", "DropPath"})

# Beside an L2 below this, the next factor of the chain rule may fall out of float32, whose smallest value is 1e-45.
# Our choice.
_NEAR_UNDERFLOW = 1e-35


def zero_gradient(inspection: GradientInspection, limits: Limits) -> Iterator[Verdict]:
    """Object when nothing that could learn gets a gradient worth the name.

    To first order, changing a tensor by its own size changes the loss by at most ‖g‖·‖x‖, its effect. Where that is
    rounding beside the loss for every parameter, or for every output before a normalising layer beside its own, what
    arrives is rounding error, or exactly zero: the loss is at a minimum, or constant by construction.
    """
    known = [each for each in inspection.parameters if each.status in ("gradient", "zero")]
    outputs = arrived_outputs(inspection)
    if {each.status for each in known or outputs} == {"zero"}:
        whose = "of a parameter " if known else ""
        message = f"Every gradient {whose}is exactly 0 (limit: above 0): the loss does not change with anything"
        yield Verdict("zero-gradient", "fail", "", f"{message} {'learnt' if known else 'in the network'}.")
        return
    loss = abs(inspection.loss.value) if inspection.loss and math.isfinite(inspection.loss.value) else 0.0
    effect = max((_l2(each.gradient) * (each.weight_l2 or 0.0) for each in known), default=0.0)
    if 0 < effect < limits.rounding * loss:
        message = (
            f"No parameter changes the loss beyond rounding: ‖g‖·‖w‖ is at most {effect / loss:.1e} of the loss (limit"
            f" {limits.rounding:.0e}); it is at a minimum, or constant by construction as a sum after softmax is."
        )
        yield Verdict("zero-gradient", "warn", "", message)
        return
    activations = {key(row): _l2(row.activation) for row in inspection.rows}
    effects = [(row, _l2(row.gradient) * activations.get(key(row), 0.0)) for row in outputs]
    gates = _gates(inspection)
    reaching = 0.0
    for (row, before), (following, after) in pairwise(effects):
        reaching = max(reaching, before)
        normalises = following.kind in _NORMALISERS and not _gates_near(gates, row.layer, following.layer)
        if normalises and reaching < limits.rounding * after:
            message = (
                f"Only rounding gets past '{following.label}' ({following.kind}): before it ‖g‖·‖x‖ of outputs is at"
                f" most {reaching / after:.1e} of its own (limit {limits.rounding:.0e}); a sum over what it normalises"
                " is constant by construction. Choose another loss."
            )
            yield Verdict("zero-gradient", "warn", following.label, message)
            return


def dead_gradient(inspection: GradientInspection) -> Iterator[Verdict]:
    """Object to layers and weights on the path whose gradient is exactly zero, and say what blocks it.

    Neighbouring layers are one verdict. A weight that is zero itself, and gets a gradient, is about to open: residual
    branches and heads are often started so. A branch that stochastic depth has left out in this pass is well.
    """
    activations = {key(row): row.activation for row in inspection.rows}
    gates = _gates(inspection)
    dead = False
    closed: dict[str, None] = {}
    gated = 0
    for run, following in _zero_runs(arrived_outputs(inspection)):
        near = _gates_near(gates, run[-1].layer, following.layer if following else None)
        closed |= dict.fromkeys(near)
        gated += len(run) if near else 0
        if not near:
            verdict = _dead_run(run, following, activations, inspection.mode == "train")
            dead |= verdict.level == "fail"
            yield verdict
    if closed:
        one = len(closed) == 1
        message = (
            f"{listed([*closed])} {'is' if one else 'are'} all zero and block{'s' if one else ''} the gradient of"
            f" {counted(gated, 'output')}: exactly 0 (limit: above 0) until the first update."
        )
        yield Verdict("dead-gradient", "warn", next(iter(closed)), message)
    if not dead:  # a weight after a dead layer is dead for that reason
        yield from _dead_weights(inspection, gates)


def unused_parameter(inspection: GradientInspection) -> Iterator[Verdict]:
    """Object to trainable parameters that never get a gradient, by reason."""
    reasons = {
        "not reached": "the loss does not depend on them",
        "no gradient path": "autograd does not track what is computed with them (no_grad, detach)",
    }
    trainable = [each for each in inspection.parameters if each.trainable]
    for status, reason in reasons.items():
        names = [each.name for each in trainable if each.status == status]
        if names:
            message = (
                f"{len(names)} of {counted(len(trainable), 'trainable parameter')} never get a gradient (limit 0):"
                f" {reason}: {listed(names)}."
            )
            yield Verdict("unused-parameter", "warn", names[0] if len(names) == 1 else _common_module(names), message)


def _zero_runs(outputs: Sequence[GradientRow]) -> Iterator[tuple[list[GradientRow], GradientRow | None]]:
    """Yield each run of neighbouring zero gradients with the row after it, None at the end."""
    run: list[GradientRow] = []
    for row in outputs:
        if row.status == "zero":
            run.append(row)
        elif run:
            yield run, row
            run = []
    if run:
        yield run, None


def _dead_run(
    run: Sequence[GradientRow],
    following: GradientRow | None,
    activations: Mapping[tuple[str, int, str], TensorStatistics],
    is_training: bool,
) -> Verdict:
    last = run[-1]
    level: Literal["fail", "warn"] = "fail"
    others = f" and {counted(len(run) - 1, 'output')} before it" if run[1:] else ""
    if following is None:
        cause = "the loss does not change with it"
    elif following.kind in _STOCHASTIC_DEPTH and is_training:
        cause = f"'{following.label}' ({following.kind}) left the branch out by chance; give more inputs"
        level = "warn"
    elif following.kind in RECTIFIERS and _is_zero(activations.get(key(following))):
        cause = f"every output of '{following.label}' ({following.kind}) is 0"
    elif _l2(following.gradient) < _NEAR_UNDERFLOW:
        cause = f"it underflows, ‖grad_output‖ of '{following.label}' being {_l2(following.gradient):.1e}"
    else:
        cause = f"nothing gets through '{following.label}' ({following.kind})"
    message = f"The gradient of the output of '{last.label}'{others} is exactly 0 everywhere (limit: above 0): {cause}."
    return Verdict("dead-gradient", level, last.label, message)


def _dead_weights(inspection: GradientInspection, gates: Sequence[ParameterRow]) -> Iterator[Verdict]:
    """Object to weights with a zero gradient though the output of their layer gets one."""
    alive = {row.layer for row in arrived_outputs(inspection) if row.status == "gradient"}
    names = [
        each.name
        for each in inspection.parameters
        if each.status == "zero" and is_matrix(each) and owner(each) in alive and not _gates_near(gates, owner(each))
    ]
    if names:
        message = (
            f"{listed(names)} {'gets' if len(names) == 1 else 'get'} a gradient of exactly 0 (limit: above 0), though"
            " the output does not: what the layer takes in is zero everywhere."
        )
        yield Verdict("dead-gradient", "fail", names[0], message)


def _gates(inspection: GradientInspection) -> list[ParameterRow]:
    """Return the parameters that are zero and get a gradient: they are about to open. Biases close nothing."""
    return [
        each
        for each in inspection.parameters
        if each.weight_l2 == 0 and each.status == "gradient" and not each.name.endswith("bias")
    ]


def _gates_near(gates: Iterable[ParameterRow], dead: str, following: str | None = None) -> list[str]:
    """Return the zero weights in the layer that follows a dead one, or in a block around it."""
    return [
        each.name
        for each in gates
        if (following is not None and is_within(owner(each), following))
        or is_within(dead, owner(each).rpartition(".")[0] or owner(each))
    ]


def _common_module(names: Sequence[str]) -> str:
    """Return the dotted name of the innermost module that holds all parameters."""
    paths = [name.split(".")[:-1] for name in names]
    depth = 0
    while all(len(path) > depth for path in paths) and len({path[depth] for path in paths}) == 1:
        depth += 1
    return ".".join(paths[0][:depth])


def _is_zero(statistics: TensorStatistics | None) -> bool:
    return statistics is not None and statistics.zero_fraction == 1


def _l2(statistics: TensorStatistics) -> float:
    return statistics.l2 or 0.0
