"""Judge how gradients change over depth and between parameters."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from hookscope.checks.verdicts.flow import idle_modules
from hookscope.checks.verdicts.limits import Limits
from hookscope.checks.verdicts.reading import arrived_outputs, batch_norm_is_idle, is_positive, key, owner, weights
from hookscope.results.gradients import GradientRow, Gradients, Verdict
from hookscope.results.labels import row_label

# Fewer weights or layers are no trend, and fewer calls of one layer are no recurrence. Our choice.
_SHORTEST_TREND = 3
_SHORTEST_RECURRENCE = 8


@dataclass(frozen=True, slots=True)
class _Trend:
    """Positive values in forward order, and whose they are.

    Attributes:
        measure: What the values are.
        things: Of what, in the plural.
        names: One a value.
        values: Greater than zero.
    """

    measure: str
    things: str
    names: Sequence[str]
    values: Sequence[float]

    def ratio(self, of_last: Callable[[Sequence[float]], float]) -> float:
        """Return the median of the first tenth over what `of_last` makes of the last tenth; 1 where values are few."""
        if len(self.values) < _SHORTEST_TREND:
            return 1.0
        ratio = median(self.values[: self._tenth]) / of_last(self.values[-self._tenth :])
        return max(ratio, sys.float_info.min)  # never 0, for its logarithm

    @property
    def _tenth(self) -> int:
        return max(1, round(len(self.values) / 10))

    def sentence(self, ratio: float, limit: float) -> str:
        """Say how the measure changes from the last to the first, evenly or most of it in one step."""
        steps = [math.log(early) - math.log(late) for early, late in pairwise(self.values)]
        change = math.log(ratio)
        steepest = max(range(len(steps)), key=lambda step: steps[step] * math.copysign(1, change))
        if steps[steepest] / change > 0.5:
            late, early = self.names[steepest + 1], self.names[steepest]
            step = self.values[steepest] / self.values[steepest + 1]
            where = f"most of it, {step:.1e}, from '{late}' to '{early}'"
        else:
            count = len(self.values) - self._tenth
            where = f"about {math.exp(change / count):.3g} at each of {count} steps"
        return (
            f"{self.measure} {'shrinks' if change < 0 else 'grows'} to {ratio:.1e} times its size (limit {limit:.0e})"
            f" from the last {self.things} to the first, '{self.names[-1]}' to '{self.names[0]}': {where}."
        )


def vanishing_gradient(inspection: Gradients, limits: Limits) -> Iterable[Verdict]:
    """Object when the first weights learn far slower than the last: medians of ‖g‖/‖w‖ over a tenth at either end.

    ‖g‖/‖w‖ is what a step of gradient descent changes, relative to what is there. It is flat over depth in healthy
    networks, also where activations shrink or grow, as ‖grad_output‖ is not: scaling one layer's weights scales the
    gradients of the outputs before it only, but those of all other weights alike. The median over a tenth spans skip
    connections and branches that start small.

    A layer applied again and again, as in a recurrence, has one gradient for all its calls; those of its outputs are
    compared instead.
    """
    found: dict[str, Verdict] = {}
    for trend in (*_recurrences(inspection), _learning(inspection)):
        ratio = trend.ratio(median)
        if ratio < limits.vanishing:
            message = trend.sentence(ratio, limits.vanishing)
            found.setdefault(trend.names[0], Verdict("vanishing-gradient", "fail", trend.names[0], message))
    return found.values()


def exploding_gradient(inspection: Gradients, limits: Limits) -> Iterable[Verdict]:
    """Object when gradients grow on the way back: median ‖grad_output‖ of the first tenth over the greatest at the end.

    Here outputs are compared, for in a deep linear network with too large weights all ‖g‖/‖w‖ are alike, and all too
    large. The greatest of the last tenth keeps small branches at the end from making the beginning look large.
    """
    rows = [row for row in arrived_outputs(inspection) if is_positive(row.gradient.l2)]
    idle = batch_norm_is_idle(inspection)
    remark = " BatchNorm does not normalise yet, being untrained; judge in train mode." if idle else ""
    found: dict[str, Verdict] = {}
    for trend in (*_recurrences(inspection), _of_outputs("layers", rows)):
        ratio = trend.ratio(max)
        if ratio > limits.exploding:
            message = trend.sentence(ratio, limits.exploding) + remark
            verdict = Verdict("exploding-gradient", "warn" if idle else "fail", trend.names[0], message)
            found.setdefault(trend.names[0], verdict)
    return found.values()


def gradient_imbalance(inspection: Gradients, limits: Limits) -> Iterator[Verdict]:
    """Object when one learning rate must serve weights whose ‖g‖/‖w‖ lie far apart.

    Biases and scales are left out: they start at 0 or 1 whatever their layer does, and a bias before BatchNorm gets
    rounding. Untrained BatchNorm in eval mode is not judged: it starves squeeze-and-excitation weights (1e-13 in
    mobilenet_v3, nothing of it in train mode). Nor are weights that serve idle heads, and get a part of the gradient
    only: those of a detector's level without an object.
    """
    partly_fed = _serving_idle(inspection)
    known = [] if batch_norm_is_idle(inspection) else weights(inspection)
    candidates = [each for each in known if owner(each) not in partly_fed]
    if len(candidates) < _SHORTEST_TREND:
        return
    ranked = sorted((each.ratio or 0.0, each.name) for each in candidates)
    (smallest, starved), (greatest, fed) = ranked[0], ranked[-1]
    if greatest / smallest > limits.imbalance:
        message = (
            f"‖g‖/‖w‖ differs {greatest / smallest:.1e} times between weights (limit {limits.imbalance:.0e}):"
            f" {smallest:.1e} at '{starved}', {greatest:.1e} at '{fed}'."
        )
        yield Verdict("gradient-imbalance", "warn", starved, message)


def _serving_idle(inspection: Gradients) -> set[str]:
    """Return the layers one of whose outputs is taken by a module that is idle at that call, or leads to such alone."""
    outputs = arrived_outputs(inspection)
    idle = {row_label(*place) for place in idle_modules(outputs)}
    serving: set[str] = set()
    layers = set()
    for row in reversed(outputs):
        taken_by = set(row.taken_by or ())
        if taken_by & idle or (taken_by and taken_by <= serving):
            serving.add(row.label)
            layers.add(row.layer)
    return layers


def _learning(inspection: Gradients) -> _Trend:
    """Return ‖g‖/‖w‖ of the weights; of a frozen network ‖g‖·‖x‖ of the outputs, which behaves alike."""
    known = weights(inspection)
    if len(known) >= _SHORTEST_TREND:
        return _Trend("‖g‖/‖w‖", "weights", [each.name for each in known], [each.ratio or 0.0 for each in known])
    activations = {key(row): row.activation.l2 or 0.0 for row in inspection.rows}
    effects = [
        (row.label, (row.gradient.l2 or 0.0) * activations.get(key(row), 0.0)) for row in arrived_outputs(inspection)
    ]
    positive = [(label, effect) for label, effect in effects if is_positive(effect)]
    return _Trend("‖g‖·‖x‖", "outputs", [label for label, _ in positive], [effect for _, effect in positive])


def _recurrences(inspection: Gradients) -> Iterator[_Trend]:
    """Return ‖grad_output‖ over the calls of each layer with weights that is called often, always with one shape."""
    weighted = {owner(each) for each in inspection.parameters}
    by_layer: dict[tuple[str, str, tuple[int, ...]], list[GradientRow]] = {}
    for row in arrived_outputs(inspection):
        if is_positive(row.gradient.l2) and row.layer in weighted:
            by_layer.setdefault((row.layer, row.slot, row.gradient.shape), []).append(row)
    for rows in by_layer.values():
        if len(rows) >= _SHORTEST_RECURRENCE:
            yield _of_outputs("calls", rows)


def _of_outputs(things: str, rows: Sequence[GradientRow]) -> _Trend:
    return _Trend("‖grad_output‖", things, [row.label for row in rows], [row.gradient.l2 or 0.0 for row in rows])
