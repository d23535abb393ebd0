"""Read the tensors of a file that names classes which torch's safe reader refuses, without importing any of them.

The pickle is read by `unpickler`, which makes nothing but stand-ins. Which of these are tensors and arrays is decided
here, by name, and their storages are mapped from the file. What is read has passed `reading.inspect_isolated`.
"""

import math
import re
import sys
from collections.abc import Callable
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hookscope.checkpoints.fileformat import (
    LEGACY_PICKLES,
    FileKind,
    content_begins,
    is_utf8,
    open_archive,
    open_regular,
)
from hookscope.checkpoints.stand_ins import is_bare, is_empty_hooks, module_state, replace_stand_ins
from hookscope.checkpoints.unpickler import ABSENT, Global, InertUnpickler, Reference, StandIn, UnreadablePickleError
from hookscope.errors import CheckpointError
from hookscope.text import printable

# torch's dtypes by the names of storage classes, and by their own.
_STORAGES = {
    f"{place}.{name}": dtype
    for dtype, name in torch.storage._dtype_to_storage_type_map().items()  # noqa: SLF001 - what torch.load goes by
    for place in ("torch", "torch.cuda")
} | {"torch.storage.UntypedStorage": torch.uint8, "torch.UntypedStorage": torch.uint8}
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}

_ALIGNMENT = 16  # bytes, of the widest element; unaligned arrays are copied
_NUMBERS = re.compile(r"b1|[iu][1248]|f[248]|c8|c16")  # the number types that torch has, as NumPy describes them

Located = Callable[[str, torch.dtype, int], int]
"""Given a storage's key, dtype and number of elements: returns where in the file it begins."""


def read_past_unknown(path: Path, kind: FileKind) -> object:
    """Return what a "torch", "legacy torch" or "pickle" file holds, with stand-ins for objects of unknown classes.

    Pickled modules become their state dicts, subclasses of dict and list plain ones, NumPy's arrays tensors and its
    numbers Python's. Raises UnreadablePickleError, or whatever else a damaged file runs into.
    """
    with open_regular(path) as file:
        if kind == "torch":
            content, located = _in_archive(file, printable(str(path)))
        elif kind == "legacy torch":
            content, located = _in_legacy_file(file)
        else:
            content, located = InertUnpickler(file).load(), _nowhere
    return replace_stand_ins(content, _Values(lambda: _mapped(path), located).made_of)


def read_bytes_past_unknown(content: bytes, name: str) -> object:
    """Return what the bytes of a "torch" file hold, as `read_past_unknown` does; `name` is for messages."""
    held, located = _in_archive(BytesIO(content), name)
    return replace_stand_ins(held, _Values(lambda: _in_memory(content), located).made_of)


def _mapped(path: Path) -> Any:
    if is_utf8(path):
        return torch.UntypedStorage.from_file(str(path), shared=False, nbytes=path.stat().st_size)
    with open_regular(path) as file:
        return _in_memory(file.read())


def _in_memory(content: bytes) -> Any:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).untyped_storage()


def _in_archive(file: BinaryIO, name: str) -> tuple[Any, Located]:
    archive = open_archive(file, name)
    members = {member.filename: member for member in archive.infolist()}
    folder = next(path for path in members if path.endswith("/data.pkl")).removesuffix("data.pkl")
    if f"{folder}byteorder" in members and archive.read(f"{folder}byteorder") != sys.byteorder.encode():
        raise CheckpointError(f"{name} was written on a machine of the other byte order; save it again on this one.")
    begins = {path: content_begins(file, member) for path, member in members.items()}

    def located(key: str, dtype: torch.dtype, count: int) -> int:
        place = f"{folder}data/{key}"
        if members[place].file_size != count * dtype.itemsize:
            raise UnreadablePickleError("a storage of another size")
        return begins[place]

    return InertUnpickler(BytesIO(archive.read(f"{folder}data.pkl"))).load(), located


