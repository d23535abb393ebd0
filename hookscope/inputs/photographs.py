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
from hookscope.inputs.preprocessing import thumbnails
from hookscope.results.inputs import InputRecord, Photograph, Preprocessing, Region

_NO_PICTURE = 205  # of 255: what stands for inputs that cannot be shown


@dataclass(frozen=True, slots=True)
class Photographs:
    """The photographs behind the inputs of a run.

    Attributes:
        pictures: Those given in memory, in their order.
        batch: The inputs themselves where tensors were given.
        seen: Of the first inputs, what the network saw: (H, W, 3) or (H, W) uint8.
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
                reason = str(error)
            else:
                if pixels.shape[:2] == (record.region.height, record.region.width):
                    return Photograph(pixels, record.region)
                reason = f"{record.name} has changed since the run."
        seen = self._seen(inputs, index)
        if seen is None:
            height, width = record.shape[-2:] if len(record.shape) > 1 else (1, 1)
            grey = np.full((height, width, 3), _NO_PICTURE, np.uint8)
            return Photograph(grey, _whole(grey), f"{reason} Maps are drawn on grey, without a picture.".lstrip())
        seen = seen if seen.ndim == 3 else np.repeat(seen[:, :, None], 3, axis=2)
        return Photograph(seen, _whole(seen), f"{reason} This is what the network saw.".lstrip() if reason else "")

    def _read(self, inputs: Sequence[InputRecord], index: int) -> NDArray[np.uint8]:
        record = inputs[index]
        if record.sha256 is not None:
            return read_upright(Path(record.name), record.sha256, self.preprocessing.max_pixels)
        # Pictures in memory may share a name: those that look alike come in the order in which they were given.
        alike = [picture for picture in self.pictures if picture.size == record.size and _name(picture) == record.name]
        places = [place for place, other in enumerate(inputs) if (other.name, other.size) == (record.name, record.size)]
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


def _name(picture: Image.Image) -> str:
    return str(getattr(picture, "filename", "")) or "picture"


def _whole(pixels: NDArray[np.uint8]) -> Region:
    height, width = pixels.shape[:2]
    return Region(0, 0, height, width, height, width)
