"""The layout of a distributed checkpoint: a folder of `.metadata` and of files of slices, each what torch.save writes.

torch reads `.metadata` with Python's unpickler, which runs whatever that names. Here it is read with stand-ins, and may
name only the classes that torch writes there; every shape, place and file name is checked against the slices. No torch.

Source: torch.distributed.checkpoint, `metadata.py`, `filesystem.py` and `_nested_dict.py` of torch 2.10 to 2.15.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from hookscope.checkpoints.fileformat import METADATA, PICKLE_BYTES_LIMIT, distributed_files, open_regular, path_beside
from hookscope.checkpoints.nested import ITEM_BYTES
from hookscope.checkpoints.unpickler import (
    ABSENT,
    Global,
    InertUnpickler,
    StandIn,
    TruncatedPickleError,
    UnreadablePickleError,
)
from hookscope.errors import CheckpointError, UntrustedFileError
from hookscope.text import printable

_METADATA = "torch.distributed.checkpoint.metadata."
_FILES = "torch.distributed.checkpoint.filesystem."
_CLASSES = frozenset(
    {
        *(f"{_METADATA}{name}" for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata")),
        *(f"{_METADATA}{name}" for name in ("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING")),
        *(f"{_METADATA}{name}" for name in ("MetadataIndex", "StorageMeta")),
        *(f"{_FILES}{name}" for name in ("_StorageInfo", "_StoragePrefix")),
        *("torch.Size", "torch.serialization._get_layout", "collections.OrderedDict"),
        # Where it was written.
        *(f"pathlib{local}.{name}Path" for local in ("", "._local") for name in ("", "Posix", "Windows")),
        *(f"pathlib{local}.Pure{name}Path" for local in ("", "._local") for name in ("", "Posix", "Windows")),
    }
)

_QUANTISED = {"qint8": 1, "quint8": 1, "qint32": 4, "quint4x2": 0.5, "quint2x4": 0.25}  # bytes of an element

# Chunks of one tensor, keys that lead to a value, values of a list.
_CHUNKS_LIMIT = 10_000
_DEPTH_LIMIT = 100
_LIST_LIMIT = 1_000_000
_GAPS_LIMIT = 1_000  # values of a list that hold nothing, such as empty dicts, and are therefore not in the folder

_Key = str | int


@dataclass(frozen=True, slots=True)
class Slice:
    """The bytes of a file that hold one value as torch.save writes it."""

    file: Path
    begin: int
    length: int

    def read(self) -> bytes:
        """Return the bytes; CheckpointError if they are not all there."""
        with open_regular(self.file) as file:
            file.seek(self.begin)
            content = file.read(self.length)
        if len(content) < self.length:
            raise CheckpointError(f"{printable(str(self.file))} was cut short while it was read.")
        return content


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tensor: where it begins, its sizes, and the slice that holds it; None if it is empty."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Slice | None


@dataclass(frozen=True, slots=True)
class ChunkedTensor:
    """A tensor that chunks cover, each element once. `dtype` is torch's name without the prefix."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """A value of a distributed checkpoint: the keys that lead to it, and the tensor or the slice of anything else."""

    name: str
    keys: tuple[_Key, ...]
    value: ChunkedTensor | Slice

    def slices(self) -> list[Slice]:
        """Return the slices that it is in."""
        if isinstance(self.value, Slice):
            return [self.value]
        return [chunk.place for chunk in self.value.chunks if chunk.place is not None]


def _is_memory_format(arguments: tuple[Any, ...]) -> bool:
    match arguments:
        case (Global(name=holder), str()):
            return holder == f"{_METADATA}_MEM_FORMAT_ENCODING"
    return False


