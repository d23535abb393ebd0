"""List what a weights file holds, without building a network and without holding its values in memory.

A file is looked at in a separate process, which answers with the rows of the table: whatever a file of unknown origin
makes of itself, it has limits on memory and time.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookscope.checkpoints.fileformat import FileKind, open_archive, open_regular, safetensors_header
from hookscope.checkpoints.isolation import inspect_isolated
from hookscope.checkpoints.reading import read_layout, tensors_within
from hookscope.errors import CheckpointError, ModelNotFoundError, UsageError
from hookscope.models.array_values import Values
from hookscope.models.checkpoint import REMEDY, check_names, files_of, read_index
from hookscope.models.locate_state_dict import Part, parts_of
from hookscope.models.plain_contents import sentence, shared_prefix
from hookscope.models.statedict import state_shapes
from hookscope.models.torchvision_digests import Candidate, Shapes, published_networks
from hookscope.models.values import ValueReader
from hookscope.results.contents import CheckpointContents, StoredEntry, StoredPart, StoredTensor
from hookscope.text import counted, printable, shape_text

# What training libraries leave at the top of their checkpoints, and what they are called.
_SIGNATURES = {"pytorch-lightning_version": "Lightning", "transformers_version": "transformers"}

# Our choice: a text that fits a line.
_LONGEST_VALUE = 80

_THREADS = 2  # our choice: two read as fast as memory gives

# Our choice: whether two views share an element is looked for so long; then they are said to.
_OVERLAP_WORK = 10_000


def list_contents(path: Path, key: str | None = None) -> CheckpointContents:
    """List what a weights file holds. Nothing in it is run; its values are read once, a piece at a time.

    Raises CheckpointError if the file cannot be read, is damaged, or holds no tensors; UntrustedFileError if reading it
    would run code; UsageError if an index is given a `key`; NothingMatchedError if there is nothing at `key`.
    """
    kind, kinds = files_of(path)
    if key is not None and kinds.keys() != {path}:
        raise UsageError(
            f"--key '{printable(key)}' is for a single file; {printable(path.name)} is an index of several."
        )
    looked = inspect_isolated(kinds, printable(str(path)), partial(_look, key), remedy=REMEDY)
    found: dict[Path, dict[str, Any]] = dict(zip(kinds, looked, strict=True))
    warnings = [note for file in looked for note in file["warnings"]]
    warnings += _unlisted(path, found) if path not in kinds else []
    tensors: dict[tuple[str, bool], list[StoredTensor]] = {}
    shapes: dict[tuple[str, bool], dict[str, tuple[int, ...]]] = {}
    for each in (each for file in looked for each in file["parts"]):
        part = each["key"], each["is_weights"]
        rows = (StoredTensor(**{**row, "shape": tuple(row["shape"])}) for row in each["tensors"])
        tensors.setdefault(part, []).extend(rows)
        shapes.setdefault(part, {}).update({name: tuple(shape) for name, shape in each["shapes"].items()})
    fitting, doubts = _architectures(shapes)
    near = {part: "" if fitting[part] else _nearest(each) for part, each in shapes.items() if each}
    alone = found.get(path, {})
    return CheckpointContents(
        name=path.name,
        kind=kind,
        producer=alone.get("producer", ""),
        byte_count=sum(file.stat().st_size for file in kinds),
        parts=tuple(
            StoredPart(*part, tuple(rows), shared_prefix(part[1], rows), fitting[part], near.get(part, ""))
            for part, rows in sorted(tensors.items(), key=lambda item: not item[0][1])  # weights first
        ),
        entries=tuple(StoredEntry(*entry) for entry in alone.get("entries", ())),
        metadata={name: text for file in looked for name, text in file["metadata"].items()},
        warnings=(*warnings, *doubts),
    )


def _look(key: str | None, path: Path, kind: FileKind, content: object) -> dict[str, Any]:
    """Return what there is to list of one file, as JSON can hold it."""
    parts = parts_of(content, printable(str(path)), key)
    tensors = [tensor for part in parts for _, tensor in part.tensors]
    absent = sum(tensor.is_meta for tensor in tensors)
    what = "1 tensor has" if absent == 1 else f"{absent} tensors have"
    warning = f"{printable(path.name)}: {what} no data, only a shape (saved on the meta device)."
    metadata = (safetensors_header(path)[0].get("__metadata__") or {}) if kind == "safetensors" else {}
    rows = iter(zip(tensors, _values(path, kind, content, tensors), _tied(parts), strict=True))
    return {
        "parts": [
            {
                "key": part.key,
                "is_weights": part.is_weights,
                "names": list(part.state) or [name for name, _ in part.tensors],
                "shapes": state_shapes(part.state),
                "tensors": [_row(name, *next(rows)) for name, _ in part.tensors],
            }
            for part in parts
        ],
        "producer": _producer(path, kind, content),
        "entries": [] if any(part.is_weights and not part.key for part in parts) else _entries(content),
        "metadata": {str(name): str(value) for name, value in metadata.items()},
        "warnings": [warning] * bool(absent),
    }


def _row(name: str, tensor: Tensor, values: Values | None, tied_to: str) -> dict[str, Any]:
    stored = tensor
    if tensor.layout is not torch.strided:
        stored = tensor.coalesce().values() if tensor.is_sparse else tensor.values()
    byte_count = stored.numel() * stored.element_size()
    if not (stored.is_meta or stored.layout is not torch.strided):
        byte_count = min(byte_count, stored.untyped_storage().nbytes())  # an expanded tensor shows its elements again
    return {
        "key": name,
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "byte_count": byte_count,
        "tied_to": tied_to,
        **({"nan_count": None, "inf_count": None} if values is None else values._asdict()),
    }


def _unlisted(index: Path, found: Mapping[Path, Mapping[str, Any]]) -> list[str]:
    """Hold what shards hold against their index; return a sentence for each that holds more."""
    name, listed = printable(str(index)), read_index(index)
    owners = {tensor: shard for shard, tensors in listed.items() for tensor in tensors}
    surplus = {}
    for shard, tensors in listed.items():
        held = [each for part in found[shard]["parts"] for each in part["names"]]
        surplus[shard] = check_names(name, shard, tensors, held, owners)
    return [
        f"{printable(shard.name)}: the index does not list {printable(', '.join(more), 200)}."
        for shard, more in surplus.items()
        if more
    ]


def _architectures(
    shapes: Mapping[tuple[str, bool], Mapping[str, tuple[int, ...]]],
) -> tuple[dict[tuple[str, bool], tuple[str, ...]], tuple[str, ...]]:
    """Return of each part the networks that fit, in words, and why there may be others."""
    known: dict[frozenset[tuple[str, tuple[int, ...]]], tuple[str, ...]] = {frozenset(): ()}
    doubts: dict[str, None] = {}
    for each in shapes.values():
        if (names := frozenset(each.items())) in known:  # such as those of the averaged weights beside the others
            continue
        try:
            known[names] = tuple(map(sentence, published_networks(each) or _recognised(each)))
        except ModelNotFoundError as error:  # time ran out
            known[names], doubts[str(error)] = (), None
    return {part: known[frozenset(each.items())] for part, each in shapes.items()}, tuple(doubts)


def _recognised(shapes: Shapes) -> tuple[Candidate, ...]:
    from hookscope.models.architecture import recognise  # noqa: PLC0415 (imports torchvision, which is slow)

    return recognise(shapes)


def _nearest(shapes: Shapes) -> str:
    from hookscope.models.architecture import nearest_network  # noqa: PLC0415 (imports torchvision, which is slow)

    return nearest_network(shapes)


def _values(path: Path, kind: FileKind, content: object, tensors: Sequence[Tensor]) -> list[Values | None]:
    """Return the statistics of each tensor; those of one that is there twice are read once."""
    base = _mapped_at(path, kind, content)
    views = [_view(tensor) or at for at, tensor in enumerate(tensors)]
    distinct: dict[object, Tensor] = {}
    for view, tensor in zip(views, tensors, strict=True):
        distinct.setdefault(view, tensor)

    def read(some: Iterable[Tensor]) -> list[Values | None]:
        reader, found = ValueReader(), list[Values | None]()
        with open_regular(path) as file:
            for tensor in some:
                as_stored = _address(tensor) and not (tensor.is_neg() or tensor.is_conj() or tensor.is_quantized)
                if base is not None and as_stored:
                    found.append(reader.in_file(file, _address(tensor) - base, tensor))
                else:
                    found.append(reader.in_memory(tensor))
        return found

    waiting = [*distinct.values()]
    try:
        with ThreadPoolExecutor(_THREADS) as pool:  # reading and reducing let go of the interpreter
            answers = [*map(iter, pool.map(read, [waiting[first::_THREADS] for first in range(_THREADS)]))]
    except EOFError as error:
        raise CheckpointError(f"{printable(str(path))} was cut short while it was read.") from error
    by_view = {view: next(answers[at % _THREADS]) for at, view in enumerate(distinct)}
    return [by_view[view] for view in views]


def _address(tensor: Tensor) -> int:
    """Return where a tensor's storage lies in memory; 0 if it has none."""
    plain = tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0
    return int(tensor.untyped_storage().data_ptr()) if plain else 0


