"""Rules about what a training checkpoint holds beside the weights: optimisers' states, and averaged copies."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from hookscope.checks.rules.rule import FindingTarget, Objection, RuleTerms, listed, rule
from hookscope.text import are, counted

if TYPE_CHECKING:
    from hookscope.results.check import CheckMeasurements


@rule("optimizer-state", "fail", "stored")
def optimizer_state(measured: CheckMeasurements, _terms: RuleTerms) -> Iterator[Objection]:
    """Training cannot resume from the state of the optimiser beside the weights.

    A moment that holds NaN or Inf makes every weight NaN at the next step, though the weights in the file are still
    sound; a mean of squares is never negative, and a count of steps neither negative nor NaN. Go back to an earlier
    checkpoint, or continue with a new optimiser. Counts of steps that disagree are a warning: parameters that were
    frozen for a while have fewer on purpose, and a state put together from two runs has, too.
    """
    for state in measured.optimisers:
        if state.non_finite:
            tensors = f"{len(state.non_finite)} of {counted(state.tensor_count, 'tensor')}"
            yield _of(state.key, f"holds NaN or Inf in {tensors}: {listed(state.non_finite)}")
        if state.negative:
            yield _of(state.key, f"holds negative means of squares: {listed(state.negative)}")
        if wrong := [step for step in state.steps if not 0 <= step < math.inf]:
            yield _of(state.key, f"counts {wrong[0]:g} steps (limit 0) for {_parameters(state.steps[wrong[0]])}")
        elif len(state.steps) > 1:
            steps = sorted(state.steps, key=lambda step: -state.steps[step])
            shown = ", ".join(f"{step:,.0f} for {_parameters(state.steps[step])}" for step in steps[:3])
            more = f" and {len(steps) - 3} more counts" if len(steps) > 3 else ""
            yield _of(state.key, f"counts steps that disagree: {shown}{more}", "warn")


@rule("averaged-weights", "fail", "stored")
def averaged_weights(measured: CheckMeasurements, _terms: RuleTerms) -> Iterator[Objection]:
    """An averaged copy of the weights (EMA) beside them is not finite, or belongs to other weights.

    A copy with NaN or Inf never recovers, because averaging keeps it; one with a tensor of another shape belongs to
    another network. Names that are on one side only are a warning: a network that was changed in the middle of training
    has them. Buffers need no copy. The sets of weights in the same file whose key says that they are averages are
    judged: ema, average, swa or shadow.
    """
    for copy in measured.copies:
        if copy.non_finite:
            tensors = f"{len(copy.non_finite)} of {counted(copy.tensor_count, 'tensor')}"
            yield _of(copy.key, f"holds NaN or Inf in {tensors}: {listed(copy.non_finite)}")
        if copy.reshaped:
            tensors = counted(len(copy.reshaped), "tensor")
            yield _of(copy.key, f"has {tensors} of another shape than the weights: {listed(copy.reshaped)}")
        if copy.missing:
            yield _of(copy.key, f"lacks {counted(len(copy.missing), 'parameter')}: {listed(copy.missing)}", "warn")
        if copy.unknown:
            count = len(copy.unknown)
            what = f"holds {counted(count, 'tensor')} that {are(count)} not among the weights: {listed(copy.unknown)}"
            yield _of(copy.key, what, "warn")


def _of(key: str, what: str, at_most: Literal["fail", "warn"] = "fail") -> Objection:
    return Objection(FindingTarget(key, (key,)), f"'{key}' in the file {what}.", at_most)


def _parameters(count: int) -> str:
    return counted(count, "parameter")
