"""Read one file into one network input; its content decides what kind of file it is."""

import hashlib
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFile

from hookscope.errors import ImageError
from hookscope.hooks.pytree import tensors_in
from hookscope.inputs.clips import Clip, Source
from hookscope.inputs.find_files import MAX_FILE_BYTES, check_input_file
from hookscope.inputs.pictures import is_quiet_picture, picture_name, read_picture, take_picture
from hookscope.inputs.preprocessing import check_suits_pictures, prepare_picture
from hookscope.inputs.recordings import is_recording, read_recording
from hookscope.inputs.tensors import prepare_tensor, read_argument, read_numpy, read_stored
from hookscope.parameters import arg
from hookscope.regular_files import open_regular
from hookscope.results.inputs import CLIP_STEP, MAX_PIXELS, InputRecord, Preprocessing
from hookscope.text import one_line

_MOST_CLIP_VALUES = 2**28  # 1 GiB of float32

_Content = Literal["picture", "recording", "array", "stored tensor"]


def load_input(path: Source, preprocessing: Preprocessing) -> tuple[torch.Tensor, InputRecord]:
    """Read one file, or a picture in memory, into one network input; return it with the record of what was done.

    Its content, not its suffix, decides: JPEG, PNG, WebP, AVIF, JPEG 2000, BMP, GIF and TIFF pictures, HEIC with
    pillow-heif, WAV and FLAC recordings with soundfile; a NumPy array, or one tensor stored by safetensors or
    `torch.save`. No code in a file runs.

    The input is float32 without the batch axis, (C, H, W), or (C, T, H, W) for a clip. A tensor is passed as it is;
    whole numbers, booleans and complex numbers keep their dtype. An axis of 1 in front counts as the batch axis and is
    dropped, unless the tensor has the rank of an input, or a single axis; `Preprocessing.batch_axis` can say otherwise.
    A tensor of several inputs comes whole, with the batch axis first: `load_batches` splits it.

    Raises ImageError if the file is missing, unreadable, corrupt, of another kind, or over a limit; UsageError if it is
    a picture, and `preprocessing` does not suit pictures or contradicts itself.
    """
    if isinstance(path, Image.Image):
        return _take(path, preprocessing)
    if isinstance(path, Clip):
        return _load_clip(path, preprocessing)
    return _load(path, preprocessing)


def load_argument(path: Path, preprocessing: Preprocessing) -> tuple[Any, InputRecord]:
    """Do as `load_input` for an argument, which may also be a list, tuple or dict of tensors.

    What is stored stays as it is; a picture gets a batch axis of 1 in front.
    """
    return _load(path, preprocessing, as_argument=True)


def is_quiet(path: Source) -> bool:
    """Tell from a file's header whether `load_quietly` may read it; False for a damaged file."""
    # Files are read with LOAD_TRUNCATED_IMAGES off. It is one switch for all threads: where it is on, only guarded
    # reading, one file at a time, may change it.
    if not isinstance(path, Path) or ImageFile.LOAD_TRUNCATED_IMAGES:
        return False
    warned: list[str] = []
    quiet = False
    with suppress(Exception), _opened(path, "", _recorded_warnings(warned)) as (file, content):
        quiet = content == "picture" and is_quiet_picture(file)
    return quiet and not warned


def load_quietly(path: Source, preprocessing: Preprocessing) -> tuple[torch.Tensor, InputRecord]:
    """Load a file that `is_quiet` as `load_input` does, in any thread: it changes no state that threads share."""
    assert isinstance(path, Path)  # noqa: S101 - `is_quiet` accepts nothing else
    return _load(path, preprocessing, is_guarded=False)


