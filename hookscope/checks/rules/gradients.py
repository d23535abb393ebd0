"""Rules about the values of loss and gradients: that they are finite, and not zero everywhere.

No rule about gradients depends on the scale of the loss: ratios inside one run are compared with limits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from hookscope.checks.rules.reading import (
    arrived_outputs,
    gates,
    gates_near,
    in_forward_order,
    key,
    l2,
    non_finite_count,
    non_finite_words,
    parameter_of,
    taken_gradients,
)
from hookscope.checks.rules.rule import WHOLE, Limit, Objection, RuleTerms, output_of, rule

if TYPE_CHECKING:
    from hookscope.results.check import CheckMeasurements
    from hookscope.results.gradients import Gradients

# Sums of their outputs do not depend on their inputs.
_NORMALISERS = frozenset(
    {
        *("Softmax", "Softmax2d", "LayerNorm", "GroupNorm", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d"),
        *("InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d"),
    }
)


@rule("non-finite-loss", "off", "gradients")
def non_finite_loss(measured: CheckMeasurements, _terms: RuleTerms) -> Iterator[Objection]:
    """The loss is NaN or Inf.

    The loss of the check is NaN or Inf. Mostly the forward pass is already not finite; else the loss takes the
    logarithm of zero, or overflows.
    """
    loss = taken_gradients(measured).loss
    if loss is not None and not math.isfinite(loss.value):
        yield Objection(WHOLE, f"The loss ({loss.name}) is {loss.value}; it must be finite.")


@rule("non-finite-gradient", "off", "gradients", ("non-finite-activation",))
def non_finite_gradient(measured: CheckMeasurements, _terms: RuleTerms) -> Iterator[Objection]:
    """The backward of a layer makes NaN or Inf out of a finite gradient.

    A backward that divides by zero, as of a root at 0 or a norm of zeros, makes NaN out of a finite gradient. The layer
    that makes it is named, those that pass it on are not. Needs a finite loss.
    """
    # The gradient of an output is made by what takes that output. So the layer named is the next one in forward order,
    # if its own gradient was the last to arrive finite; where gradients of inputs were measured, it is certain.
    # Otherwise the layer named is the one whose output's gradient broke first.
    gradients = taken_gradients(measured)
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
        target = WHOLE
        message = f"The loss itself sends NaN or Inf back: the gradient of the output of '{first.label}' has {words}"
    elif first.role == "input":
        target = output_of(replace(first, slot=""))
        message = f"The backward of '{target.where}' is the first to make NaN or Inf: its grad_input has {words}"
    else:
        # Containers that end with the broken output are passed over: their gradient is not finite either.
        later = (each for each in arrived_outputs(gradients, of_operations=True) if each.index > first.index)
        consumer = next((each for each in later if not non_finite_count(each.gradient)), None)
        if consumer is not None and consumer is finite[-1]:
            target, maker = output_of(consumer), f"'{consumer.label}' and what leads to it"
        else:
            target, maker = output_of(first), f"what takes the output of '{first.label}'"
        message = (
            f"The gradient of the output of '{first.label}' is the first in backward order with NaN or Inf: it has"
            f" {words}, while that of '{finite[-1].label}', the last before it, is finite: look at the backward of"
            f" {maker}"
        )
    yield Objection(target, f"{message}.")


@rule(
    "zero-gradient",
    "off",
    "gradients",
    ("non-finite-gradient",),
    rounding=Limit(
        1e-6,
        "share of the loss, or of ‖g‖·‖x‖ one layer on, below which ‖g‖·‖x‖ is rounding",
        "ten roundings of float32; our choice, the same as for `hookscope grads`",
        "rounding",
    ),
)
def zero_gradient(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[Objection]:
    """Every gradient is zero, or no more than rounding.

    Nothing can learn: the loss does not depend on any parameter, or is constant by construction, as the sum of a
    softmax or of what LayerNorm gives out is. Choose another loss, then look at the layers.
    """
    # To first order, changing a tensor by its own size changes the loss by at most ‖g‖·‖x‖, its effect. Where that is
    # rounding beside the loss for every parameter, or for every output before a normalising layer beside its own, what
    # arrives is rounding error, or exactly zero: the loss is at a minimum, or constant by construction.
    gradients, rounding = taken_gradients(measured), terms.limit("rounding")
    known = [each for each in gradients.parameters if each.status in ("gradient", "zero")]
    outputs = arrived_outputs(gradients)
    if {each.status for each in known or outputs} == {"zero"}:
        whose = "of a parameter " if known else ""
        message = f"Every gradient {whose}is exactly 0 (limit: above 0): the loss does not change with anything"
        yield Objection(WHOLE, f"{message} {'learnt' if known else 'in the network'}.")
        return
    loss = abs(gradients.loss.value) if gradients.loss and math.isfinite(gradients.loss.value) else 0.0
    effect = max((l2(each.gradient) * (each.weight_l2 or 0.0) for each in known), default=0.0)
    if 0 < effect < rounding * loss:
        message = (
            f"No parameter changes the loss beyond rounding: ‖g‖·‖w‖ is at most {effect / loss:.1e} of the loss (limit"
            f" {rounding:.0e}); it is at a minimum, or constant by construction as a sum after softmax is."
        )
        yield Objection(WHOLE, message, "warn")
        return
    activations = {key(row): l2(row.activation) for row in gradients.rows}
    effects = [(row, l2(row.gradient) * activations.get(key(row), 0.0)) for row in outputs]
    zero_weights = gates(gradients)
    reaching = 0.0
    for (row, before), (following, after) in pairwise(effects):
        reaching = max(reaching, before)
        normalises = following.kind in _NORMALISERS and not gates_near(zero_weights, row.layer, following.layer)
        if normalises and reaching < rounding * after:
            message = (
                f"Only rounding gets past '{following.label}' ({following.kind}): before it ‖g‖·‖x‖ of outputs is at"
                f" most {reaching / after:.1e} of its own (limit {rounding:.0e}); a sum over what it normalises"
                " is constant by construction. Choose another loss."
            )
            yield Objection(output_of(following), message, "warn")
            return


def _non_finite_parameter(gradients: Gradients) -> Iterator[Objection]:
    """Name the last parameter in forward order with a non-finite gradient, when no selected layer shows one."""
    broken = [each for each in in_forward_order(gradients) if non_finite_count(each.gradient)]
    if broken:
        name, words = broken[-1].name, non_finite_words(broken[-1].gradient)
        message = f"The gradient of '{name}' has {words} (limit 0), those of the selected layers' outputs have none."
        yield Objection(parameter_of(broken[-1]), message)
