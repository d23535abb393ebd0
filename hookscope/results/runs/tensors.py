"""Write tensors to a safetensors file as they arrive: memory does not grow with their number."""

import json
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO, NamedTuple

# The dtypes of safetensors by torch's names. In files, tensors come in the reverse of this order: large elements first.
DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "complex64": "C64",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}
# Bytes of an element by the number in the dtype's name; BOOL has none, and leaves "L".
_BYTES = {"L": 1, "8": 1, "16": 2, "32": 4, "64": 8}
_RANKS = {name: rank for rank, name in enumerate(DTYPES)}

# Until the end of a run, tensors of up to this many bytes wait in memory, more in a temporary file. Ours.
_MOST_IN_MEMORY = 2**26
_COPIED_BYTES = 2**20


class Piece(NamedTuple):
    """A range of bytes in a spool."""

    begin: int
    size: int


@dataclass(frozen=True, slots=True)
class SpooledTensor:
    """A tensor in a spool.

    Attributes:
        dtype: One of `DTYPES`.
        pieces: Its bytes, one piece after another, little-endian and in C order.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


class TensorSpool:
    """Holds bytes of tensors until a run is written, in memory if they are few, else in a temporary file."""

    def __init__(self) -> None:
        """Start empty; the file is deleted with this object."""
        self._file: IO[bytes] = SpooledTemporaryFile(_MOST_IN_MEMORY)  # noqa: SIM115 - closed with this object
        weakref.finalize(self, self._file.close)
        self.end = 0

    def append(self, data: memoryview) -> Piece:
        """Store bytes at the end; OSError if the disk is full."""
        self._file.seek(self.end)
        self._file.write(data)
        piece = Piece(self.end, data.nbytes)
        self.end += data.nbytes
        return piece

    def rewind(self, end: int) -> None:
        """Forget the bytes from `end` on."""
        self.end = end

    def chunks(self, pieces: Sequence[Piece]) -> Iterator[bytes]:
        """Yield the bytes of pieces, at most 1 MiB at a time."""
        for begin, size in pieces:
            for at in range(begin, begin + size, _COPIED_BYTES):
                self._file.seek(at)
                yield self._file.read(min(_COPIED_BYTES, begin + size - at))


def write_tensors(path: Path, tensors: Mapping[str, SpooledTensor], spool: TensorSpool) -> None:
    """Write a file of safetensors, byte for byte as `safetensors.torch.save_file` does; raises OSError."""
    with path.open("wb") as file:
        file.writelines(tensor_bytes(tensors, spool))


def tensor_bytes(tensors: Mapping[str, SpooledTensor], spool: TensorSpool) -> Iterator[bytes]:
    """Yield the bytes of the file that `write_tensors` writes."""
    header, order = header_of({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()})
    yield header
    for name in order:
        yield from spool.chunks(tensors[name].pieces)


def header_of(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, list[str]]:
    """Return the header of a safetensors file and the order of its tensors, given their dtypes and shapes."""
    entries, end = {}, 0
    order = sorted(tensors, key=lambda name: (-_RANKS[tensors[name][0]], name))
    for name in order:
        kind, shape = tensors[name]
        begin, end = end, end + math.prod(shape) * _BYTES[DTYPES[kind].lstrip("BFICUO").partition("_")[0]]
        entries[name] = {"dtype": DTYPES[kind], "shape": [*shape], "data_offsets": [begin, end]}
    header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header, order
