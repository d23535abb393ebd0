"""Find the tensors in files of nothing but tensors by name, without torch and without reading their values.

A file of any other content, odd or damaged, is left to `reading`, which says what is wrong with it. So everything here
goes by lists of what is allowed: the pickle's instructions, what it imports, how tensors lie in the file.
"""

import json
import math
import pickle
import pickletools
import re
import struct
import sys
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import ZipFile, ZipInfo

import safetensors

from hookscope.checkpoints.fileformat import FileKind, check_checksums, open_archive, open_regular, safetensors_header
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
}
_ITEM_BYTES = {
    **dict.fromkeys(("float64", "int64"), 8),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool"), 1),
}

# The instructions of the pickles that torch.save writes of a state dict; torch's safe reader knows all of them.
_INSTRUCTIONS = frozenset(
    {
        *("PROTO", "STOP", "GLOBAL", "REDUCE", "BUILD", "BINPERSID", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
        *("EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_TUPLE", "MARK", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
        *("NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE"),
    }
)

# Where the tensors were that torch.save writes with their values.
_LOCATION = re.compile(r"cpu|cuda(:\d+)?")

_FORMAT_VERSION = "3"  # of the zip files of torch.save since there are any

# Our choice: the pickle of a published network takes a hundred bytes per tensor.
_PICKLE_BYTES_LIMIT = 2**20


@dataclass(frozen=True, slots=True)
class PlainTensor:
    """A tensor of a file whose elements fill one stretch of it, in whatever order of axes, and share it with no other.

    Attributes:
        dtype: torch's name without the prefix: "float32".
        begin: The byte of the file at which its elements begin.
    """

    shape: tuple[int, ...]
    dtype: str
    begin: int

    @property
    def byte_count(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class PlainFile:
    """What a file of nothing but tensors holds, in the order in which `reading` gives it.

    Attributes:
        metadata: A safetensors file's own, texts by name.
        version: Of the format of torch.save; "" for safetensors.
    """

    tensors: Mapping[str, PlainTensor]
    metadata: Mapping[str, str]
    version: str = ""


def plain_file(path: Path, kind: FileKind) -> PlainFile | None:
    """Return what a file holds if it is nothing but tensors by name, plainly stored; None for anything else.

    A file in torch.save's format has its checksums compared. Going through it belongs into a process with limits.
    """
    try:
        if sys.byteorder != "little":
            return None
        if kind == "safetensors":
            return _plain_safetensors(path)
        return _plain_archive(path) if kind == "torch" else None
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - a damaged file raises whatever; `reading` says what is wrong
        return None


def _plain_safetensors(path: Path) -> PlainFile:
    _, begin = safetensors_header(path)
    with open_regular(path) as file:
        file.seek(8)
        header = json.loads(file.read(begin - 8), object_pairs_hook=_once)
    metadata = header.pop("__metadata__", None) or {}
    with safetensors.safe_open(path, framework="numpy") as opened:  # which checks that everything fits
        names = [*opened.keys()]
    tensors = {}
    for name in names:
        entry = header[name]
        dtype = _SAFETENSORS[entry["dtype"]]
        tensors[name] = PlainTensor(tuple(entry["shape"]), dtype, begin + entry["data_offsets"][0])
    if set(names) != set(header):
        raise ValueError
    return PlainFile(tensors, {str(name): str(value) for name, value in metadata.items()})


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError
    return dict(pairs)


def _plain_archive(path: Path) -> PlainFile:
    name = printable(str(path))
    with open_regular(path) as file:
        check_checksums(file, name)
        with open_archive(file, name) as archive:
            members = {member.filename: member for member in archive.infolist()}
            (place,) = (each for each in members if each.endswith("/data.pkl"))
            folder = place.removesuffix("data.pkl")
            if folder.count("/") != 1 or not all(each.startswith(folder) for each in members):
                raise ValueError
            _check_directory(file, archive)
            order = f"{folder}byteorder"
            if order in members and archive.read(order) != b"little":
                raise ValueError
            written = _unpickled(archive, members[place])
            if archive.read(f"{folder}version").strip() != _FORMAT_VERSION.encode():
                raise ValueError
            keys = [tensor.storage.key for tensor in written.values()]
            if len(set(keys)) < len(keys):  # they share memory, or seem to
                raise ValueError
            tensors = {}
            for each, tensor in written.items():
                item = _ITEM_BYTES[tensor.storage.dtype]
                member = members[f"{folder}data/{tensor.storage.key}"]
                inside = tensor.offset + math.prod(tensor.shape) <= tensor.storage.count
                if member.file_size != tensor.storage.count * item or not inside:
                    raise ValueError
                begin = _content_begins(file, member) + tensor.offset * item
                tensors[each] = PlainTensor(tensor.shape, tensor.storage.dtype, begin)
            spans = sorted((each.begin, each.begin + each.byte_count) for each in tensors.values() if each.byte_count)
            if any(end > begin for (_, end), (begin, _) in pairwise(spans)):
                raise ValueError
            return PlainFile(tensors, {}, _FORMAT_VERSION)


def _check_directory(file: BinaryIO, archive: ZipFile) -> None:
    """Raise ValueError unless a directory is what torch writes, field by field; Python does not look at all of them.

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


def _content_begins(file: BinaryIO, member: ZipInfo) -> int:
    """Return where a stored member's bytes begin: behind a local header of 30 bytes, a name and more fields.

    Source: PKWARE's APPNOTE 4.3.7.
    """
    file.seek(member.header_offset + 26)
    lengths = file.read(4)
    return member.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str
    key: str
    count: int


@dataclass(frozen=True, slots=True)
class _Written:
    """A tensor as a pickle describes it, the offset in elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _StorageType:
    dtype: str


class _Rebuild:
    """Stands in for torch._utils._rebuild_tensor_v2."""

    __slots__ = ()

    def __call__(self, *arguments: Any) -> _Written:
        storage, offset, shape, strides, requires_grad, hooks = arguments
        numbers = (offset, *shape, *strides)
        if type(storage) is not _Storage or type(shape) is not tuple or type(strides) is not tuple:
            raise ValueError
        if requires_grad is not False or type(hooks) is not OrderedDict or OrderedDict.__len__(hooks):
            raise ValueError
        if any(type(number) is not int or number < 0 for number in numbers) or len(shape) != len(strides):
            raise ValueError
        expected = 1
        for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
            if stride != expected:
                raise ValueError
            expected *= size
        return _Written(storage, offset, shape)


class _Unpickler(pickle.Unpickler):
    """Makes nothing but dicts of stand-ins; everything else raises."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _Rebuild()
        if module == "torch":
            return _StorageType(_STORAGES[name])
        raise ValueError

    def persistent_load(self, pid: Any) -> _Storage:
        what, kind, key, location, count = pid
        if what != "storage" or type(kind) is not _StorageType or type(key) is not str or not key.isascii():
            raise ValueError
        if type(location) is not str or not _LOCATION.fullmatch(location) or type(count) is not int or count < 0:
            raise ValueError
        return _Storage(kind.dtype, key, count)


def _unpickled(archive: ZipFile, member: ZipInfo) -> dict[str, _Written]:
    """Return the tensors in a pickle by name; raises whatever if it is anything but a dict of tensors by name."""
    if member.file_size > _PICKLE_BYTES_LIMIT:
        raise ValueError
    content = archive.read(member)
    used = {instruction.name for instruction, _, _ in pickletools.genops(content)}
    if not content.startswith(b"\x80\x02") or not used <= _INSTRUCTIONS:
        raise ValueError
    found = _Unpickler(BytesIO(content)).load()
    if type(found) not in (dict, OrderedDict):
        raise ValueError
    if any(type(name) is not str or type(value) is not _Written for name, value in dict.items(found)):
        raise ValueError
    return dict(dict.items(found))
