"""List what a weights file holds, without building a network and without holding its values in memory."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hookscope.errors import ModelNotFoundError, UsageError
from hookscope.files.archive import open_archive
from hookscope.files.fileformat import FileKind, open_regular
from hookscope.files.reading import read_layout, tensors_within
from hookscope.models.architecture import Candidate, recognise, state_shapes
from hookscope.models.building import FileOptions
from hookscope.models.checkpoint import files_of, read_vetted
from hookscope.models.finding import Weights, weights_in
from hookscope.models.nonfinite import count, count_stored
from hookscope.models.shards import check_names, read_index
from hookscope.results import CheckpointContents, StoredEntry, StoredTensor
from hookscope.text import printable, shape_text

# What training libraries leave at the top of their checkpoints, and what they are called.
_SIGNATURES = {"pytorch-lightning_version": "Lightning", "transformers_version": "transformers"}

# Our choice: a text that fits a line.
_LONGEST_VALUE = 80


def list_contents(path: Path, key: str | None = None) -> CheckpointContents:
    """List what a weights file holds. Nothing in it is run; its values are read once, a piece at a time.

    Args:
        path: A weights file, or the `index.json` of a sharded one.
        key: Where in it the weights are; None to find them.

    Raises:
        CheckpointError: If the file cannot be read, is damaged, or holds no state dict.
        UntrustedFileError: If reading it would run code from the file.
        UsageError: If it holds several state dicts and there is no `key`, or an index is given one.
        NothingMatchedError: If there is nothing at `key`.
    """
    kind, kinds = files_of(path)
    if key is not None and kinds.keys() != {path}:
        raise UsageError(
            f"--key '{printable(key)}' is for a single file; {printable(path.name)} is an index of several."
        )
    contents = read_vetted(kinds, printable(str(path)), FileOptions(key=key))
    found = {file: weights_in(contents[file], printable(str(file)), key) for file in kinds}
    notes = [note for weights in found.values() for note in weights.notes]
    notes += _unlisted(path, found) if path not in kinds else []
    tensors: list[StoredTensor] = []
    metadata: dict[str, str] = {}
    state: dict[str, Any] = {}
    for file, weights in found.items():
        tensors += _stored(file, kinds[file], contents[file], weights)
        metadata |= _metadata(file, kinds[file])
        state |= weights.state
    architectures, doubt = _architectures(state)
    alone = found.get(path)
    return CheckpointContents(
        name=path.name,
        kind=kind,
        producer=_producer(path, kind, contents.get(path)),
        byte_count=sum(file.stat().st_size for file in kinds),
        weights_key=".".join(map(str, alone.keys)) if alone else "",
        tensors=tuple(tensors),
        entries=_entries(contents[path]) if alone and alone.keys else (),
        metadata=metadata,
        prefix=_common_prefix([tensor.key for tensor in tensors]),
        architectures=architectures,
        warnings=(*dict.fromkeys(notes), *doubt),
    )


def _unlisted(index: Path, found: Mapping[Path, Weights]) -> list[str]:
    """Hold what shards hold against their index; return a sentence for each that holds more.

    Raises:
        CheckpointError: If a tensor is missing, or in two of them.
    """
    name, listed = printable(str(index)), read_index(index)
    owners = {tensor: shard for shard, tensors in listed.items() for tensor in tensors}
    surplus = {
        shard: check_names(name, shard, tensors, found[shard].state, owners) for shard, tensors in listed.items()
    }
    return [
        f"{printable(shard.name)}: the index does not list {printable(', '.join(more), 200)}."
        for shard, more in surplus.items()
        if more
    ]


def _architectures(state: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the networks that fit, in words, and why there may be others."""
    try:
        return tuple(map(_sentence, recognise(state_shapes(state)))), ()
    except ModelNotFoundError as error:  # time ran out
        return (), (str(error),)