def _in_legacy_file(file: BinaryIO) -> tuple[Any, Located]:
    """Read the pickles at a file's start; storages follow, each after its length, in the order of the last pickle."""
    for _ in range(LEGACY_PICKLES - 1):
        unpickler = InertUnpickler(file)
        content = unpickler.load()
    keys = InertUnpickler(file).load()
    sizes = {key: dtype.itemsize for key, dtype, _ in map(_storage_of, unpickler.references)}
    begins: dict[str, tuple[int, int]] = {}
    for key in keys:
        count = int.from_bytes(file.read(8), "little")
        begins[key] = file.tell(), count
        file.seek(count * sizes[key], 1)

    def located(key: str, _: torch.dtype, count: int) -> int:
        begin, stored = begins[key]
        if stored != count:
            raise UnreadablePickleError("a storage of another size")
        return begin

    return content, located


def _nowhere(*_: object) -> int:
    raise UnreadablePickleError("a storage outside of torch's files")


def _storage_of(reference: object) -> tuple[str, torch.dtype, int]:
    match reference.identifier if isinstance(reference, Reference) else None:
        case ("storage", Global(name=name), str(key), str(_), int(count), *rest) if rest in ([], [None]):
            return key, _STORAGES[name], count
    raise UnreadablePickleError("an invalid storage")


class _Values:
    def __init__(self, whole: Callable[[], Any], located: Located) -> None:
        self._whole, self._located = cache(whole), located
        self._storages: dict[str, tuple[torch.UntypedStorage, torch.dtype]] = {}

    def made_of(self, call: StandIn) -> Any:
        if (make := _MAKERS.get(call.name)) is not None:
            return make(self, call)
        if (state := module_state(call)) is not None:
            return state
        if call.entries:  # a subclass of dict
            return dict(call.entries)
        return [*call.elements] if call.elements else call

    def _storage(self, reference: object) -> tuple[torch.UntypedStorage, torch.dtype]:
        key, dtype, count = _storage_of(reference)
        if key not in self._storages:
            begin, size = self._located(key, dtype, count), count * dtype.itemsize
            whole = self._whole()
            if begin + size > whole.nbytes():
                raise UnreadablePickleError("a storage beyond the end of the file")
            held = whole[begin : begin + size] if size else torch.empty(0).untyped_storage()
            self._storages[key] = (held.clone() if begin % _ALIGNMENT else held), dtype
        held, kind = self._storages[key]
        if kind != dtype or held.nbytes() != count * dtype.itemsize:
            raise UnreadablePickleError("a storage of two kinds")
        return held, dtype

    def tensor(self, call: StandIn) -> Tensor:
        if not is_bare(call):
            raise UnreadablePickleError("a state for a tensor")
        reference, offset, shape, strides, *rest = call.arguments
        held, dtype = self._storage(reference)
        if call.name.endswith("v3"):
            dtype = _DTYPES[rest[2].name]
        needs_grad = bool(rest) and rest[0] is True
        if len(rest) > 1 and not is_empty_hooks(rest[1]):
            raise UnreadablePickleError("hooks of a tensor")
        numbers = (offset, *shape, *strides)
        if any(type(number) is not int or number < 0 for number in numbers):
            raise UnreadablePickleError("an invalid shape or stride")
        last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        count = held.nbytes() // dtype.itemsize
        if math.prod(shape) and (last >= count or math.prod(shape) > 2**63 - 1):
            raise UnreadablePickleError("a tensor beyond its storage")
        made = torch.empty(0, dtype=dtype)
        with torch.no_grad():
            made.set_(held, offset if math.prod(shape) else 0, shape, strides)
            bits = rest[-1] if len(rest) > 2 and type(rest[-1]) is dict else {}
            made = made.conj() if bits.get("conj") is True and dtype.is_complex else made
            made = -made if bits.get("neg") is True else made
        return made.requires_grad_(needs_grad and (dtype.is_floating_point or dtype.is_complex))

    def parameter(self, call: StandIn) -> Tensor:
        data, requires_grad, hooks, *_ = call.arguments
        made = self._inner(data)
        if not is_bare(call) or not is_empty_hooks(hooks):
            raise UnreadablePickleError("a state for a parameter")
        numbers = made.dtype.is_floating_point or made.dtype.is_complex
        return nn.Parameter(made.detach(), requires_grad=requires_grad is True and numbers)

    def typed(self, call: StandIn) -> Any:
        function, _, arguments, *_ = call.arguments
        if not isinstance(function, Global) or type(arguments) is not tuple:
            raise UnreadablePickleError("an invalid tensor")
        make = _TENSOR_MAKERS.get(function.name)  # other functions make tensors out of several parts
        return call if make is None else make(self, StandIn(function.name, arguments))

    def _inner(self, value: object) -> Tensor:
        if isinstance(value, StandIn) and value.name in _TENSOR_MAKERS:
            made = _TENSOR_MAKERS[value.name](self, value)
            if isinstance(made, Tensor):
                return made
        raise UnreadablePickleError("an invalid tensor")

    def array(self, call: StandIn) -> Any:
        match call.state:
            case (int(_), tuple(shape), StandIn() as described, int(by_column), bytes() | str() as raw):
                return _tensor_of(raw, described, shape, "F" if by_column else "C", call)
        return call

    def buffer(self, call: StandIn) -> Any:
        match call.arguments:
            case (bytes() | bytearray() as raw, StandIn() as described, tuple(shape), "C" | "F" as order):
                return _tensor_of(bytes(raw), described, shape, order, call)
        return call

    def number(self, call: StandIn) -> Any:
        match call.arguments:
            case (StandIn() as described, bytes() | str() as raw):
                values = _array_of(raw, described, ())
                return call if values is None else values.item()
        return call

    def size(self, call: StandIn) -> Any:
        match call.arguments:
            case (tuple(sizes) | list(sizes),) if all(type(size) is int for size in sizes):
                return tuple(sizes)
        return call

    def counted(self, call: StandIn) -> Any:
        first = call.arguments[0] if call.arguments else None
        return dict(first if type(first) is dict else {}) | dict(call.entries)