def _take(picture: Image.Image, preprocessing: Preprocessing) -> tuple[torch.Tensor, InputRecord]:
    name = picture_name(picture)
    steps: list[str] = []
    check_suits_pictures(preprocessing)
    with _recorded_warnings(steps):
        upright, white, size = take_picture(
            picture, repr(name), preprocessing.channels, preprocessing.max_pixels, steps
        )
    tensor, region = prepare_picture(upright, white, preprocessing, repr(name), steps)
    return tensor, InputRecord(name, None, size, tuple(tensor.shape), tuple(steps), region)


def _load_clip(clip: Clip, preprocessing: Preprocessing) -> tuple[torch.Tensor, InputRecord]:
    name, several = repr(str(clip.folder)), len(clip.frames)
    frames: list[torch.Tensor] = []
    records: list[InputRecord] = []
    for path in clip.frames:
        tensor, record = load_input(path, replace(preprocessing, frames=1))
        if record.size is None:
            raise ImageError(f"Cannot use {name} as a clip: {path.name!r} is no picture.")
        if frames and tensor.shape != frames[0].shape:
            sizes = " and ".join("x".join(map(str, frame.shape[-2:])) for frame in (frames[0], tensor))
            raise ImageError(
                f"Cannot use {name} as a clip: its frames become {sizes} (height x width). Give {arg('resize')} "
                "HEIGHTxWIDTH."
            )
        if several * tensor.numel() > _MOST_CLIP_VALUES:
            raise ImageError(
                f"Cannot use {name} as a clip: {several} frames are over the limit of {_MOST_CLIP_VALUES} values. "
                f"Give fewer, or a smaller {arg('resize')}."
            )
        frames.append(tensor)
        records.append(record)
    first = records[0]
    steps = (f"{CLIP_STEP}{several} frames, {clip.frames[0].name} to {clip.frames[-1].name}", *first.steps)
    digest = Clip.digest(str(record.sha256) for record in records)
    values = torch.cat(frames, 1)  # (C, T, H, W)
    return values, InputRecord(str(clip.folder), digest, first.size, tuple(values.shape), steps)


def _load(
    path: Path, preprocessing: Preprocessing, *, as_argument: bool = False, is_guarded: bool = True
) -> tuple[Any, InputRecord]:
    name = repr(str(path))
    steps: list[str] = []
    size, region, rate = None, None, None
    recorded = _guarded(steps, preprocessing.max_pixels) if is_guarded else nullcontext()
    with _opened(path, name, recorded) as (file, content):
        if content == "picture":
            check_suits_pictures(preprocessing)
            picture, white, size = read_picture(file, name, preprocessing.channels, preprocessing.max_pixels, steps)
        elif content == "recording":
            tensor, rate = read_recording(file, name, preprocessing.waveform, steps)
        else:
            read = read_argument if as_argument else read_stored
            tensor = read(path) if content == "stored tensor" else read_numpy(file, name)
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if content == "picture":
        tensor, region = prepare_picture(picture, white, preprocessing, name, steps)
    if content in ("picture", "recording"):
        tensor = tensor[None] if as_argument else tensor
    elif not as_argument:
        tensor = prepare_tensor(tensor, preprocessing, name, steps)
    shape = tuple(tensors_in(tensor)[0][1].shape)  # for a container, the shape of its first tensor
    return tensor, InputRecord(str(path), digest, size, shape, tuple(steps), region, rate)


def read_upright(path: Path, sha256: str, max_pixels: int) -> NDArray[np.uint8]:
    """Return the picture in a file upright, in its own size, (H, W, 3); ImageError if the file has changed."""
    name = repr(str(path))
    steps: list[str] = []
    with _opened(path, name, _guarded(steps, max_pixels)) as (file, content):
        if hashlib.file_digest(file, "sha256").hexdigest() != sha256 or content != "picture":
            raise ImageError(f"{name} has changed since the run.")
        file.seek(0)
        picture, white, _ = read_picture(file, name, 3, max_pixels, steps)
    return _in_colour(picture, white)


