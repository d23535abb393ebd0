"""Rules about learning: gradients over depth, gradients that differ between weights, and parameters without any."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from operator import gt, lt
from statistics import median
from typing import TYPE_CHECKING

from hookscope.rules.gradients import effects_of, idle_modules
from hookscope.rules.rule import (
    FindingTarget,
    RuleFinding,
    RuleTerms,
    arrived_outputs,
    in_forward_order,
    limit,
    listed,
    module_of,
    non_finite_count,
    output_of,
    parameter_of,
    required,
    rule,
)
from hookscope.text import counted, figure

if TYPE_CHECKING:
    from hookscope.results.check import CheckMeasurements
    from hookscope.results.gradients import GradientRow, Gradients, ParameterRow

# Fewer weights or layers make no trend, and fewer calls of one layer make no recurrence.
_SHORTEST_TREND = 3
_SHORTEST_RECURRENCE = 8

_CAUSES = ("non-finite-gradient", "zero-gradient")


@rule("vanishing-gradient", "off", "gradients", _CAUSES)
@limit(
    "min_ratio",
    1e-4,
    "median ‖g‖/‖w‖ of the first tenth of the weights over that of the last tenth",
    "healthy networks of torchvision measure 0.1 to 1000, thirty sigmoid layers 1e-24",
    "vanishing",
)
def vanishing_gradient(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """The first weights learn far slower than the last.

    ‖g‖/‖w‖, the size of a step relative to the weight, is far smaller for the first weights than for the last, so the
    first layers hardly learn. Causes: saturated activations, missing normalisation or skip connections, too small an
    initialisation.
    """
    # In healthy networks, ‖g‖/‖w‖ is flat over depth even if activations shrink or grow; ‖grad_output‖ is not. The
    # median over a tenth bridges skip connections and branches that start small. The weight of a layer with many calls
    # has one gradient for all of them, so the gradients of its outputs are compared instead.
    gradients = required(measured.gradients)
    trends = [*_recurrences(gradients), _learning(gradients)]
    yield from _beyond(terms.limit("min_ratio"), lt, [(trend, trend.ratio(median)) for trend in trends])


@rule("exploding-gradient", "off", "gradients", _CAUSES)
@limit(
    "max_ratio",
    1e4,
    "median ‖grad_output‖ of the first tenth of the layers over the greatest of the last tenth",
    "networks of torchvision in train mode stay below 200",
    "exploding",
)
def exploding_gradient(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """Gradients grow on the way back to the first layers.

    ‖grad_output‖ grows from the last layers to the first, so one step can throw the first layers off. Causes: too large
    an initialisation, missing normalisation, recurrence without clipping. In eval mode with untrained BatchNorm, which
    does not normalise, it is a warning.
    """
    # Outputs are compared, because in a deep linear network with too large weights all ‖g‖/‖w‖ are equally too large.
    # The greatest of the last tenth is taken because small branches at the end would make the beginning look large.
    gradients = required(measured.gradients)
    rows = [row for row in arrived_outputs(gradients) if _is_positive(row.gradient.l2)]
    idle = _batch_norm_is_idle(gradients)
    remark = " BatchNorm is untrained and does not normalise yet; use train mode." if idle else ""
    trends = [*_recurrences(gradients), _of_outputs("layers", rows)]
    for finding in _beyond(terms.limit("max_ratio"), gt, [(trend, trend.ratio(max)) for trend in trends]):
        yield RuleFinding(finding.target, finding.message + remark, "warn" if idle else "fail")


@rule("unused-parameter", "off", "gradients")
def unused_parameter(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """Trainable parameters never get a gradient.

    The loss does not depend on them: they never train, and DistributedDataParallel needs `find_unused_parameters=True`
    for them. Use, remove or freeze them. Heads that are used only in training appear unused in eval mode.
    """
    gradients = required(measured.gradients)
    trainable = [parameter for parameter in gradients.parameters if parameter.trainable]
    by_reason: dict[str, list[ParameterRow]] = {}
    for row in trainable:
        if row.status in ("not reached", "no gradient path") and terms.is_on(parameter_of(row)):
            by_reason.setdefault(_why_unused(row, gradients), []).append(row)
    for reason, unused in by_reason.items():
        names = [row.name for row in unused]
        share = f"{len(names)} of {counted(len(trainable), 'trainable parameter')}"
        never = f"never get{'s' if len(names) == 1 else ''} a gradient (limit 0)"
        message = f"{share} {never}: {reason}: {listed(names)}."
        target = parameter_of(unused[0]) if len(unused) == 1 else _module_around(names, gradients)
        yield RuleFinding(target, message, "warn")


def _why_unused(parameter: ParameterRow, gradients: Gradients) -> str:
    if parameter.status == "no gradient path":
        return "autograd does not track what is computed with them (no_grad, detach)"
    module = parameter.layer
    rows = [gradient for gradient in gradients.gradients if gradient.role == "output" and module_of(gradient) == module]
    if any(uncalled.layer == module and not uncalled.reason.startswith("called as") for uncalled in gradients.uncalled):
        return "their layers were never called"
    if rows and all(row.status == "no gradient path" for row in rows):
        if all("without gradients" in row.remark for row in rows):
            return (
                "what their layers return was computed without gradients (no_grad, or a reentrant checkpoint none of"
                " whose inputs requires one)"
            )
        return "what their layers return is cut off (no_grad, detach)"
    return "no path leads from the loss to them: it does not depend on them, or the path is cut (detach, no_grad)"


@rule("gradient-imbalance", "off", "gradients", (*_CAUSES, "vanishing-gradient"))
@limit(
    "max_ratio",
    1e6,
    "greatest ‖g‖/‖w‖ of the weights over the smallest",
    "networks of torchvision in train mode stay below 500000, ConvNeXt apart",
    "imbalance",
)
def gradient_imbalance(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """One learning rate must serve weights with far different relative gradients.

    If ‖g‖/‖w‖ differs by orders of magnitude between weights, one learning rate makes some weights diverge before
    others move. Use an adaptive optimiser, such as Adam, or a learning rate per group of parameters. Biases, scales and
    zero weights do not count, and a vanishing gradient is not reported twice.
    """
    # Biases and scales start at 0 or 1 in any layer, and a bias before BatchNorm gets only rounding. Networks with
    # untrained BatchNorm in eval mode are not judged: it starves squeeze-and-excitation weights (1e-13 in mobilenet_v3,
    # but not in train mode). Weights that serve idle heads, such as a detector's level without an object, get only a
    # part of the gradient, and are left out.
    gradients, limit = required(measured.gradients), terms.limit("max_ratio")
    partly_fed = _serving_idle(gradients)
    weights = [] if _batch_norm_is_idle(gradients) else _weights(gradients)
    fully_fed = (row for row in weights if row.layer not in partly_fed and terms.is_on(parameter_of(row)))
    ranked = sorted(fully_fed, key=lambda row: (row.ratio or 0.0, row.name))
    if len(ranked) < _SHORTEST_TREND:
        return
    smallest, greatest = (row.ratio or 0.0 for row in (ranked[0], ranked[-1]))
    if greatest / smallest > limit:
        message = (
            f"‖g‖/‖w‖ differs {figure(greatest / smallest)} times between weights (limit {figure(limit)}):"
            f" {figure(smallest)} at '{ranked[0].name}', {figure(greatest)} at '{ranked[-1].name}'."
        )
        yield RuleFinding(parameter_of(ranked[0]), message, "warn")


@dataclass(frozen=True, slots=True)
class _Trend:
    """Positive values of a measure in forward order; `things` is the targets' noun in the plural."""

    measure: str
    things: str
    targets: Sequence[FindingTarget]
    values: Sequence[float]

    def ratio(self, of_last: Callable[[Sequence[float]], float]) -> float | None:
        """Return the median of the first tenth over `of_last` of the last tenth; None for too few values."""
        if len(self.values) < _SHORTEST_TREND:
            return None
        ratio = median(self.values[: self._tenth]) / of_last(self.values[-self._tenth :])
        return max(ratio, sys.float_info.min)  # above 0, because its logarithm is taken

    @property
    def _tenth(self) -> int:
        return max(1, round(len(self.values) / 10))

    def sentence(self, ratio: float, limit: float) -> str:
        """Return a sentence on the change of the measure from last to first: even, or mostly in one step."""
        steps = [math.log(early) - math.log(late) for early, late in pairwise(self.values)]
        change = math.log(ratio)
        steepest = max(range(len(steps)), key=lambda step: steps[step] * math.copysign(1, change))
        if change and steps[steepest] / change > 0.5:
            late, early = self.targets[steepest + 1].where, self.targets[steepest].where
            step = self.values[steepest] / self.values[steepest + 1]
            where = f"most of it, {figure(step)}, from '{late}' to '{early}'"
        else:
            count = len(self.values) - self._tenth
            where = f"about {figure(math.exp(change / count), 3)} at each of {count} steps"
        first, last = self.targets[0].where, self.targets[-1].where
        return (
            f"{self.measure} {'shrinks' if change < 0 else 'grows'} to {figure(ratio)} times its size"
            f" (limit {figure(limit)}) from the last {self.things} to the first, '{last}' to '{first}': {where}."
        )


