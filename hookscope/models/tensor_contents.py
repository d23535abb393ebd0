"""List the tensors of files that only torch can read; `contents` lists the others without torch.

A separate process with limits on memory and time reads the file and returns the rows of the table.
"""

from collections.abc import Mapping
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
from hookscope.models.listing import TensorFacts, file_listing
from hookscope.models.shards import RESAVE_REMEDY
from hookscope.models.tensor_values import values_of_tensor
from hookscope.models.tied import Layout
from hookscope.statistics.storage import stored_values
from hookscope.text import counted, printable

_THREADS = 2  # two read as fast as memory gives


def list_with_torch(kinds: Mapping[Path, FileKind], name: str, key: str | None) -> list[dict[str, Any]]:
    """Return the listing of each file, called `name` in messages. Raises as `list_contents`."""

    def look(path: Path, kind: FileKind, content: object) -> dict[str, Any]:
        return file_listing(path, kind, content, key, partial(_facts_of, printable(path.name), content))

    return [scan.content for scan in inspect_isolated(kinds, name, look, ReadingRules(RESAVE_REMEDY))]


def _facts_of(shown: str, content: object, named: list[tuple[str, TensorLike]]) -> tuple[list[TensorFacts], list[str]]:
    # Detached from what a file may have hung on a tensor.
    tensors = [Tensor.detach(tensor) for _, tensor in named if isinstance(tensor, Tensor)]
    layouts = [_layout(tensor) for tensor in tensors]
    views = [layout or at for at, layout in enumerate(layouts)]
    distinct = dict(zip(views, tensors, strict=True))  # what is there twice is read once
    with ThreadPoolExecutor(_THREADS) as pool:  # reading and reducing let go of the interpreter
        values = dict(zip(distinct, pool.map(values_of_tensor, distinct.values()), strict=True))
    facts = [
        TensorFacts(tensor.shape, str(tensor.dtype).removeprefix("torch."), _byte_count(tensor), layout, values[view])
        for tensor, layout, view in zip(tensors, layouts, views, strict=True)
    ]
    absent = sum(tensor.is_meta for tensor in tensors)
    subject = "1 tensor has" if absent == 1 else f"{absent} tensors have"
    warnings = [f"{shown}: {subject} no data, only a shape (saved on the meta device)."] * bool(absent)
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
        byte_count = min(byte_count, stored.untyped_storage().nbytes())  # an expanded tensor shows its elements again
    return byte_count


def _layout(tensor: Tensor) -> Layout | None:
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return None
    storage = tensor.untyped_storage().data_ptr()
    bits = tensor.dtype, tensor.is_neg(), tensor.is_conj()
    place = int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())
    return Layout(storage, bits, tensor.element_size(), *place) if storage else None
