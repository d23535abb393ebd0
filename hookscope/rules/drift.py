"""The rule that compares layers with a baseline, and finds the first layer whose values changed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from hookscope.results.headroom import FORMATS
from hookscope.rules.rule import FindingTarget, RuleFinding, RuleTerms, limit, output_of, required, rule
from hookscope.text import figure, in_words, printable, shape_text

if TYPE_CHECKING:
    from hookscope.results.check import CheckMeasurements
    from hookscope.rules.baseline import Baseline, BaselineRow

# A layer's spread is its std, but at least this share of its root mean square, so that rounding is no drift in a layer
# whose values hardly vary (a sigmoid at 0.5).
_LEAST_SPREAD = 0.1

# The limit for values rounded to a floating dtype, from the finest dtype to the coarsest.
_LIMITS = {
    "float64": "max_difference",
    "float32": "max_difference",
    "float16": "max_difference_float16",
    "bfloat16": "max_difference_bfloat16",
}
_HALF = frozenset({"float16", "bfloat16"})

# Rounding may move a quantile this many times as far as the values (root mean square), because an outer quantile of few
# values is a single value. Four standard deviations, times 1.5 because the root mean square is over 256 values per
# input; the greatest on 44 networks was 4.7.
_TAIL = 6.0

_NAMED_CHANNELS = 3

# Values that moved this far, in units of their spread, are nearly independent of the earlier values: independent ones
# are sqrt(2) apart. Rounding errors do not grow to that. If rounding moves a layer by 0.8, its 256 values per input may
# show 1.08 (mobilenet_v2 in bfloat16).
_UNRELATED = 1.2


@rule("drift", "fail", "baseline", ("non-finite-activation",), followers="layer")
@limit(
    "max_difference",
    0.01,
    "how far a layer's values (root mean square), or their mean, std or a quantile, may move, in units of its spread: "
    "its std, but at least 0.1 of its root mean square",
    "on 44 networks of random weights channels_last, other kernels and thread counts move it by up to 1e-3, on most "
    "by up to 1e-4; one row of 1,000 in the last weights with its signs turned is found in seven cases of eight",
)
@limit(
    "max_difference_float16",
    0.05,
    "the same where outputs are float16, or the weights of either network were rounded to it",
    "on 18 networks float16 moves the last layer by up to 0.12, on trained networks by up to 0.011",
)
@limit(
    "max_difference_bfloat16",
    0.1,
    "the same for bfloat16",
    "on 18 networks bfloat16 moves the last layer by up to 0.58, on trained networks by up to 0.07",
)
@limit(
    "max_growth",
    2.0,
    "in half precision, for a layer beyond the two limits: its move over the largest move of any layer before it",
    "on 18 networks at most 1.33: rounding errors grow from layer to layer",
)
@limit(
    "max_dead_difference",
    0.05,
    "how far a layer's share of dead channels may move, 0-1; not compared in half precision, where small values vanish",
    "on 18 networks channels_last and other thread counts move it by 0, one level more or less in every pixel by up "
    "to 0.02, and one batch through BatchNorm by up to 0.5",
)
@limit(
    "max_gradient_ratio",
    1.1,
    "factor by which the L2 norm of a layer's gradient may be larger or smaller",
    "on 15 networks other threads or kernels change it by up to 1.0001 times (bfloat16 1.03), one level more or less "
    "in every pixel by 1.08, a training step at a rate of 1e-3 by 1.001 to 1e10",
)
def drift(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """A layer returns different values than when the baseline was written.

    The first layer in execution order that differs is named: its weights, the preprocessing or a library changed. If
    the change was meant, renew the baseline with --update-baseline. Values are compared in their order, so swapped
    channels are drift although every statistic stays the same. The message adds the channels whose mean plus standard
    deviation moved furthest, if they are known (in layers of more than 64 channels, if no more than four moved), and
    the number of layers that follow. Gradients are reported only if no layer drifts; the last layer whose
    gradient changed is named, because gradients travel back from there. Off until a baseline is given.

    A copy of a network in float16 or bfloat16 is no drift. Its rounding errors grow from layer to layer, so drift
    begins where they suddenly double. Changes smaller than these errors cannot be detected. Dynamic int8 quantisation
    of linear layers moves layers by 0.007 to 0.06, which counts as drift: raise max_difference to 0.1 for it.
    """
    # Layers are compared in execution order; missing layers come last. Whatever the limits, a layer drifts if it has no
    # counterpart, or if its type, shape, dtype, or count of NaN or Inf changed.
    from hookscope.rules.baseline import measured_rows, require_fit

    baseline, forward = required(terms.baseline), required(measured.forward)
    require_fit(baseline, measured)
    by_label = {row.label: row for row in baseline.rows}
    dtypes, weights = {baseline.dtype, forward.dtype}, {baseline.weights_precision, measured.weights_precision}
    may_round = len(dtypes) > 1 and dtypes <= _LIMITS.keys()
    changed: list[tuple[FindingTarget, str]] = []
    of_gradients: list[tuple[FindingTarget, str]] = []
    furthest = 0.0
    for row, now in measured_rows(measured):
        target, before = output_of(row), by_label.pop(now.label, None)
        if before is None:
            change, moved = "it is not in the baseline", _Movement(None, 0.0, "")
        else:
            limits = {name: terms.limit(name, target) for name in terms.rule.limits}
            precision = _precision(before, now, weights)
            moved = _movement(before, now, precision, limits[_LIMITS.get(precision, "max_difference")])
            most_dead = None if precision in _HALF else limits["max_dead_difference"]
            change = _changed_facts(before, now, most_dead, may_round=may_round)
            usual = min(limits["max_growth"] * furthest, _UNRELATED) if precision in _HALF else 0.0
            change = "; ".join(filter(None, (change, moved.words if changed or moved.beyond_rounding > usual else "")))
            if baseline.gradients and measured.gradients and terms.is_on(target):
                gradient = _changed_gradient(before.gradient_l2, now.gradient_l2, limits["max_gradient_ratio"])
                of_gradients += [(target, gradient)] if gradient else []
        furthest = max(furthest, moved.furthest)
        if change and terms.is_on(target):
            changed.append((target, change))
    modules = {label: re.sub(r"(#\d+)?(\[.*)?\Z", "", label).removeprefix("(model)") for label in by_label}
    gone = [FindingTarget(label, (modules[label],), row.kind) for label, row in by_label.items()]
    changed += [(target, "it is in the baseline and does not run") for target in gone if terms.is_on(target)]
    remark = _moved_inputs(baseline, measured, terms) if changed else ""
    for index, (target, change) in enumerate(changed or reversed(of_gradients)):
        name = f"'{printable(target.where)}' ({printable(target.kind)})"
        begins = f"Drift from the baseline begins at {name}: {change}{remark}."
        yield RuleFinding(target, f"{name} drifts from the baseline: {change}." if index else begins)


class _Movement(NamedTuple):
    """How far a layer moved, in units of its spread.

    Attributes:
        values: Root mean square difference of the kept values, or of the channels if that is greater; None if unknown.
        statistics: Difference of the mean, std or quantile that moved furthest.
        words: The differences beyond the limit, in words; "" if there are none.
    """

    values: float | None
    statistics: float
    words: str

    @property
    def furthest(self) -> float:
        return max(self.values or 0.0, self.statistics)

    @property
    def beyond_rounding(self) -> float:
        """How far it moved, without a move of a statistic that rounding errors of single values explain."""
        return self.furthest if self.values is None or self.statistics > _TAIL * self.values else self.values


def _precision(before: BaselineRow, now: BaselineRow, weights: set[str]) -> str:
    """Return the coarsest dtype of two rows, and of the networks' weights if their precision differs."""
    order = [*_LIMITS]
    dtypes = {before.dtype, now.dtype} | (weights if len(weights) > 1 else set())
    return max(dtypes, key=lambda dtype: order.index(dtype) if dtype in order else -1)


