"""Read inputs of a survey again, to show them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image
from torch import Tensor

from hookscope.inputs import Batch
from hookscope.inputs.batches import load_batches
from hookscope.inputs.clips import Source
from hookscope.inputs.preprocessing import thumbnails
from hookscope.results.inputs import Preprocessing
from hookscope.statistics.storage import plain_array

_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class InputPictures:
    """Inputs by name, as the network saw them.

    Attributes:
        files: Of the survey, in its order; for pictures in memory.
        batch: The inputs themselves where tensors were given.
    """

    preprocessing: Preprocessing
    files: Sequence[Source] = ()
    batch: Batch | None = None

    def __call__(self, names: Sequence[str]) -> Iterator[tuple[str, NDArray[np.uint8]]]:
        """Yield the pictures of these inputs, each once, as far as they can be read."""
        if self.batch is not None:
            yield from self._of_batch(self.batch, names)
            return
        wanted = set(names)
        paths = sorted({path for name in wanted if (path := path_of(name)) is not None})
        for batch in load_batches(paths, self.preprocessing, _AT_ONCE, lambda _error: None):
            for record, picture in zip(batch.records, self._drawn(batch), strict=False):
                if record.name in wanted:
                    yield record.name, picture
        yield from self._in_memory([name for name in wanted if path_of(name) is None])

    def _in_memory(self, names: Sequence[str]) -> Iterator[tuple[str, NDArray[np.uint8]]]:
        for name in names:
            number = name.removesuffix("]").rpartition("[")[2]
            source = self.files[int(number)] if number.isdecimal() and int(number) < len(self.files) else None
            if isinstance(source, Image):
                for batch in load_batches([source], self.preprocessing, 1, lambda _error: None):
                    yield from ((name, picture) for picture in self._drawn(batch))

    def _of_batch(self, batch: Batch, names: Sequence[str]) -> Iterator[tuple[str, NDArray[np.uint8]]]:
        values = batch.args[0]
        for name in names:
            number = name.removesuffix("]").rpartition("[")[2]
            if isinstance(values, Tensor) and number.isdecimal() and int(number) < len(values):
                picture = plain_array(values[int(number) : int(number) + 1].detach().float().cpu())
                yield from ((name, thumbnail) for thumbnail in thumbnails(picture, self.preprocessing))

    def _drawn(self, batch: Batch) -> list[NDArray[np.uint8]]:
        values = batch.args[0]
        return thumbnails(plain_array(values.float()), self.preprocessing) if isinstance(values, Tensor) else []


def path_of(name: str) -> Path | None:
    """Return the file of an input: its name, or what is before "[2]" of one of several in it."""
    candidates = (Path(name), Path(name.rpartition("[")[0]))
    return next((path for path in candidates if path.is_file()), None)
