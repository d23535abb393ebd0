"""Find the tensors in files of tensors and plain values, without torch and without reading the tensors' values.

A file of any other content, odd or damaged, is left to `reading`, which reports the fault. So everything here goes by
lists of what is allowed: the pickle's instructions, what it imports, how tensors lie in the file.
"""

import math
import re
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from zipfile import ZipFile, ZipInfo

import safetensors

from hookscope.checkpoints.fileformat import (
    FileKind,
    check_checksums,
    content_begins,
    open_archive,
    open_regular,
    safetensors_header,
)
from hookscope.checkpoints.nested import ITEM_BYTES, TensorLike, is_floating_point, parts_in
from hookscope.checkpoints.stand_ins import is_bare, is_empty_hooks, replace_stand_ins
from hookscope.checkpoints.unpickler import PLAIN_INSTRUCTIONS, Global, InertUnpickler, Reference, StandIn
from hookscope.text import printable

# torch's names of the dtypes that are read here, by those of storages in torch.save's files, and of safetensors.
_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}
_SAFETENSORS = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "BOOL": "bool",
    "U8": "uint8",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}

# What the pickles name that torch.save writes of plain values.
_GLOBALS = frozenset(
    {
        *(f"torch.{kind}" for kind in _STORAGES),
        *("collections.OrderedDict", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter"),
    }
)

_LOCATION = re.compile(r"cpu|cuda(:\d+)?")  # where the tensors were that torch.save writes with their values

_FORMAT_VERSION = b"3"  # all zip files of torch.save so far

# The pickle of a published network takes a hundred bytes per tensor, the pickle of its training state three hundred.
_PICKLE_BYTES_LIMIT = 2**21

# Types of the values other than tensors, and of keys, also inside tuples.
_VALUES = frozenset({str, int, float, bool, type(None)})


@dataclass(frozen=True, slots=True)
class PlainTensor(TensorLike):
    """A tensor of a file whose elements fill one stretch of it, in whatever order of axes.

    `dtype` is torch's name without the prefix. `strides` and `offset`, its start in the storage, are in elements;
    `begin` is its first byte in the file. Tensors with equal `storage` may share memory; `kind` is the class.
    """

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]
    storage: str
    offset: int
    begin: int
    kind: str = "Tensor"

    @property
    def item_bytes(self) -> int:
        """Bytes of an element."""
        return ITEM_BYTES[self.dtype]

    @property
    def byte_count(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.item_bytes


def plain_content(path: Path, kind: FileKind) -> object | None:
    """Return a file's content if it is plainly stored tensors and values, in dicts, lists and tuples; else None.

    Checksums in torch.save's format are compared. Call this in a process with limits.
    """
    try:
        if sys.byteorder != "little":
            return None
        if kind == "safetensors":
            return _plain_safetensors(path)
        return _plain_archive(path) if kind == "torch" else None
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - a damaged file raises whatever; `reading` reports what is wrong
        return None


def _plain_safetensors(path: Path) -> dict[str, PlainTensor]:
    header, begin = safetensors_header(path, _once)
    header.pop("__metadata__", None)
    with safetensors.safe_open(path, framework="numpy") as opened:  # also checks that offsets and sizes fit
        names = [*opened.keys()]
    tensors = {}
    for name in names:
        entry = header[name]
        shape = tuple(entry["shape"])
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        where = begin + entry["data_offsets"][0]
        tensors[name] = PlainTensor(shape, _SAFETENSORS[entry["dtype"]], strides, name, 0, where)
    if set(names) != set(header):
        raise ValueError
    return tensors


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError
    return dict(pairs)


def _plain_archive(path: Path) -> object:
    name = printable(str(path))
    check_checksums(partial(open_regular, path), name)
    with open_regular(path) as file, open_archive(file, name) as archive:
        members = {member.filename: member for member in archive.infolist()}
        (place,) = (filename for filename in members if filename.endswith("/data.pkl"))
        folder = place.removesuffix("data.pkl")
        if folder.count("/") != 1 or not all(filename.startswith(folder) for filename in members):
            raise ValueError
        _check_directory(file, archive)
        order = f"{folder}byteorder"
        if order in members and archive.read(order) != b"little":
            raise ValueError
        if archive.read(f"{folder}version").strip() != _FORMAT_VERSION:
            raise ValueError
        spans: dict[str, tuple[int, int]] = {}

        def located(key: str, byte_count: int) -> int:
            member = members[f"{folder}data/{key}"]
            if member.file_size != byte_count:
                raise ValueError
            begin = content_begins(file, member)
            spans[key] = begin, begin + byte_count
            return begin

        content = _unpickled(archive, members[place], located)
        filled = sorted(span for span in spans.values() if span[0] < span[1])
        if any(end > begin for (_, end), (begin, _) in pairwise(filled)):
            raise ValueError
        return content


def _check_directory(file: BinaryIO, archive: ZipFile) -> None:
    """Raise ValueError unless all fields of a zip directory are as torch writes them; Python skips some fields.

    Source: PKWARE's APPNOTE 4.3.12 to 4.3.16.
    """
    members, begin = archive.infolist(), archive.start_dir
    end64 = begin
    for member in members:
        file.seek(end64 + 28)  # lengths of name, more fields and comment, and a number of the disk
        length = len(member.filename.encode())
        if file.read(8) != struct.pack("<4H", length, 0, 0, 0):
            raise ValueError
        end64 += 46 + length
    size = end64 - begin
    file.seek(end64)
    tail = file.read(200)
    count = len(members)
    expected = [
        struct.pack("<4L4Q", 0, 0, 0, 0, count, count, size, begin)[8:],
        struct.pack("<4sLQL", b"PK\x06\x07", 0, end64, 1),
        struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, count, count, size, begin, 0),
    ]
    if tail[:12] != struct.pack("<4sQ", b"PK\x06\x06", 44) or tail[16:] != b"".join(expected):
        raise ValueError


