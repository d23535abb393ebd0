"""Where the inputs of a run come from: files, pictures and tensors in memory, arguments by name, or noise.

`InputPipeline.photograph` reads the photograph behind an input again: upright, in its original size.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image

from hookscope.errors import ImageError
from hookscope.inputs.batches import Batch, count_inputs, in_batches, load_batches, part_of, to_device
from hookscope.inputs.clips import Source
from hookscope.inputs.loading import read_upright, take_upright
from hookscope.inputs.named import NamedInput, named_batch, with_named
from hookscope.inputs.pictures import picture_name
from hookscope.inputs.preprocessing import thumbnails
from hookscope.results.inputs import (
    SHOWN_INPUTS,
    InputRecord,
    Photograph,
    Preprocessing,
    grey_photograph,
    whole_photograph,
)
from hookscope.results.noise_shapes import NoiseShape
from hookscope.statistics.storage import is_dense, plain_array


@dataclass(frozen=True, slots=True)
class InputPipeline:
    """The inputs of a run; each call of `batches` reads them anew.

    There are `files` (pictures in memory among them), or a `batch` of tensors in memory, or of `noise` of these shapes;
    inputs by name, `named`, go with every batch, or are the only ones. Batches go through `finish`, for example to add
    targets. While files are read, `pictures` gets the first pictures as the network sees them, (H, W, 3) or (H, W)
    uint8.
    """

    files: Sequence[Source]
    preprocessing: Preprocessing
    device: torch.device
    dtype: torch.dtype
    batch: Batch | None = None
    noise: Sequence[NoiseShape] = ()
    named: Sequence[NamedInput] = ()
    finish: Callable[[Batch], Batch] | None = None
    readers: int | None = None
    pictures: dict[InputRecord, NDArray[np.uint8]] = field(default_factory=dict)

    def batches(self, size: int, on_error: Callable[[ImageError], None] | None = None) -> Iterator[Batch]:
        """Yield batches of at most `size` inputs; files that cannot be used go to `on_error`, or raise without it."""
        batches: Iterator[Batch]
        if self.files:
            batches = map(self._pictured, load_batches(self.files, self.preprocessing, size, on_error, self.readers))
        else:
            batches = in_batches(self._whole(), size)
        if self.named and (self.files or self.batch is not None):
            total = self.input_count() if any(kwarg.row_count > 1 for kwarg in self.named) else 1
            batches = (with_named(batch, self.named, total) for batch in batches)
        placed = (to_device(batch, self.device, self.dtype) for batch in batches)
        return map(self.finish, placed) if self.finish else placed

    def _whole(self) -> Batch:
        """Return inputs that are no files, without those by name that only accompany them."""
        return named_batch(self.named) if self.batch is None else self.batch

    def input_count(self) -> int:
        """Return how many inputs there are, unusable ones counted; tensor files are read for that."""
        if self.files:
            return count_inputs(self.files, self.preprocessing)
        return len(self._whole().indices)

    def photograph(self, inputs: Sequence[InputRecord], index: int) -> Photograph:
        """Return the photograph of one of a run's inputs; what the network saw if the photograph is gone."""
        record = inputs[index]
        reason = ""
        if record.region is not None:
            try:
                pixels = self._read_photograph(inputs, index)
            except ImageError as error:
                reason = f"{error} "
            else:
                if pixels.shape[:2] == (record.region.height, record.region.width):
                    return Photograph(pixels, record.region)
                reason = f"{record.name} has changed since the run. "
        shown = self._seen(inputs, index)
        if shown is None:
            return grey_photograph(record.shape, f"{reason}Maps are drawn on grey, without a picture.")
        return whole_photograph(shown, f"{reason}This is what the network saw." if reason else "")

    def _read_photograph(self, inputs: Sequence[InputRecord], index: int) -> NDArray[np.uint8]:
        record = inputs[index]
        if record.sha256 is not None:
            frames = self.files if self.preprocessing.kind == "flow" else ()  # a pair has the names of both
            first = (str(frame) for frame in frames if f"{record.name} with ".startswith(f"{frame} with "))
            return read_upright(Path(next(first, record.name)), record.sha256, self.preprocessing.max_pixels)
        key = record.name, record.size
        # Pictures in memory may share a name and a size: they come in the order in which they were given.
        in_memory = [file for file in self.files if isinstance(file, Image)]
        alike = [picture for picture in in_memory if (picture_name(picture), picture.size) == key]
        places = [place for place, other in enumerate(inputs) if (other.name, other.size) == key]
        if len(alike) != len(places):
            raise ImageError(f"Cannot tell which picture in memory {record.name!r} is.")
        return take_upright(alike[places.index(index)], self.preprocessing.max_pixels)

    def _seen(self, inputs: Sequence[InputRecord], index: int) -> NDArray[np.uint8] | None:
        if self.files:
            return self.pictures.get(inputs[index])
        batch = self._whole()
        if len(batch.indices) != len(inputs):
            return None
        single = part_of(batch, index)
        for value in (*single.args, *single.kwargs.values()):
            first = value[0] if isinstance(value, list) and value else None  # a detector's input
            tensor = first[None] if isinstance(first, torch.Tensor) and not first.is_nested else value
            if isinstance(tensor, torch.Tensor) and is_dense(tensor) and not tensor.is_complex():
                for picture in thumbnails(tensor.detach().float().cpu().numpy(), self.preprocessing):
                    return picture
        return None

    def _pictured(self, batch: Batch) -> Batch:
        values = batch.args[0]
        if len(self.pictures) < SHOWN_INPUTS and isinstance(values, torch.Tensor) and not values.is_complex():
            made = thumbnails(plain_array(values.float()), self.preprocessing)
            in_memory = Counter((picture_name(file), file.size) for file in self.files if isinstance(file, Image))
            for record, picture in zip(batch.records[:SHOWN_INPUTS], made, strict=False):
                if in_memory[record.name, record.size or (0, 0)] < 2:  # `photograph` tells equal records apart
                    self.pictures[record] = picture
        return batch
