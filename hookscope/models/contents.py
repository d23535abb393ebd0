"""List what a weights file holds, without building a network and without holding its values in memory.

A separate process with limits on memory and time reads the file and returns the rows of the table. Files of plainly
stored tensors and values are read here, without torch, which takes seconds to import; others by `tensor_contents`.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from hookscope.checkpoints.fileformat import open_regular
from hookscope.checkpoints.isolation import run_isolated
from hookscope.checkpoints.nested import TensorLike
from hookscope.checkpoints.plain import PlainTensor, plain_content
from hookscope.checkpoints.weights_files import WeightsFiles
from hookscope.errors import CheckpointError, UsageError
from hookscope.models.adapters import NamedShape, adapter_remark
from hookscope.models.architecture import Candidate, nearest_network, recognise
from hookscope.models.array_values import ARRAY_TYPES, Values, values_of
from hookscope.models.listing import TensorFacts, file_listing, shared_prefix
from hookscope.models.tied import Layout
from hookscope.parameters import arg
from hookscope.results.contents import CheckpointContents, StoredEntry, StoredPart, StoredTensor
from hookscope.statistics.reduction import PIECE_ELEMENTS
from hookscope.text import printable


def list_contents(path: Path, key: str | None = None) -> CheckpointContents:
    """List what a weights file holds. Nothing in it is run; its values are read once, a piece at a time.

    Raises CheckpointError if the file cannot be read, is damaged, or holds no tensors; UntrustedFileError if reading it
    would run code; UsageError if an index is given a `key`; NothingMatchedError if there is nothing at `key`.
    """
    files = WeightsFiles.at(path)
    path = files.path
    if key is not None and files.listed:
        raise UsageError(
            f"{arg('key')} '{printable(key)}' is for a single file; {printable(path.name)} is an index of several."
        )
    looked = _listed_plain(files, key)
    if looked is None:
        from hookscope.models.tensor_contents import list_with_torch  # noqa: PLC0415 (imports torch, which is slow)

        looked = list_with_torch(files, key)
    listings: dict[Path, dict[str, Any]] = dict(zip(files.kinds, looked, strict=True))
    warnings = [note for file in looked for note in file["warnings"]]
    warnings += _unlisted(files, listings) if files.listed else [*filter(None, [files.shard_remark()])]
    tensors: dict[tuple[str, bool], list[StoredTensor]] = {}
    shapes: dict[tuple[str, bool], dict[str, tuple[int, ...]]] = {}
    for piece in (listing for file in looked for listing in file["parts"]):
        part = piece["key"], piece["is_weights"]
        rows = (StoredTensor(**{**row, "shape": tuple(row["shape"])}) for row in piece["tensors"])
        tensors.setdefault(part, []).extend(rows)
        shapes.setdefault(part, {}).update({name: tuple(shape) for name, shape in piece["shapes"].items()})
    warnings += filter(None, [adapter_remark(path.name, map(_named_shape, rows)) for rows in tensors.values()])
    recognised = cache(lambda names: tuple(map(sentence, recognise(dict(names)))))  # averaged weights have equal names
    fitting = {part: recognised(tuple(by_name.items())) if by_name else () for part, by_name in shapes.items()}
    near = {part: "" if fitting[part] else nearest_network(by_name) for part, by_name in shapes.items() if by_name}
    alone = listings.get(path, {})
    return CheckpointContents(
        name=path.name,
        kind=files.kind,
        producer=alone.get("producer", ""),
        byte_count=sum(file.stat().st_size for file in files.stored()),
        parts=tuple(
            StoredPart(*part, tuple(rows), shared_prefix(part[1], rows), fitting[part], near.get(part, ""))
            for part, rows in sorted(tensors.items(), key=lambda item: not item[0][1])  # weights first
        ),
        entries=tuple(StoredEntry(*entry) for entry in alone.get("entries", ())),
        metadata={name: text for file in looked for name, text in file["metadata"].items()},
        warnings=tuple(warnings),
    )


def _named_shape(tensor: StoredTensor) -> NamedShape:
    is_zero = tensor.min == 0 == tensor.max and not (tensor.nan_count or tensor.inf_count)
    return NamedShape(tensor.key, tensor.shape, is_zero)


def _listed_plain(files: WeightsFiles, key: str | None) -> list[dict[str, Any]] | None:
    """Return the listing of each file; None if torch has to read one of them, or to report its fault."""

    def list_all() -> list[dict[str, Any]] | None:
        listed = []
        for path, kind in files.kinds.items():
            if (content := plain_content(path, kind)) is None:
                return None
            listed.append(file_listing(path, kind, content, key, partial(_facts_of, path)))
        return listed

    listed: list[dict[str, Any]] | None = None
    with suppress(CheckpointError):
        listed = run_isolated(list_all, files)
    return listed


def _facts_of(path: Path, named: list[tuple[str, TensorLike]]) -> tuple[list[TensorFacts], list[str]]:
    with open_regular(path) as file:
        read = cache(lambda begin, byte_count, dtype: values_of(_pieces(file, begin, byte_count, dtype), dtype))
        facts = [
            _facts(tensor, read(tensor.begin, tensor.byte_count, tensor.dtype))
            for _, tensor in named
            if isinstance(tensor, PlainTensor)
        ]
    return facts, []


def _facts(tensor: PlainTensor, values: Values) -> TensorFacts:
    place = tensor.offset, tensor.shape, tensor.strides
    layout = Layout(tensor.storage, tensor.dtype, tensor.item_bytes, *place) if tensor.byte_count else None
    return TensorFacts(tensor.shape, tensor.dtype, tensor.byte_count, layout, values)


def _pieces(file: BinaryIO, begin: int, byte_count: int, dtype: str) -> Iterator[NDArray[np.generic]]:
    kind = np.dtype(ARRAY_TYPES[dtype])
    file.seek(begin)
    left = byte_count
    while left:
        wanted = min(PIECE_ELEMENTS * kind.itemsize, left)
        content = file.read(wanted)
        if len(content) < wanted:
            raise CheckpointError("the file was cut short while it was read")
        left -= len(content)
        yield np.frombuffer(content, kind)


def _unlisted(files: WeightsFiles, listings: Mapping[Path, Mapping[str, Any]]) -> list[str]:
    held = {path: [key for part in file["parts"] for key in part["names"]] for path, file in listings.items()}
    return [
        f"{printable(shard.name)}: the index does not list {printable(', '.join(more), 200)}."
        for shard, more in files.surplus(held).items()
        if more
    ]


def sentence(candidate: Candidate) -> str:
    """Return a network that fits, in words."""
    arguments = ", ".join(f"{name}={value!r}" for name, value in candidate.arguments.items())
    remarks = "; ".join(candidate.remarks)
    text = f"{candidate.model}{f' ({arguments})' if arguments else ''}{f': {remarks}' if remarks else ''}"
    return printable(text, 400)
