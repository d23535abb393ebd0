"""Tell which call of the forward pass activation checkpointing runs again in the backward pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class _UnwatchedCall:
    """A call that ran without gradients, which reentrant checkpointing may run again in the backward pass."""

    layer: str
    call: int
    addresses: list[int]
    replayed: bool = False


@dataclass(slots=True)
class Replays:
    """The calls of one forward pass that ran without gradients, in order."""

    _calls: list[_UnwatchedCall] = field(default_factory=list)
    _next: int | None = None

    def note(self, layer: str, call: int, inputs: Sequence[tuple[str, Tensor]]) -> None:
        """Remember a call that begins while gradients are off: it may be replayed with them."""
        self._calls.append(_UnwatchedCall(layer, call, _addresses(inputs)))

    def call_of(self, layer: str, inputs: Sequence[tuple[str, Tensor]]) -> int | None:
        """Return which call of the forward pass is being replayed; None if it was watched when it first ran.

        Within one checkpoint the calls come in their first order; a checkpoint begins with the input it has kept in
        memory; and checkpoints are replayed from the last to the first.
        """
        following = self._next
        if following is not None and following < len(self._calls):
            expected = self._calls[following]
            if expected.layer == layer and not expected.replayed:
                self._next = following + 1
                return expected.call
        waiting = [at for at, each in enumerate(self._calls) if each.layer == layer and not each.replayed]
        if not waiting:
            return None
        addresses = _addresses(inputs)
        same = [at for at in waiting if self._calls[at].addresses == addresses]
        found = (same or waiting)[-1]
        self._next = found + 1
        return self._calls[found].call

    def watched(self, layer: str, call: int) -> None:
        """Note that a replay has shown what a call returned."""
        for each in self._calls:
            each.replayed |= (each.layer, each.call) == (layer, call)


def _addresses(inputs: Sequence[tuple[str, Tensor]]) -> list[int]:
    return [tensor.data_ptr() if tensor.layout == torch.strided else 0 for _, tensor in inputs]
