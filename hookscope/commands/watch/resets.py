"""Whether anything resets the gradients between two steps of an optimiser: forgotten `zero_grad` is seen there.

A backward pass adds to `.grad`. One parameter stands for an optimiser's: when the first gradient after a step arrives,
before it is added, some values of `.grad` are compared with those after the step; when further gradients arrive,
`.grad` must not be 0. What it should hold then is not known: DistributedDataParallel replaces it by the mean over
processes. As soon as something resets the gradients once, nothing is looked at any more.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hookscope.commands.watch.gradients import parameters_of

_VALUES = 64


@dataclass(slots=True)
class _Sample:
    """One parameter of an optimiser, and what its `.grad` held after the last step."""

    parameter: Tensor
    expected: Tensor
    arrivals: int = 0
    is_reset: bool = False
    steps: int = 0
    handles: list[RemovableHandle] = field(default_factory=list)

    def arrives(self, _gradient: Tensor) -> None:
        """See a gradient that is about to be added; it runs in the backward pass of the training."""
        held = self.parameter.grad
        self.arrivals += 1
        try:
            self.is_reset = self.is_reset or held is None or not self._is_kept(held)
        except Exception:  # noqa: BLE001 - of a gradient of another kind, and never into a training
            self.is_reset = True

    def _is_kept(self, held: Tensor) -> bool:
        """Tell whether nothing has reset `.grad`; of zeros that is not known, and does not count."""
        if held.layout is not torch.strided:
            return False
        values = some_values(held)
        return bool(values.any()) and (self.arrivals > 1 or values.equal(self.expected))


class GradientResets:
    """Counts for each optimiser the steps in a row whose gradients contain those of the step before."""

    def __init__(self) -> None:
        """Look at no optimiser yet."""
        self._samples: dict[int, _Sample | None] = {}

    @property
    def missing(self) -> int:
        """The greatest count over all optimisers."""
        return max((sample.steps for sample in self._samples.values() if sample is not None), default=0)

    def stepped(self, optimizer: Optimizer) -> None:
        """Judge the gradients that an optimiser has just stepped with, and look at those of its next step."""
        key = id(optimizer)
        sample = self._samples.get(key)
        if sample is None:
            if key not in self._samples:
                self._samples[key] = _sample_of(parameters_of(optimizer))
            return
        if sample.is_reset:
            _release(sample)
            self._samples[key] = None
            return
        held = sample.parameter.grad
        if sample.arrivals and held is not None:
            sample.steps += 1
            sample.arrivals = 0
            sample.expected = some_values(held)

    def release(self) -> None:
        """Leave the parameters without hooks."""
        for sample in self._samples.values():
            if sample is not None:
                _release(sample)
        self._samples.clear()


def _release(sample: _Sample) -> None:
    for handle in sample.handles:
        handle.remove()


def _sample_of(parameters: Sequence[Tensor]) -> _Sample | None:
    """Return the last parameter with a gradient, hooked: near the loss, it is hardly ever 0. Nothing waits."""
    for parameter in reversed(parameters):
        gradient = parameter.grad
        if parameter.requires_grad and parameter.is_leaf and gradient is not None and gradient.layout is torch.strided:
            sample = _Sample(parameter, some_values(gradient))
            sample.handles.append(parameter.register_hook(sample.arrives))  # type: ignore[no-untyped-call]
            return sample
    return None


def some_values(values: Tensor) -> Tensor:
    """Return a copy of the first values."""
    return values.detach().reshape(-1)[:_VALUES].clone()
