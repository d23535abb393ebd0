"""The photograph that an input was made from, read again: upright, at its original size, one at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from hookscope.errors import ImageError
from hookscope.inputs.batches import Batch
from hookscope.inputs.loading import read_upright, take_upright
from hookscope.inputs.pictures import picture_name
from hookscope.inputs.preprocessing import thumbnails
from hookscope.results.inputs import InputRecord, Photograph, Preprocessing, Region

_NO_PICTURE = 205  # of 255: what stands for inputs that cannot be shown


@dataclass(frozen=True, slots=True)
class Photographs:
    """The photographs behind the inputs of a run.

    `pictures` are those given in memory, `batch` the inputs themselves where tensors were given. `seen` has what the
    network saw of the first inputs: (H, W, 3) or (H, W) uint8.
    """

    preprocessing: Preprocessing
    pictures: Sequence[Image.Image] = ()
    batch: Batch | None = None
    seen: Mapping[InputRecord, NDArray[np.uint8]] = field(default_factory=dict)

    def __call__(self, inputs: Sequence[InputRecord], index: int) -> Photograph:
        """Return the photograph of one of a run's inputs; what the network saw where it is gone."""
        record = inputs[index]
        reason = ""
        if record.region is not None:
            try:
                pixels = self._read(inputs, index)
            except ImageError as error:
                reason = f"{error} "
            else:
                if pixels.shape[:2] == (record.region.height, record.region.width):
                    return Photograph(pixels, record.region)
                reason = f"{record.name} has changed since the run. "
        shown, note = self._seen(inputs, index), f"{reason}This is what the network saw." if reason else ""
        if shown is None:
            shape = record.shape[-2:] if len(record.shape) > 1 else (1, 1)
            shown, note = np.full(shape, _NO_PICTURE, np.uint8), f"{reason}Maps are drawn on grey, without a picture."
        height, width = shown.shape[:2]
        shown = shown if shown.ndim == 3 else np.repeat(shown[:, :, None], 3, axis=2)
        return Photograph(shown, Region(0, 0, height, width, height, width), note)

    def _read(self, inputs: Sequence[InputRecord], index: int) -> NDArray[np.uint8]:
        record = inputs[index]
        if record.sha256 is not None:
            return read_upright(Path(record.name), record.sha256, self.preprocessing.max_pixels)
        key = record.name, record.size
        # Pictures in memory may share a name: those that look alike come in the order in which they were given.
        alike = [picture for picture in self.pictures if (picture_name(picture), picture.size) == key]
        places = [place for place, other in enumerate(inputs) if (other.name, other.size) == key]
        if len(alike) != len(places):
            raise ImageError(f"Cannot tell which picture in memory {record.name!r} is.")
        return take_upright(alike[places.index(index)], self.preprocessing.max_pixels)

    def _seen(self, inputs: Sequence[InputRecord], index: int) -> NDArray[np.uint8] | None:
        if inputs[index] in self.seen:
            return self.seen[inputs[index]]
        if self.batch is None or len(self.batch.indices) != len(inputs) or not self.batch.args:
            return None
        values = self.batch.args[0]
        if not isinstance(values, torch.Tensor):
            return None
        pictures = thumbnails(values[index : index + 1].detach().float().cpu().numpy(), self.preprocessing)
        return pictures[0] if pictures else None
