"""Rules about the forward pass: that it ends, and that its values are finite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hookscope.checks.rules.reading import are, listed, non_finite_count, non_finite_words, owner
from hookscope.checks.rules.rule import FindingTarget, Objection, RuleTerms, output_of, rule
from hookscope.text import counted, safe_text

if TYPE_CHECKING:
    from hookscope.results.activations import LayerRow
    from hookscope.results.check import CheckMeasurements, NonFiniteOrigin
    from hookscope.results.gradients import Gradients
    from hookscope.results.network import Failure


@rule("forward", "fail", "forward")
def forward_raises(measured: CheckMeasurements, _terms: RuleTerms) -> Iterator[Objection]:
    """The forward pass raises.

    The network cannot run on what it is given. The message names the innermost module that was running and the shapes
    it was given. If the input does not fit, say what it takes: shape, resize, crop or images. What the forward pass
    would have shown is skipped.
    """
    failure = measured.forward.failure if measured.forward else None
    if failure:
        target = FindingTarget(failure.layer or "(model)", (failure.layer,), failure.kind)
        yield Objection(target, raised("forward", failure))


def raised(phase: str, failure: Failure) -> str:
    """Return where and why a pass broke off, in a sentence."""
    given = ", ".join(failure.input_shapes) or "no tensor"
    where = f"'{failure.layer or '(model)'}' ({failure.kind})"
    return safe_text(f"The {phase} pass raised in {where}, given {given}: {failure.error}")


@rule("non-finite-activation", "fail", "forward")
def non_finite_activation(measured: CheckMeasurements, _terms: RuleTerms) -> Iterator[Objection]:
    """A module makes NaN or Inf out of finite inputs.

    The first module in execution order that turns finite inputs into NaN or Inf is named, with its own parameters that
    are not finite; those that only pass it on are counted. Overflow, a division by zero, a root or logarithm of what is
    negative do it. -Inf in an attention mask is no finding as long as nothing comes of it. The rules that it would
    break by itself are skipped. `hookscope grads` names the first output that holds NaN or Inf, and skips no rule.
    """
    rows = measured.forward.rows if measured.forward else ()
    origin = measured.origin
    if not measured.origin_searched:
        if measured.gradients is not None:
            yield from _first_in_forward_order(measured.gradients)
    elif origin is None:
        yield from _unexplained(rows)
    else:
        made = next((row for row in rows if row.label == origin.layer), None)
        after = [row for row in rows if made is not None and row.index > made.index]
        later = sum(bool(non_finite_count(row.activation)) for row in after)
        target = output_of(made) if made else FindingTarget(origin.layer, (origin.layer,), origin.kind)
        message = f"{_origin_words(origin)} (limit 0)"
        if names := origin.parameters:
            message += f"; its {listed(names)} {are(len(names))} not finite"
        if later:
            message += f"; {counted(later, 'later output')} {'holds' if later == 1 else 'hold'} some too, passed on"
        yield Objection(target, f"{message}.")


def _first_in_forward_order(gradients: Gradients) -> Iterator[Objection]:
    """Name the first output that holds NaN or Inf; rows come in the order in which modules finish."""
    broken = [row for row in gradients.rows if non_finite_count(row.activation)]
    if not broken:
        return
    first = broken[0]
    culprits = [
        each.name
        for each in gradients.parameters
        if owner(each) == first.layer and each.weight_l2 is not None and not math.isfinite(each.weight_l2)
    ]
    loss_is_finite = gradients.loss is not None and math.isfinite(gradients.loss.value)
    is_mask = len(broken) == 1 and not first.activation.nan_count and loss_is_finite
    if culprits:
        remark = f"its {listed(culprits)} {are(len(culprits))} not finite"
    elif is_mask:
        remark = "every other output and the loss are finite, as with a mask"
    else:
        remark = f"{counted(len(broken) - 1, 'output')} after it {'holds' if len(broken) == 2 else 'hold'} some too"
    message = (
        f"The output of '{first.label}' is the first in forward order with NaN or Inf: it has"
        f" {non_finite_words(first.activation)} (limit 0); {remark}."
    )
    yield Objection(output_of(first), message, "warn" if is_mask else "fail")


def _unexplained(rows: Sequence[LayerRow]) -> Iterator[Objection]:
    """Object to NaN, or a result that is not finite, that no module makes out of finite inputs; masks of Inf pass."""
    broken = next(
        (row for row in rows if row.activation.nan_count or (not row.layer and row.activation.inf_count)), None
    )
    if broken:
        message = (
            f"The output of '{broken.label}' ({broken.kind}) has {non_finite_words(broken.activation)} (limit 0), but"
            " no module makes them out of finite inputs: check the inputs."
        )
        yield Objection(output_of(broken), message)


def _origin_words(origin: NonFiniteOrigin) -> str:
    of = f"in {counted(origin.element_count, 'value')}"
    counts = f"{origin.nan_count:,} NaN and {origin.inf_count:,} Inf {of}"
    if origin.between:
        return f"The code of '{origin.layer}' ({origin.kind}) between its modules makes NaN or Inf first: {counts}"
    return f"'{origin.layer}' ({origin.kind}) is the first to make NaN or Inf out of finite inputs: {counts}"
