"""List the tensors of files that only torch can read, as `contents` lists the others without torch."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from hookscope.checkpoints.fileformat import FileKind
from hookscope.checkpoints.nested import TensorLike
from hookscope.checkpoints.reading import RESAVE_REMEDY, ReadingRules, claims_too_much, inspect_isolated
from hookscope.checkpoints.stand_ins import skipped_objects
from hookscope.checkpoints.weights_files import WeightsFiles
from hookscope.errors import is_out_of_memory
from hookscope.models.array_values import ARRAY_TYPES, Values, values_of
from hookscope.models.listing import TensorFacts, file_listing
from hookscope.models.tied import Layout
from hookscope.statistics.reduction import PIECE_ELEMENTS
from hookscope.statistics.storage import in_memory_order, stored_values, without_float8
from hookscope.text import counted, printable

_THREADS = 2  # two read as fast as memory gives

# Tensors that are neither dense nor small are views of something else, which nobody stores on purpose.
_GATHER_BYTES_LIMIT = 2**28


def list_with_torch(files: WeightsFiles, key: str | None) -> list[dict[str, Any]]:
    """Return the listing of each file. Raises as `list_contents`."""

    def look(path: Path, kind: FileKind, content: object) -> dict[str, Any]:
        return file_listing(path, kind, content, key, partial(_facts_of, printable(path.name), content))

    return [scan.content for scan in inspect_isolated(files, look, ReadingRules(RESAVE_REMEDY))]


def _facts_of(shown: str, content: object, named: list[tuple[str, TensorLike]]) -> tuple[list[TensorFacts], list[str]]:
    # Detached from what a file may have hung on a tensor.
    tensors = [Tensor.detach(tensor) for _, tensor in named if isinstance(tensor, Tensor)]
    layouts = [_layout(tensor) for tensor in tensors]
    views = [layout or at for at, layout in enumerate(layouts)]
    distinct = dict(zip(views, tensors, strict=True))  # equal views are read once
    with ThreadPoolExecutor(_THREADS) as pool:  # reading and reducing release the interpreter lock
        values = dict(zip(distinct, pool.map(values_of_tensor, distinct.values()), strict=True))
    facts = [
        TensorFacts(tensor.shape, str(tensor.dtype).removeprefix("torch."), _byte_count(tensor), layout, values[view])
        for tensor, layout, view in zip(tensors, layouts, views, strict=True)
    ]
    absent = sum(tensor.is_meta for tensor in tensors)
    without = f"{shown}: {counted(absent, 'tensor')} without data, only a shape (saved on the meta device)."
    warnings = [without] * bool(absent)
    if skipped := skipped_objects(content):
        warnings.append(f"{shown}: skipped: {skipped}.")
    if repeating := [name for (name, _), tensor in zip(named, tensors, strict=True) if claims_too_much(tensor)]:
        warnings.append(
            f"{shown}: {counted(len(repeating), 'tensor')} with more elements than stored, such as "
            f"'{printable(repeating[0], 80)}', which repeats them (stride 0); other commands refuse the file."
        )
    return facts, warnings


def _byte_count(tensor: Tensor) -> int:
    stored = tensor if tensor.layout is torch.strided else stored_values(tensor, tuple(tensor.shape))[0]
    byte_count = stored.numel() * stored.element_size()
    if not (stored.is_meta or stored.layout is not torch.strided):
        byte_count = min(byte_count, stored.untyped_storage().nbytes())  # an expanded tensor repeats elements
    return byte_count


def _layout(tensor: Tensor) -> Layout | None:
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return None
    storage = tensor.untyped_storage().data_ptr()
    bits = tensor.dtype, tensor.is_neg(), tensor.is_conj()
    place = int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())
    return Layout(storage, bits, tensor.element_size(), *place) if storage else None


def values_of_tensor(tensor: Tensor) -> Values | None:
    """Return the statistics of a tensor of any layout; None without data, and for a view too scattered to gather."""
    if tensor.is_meta:
        return None
    if tensor.is_quantized:
        by_channel = tensor.qscheme() not in (torch.per_tensor_affine, torch.per_tensor_symmetric)
        return _values((tensor.dequantize() if by_channel else tensor).reshape(-1), tensor.dtype, 1)
    stored, _, zeros = stored_values(tensor, tuple(tensor.shape))
    stored = stored.resolve_conj().resolve_neg()
    # Expanded axes repeat elements, so each is read once; not with implicit zeros, which the count would multiply.
    held = stored[tuple(slice(None if stride or zeros else 1) for stride in stored.stride())]
    held, _ = in_memory_order(held, None)
    if not held.is_contiguous() and held.numel() * held.element_size() > _GATHER_BYTES_LIMIT:
        return None
    return _values(held.reshape(-1), tensor.dtype, stored.numel() // max(held.numel(), 1), zeros=zeros)


def _values(flat: Tensor, dtype: torch.dtype, repeats: int, *, zeros: int = 0) -> Values | None:
    name = str(dtype).removeprefix("torch.")
    array_type = "complex" if dtype.is_complex else name if name in ARRAY_TYPES else "float32"
    pieces = torch.split(flat, PIECE_ELEMENTS) if flat.numel() else ()
    try:
        return values_of(map(_array, pieces), array_type, repeats, zeros)
    except (RuntimeError, TypeError, ValueError) as error:  # a dtype without arithmetic
        if is_out_of_memory(error):
            raise
        is_whole = not (dtype.is_floating_point or dtype.is_complex)
        # float4 has no NaN or Inf (Open Compute Project, "Microscaling Formats", 2023).
        return Values(0, 0) if is_whole or dtype is torch.float4_e2m1fn_x2 else None


def _array(piece: Tensor) -> NDArray[Any]:
    if piece.is_quantized:
        piece = piece.dequantize()
    elif piece.dtype is torch.bfloat16:
        piece = piece.view(torch.uint16)
    elif piece.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        piece = piece.view(torch.uint8)
    elif piece.is_complex():
        piece = piece.to(torch.complex128)
    array: NDArray[Any] = without_float8(piece).numpy()
    return array
