"""The inputs of a network, how a file becomes one, and with what else a run was made."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

InputKind = Literal["image", "detection", "video", "flow"]

CLIP_STEP = "one clip of "
"""The beginning of the preprocessing step that gives the number of frames of a clip."""

PICTURE_AXES = 2
"""Axes of a map of a picture; that of a signal has 1, that of a volume or a clip 3."""

SHOWN_INPUTS = 32
"""Inputs whose pictures a run keeps: as many as its report shows."""

# Where Pillow starts to warn of decompression bombs (Image.MAX_IMAGE_PIXELS): 256 MiB of 24-bit pixels.
MAX_PIXELS = 1024 * 1024 * 1024 // 4 // 3


@dataclass(frozen=True, slots=True)
class Waveform:
    """How a recording becomes a network input.

    Attributes:
        channels: C of (C, L); None for one channel without an axis of its own, (L,).
        sampling_rate: In Hz; None where the network does not tell.
        is_normalised: Whether each recording is brought to mean 0 and variance 1, as transformers' feature extractors
            do.
    """

    channels: int | None
    sampling_rate: int | None = None
    is_normalised: bool = False


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """How a file becomes a network input.

    Attributes:
        kind: What the network takes: one image tensor (N, C, H, W), a list of (C, H, W) for detection, a clip
            (N, C, T, H, W), or two frames (N, C, H, W) for optical flow.
        resize: Length of the shorter side after resizing, in pixels, or an exact (height, width); None keeps the size.
        crop: Height and width of the centre crop, in pixels; None keeps everything.
        interpolation: Pillow's name in lower case, "bilinear" or "bicubic".
        mean: Per channel, subtracted after scaling to 0-1, before division by `std`. Empty means no normalisation.
        frames: T, for a clip: the image is repeated.
        multiple: Height and width are cropped down to a multiple of this.
        max_pixels: A picture with more pixels is refused before it is decoded, and so is a resize to more.
        batch_axis: Which axis of a tensor file counts inputs; "auto": the first, unless the tensor has a single axis or
            as many as one input; "none": a tensor is one input as it is.
        input_axes: How many axes one input has, batch axis apart, by the network's first layer; None if that does not
            tell.
        waveform: What the network takes of a recording; None for its channels as they are, (C, L).
        source: Where these values come from, for people: "ResNet34_Weights.IMAGENET1K_V1", "defaults", "options".
    """

    kind: InputKind = "image"
    channels: int = 3
    resize: int | tuple[int, int] | None = 224
    crop: tuple[int, int] | None = (224, 224)
    interpolation: str = "bilinear"
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    frames: int = 1
    multiple: int = 1
    max_pixels: int = MAX_PIXELS
    batch_axis: int | Literal["auto", "none"] = "auto"
    input_axes: int | None = 3
    waveform: Waveform | None = None
    source: str = "defaults"


@dataclass(frozen=True, slots=True)
class Region:
    """The part of an upright picture that a network's input covers.

    Edges are continuous, in pixels of that picture: row `i` reaches from `i` to `i + 1`, its centre is `i + 0.5`. Where
    the input was padded they lie outside the picture.

    Attributes:
        height: Of the upright picture.
        width: Of the upright picture.
    """

    top: float
    left: float
    bottom: float
    right: float
    height: int
    width: int


@dataclass(frozen=True, slots=True)
class Photograph:
    """The photograph an input was made from, to draw over.

    Attributes:
        pixels: (H, W, 3) uint8, upright.
        region: The part of it that the input covers.
        remark: Why it is what the network saw instead of the photograph itself; "" for the photograph.
    """

    pixels: NDArray[np.uint8] = field(repr=False)
    region: Region
    remark: str = ""


@dataclass(frozen=True, slots=True)
class InputRecord:
    """One input and what was done to it.

    Attributes:
        name: File name as the user gave it or as found in a folder, or "noise", "tensor".
        sha256: Hex digest of the file's bytes; None when there is no file.
        size: Width and height of the file's picture in pixels, before anything was done; None for tensors.
        shape: Shape handed to the network without the batch axis, e.g. (C, H, W).
        steps: What was done, in order, for people.
        region: Which part of the picture the input covers; None for tensors.
        sampling_rate: Of a recording as the network gets it, in Hz; None for other inputs.
    """

    name: str
    sha256: str | None
    size: tuple[int, int] | None
    shape: tuple[int, ...]
    steps: tuple[str, ...]
    region: Region | None = None
    sampling_rate: int | None = None

    @property
    def is_noise(self) -> bool:
        """Whether the input was drawn at random, as it is where none is given."""
        return self.name == "noise" and self.sha256 is None


@dataclass(frozen=True, slots=True)
class StoredProvenance:
    """How a run was made, besides the facts in the result itself.

    Attributes:
        patterns: As given with `--layer`.
        preprocessing: How files became inputs; None where no file did.
        named_inputs: Inputs by name: the value, or the record of the file it was read from.
        unusable_inputs: A sentence for each.
        settings: Further options of the command, by name: "edits", "limits", "autocast".
        threads: torch's; None where nothing ran.
    """

    patterns: tuple[str, ...] = ()
    preprocessing: Preprocessing | None = None
    named_inputs: Mapping[str, Any] = field(default_factory=dict)
    unusable_inputs: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Provenance(StoredProvenance):
    """How a run was made, with what is drawn of its inputs.

    Attributes:
        pictures: The first pictures as the network saw them, (H, W, 3) or (H, W) uint8.
        photographs: Reads again what an input was made of, given the inputs of the run and the position of one.
    """

    pictures: Mapping[InputRecord, NDArray[np.uint8]] = field(default_factory=dict, repr=False)
    photographs: Callable[[Sequence[InputRecord], int], Photograph] | None = field(default=None, repr=False)