def _view(tensor: Tensor) -> tuple[Any, ...] | None:
    """Return what is the same for tensors with the very same elements in memory; None where that is not known."""
    storage = _address(tensor)
    bits = tensor.dtype, tensor.is_neg(), tensor.is_conj()
    return (storage, tensor.storage_offset(), tensor.shape, tensor.stride(), *bits) if storage else None


def _tied(parts: Sequence[Part]) -> list[str]:
    """Return of each tensor the first other one that it shares an element with, by name; "" for none."""
    every = [(part.key, name, tensor) for part in parts for name, tensor in part.tensors]
    storages: dict[int, list[int]] = {}
    for at, (_, _, tensor) in enumerate(every):
        storages.setdefault(_address(tensor) or -at - 1, []).append(at)
    owners: dict[int, int] = {}
    for members in storages.values():
        owners |= _owners({at: every[at][2] for at in members}) if len(members) > 1 else {}
    names = []
    for at, (part, _, _) in enumerate(every):
        where, name, _ = every[owners.get(at, at)]
        names.append("" if at not in owners else name if where == part else ".".join(filter(None, [where, name])))
    return names


def _owners(tensors: Mapping[int, Tensor]) -> dict[int, int]:
    """Return of each tensor of one storage the first of those before it that it shares an element with."""
    owners: dict[int, int] = {}
    first: dict[Any, int] = {}
    for at, tensor in tensors.items():
        if (view := _view(tensor)) in first:
            owners[at] = first[view]
        else:
            first[view] = at
    spans = []
    for at in first.values():
        tensor = tensors[at]
        begin = int(tensor.storage_offset()) * tensor.element_size()
        axes = zip(tensor.shape, tensor.stride(), strict=True)
        length = (1 + sum((size - 1) * stride for size, stride in axes)) * tensor.element_size()
        spans.append((begin, begin + length, at))
    open_spans: list[tuple[int, int]] = []
    for begin, end, at in sorted(spans):
        open_spans = [span for span in open_spans if span[0] > begin]
        for _, other in open_spans:
            if _share(tensors[at], tensors[other]):
                earlier, later = sorted((at, other))
                owners[later] = min(owners.get(later, earlier), earlier)
        open_spans.append((end, at))
    return owners