def _array_of(raw: bytes | str, described: StandIn, shape: tuple[object, ...]) -> NDArray[Any] | None:
    """Return an array of numbers in this machine's byte order; None for a dtype that torch lacks."""
    text = described.arguments[0] if described.name == "numpy.dtype" and described.arguments else None
    if type(text) is not str or not _NUMBERS.fullmatch(text):
        return None
    order = "|" if described.state is ABSENT else described.state[1]
    if type(order) is not str or order not in ("<", ">", "|", "="):
        raise UnreadablePickleError("an invalid byte order")
    content = raw.encode("latin-1") if isinstance(raw, str) else raw
    dtype = np.dtype(text).newbyteorder(order if order in "<>" else "=")  # type: ignore[arg-type]
    if any(type(size) is not int or size < 0 for size in shape) or math.prod(shape) * dtype.itemsize != len(content):  # type: ignore[arg-type]
        raise UnreadablePickleError("an array of another size")
    return np.frombuffer(content, dtype).astype(dtype.newbyteorder("="), copy=True)


def _tensor_of(
    raw: bytes | str, described: StandIn, shape: tuple[Any, ...], order: Any, otherwise: StandIn
) -> Tensor | StandIn:
    values = _array_of(raw, described, shape)
    return otherwise if values is None else torch.from_numpy(values.reshape(shape, order=order))


_Maker = Callable[[_Values, StandIn], Any]

_TENSOR_MAKERS: dict[str, _Maker] = {
    **dict.fromkeys((f"torch._utils._rebuild_tensor{version}" for version in ("", "_v2", "_v3")), _Values.tensor),
    **dict.fromkeys((f"torch._utils._rebuild_parameter{more}" for more in ("", "_with_state")), _Values.parameter),
    "torch._tensor._rebuild_from_type_v2": _Values.typed,
}
_MAKERS: dict[str, _Maker] = {
    **_TENSOR_MAKERS,
    **{f"numpy.{core}.multiarray._reconstruct": _Values.array for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _Values.number for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": _Values.buffer for core in ("core", "_core")},
    **dict.fromkeys(("collections.Counter", "collections.defaultdict"), _Values.counted),
    "torch.Size": _Values.size,
}
