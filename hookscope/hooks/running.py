"""Which modules of a network run, and their arguments, read from Python's frames; torch's fused layers off."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.hooks.callers import CALL
from hookscope.hooks.pytree import tensors_given


@dataclass(eq=False)
class ModuleInput:
    """A module that is running, and its arguments."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @cached_property
    def tensors(self) -> list[tuple[str, Tensor]]:
        """Its input tensors, except nested ones, with the names of forward's parameters; "" for a single one."""
        if len(self.args) == 1 and not self.kwargs and isinstance(self.args[0], Tensor):
            return [] if self.args[0].is_nested else [("", self.args[0])]
        names = [*islice(inspect.signature(self.module.forward).parameters, len(self.args))]
        names += [""] * (len(self.args) - len(names))
        named_tensors = []
        for name, value in zip([*names, *self.kwargs], [*self.args, *self.kwargs.values()], strict=True):
            if isinstance(value, Tensor):
                named_tensors.append((name, value))
            elif isinstance(value, list | tuple | dict):
                named_tensors += [(f"{name}{path}", tensor) for path, tensor in tensors_given((value,), {})]
        return [(name, tensor) for name, tensor in named_tensors if not tensor.is_nested]

    @cached_property
    def sequences(self) -> list[tuple[str, Tensor]]:
        """Its floating-point input tensors with three axes, as tokens (N, T, D) have."""
        return [(name, tensor) for name, tensor in self.tensors if tensor.dim() == 3 and tensor.is_floating_point()]


def running_modules(frame: FrameType | None, names: Mapping[int, str]) -> tuple[ModuleInput, ...]:
    """Return the modules that run around a frame, the innermost first.

    Args:
        frame: Where to begin.
        names: Those of the network's modules, by id; others are left out.
    """
    running: list[ModuleInput] = []
    while frame is not None:  # without a generator: this runs at every output that may hold tokens
        if frame.f_code is CALL and (name := names.get(id((held := frame.f_locals)["self"]))) is not None:
            running.append(ModuleInput(name, held["self"], held["args"], held["kwargs"]))
        frame = frame.f_back
    return tuple(running)


@contextmanager
def unfused() -> Iterator[None]:
    """Switch off torch's fused encoder layers, which compute other last digits and call nothing that can be seen."""
    was_on = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_on)
