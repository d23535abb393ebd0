"""Rules about a training checkpoint's entries other than weights: states of optimisers and scalers, averages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from hookscope.rules.rule import FindingTarget, RuleFinding, RuleTerms, limit, listed, rule
from hookscope.text import are, counted, figure, some_of

if TYPE_CHECKING:
    from hookscope.results.check import CheckMeasurements
    from hookscope.results.training_state import CopyValues


@rule("optimizer-state", "fail", "stored")
@limit(
    "max_moment",
    2.0,
    "magnitude of a first moment of Adam over sqrt(v / (1 - beta2)), the greatest that its second moment v allows",
    "Cauchy-Schwarz inequality: at most 1, whatever the gradients; twice that, for rounding to bfloat16",
)
def optimizer_state(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """The state of the optimiser beside the weights is not sound.

    A moment with NaN or Inf fails: it makes the weight NaN at the next step, although the weights in the file are still
    sound. A negative mean of squares, a step count that is negative or NaN, and settings that torch.optim refuses (a
    learning rate that is NaN or negative, a beta of 1) fail as well. A mean of gradients that is greater than their
    mean of squares allows fails too: the two come from different parameters or runs. Only torch's Adam and AdamW are
    checked for this. Go back to an earlier checkpoint, or continue with a new optimiser.

    Two findings are only warnings. Step counts that differ between parameters come from a state assembled from two
    runs, but also from layers that were frozen for a while. A learning rate that differs from the one in the file's
    schedule was changed by hand, or the two were saved at different times; this is checked if the file has exactly one
    schedule and one optimiser.
    """
    for state in measured.optimisers:
        if state.wrong_settings:
            yield _about(state.key, f"has settings that no optimiser takes: {some_of(state.wrong_settings, 3)}")
        if state.other_rates:
            rates = some_of(state.other_rates, 3)
            yield _about(state.key, f"has another learning rate than its schedule: {rates}", "warn")
        most = terms.limit("max_moment", FindingTarget(state.key, (state.key,)))
        if excess := {name: ratio for name, ratio in state.excess_moments.items() if ratio > most}:
            worst = max(excess.values())
            problem = f"has means of gradients up to {figure(worst, 3)} times as great as their means of squares allow"
            yield _about(state.key, f"{problem} (limit {most:g}): {listed([*excess])}")
        if state.non_finite:
            tensors = f"{len(state.non_finite)} of {counted(state.tensor_count, 'tensor')}"
            yield _about(state.key, f"has NaN or Inf in {tensors}: {listed(state.non_finite)}")
        if state.negative:
            yield _about(state.key, f"has negative means of squares: {listed(state.negative)}")
        if wrong := [step for step in state.steps if not 0 <= step < math.inf]:
            parameters = counted(state.steps[wrong[0]], "parameter")
            yield _about(state.key, f"counts {figure(wrong[0], 6)} steps (limit 0) for {parameters}")
        elif len(state.steps) > 1:
            steps = sorted(state.steps, key=lambda step: -state.steps[step])
            counts = [f"{step:,.0f} for {counted(state.steps[step], 'parameter')}" for step in steps]
            yield _about(state.key, f"counts steps that disagree: {some_of(counts, 3)}", "warn")


@rule("scaler-state", "fail", "stored")
@limit(
    "min_scale",
    1.0,
    "least scale, by which the loss is multiplied",
    "it starts at 65,536, and is halved when gradients overflow float16; below 1 they overflow even unscaled",
)
def scaler_state(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """The state of the GradScaler beside the weights is not sound.

    The scaler multiplies the loss by a scale, and divides the gradients by it before the step. A scale that is zero,
    negative, infinite or NaN leaves no gradient, and fails. A growth factor of 1 or less, and a backoff factor that is
    not between 0 and 1, fail as well: torch's GradScaler refuses them. Continue with a new GradScaler.

    A scale below the limit is a warning. The scaler skips every step whose gradients have NaN or Inf, and lowers the
    scale. A scale below 1 means that gradients are never finite, or overflow float16 even unscaled: look for their
    cause with `hookscope grads`. A step count that has reached the growth interval is also a warning, because the scale
    would have grown.
    """
    for state in measured.scalers:
        least = terms.limit("min_scale", FindingTarget(state.key, (state.key,)))
        if not 0 < state.scale < math.inf:
            yield _about(state.key, f"has a scale of {figure(state.scale, 6)} (limit: above 0, and finite)")
        elif state.scale < least:
            scale = figure(state.scale, 3)
            yield _about(state.key, f"has a scale of {scale} (limit {least:g}): steps were skipped", "warn")
        if not 1 < state.growth_factor < math.inf:
            growth = figure(state.growth_factor, 6)
            yield _about(state.key, f"has a growth factor of {growth} (limit: above 1, and finite)")
        if not 0 < state.backoff_factor < 1:
            backoff = figure(state.backoff_factor, 6)
            yield _about(state.key, f"has a backoff factor of {backoff} (limit: above 0, below 1)")
        tracker, interval = state.growth_tracker, state.growth_interval
        if not 0 <= tracker < max(interval, 1):
            steps = f"{tracker:g} step{'' if tracker == 1 else 's'}"
            yield _about(state.key, f"counts {steps} since its last change (limit {interval:g})", "warn")


@rule("averaged-weights", "fail", "stored")
@limit(
    "min_cosine",
    0.1,
    "least cosine between a weight and its average",
    "for two unrelated tensors of 2,048 values it is 4.5 standard errors; for weights that fluctuate around zero with "
    "a correlation time of t steps, and their average over h steps, the cosine is 1 / sqrt(1 + h / t), which is 0.1 "
    "at h = 99 t",
)
def averaged_weights(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """An averaged copy of the weights (EMA) beside them is not finite, or belongs to other weights.

    A copy with NaN or Inf fails, because averaging never removes them. A copy with a tensor of a different shape fails:
    it belongs to a different network. A copy whose matrices and kernels all have a single value, such as 0, fails: it
    was allocated, but never filled. If only some do, it is a warning. Parameters in only one of the two sets are a
    warning: the network changed during training. The copy may lack buffers. Release the weights instead of such a copy,
    or start the average again.

    Signs that either set is out of date are warnings. The copy is out of date if it looks freshly initialised while the
    weights look trained, or if its BatchNorms have their initial statistics while those of the weights have moved;
    `torch.optim.swa_utils.update_bn` computes them. The weights are out of date if a BatchNorm of the copy has counted
    more batches. A weight of 2,048 values or more that is nearly orthogonal to its average is a warning as well: the
    two come from different runs. How far a copy lags behind the weights is not checked.

    A set of weights in the same file counts as an averaged copy if its key contains ema, averag, swa or shadow; so does
    a list of tensors in the shapes of all parameters, in their order, as torch_ema saves it.
    """
    for copy in measured.copies:
        if copy.non_finite:
            tensors = f"{len(copy.non_finite)} of {counted(copy.tensor_count, 'tensor')}"
            yield _about(copy.key, f"has NaN or Inf in {tensors}: {listed(copy.non_finite)}")
        if copy.reshaped:
            tensors = counted(len(copy.reshaped), "tensor")
            yield _about(copy.key, f"has {tensors} of another shape than the weights: {listed(copy.reshaped)}")
        if copy.single_valued:
            everywhere = len(copy.single_valued) == copy.matrix_count
            tensors = f"{len(copy.single_valued)} of {counted(copy.matrix_count, 'tensor')}"
            problem = f"is constant in {tensors}, and the weights vary there: {listed(copy.single_valued)}"
            yield _about(copy.key, problem, "fail" if everywhere else "warn")
        if copy.missing:
            yield _about(copy.key, f"lacks {counted(len(copy.missing), 'parameter')}: {listed(copy.missing)}", "warn")
        if copy.unknown:
            count = len(copy.unknown)
            problem = f"has {counted(count, 'tensor')} that {are(count)} not among the weights: {listed(copy.unknown)}"
            yield _about(copy.key, problem, "warn")
        least = terms.limit("min_cosine", FindingTarget(copy.key, (copy.key,)))
        if unrelated := {name: near for name, near in copy.cosines.items() if near < least}:
            share = f"{len(unrelated)} of {counted(len(copy.cosines), 'tensor')}"
            problem = f"points in another direction than the weights in {share} (cosine {min(unrelated.values()):.2f}"
            yield _about(copy.key, f"{problem}, limit {least:g}): {listed([*unrelated])}", "warn")
        yield from _outdated(copy)


def _outdated(copy: CopyValues) -> Iterator[RuleFinding]:
    if copy.untrained:
        tensors = counted(len(copy.untrained), "tensor")
        problem = f"is stale: {tensors} as initialised, while the weights are trained: {listed(copy.untrained)}"
        yield _about(copy.key, problem, "warn")
    if copy.reset:
        layers = f"statistics of {counted(len(copy.reset), 'BatchNorm')} at their initial values"
        yield _about(copy.key, f"is stale: {layers}, while those of the weights are not: {listed(copy.reset)}", "warn")
    if copy.newer:
        theirs, mine = next(iter(copy.newer.values()))
        counts = f"it counts {counted(theirs, 'batch', 'batches')}, and they count {mine:,}"
        yield _about(copy.key, f"is newer than the weights: {counts}: {listed([*copy.newer])}", "warn")


def _about(key: str, problem: str, at_most: Literal["fail", "warn"] = "fail") -> RuleFinding:
    return RuleFinding(FindingTarget(key, (key,)), f"'{key}' in the file {problem}.", at_most)
