"""Find where NaN and Inf begin, forward and backward, and blame only what made them."""

import math
from collections.abc import Iterator

from hookscope.checks.verdicts.reading import (
    arrived_outputs,
    counted,
    in_forward_order,
    listed,
    non_finite_count,
    non_finite_words,
    owner,
)
from hookscope.results.gradients import GradientRow, Gradients, Verdict
from hookscope.results.labels import row_label


def non_finite_loss(inspection: Gradients) -> Iterator[Verdict]:
    """Object to a loss that is NaN or Inf."""
    loss = inspection.loss
    if loss is not None and not math.isfinite(loss.value):
        yield Verdict("non-finite-loss", "fail", "", f"The loss ({loss.name}) is {loss.value}; it must be finite.")


def non_finite_activation(inspection: Gradients) -> Iterator[Verdict]:
    """Name the first output in forward order that holds NaN or Inf; rows come in the order in which modules finish."""
    broken = [row for row in inspection.rows if non_finite_count(row.activation)]
    if not broken:
        return
    first = broken[0]
    culprits = [
        each.name
        for each in inspection.parameters
        if owner(each) == first.layer and each.weight_l2 is not None and not math.isfinite(each.weight_l2)
    ]
    is_mask = (
        len(broken) == 1
        and not first.activation.nan_count
        and inspection.loss is not None
        and math.isfinite(inspection.loss.value)
    )
    if culprits:
        remark = f"its {listed(culprits)} {'is' if len(culprits) == 1 else 'are'} not finite"
    elif is_mask:
        remark = "every other output and the loss are finite, as with a mask"
    else:
        remark = f"{counted(len(broken) - 1, 'output')} after it {'holds' if len(broken) == 2 else 'hold'} some too"
    message = f"The output of '{first.label}' is the first in forward order with NaN or Inf: it has"
    yield Verdict(
        "non-finite-activation",
        "warn" if is_mask else "fail",
        first.label,
        f"{message} {non_finite_words(first.activation)} (limit 0); {remark}.",
    )


def non_finite_gradient(inspection: Gradients) -> Iterator[Verdict]:
    """Name the layer that makes a non-finite gradient out of a finite one.

    The gradient of an output is made by what takes that output. So the layer named is the next one in forward order, if
    its own gradient was the last to arrive finite; where gradients of inputs were measured, it is certain. Otherwise
    the layer named is the one whose output's gradient broke first.
    """
    arrived = sorted((row.backward_index, row.index, row) for row in inspection.gradients if _has_arrived(row))
    rows = [row for *_, row in arrived]
    position = next((position for position, row in enumerate(rows) if non_finite_count(row.gradient)), None)
    if position is None:
        yield from _non_finite_parameter(inspection)
        return
    first = rows[position]
    words = f"{non_finite_words(first.gradient)} (limit 0)"
    finite = [row for row in rows[:position] if row.role == "output"]
    if not finite:
        where = ""
        message = f"The loss itself sends NaN or Inf back: the gradient of the output of '{first.label}' has {words}"
    elif first.role == "input":
        where = row_label(first.layer, first.call, "")
        message = f"The backward of '{where}' is the first to make NaN or Inf: its grad_input has {words}"
    else:
        consumer = _consumer(inspection, first)
        where = first.label if consumer is not finite[-1] else consumer.label
        maker = f"what takes the output of '{where}'" if where == first.label else f"'{where}' and what leads to it"
        message = (
            f"The gradient of the output of '{first.label}' is the first in backward order with NaN or Inf: it has"
            f" {words}, while that of '{finite[-1].label}', the last before it, is finite: look at the backward of"
            f" {maker}"
        )
    yield Verdict("non-finite-gradient", "fail", where, f"{message}.")


def _has_arrived(row: GradientRow) -> bool:
    return row.backward_index is not None


def _consumer(inspection: Gradients, row: GradientRow) -> GradientRow | None:
    """Return the next output in forward order whose gradient is finite; containers that end with `row` are not."""
    following = (each for each in arrived_outputs(inspection) if each.index > row.index)
    return next((each for each in following if not non_finite_count(each.gradient)), None)


def _non_finite_parameter(inspection: Gradients) -> Iterator[Verdict]:
    """Name the last parameter in forward order with a non-finite gradient, when no selected layer shows one."""
    broken = [each for each in in_forward_order(inspection) if non_finite_count(each.gradient)]
    if broken:
        name, words = broken[-1].name, non_finite_words(broken[-1].gradient)
        message = f"The gradient of '{name}' has {words} (limit 0), those of the selected layers' outputs have none."
        yield Verdict("non-finite-gradient", "fail", name, message)
