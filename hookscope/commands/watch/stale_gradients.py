"""Gradients that an optimiser gets again: nothing has reset them, or it steps twice without a backward pass between.

Resets: a backward pass adds to `.grad`. One parameter of each optimiser is examined. Before the first gradient after a
step is added, some values of `.grad` are compared with its values after the step. Before further gradients are added,
`.grad` is only compared with 0: DistributedDataParallel may have replaced it by the mean over processes. After a reset,
the examination ends.

Repeats: the last gradient of an optimiser is examined. A backward pass, a reset or an assignment replaces it or changes
its version; nearly every step compares nothing else. Values are compared only if it seems unchanged: a replayed CUDA
graph, for example, writes without changing the version.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hookscope.commands.watch.gradients import GradientReading, norms_without_waiting, parameters_of, some_values

_VALUES = 64


@dataclass(slots=True)
class _Sample:
    """One parameter of an optimiser, and what its `.grad` held after the last step."""

    parameter: Tensor
    expected: Tensor
    arrivals: int = 0
    is_kept: bool = False  # when the last gradient arrived
    is_reset: bool = False
    handles: list[RemovableHandle] = field(default_factory=list)

    def arrives(self, _gradient: Tensor) -> None:
        """See a gradient that may be added to `.grad`; `torch.autograd.grad` only returns it."""
        held = self.parameter.grad
        try:
            self.is_kept = held is not None and self._is_kept(held)
        except Exception:  # noqa: BLE001 - of a gradient of another kind, and never into a training
            self.is_kept = False

    def added(self, _parameter: Tensor) -> None:
        """Count a gradient that the backward pass of the training has added."""
        self.arrivals += 1
        self.is_reset |= not self.is_kept

    def _is_kept(self, held: Tensor) -> bool:
        """Tell whether `.grad` has not been reset; False for zeros, where that is not known."""
        values = some_values(held, _VALUES)
        return bool(values.any()) and (self.arrivals > 0 or values.equal(self.expected))


def _sample_of(parameters: Sequence[Tensor]) -> _Sample | None:
    """Register hooks on the last parameter with a gradient: near the loss, the gradient is hardly ever 0."""
    for parameter in reversed(parameters):
        gradient = parameter.grad
        if parameter.requires_grad and parameter.is_leaf and gradient is not None and gradient.layout is torch.strided:
            sample = _Sample(parameter, some_values(gradient, _VALUES))
            sample.handles.append(parameter.register_hook(sample.arrives))  # type: ignore[no-untyped-call]
            sample.handles.append(parameter.register_post_accumulate_grad_hook(sample.added))  # type: ignore[no-untyped-call]
            return sample
    return None


Scaler = Literal["", "stepped", "skipped"]


@dataclass(slots=True)
class LastStep:
    """The last step of one optimiser.

    Attributes:
        number: Number of the step.
        reading: Its gradients.
        read_version: Version of the last gradient when it was read, before the step.
        gradient: The last gradient.
        version: Its version after the step.
        is_changed: Whether the gradients may differ from those that were read.
        values: Some values of the first gradient and of the last after the step, if `is_changed`.
        scaler: What a GradScaler did, if it was asked to step.
    """

    number: int
    reading: GradientReading
    read_version: int
    gradient: "weakref.ref[Tensor]"
    version: int
    is_changed: bool = False
    values: list[Tensor] = field(default_factory=list)
    scaler: Scaler = ""

    def ended(self, *, is_changed: bool, scaler: Scaler) -> None:
        """Note the gradient as it is now: an optimiser, an edit or clipping may have changed it."""
        self.scaler = scaler or self.scaler
        held = self.gradient()
        if held is not None:
            self.version = held._version
            unscaled = self.reading.scale is not None  # by a fused optimiser
            self.is_changed |= is_changed or unscaled or self.version != self.read_version
            self.values = self._end_values() if self.is_changed else []

    def seems_unchanged(self) -> bool:
        """Tell whether the gradient is the same tensor, of the same version."""
        held = self.reading.parameters[-1].grad
        return held is not None and held is self.gradient() and held._version == self.version

    def has_same_values(self, optimizer: Optimizer) -> bool:
        """Compare the values; this waits for the device."""
        held = [parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None]
        if len(held) != len(self.reading.parameters):
            return False
        if self.is_changed:
            now = self._end_values()
            return len(now) == len(self.values) > 0 and all(map(_equal, now, self.values))
        return _equal(_as_tensor(norms_without_waiting(held)), _as_tensor(self.reading.norms))

    def _end_values(self) -> list[Tensor]:
        """Return some values of the first gradient and of the last, without sparse gradients."""
        ends = [self.reading.parameters[at].grad for at in (0, -1)]
        return [some_values(end, _VALUES) for end in ends if end is not None and end.layout is torch.strided]


@dataclass(slots=True)
class WatchedOptimizer:
    """One watched optimiser: its step in progress, and what its last step has left in the gradients.

    Attributes:
        depth: Above 1 where a subclass calls its base's `step`.
        repeats: Whether its step in progress repeats the last one.
        has_stepped: Whether it has stepped since a GradScaler was asked to step it.
        last: Its last step; None if gradients have changed under an unchanged version.
        unscaled: The last step, if a GradScaler is about to unscale its gradients again.
        is_clipped_again: Whether gradients are being clipped after it has stepped with them.
        unreset_count: How many steps in a row had gradients that contain those of the step before.
    """

    optimizer: Optimizer
    depth: int = 0
    repeats: bool = False
    has_stepped: bool = False
    last: LastStep | None = None
    unscaled: LastStep | None = None
    is_clipped_again: bool = False
    unreset_count: int = 0
    _leaves_traces: bool = True
    _has_sampled: bool = False
    _sample: _Sample | None = None

    def read(self, reading: GradientReading, number: int) -> None:
        """Note the gradients that the optimiser is about to step with."""
        gradient = reading.parameters[-1].grad if reading.parameters else None
        self.last = None
        if gradient is not None and self._leaves_traces and not gradient.is_inference():
            version = gradient._version
            self.last = LastStep(number, reading, version, weakref.ref(gradient), version)

    def ended(self, *, is_changed: bool = False, scaler: Scaler = "") -> None:
        """Note that it has stepped, or that clipping or a GradScaler has changed its gradients since."""
        if self.last is not None:
            self.last.ended(is_changed=is_changed, scaler=scaler)

    def unchanged_since(self) -> LastStep | None:
        """Return the last step if the gradients have not changed since; else None."""
        if self.last is None or not self.last.seems_unchanged():
            return None
        if not self.last.has_same_values(self.optimizer):
            self.last, self._leaves_traces = None, False
        return self.last

    def count_unreset(self) -> None:
        """Judge the gradients of the step that has just ended, and look at those of the next step."""
        if not self._has_sampled:
            self._has_sampled = True
            self._sample = _sample_of(parameters_of(self.optimizer))
        elif self._sample is not None and self._sample.is_reset:
            self.release()
        elif self._sample is not None:
            held = self._sample.parameter.grad
            if self._sample.arrivals and held is not None:
                self.unreset_count += 1
                self._sample.arrivals = 0
                self._sample.expected = some_values(held, _VALUES)

    def release(self) -> None:
        """Remove the hooks."""
        for handle in self._sample.handles if self._sample is not None else ():
            handle.remove()
        self._sample, self.unreset_count = None, 0


def _equal(values: Tensor, others: Tensor) -> bool:
    is_alike = (values.shape, values.dtype) == (others.shape, others.dtype)
    return is_alike and torch.allclose(values, others, rtol=0, atol=0, equal_nan=True)


def _as_tensor(norms: list[float] | Tensor) -> Tensor:
    return norms if isinstance(norms, Tensor) else torch.tensor(norms, dtype=torch.float64)