def read_metadata(folder: Path) -> list[Stored]:
    """Return the values that a folder's `.metadata` lists, in order; every slice is within its file.

    Raises UntrustedFileError if it names a class that torch does not write there, CheckpointError if it is damaged,
    contradicts itself or the files beside it, or leaves the folder.
    """
    path = folder / METADATA
    name = printable(str(path))
    with open_regular(path) as file:
        content = file.read(PICKLE_BYTES_LIMIT + 1)
    if len(content) > PICKLE_BYTES_LIMIT:
        raise CheckpointError(f"{name} has more than {PICKLE_BYTES_LIMIT // 2**20} MiB; refused.")
    unpickler = InertUnpickler(BytesIO(content))
    try:
        held = unpickler.load()
    except TruncatedPickleError as error:
        raise CheckpointError(f"{name} is truncated; download it again.") from error
    except UnreadablePickleError as error:
        raise _damaged(name, "it is no pickle that torch writes") from error
    allowed = {*_CLASSES, *(f"torch.{dtype}" for dtype in (*ITEM_BYTES, *_QUANTISED))}
    members = [call.arguments for call in unpickler.calls if call.name == "builtins.getattr"]
    if members and all(map(_is_memory_format, members)):  # Python 3.11.0 to 3.11.3 pickle enum members so
        allowed.add("builtins.getattr")
    if foreign := [symbol for symbol in unpickler.globals if symbol not in allowed]:
        raise UntrustedFileError(
            f"{name} holds pickled objects: reading it with torch would import {printable(foreign[0], 80)}, which can "
            "run code; save it again with torch.distributed.checkpoint."
        )
    sizes = {data_file: data_file.stat().st_size for data_file in distributed_files(folder) if data_file.exists()}
    try:
        stored = _stored(held, path, sizes)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise _damaged(name, str(error) if type(error) is ValueError else "it is not what torch writes") from error
    length = sum(place.length for entry in stored for place in entry.slices())
    if length > sum(sizes.values()):
        raise _damaged(name, "it names more bytes than its files have")
    return stored


class _Level(dict[_Key, Any]):
    """A level of a nested state dict: a dict that is a value has another class."""


def nested(values: Sequence[tuple[Stored, Any]], name: str) -> Any:
    """Put values at their keys into dicts and lists, as in the state dict that torch took apart.

    `name` is the folder's in messages. Raises CheckpointError if two values are in each other's way, or a list has many
    gaps.
    """
    root = _Level()
    for stored, value in values:
        *way, last = stored.keys
        level: Any = root
        for key in way:
            level = level.setdefault(key, _Level())
            if type(level) is not _Level:
                raise _damaged(name, f"'{printable(stored.name, 80)}' lies in another value")
        if last in level:
            raise _damaged(name, f"'{printable(stored.name, 80)}' is there twice")
        level[last] = value
    return _plain(root, name)


def _plain(level: _Level, name: str) -> dict[_Key, Any] | list[Any]:
    made = {key: _plain(value, name) if type(value) is _Level else value for key, value in level.items()}
    if not any(type(key) is int for key in made):
        return made
    positions = [key for key in made if type(key) is int]
    if len(positions) < len(made) or max(positions) >= len(made) + _GAPS_LIMIT:
        raise _damaged(name, "it has a list with gaps")
    return [made.get(at) for at in range(max(positions) + 1)]


def _damaged(name: str, why: str) -> CheckpointError:
    return CheckpointError(f"{name} is damaged, or made to be misread: {why}; download it again.")


def _slice_of(described: object, metadata: Path, sizes: Mapping[Path, int]) -> Slice:
    name, fields = printable(str(metadata)), _fields(described, f"{_FILES}_StorageInfo")
    file, begin, length = fields["relative_path"], fields["offset"], fields["length"]
    if type(file) is not str or any(type(number) is not int or number < 0 for number in (begin, length)):
        raise TypeError
    if fields.get("transform_descriptors"):
        raise CheckpointError(
            f"{name}: its slices were transformed when they were written, for example compressed, which "
            "hookscope cannot read; save them without extensions."
        )
    path = path_beside(metadata, file, name)
    if not path.exists():
        raise CheckpointError(f"{name} names '{printable(file, 80)}', which is not there; download it again.")
    if begin + length > sizes.get(path, 0):
        raise ValueError(f"it names bytes that '{printable(file, 80)}' does not have")
    return Slice(path, begin, length)


