"""The losses of backward passes since the last step of an optimiser, without those whose gradients were dropped."""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hookscope.commands.watch.steps import PlacedLoss


@dataclass(slots=True)
class LossesToCome:
    """The losses whose gradients the next step of an optimiser may use.

    A script drops gradients if it skips a batch, or runs `backward` to find other inputs or weights first. One that
    keeps the gradients of several losses, and steps with a mixture of them, drops them too, but puts others in place.

    Attributes:
        losses: In the order of their backward passes.
    """

    losses: list[PlacedLoss] = field(default_factory=list)
    _dropped: list[PlacedLoss] = field(default_factory=list)
    _parameters: Sequence[Tensor] = ()  # which the latest backward pass may have reached
    _left: list[weakref.ref[Tensor] | None] = field(default_factory=list)  # the gradients that this pass left
    _are_zero: bool = False  # whether they are all 0

    def backward_begins(self, loss: PlacedLoss, parameters: Sequence[Tensor]) -> None:
        """Add the loss of a pass that may reach `parameters`; set earlier losses aside if their gradients are gone."""
        if self.losses and self._parameters and not self._are_zero and lack_gradients(self._parameters):
            self._dropped += self.losses
            self.losses.clear()
        self.losses.append(loss)
        self._parameters = parameters

    def backward_ended(self) -> None:
        """Note the gradients that a pass has left."""
        self._are_zero = lack_gradients(self._parameters)
        if self._dropped:
            gradients = [parameter.grad for parameter in self._parameters]
            self._left = [None if gradient is None else weakref.ref(gradient) for gradient in gradients]

    def taken(self) -> list[PlacedLoss]:
        """Return the losses of a step that begins, and forget all."""
        left = [reference and reference() for reference in self._left]
        are_left = all(parameter.grad is gradient for parameter, gradient in zip(self._parameters, left, strict=False))
        losses = [*(() if are_left else self._dropped), *self.losses]
        self.clear()
        return losses

    def clear(self) -> None:
        """Forget all losses."""
        self.losses.clear()
        self._dropped.clear()
        self._left.clear()
        self._parameters = ()


def lack_gradients(parameters: Iterable[Tensor]) -> bool:
    """Tell whether no parameter has a gradient, or only zeros, as far as this is known without waiting.

    Sharded gradients are not read: the other processes would have to read theirs.
    """
    gradients = [gradient for parameter in parameters if (gradient := parameter.grad) is not None]
    return all(
        type(gradient) is Tensor and gradient.is_cpu and gradient.layout is torch.strided and not gradient.any()
        for gradient in gradients
    )
