"""The inputs of a network, how files become inputs, and the settings of a run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

InputKind = Literal["image", "detection", "video", "flow"]

CLIP_STEP = "one clip of "
"""How the preprocessing step with a clip's number of frames begins."""

PICTURE_AXES = 2
"""Axes of a map of a picture; a signal's map has 1, a volume's or a clip's 3."""

SHOWN_INPUTS = 32
"""Number of inputs whose pictures a run keeps, because its report shows this many."""

_NO_PICTURE = 205  # grey level, of 255, for inputs that cannot be shown

# Where Pillow starts to warn of decompression bombs (Image.MAX_IMAGE_PIXELS): 256 MiB of 24-bit pixels.
MAX_PIXELS = 1024 * 1024 * 1024 // 4 // 3


@dataclass(frozen=True, slots=True)
class Waveform:
    """How a recording becomes a network input.

    Attributes:
        channels: C of (C, L); None for one channel without an axis of its own, (L,).
        sampling_rate: In Hz; None if the network does not state it.
        is_normalised: Whether recordings are scaled to mean 0 and variance 1, as by transformers' feature extractors.
    """

    channels: int | None
    sampling_rate: int | None = None
    is_normalised: bool = False


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """How a file becomes a network input.

    Attributes:
        kind: The input that the network takes: one image tensor (N, C, H, W), a list of (C, H, W) for detection, a clip
            (N, C, T, H, W), or two frames (N, C, H, W) for optical flow.
        resize: Length of the shorter side after resizing, in pixels, or an exact (height, width); None keeps the size.
        crop: Height and width of the centre crop, in pixels; None keeps everything.
        interpolation: Pillow's name in lower case, "bilinear" or "bicubic".
        mean: Per channel, subtracted after scaling to 0-1, before division by `std`. Empty means no normalisation.
        frames: T, for a clip: the image is repeated.
        multiple: Height and width are cropped down to a multiple of this.
        max_pixels: A picture with more pixels is refused before it is decoded, and so is a resize to more.
        batch_axis: The axis of a tensor file that counts inputs; "auto": axis 0, unless the tensor has a single axis or
            as many as one input; "none": the tensor is one input.
        input_axes: Number of axes of one input, without the batch axis, from the network's first layer; None if the
            layer does not show it.
        waveform: How a recording becomes an input; None for its channels as they are, (C, L).
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

    Edges are continuous, in pixels of that picture: row `i` reaches from `i` to `i + 1`, its centre is `i + 0.5`. If
    the input was padded, they lie outside the picture.

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
    """The photograph behind an input, to draw maps on.

    Attributes:
        pixels: (H, W, 3) uint8, upright.
        region: The part of it that the input covers.
        remark: Why `pixels` are the network's input instead of the photograph; "" for the photograph.
    """

    pixels: NDArray[np.uint8] = field(repr=False)
    region: Region
    remark: str = ""


def whole_photograph(pixels: NDArray[np.uint8], remark: str = "") -> Photograph:
    """Return a photograph, (H, W, 3) or (H, W), that the input covers entirely."""
    height, width = pixels.shape[:2]
    colours = pixels if pixels.ndim > PICTURE_AXES else np.repeat(pixels[:, :, None], 3, axis=2)
    return Photograph(colours, Region(0, 0, height, width, height, width), remark)


def grey_photograph(shape: tuple[int, ...], remark: str) -> Photograph:
    """Return even grey in place of an input of a shape that has no picture."""
    return whole_photograph(np.full(shape[-2:] if len(shape) > 1 else (1, 1), _NO_PICTURE, np.uint8), remark)


@dataclass(frozen=True, slots=True)
class InputRecord:
    """One input and its preprocessing.

    Attributes:
        name: File name as the user gave it or as found in a folder, or "noise", "tensor".
        sha256: Hex digest of the file's bytes; None when there is no file.
        size: Width and height of the file's picture in pixels, before preprocessing; None for tensors.
        shape: Shape handed to the network without the batch axis, e.g. (C, H, W).
        steps: The preprocessing steps in order, for people.
        region: The part of the picture that the input covers; None for tensors.
        sampling_rate: Sampling rate of a recording as the network gets it, in Hz; None for other inputs.
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
        """Whether the input is random noise, as it is if the user gives none."""
        return self.name == "noise" and self.sha256 is None


@dataclass(frozen=True, slots=True)
class StoredProvenance:
    """How a run was made, besides the facts in the result itself.

    Attributes:
        patterns: As given with `--layer`.
        preprocessing: How files became inputs; None if no file did.
        named_inputs: Inputs by name: the value, or the record of its file.
        unusable_inputs: A sentence for each input that was left out.
        settings: Further options of the command, by name: "edits", "limits", "autocast".
        threads: Number of torch's threads; None if no network ran.
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
    """How a run was made, with pictures of its inputs.

    Attributes:
        pictures: The first pictures as the network saw them, (H, W, 3) or (H, W) uint8.
        photographs: Reads the photograph of an input again, given the inputs of the run and a position.
    """

    pictures: Mapping[InputRecord, NDArray[np.uint8]] = field(default_factory=dict, repr=False)
    photographs: Callable[[Sequence[InputRecord], int], Photograph] | None = field(default=None, repr=False)
