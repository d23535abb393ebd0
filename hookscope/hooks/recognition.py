"""Recognise tensors that an earlier module returned, and calls that checkpointing repeats, within one forward pass.

A module that returns its input shows a tensor again. When gradients are watched, outputs are replaced by aliases or
copies with the same values: these still count as the same tensor.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor

from hookscope.hooks.observed import RowKey, physical

_Known = tuple[weakref.ref[Tensor], int, list[RowKey]]
"""A tensor, its version, and the place that showed it first, [] before that; its replacements share the list."""


@dataclass(slots=True)
class Identities:
    """The tensors of one forward pass, each until it is written to. Inference tensors are not recognised.

    Attributes:
        by_id: The tensors by `id`.
    """

    by_id: dict[int, _Known] = field(default_factory=dict)

    def show(
        self, place: RowKey, tensor: Tensor, inputs: Sequence[tuple[str, Tensor]], *, in_place: bool
    ) -> tuple[bool, RowKey | None]:
        """Record that a call returns a tensor; `in_place` tells whether the call overwrote one of its `inputs`.

        Returns:
            Whether the output is an unchanged input; if so, where it was first shown, None if that is here.
        """
        if tensor.is_inference():
            return False, None
        records = self.by_id
        entry = records.get(id(tensor))  # `_find` and `_add` inlined: this runs at every call of every module
        shown = entry[2] if entry is not None and entry[0]() is tensor and entry[1] == tensor._version else None
        passed_through = False
        if not in_place:
            for _, argument in inputs:
                passed_through |= argument is tensor or (shown is not None and self._find(argument) is shown)
        if shown is None:
            records[id(tensor)] = (weakref.ref(tensor), tensor._version, [place])
        elif not shown:
            shown.append(place)
        elif passed_through:
            return True, shown[0]
        return passed_through, None

    def replaced(self, before: Sequence[tuple[str, Tensor]], after: Sequence[tuple[str, Tensor]]) -> None:
        """Record that tensors were replaced for the rest of the network; some may be the same objects."""
        replacements = dict(after)
        for path, original in before:
            ours = replacements.get(path, original)
            if ours is not original and not (original.is_inference() or ours.is_inference()):
                shown = self._find(original)
                if shown is None:
                    self._add(original, shown := [])
                self._add(ours, shown)

    def sources(
        self, inputs: Sequence[tuple[str, Tensor]], names: Mapping[int, str], *, overwritten: bool = False
    ) -> tuple[RowKey | str, ...]:
        """Return the place that showed each input first, or its name if no call returned it; for a view, of its base.

        Args:
            inputs: Inputs of one call.
            names: Names of the tensors that no call returns, by `id`; "" for unnamed ones.
            overwritten: Whether the call has written to the inputs already.
        """
        sources: list[RowKey | str] = []
        for _, tensor in inputs:
            viewed: Tensor | None = tensor
            while viewed is not None:
                entry = self.by_id.get(id(viewed))
                is_known = entry is not None and entry[0]() is viewed and entry[2]
                if entry is not None and is_known and (overwritten or entry[1] == viewed._version):
                    sources.append(entry[2][0])
                    break
                name = names[id(viewed)]
                viewed = None if name or viewed.is_inference() else viewed._base
            else:
                sources.append(name)
        return tuple(sources)

    def _find(self, tensor: Tensor) -> list[RowKey] | None:
        entry = self.by_id.get(id(tensor))
        if entry is None or entry[0]() is not tensor or entry[1] != tensor._version:
            return None
        return entry[2]

    def _add(self, tensor: Tensor, shown: list[RowKey]) -> None:
        self.by_id[id(tensor)] = (weakref.ref(tensor), tensor._version, shown)


@dataclass(slots=True)
class Replays:
    """The calls of one forward pass that ran without gradients, which reentrant checkpointing may run again with them.

    `_calls` maps the position of a call to its layer, its number and the addresses of its inputs, until it is replayed.
    """

    _calls: dict[int, tuple[str, int, list[int]]] = field(default_factory=dict)
    _places: Iterator[int] = field(default_factory=count)
    _next: int = -1

    def note(self, layer: str, call: int, inputs: Sequence[tuple[str, Tensor]]) -> None:
        """Record a call without gradients, which may be replayed with them."""
        self._calls[next(self._places)] = (layer, call, _addresses(inputs))

    def call_of(self, layer: str, inputs: Sequence[tuple[str, Tensor]]) -> int | None:
        """Return the number of the call being replayed; None if it was watched when it first ran.

        Calls of one checkpoint are replayed in their original order, starting with the input that it has saved;
        checkpoints are replayed from the last to the first.
        """
        place = self._next
        if place not in self._calls or self._calls[place][0] != layer:
            waiting = [at for at, (of_layer, _, _) in self._calls.items() if of_layer == layer]
            if not waiting:
                return None
            addresses = _addresses(inputs)
            place = ([at for at in waiting if self._calls[at][2] == addresses] or waiting)[-1]
        self._next = place + 1
        return self._calls[place][1]

    def watched(self, layer: str, call: int) -> None:
        """Record that a replay has shown the output of a call."""
        self._calls = {at: noted for at, noted in self._calls.items() if noted[:2] != (layer, call)}


def _addresses(inputs: Sequence[tuple[str, Tensor]]) -> list[int]:
    return [_address(physical(tensor)[0]) for _, tensor in inputs]


def _address(tensor: Tensor) -> int:
    """Return where a tensor lies in memory; 0 for one without memory of its own, such as a sparse or wrapping one."""
    try:
        return tensor.data_ptr() if tensor.layout == torch.strided else 0
    except RuntimeError:
        return 0
