"""Read plain tensors from files; nothing in a file runs.

Files of torch and safetensors are read as weights files are, by `hookscope.checkpoints.reading`.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from hookscope.checkpoints.reading import ReadingRules, claims_too_much, read_verified
from hookscope.checkpoints.stand_ins import kind_of
from hookscope.checkpoints.weights_files import WeightsFiles
from hookscope.errors import CheckpointError, ImageError, UntrustedFileError, UsageError
from hookscope.parameters import arg
from hookscope.results.inputs import Preprocessing
from hookscope.text import an, one_line, printable

ONE_TENSOR = "save the tensor alone with torch.save, numpy.save or safetensors"


def several_by_name() -> str:
    """Return advice about a file of several tensors, for messages."""
    return f"an input of several tensors goes by name: {arg('input')} NAME=FILE, or alone as a tuple or dict of tensors"


# How deep an argument in a file may nest, and how many values it may hold: more than any network takes.
_NESTING_LIMIT = 20
_MEMBERS_LIMIT = 10_000


def read_numpy(file: BinaryIO, name: str) -> torch.Tensor:
    """Return the array in a `.npy` file; ImageError if it is damaged, or not of numbers."""
    try:
        array = np.load(file, allow_pickle=False)
    except Exception as error:  # a damaged or hostile file can make a reader raise anything
        raise ImageError(
            f"Cannot read {name}: not an array of numbers, or truncated or corrupt ({one_line(error)}); {ONE_TENSOR}."
        ) from error
    if array.dtype.kind not in "biufc":
        raise ImageError(f"Cannot read {name}: its dtype {array.dtype.name!r} is not numeric. Save it as float32.")
    widest = {"f": np.dtype(np.float64), "c": np.dtype(np.complex128)}.get(array.dtype.kind, array.dtype)  # of torch
    dtype = widest if array.dtype.itemsize > widest.itemsize else array.dtype.newbyteorder("=")
    return torch.from_numpy(array.astype(dtype, copy=False))


def read_stored(path: Path) -> torch.Tensor:
    """Return the one plain tensor in a file that torch.save or safetensors wrote, in separate memory.

    Raises ImageError if the file is damaged, holds anything else, or would run code or take too much to read.
    """
    return torch.clone(_read(path, _only_tensor, _plain_tensor))  # in separate memory, because the file may be mapped


def read_argument(path: Path) -> Any:
    """Read an argument by name as `read_stored` does, but also nested lists, tuples and dicts of tensors.

    They may hold numbers, text and None too. A safetensors file with several tensors becomes a dict.
    """

    def one_or_all(content: object, name: str) -> Any:
        is_single = isinstance(content, dict) and len(content) == 1
        return torch.clone(_only_tensor(content, name)) if is_single else _argument(content, name)

    return _read(path, one_or_all, _argument)


def _read(path: Path, of_safetensors: Callable[[object, str], Any], of_torch: Callable[[object, str], Any]) -> Any:
    name = printable(str(path))
    try:
        files = WeightsFiles.at(path)
        check = of_safetensors if files.kind == "safetensors" else of_torch
        content = read_verified(files, check, ReadingRules(ONE_TENSOR, allowed_globals=()))[path].content
    except (CheckpointError, UntrustedFileError) as error:
        raise ImageError(f"Not a readable tensor file: {error}") from error
    return check(content, name)


def _argument(content: object, name: str) -> Any:
    left = _MEMBERS_LIMIT
    tensors = 0

    def copy(value: object, depth: int) -> Any:
        nonlocal left, tensors
        left -= 1
        if left < 0 or depth > _NESTING_LIMIT:
            raise ImageError(
                f"Cannot use {name}: it nests deeper than {_NESTING_LIMIT} or holds more than {_MEMBERS_LIMIT:,} "
                "values. Save fewer tensors together."
            )
        # No other subclass of dict: the stand-in for a class that is not imported may be one.
        if isinstance(value, dict) and type(value) in {dict, OrderedDict}:
            return {_scalar(key, name): copy(entry, depth + 1) for key, entry in dict.items(value)}
        if isinstance(value, list):
            return [copy(element, depth + 1) for element in list.__iter__(value)]
        if isinstance(value, tuple):
            return tuple([copy(element, depth + 1) for element in tuple.__iter__(value)])
        if not isinstance(value, torch.Tensor):
            return _scalar(value, name)
        tensors += 1
        return torch.clone(_plain_tensor(value, name))

    copied = copy(content, 0)
    if not tensors:
        raise ImageError(f"Cannot read {name}: it holds no tensor. Save the tensors that the network is given.")
    return copied


def _scalar(value: object, name: str) -> Any:
    if type(value) in {bool, int, float, complex, str, type(None)}:
        return value
    raise ImageError(f"Cannot read {name}: it holds {an(kind_of(value))}. Save nothing but tensors, numbers and text.")


def _only_tensor(content: object, name: str) -> torch.Tensor:
    tensors = list(content.values()) if isinstance(content, dict) else []
    if len(tensors) != 1:
        raise ImageError(f"Cannot read {name}: it holds {len(tensors)} tensors, not one; {several_by_name()}.")
    return _plain_tensor(tensors[0], name)


def _plain_tensor(content: object, name: str) -> torch.Tensor:
    if not isinstance(content, torch.Tensor) or type(content) not in {torch.Tensor, torch.nn.Parameter}:
        remedy = several_by_name() if isinstance(content, list | tuple | dict) else ONE_TENSOR
        raise ImageError(f"Cannot read {name}: it holds {an(kind_of(content))}, not one plain tensor; {remedy}.")
    tensor = torch.Tensor.detach(content)  # without attributes that the file may have put over its methods
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_nested:
        raise ImageError(f"Cannot use {name}: a sparse, quantised, nested or data-less tensor. Save a dense one.")
    if claims_too_much(tensor):
        raise ImageError(f"Cannot use {name}: an expanded tensor, larger than its file. Save it after .contiguous().")
    return tensor


def is_one_input(shape: Sequence[int], preprocessing: Preprocessing) -> bool:
    """Tell whether a shape has a single axis, or as many as one input: (C, H, W), (C, T, H, W) for a clip."""
    return len(shape) in (1, 4 if preprocessing.kind == "video" else preprocessing.input_axes)


def with_inputs_first(tensor: torch.Tensor, preprocessing: Preprocessing) -> torch.Tensor:
    """Return a tensor with the batch axis of `preprocessing` moved to axis 0, or with a new axis of 1 there.

    Raises UsageError if the tensor lacks that axis, or holds no input.
    """
    axis = preprocessing.batch_axis
    if isinstance(axis, int) and tensor.dim() and not tensor.is_nested:
        if not -tensor.dim() <= axis < tensor.dim():
            shape = tuple(tensor.shape)
            raise UsageError(f"The tensor of shape {shape} has no axis {axis}. Give another {arg('batch_axis')}.")
        tensor = tensor.movedim(axis, 0)
    elif axis == "none" or (axis == "auto" and not tensor.is_nested and is_one_input(tensor.shape, preprocessing)):
        tensor = tensor.unsqueeze(0)
    if tensor.dim() and not tensor.size(0):
        raise UsageError(
            f"The tensor of shape {tuple(tensor.shape)} holds no input. Is another {arg('batch_axis')} right?"
        )
    return tensor


def prepare_tensor(tensor: torch.Tensor, preprocessing: Preprocessing, name: str, steps: list[str]) -> torch.Tensor:
    """Convert floating point to float32, and put the batch axis that `preprocessing` names first.

    Raises ImageError if the tensor has no element, no axis, or not the batch axis, or torch cannot convert it.
    """
    axis, shape = preprocessing.batch_axis, tuple(tensor.shape)
    if tensor.ndim == 0 or tensor.numel() == 0:
        raise ImageError(f"Cannot use {name}: shape {shape} is not an input. Give one like (C, H, W).")
    steps.append("tensor passed without preprocessing")
    if isinstance(axis, int):
        if not -tensor.ndim <= axis < tensor.ndim:
            raise ImageError(f"Cannot use {name}: shape {shape} has no axis {axis}. Give another {arg('batch_axis')}.")
        tensor = tensor.movedim(axis, 0)
    try:
        if tensor.is_floating_point() and tensor.dtype != torch.float32:
            steps.append(f"{str(tensor.dtype).removeprefix('torch.')} converted to float32")
            tensor = tensor.to(torch.float32)
        return tensor.contiguous()
    except RuntimeError as error:  # an exotic dtype, or no memory
        raise ImageError(f"Cannot use {name}: {one_line(error)}. Save it as float32.") from error
