"""Where a network runs, and in which dtype."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn

from hookscope.errors import ModelError, UsageError
from hookscope.models.construction import LoadedModel
from hookscope.parameters import arg
from hookscope.text import counted, one_line

_CASTS = {
    "float64": nn.Module.double,
    "float32": nn.Module.float,
    "float16": nn.Module.half,
    "bfloat16": nn.Module.bfloat16,
}


def choose_device(name: str, option: str = "device") -> torch.device:
    """Return the device that an option means: "auto" is the first accelerator or the CPU, and "cuda" is "cuda:0".

    Raises:
        UsageError: If there is no such device here.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda:0")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or str(device) != name:  # torch keeps 8 bits of a number: "cuda:256" would be "cuda:0"
        raise UsageError(f"{arg(option)} {name!r} is not a device. Give auto, cpu, cuda, cuda:1 or mps.")
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) < count:
            return torch.device("cuda", device.index or 0)
        seen = counted(count, "CUDA device")
        raise UsageError(f"{arg(option)} {name!r} is not available: torch sees {seen} here. Give cpu, or auto.")
    if device.type == "mps" and torch.backends.mps.is_available():
        return torch.device("mps")
    raise UsageError(f"{arg(option)} {name!r} is not available here. Give cpu, or auto.")


def placement(module: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return the device and the floating dtype that inputs need: of parameters, else buffers, else CPU and float32."""
    device: torch.device | None = None
    for tensor in chain(module.parameters(), module.buffers()):
        device = device or tensor.device
        if tensor.is_floating_point():
            return device, tensor.dtype
    return device or torch.device("cpu"), torch.float32


def move_to(loaded: LoadedModel, device: torch.device, dtype: str | None = None) -> None:
    """Move a network to its device and, if one is given, what is floating in it to its dtype.

    Complex parameters and buffers stay complex, as with `Module.double()`: `Module.to` would drop their imaginary part.

    Raises:
        ModelError: If it cannot be moved.
    """
    try:
        if dtype:
            _CASTS[dtype](loaded.module)
        loaded.module.to(device=device)
    except (RuntimeError, TypeError) as error:  # out of memory, or a dtype that the device does not know
        where = f"{device} in {dtype}" if dtype else device
        raise ModelError(f"{loaded.info.name} cannot be moved to {where}: {one_line(error)}") from error


# Activations and other processes need memory, too.
_SHARE_OF_MEMORY = 0.5


def fits_into_memory(module: nn.Module) -> bool:
    """Tell whether a network's parameters and buffers take less than half of this machine's memory."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not on Windows
        return True
    held = sum(tensor.numel() * tensor.element_size() for tensor in (*module.parameters(), *module.buffers()))
    return held < memory * _SHARE_OF_MEMORY


@contextmanager
def cpu_threads(count: int | None = None) -> Iterator[None]:
    """Use `count` threads in the block, None for as many as before; restore their number afterwards."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def full_float32() -> Iterator[None]:
    """Keep cuDNN from rounding float32 to the 10 bits of TF32 in the block, as it does on CUDA unless told not to."""
    cudnn: Any = torch.backends.cudnn
    kinds = cudnn.conv, cudnn.rnn
    before = [kind.fp32_precision for kind in kinds]
    try:
        for kind in kinds:
            kind.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(kinds, before, strict=True):
            backend.fp32_precision = precision
