"""A training step in progress, and its record once its numbers have arrived from the device."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from torch import Tensor

from hookscope.commands.watch.gradients import GradientReading, Transfer
from hookscope.commands.watch.loss_graph import LossOperations
from hookscope.commands.watch.outside_writes import OutsideChange, OutsideReading
from hookscope.commands.watch.parameters import ParameterMeasurement
from hookscope.results.training import TrainingStep

_LARGEST = 10

PlacedLoss = tuple[str, float | Tensor]
"""The place where `backward` was called, "train.py:9", and the loss; the place is "" for a loss passed to `step`."""


@dataclass(slots=True)
class StepInProgress:
    """The observations of a step so far.

    Attributes:
        losses: Several if gradients are accumulated, or if `backward` is called at several places.
        readings: By `id` of the optimiser.
        stepped: `id` of the optimisers that have stepped, or skipped the step.
        clips: Parameters by `id`, and the L2 norm of their gradients before clipping.
        skipped: `id` of the optimisers whose step a GradScaler has skipped.
        reason: Why the step is measured in full; "" if it is not.
        bad_weights: Weights that were not finite before the step; None if they were not examined. They are examined if
            gradients on the CPU are not finite.
        bad_input: Which layer's input held NaN or Inf, see `broken_input`; "" if unknown.
        is_belated: Whether its forward pass had run before the previous step ended.
        is_called_early: Whether `step` was called for it before an optimiser stepped.
        given_number: The loop's own number, if it was given before an optimiser stepped.
        edited: Parameters that an edit keeps frozen, or whose gradient it changes.
        edits: As in `TrainingStep`.
        operations: The operations of the losses, by the place of `backward`.
        unreset: How many steps in a row, up to this one, got gradients that contain those of the step before.
        below_zero: Why the loss is wrong if it is below 0, "" if it is not known; None if the graph was not read.
        outside: Weights that may have been changed since the last step, by something other than an optimiser.
    """

    number: int
    reason: str = ""
    losses: list[PlacedLoss] = field(default_factory=list)
    readings: dict[int, GradientReading] = field(default_factory=dict)
    stepped: set[int] = field(default_factory=set)
    clips: list[tuple[frozenset[int], Tensor]] = field(default_factory=list)
    skipped: set[int] = field(default_factory=set)
    measurement: ParameterMeasurement | None = None
    bad_weights: list[str] | None = None
    bad_input: str = ""
    is_belated: bool = False
    is_called_early: bool = False
    given_number: int | None = None
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
        by_optimizer: dict[int, dict[str, float]] = {}
        rates: list[float] = []
        skipped, largest_scale = {*self.skipped}, 1.0
        for key, reading in self.readings.items():
            norms = reading.norms if isinstance(reading.norms, list) else [*islice(numbers, len(reading.names))]
            scale = 1.0 if reading.scale is None else next(numbers)
            if reading.found_inf is not None and next(numbers) > 0:
                skipped.add(key)
            rates += [next(numbers) if isinstance(rate, Tensor) else float(rate) for rate in reading.rates]
            by_optimizer[key] = dict(zip(reading.names, [norm / scale for norm in norms], strict=True))
            largest_scale = scale if reading.scale is not None else largest_scale
        clips = [(clipped, next(numbers) / largest_scale) for clipped, _ in self.clips]
        losses = [(at, next(numbers) if isinstance(scalar, Tensor) else float(scalar)) for at, scalar in self.losses]
        loss, by_place = _loss(losses)
        changes = [change for reading in self.outside for change in reading.changes(numbers)]
        stepped = self.readings.keys() - skipped or self.readings.keys()
        by_name = {name: norm for key in self.readings if key in stepped for name, norm in by_optimizer[key].items()}
        record = TrainingStep(
            step=self.number,
            loss=loss,
            gradient_norm=math.hypot(*by_name.values()) if by_name else None,
            norm_before_clipping=_before_clipping(by_name, [self.readings[key] for key in stepped], clips),
            largest=_largest(by_name),
            learning_rates=tuple(rates),
            skipped=bool(skipped) and skipped >= self.readings.keys(),
            losses=by_place,
            edits=self.edits,
        )
        left_out = {key: read for key, read in by_optimizer.items() if key in skipped}
        return ArrivedStep(self, record, by_name, left_out, changes)


@dataclass(frozen=True, slots=True)
class ArrivedStep:
    """A step with its numbers.

    Attributes:
        norms: L2 norms of gradients, by name of the parameter; without those of optimisers that skipped the step,
            unless all of them did.
        skipped: The norms of each optimiser whose step a GradScaler has skipped, by `id`.
        outside: The numbers of `StepInProgress.outside`.
    """

    step: StepInProgress
    record: TrainingStep
    norms: Mapping[str, float]
    skipped: Mapping[int, Mapping[str, float]]
    outside: Sequence[OutsideChange] = ()

    @property
    def broken(self) -> list[str]:
        """Parameters whose gradient is not finite."""
        return [] if math.isfinite(self.record.gradient_norm or 0.0) else not_finite(self.norms)

    @property
    def zero(self) -> list[str]:
        """Parameters whose gradient is exactly 0, except those that an edit changes."""
        return [name for name, norm in self.norms.items() if norm == 0 and name not in self.step.edited]

    @property
    def is_broken(self) -> bool:
        """Whether its NaN or Inf has a cause other than a GradScaler's scale, which never makes the loss NaN."""
        return not is_finite(self.record) and (not self.record.skipped or math.isnan(self.record.loss or 0.0))


def is_finite(record: TrainingStep) -> bool:
    """Tell whether the loss and gradient norm of a step are finite, as far as they are known."""
    loss, norm = record.loss, record.gradient_norm
    return (loss is None or math.isfinite(loss)) and (norm is None or math.isfinite(norm))


def not_finite(norms: Mapping[str, float]) -> list[str]:
    """Return the names of the norms that are NaN or Inf."""
    return [name for name, norm in norms.items() if not math.isfinite(norm)]


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
    norms: Mapping[str, float], readings: Iterable[GradientReading], clips: Sequence[tuple[frozenset[int], float]]
) -> float | None:
    """Return the norm over all gradients before clipping; for clipped gradients, before their first clipping."""
    if not clips:
        return None
    ids = {
        name: id(tensor) for reading in readings for name, tensor in zip(reading.names, reading.parameters, strict=True)
    }
    clipped: set[int] = set()
    parts: list[float] = []
    for members, norm in clips:
        if not members <= clipped and not members.isdisjoint(ids.values()):
            parts.append(norm)
            clipped |= members
    return math.hypot(*parts, *(norm for name, norm in norms.items() if ids[name] not in clipped))


def _largest(norms: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    is_nan = math.isnan(sum(norms.values()))  # NaN first
    sizes = {name: math.inf if math.isnan(norm) else norm for name, norm in norms.items()} if is_nan else norms
    return tuple([(name, norms[name]) for name in sorted(norms, key=sizes.__getitem__, reverse=True)[:_LARGEST]])