def _stored(held: object, metadata: Path, sizes: Mapping[Path, int]) -> list[Stored]:
    fields = _fields(held, f"{_METADATA}Metadata")
    described, places = fields["state_dict_metadata"], fields["storage_data"]
    slices: dict[tuple[str, tuple[int, ...] | None], Slice] = {}
    for index, place in dict.items(places):
        key = _fields(index, f"{_METADATA}MetadataIndex")
        offset = key.get("offset")
        at = key["fqn"], None if offset is None else _size(offset)
        if at in slices:
            raise ValueError(f"it names '{printable(str(at[0]), 80)}' twice")
        slices[at] = _slice_of(place, metadata, sizes)
    keys = fields.get("planner_data")
    stored = []
    for name, value in dict.items(described):
        if type(name) is not str:
            raise TypeError
        way = dict.get(keys, name, (name,)) if type(keys) is dict else (name,)
        if type(way) is not tuple or not 0 < len(way) <= _DEPTH_LIMIT or not all(map(_is_key, way)):
            raise TypeError
        if type(value) is StandIn and value.name == f"{_METADATA}BytesStorageMetadata":
            stored.append(Stored(name, way, slices[name, None]))
        else:
            stored.append(Stored(name, way, _tensor(name, value, slices)))
    return stored


def _is_key(value: object) -> bool:
    return type(value) is str or (type(value) is int and 0 <= value < _LIST_LIMIT)


def _tensor(name: str, described: object, slices: Mapping[tuple[str, tuple[int, ...] | None], Slice]) -> ChunkedTensor:
    fields = _fields(described, f"{_METADATA}TensorStorageMetadata")
    properties = fields["properties"]
    dtype = properties.state[0]
    if type(properties) is not StandIn or type(dtype) is not Global:
        raise TypeError
    kind = dtype.name.removeprefix("torch.")
    shape = _size(fields["size"])
    chunks = []
    if len(fields["chunks"]) > _CHUNKS_LIMIT:
        raise ValueError(f"'{printable(name, 80)}' has more than {_CHUNKS_LIMIT} chunks")
    for entry in fields["chunks"]:
        chunk = _fields(entry, f"{_METADATA}ChunkStorageMetadata")
        offsets, sizes = _size(chunk["offsets"]), _size(chunk["sizes"])
        place = slices.get((name, offsets)) if math.prod(sizes) == 0 else slices[name, offsets]
        if place is not None and math.prod(sizes) * _least_bytes(kind) > place.length:
            raise ValueError(f"a slice of '{printable(name, 80)}' is smaller than the values in it")
        chunks.append(Chunk(offsets, sizes, place))
    if not _are_covering(shape, chunks):
        raise ValueError(f"the chunks of '{printable(name, 80)}' do not cover it, each element once")
    return ChunkedTensor(shape, kind, tuple(chunks))


def _least_bytes(dtype: str) -> float:
    return _QUANTISED[dtype] if dtype in _QUANTISED else ITEM_BYTES[dtype]


def _are_covering(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> bool:
    if any(len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape) for chunk in chunks):
        return False
    axes = [axis for chunk in chunks for axis in zip(chunk.offsets, chunk.sizes, shape, strict=True)]
    if max(shape, default=0) >= 2**63 or any(offset + size > whole for offset, size, whole in axes):
        return False
    filled = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    if sum(math.prod(chunk.sizes) for chunk in filled) != math.prod(shape):
        return False
    begins = np.array([chunk.offsets for chunk in filled], np.int64).reshape(len(filled), len(shape))
    stops = begins + np.array([chunk.sizes for chunk in filled], np.int64).reshape(begins.shape)
    for at in range(1, len(filled)):
        if ((begins[:at] < stops[at]) & (begins[at] < stops[:at])).all(axis=1).any():
            return False
    return True


def _fields(value: object, name: str) -> dict[str, Any]:
    if type(value) is not StandIn or value.name != name or value.arguments or value.entries or value.elements:
        raise TypeError
    fields = {} if value.state is ABSENT else value.state
    if type(fields) is not dict:
        raise TypeError
    return fields


def _size(value: object) -> tuple[int, ...]:
    match value:
        case StandIn(name="torch.Size", arguments=(tuple(sizes),)) if all(type(size) is int for size in sizes):
            if min(sizes, default=0) >= 0:
                return sizes
    raise TypeError
