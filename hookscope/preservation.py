"""Run a network and leave it as it was: modes, buffers, gradients, random states."""

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hookscope.models.building import seed_generators, seeded

Mode = Literal["eval", "train"]


# Buffers of these dtypes, up to this size, are copied and compared together: BatchNorm has three to a layer, and each
# call costs more than the copy.
_JOINED_DTYPES = frozenset({torch.float32, torch.int64})
_JOINED_ELEMENTS = 2**14


class _Buffers(NamedTuple):
    """Buffers and what they held.

    Attributes:
        places: Each module that has some, with its buffers by name.
        bare: The other modules: what they register meanwhile goes.
        joined: Small buffers that are alike, and their values in a row.
        single: The others, each with its values.
    """

    places: list[tuple[nn.Module, dict[str, Tensor | None]]]
    bare: list[nn.Module]
    joined: list[tuple[list[Tensor], Tensor]]
    single: list[tuple[Tensor, Tensor]]


@dataclass(slots=True)
class Preserved:
    """A place in a run to go back to: at first, its beginning."""

    _modules: Sequence[nn.Module]
    _devices: Sequence[int]
    _buffers: _Buffers
    _seed: int
    _generators: tuple[Any, ...] | None = None

    def mark(self) -> None:
        """Remember buffers and random states as they are now, for `rewind`."""
        moved = any(
            module._buffers.get(name) is not buffer
            for module, held in self._buffers.places
            for name, buffer in held.items()
        )
        if moved or _changed(self._buffers):
            self._buffers = _buffers_of(self._modules)
        devices = [torch.cuda.get_rng_state(device) for device in self._devices]
        self._generators = (torch.get_rng_state(), random.getstate(), np.random.get_state(), devices)

    def rewind(self) -> None:
        """Go back to the mark: what runs next draws the same random numbers and finds the same buffers."""
        _restore_buffers(self._buffers)
        if self._generators is None:
            _seed(self._seed, self._devices)
            return
        state, python_state, numpy_state, devices = self._generators
        torch.set_rng_state(state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for device, cuda_state in zip(self._devices, devices, strict=True):
            torch.cuda.set_rng_state(cuda_state, device)


@contextmanager
def preserved(
    network: nn.Module, seed: int, mode: Mode = "eval", modules: Iterable[nn.Module] | None = None
) -> Iterator[Preserved]:
    """Put the network in a mode and seed random numbers for the block, and restore everything after it.

    Restored are each module's mode (not only the root's: a BatchNorm frozen in eval stays so), buffers, parameter
    gradients and `requires_grad`, and the states of the random generators of torch, NumPy and Python. Plain attributes
    that a forward pass assigns are the model's own business.

    Args:
        network: The model to run inside the block.
        seed: For all of these generators.
        mode: "eval", or "train": a network whose root is in train mode already then stays as it is, with whatever parts
            its owner has frozen in eval mode.
        modules: All of its modules, once each, from whoever has listed them already.

    Yields:
        For marking a place in the run and going back to it.
    """
    modules = [*(network.modules() if modules is None else modules)]
    modes = [module.training for module in modules]
    buffers = _buffers_of(modules)
    parameters = [each for module in modules for each in module._parameters.values() if each is not None]
    gradients = [parameter.grad for parameter in parameters]
    trainable = [parameter.requires_grad for parameter in parameters]
    cuda = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        with seeded(seed), torch.random.fork_rng(devices=cuda) if cuda else nullcontext():
            if cuda:
                _seed(seed, cuda)
            state = Preserved(modules, cuda, buffers, seed)
            if mode == "train" and not network.training:
                network.train()
                state.mark()  # it may be the model's own
            elif mode == "eval" and any(modes):
                network.eval()
                state.mark()
            yield state
    finally:
        for module, training in zip(modules, modes, strict=True):
            if module.training != training:
                module.training = training
        _restore_buffers(buffers)
        for parameter, gradient, requires_grad in zip(parameters, gradients, trainable, strict=True):
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
            if parameter.grad is not gradient:
                parameter.grad = gradient


def _seed(seed: int, devices: Sequence[int]) -> None:
    seed_generators(seed)
    if devices:
        torch.cuda.manual_seed_all(seed)


def _buffers_of(modules: Sequence[nn.Module]) -> _Buffers:
    places = [(module, dict(held)) for module in modules if (held := module._buffers)]
    bare = [module for module in modules if not module._buffers]
    alike: defaultdict[tuple[torch.dtype, torch.device, bool], list[Tensor]] = defaultdict(list)
    single = []
    with torch.no_grad():
        for _, held in places:
            for buffer in held.values():
                if buffer is None:
                    continue
                if _joinable(buffer):
                    alike[buffer.dtype, buffer.device, buffer.dim() == 0].append(buffer)
                else:
                    single.append((buffer, buffer.clone()))
        return _Buffers(places, bare, [(buffers, _join(buffers)) for buffers in alike.values()], single)


def _joinable(buffer: Tensor) -> bool:
    return (
        buffer.dtype in _JOINED_DTYPES
        and type(buffer) is Tensor
        and buffer.layout is torch.strided
        and not buffer.is_nested
        and buffer.numel() <= _JOINED_ELEMENTS
    )


def _hold(buffers: Sequence[Tensor], values: Tensor) -> bool:
    """Tell whether the buffers still hold the joined values."""
    try:
        return torch.equal(_join(buffers), values)
    except RuntimeError:  # the model has given one another device or dtype
        return False


def _join(buffers: Sequence[Tensor]) -> Tensor:
    if buffers[0].dim() == 0:
        return torch.stack([*buffers])
    return torch.cat([buffer if buffer.dim() == 1 else buffer.reshape(-1) for buffer in buffers])


def _changed(buffers: _Buffers) -> list[tuple[Tensor, Tensor]]:
    """List the buffers whose values have changed, with those before."""
    held = [*buffers.single]
    with torch.no_grad():
        for joined, values in buffers.joined:
            if not _hold(joined, values):
                parts = torch.split_with_sizes(values, [buffer.numel() for buffer in joined])
                held += [(buffer, part.view(buffer.shape)) for buffer, part in zip(joined, parts, strict=True)]
    return [(buffer, values) for buffer, values in held if not _equal(buffer, values)]


def _restore_buffers(buffers: _Buffers) -> None:
    """Put back each buffer with its values before, and drop buffers that were registered since."""
    for module in buffers.bare:
        for name in [*module._buffers]:
            delattr(module, name)
    for module, held in buffers.places:
        for name in module._buffers.keys() - held.keys():
            delattr(module, name)
        module._buffers.update(held)
    for buffer, values in _changed(buffers):
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
