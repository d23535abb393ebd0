"""List what a file of nothing but a published network's weights holds, without torch, which takes seconds to import."""

import os
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from hookscope.checkpoints.fileformat import FileKind, file_kind, open_regular
from hookscope.checkpoints.limits import reading_limits
from hookscope.checkpoints.plain import PlainTensor, plain_file
from hookscope.checkpoints.sandbox import WorkerFailure, run_forked
from hookscope.errors import CheckpointError
from hookscope.models.array_values import ARRAY_TYPES, PIECE_ELEMENTS, values_of
from hookscope.models.torchvision_digests import Candidate, published_networks
from hookscope.results.contents import CheckpointContents, StoredPart, StoredTensor
from hookscope.text import printable

_KINDS = ("torch", "safetensors")


def list_published(path: Path) -> CheckpointContents | None:
    """Return what `list_contents` would say of a network's published names and shapes, plainly stored.

    None is for any other file, also a damaged one, and where the process with limits that reads it has failed:
    `list_contents` says what there is to say. Nothing in the file is run.
    """
    try:
        kind = file_kind(path)
        before = _version(path)
        result = run_forked(lambda: _look(path, kind), reading_limits(before[1])) if kind in _KINDS else None
        if result is None or before != _version(path):
            return None
    except (CheckpointError, MemoryError):
        return None
    if isinstance(result, WorkerFailure):
        if result.cause == "raised":
            raise RuntimeError(result.traceback)
        return None
    rows = tuple(StoredTensor(**{**row, "shape": tuple(row["shape"])}) for row in result["tensors"])
    return CheckpointContents(
        name=path.name,
        kind=kind,
        producer=result["producer"],
        byte_count=before[1],
        parts=(StoredPart("", True, rows, shared_prefix(True, rows), tuple(result["architectures"])),),
        entries=(),
        metadata=result["metadata"],
        warnings=(),
    )


def _version(path: Path) -> tuple[int, int, int]:
    """Return what changes with the file's content: where it is, its size, when it was written."""
    with open_regular(path) as file:
        status = os.fstat(file.fileno())
    return status.st_ino, status.st_size, status.st_mtime_ns


def _look(path: Path, kind: FileKind) -> dict[str, Any] | None:
    """Return what there is to list, as JSON can hold it."""
    plain = plain_file(path, kind)
    networks = () if plain is None else published_networks({name: each.shape for name, each in plain.tensors.items()})
    if plain is None or not networks:
        return None
    with open_regular(path) as file:
        tensors = [_row(file, name, tensor) for name, tensor in plain.tensors.items()]
    return {
        "tensors": tensors,
        "architectures": [*map(sentence, networks)],
        "metadata": dict(plain.metadata),
        "producer": f"torch.save, zip format {printable(plain.version)}" if kind == "torch" else "",
    }


def _row(file: BinaryIO, name: str, tensor: PlainTensor) -> dict[str, Any]:
    return {
        "key": name,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "byte_count": tensor.byte_count,
        **values_of(_pieces(file, tensor), tensor.dtype)._asdict(),
    }


def _pieces(file: BinaryIO, tensor: PlainTensor) -> Iterator[NDArray[np.generic]]:
    """Yield the elements of a tensor in pieces, as `ValueReader` does."""
    kind = np.dtype(ARRAY_TYPES[tensor.dtype])
    file.seek(tensor.begin)
    left = tensor.byte_count
    while left:
        wanted = min(PIECE_ELEMENTS * kind.itemsize, left)
        content = file.read(wanted)
        if len(content) < wanted:
            raise CheckpointError("the file was cut short while it was read")
        left -= len(content)
        yield np.frombuffer(content, kind)


def sentence(candidate: Candidate) -> str:
    """Return a network that fits, in words."""
    arguments = ", ".join(f"{name}={value!r}" for name, value in candidate.arguments.items())
    remarks = "; ".join(candidate.remarks)
    text = f"{candidate.model}{f' ({arguments})' if arguments else ''}{f': {remarks}' if remarks else ''}"
    return printable(text, 400)


def shared_prefix(is_weights: bool, rows: Sequence[StoredTensor]) -> str:
    """Return what all dotted names of weights start with, of whole parts; "" for nothing, and for a single name."""
    ordered = sorted(row.key.split(".") for row in rows)
    ends = zip(ordered[0], ordered[-1], strict=False) if is_weights and len(rows) > 1 else ()
    return ".".join(first for first, _ in takewhile(lambda pair: pair[0] == pair[1], ends))
