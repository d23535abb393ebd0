"""Judge gradients that are zero, or as good as zero, or that never came."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from hookscope.checks.verdicts.limits import Limits
from hookscope.checks.verdicts.reading import arrived_outputs, counted, gates, gates_near, key, listed
from hookscope.results.gradients import Gradients, Verdict
from hookscope.results.statistics import TensorStatistics

# Sums of their outputs do not depend on their inputs.
_NORMALISERS = frozenset(
    {
        *("Softmax", "Softmax2d", "LayerNorm", "GroupNorm", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d"),
        *("InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d"),
    }
)


def zero_gradient(inspection: Gradients, limits: Limits) -> Iterator[Verdict]:
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
    zero_weights = gates(inspection)
    reaching = 0.0
    for (row, before), (following, after) in pairwise(effects):
        reaching = max(reaching, before)
        normalises = following.kind in _NORMALISERS and not gates_near(zero_weights, row.layer, following.layer)
        if normalises and reaching < limits.rounding * after:
            message = (
                f"Only rounding gets past '{following.label}' ({following.kind}): before it ‖g‖·‖x‖ of outputs is at"
                f" most {reaching / after:.1e} of its own (limit {limits.rounding:.0e}); a sum over what it normalises"
                " is constant by construction. Choose another loss."
            )
            yield Verdict("zero-gradient", "warn", following.label, message)
            return


def unused_parameter(inspection: Gradients) -> Iterator[Verdict]:
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


def _common_module(names: Sequence[str]) -> str:
    """Return the dotted name of the innermost module that holds all parameters."""
    paths = [name.split(".")[:-1] for name in names]
    depth = 0
    while all(len(path) > depth for path in paths) and len({path[depth] for path in paths}) == 1:
        depth += 1
    return ".".join(paths[0][:depth])


def _l2(statistics: TensorStatistics) -> float:
    return statistics.l2 or 0.0
