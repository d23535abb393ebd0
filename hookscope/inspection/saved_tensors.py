"""Keep the tensors that a run saves: on disk while the network runs, by label afterwards."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from tempfile import gettempdir
from typing import Any

import torch
from torch import Tensor

from hookscope.errors import OutputError
from hookscope.inspection.batch_shapes import BatchShapes
from hookscope.results.runs.atomic import reason_of
from hookscope.results.runs.tensors import DTYPES, Piece, SpooledTensor, TensorSpool
from hookscope.statistics.storage import flat_bytes, has_memory, plain_array


class SavedTensors(Mapping[str, Tensor]):
    """Tensors by label, read from a spool when they are asked for.

    Attributes:
        spooled: Where each is in the `spool`.
    """

    def __init__(self, spool: TensorSpool, spooled: Mapping[str, SpooledTensor]) -> None:
        """Give tensors of a spool labels."""
        self.spool = spool
        self.spooled = spooled

    def __getitem__(self, label: str) -> Tensor:
        """Return a tensor on the CPU; KeyError if no row has it."""
        spooled = self.spooled[label]
        dtype: torch.dtype = getattr(torch, spooled.dtype)
        data = bytearray().join(self.spool.chunks(spooled.pieces))
        flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device="cpu")
        return _little_endian(flat, dtype).view(dtype).reshape(spooled.shape)

    def __iter__(self) -> Iterator[str]:
        """Return the labels in the order in which tensors came."""
        return iter(self.spooled)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.spooled)

    def __reduce__(self) -> Any:
        """Copy and pickle with a spool of its own."""
        held = {
            label: (spooled, b"".join(self.spool.chunks(spooled.pieces))) for label, spooled in self.spooled.items()
        }
        return _spooled_anew, (held,)


def _spooled_anew(held: Mapping[str, tuple[SpooledTensor, bytes]]) -> SavedTensors:
    spool = TensorSpool()
    placed = {
        label: replace(spooled, pieces=(spool.append(memoryview(data)),)) for label, (spooled, data) in held.items()
    }
    return SavedTensors(spool, placed)


def spool_tensor(spool: TensorSpool, tensor: Tensor) -> SpooledTensor:
    """Append a tensor whose dtype is among `DTYPES` to a spool; OutputError if there is no room."""
    flat = _little_endian(flat_bytes(tensor), tensor.dtype)
    try:
        piece = spool.append(memoryview(plain_array(flat).data))
    except OSError as error:
        where = f"in {gettempdir()}: {reason_of(error)}"
        raise OutputError(f"Tensors cannot be kept {where}. Free some space, or set TMPDIR to another.") from error
    return SpooledTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), (piece,))


def _little_endian(flat: Tensor, dtype: torch.dtype) -> Tensor:
    """Swap the bytes (n,) of a tensor of this dtype where the machine is not little-endian."""
    if sys.byteorder == "little":
        return flat
    return flat.view(-1, dtype.itemsize // (2 if dtype.is_complex else 1)).flip(1).reshape(-1)


class TensorCollector:
    """Spools tensors batch by batch; those of a batch that the model raised on are dropped."""

    def __init__(self, total: int, on_progress: Callable[[int, int], None] | None) -> None:
        """Start with nothing; `on_progress` is called with the number of inputs finished, and `total`."""
        self._on_progress = on_progress
        self._total = total
        self._spool = TensorSpool()
        self._parts: dict[str, list[SpooledTensor]] = {}
        self._shapes: dict[str, BatchShapes] = {}
        self._latest: list[tuple[str, SpooledTensor]] = []
        self._begin = 0
        self._finished = 0

    def collect(self, label: str, tensor: Tensor, _channel_axis: int | None = None) -> None:
        """Spool a tensor, unless safetensors cannot hold it: one without memory, sparse, ragged, or complex128.

        Raises:
            OutputError: If there is no room.
        """
        if tensor.is_quantized:
            tensor = tensor.dequantize()
        dtype = str(tensor.dtype).removeprefix("torch.")
        if not has_memory(tensor) or dtype not in DTYPES:
            return
        self._latest.append((label, spool_tensor(self._spool, tensor)))

    def collect_rows(self, label: str, rows: Tensor, begin: int) -> None:
        """Spool some rows of a floating-point tensor (..., rows, columns), which come in their order from row 0.

        Args:
            label: Of the tensor.
            rows: (..., some rows, columns).
            begin: The first of them; unless it is 0, they continue what was collected last.

        Raises:
            OutputError: If there is no room.
        """
        *lead, count, columns = rows.shape
        pieces = [spool_tensor(self._spool, matrix).pieces for matrix in rows.reshape(-1, count, columns)]
        if begin:
            before = self._latest.pop()[1].pieces
            stride = len(before) // len(pieces)
            pieces = [(*before[at * stride : (at + 1) * stride], *piece) for at, piece in enumerate(pieces)]
        dtype = str(rows.dtype).removeprefix("torch.")
        shape = (*lead, begin + count, columns)
        self._latest.append((label, SpooledTensor(dtype, shape, tuple(chain.from_iterable(pieces)))))

    def end_batch(self, finished: int) -> None:
        """Keep what came since the last call if inputs have been finished since: `finished` counts them."""
        if finished > self._finished:
            self.end(finished - self._finished)
        self._latest.clear()
        self._spool.rewind(self._begin)
        self._finished = finished
        if self._on_progress is not None:
            self._on_progress(finished, self._total)

    def end(self, count: int = 0) -> None:
        """Keep what came since the last batch, of `count` inputs."""
        for label, tensor in self._latest:
            self._parts.setdefault(label, []).append(tensor)
            self._shapes.setdefault(label, BatchShapes()).add(count, tensor.shape)
        self._latest.clear()
        self._begin = self._spool.end

    def joined(self, labels: Iterable[str]) -> SavedTensors:
        """Join each label's tensors over the batches along the axis that counts inputs; axis 0 if shapes do not tell.

        Tensors that differ in other axes stay apart, with the number of the batch in their label.
        """
        joined: dict[str, SpooledTensor] = {}
        for label in filter(frozenset(labels).__contains__, self._parts):
            parts = self._parts[label]
            shape = parts[0].shape
            # Tensors that came in rows have several pieces, and the inputs on axis 0.
            axis = (self._shapes[label].batch_axis or 0) if all(len(part.pieces) == 1 for part in parts) else 0
            alike = {(part.dtype, len(part.shape), part.shape[:axis], part.shape[axis + 1 :]) for part in parts}
            if len(parts) == 1:
                joined[label] = parts[0]
            elif shape and len(alike) == 1:
                whole = (*shape[:axis], sum(part.shape[axis] for part in parts), *shape[axis + 1 :])
                count = math.prod(shape[:axis]) or 1
                sizes = [(piece, piece.size // count) for part in parts for piece in part.pieces]
                pieces = tuple(Piece(piece.begin + at * size, size) for at in range(count) for piece, size in sizes)
                joined[label] = SpooledTensor(parts[0].dtype, whole, pieces)
            else:
                joined.update({f"{label}@{number}": part for number, part in enumerate(parts)})
        return SavedTensors(self._spool, joined)
