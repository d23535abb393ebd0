"""Run a network and leave it as it was: modes, buffers, gradients, random states."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from hookscope.models.building import seeded

Mode = Literal["eval", "train"]


_Buffers = Sequence[tuple[nn.Module, str, Tensor | None, Tensor | None]]
"""(module, name, buffer, its values)."""


@dataclass(slots=True)
class Preserved:
    """A place in a run to go back to."""

    _modules: Sequence[nn.Module]
    _devices: Sequence[int]
    _buffers: _Buffers
    _generators: tuple[Any, ...] = ()

    def mark(self) -> None:
        """Remember buffers and random states as they are now, for `rewind`."""
        if any(
            module._buffers.get(name) is not buffer
            or (buffer is not None and values is not None and not _equal(buffer, values))
            for module, name, buffer, values in self._buffers
        ):
            self._buffers = _buffers_of(self._modules)
        devices = [torch.cuda.get_rng_state(device) for device in self._devices]
        self._generators = (torch.get_rng_state(), random.getstate(), np.random.get_state(), devices)

    def rewind(self) -> None:
        """Go back to the mark: what runs next draws the same random numbers and finds the same buffers."""
        _restore_buffers(self._modules, self._buffers)
        state, python_state, numpy_state, devices = self._generators
        torch.set_rng_state(state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for device, cuda_state in zip(self._devices, devices, strict=True):
            torch.cuda.set_rng_state(cuda_state, device)


@contextmanager
def preserved(network: nn.Module, seed: int, mode: Mode = "eval") -> Iterator[Preserved]:
    """Put the network in a mode and seed random numbers for the block, and restore everything after it.

    Restored are each module's mode (not only the root's: a BatchNorm frozen in eval stays so), buffers, parameter
    gradients and `requires_grad`, and the states of the random generators of torch, NumPy and Python. Plain attributes
    that a forward pass assigns are the model's own business.

    Args:
        network: The model to run inside the block.
        seed: For all of these generators.
        mode: "eval", or "train": a network whose root is in train mode already then stays as it is, with whatever parts
            its owner has frozen in eval mode.

    Yields:
        For marking a place in the run and going back to it.
    """
    modules = [*network.modules()]
    modes = [module.training for module in modules]
    buffers = _buffers_of(modules)
    parameters = [each for module in modules for each in module._parameters.values() if each is not None]
    gradients = [parameter.grad for parameter in parameters]
    trainable = [parameter.requires_grad for parameter in parameters]
    cuda = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        with seeded(seed), torch.random.fork_rng(devices=cuda) if cuda else nullcontext():
            if cuda:
                torch.cuda.manual_seed_all(seed)
            if mode == "train" and not network.training:
                network.train()
            elif mode == "eval" and any(modes):
                network.eval()
            yield Preserved(modules, cuda, buffers)
    finally:
        for module, training in zip(modules, modes, strict=True):
            if module.training != training:
                module.training = training
        _restore_buffers(modules, buffers)
        for parameter, gradient, requires_grad in zip(parameters, gradients, trainable, strict=True):
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
            if parameter.grad is not gradient:
                parameter.grad = gradient


def _buffers_of(modules: Sequence[nn.Module]) -> _Buffers:
    with torch.no_grad():
        return [
            (module, name, buffer, None if buffer is None else buffer.clone())
            for module in modules
            for name, buffer in module._buffers.items()
        ]


def _restore_buffers(modules: Sequence[nn.Module], buffers: _Buffers) -> None:
    """Put back each buffer with its values before, and drop buffers that were registered since."""
    known = {(id(module), name) for module, name, _, _ in buffers}
    for module in modules:
        for name in [name for name in module._buffers if (id(module), name) not in known]:
            delattr(module, name)
    for module, name, buffer, values in buffers:
        module._buffers[name] = buffer
        if buffer is not None and values is not None and not _equal(buffer, values):
            with torch.inference_mode(buffer.is_inference()), torch.no_grad():
                buffer.copy_(values)


def _equal(first: Tensor, second: Tensor) -> bool:
    """Tell whether two tensors hold the same values; where that cannot be told (meta, sparse), say no.

    Version counters would not do: a write through `.data` does not move them.
    """
    try:
        return torch.equal(first, second)
    except (RuntimeError, NotImplementedError):
        return False
