"""A training step in progress, and its record once its numbers have arrived from the device."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from torch import Tensor

from hookscope.commands.watch.gradients import GradientReading
from hookscope.commands.watch.loss_graph import LossOperations
from hookscope.commands.watch.outside_writes import OutsideChange, OutsideReading
from hookscope.commands.watch.parameters import ParameterMeasurement
from hookscope.commands.watch.transfers import Transfer
from hookscope.results.training import TrainingStep

_LARGEST = 10

HeardLoss = tuple[str, float | Tensor]
"""The place where `backward` was called, "train.py:9", and the loss; the place is "" for a loss passed to `step`."""


@dataclass(slots=True)
class StepInProgress:
    """The observations of a step so far.

    Attributes:
        losses: Several if gradients are accumulated, or if `backward` is called at several places.
        readings: By `id` of the optimiser.
        stepped: `id` of the optimisers that have stepped, or skipped the step.
        clips: Parameters by `id`, and the L2 norm of their gradients before clipping.
        reason: Why the step is measured in full; "" if it is not.
        bad_weights: Weights that were not finite before the step; None if they were not examined. They are examined if
            gradients on the CPU are not finite.
        bad_input: Which input held NaN or Inf, see `StepInputs.not_finite`; "" if none is known to.
        is_belated: Whether its forward pass had run before the previous step ended.
        edited: Parameters that an edit keeps frozen, or whose gradient it changes.
        edits: As in `TrainingStep`.
        operations: The operations of the losses, by the place of `backward`.
        unreset: How many steps in a row, up to this one, got gradients that contain those of the step before.
        below_zero: Why the loss is wrong if it is below 0, "" if it is not known; None if the graph was not read.
        outside: Weights that may have been changed since the last step, by something other than an optimiser.
    """

    number: int
    reason: str = ""
    losses: list[HeardLoss] = field(default_factory=list)
    readings: dict[int, GradientReading] = field(default_factory=dict)
    stepped: set[int] = field(default_factory=set)
    clips: list[tuple[frozenset[int], Tensor]] = field(default_factory=list)
    skipped: bool = False
    measurement: ParameterMeasurement | None = None
    bad_weights: list[str] | None = None
    bad_input: str = ""
    is_belated: bool = False
    edited: frozenset[str] = frozenset()
    edits: tuple[tuple[str, int], ...] = ()
    operations: dict[str, LossOperations] = field(default_factory=dict)
    unreset: int = 0
    below_zero: str | None = None
    outside: list[OutsideReading] = field(default_factory=list)
    transfer: Transfer | None = None

    def send(self) -> None:
        """Start to copy the numbers from the device."""
        scalars: list[Tensor] = []  # and vectors of norms
        for reading in self.readings.values():
            scalars += [reading.norms] if isinstance(reading.norms, Tensor) else []
            scalars += [tensor for tensor in (reading.scale, reading.found_inf) if tensor is not None]
            scalars += [rate for rate in reading.rates if isinstance(rate, Tensor)]
        scalars += [norm for _, norm in self.clips]
        scalars += [loss for _, loss in self.losses if isinstance(loss, Tensor)]
        scalars += [reading.numbers for reading in self.outside]
        self.transfer = Transfer(scalars) if scalars else None

    @property
    def is_complete(self) -> bool:
        """Whether `arrived` returns without waiting."""
        return self.transfer is None or self.transfer.is_complete

    def arrived(self) -> "ArrivedStep":
        """Return the step with its numbers; waits for them."""
        numbers = iter(() if self.transfer is None else self.transfer.read())
        names: Sequence[str] = ()
        norms: Sequence[float] = ()
        ids: dict[str, int] = {}
        rates: list[float] = []
        skipped, largest_scale = self.skipped, 1.0
        for reading in self.readings.values():
            new_norms = reading.norms
            if isinstance(new_norms, Tensor):
                new_norms = [*islice(numbers, len(reading.names))]
            scale = 1.0 if reading.scale is None else next(numbers)
            skipped |= reading.found_inf is not None and next(numbers) > 0
            rates += [next(numbers) if isinstance(rate, Tensor) else float(rate) for rate in reading.rates]
            new_norms = new_norms if scale == 1 else [norm / scale for norm in new_norms]
            if names:
                both = {**dict(zip(names, norms, strict=True)), **dict(zip(reading.names, new_norms, strict=True))}
                names, norms = [*both], [*both.values()]
            else:
                names, norms = reading.names, new_norms
            if self.clips:
                ids.update(zip(reading.names, map(id, reading.parameters), strict=True))
            largest_scale = scale if reading.scale is not None else largest_scale
        clips = [(clipped, next(numbers) / largest_scale) for clipped, _ in self.clips]
        losses = [(at, next(numbers) if isinstance(scalar, Tensor) else float(scalar)) for at, scalar in self.losses]
        loss, by_place = _loss(losses)
        changes = [change for reading in self.outside for change in reading.changes(numbers)]
        record = TrainingStep(
            step=self.number,
            loss=loss,
            gradient_norm=math.hypot(*norms) if norms else None,
            norm_before_clipping=_before_clipping(names, norms, ids, clips),
            largest=_largest(names, norms),
            learning_rates=tuple(rates),
            skipped=skipped,
            losses=by_place,
            edits=self.edits,
        )
        return ArrivedStep(self, record, names, norms, changes)


@dataclass(frozen=True, slots=True)
class ArrivedStep:
    """A step with its numbers.

    Attributes:
        names: Names of the parameters with a gradient.
        norms: L2 norms of their gradients.
        outside: The numbers of `StepInProgress.outside`.
    """

    step: StepInProgress
    record: TrainingStep
    names: Sequence[str]
    norms: Sequence[float]
    outside: Sequence[OutsideChange] = ()

    @property
    def broken(self) -> list[str]:
        """Parameters whose gradient is not finite."""
        if math.isfinite(self.record.gradient_norm or 0.0):
            return []
        return [name for name, norm in zip(self.names, self.norms, strict=True) if not math.isfinite(norm)]

    @property
    def zero(self) -> list[str]:
        """Parameters whose gradient is exactly 0, except those that an edit changes."""
        if 0 not in self.norms:
            return []
        names = [name for name, norm in zip(self.names, self.norms, strict=True) if norm == 0]
        return [name for name in names if name not in self.step.edited]

    @property
    def is_finite(self) -> bool:
        """Whether the loss and every gradient are finite."""
        loss, norm = self.record.loss, self.record.gradient_norm
        return (loss is None or math.isfinite(loss)) and (norm is None or math.isfinite(norm))


def _loss(losses: Sequence[tuple[str, float]]) -> tuple[float | None, tuple[tuple[str, float], ...]]:
    """Return the loss of a step, and its parts if `backward` was called at several places.

    Losses passed to `step` are averaged. Losses of `backward` are summed, because gradients are those of the sum.
    """
    if not losses:
        return None, ()
    unplaced = [value for place, value in losses if not place]
    if unplaced:
        return sum(unplaced) / len(unplaced), ()
    places: dict[str, float] = {}
    for place, value in losses:
        places[place] = places.get(place, 0.0) + value
    return sum(places.values()), tuple(places.items()) if len(places) > 1 else ()


def _before_clipping(
    names: Sequence[str], norms: Sequence[float], ids: Mapping[str, int], clips: Sequence[tuple[frozenset[int], float]]
) -> float | None:
    """Return the norm over all gradients before clipping; for clipped gradients, before their first clipping."""
    if not clips:
        return None
    clipped: set[int] = set()
    parts: list[float] = []
    for members, norm in clips:
        if not members <= clipped:
            parts.append(norm)
            clipped |= members
    parts += [norm for name, norm in zip(names, norms, strict=True) if ids[name] not in clipped]
    return math.hypot(*parts)


def _largest(names: Sequence[str], norms: Sequence[float]) -> tuple[tuple[str, float], ...]:
    sizes = [math.inf if math.isnan(norm) else norm for norm in norms] if math.isnan(sum(norms)) else norms
    order = sorted(range(len(norms)), key=sizes.__getitem__, reverse=True)  # NaN first
    return tuple([(names[at], norms[at]) for at in order[:_LARGEST]])
