"""Rules about what a training checkpoint holds beside the weights: optimisers' and scalers' states, averages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from hookscope.checks.rules.rule import FindingTarget, Objection, RuleTerms, limit, listed, rule
from hookscope.text import are, counted, some_of

if TYPE_CHECKING:
    from hookscope.results.check import CheckMeasurements


@rule("optimizer-state", "fail", "stored")
@limit(
    "max_moment",
    2.0,
    "first moment of Adam over the greatest that its second moment v allows, sqrt(v / (1 - beta2))",
    "inequality of Cauchy and Schwarz, 1 for all gradients; twice that is our choice, for moments rounded to bfloat16",
)
def optimizer_state(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[Objection]:
    """Training cannot resume from the state of the optimiser beside the weights.

    A moment that holds NaN or Inf makes every weight NaN at the next step, though the weights in the file are still
    sound; a mean of squares is never negative, and a count of steps neither negative nor NaN. A mean of gradients that
    their mean of squares rules out belongs to another parameter or another run; judged is torch's Adam. Learning rates
    and other settings that torch.optim refuses fail, too: NaN, negative, a beta of 1. Go back to an earlier checkpoint,
    or continue with a new optimiser. Counts of steps that disagree are a warning: parameters that were frozen for a
    while have fewer on purpose, and a state put together from two runs has, too. So is a learning rate other than the
    one that the schedule in the file has set, where there is one schedule and one optimiser: it was changed by hand, or
    the two were saved at different times.
    """
    for state in measured.optimisers:
        if state.wrong_settings:
            yield _of(state.key, f"has settings that no optimiser takes: {some_of(state.wrong_settings, 3)}")
        if state.other_rates:
            yield _of(
                state.key, f"has another learning rate than its schedule: {some_of(state.other_rates, 3)}", "warn"
            )
        most = terms.limit("max_moment", FindingTarget(state.key, (state.key,)))
        if excess := {name: ratio for name, ratio in state.excess_moments.items() if ratio > most}:
            worst = max(excess.values())
            what = f"holds means of gradients up to {worst:.3g} times as great as their means of squares allow"
            yield _of(state.key, f"{what} (limit {most:g}): {listed([*excess])}")
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


@rule("scaler-state", "fail", "stored")
@limit(
    "min_scale",
    1.0,
    "least factor of the loss",
    "our choice: it starts at 65,536, and is halved where gradients overflow float16; below 1 they do without it, too",
)
def scaler_state(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[Objection]:
    """The state of the GradScaler beside the weights is not one that training can resume from.

    The loss is multiplied by the scale, and gradients are divided by it: a scale that is zero, negative, infinite or
    NaN leaves no gradient. Factors of growth are above 1, those of backing off between 0 and 1, as torch's GradScaler
    asks. A scale below the limit is a warning: it is halved at each step whose gradients hold NaN or Inf, and such a
    step is skipped, so gradients are no longer finite at all, or overflow float16 without being scaled. So is a count
    of steps since the last change beyond the interval, at which the scale would have changed.
    """
    for state in measured.scalers:
        least = terms.limit("min_scale", FindingTarget(state.key, (state.key,)))
        if not 0 < state.scale < math.inf:
            yield _of(state.key, f"has a scale of {state.scale:g} (limit: above 0, and finite)")
        elif state.scale < least:
            yield _of(state.key, f"has a scale of {state.scale:.3g} (limit {least:g}): steps were skipped", "warn")
        if not 1 < state.growth_factor < math.inf:
            yield _of(state.key, f"has a growth factor of {state.growth_factor:g} (limit: above 1, and finite)")
        if not 0 < state.backoff_factor < 1:
            yield _of(state.key, f"has a backoff factor of {state.backoff_factor:g} (limit: above 0, below 1)")
        tracker, interval = state.growth_tracker, state.growth_interval
        if not 0 <= tracker < max(interval, 1):
            yield _of(state.key, f"counts {tracker:g} steps since its last change (limit {interval:g})", "warn")


@rule("averaged-weights", "fail", "stored")
@limit(
    "min_cosine",
    0.1,
    "least cosine between a weight and its average",
    "our choice: of weights that wander around a mean it is 1 / sqrt(1 + h / t), for an average over h steps of weights"
    " that forget in t, so 0.1 at h = 99 t; tensors of 2,048 unrelated values stay below it, at 4.5 standard errors",
)
def averaged_weights(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[Objection]:
    """An averaged copy of the weights (EMA) beside them is not finite, or belongs to other weights.

    A copy with NaN or Inf never recovers, because averaging keeps it; one with a tensor of another shape belongs to
    another network. Names that are on one side only are a warning: a network that was changed in the middle of training
    has them. Buffers need no copy.

    Signs that one side is stale, or of another run, are warnings too. The average is stale if it looks as initialised
    while the weights are trained, or if the statistics of its BatchNorms are initial values and those of the weights
    are not: `torch.optim.swa_utils.update_bn` computes them. The weights are stale if the average has counted more
    batches. A weight of 2,048 values or more that has nothing in common with its average belongs to another run.

    The sets of weights in the same file whose key says that they are averages are judged: ema, average, swa or shadow.
    How far an average lags behind says nothing.
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
        least = terms.limit("min_cosine", FindingTarget(copy.key, (copy.key,)))
        if unrelated := {name: near for name, near in copy.cosines.items() if near < least}:
            share = f"{len(unrelated)} of {counted(len(copy.cosines), 'tensor')}"
            what = f"has nothing in common with the weights in {share} (cosine {min(unrelated.values()):.2f}"
            yield _of(copy.key, f"{what}, limit {least:g}): {listed([*unrelated])}", "warn")
        if copy.untrained:
            tensors = counted(len(copy.untrained), "tensor")
            what = f"is stale: {tensors} as initialised, while the weights are trained: {listed(copy.untrained)}"
            yield _of(copy.key, what, "warn")
        if copy.reset:
            layers = f"statistics of {counted(len(copy.reset), 'BatchNorm')} as they start"
            yield _of(copy.key, f"is stale: {layers}, while those of the weights are not: {listed(copy.reset)}", "warn")
        if copy.newer:
            theirs, mine = next(iter(copy.newer.values()))
            what = f"is newer than the weights: it counts {theirs:,} batches, they {mine:,}: {listed([*copy.newer])}"
            yield _of(copy.key, what, "warn")


def _of(key: str, what: str, at_most: Literal["fail", "warn"] = "fail") -> Objection:
    return Objection(FindingTarget(key, (key,)), f"'{key}' in the file {what}.", at_most)


def _parameters(count: int) -> str:
    return counted(count, "parameter")
