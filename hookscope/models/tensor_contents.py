"""List the tensors of files that only torch can read; `contents` lists the others without torch.

A separate process with limits on memory and time reads the file and returns the rows of the table.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hookscope.checkpoints.fileformat import FileKind
from hookscope.checkpoints.nested import TensorLike
from hookscope.checkpoints.reading import ReadingRules, claims_too_much, inspect_isolated
from hookscope.checkpoints.stand_ins import skipped_objects
from hookscope.models.array_values import Values
from hookscope.models.listing import file_listing, tensor_row
from hookscope.models.shards import RESAVE_REMEDY
from hookscope.models.tensor_values import values_of_tensor
from hookscope.models.tied import Layout, tied_to
from hookscope.models.weight_sets import parts_of
from hookscope.text import counted, printable

_THREADS = 2  # two read as fast as memory gives


def list_with_torch(kinds: Mapping[Path, FileKind], name: str, key: str | None) -> list[dict[str, Any]]:
    """Return the listing of each file, called `name` in messages. Raises as `list_contents`."""
    verified = inspect_isolated(kinds, name, partial(_list_file, key), ReadingRules(RESAVE_REMEDY))
    return [scan.content for scan in verified]


def _list_file(key: str | None, path: Path, kind: FileKind, content: object) -> dict[str, Any]:
    parts = parts_of(content, printable(str(path)), key)
    tensors = [_detached(tensor) for part in parts for _, tensor in part.tensors]
    absent = sum(tensor.is_meta for tensor in tensors)
    subject = "1 tensor has" if absent == 1 else f"{absent} tensors have"
    warnings = [f"{printable(path.name)}: {subject} no data, only a shape (saved on the meta device)."] * bool(absent)
    if skipped := skipped_objects(content):
        warnings.append(f"{printable(path.name)}: skipped: {skipped}.")
    places = [(part.key, name) for part in parts for name, _ in part.tensors]
    if repeating := [name for (_, name), tensor in zip(places, tensors, strict=True) if claims_too_much(tensor)]:
        warnings.append(
            f"{printable(path.name)}: {counted(len(repeating), 'tensor')} with more elements than stored, such as "
            f"'{printable(repeating[0], 80)}', which repeats them (stride 0); other commands refuse the file."
        )
    answers = zip(_values(tensors), tied_to(places, [*map(_layout, tensors)]), strict=True)
    rows = [
        tensor_row((name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")), _byte_count(tensor), *answer)
        for (_, name), tensor, answer in zip(places, tensors, answers, strict=True)
    ]
    return file_listing(path, kind, content, parts, rows, warnings)


def _detached(tensor: TensorLike) -> Tensor:
    """Return torch's tensor without what a file may have hung on it."""
    if not isinstance(tensor, Tensor):
        raise TypeError(type(tensor).__name__)
    return Tensor.detach(tensor)


def _byte_count(tensor: Tensor) -> int:
    stored = tensor
    if tensor.layout is not torch.strided:
        stored = tensor.coalesce().values() if tensor.is_sparse else tensor.values()
    byte_count = stored.numel() * stored.element_size()
    if not (stored.is_meta or stored.layout is not torch.strided):
        byte_count = min(byte_count, stored.untyped_storage().nbytes())  # an expanded tensor shows its elements again
    return byte_count


def _values(tensors: Sequence[Tensor]) -> list[Values | None]:
    views = [_layout(tensor) or at for at, tensor in enumerate(tensors)]
    distinct = dict(zip(views, tensors, strict=True))
    with ThreadPoolExecutor(_THREADS) as pool:  # reading and reducing let go of the interpreter
        by_view = dict(zip(distinct, pool.map(values_of_tensor, distinct.values()), strict=True))
    return [by_view[view] for view in views]


def _address(tensor: Tensor) -> int:
    plain = tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0
    return int(tensor.untyped_storage().data_ptr()) if plain else 0


def _layout(tensor: Tensor) -> Layout | None:
    storage = _address(tensor)
    if not storage:
        return None
    bits = tensor.dtype, tensor.is_neg(), tensor.is_conj()
    place = int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())
    return Layout(storage, bits, tensor.element_size(), *place)