def _beyond(
    limit: float, is_beyond: Callable[[float, float], bool], trends: Iterable[tuple[_Trend, float | None]]
) -> Iterable[RuleFinding]:
    """Report trends with a ratio beyond the limit; only the first of trends that begin at one place."""
    by_place: dict[str, RuleFinding] = {}
    for trend, ratio in trends:
        if ratio is not None and is_beyond(ratio, limit):
            first = trend.targets[0]
            by_place.setdefault(first.where, RuleFinding(first, trend.sentence(ratio, limit)))
    return by_place.values()


def _serving_idle(gradients: Gradients) -> set[str]:
    """Return the layers with an output that an idle module uses, or that leads only to such layers."""
    outputs = arrived_outputs(gradients)
    idle = idle_modules(outputs)
    serving: set[str] = set()
    layers = set()
    for row in reversed(outputs):
        taken_by = set(row.taken_by or ())
        if taken_by & idle or (taken_by and taken_by <= serving):
            serving.add(row.label)
            layers.add(row.layer)
    return layers


def _learning(gradients: Gradients) -> _Trend:
    """Return the trend of ‖g‖/‖w‖ of weights; for a frozen network, of ‖g‖·‖x‖ of outputs, which behaves alike."""
    weights = _weights(gradients)
    if len(weights) >= _SHORTEST_TREND:
        return _Trend("‖g‖/‖w‖", "weights", [*map(parameter_of, weights)], [weight.ratio or 0.0 for weight in weights])
    positive = [(output_of(row), effect) for row, effect in effects_of(gradients) if _is_positive(effect)]
    return _Trend("‖g‖·‖x‖", "outputs", [target for target, _ in positive], [effect for _, effect in positive])


