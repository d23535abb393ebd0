"""Which tensors of a network share memory, so that loading one of them loads the others."""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor, nn


class SharedMemory:
    """The tensors of a state dict that lie in one storage with another of them: tied weights, and views of weights."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        """Look which tensors share a storage."""
        by_storage: dict[int, dict[str, Tensor]] = {}
        for name, value in state.items():
            if (storage := _storage(value)) is not None:
                by_storage.setdefault(storage, {})[name] = value
        self._neighbours = {name: held for held in by_storage.values() if len(held) > 1 for name in held}

    def filled(self, names: Iterable[str], loaded: AbstractSet[str]) -> set[str]:
        """Return those of `names` all of whose elements are also elements of tensors that were loaded."""
        complete = set()
        for name in names:
            held = self._neighbours.get(name, {})
            others = [held[neighbour] for neighbour in held if neighbour in loaded]
            if others and _bytes_taken(held[name], others).all():
                complete.add(name)
        return complete

    def overwritten(self, values: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
        """Return the names whose given values are not in memory now, each with the given names that overwrote it."""
        relevant = {name: held for name, held in self._neighbours.items() if name in values}
        kept = {name for name, held in relevant.items() if _holds(held[name], values[name])}
        return [
            (
                name,
                [
                    neighbour
                    for neighbour in held
                    if neighbour in kept and _bytes_taken(held[name], [held[neighbour]]).any()
                ],
            )
            for name, held in relevant.items()
            if name not in kept
        ]


def _storage(value: object) -> int | None:
    """Return what identifies the storage of a dense tensor; None for what shares no memory by element."""
    if not (isinstance(value, Tensor) and type(value) in (Tensor, nn.Parameter)):  # others may have no storage
        return None
    if value.layout is not torch.strided or value.is_quantized or value.is_nested or not value.numel():
        return None
    return int(value.untyped_storage()._cdata)  # noqa: SLF001 - on the meta device all addresses are 0


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()


def _bytes_taken(tensor: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Return for each byte of a tensor whether it is also a byte of one of the others."""
    if any(_place(other) == _place(tensor) for other in others):
        return torch.ones(1, dtype=torch.bool, device="cpu")
    taken = torch.zeros(tensor.untyped_storage().nbytes(), dtype=torch.bool, device="cpu")
    for other in others:
        _bytes_of(other, taken).fill_(True)
    return _bytes_of(tensor, taken)


def _bytes_of(tensor: Tensor, taken: Tensor) -> Tensor:
    item = tensor.element_size()
    # The elements along an expanded axis are one in memory.
    sizes = [size if stride else 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    strides = [stride * item for stride in tensor.stride()]
    return taken.as_strided([*sizes, item], [*strides, 1], tensor.storage_offset() * item)


def _holds(tensor: Tensor, values: object) -> bool:
    """Tell whether a tensor has the bits that copying the given values into it leaves; True without values."""
    if tensor.is_meta or not isinstance(values, Tensor) or values.is_meta:
        return True
    pair = (tensor.detach(), torch.empty_like(tensor).copy_(values))
    return torch.equal(*(side.contiguous().view(-1).view(torch.uint8) for side in pair))
