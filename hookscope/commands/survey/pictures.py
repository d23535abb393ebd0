"""Read inputs of a survey again, to show them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image
from torch import Tensor

from hookscope.inputs.batches import Batch, load_batches, part_of
from hookscope.inputs.pictures import picture_name
from hookscope.inputs.pipeline import InputPipeline
from hookscope.inputs.preprocessing import thumbnails
from hookscope.results.inputs import Preprocessing
from hookscope.statistics.storage import is_dense, plain_array

_AT_ONCE = 8


def inputs_again(
    preprocessing: Preprocessing, source: InputPipeline | None, names: Sequence[str]
) -> Iterator[tuple[list[str], Batch]]:
    """Yield the readable inputs of these names, each once, in batches with the names of their inputs.

    A file may hold further inputs, which are yielded too. `source` has the inputs in memory.
    """
    on_disk = []
    for name in names:
        batches = [*_in_memory(source, name)]
        yield from (([name], batch) for batch in batches)
        on_disk += [] if batches else [path_of(name)]
    paths = dict.fromkeys(path for path in on_disk if path is not None)
    for batch in load_batches(paths, preprocessing, _AT_ONCE, lambda _error: None):
        yield [record.name for record in batch.records], batch


def _in_memory(source: InputPipeline | None, name: str) -> Iterator[Batch]:
    """Yield the input of a name if it is in memory: the name ends in the input's number, "[2]"."""
    stem, _, number = name.removesuffix("]").rpartition("[")
    if source is None or not number.isdecimal():
        return
    if source.batch is not None:
        yield part_of(source.batch, int(number))
    elif int(number) < len(source.files):
        file = source.files[int(number)]
        if isinstance(file, Image) and picture_name(file) == stem:
            yield from load_batches([file], source.preprocessing, 1, lambda _error: None)


def input_pictures(
    preprocessing: Preprocessing, source: InputPipeline | None, names: Sequence[str]
) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    """Yield pictures of inputs as the network saw them: see `inputs_again`."""
    wanted = {*names}
    for read, batch in inputs_again(preprocessing, source, names):
        values = batch.args[0] if batch.args else None
        if isinstance(values, Tensor) and is_dense(values) and not values.is_complex():
            shown = thumbnails(plain_array(values.float().cpu()), preprocessing)
            yield from ((name, picture) for name, picture in zip(read, shown, strict=False) if name in wanted)


def are_pictures(values: object) -> TypeGuard[Tensor]:
    """Tell whether an argument of the network is a batch of pictures, (N, C, H, W)."""
    return isinstance(values, Tensor) and values.is_floating_point() and is_dense(values) and values.dim() == 4


def path_of(name: str) -> Path | None:
    """Return the file of an input: its name, without "[2]" where a file holds several inputs."""
    candidates = (Path(name), Path(name.rpartition("[")[0]))
    return next((path for path in candidates if path.is_file()), None)
