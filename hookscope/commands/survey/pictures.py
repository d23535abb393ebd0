"""Read inputs of a survey again, to show them."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image
from torch import Tensor

from hookscope.inputs import Batch
from hookscope.inputs.batches import load_batches, part_of
from hookscope.inputs.pipeline import InputPipeline
from hookscope.inputs.preprocessing import thumbnails
from hookscope.results.inputs import Preprocessing
from hookscope.statistics.storage import plain_array

_AT_ONCE = 8


def input_pictures(
    preprocessing: Preprocessing, source: InputPipeline | None, names: Sequence[str]
) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    """Yield inputs by name, as the network saw them, each once, as far as they are pictures that can be read.

    `source` is where inputs in memory come from.
    """
    wanted = {name: path_of(name) for name in names}
    paths = sorted({path for path in wanted.values() if path is not None})
    for batch in load_batches(paths, preprocessing, _AT_ONCE, lambda _error: None):
        shown = zip(batch.records, _drawn(batch, preprocessing), strict=False)
        yield from ((record.name, picture) for record, picture in shown if record.name in wanted)
    for name, path in wanted.items():
        number = name.removesuffix("]").rpartition("[")[2]
        if source is not None and path is None and number.isdecimal():
            yield from ((name, picture) for picture in _in_memory(source, int(number)))


def _in_memory(source: InputPipeline, number: int) -> list[NDArray[np.uint8]]:
    if source.batch is not None:
        inside = number < len(source.batch.indices)
        return _drawn(part_of(source.batch, number), source.preprocessing) if inside else []
    file = source.files[number] if number < len(source.files) else None
    if not isinstance(file, Image):
        return []
    batches = load_batches([file], source.preprocessing, 1, lambda _error: None)
    return [picture for batch in batches for picture in _drawn(batch, source.preprocessing)]


def _drawn(batch: Batch, preprocessing: Preprocessing) -> list[NDArray[np.uint8]]:
    values = batch.args[0] if batch.args else None
    return thumbnails(plain_array(values.float().cpu()), preprocessing) if isinstance(values, Tensor) else []


def path_of(name: str) -> Path | None:
    """Return the file of an input: its name, or what is before "[2]" of one of several in it."""
    candidates = (Path(name), Path(name.rpartition("[")[0]))
    return next((path for path in candidates if path.is_file()), None)