def _share(first: Tensor, second: Tensor) -> bool:
    """Say whether two views of one storage have an element in common."""
    try:
        return bool(np.shares_memory(_Elements(first), _Elements(second), max_work=_OVERLAP_WORK))  # type: ignore[arg-type]  # NumPy's stub knows no limits
    except np.exceptions.TooHardError:
        return True


class _Elements:
    """Where the elements of a tensor lie, for NumPy, which reads none of them."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": f"|V{size}",
            "version": 3,
        }


def _mapped_at(path: Path, kind: FileKind, content: object) -> int | None:
    """Return the address at which the first byte of a file is mapped; None if its tensors are copies.

    Reading mapped values would fill memory with the whole file: they are read from the file instead, piece by piece.
    """
    tensors = [tensor for tensor in tensors_within(content) if tensor.layout is torch.strided and tensor.numel()]
    if kind == "legacy torch" or not tensors:
        return None
    if kind == "safetensors" and isinstance(content, dict):
        header, begin = safetensors_header(path)
        begins = {name: begin + header[name]["data_offsets"][0] for name in content}
        bases = {each.data_ptr() - begins[name] for name, each in content.items() if each.numel()}
    else:
        offset_of = attrgetter("_checkpoint_offset")  # the one way
        try:
            layout = read_layout(path)
        except NotImplementedError:  # a quantised tensor cannot be on the meta device
            return None
        layouts = [each for each in tensors_within(layout) if each.layout is torch.strided and each.numel()]
        bases = {
            tensor.untyped_storage().data_ptr() - offset_of(each.untyped_storage())
            for tensor, each in zip(tensors, layouts, strict=True)
            if not tensor.is_meta
        }
    return bases.pop() if len(bases) == 1 else None


def _entries(content: object) -> list[tuple[str, str, str]]:
    """Describe what stands at the top of a training checkpoint: key, type, summary."""
    if not isinstance(content, dict):
        return []
    return [
        (printable(str(key), _LONGEST_VALUE), type(value).__name__, _summary(value))
        for key, value in dict.items(content)
        if isinstance(key, str | int)
    ]


def _summary(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{shape_text(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, dict | list | tuple):
        tensor_count = sum(1 for _ in tensors_within(value))
        entries = "1 entry" if len(value) == 1 else f"{len(value)} entries"
        return f"{entries}, {counted(tensor_count, 'tensor')}"
    if isinstance(value, str | int | float | bool | None):
        return printable(str(value), _LONGEST_VALUE)
    return ""


def _producer(path: Path, kind: FileKind, content: object) -> str:
    """Return what wrote a file, as far as it tells."""
    top: dict[Any, Any] = content if isinstance(content, dict) else {}
    names = [f"{name} {printable(str(dict.get(top, key)), 40)}" for key, name in _SIGNATURES.items() if key in top]
    if kind == "torch":
        with open_regular(path) as file, open_archive(file, printable(str(path))) as archive:
            versions = [each for each in archive.namelist() if each.endswith(("/version", "/.data/version"))]
            version = archive.read(versions[0])[:20].decode(errors="replace").strip() if versions else "?"
        names.insert(0, f"torch.save, zip format {printable(version)}")
    elif kind == "legacy torch":
        names.insert(0, "torch.save before torch 1.6, or its old format")
    return ", ".join(names)