def take_upright(picture: Image.Image, max_pixels: int) -> NDArray[np.uint8]:
    """Do as `read_upright` with a picture in memory."""
    steps: list[str] = []
    with _recorded_warnings(steps):
        upright, white, _ = take_picture(picture, "the picture", 3, max_pixels, steps)
    return _in_colour(upright, white)


def _in_colour(picture: Image.Image, white: float) -> NDArray[np.uint8]:
    if picture.mode == "F":  # deep greyscale
        shades = (np.asarray(picture) * (255 / white) + 0.5).clip(0, 255).astype(np.uint8)
        return np.repeat(shades[:, :, None], 3, axis=2)
    return np.asarray(picture.convert("RGB"))


def looks_like_tensor(path: Source) -> bool:
    """Tell whether a file begins as a tensor file does."""
    if not isinstance(path, Path):
        return False
    with suppress(ImageError), _opened(path, "", nullcontext()) as (_, content):
        return content in ("array", "stored tensor")
    return False


def read_tensor(path: Path) -> torch.Tensor:
    """Read the one tensor in a `.npy`, `.pt` or `.safetensors` file, of any shape and dtype. No code in it runs.

    Raises ImageError if the file is missing, unreadable, corrupt, holds no single tensor, or is a picture.
    """
    name = repr(str(path))
    with _opened(path, name, _recorded_warnings([])) as (file, content):
        if content in ("picture", "recording"):
            raise ImageError(f"Cannot read {name} as a tensor. Give a .npy, .pt or .safetensors file with one.")
        return read_stored(path) if content == "stored tensor" else read_numpy(file, name)


@contextmanager
def _opened(path: Path, name: str, recorded: AbstractContextManager[None]) -> Iterator[tuple[BufferedReader, _Content]]:
    check_input_file(path, name)
    try:
        with open_regular(path) as file, recorded:
            yield file, _sniff(file, name)
    except OSError as error:
        raise ImageError(f"Cannot read {name}: {one_line(error.strerror or error)}.") from error


@contextmanager
def _guarded(steps: list[str], max_pixels: int) -> Iterator[None]:
    """Record warnings, and let Pillow refuse truncated pictures and read up to `max_pixels`.

    A lower limit that is set in Pillow applies, unless `max_pixels` is above the default.
    """
    lenient, limit = ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS
    try:
        ImageFile.LOAD_TRUNCATED_IMAGES = False
        if max_pixels > MAX_PIXELS:
            Image.MAX_IMAGE_PIXELS = max_pixels
        with _recorded_warnings(steps):
            yield
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS = lenient, limit


@contextmanager
def _recorded_warnings(steps: list[str]) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield
    steps.extend(f"warning while reading: {one_line(warning.message)}" for warning in caught)


def _sniff(file: BinaryIO, name: str) -> _Content:
    """Tell the content of a file from its first bytes, and rewind it; unknown content is left to Pillow."""
    head = file.read(1024)
    file.seek(0)
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    fault = ""
    if not head:
        fault = "it is empty. Get the file again."
    elif text.startswith(b"version https://git-lfs"):
        fault = "it is a Git LFS pointer, not the picture itself. Run `git lfs pull`."
    elif text.startswith(b"<") and b"<svg" in text:
        fault = "it is an SVG drawing. Convert it to PNG first."
    elif text.startswith((b"<!doctype", b"<html")) or (text.startswith(b"<") and b"<html" in text):
        fault = "it is a web page, not a picture. Download the picture itself."
    if fault:
        raise ImageError(f"Cannot read {name}: {fault}")
    if head.startswith(b"\x93NUMPY"):
        return "array"
    if is_recording(head):
        return "recording"
    is_legacy = head.startswith(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.")  # torch's format before 1.6
    header_bytes = int.from_bytes(head[:8], "little")  # safetensors begins with its length, then JSON
    is_safetensors = head[8:9] == b"{" and header_bytes < MAX_FILE_BYTES
    if head.startswith(b"PK\x03\x04") or is_legacy or is_safetensors:
        return "stored tensor"
    return "picture"
