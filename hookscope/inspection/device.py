"""Where a network runs, and in which dtype."""

import torch
from torch import nn

from hookscope.errors import ModelError, UsageError
from hookscope.models import LoadedModel
from hookscope.text import one_line

_CASTS = {
    "float64": nn.Module.double,
    "float32": nn.Module.float,
    "float16": nn.Module.half,
    "bfloat16": nn.Module.bfloat16,
}


def choose_device(name: str, option: str = "--device") -> torch.device:
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
    except RuntimeError as error:
        raise UsageError(f"{option} {name!r} is not a device. Give auto, cpu, cuda, cuda:1 or mps.") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) < count:
            return torch.device("cuda", device.index or 0)
        raise UsageError(f"{option} {name!r}: {count} CUDA devices are visible here. Give cpu, or auto.")
    if device.type == "mps" and torch.backends.mps.is_available():
        return torch.device("mps")
    raise UsageError(f"{option} {name!r} is not available here. Give cpu, or auto.")


def floating_dtype(module: nn.Module) -> torch.dtype:
    """Return the floating dtype that the inputs of `module` need: its first floating parameter's, else float32."""
    return next((each.dtype for each in module.parameters() if each.is_floating_point()), torch.float32)


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
