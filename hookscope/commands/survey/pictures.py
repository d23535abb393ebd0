"""Read inputs of a survey again, to show them."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image
from torch import Tensor

from hookscope.inputs import Batch
from hookscope.inputs.batches import load_batches, part_of
from hookscope.inputs.pictures import picture_name
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
    wanted = {*names}
    for name in names:
        for batch in _in_memory(source, name):
            yield from ((name, picture) for picture in _drawn(batch, preprocessing))
            wanted.remove(name)
    paths = sorted({path for path in map(path_of, wanted) if path is not None})
    for batch in load_batches(paths, preprocessing, _AT_ONCE, lambda _error: None):
        shown = zip(batch.records, _drawn(batch, preprocessing), strict=False)
        yield from ((record.name, picture) for record, picture in shown if record.name in wanted)


def _in_memory(source: InputPipeline | None, name: str) -> Iterator[Batch]:
    """Yield the input of a name if it is in memory: a picture that was opened has the name of its file, and "[2]"."""
    stem, _, number = name.removesuffix("]").rpartition("[")
    if source is None or not number.isdecimal():
        return
    if source.batch is not None:
        yield part_of(source.batch, int(number))
    elif int(number) < len(source.files):
        file = source.files[int(number)]
        if isinstance(file, Image) and picture_name(file) == stem:
            yield from load_batches([file], source.preprocessing, 1, lambda _error: None)


def _drawn(batch: Batch, preprocessing: Preprocessing) -> list[NDArray[np.uint8]]:
    values = batch.args[0] if batch.args else None
    return thumbnails(plain_array(values.float().cpu()), preprocessing) if isinstance(values, Tensor) else []


def path_of(name: str) -> Path | None:
    """Return the file of an input: its name, or what is before "[2]" of one of several in it."""
    candidates = (Path(name), Path(name.rpartition("[")[0]))
    return next((path for path in candidates if path.is_file()), None)
