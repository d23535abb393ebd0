"""Copy numbers from a device without waiting, and read them when they have arrived."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor


class Transfer:
    """Numbers that are read together: those on a device are copied without waiting, with the others.

    If a device has no events that signal the end of a copy, reading waits for the device.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Start to copy; tensors are scalars and vectors of any real dtype."""
        device = next((tensor.device for tensor in tensors if not tensor.is_cpu), torch.device("cpu"))
        parts = [moved(tensor.reshape(-1), device) for tensor in tensors]
        self._numbers = torch.cat(parts) if parts else torch.empty(0)
        self._event: torch.Event | None = None
        if not self._numbers.is_cpu and _has_events(device):
            host = torch.empty(self._numbers.shape, dtype=self._numbers.dtype, pin_memory=device.type == "cuda")
            self._numbers = host.copy_(self._numbers, non_blocking=True)
            self._event = _recorded(device)

    @property
    def is_complete(self) -> bool:
        """Whether `read` returns without waiting; False for a device without events."""
        return self._numbers.is_cpu and (self._event is None or self._event.query())

    def read(self) -> list[float]:
        """Return the numbers of all tensors, in order, after waiting for them."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[float] = self._numbers.cpu().tolist()
        return numbers


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; in float32 on MPS, which has no float64."""
    return tensor.to(device, torch.float32 if device.type == "mps" else tensor.dtype)


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
