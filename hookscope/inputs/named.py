"""Inputs by name, which are keyword arguments of the network: numbers, pictures, tensors."""

import ast
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hookscope.errors import ImageError, UsageError
from hookscope.inputs.batches import Batch
from hookscope.inputs.loading import load_argument
from hookscope.results.inputs import InputRecord, Preprocessing
from hookscope.text import printable, shape_text

_WORDS: Mapping[str, Any] = {"true": True, "false": False, "none": None, "null": None}


@dataclass(frozen=True, slots=True)
class NamedInput:
    """An argument that the network is given by name: a literal, or a tensor and the record of what it was read from."""

    name: str
    value: Any
    record: InputRecord | None = None

    @property
    def row_count(self) -> int:
        """How long axis 0 of a tensor is; 0 for what has none."""
        return self.value.shape[0] if self.record is not None and self.value.dim() else 0

    @property
    def text(self) -> str:
        """For people: "sr = 16000", "b = b.npy, int64 1x5"."""
        if self.record is None:
            return printable(f"{self.name} = {self.value!r}")
        dtype = str(self.value.dtype).removeprefix("torch.")
        return f"{self.name} = {printable(self.record.name)}, {dtype} {shape_text(self.value.shape)}"


def read_named(texts: Sequence[str], preprocessing: Preprocessing) -> tuple[NamedInput, ...]:
    """Read "NAME=VALUE" texts as given with `--input`.

    A value is a Python literal, such as a number or a text in quotes, or else a file. A picture is prepared like any
    other and gets a batch axis of 1; a tensor stays as it is stored. Raises UsageError if a text is not of that form,
    or a name comes twice; ImageError if a file cannot be read.
    """
    named: dict[str, NamedInput] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not value or not name.isidentifier():
            raise UsageError(f"--input '{printable(text)}' is not of the form NAME=VALUE, such as sr=16000 or b=b.npy.")
        if name in named:
            raise UsageError(f"--input {name} is given twice.")
        named[name] = _read(name, value, preprocessing)
    return tuple(named.values())


def _read(name: str, value: str, preprocessing: Preprocessing) -> NamedInput:
    if value.strip().lower() in _WORDS:
        return NamedInput(name, _WORDS[value.strip().lower()])
    try:
        return NamedInput(name, ast.literal_eval(value.strip()))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # no literal: a file
        path = Path(value)
    try:
        return NamedInput(name, *load_argument(path, preprocessing))
    except ImageError as error:
        if path.suffix or os.path.isfile(path):  # noqa: PTH113 never raises
            raise
        raise UsageError(
            f"--input {name}={printable(value)} is neither a number nor a file. A text goes in quotes: "
            f"--input '{name}=\"{printable(value)}\"'."
        ) from error


def with_named(batch: Batch, named: Sequence[NamedInput], input_count: int) -> Batch:
    """Return the batch with inputs by name, copied, for the network may overwrite them.

    A tensor with a row for each of the `input_count` inputs of the run is cut along with the batch, one with a single
    row is repeated for each of its inputs; any other belongs to all of them as it is.
    """
    count = len(batch.indices)
    kwargs: dict[str, Any] = {}
    shared = set()
    for each in named:
        value = each.value
        if isinstance(value, torch.Tensor):
            if each.row_count == 1:
                value = value.expand(count, *value.shape[1:])
            elif each.row_count and each.row_count == input_count:
                value = value[list(batch.indices)]
            else:
                shared.add(each.name)
            value = value.clone(memory_format=torch.contiguous_format)
        kwargs[each.name] = value
    return replace(batch, kwargs={**batch.kwargs, **kwargs}, shared=batch.shared | shared)


def without_named_frame(preprocessing: Preprocessing, named: Sequence[NamedInput]) -> Preprocessing:
    """Return the preprocessing of inputs without a name: single frames where the other one of a pair has a name."""
    if preprocessing.kind == "flow" and any(each.record is not None for each in named):
        return replace(preprocessing, kind="image")
    return preprocessing


def named_batch(named: Sequence[NamedInput]) -> Batch:
    """Return inputs by name as a batch without any others; axis 0 of the first tensor with axes counts the inputs."""
    tensors = [each for each in named if each.row_count]
    count = tensors[0].row_count if tensors else 1
    steps = tuple(f"by name: {each.text}" for each in named)
    if tensors:
        first, *others = [each.record for each in tensors if each.record is not None]
        name = " with ".join([first.name, *(Path(record.name).name for record in others)])
        record = replace(first, name=name, shape=first.shape[1:], steps=(*first.steps, *steps))
    else:
        record = InputRecord("by name", None, None, (), steps)
    records = [record if count == 1 else replace(record, name=f"{record.name}[{index}]") for index in range(count)]
    return with_named(Batch((), tuple(range(count)), tuple(records)), named, count)