def _recurrences(gradients: Gradients) -> Iterator[_Trend]:
    """Yield the trend of ‖grad_output‖ over the calls of each layer with weights and many calls with one shape."""
    weighted = {parameter.layer for parameter in gradients.parameters}
    by_layer: dict[tuple[str, str, tuple[int, ...]], list[GradientRow]] = {}
    for row in arrived_outputs(gradients):
        if _is_positive(row.gradient.l2) and row.layer in weighted:
            by_layer.setdefault((row.layer, row.slot, row.gradient.shape), []).append(row)
    for rows in by_layer.values():
        if len(rows) >= _SHORTEST_RECURRENCE:
            yield _of_outputs("calls", rows)


def _of_outputs(things: str, rows: Sequence[GradientRow]) -> _Trend:
    return _Trend("‖grad_output‖", things, [*map(output_of, rows)], [row.gradient.l2 or 0.0 for row in rows])


def _module_around(parameters: Sequence[str], gradients: Gradients) -> FindingTarget:
    paths = zip(*(parameter.split(".")[:-1] for parameter in parameters), strict=False)
    name = ".".join(parts[0] for parts in takewhile(lambda parts: len({*parts}) == 1, paths))
    row = next((row for row in gradients.rows if row.label == name), None)
    return output_of(row) if row else FindingTarget(name, (name,) if name else ())


def _weights(gradients: Gradients) -> list[ParameterRow]:
    return [
        row
        for row in in_forward_order(gradients)
        if row.is_matrix and _is_positive(row.ratio) and not non_finite_count(row.gradient)
    ]


def _batch_norm_is_idle(gradients: Gradients) -> bool:
    """Tell whether BatchNorm, in eval mode with initial scales, returns its input nearly unchanged."""
    scales = [row for row in gradients.parameters if "BatchNorm" in row.kind and row.name.endswith("weight")]
    starts = ((scale.weight_l2, math.sqrt(math.prod(scale.gradient.shape))) for scale in scales)
    started = (l2 is not None and (l2 == 0 or math.isclose(l2, start, rel_tol=1e-6)) for l2, start in starts)
    return gradients.mode == "eval" and bool(scales) and all(started)


def _is_positive(value: float | None) -> bool:
    return value is not None and 0 < value < math.inf