def _moved_inputs(baseline: Baseline, measured: CheckMeasurements, terms: RuleTerms) -> str:
    """Return the end of a sentence on how far the network's inputs moved; "" if they did not."""
    from hookscope.rules.baseline import input_values_of
    from hookscope.rules.baseline_values import root_mean_square, values_apart

    before, now = baseline.input_values, input_values_of(measured)
    if before is None or now is None:
        return ""
    distance, usual = values_apart(before, now), root_mean_square(before)
    dtypes = (baseline.dtype, required(measured.forward).dtype)
    limit = max(terms.limit(_LIMITS.get(dtype, "max_difference")) for dtype in dtypes)
    if distance is None or distance <= limit * usual:
        return ""
    by = f"by {figure(distance / usual, 3)} of their root mean square" if usual else "they were all 0"
    return f"; the inputs of the network differ already, {by}: look at how inputs are read and prepared"


def _changed_facts(before: BaselineRow, now: BaselineRow, most_dead: float | None, *, may_round: bool) -> str:
    other_dtype = before.dtype != now.dtype and not (may_round and {before.dtype, now.dtype} <= _LIMITS.keys())
    for fact, was, current in (
        ("type", before.kind, now.kind),
        ("shape", shape_text(before.shape), shape_text(now.shape)),
        *([("dtype", before.dtype, now.dtype)] if other_dtype else []),
    ):
        if was != current:
            return f"its {fact} went from {printable(was)} to {printable(current)}"
    counts = (("NaN", before.nan_count, now.nan_count), ("Inf", before.inf_count, now.inf_count))
    changes = [f"its count of {kind} went from {_shown(a)} to {_shown(b)}" for kind, a, b in counts if a != b]
    old, new = _statistics(before), _statistics(now)
    if lost := next((name for name in {**old, **new} if (name in old) != (name in new)), None):
        changes.append(f"its {lost} went from {_shown(old.get(lost))} to {_shown(new.get(lost))}")
    if most_dead is not None:
        changes.append(_changed_share(before.dead_fraction, now.dead_fraction, most_dead))
    return "; ".join(filter(None, changes))


