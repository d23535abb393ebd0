"""List what weights files hold without torch, which takes seconds to import."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from hookscope.checkpoints.fileformat import FileKind, open_regular
from hookscope.checkpoints.nested import TensorLike
from hookscope.checkpoints.plain import PlainTensor, plain_content
from hookscope.errors import CheckpointError
from hookscope.models.array_values import ARRAY_TYPES, PIECE_ELEMENTS, values_of
from hookscope.models.listing import file_listing, tensor_row
from hookscope.models.tied import Layout, tied_to
from hookscope.models.weight_sets import parts_of
from hookscope.text import printable


def list_plain(kinds: Mapping[Path, FileKind], key: str | None) -> list[dict[str, Any]] | None:
    """Return the listing of each file of plainly stored tensors and values; None if any holds anything else.

    Raises CheckpointError if one holds no tensors, or was cut short meanwhile; NothingMatchedError if there is nothing
    at `key`.
    """
    listed = []
    for path, kind in kinds.items():
        content = plain_content(path, kind)
        if content is None:
            return None
        parts = parts_of(content, printable(str(path)), key)
        places = [(part.key, name, _plain(tensor)) for part in parts for name, tensor in part.tensors]
        owners = tied_to([place[:2] for place in places], [_layout(tensor) for *_, tensor in places])
        with open_regular(path) as file:
            known = {_stretch(tensor): tensor for *_, tensor in places}
            values = {each: values_of(_pieces(file, tensor), tensor.dtype) for each, tensor in known.items()}
        rows = [
            tensor_row((name, tensor.shape, tensor.dtype), tensor.byte_count, values[_stretch(tensor)], owner)
            for (_, name, tensor), owner in zip(places, owners, strict=True)
        ]
        listed.append(file_listing(path, kind, content, parts, rows))
    return listed


def _plain(tensor: TensorLike) -> PlainTensor:
    if not isinstance(tensor, PlainTensor):
        raise TypeError(type(tensor).__name__)
    return tensor


def _layout(tensor: PlainTensor) -> Layout | None:
    if not tensor.byte_count:
        return None
    bits, item = tensor.dtype, tensor.item_bytes
    return Layout(tensor.storage, bits, item, tensor.offset, tensor.shape, tensor.strides)


def _stretch(tensor: PlainTensor) -> tuple[int, int, str]:
    """Return which bytes of a file are a tensor's, and as what they are read."""
    return tensor.begin, tensor.byte_count, tensor.dtype


def _pieces(file: BinaryIO, tensor: PlainTensor) -> Iterator[NDArray[np.generic]]:
    """Yield the elements of a tensor in pieces, as `ValueReader` does."""
    kind = np.dtype(ARRAY_TYPES[tensor.dtype])
    file.seek(tensor.begin)
    left = tensor.byte_count
    while left:
        wanted = min(PIECE_ELEMENTS * kind.itemsize, left)
        content = file.read(wanted)
        if len(content) < wanted:
            raise CheckpointError("the file was cut short while it was read")
        left -= len(content)
        yield np.frombuffer(content, kind)
