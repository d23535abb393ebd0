"""Read tensor files: one plain tensor each, and nothing in a file runs, however it was made.

What torch and safetensors wrote goes through the same hands as weights files: `hookscope.checkpoints.isolation`.
"""

from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from hookscope.checkpoints.fileformat import file_kind
from hookscope.checkpoints.isolation import read_verified
from hookscope.checkpoints.reading import ReadingRules, claims_too_much
from hookscope.checkpoints.stand_ins import kind_of
from hookscope.errors import CheckpointError, ImageError, UntrustedFileError
from hookscope.results.inputs import InputKind, Preprocessing
from hookscope.text import one_line, printable

_ALONE = "save the tensor alone with torch.save, numpy.save or safetensors"


def read_numpy(file: BinaryIO, name: str) -> torch.Tensor:
    """Return the array in a `.npy` file; ImageError if it is damaged, or not of numbers."""
    try:
        array = np.load(file, allow_pickle=False)
    except Exception as error:  # a damaged or hostile file can make a reader raise anything
        raise ImageError(
            f"Cannot read {name}: not an array of numbers, or truncated or corrupt ({one_line(error)}); {_ALONE}."
        ) from error
    if array.dtype.kind not in "biufc":
        raise ImageError(f"Cannot read {name}: its dtype {array.dtype.name!r} is not numeric. Save it as float32.")
    is_wider_than_torch = array.dtype.kind == "f" and array.dtype.itemsize > 8
    dtype = np.dtype(np.float64) if is_wider_than_torch else array.dtype.newbyteorder("=")
    return torch.from_numpy(array.astype(dtype, copy=False))


def read_stored(path: Path) -> torch.Tensor:
    """Return the one plain tensor in a file that torch.save or safetensors wrote, in separate memory.

    Raises ImageError if the file is damaged, holds anything else, or reading it would run code or take more time or
    memory than a file of its size should.
    """
    name = printable(str(path))
    try:
        kind = file_kind(path)
        check = _only_tensor if kind == "safetensors" else _plain_tensor
        content = read_verified({path: kind}, name, check, ReadingRules(_ALONE, allowed_globals=()))[path].content
    except (CheckpointError, UntrustedFileError) as error:
        raise ImageError(f"Not a readable tensor file: {error}") from error
    return torch.clone(check(content, name))  # the file may be mapped: nothing depends on it any longer


def _only_tensor(content: object, name: str) -> torch.Tensor:
    tensors = list(content.values()) if isinstance(content, dict) else []
    if len(tensors) != 1:
        raise ImageError(f"Cannot read {name}: it holds {len(tensors)} tensors; an input is a file with exactly one.")
    return _plain_tensor(tensors[0], name)


def _plain_tensor(content: object, name: str) -> torch.Tensor:
    if not isinstance(content, torch.Tensor) or type(content) not in {torch.Tensor, torch.nn.Parameter}:
        raise ImageError(f"Cannot read {name}: it holds a {kind_of(content)}, not one plain tensor; {_ALONE}.")
    tensor = torch.Tensor.detach(content)  # without attributes that the file may have put over its methods
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_nested:
        raise ImageError(f"Cannot use {name}: a sparse, quantised, nested or data-less tensor. Save a dense one.")
    if claims_too_much(tensor):
        raise ImageError(f"Cannot use {name}: an expanded tensor, larger than its file. Save it after .contiguous().")
    return tensor


def input_rank(kind: InputKind) -> int:
    """Return how many axes an input has without the batch axis: (C, H, W), or (C, T, H, W) for a clip."""
    return 4 if kind == "video" else 3


def prepare_tensor(tensor: torch.Tensor, preprocessing: Preprocessing, name: str, steps: list[str]) -> torch.Tensor:
    """Turn a tensor into an input: drop a batch axis of 1, and convert floating point to float32.

    A batch axis that `preprocessing` names comes first, and stays. Raises ImageError if the tensor has no element, no
    axis, or not the batch axis, or torch cannot convert it.
    """
    axis, shape = preprocessing.batch_axis, tuple(tensor.shape)
    if tensor.ndim == 0 or tensor.numel() == 0:
        raise ImageError(f"Cannot use {name}: shape {shape} is not an input. Give one like (C, H, W).")
    steps.append("tensor passed without preprocessing")
    if isinstance(axis, int):
        if not -tensor.ndim <= axis < tensor.ndim:
            raise ImageError(f"Cannot use {name}: shape {shape} has no axis {axis}. Give another --batch-axis.")
        tensor = tensor.movedim(axis, 0)
    elif axis == "auto" and shape[0] == 1 and tensor.ndim not in {1, input_rank(preprocessing.kind)}:
        tensor = tensor[0]
        steps.append("batch axis of 1 dropped")
    try:
        if tensor.is_floating_point() and tensor.dtype != torch.float32:
            steps.append(f"{str(tensor.dtype).removeprefix('torch.')} converted to float32")
            tensor = tensor.to(torch.float32)
        return tensor.contiguous()
    except RuntimeError as error:  # of an exotic dtype, or there is no memory
        raise ImageError(f"Cannot use {name}: {one_line(error)}. Save it as float32.") from error