def _common_prefix(names: Sequence[str]) -> str:
    """Return what all dotted names start with, of whole parts; "" for nothing, and for a single name."""
    common: list[str] = []
    for parts in zip(*(name.split(".") for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common) if len(names) > 1 else ""


def _stored(path: Path, kind: FileKind, content: object, weights: Weights) -> Iterator[StoredTensor]:
    """Yield the tensors of a state dict, their values counted."""
    base = _mapped_at(path, kind, content)
    owners: dict[int, str] = {}
    with open_regular(path) as file:
        for name, tensor in _named(weights.state.items()):
            values, pointer = tensor, 0
            if tensor.layout is not torch.strided:
                values = torch.Tensor.coalesce(tensor).values() if tensor.is_sparse else tensor.values()
            elif tensor.numel():
                pointer = tensor.untyped_storage().data_ptr()
            counted = count_stored(file, pointer - base, tensor) if pointer and base is not None else count(values)
            owner = owners.setdefault(pointer, name) if pointer else name
            yield StoredTensor(
                key=name,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                byte_count=values.numel() * values.element_size(),
                nan_count=None if counted is None else counted[0],
                inf_count=None if counted is None else counted[1],
                tied_to="" if owner == name else owner,
            )


def _named(values: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a state dict by name; those of a quantised network may stand in tuples: "fc.packed[0]"."""
    for name, value in values:
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, list | tuple):
            yield from ((f"{name}[{at}]", each) for at, each in enumerate(value) if isinstance(each, Tensor))


def _mapped_at(path: Path, kind: FileKind, content: object) -> int | None:
    """Return the address at which the first byte of a file is mapped; None if its tensors are copies.

    Reading mapped values would fill memory with the whole file: they are read from the file instead, piece by piece.
    """
    tensors = [tensor for tensor in tensors_within(content) if tensor.layout is torch.strided and tensor.numel()]
    if kind == "legacy torch" or not tensors:
        return None
    if kind == "safetensors" and isinstance(content, dict):
        begins = _safetensors_begins(path)
        bases = {tensor.data_ptr() - begins[name] for name, tensor in content.items() if name in begins}
    else:
        try:
            layout = read_layout(path)
        except NotImplementedError:  # a quantised tensor cannot be on the meta device
            return None
        layouts = [each for each in tensors_within(layout) if each.layout is torch.strided and each.numel()]
        offsets: list[Any] = [each.untyped_storage()._checkpoint_offset for each in layouts]  # noqa: SLF001 - the one way
        pointers = [tensor.untyped_storage().data_ptr() for tensor in tensors]
        bases = {pointer - offset for pointer, offset in zip(pointers, offsets, strict=True)}
    return bases.pop() if len(bases) == 1 else None


def _safetensors_begins(path: Path) -> dict[str, int]:
    """Return where in a safetensors file the bytes of each tensor that has any begin."""
    header, begin = _safetensors_header(path)
    return {
        name: begin + entry["data_offsets"][0]
        for name, entry in header.items()
        if name != "__metadata__" and entry["data_offsets"][0] != entry["data_offsets"][1]
    }


def _safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header of an intact safetensors file, and where the bytes after it begin.

    Source: the format's description, https://github.com/huggingface/safetensors#format.
    """
    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    return header, 8 + length


def _entries(content: object) -> tuple[StoredEntry, ...]:
    """Describe what stands at the top of a training checkpoint."""
    if not isinstance(content, dict):
        return ()
    return tuple(
        StoredEntry(printable(str(key), _LONGEST_VALUE), type(value).__name__, _summary(value))
        for key, value in dict.items(content)
        if isinstance(key, str | int)
    )


def _summary(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{shape_text(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, dict | list | tuple):
        tensor_count = sum(1 for _ in tensors_within(value))
        entries = "1 entry" if len(value) == 1 else f"{len(value)} entries"
        return f"{entries}, {tensor_count} tensor{'s' * (tensor_count != 1)}"
    if isinstance(value, str | int | float | bool | None):
        return printable(str(value), _LONGEST_VALUE)
    return ""


def _metadata(path: Path, kind: FileKind) -> dict[str, str]:
    """Return the text that a safetensors file has beside its tensors."""
    if kind != "safetensors":
        return {}
    metadata = _safetensors_header(path)[0].get("__metadata__") or {}
    return {str(name): str(value) for name, value in metadata.items()}


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


def _sentence(candidate: Candidate) -> str:
    arguments = ", ".join(f"{name}={value!r}" for name, value in candidate.arguments.items())
    remarks = "; ".join(candidate.remarks)
    return printable(
        f"{candidate.model}{f' ({arguments})' if arguments else ''}{f': {remarks}' if remarks else ''}", 400
    )
