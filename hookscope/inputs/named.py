"""Inputs by name, which are keyword arguments of the network: numbers, pictures, tensors, containers of these."""

import ast
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from hookscope.checkpoints.fileformat import nearest_file
from hookscope.errors import ImageError, UsageError, nearest
from hookscope.hooks.observed import shape_of
from hookscope.hooks.pytree import tensors_in
from hookscope.inputs.batches import Batch, copied, length_of, rows_of, with_changed
from hookscope.inputs.loading import load_argument
from hookscope.parameters import arg
from hookscope.results.inputs import InputRecord, Preprocessing
from hookscope.results.noise_shapes import OTHER_DTYPES, WHOLE
from hookscope.text import counted, printable, shape_text

# "1,2.5,-3": in brackets it is a tuple or a list.
_NUMBER = r"\s*[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?\s*"
_NUMBERS = re.compile(f"(?P<row>{_NUMBER}(?:,{_NUMBER})+,?)(?::(?P<dtype>\\w+))?")
_UNDERSCORED = re.compile(r"[-+\d.,eE\s]*\d_[-+\d.,eE\s_]*")  # Python would read 1_5 as 15
_WORDS: Mapping[str, Any] = {"true": True, "false": False, "none": None, "null": None}


@dataclass(frozen=True, slots=True)
class NamedInput:
    """An argument that the network is given by name: a literal, a tensor, or a container with tensors in it.

    `record` is None for a literal. It `is_listed` if it is a list with one entry for each input, as detection networks
    take, and `is_exact` if it keeps its dtype.
    """

    name: str
    value: Any
    record: InputRecord | None = None
    is_listed: bool = False
    is_exact: bool = False

    @property
    def row_count(self) -> int:
        """Number of inputs in it: the length of its tensors along axis 0; 0 if lengths differ, or without an axis."""
        if self.record is None:
            return 0
        lengths = {length_of(tensor) for _, tensor in tensors_in(self.value)} - {0}
        lengths = lengths - {1} or lengths  # a single row is repeated for each input
        return len(self.value) if self.is_listed else lengths.pop() if len(lengths) == 1 else 0

    @property
    def text(self) -> str:
        """For people: "sr = 16000", "b = b.npy, int64 1x5", "views = views.pt, list of 2 tensors"."""
        if self.record is None:
            return printable(f"{self.name} = {self.value!r}")
        summary = f"{type(self.value).__name__} of {counted(len(tensors_in(self.value)), 'tensor')}"
        if isinstance(self.value, torch.Tensor):
            summary = f"{str(self.value.dtype).removeprefix('torch.')} {shape_text(shape_of(self.value))}"
        return f"{self.name} = {printable(self.record.name)}, {summary}"


def named_inputs(named: Mapping[str, Any] | Sequence[str], preprocessing: Preprocessing) -> tuple[NamedInput, ...]:
    """Return inputs by name: values where a `Path` stands for a file, or texts as `read_named` takes them.

    Raises ImageError if a file cannot be read, UsageError as `read_named`.
    """
    if not isinstance(named, Mapping):
        return read_named(named, preprocessing)
    return tuple(_input_of(name, value, preprocessing) for name, value in named.items())


def _input_of(name: str, value: Any, preprocessing: Preprocessing) -> NamedInput:
    records: list[InputRecord] = []
    value = _with_files(value, preprocessing, records)
    tensors = [tensor for _, tensor in tensors_in(value)]
    if not tensors:
        return NamedInput(name, value)
    shape = tuple(shape_of(tensors[0]))
    record = InputRecord("tensor" if value is tensors[0] else type(value).__name__, None, None, shape, ())
    return _named(name, value, records[0] if records else record, preprocessing)


def _with_files(value: Any, preprocessing: Preprocessing, records: list[InputRecord]) -> Any:
    """Replace the paths in a value by the contents of their files; `records` gets the files' records."""
    if isinstance(value, Path):
        content, record = load_argument(value, preprocessing)
        records.append(record)
        return content
    if type(value) in {list, tuple}:
        return type(value)(_with_files(item, preprocessing, records) for item in value)
    if type(value) is dict:
        return {key: _with_files(item, preprocessing, records) for key, item in value.items()}
    return value


def _named(name: str, value: Any, record: InputRecord, preprocessing: Preprocessing) -> NamedInput:
    return NamedInput(name, value, record, is_listed=preprocessing.kind == "detection" and isinstance(value, list))


def read_named(texts: Sequence[str], preprocessing: Preprocessing) -> tuple[NamedInput, ...]:
    """Read "NAME=VALUE" texts as given with `--input`.

    A value is a Python literal, such as a number or a text in quotes, or else a file. Numbers with commas between them
    are one row of a tensor, (1, n), in the network's dtype or in the dtype after a colon, "1,2,3:int64"; in brackets
    they are a tuple or a list. A picture gets a batch axis of 1; tensors stay as they are stored. Raises UsageError if
    a text is not of that form, or a name comes twice; ImageError if a file cannot be read.
    """
    named: dict[str, NamedInput] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not value or not name.isidentifier():
            raise UsageError(
                f"{arg('input')} '{printable(text)}' is not of the form NAME=VALUE, such as sr=16000 or b=b.npy."
            )
        if name in named:
            raise UsageError(f"{arg('input')} {name} is given twice.")
        named[name] = _read(name, value, preprocessing)
    return tuple(named.values())


