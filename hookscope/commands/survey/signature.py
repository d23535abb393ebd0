"""What a chunk depends on, by name: chunks are merged only if all of it is the same."""

import hashlib
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch
from PIL.Image import Image
from torch import nn

from hookscope.hooks.observed import shape_of
from hookscope.hooks.pytree import tensors_in
from hookscope.inputs.batches import Batch
from hookscope.inputs.clips import Clip, Source
from hookscope.inspection.network import bytes_of, model_digest
from hookscope.results.inputs import Preprocessing


def common_signature(
    module: nn.Module, device: torch.device, preprocessing: Preprocessing, settings: Mapping[str, object]
) -> dict[str, str]:
    """Return what all chunks of a survey have in common, as text."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return {
        "hookscope": version("hookscope"),
        "torch": torch.__version__,
        "processor": f"{platform.machine()} {where}",
        "device": device.type,
        "threads": str(torch.get_num_threads()),
        "model": model_digest(module),
        "preprocessing": _digest(repr(sorted(asdict(preprocessing).items()))),
        **{name: str(value) for name, value in settings.items()},
    }


def inputs_signature(files: Sequence[Source], batch: Batch | None) -> str:
    """Return a digest of the names and sizes of a chunk's files, of the pixels of pictures, or of a batch's values."""
    digest = hashlib.sha256()
    for file in files:
        if isinstance(file, Image):
            digest.update(_pixels_of(file))
        elif isinstance(file, Clip):
            digest.update(os.fsencode(f"{file.folder} {[frame.name for frame in file.frames]}"))
        else:
            digest.update(os.fsencode(f"{file} {_size_of(file)}\n"))
    for _, tensor in () if batch is None else tensors_in([*batch.args, dict(batch.kwargs)]):
        digest.update(f"{tensor.dtype} {tuple(shape_of(tensor))}".encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def _pixels_of(picture: Image) -> bytes:
    try:
        return f"{picture.mode} {picture.size} {picture.getpalette()}".encode() + picture.tobytes()
    except Exception:  # noqa: BLE001 - it was closed, or its file is damaged: reading it again reports that
        return b""


def _size_of(path: Path) -> int | None:
    with suppress(OSError, ValueError):
        return path.stat().st_size
    return None


def differing(actual: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """Return the names of what differs between two signatures: "threads (1, here 2)"."""
    shown = []
    for name in {**wanted, **actual}:
        before, here = (side.get(name) or "none" for side in (actual, wanted))
        if before != here:
            shown.append(name if len(max(before, here, key=len)) > 40 else f"{name} ({before}, here {here})")
    return shown


def _digest(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()


def names_digest(names: Sequence[str]) -> str:
    """Return a digest of names in their order; "" without any."""
    return _digest("\n".join(names)) if names else ""
