"""Put inputs of equal shape together into what a model is called with."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import torch

from hookscope.errors import ImageError, UsageError
from hookscope.inputs.ahead import Ahead
from hookscope.results import InputKind, InputRecord, Preprocessing


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs of equal shape, ready for one call of the model.

    Attributes:
        args: What the model is called with, `model(*args)`: one tensor (N, C, H, W) or (N, C, T, H, W); a list of N
            tensors (C, H, W) for detection; two tensors (N, C, H, W) for optical flow.
        indices: Position of each input in `Inspection.inputs`.
        records: One per input, in the order of `indices`.
    """

    args: tuple[Any, ...]
    indices: tuple[int, ...]
    records: tuple[InputRecord, ...]


def load_batches(
    paths: Iterable[Path | str],
    preprocessing: Preprocessing,
    batch_size: int = 8,
    on_error: Callable[[ImageError], None] | None = None,
) -> Iterator[Batch]:
    """Read files into batches, one batch in memory at a time and the next one being read.

    While the caller works on a batch, threads read as many files as fill the next. The first file is read without them,
    so that a single one starts none.

    Only inputs of equal shape and dtype share a batch, since padding would change what the network sees; where the
    shape changes, a new batch begins. The order is kept.

    Args:
        paths: Files to read, as `find_inputs` returns them.
        preprocessing: How a picture becomes an input.
        batch_size: Most inputs in a batch.
        on_error: Called for a file that cannot be used, which is then skipped; without it the error is raised.

    Yields:
        Batches whose `indices` count the usable files from 0.

    Raises:
        ImageError: If a file cannot be used and there is no `on_error`.
        UsageError: If `batch_size` is below 1, or as in `load_input`.
    """
    if batch_size < 1:
        raise UsageError(f"A batch of {batch_size} inputs is not possible. Give a batch size of 1 or more.")
    count = 0
    files = Ahead(map(Path, paths), preprocessing, batch_size)
    try:
        usable = _load_usable(files, on_error)
        for _, alike in groupby(usable, key=lambda item: (item[0].shape, item[0].dtype)):
            while chunk := list(islice(alike, batch_size)):
                records = tuple(record for _, record in chunk)
                args = _arguments(torch.stack([tensor for tensor, _ in chunk]), preprocessing.kind)
                chunk.clear()  # stacking copied them: do not hold both while the model runs
                yield Batch(args, tuple(range(count, count + len(records))), records)
                del args
                count += len(records)
    finally:
        files.cancel()


def _load_usable(
    files: Ahead, on_error: Callable[[ImageError], None] | None
) -> Iterator[tuple[torch.Tensor, InputRecord]]:
    while True:
        try:
            loaded = files.load()
        except ImageError as error:
            if on_error is None:
                raise
            on_error(error)
        else:
            if loaded is None:
                return
            yield loaded


def _arguments(stacked: torch.Tensor, kind: InputKind) -> tuple[Any, ...]:
    if kind == "detection":
        return (list(stacked),)
    # The second frame is a copy: a network that changes its input in place must not change both.
    return (stacked, stacked.clone()) if kind == "flow" else (stacked,)


def noise_batch(shape: tuple[int, ...], seed: int, kind: InputKind = "image") -> Batch:
    """Draw inputs from the standard normal distribution, without touching torch's global random state.

    Args:
        shape: Shape with the batch axis, e.g. (N, C, H, W).
        seed: Equal seeds give equal values.
        kind: What the network takes, which decides how the values are handed over.

    Raises:
        UsageError: If `shape` has no axis, or an axis below 1.
    """
    if not shape or min(shape) < 1:
        raise UsageError(f"Noise of shape {shape} is not possible. Give a batch axis first and no axis below 1.")
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    step = f"standard normal noise, seed {seed}"
    record = InputRecord("noise", None, None, tuple(shape[1:]), (step,))
    return Batch(_arguments(values, kind), tuple(range(shape[0])), (record,) * shape[0])


def to_device(batch: Batch, device: torch.device | str, dtype: torch.dtype) -> Batch:
    """Move a batch to `device`, its floating-point tensors in `dtype`; whole numbers and the like keep theirs."""

    def move(value: Any) -> Any:
        if isinstance(value, list):
            return [move(item) for item in value]
        return value.to(device=device, dtype=dtype if value.is_floating_point() else value.dtype)

    return replace(batch, args=tuple(move(value) for value in batch.args))