def _movement(before: BaselineRow, now: BaselineRow, precision: str, limit: float) -> _Movement:
    if before.shape != now.shape:
        return _Movement(None, 0.0, "")
    was, current = _statistics(before), _statistics(now)
    spread = max(before.std or 0.0, _LEAST_SPREAD * math.hypot(before.mean or 0.0, before.std or 0.0))
    if precision == "float16" and limit > 0:
        spread = max(spread, FORMATS["float16"].smallest / limit)  # values that differ by less may be equal
    moved = {name: _ratio(abs(value - current[name]), spread) for name, value in was.items() if name in current}
    most = max(moved, key=lambda name: moved[name], default="")
    furthest, distance = moved.get(most, 0.0), _kept_values_apart(before, now)
    apart = None if distance is None else _ratio(distance, spread)
    changes: list[str] = []
    if distance is not None and apart is not None and apart > limit:
        differ = f"differ by about {figure(apart, 3)} of their spread" if spread else "are no longer all 0"
        changes.append(f"its values {differ if math.isfinite(distance) else 'are NaN or Inf in other places'}")
    if furthest > limit:
        of_spread = f", {figure(furthest, 3)} of its spread" if spread and not changes else ""
        changes.append(f"its {most} went from {_shown(was[most])} to {_shown(current[most])}{of_spread}")
    if not changes:
        return _Movement(apart, furthest, "")
    where = _worst_channels(before.channels, now.channels, spread, limit)
    return _Movement(apart, furthest, f"{', and '.join(changes)} (limit {limit:g}){where}")


def _worst_channels(before: str | None, now: str | None, spread: float, limit: float) -> str:
    """Return the channels whose mean plus standard deviation moved furthest beyond a limit, in words; "" if unknown."""
    import numpy as np

    from hookscope.rules.baseline_values import channel_differences

    differences = channel_differences(before, now) if before and now and spread else None
    if differences is None or differences.size == 1:
        return ""
    moved = np.abs(differences) / spread
    beyond = np.flatnonzero(moved > limit)
    worst = [int(channel) for channel in beyond[np.argsort(-moved[beyond], kind="stable")][:_NAMED_CHANNELS]]
    if not worst:
        return ""
    named = in_words([*map(str, worst)])
    by = f"by {'up to ' if len(worst) > 1 else ''}{figure(moved[worst[0]], 3)}"
    if len(beyond) > len(worst):
        return f", in {len(beyond):,} of {moved.size:,} channels, most in {named}, {by}"
    return f", in {'channel' if len(worst) == 1 else 'channels'} {named} of {moved.size:,}, {by}"


def _kept_values_apart(before: BaselineRow, now: BaselineRow) -> float | None:
    from hookscope.rules.baseline_values import channels_apart, values_apart

    of_values = values_apart(before.values, now.values) if before.values and now.values else None
    of_channels = channels_apart(before.channels, now.channels) if before.channels and now.channels else None
    return max((apart for apart in (of_values, of_channels) if apart is not None), default=None)


def _statistics(row: BaselineRow) -> dict[str, float]:
    from hookscope.results.statistics import QUANTILE_LEVELS

    names = [f"{level:.0%} quantile (mean over inputs)" for level in QUANTILE_LEVELS]
    named = {"mean": row.mean, "std": row.std, **dict(zip(names, row.quantiles or (), strict=False))}
    return {name: value for name, value in named.items() if value is not None}


def _changed_share(was: float | None, now: float | None, limit: float) -> str:
    if was == now or (was is not None and now is not None and abs(was - now) <= limit):
        return ""
    return f"its share of dead channels went from {_shown(was)} to {_shown(now)} (limit {limit:g} apart)"


def _changed_gradient(was: float | None, now: float | None, limit: float) -> str:
    if was == now or (was is not None and now is not None and _ratio(max(was, now), min(was, now)) <= limit):
        return ""
    return f"the L2 norm of its gradient went from {_shown(was)} to {_shown(now)} (limit {limit:g} times)"


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else (math.inf if part else 0.0)


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"