def _read(name: str, value: str, preprocessing: Preprocessing) -> NamedInput:
    if value.strip().lower() in _WORDS:
        return NamedInput(name, _WORDS[value.strip().lower()])
    if numbers := _NUMBERS.fullmatch(value):
        row = _row(numbers["row"], numbers["dtype"], f"{arg('input')} {name}={printable(value, 80)}")
        record = InputRecord(value.strip(), None, None, tuple(row.shape), ())
        return NamedInput(name, row, record, is_exact=numbers["dtype"] is not None)
    try:
        if _UNDERSCORED.fullmatch(value) is None:
            return NamedInput(name, ast.literal_eval(value.strip()))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # not a literal, so a file
        pass
    path = Path(value)
    try:
        return _named(name, *load_argument(path, preprocessing), preprocessing)
    except ImageError as error:
        if path.suffix or os.path.isfile(path):  # noqa: PTH113 never raises
            raise
        fault = f"neither a number nor a file.{nearest_file(path)}"
        if os.path.isdir(path):  # noqa: PTH112 never raises
            fault = "a folder; name a file in it."
        raise UsageError(
            f"{arg('input')} {name}={printable(value)} is {fault} A text goes in quotes: "
            f"{arg('input')} '{name}=\"{printable(value)}\"'."
        ) from error


def _row(text: str, dtype: str | None, option: str) -> torch.Tensor:
    numbers = text.strip().rstrip(",").split(",")
    dtype = dtype or "float32"
    if dtype not in (*WHOLE, *OTHER_DTYPES):
        raise UsageError(f"{option}: unknown dtype '{dtype}'.{nearest(dtype, (*WHOLE, *OTHER_DTYPES))}")
    wrong = f"{option}: not all of these are numbers of {dtype}."
    try:
        values = [int(number) if dtype in WHOLE else float(number) for number in numbers]
        row = torch.tensor([values], dtype=getattr(torch, dtype))
    except (ValueError, RuntimeError, OverflowError) as error:
        raise UsageError(wrong) from error
    # Torch turns -1 into 255 in uint8, 2 into True, and numbers that are too large into infinity.
    if not row.isfinite().all() or (dtype in WHOLE and row.tolist() != [values]):
        raise UsageError(wrong)
    return row


def with_named(batch: Batch, named: Sequence[NamedInput], input_count: int) -> Batch:
    """Return the batch with copies of inputs by name.

    A tensor with a row for each of the `input_count` inputs of the run is cut along with the batch, one with a single
    row is repeated for each input; any other belongs to all of them as it is.
    """
    kwargs: dict[str, Any] = {}
    shared: set[str] = set()
    repeated: set[str] = set()
    # Each tensor once: see `copied`.
    repeat: Callable[[torch.Tensor], torch.Tensor] = cache(lambda tensor: _repeated(tensor, len(batch.indices)))
    cut: Callable[[torch.Tensor], torch.Tensor] = cache(lambda tensor: rows_of(tensor, batch.indices))
    for kwarg in named:

        def rows(path: str, tensor: torch.Tensor, name: str = kwarg.name) -> torch.Tensor:
            count = length_of(tensor)
            if count == 1:
                repeated.add(f"[{name!r}]{path}")
                return repeat(tensor)
            if count and count == input_count:
                return cut(tensor)
            shared.add(name + path)
            return tensor

        if kwarg.is_listed:
            kwargs[kwarg.name] = [kwarg.value[index] for index in batch.indices if index < len(kwarg.value)]
        else:
            kwargs[kwarg.name] = with_changed(kwarg.value, rows)
    return replace(
        batch,
        kwargs={**batch.kwargs, **copied(kwargs)},
        shared=batch.shared | shared,
        listed=batch.listed | {kwarg.name for kwarg in named if kwarg.is_listed},
        exact=batch.exact | {kwarg.name for kwarg in named if kwarg.is_exact},
        broadcast_inputs=batch.broadcast_inputs | repeated,
    )


def _repeated(tensor: torch.Tensor, count: int) -> torch.Tensor:
    if tensor.is_nested or tensor.layout is not torch.strided:
        return rows_of(tensor, [0] * count)
    return tensor.expand(count, *tensor.shape[1:])


def without_named_frame(preprocessing: Preprocessing, named: Sequence[NamedInput]) -> Preprocessing:
    """Return the preprocessing of inputs without a name: single frames if the other frame of a pair has a name."""
    if preprocessing.kind == "flow" and any(kwarg.record is not None for kwarg in named):
        return replace(preprocessing, kind="image")
    return preprocessing


def named_batch(named: Sequence[NamedInput]) -> Batch:
    """Return a batch of inputs by name alone; a detector's list, or the first with several rows, sets how many."""
    read = [kwarg for kwarg in named if kwarg.record is not None]
    counted_first = sorted(read, key=lambda kwarg: {0: 2, 1: 1}.get(kwarg.row_count, 0))  # the others in their order
    listed = next((kwarg.row_count for kwarg in named if kwarg.is_listed), 0)
    count = listed or next((kwarg.row_count for kwarg in named if kwarg.row_count > 1), 1)
    steps = tuple(f"by name: {kwarg.text}" for kwarg in named)
    if read:
        first, *others = [kwarg.record for kwarg in counted_first if kwarg.record is not None]
        more = (Path(record.name).name for record in others if record.name != first.name)
        # A picture is read again by its name, to draw on it.
        name = first.name if first.region is not None else " with ".join([first.name, *more])
        shape = first.shape if counted_first[0].is_listed else first.shape[1:]
        record = replace(first, name=name, shape=shape, steps=(*first.steps, *steps))
    else:
        record = InputRecord("by name", None, None, (), steps)
    records = [record if count == 1 else replace(record, name=f"{record.name}[{index}]") for index in range(count)]
    return with_named(Batch((), tuple(range(count)), tuple(records)), named, count)
