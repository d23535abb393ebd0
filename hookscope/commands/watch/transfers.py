"""Copy numbers from a device without waiting, and read them when they have arrived."""

from collections.abc import Sequence
from functools import cache
from itertools import chain

import torch
from torch import Tensor


class Transfer:
    """Numbers from any devices that are read together; numbers on the CPU are read at once.

    If a device has no events that signal the end of a copy, reading waits for the device.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Start to copy; tensors are scalars and vectors of any real dtype."""
        self._sizes = [tensor.numel() for tensor in tensors]
        self._parts: list[list[float]] = [tensor.reshape(-1).tolist() if tensor.is_cpu else [] for tensor in tensors]
        self._groups: list[tuple[list[int], Tensor, torch.Event | None]] = []
        positions: dict[torch.device, list[int]] = {}
        for position, tensor in enumerate(tensors):
            if not tensor.is_cpu:
                positions.setdefault(tensor.device, []).append(position)
        for device, members in positions.items():
            vector = torch.cat([tensors[position].reshape(-1) for position in members])
            event = None
            if _has_events(device):
                host = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=device.type == "cuda")
                vector = host.copy_(vector, non_blocking=True)
                event = _recorded(device)
            self._groups.append((members, vector, event))

    @property
    def is_complete(self) -> bool:
        """Whether reading would not wait; False for a device without events."""
        return all(vector.is_cpu and (event is None or event.query()) for _, vector, event in self._groups)

    def read(self) -> list[float]:
        """Return the numbers of all tensors, in order, after waiting for them."""
        for members, vector, event in self._groups:
            if event is not None:
                event.synchronize()
            numbers, begin = vector.cpu().tolist(), 0
            for position in members:
                end = begin + self._sizes[position]
                self._parts[position] = numbers[begin:end]
                begin = end
        return [*chain.from_iterable(self._parts)]


def number_of(value: float | Tensor) -> float | Tensor:
    """Return a number, or the only value of a tensor as it is now: a number on the CPU, else a copy on its device."""
    if isinstance(value, Tensor) and not (type(value) is Tensor and value.is_cpu):
        return value.detach().clone().reshape(())
    return float(value)


@cache
def _has_events(device: torch.device) -> bool:
    """Tell whether events of a device can be recorded, queried and waited for."""
    try:
        event = _recorded(device)
        event.query()
        event.synchronize()
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return True


def _recorded(device: torch.device) -> torch.Event:
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event
