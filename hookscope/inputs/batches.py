"""Put inputs of equal shape together into what a model is called with."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL.Image import Image

from hookscope.errors import ImageError, UsageError
from hookscope.inputs.loading import load_input, looks_like_tensor
from hookscope.inputs.prefetch import Prefetcher
from hookscope.inputs.tensors import input_rank
from hookscope.results.inputs import InputKind, InputRecord, Preprocessing
from hookscope.text import one_line, shape_text


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs of equal shape, ready for one call of the model.

    Attributes:
        args: What the model is called with, `model(*args, **kwargs)`: one tensor (N, C, H, W) or (N, C, T, H, W); a
            list of N tensors (C, H, W) for detection; two tensors (N, C, H, W) for optical flow.
        indices: Position of each input among those given, unusable ones counted: by which targets per input are
            assigned.
        records: One per input, in the order of `indices`.
        kwargs: What it is called with by name: tensors, with the inputs on axis 0 as in `args`, and anything else.
        shared: Names in `kwargs` of tensors that belong to all inputs alike, whatever their shape.
    """

    args: tuple[Any, ...]
    indices: tuple[int, ...]
    records: tuple[InputRecord, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    shared: frozenset[str] = frozenset()


def load_batches(
    paths: Iterable[Path | str | Image],
    preprocessing: Preprocessing,
    batch_size: int = 8,
    on_error: Callable[[ImageError], None] | None = None,
) -> Iterator[Batch]:
    """Read files into batches, one batch in memory at a time and the next one being read.

    While the caller works on a batch, threads read as many files as fill the next. The first file is read without them,
    so that a single one starts none.

    Only inputs of equal shape and dtype share a batch, since padding would change what the network sees; where the
    shape changes, a new batch begins. The order is kept. A tensor file may hold several inputs, which is for
    `Preprocessing.batch_axis` to say. For optical flow each frame is paired with the one after it; a single one with
    itself.

    `on_error` is called for a file that cannot be used, which is skipped but counts in the `indices` of batches;
    without it the ImageError is raised. Raises UsageError if `batch_size` is below 1, or as in `load_input`.
    """
    if batch_size < 1:
        raise UsageError(f"A batch of {batch_size} inputs is not possible. Give a batch size of 1 or more.")

    def refuse(error: ImageError) -> None:
        if on_error is None:
            raise error
        on_error(error)

    files = Prefetcher(map(_file, paths), preprocessing, batch_size)
    try:
        inputs = _inputs(files, preprocessing, refuse)
        if preprocessing.kind == "flow":
            inputs = _pairs(inputs, refuse)
        usable = (each._replace(position=position) for position, each in enumerate(inputs) if each is not None)
        for _, alike in groupby(usable, key=lambda each: [(tensor.shape, tensor.dtype) for tensor in each.tensors]):
            while chunk := list(islice(alike, batch_size)):
                yield from _batches(chunk, preprocessing.kind, refuse)
    finally:
        files.cancel()


class _Input(NamedTuple):
    """One input without a batch axis: a tensor, or two frames; and its position among those given."""

    tensors: tuple[torch.Tensor, ...]
    record: InputRecord
    position: int = 0


_Refuse = Callable[[ImageError], None]


def _inputs(files: Prefetcher, preprocessing: Preprocessing, refuse: _Refuse) -> Iterator[_Input | None]:
    """Yield the inputs in files in order, None for a file that cannot be used."""
    while True:
        try:
            loaded = files.load()
        except ImageError as error:
            refuse(error)
            yield None
            continue
        if loaded is None:
            return
        tensor, record = loaded
        del loaded  # so that only the caller holds what is yielded
        if not holds_several(tensor.shape, record, preprocessing):
            yield _Input((tensor,), record)
            del tensor
            continue
        for index, part in enumerate(tensor):
            yield _Input((part,), _part_record(record, index, len(tensor)))


def holds_several(shape: Sequence[int], record: InputRecord, preprocessing: Preprocessing) -> bool:
    """Tell whether axis 0 of what `load_input` returns counts inputs."""
    if record.size is not None or preprocessing.batch_axis == "none":
        return False
    return preprocessing.batch_axis != "auto" or len(shape) == 1 + input_rank(preprocessing.kind)


def _part_record(record: InputRecord, index: int, count: int) -> InputRecord:
    if count == 1:
        return replace(record, shape=record.shape[1:])
    steps = (*record.steps, f"input {index} of {count} in the file")
    return replace(record, name=f"{record.name}[{index}]", shape=record.shape[1:], steps=steps)


def _pairs(frames: Iterator[_Input | None], refuse: _Refuse) -> Iterator[_Input | None]:
    """Pair each frame with the next one, a single one with itself; yield None for a pair that cannot be used."""
    previous, count = None, 0
    for frame in frames:
        count += 1
        if count > 1:
            yield None if previous is None or frame is None else _pair(previous, frame, refuse)
        previous = frame
    if count == 1 and previous is not None:
        (only,), record = previous.tensors, previous.record
        yield _Input((only, only), replace(record, steps=(*record.steps, "the same picture is both frames")))


def _pair(first: _Input, second: _Input, refuse: _Refuse) -> _Input | None:
    (one,), (other,) = first.tensors, second.tensors
    if one.shape != other.shape or one.dtype != other.dtype:
        shapes = " and ".join(f"{shape_text(each.shape)} {each.dtype}".replace("torch.", "") for each in (one, other))
        refuse(
            ImageError(
                f"Cannot pair {first.record.name!r} with {second.record.name!r}: frames of {shapes}. Give frames of "
                "one size, or --resize HEIGHTxWIDTH."
            )
        )
        return None
    name = f"{first.record.name} with {Path(second.record.name).name}"
    steps = (*first.record.steps, f"second frame: {second.record.name}, sha256 {second.record.sha256}")
    return _Input((one, other), replace(first.record, name=name, steps=steps))


def _batches(chunk: list[_Input], kind: InputKind, refuse: _Refuse) -> Iterator[Batch]:
    """Yield inputs of one form as a batch; each by itself if they cannot be put together."""
    records, positions = tuple(each.record for each in chunk), tuple(each.position for each in chunk)
    stacked = _stacked(chunk)
    if not isinstance(stacked, str):
        chunk.clear()  # stacking copied them: do not hold both while the model runs
        yield Batch((list(stacked[0]),) if kind == "detection" else tuple(stacked), positions, records)
    elif len(chunk) > 1:
        for each in chunk:
            yield from _batches([each], kind, refuse)
    else:
        refuse(ImageError(f"Cannot use {records[0].name!r}: {stacked}."))


def _stacked(chunk: list[_Input]) -> list[torch.Tensor] | str:
    """Return inputs with a batch axis, or why they cannot be stacked, such as a lack of memory."""
    try:
        return [torch.stack(column) for column in zip(*(each.tensors for each in chunk), strict=True)]
    except (RuntimeError, MemoryError) as error:
        return one_line(error)


def _file(source: Path | str | Image) -> Path | Image:
    return source if isinstance(source, Image) else Path(source)


def count_inputs(paths: Iterable[Path | str | Image], preprocessing: Preprocessing) -> int:
    """Return how many inputs files hold: as many as `load_batches` has indices. Only tensor files are read for that."""
    count = 0
    for path in map(_file, paths):
        count += 1
        if looks_like_tensor(path):
            with suppress(ImageError):
                tensor, record = load_input(path, preprocessing)
                if holds_several(tensor.shape, record, preprocessing):
                    count += len(tensor) - 1
    return max(count - 1, 1) if preprocessing.kind == "flow" and count else count


def noise_batch(shape: tuple[int, ...], seed: int, kind: InputKind = "image") -> Batch:
    """Draw inputs of a shape with the batch axis from the standard normal distribution, the same for equal seeds.

    torch's global random state is left alone. `kind` decides how the values are handed over. Raises UsageError if
    `shape` has no axis, or an axis below 1.
    """
    if not shape or min(shape) < 1:
        raise UsageError(f"Noise of shape {shape} is not possible. Give a batch axis first and no axis below 1.")
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    step = f"standard normal noise, seed {seed}"
    record = InputRecord("noise", None, None, tuple(shape[1:]), (step,))
    # The second frame is a copy: a network that changes its input in place must not change both.
    frames = (values, values.clone()) if kind == "flow" else (values,)
    return Batch((list(values),) if kind == "detection" else frames, tuple(range(shape[0])), (record,) * shape[0])


def to_device(batch: Batch, device: torch.device | str, dtype: torch.dtype) -> Batch:
    """Move a batch to `device`, its floating-point tensors to `dtype`; other tensors keep theirs."""

    def move(value: Any) -> Any:
        if isinstance(value, list):
            return [move(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(device=device, dtype=dtype if value.is_floating_point() else value.dtype)

    kwargs = {name: move(value) for name, value in batch.kwargs.items()}
    return replace(batch, args=tuple(move(value) for value in batch.args), kwargs=kwargs)


def in_batches(batch: Batch, batch_size: int) -> Iterator[Batch]:
    """Yield the inputs of a batch in batches of at most `batch_size`."""
    for begin in range(0, len(batch.indices), batch_size):
        part = slice(begin, begin + batch_size)
        yield replace(
            batch,
            args=tuple(each[part] for each in batch.args),
            indices=batch.indices[part],
            records=batch.records[part],
            kwargs={
                name: value[part] if isinstance(value, torch.Tensor) and name not in batch.shared else value
                for name, value in batch.kwargs.items()
            },
        )


def copy_of(batch: Batch) -> Batch:
    """Return the batch in separate memory."""
    return replace(batch, args=copied(batch.args), kwargs=copied(dict(batch.kwargs)))


def part_of(batch: Batch, index: int) -> Batch:
    """Return one input of a batch as a separate batch, in its own memory."""
    count = len(batch.indices)
    return replace(
        batch,
        args=tuple(_slice(each, index, count) for each in batch.args),
        indices=(batch.indices[index],),
        records=(batch.records[index],),
        kwargs={
            name: copied(value) if name in batch.shared else _slice(value, index, count)
            for name, value in batch.kwargs.items()
        },
    )


def _slice(value: Any, index: int, count: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[index : index + 1].clone() if value.dim() and value.shape[0] == count else value.clone()
    if isinstance(value, list) and len(value) == count:
        return [copied(value[index])]
    if isinstance(value, dict):
        return {key: _slice(each, index, count) for key, each in value.items()}
    return copied(value)


def copied(value: Any) -> Any:
    """Return the value with copies of its tensors: a network may overwrite what it is given."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple):
        return type(value)(copied(each) for each in value)
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    return value
