"""Where the inputs of a run come from: files, pictures and tensors in memory, arguments by name, or noise."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image

from hookscope.errors import ImageError
from hookscope.inputs.batches import Batch, count_inputs, in_batches, load_batches, to_device
from hookscope.inputs.clips import Source
from hookscope.inputs.named import NamedInput, named_batch, named_count, with_named
from hookscope.inputs.noise import noise_batch, noise_count
from hookscope.inputs.photographs import Photographs
from hookscope.inputs.preprocessing import thumbnails
from hookscope.results.inputs import SHOWN_INPUTS, InputRecord, Preprocessing
from hookscope.results.noise_shapes import NoiseShape
from hookscope.statistics.storage import plain_array


@dataclass(frozen=True, slots=True)
class InputPipeline:
    """The inputs of a run, in batches, each time they are asked for.

    There are `files` (pictures in memory among them), or a `batch` of tensors in memory, or `noise` by `seed`; inputs
    by name, `named`, go with every batch, or are the only ones. Batches go through `finish`, for example to add
    targets. While they are read, `pictures` gets the first pictures as the network sees them, (H, W, 3) or (H, W)
    uint8.
    """

    files: Sequence[Source]
    preprocessing: Preprocessing
    device: torch.device
    dtype: torch.dtype
    batch: Batch | None = None
    noise: Sequence[NoiseShape] = ()
    seed: int = 0
    named: Sequence[NamedInput] = ()
    finish: Callable[[Batch], Batch] | None = None
    readers: int | None = None
    pictures: dict[InputRecord, NDArray[np.uint8]] = field(default_factory=dict)

    def batches(self, size: int, on_error: Callable[[ImageError], None] | None = None) -> Iterator[Batch]:
        """Yield batches of at most `size` inputs; files that cannot be used go to `on_error`, or raise without it."""
        batches: Iterator[Batch]
        if self.files:
            batches = map(self._pictured, load_batches(self.files, self.preprocessing, size, on_error, self.readers))
        elif self.batch is not None:
            batches = in_batches(self.batch, size)
        elif self.noise:
            batches = in_batches(noise_batch(self.noise, self.seed, self.preprocessing.kind), size)
        else:
            batches = in_batches(named_batch(self.named), size)
        if self.named and (self.files or self.batch is not None or self.noise):
            total = self.input_count() if any(kwarg.row_count > 1 for kwarg in self.named) else 1
            batches = (with_named(batch, self.named, total) for batch in batches)
        placed = (to_device(batch, self.device, self.dtype) for batch in batches)
        return map(self.finish, placed) if self.finish else placed

    def input_count(self) -> int:
        """Return how many inputs there are, unusable ones counted; tensor files are read for that."""
        if self.files:
            return count_inputs(self.files, self.preprocessing)
        if self.batch is not None:
            return len(self.batch.indices)
        if self.noise:
            return noise_count(self.noise)
        return named_count(self.named)

    @property
    def photographs(self) -> Photographs:
        """What the inputs were made of, to be read again."""
        in_memory = [file for file in self.files if isinstance(file, Image)]
        return Photographs(self.preprocessing, in_memory, self.batch, self.pictures)

    def _pictured(self, batch: Batch) -> Batch:
        values = batch.args[0]
        if len(self.pictures) < SHOWN_INPUTS and isinstance(values, torch.Tensor):
            made = thumbnails(plain_array(values.float()), self.preprocessing)
            for record, picture in zip(batch.records[:SHOWN_INPUTS], made, strict=False):
                self.pictures[record] = picture
        return batch