class _Storage(NamedTuple):
    dtype: str
    element_count: int
    begin: int


class _Tensors:
    def __init__(self, located: Callable[[str, int], int]) -> None:
        self._located = located
        self._storages: dict[str, _Storage] = {}

    def made_of(self, call: StandIn) -> PlainTensor:
        if is_bare(call) and call.name == "torch._utils._rebuild_tensor_v2":
            return self._tensor(*call.arguments)
        if is_bare(call) and call.name == "torch._utils._rebuild_parameter":
            return self._parameter(*call.arguments)
        raise ValueError

    def _parameter(self, tensor: object, requires_grad: object, hooks: object) -> PlainTensor:
        if type(tensor) is not StandIn or type(requires_grad) is not bool or not is_empty_hooks(hooks):
            raise ValueError
        data = self.made_of(tensor)
        if data.kind != "Tensor" or (requires_grad and not is_floating_point(data)):
            raise ValueError
        return replace(data, kind="Parameter")

    def _tensor(
        self, reference: object, offset: int, shape: object, strides: object, requires_grad: object, hooks: object
    ) -> PlainTensor:
        if type(reference) is not Reference or type(shape) is not tuple or type(strides) is not tuple:
            raise ValueError
        storage = self._storage(*reference.identifier)
        numbers = (offset, *shape, *strides)
        if type(requires_grad) is not bool or not is_empty_hooks(hooks):
            raise ValueError
        if any(type(number) is not int or number < 0 for number in numbers) or len(shape) != len(strides):
            raise ValueError
        expected = 1
        for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
            if stride != expected:
                raise ValueError
            expected *= size
        if offset + math.prod(shape) > storage.element_count:
            raise ValueError
        begin = storage.begin + offset * ITEM_BYTES[storage.dtype]
        tensor = PlainTensor(shape, storage.dtype, strides, reference.identifier[2], offset, begin)
        if requires_grad and not is_floating_point(tensor):
            raise ValueError
        return tensor

    def _storage(self, tag: object, kind: object, key: object, location: object, count: object) -> _Storage:
        if tag != "storage" or type(kind) is not Global or type(key) is not str or not key.isascii():
            raise ValueError
        if type(location) is not str or not _LOCATION.fullmatch(location) or type(count) is not int or count < 0:
            raise ValueError
        dtype = _STORAGES[kind.name.removeprefix("torch.")]
        if key not in self._storages:
            begin = self._located(key, count * ITEM_BYTES[dtype])
            self._storages[key] = _Storage(dtype, count, begin)
        if self._storages[key][:2] != (dtype, count):
            raise ValueError
        return self._storages[key]


def _unpickled(archive: ZipFile, member: ZipInfo, located: Callable[[str, int], int]) -> object:
    """Return the content of a pickle; `located` returns a storage's first byte, given its key and count of bytes."""
    if member.file_size > _PICKLE_BYTES_LIMIT:
        raise ValueError
    content = archive.read(member)
    unpickler = InertUnpickler(BytesIO(content))
    pickled = unpickler.load()
    if not content.startswith(b"\x80\x02") or not unpickler.instructions <= PLAIN_INSTRUCTIONS:
        raise ValueError
    if not unpickler.globals.keys() <= _GLOBALS:
        raise ValueError
    tensors = _Tensors(located)
    rebuilt = replace_stand_ins(pickled, tensors.made_of)
    for call in unpickler.calls:  # torch also makes results that are then dropped
        replace_stand_ins(call, tensors.made_of)
    _check_plain(rebuilt)
    return rebuilt


def _check_plain(content: object) -> None:
    has_tensor = False
    for part in parts_in(content):
        has_tensor |= type(part) is PlainTensor
        keys = part if isinstance(part, dict) else ()
        if any(type(item) not in _VALUES for key in keys for item in (key if type(key) is tuple else (key,))):
            raise ValueError
        if type(part) not in {*_VALUES, PlainTensor} and not isinstance(part, dict | list | tuple):
            raise ValueError
    if not has_tensor:
        raise ValueError
