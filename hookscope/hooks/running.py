"""Which modules of a network run, and what they were called with, as Python's frames have it; all of them unfused."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from hookscope.hooks.callers import CALL


class ModuleInput(NamedTuple):
    """A module that is running, and what it was called with."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def running_modules(frame: FrameType | None, names: Mapping[int, str]) -> tuple[ModuleInput, ...]:
    """Return the modules that run around a frame, the innermost first.

    Args:
        frame: Where to begin.
        names: Those of the network's modules, by id; others are left out.
    """
    found = []
    while frame is not None:
        if frame.f_code is CALL:
            held = frame.f_locals
            name = names.get(id(held["self"]))
            if name is not None:
                found.append(ModuleInput(name, held["self"], held["args"], held["kwargs"]))
        frame = frame.f_back
    return tuple(found)


@contextmanager
def unfused() -> Iterator[None]:
    """Switch off torch's fused encoder layers, which compute other last digits and call nothing that can be seen."""
    was_on = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_on)
