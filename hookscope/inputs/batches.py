"""Read inputs ahead, and stack inputs of equal shape into the batches that a model is called with."""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hookscope.errors import ImageError, UsageError
from hookscope.hooks.pytree import tensors_in, with_tensors
from hookscope.inputs.clips import Source
from hookscope.inputs.loading import is_quiet, load_input, load_quietly, looks_like_tensor
from hookscope.inputs.tensors import is_one_input
from hookscope.parameters import arg
from hookscope.results.inputs import InputKind, InputRecord, Preprocessing
from hookscope.text import one_line, shape_text

_MOST_READERS = 4  # each may hold a decoded picture of MAX_PIXELS

_Loaded = tuple[torch.Tensor, InputRecord]


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs of equal shape, ready for one call of the model, `model(*args, **kwargs)`.

    Attributes:
        args: One tensor (N, C, H, W) or (N, C, T, H, W); a list of N tensors (C, H, W) for detection; two tensors
            (N, C, H, W) for optical flow.
        indices: Position of each input among all inputs, unusable ones counted.
        records: One per input, in the order of `indices`.
        kwargs: Tensors, with the inputs on axis 0, containers of such tensors, and anything else.
        shared: Tensors that belong to all inputs: "mask", "views[1]" in `kwargs`, "[1]" in `args`.
        listed: Names in `kwargs` of lists with one entry for each input.
        exact: Arguments that keep their dtype, named as in `shared`.
        broadcast_inputs: Tensors with a single row for all inputs: "['meta']", "['views'][1]".
    """

    args: tuple[Any, ...]
    indices: tuple[int, ...]
    records: tuple[InputRecord, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    shared: frozenset[str] = frozenset()
    listed: frozenset[str] = frozenset()
    exact: frozenset[str] = frozenset()
    broadcast_inputs: frozenset[str] = frozenset()

    @property
    def pictures(self) -> tuple[int, int, int] | None:
        """Count, height and width of the floating-point arguments (N, C, H, W); None without any, or if they differ."""
        values = [*self.args, *self.kwargs.values()]
        tensors = [value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]
        sizes = {(len(tensor), tensor.shape[2], tensor.shape[3]) for tensor in tensors if tensor.dim() == 4}
        return sizes.pop() if len(sizes) == 1 else None


def load_batches(
    paths: Iterable[Source],
    preprocessing: Preprocessing,
    batch_size: int = 8,
    on_error: Callable[[ImageError], None] | None = None,
    readers: int | None = None,
) -> Iterator[Batch]:
    """Read files into batches in order, one batch in memory at a time and the next one being read by `readers` threads.

    The first file is read without threads, so that a run over one file starts none. Only inputs of equal shape and
    dtype share a batch, since padding would change what the network sees. A tensor file may hold several inputs, as
    `Preprocessing.batch_axis` says. For optical flow each frame is paired with the next, a single one with itself.

    `on_error` is called for a file that cannot be used, which is skipped but counts in the `indices` of batches;
    without it the ImageError is raised. Raises UsageError if `batch_size` is below 1, or as in `load_input`.
    """
    if batch_size < 1:
        raise UsageError(f"A batch of {batch_size} inputs is not possible. Give a batch size of 1 or more.")

    def refuse(error: ImageError) -> None:
        if on_error is None:
            raise error
        on_error(error)

    files = _Prefetcher(paths, preprocessing, max(batch_size, readers or 0), readers)
    try:
        inputs = _inputs(files, preprocessing, refuse)
        if preprocessing.kind == "flow":
            inputs = _pairs(inputs, refuse)
        usable = (sample._replace(position=position) for position, sample in enumerate(inputs) if sample is not None)
        for _, alike in groupby(usable, key=lambda sample: [(tensor.shape, tensor.dtype) for tensor in sample.tensors]):
            while chunk := list(islice(alike, batch_size)):
                yield from _batches(chunk, preprocessing.kind, refuse)
    finally:
        files.cancel()


class _Prefetcher:
    """Loads files in order; threads read the next few while the network works on the current ones.

    Threads are enough, because Pillow releases the interpreter while it decodes and resizes; processes would have to be
    started, and their pictures sent over. A thread ends when there is nothing to read.
    """

    def __init__(
        self, paths: Iterable[Source], preprocessing: Preprocessing, depth: int, readers: int | None = None
    ) -> None:
        """Read nothing yet; `readers` threads, None for the usual number, read at most `depth` files ahead."""
        self._readers = min(_MOST_READERS, os.cpu_count() or 1) if readers is None else readers
        self._waiting = iter(paths)
        self._preprocessing = preprocessing
        self._depth = depth
        self._coming: deque[tuple[Source, Future[_Loaded] | None]] = deque()  # None: read when its turn comes
        self._unread: deque[tuple[Source, Future[_Loaded]]] = deque()  # files in `_coming`, for any thread
        self._reader_count = 0
        self._lock = threading.Lock()

    def load(self) -> _Loaded | None:
        """Load the next file as `load_input` does; None at the end."""
        path, reading = self._coming.popleft() if self._coming else (next(self._waiting, None), None)
        if path is None:
            return None
        if reading is None or reading.exception() is not None:
            # `load_input` may read it in a forked process, or while stderr is closed: no other thread may run then.
            wait([other for _, other in self._coming if other is not None])
            loaded = load_input(path, self._preprocessing)
        else:
            loaded = reading.result()
        for coming in islice(self._waiting, self._depth - len(self._coming)):
            may_read = self._readers > 0 and is_quiet(coming)
            self._coming.append((coming, self._hand_over(coming) if may_read else None))
        return loaded

    def cancel(self) -> None:
        """Drop the files that no thread has begun to read."""
        self._unread.clear()

    def _hand_over(self, path: Source) -> Future[_Loaded]:
        reading: Future[_Loaded] = Future()
        with self._lock:
            self._unread.append((path, reading))
            is_missing = self._reader_count < self._readers
            self._reader_count += is_missing
        if is_missing:
            threading.Thread(target=self._read, name="hookscope-reader").start()
        return reading

    def _read(self) -> None:
        while True:
            with self._lock:
                try:
                    path, reading = self._unread.popleft()
                except IndexError:
                    self._reader_count -= 1
                    return
            try:
                reading.set_result(load_quietly(path, self._preprocessing))
            except BaseException as error:  # noqa: BLE001 - the file is read again when its turn comes
                reading.set_exception(error)


class _Input(NamedTuple):
    """One input without a batch axis: a tensor, or two frames; and its position among all inputs."""

    tensors: tuple[torch.Tensor, ...]
    record: InputRecord
    position: int = 0


_Refuse = Callable[[ImageError], None]


def _inputs(files: _Prefetcher, preprocessing: Preprocessing, refuse: _Refuse) -> Iterator[_Input | None]:
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
        del loaded  # only the caller shall hold what is yielded
        if not holds_several(tensor.shape, record, preprocessing):
            yield _Input((tensor,), record)
            del tensor
            continue
        for index, part in enumerate(tensor):
            yield _Input((part,), _part_record(record, index, len(tensor), preprocessing))


def holds_several(shape: Sequence[int], record: InputRecord, preprocessing: Preprocessing) -> bool:
    """Tell whether axis 0 of what `load_input` returns counts inputs."""
    if record.size is not None or record.sampling_rate is not None or preprocessing.batch_axis == "none":
        return False
    return preprocessing.batch_axis != "auto" or not is_one_input(shape, preprocessing)


def _part_record(record: InputRecord, index: int, count: int, preprocessing: Preprocessing) -> InputRecord:
    if count == 1:
        return replace(record, shape=record.shape[1:], steps=(*record.steps, "batch axis of 1 dropped"))
    inferred = f" ({arg('batch_axis')} none for one)" if preprocessing.batch_axis == "auto" else ""
    steps = (*record.steps, f"input {index} of {count} in the file{inferred}")
    return replace(record, name=f"{record.name}[{index}]", shape=record.shape[1:], steps=steps)


def _pairs(frames: Iterator[_Input | None], refuse: _Refuse) -> Iterator[_Input | None]:
    """Pair each frame with the next, a single frame with itself; yield None for an unusable pair."""
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
    (frame,), (other,) = first.tensors, second.tensors
    if frame.shape != other.shape or frame.dtype != other.dtype:
        shapes = " and ".join(f"{shape_text(side.shape)} {side.dtype}".replace("torch.", "") for side in (frame, other))
        refuse(
            ImageError(
                f"Cannot pair {first.record.name!r} with {second.record.name!r}: frames of {shapes}. Give frames "
                f"of one size and dtype, or {arg('resize')} HEIGHTxWIDTH."
            )
        )
        return None
    name = f"{first.record.name} with {Path(second.record.name).name}"
    steps = (*first.record.steps, f"second frame: {second.record.name}, sha256 {second.record.sha256}")
    return _Input((frame, other), replace(first.record, name=name, steps=steps))


def _batches(chunk: list[_Input], kind: InputKind, refuse: _Refuse) -> Iterator[Batch]:
    records, positions = tuple(loaded.record for loaded in chunk), tuple(loaded.position for loaded in chunk)
    try:
        stacked = [torch.stack(column) for column in zip(*(sample.tensors for sample in chunk), strict=True)]
    except (RuntimeError, MemoryError) as error:
        fault = one_line(error)
    else:
        chunk.clear()  # stacking copied them: do not hold both while the model runs
        yield Batch((list(stacked[0]),) if kind == "detection" else tuple(stacked), positions, records)
        return
    if len(chunk) == 1:
        refuse(ImageError(f"Cannot use {records[0].name!r}: {fault}."))
        return
    for sample in chunk:
        yield from _batches([sample], kind, refuse)


def count_inputs(paths: Iterable[Source], preprocessing: Preprocessing) -> int:
    """Return how many inputs files hold; only tensor files are read to count them."""
    count = 0
    for path in paths:
        count += 1
        if looks_like_tensor(path):
            with suppress(ImageError):
                tensor, record = load_input(path, preprocessing)
                if holds_several(tensor.shape, record, preprocessing):
                    count += len(tensor) - 1
    return max(count - 1, 1) if preprocessing.kind == "flow" and count else count


def to_device(batch: Batch, device: torch.device | str, dtype: torch.dtype) -> Batch:
    """Move a batch to `device`, and its floating-point tensors to `dtype` unless they are `exact`."""

    @cache  # each tensor once: see `copied`
    def move(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if tensor.is_meta and torch.device(device).type != "meta":
            raise UsageError(f"The tensor of shape {tuple(tensor.shape)} is on the meta device: it has no values.")
        return tensor.to(device=device, dtype=dtype)

    def moved(value: Any, place: str) -> Any:
        def change(_: str, tensor: torch.Tensor) -> torch.Tensor:
            return move(tensor, dtype if tensor.is_floating_point() and place not in batch.exact else tensor.dtype)

        return with_changed(value, change)

    args = tuple(moved(argument, f"[{position}]") for position, argument in enumerate(batch.args))
    return replace(batch, args=args, kwargs={name: moved(kwarg, name) for name, kwarg in batch.kwargs.items()})


def in_batches(batch: Batch, batch_size: int) -> Iterator[Batch]:
    """Yield the inputs of a batch in batches of at most `batch_size`."""
    for begin in range(0, len(batch.indices), batch_size):
        yield _part(batch, slice(begin, begin + batch_size))


def copy_of(batch: Batch) -> Batch:
    """Return the batch in separate memory."""
    return replace(batch, args=copied(batch.args), kwargs=copied(dict(batch.kwargs)))


def part_of(batch: Batch, index: int) -> Batch:
    """Return one input of a batch as a separate batch, in its own memory."""
    return copy_of(_part(batch, slice(index, index + 1)))


def _part(batch: Batch, chosen: slice) -> Batch:
    count = len(batch.indices)
    # Each tensor once: see `copied`.
    cut: Callable[[torch.Tensor], torch.Tensor] = cache(lambda tensor: rows_of(tensor, range(count)[chosen]))

    def part(value: Any, name: str, *, is_listed: bool) -> Any:
        def rows(path: str, tensor: torch.Tensor) -> torch.Tensor:
            return tensor if name + path in batch.shared or length_of(tensor) != count else cut(tensor)

        return value[chosen] if is_listed and isinstance(value, list) else with_changed(value, rows)

    return replace(
        batch,
        args=tuple(part(argument, f"[{position}]", is_listed=True) for position, argument in enumerate(batch.args)),
        indices=batch.indices[chosen],
        records=batch.records[chosen],
        kwargs={name: part(kwarg, name, is_listed=name in batch.listed) for name, kwarg in batch.kwargs.items()},
    )


def length_of(tensor: torch.Tensor) -> int:
    """Return how long axis 0 of a tensor is; 0 for a number."""
    return tensor.size(0) if tensor.dim() else 0  # a nested tensor has no `shape`


def rows_of(tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return some of the entries along axis 0, of a tensor of any layout."""
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    if not is_dense and [*rows] == [*range(length_of(tensor))]:
        return tensor  # torch recognises jagged tensors of equal lengths by an object that they share
    if tensor.is_nested:
        parts = tensor.unbind()
        return torch.nested.as_nested_tensor([parts[row] for row in rows], layout=tensor.layout)
    if not is_dense:
        chosen = tensor.to_sparse().index_select(0, torch.tensor([*rows], device=tensor.device))
        return chosen if tensor.layout is torch.sparse_coo else chosen.to_sparse(layout=tensor.layout)
    return tensor[rows.start : rows.stop] if isinstance(rows, range) else tensor[[*rows]]


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join tensors of one layout along axis 0."""
    first = tensors[0]
    if first.is_nested:
        return torch.nested.as_nested_tensor([part for rows in tensors for part in rows.unbind()], layout=first.layout)
    return torch.cat([*tensors])


def with_changed(value: Any, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    """Return a value with each tensor in it changed; containers are copied, or returned as they are if they cannot be.

    `change` gets the path of a tensor inside the value, "" for the value itself, and the tensor, once for each tensor.
    """
    if isinstance(value, torch.Tensor):
        return change("", value)
    changed: dict[int, torch.Tensor] = {}
    named_tensors = tensors_in(value)
    for path, tensor in named_tensors:
        if id(tensor) not in changed:
            changed[id(tensor)] = change(path, tensor)
    try:
        return with_tensors(value, {path: changed[id(tensor)] for path, tensor in named_tensors})
    except TypeError:
        return value


def copied(value: Any) -> Any:
    """Return the value with copies of its tensors, lists and dicts: a network may overwrite what it is given.

    A tensor that is there several times is copied once: attention asks whether its query is its key.
    """
    clone = cache(lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad))  # hashed by identity

    def copy(value: Any) -> Any:
        if type(value) in {list, tuple}:
            return type(value)(map(copy, value))
        if type(value) is dict:
            return {key: copy(item) for key, item in value.items()}
        return with_changed(value, lambda _, tensor: clone(tensor))

    return copy(value)
