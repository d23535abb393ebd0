"""Read one file into one network input; its content decides what kind of file it is."""

import hashlib
import stat
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFile

from hookscope.errors import ImageError
from hookscope.inputs.pictures import is_quiet_picture, read_picture, take_picture
from hookscope.inputs.preprocessing import check_suits_pictures, prepare_picture
from hookscope.inputs.tensors import prepare_tensor, read_numpy, read_stored
from hookscope.regular_files import open_regular
from hookscope.results.inputs import MAX_PIXELS, InputRecord, Preprocessing
from hookscope.text import one_line

# Our choice: three times the largest picture that MAX_PIXELS allows (16-bit RGBA, 0.7 GB).
MAX_FILE_BYTES = 2 * 1024**3

_Content = Literal["picture", "array", "stored tensor"]


def load_input(path: Path | Image.Image, preprocessing: Preprocessing) -> tuple[torch.Tensor, InputRecord]:
    """Read one file, or a picture in memory, into one network input; return it with the record of what was done.

    What the file is follows from its content, not from its suffix: JPEG, PNG, WebP, AVIF, JPEG 2000, BMP, GIF and TIFF
    pictures, HEIC where pillow-heif is installed, and tensors as NumPy arrays, safetensors with one tensor, or one
    tensor stored by `torch.save`. No code in a file runs.

    The input is float32 without the batch axis, (C, H, W), or (C, T, H, W) for a clip. A tensor is passed as it is;
    whole numbers, booleans and complex numbers keep their dtype. An axis of 1 in front counts as the batch axis and is
    dropped, unless the tensor has the rank of an input, or a single axis; `Preprocessing.batch_axis` can say otherwise.
    A tensor of several inputs comes whole, with the batch axis first: `load_batches` takes it apart.

    Raises ImageError if the file is missing, unreadable, corrupt, of another kind, or over a limit; UsageError if it is
    a picture, and `preprocessing` does not suit pictures or contradicts itself.
    """
    if isinstance(path, Image.Image):
        return _take(path, preprocessing)
    return _load(path, preprocessing, lambda steps: _guarded(steps, preprocessing.max_pixels))


def load_argument(path: Path, preprocessing: Preprocessing) -> tuple[torch.Tensor, InputRecord]:
    """Do as `load_input` for an argument: a tensor stays as it is stored, a picture gets a batch axis of 1 in front."""
    return _load(path, preprocessing, lambda steps: _guarded(steps, preprocessing.max_pixels), as_argument=True)


def is_quiet(path: Path | Image.Image) -> bool:
    """Tell whether `load_quietly` may read a file, from its header; one that is damaged is not."""
    if isinstance(path, Image.Image) or ImageFile.LOAD_TRUNCATED_IMAGES:  # it has to be off meanwhile, for all threads
        return False
    warned: list[str] = []
    try:
        with _opened(path, "", _recorded_warnings(warned)) as (file, content):
            quiet = content == "picture" and is_quiet_picture(file)
    except Exception:  # noqa: BLE001 - a damaged or hostile file can make a reader raise anything
        return False
    return quiet and not warned


def load_quietly(path: Path | Image.Image, preprocessing: Preprocessing) -> tuple[torch.Tensor, InputRecord]:
    """Do as `load_input`, for a file that `is_quiet`, in any thread: what all threads share is left alone."""
    assert isinstance(path, Path)  # noqa: S101 - `is_quiet` said so
    return _load(path, preprocessing, lambda _steps: nullcontext())


def _take(picture: Image.Image, preprocessing: Preprocessing) -> tuple[torch.Tensor, InputRecord]:
    name = str(getattr(picture, "filename", "")) or "picture"
    steps: list[str] = []
    check_suits_pictures(preprocessing)
    with _recorded_warnings(steps):
        taken = take_picture(picture, repr(name), preprocessing.channels, preprocessing.max_pixels, steps)
    upright, white, size = taken
    tensor, region = prepare_picture(upright, white, preprocessing, repr(name), steps)
    return tensor, InputRecord(name, None, size, tuple(tensor.shape), tuple(steps), region)


def _load(
    path: Path,
    preprocessing: Preprocessing,
    recorded: Callable[[list[str]], AbstractContextManager[None]],
    *,
    as_argument: bool = False,
) -> tuple[torch.Tensor, InputRecord]:
    name = repr(str(path))
    steps: list[str] = []
    size, region = None, None
    with _opened(path, name, recorded(steps)) as (file, content):
        if content == "picture":
            check_suits_pictures(preprocessing)
            picture, white, size = read_picture(file, name, preprocessing.channels, preprocessing.max_pixels, steps)
        else:
            tensor = read_stored(path) if content == "stored tensor" else read_numpy(file, name)
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if content == "picture":
        tensor, region = prepare_picture(picture, white, preprocessing, name, steps)
        tensor = tensor[None] if as_argument else tensor
    elif not as_argument:
        tensor = prepare_tensor(tensor, preprocessing, name, steps)
    return tensor, InputRecord(str(path), digest, size, tuple(tensor.shape), tuple(steps), region)


def read_upright(path: Path, sha256: str, max_pixels: int) -> NDArray[np.uint8]:
    """Return the picture in a file upright, in its own size, (H, W, 3).

    Raises:
        ImageError: If it can no longer be read, or the file has changed.
    """
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


def looks_like_tensor(path: Path | Image.Image) -> bool:
    """Tell whether a file begins as a tensor file does; one that cannot be read does not."""
    if isinstance(path, Image.Image):
        return False
    try:
        with _opened(path, "", nullcontext()) as (_, content):
            return content != "picture"
    except ImageError:
        return False


def read_tensor(path: Path) -> torch.Tensor:
    """Read the one tensor in a `.npy`, `.pt` or `.safetensors` file, of any shape and dtype. No code in it runs.

    Raises ImageError if the file is missing, unreadable, corrupt, holds no single tensor, or is a picture.
    """
    name = repr(str(path))
    with _opened(path, name, _recorded_warnings([])) as (file, content):
        if content == "picture":
            raise ImageError(f"Cannot read {name} as a tensor. Give a .npy, .pt or .safetensors file with one.")
        return read_stored(path) if content == "stored tensor" else read_numpy(file, name)


@contextmanager
def _opened(path: Path, name: str, recorded: AbstractContextManager[None]) -> Iterator[tuple[BufferedReader, _Content]]:
    """Open a regular file, and tell what it holds; what the system refuses is an ImageError."""
    _check_regular(path, name)
    try:
        with open_regular(path) as file, recorded:
            yield file, _sniff(file, name)
    except OSError as error:
        raise ImageError(f"Cannot read {name}: {one_line(error.strerror or error)}.") from error


@contextmanager
def _guarded(steps: list[str], max_pixels: int) -> Iterator[None]:
    """Do as `_recorded_warnings`, with Pillow refusing what is cut off, and reading up to `max_pixels`.

    A lower limit that is set in Pillow holds, unless more than the default is asked for.
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
    """Turn what Pillow and torch warn of while reading into steps, and a bomb warning into an exception."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield
    steps.extend(f"warning while reading: {one_line(warning.message)}" for warning in caught)


def _check_regular(path: Path, name: str) -> None:
    # Before opening: opening a pipe would wait for a writer, and reading a device may never end.
    try:
        status = path.stat()
    except FileNotFoundError as error:
        what = "it is a link to a file that does not exist" if path.is_symlink() else "no such file"
        raise ImageError(f"Cannot read {name}: {what}. Check the path.") from error
    except OSError as error:
        raise ImageError(f"Cannot read {name}: {one_line(error.strerror or error)}. Check the path.") from error
    except ValueError as error:  # a NUL in the name
        raise ImageError(f"Cannot read {name}: {one_line(error)}. Check the path.") from error
    if stat.S_ISDIR(status.st_mode):
        raise ImageError(f"Cannot read {name}: it is a folder whose files cannot be listed. Name the files in it.")
    if not stat.S_ISREG(status.st_mode):
        raise ImageError(f"Cannot read {name}: it is a pipe, socket or device. Save it to a file first.")
    if status.st_size > MAX_FILE_BYTES:
        raise ImageError(f"Cannot read {name}: {status.st_size} bytes, over the limit of {MAX_FILE_BYTES}. Split it.")


def _sniff(file: BinaryIO, name: str) -> _Content:
    """Tell from a file's first bytes who reads it, and go back to its start; what nobody knows is left to Pillow."""
    head = file.read(1024)
    file.seek(0)
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if not head:
        raise ImageError(f"Cannot read {name}: it is empty. Get the file again.")
    if text.startswith(b"version https://git-lfs"):
        raise ImageError(f"Cannot read {name}: it is a Git LFS pointer, not the picture itself. Run `git lfs pull`.")
    if text.startswith(b"<") and b"<svg" in text:
        raise ImageError(f"Cannot read {name}: it is an SVG drawing. Convert it to PNG first.")
    if text.startswith((b"<!doctype", b"<html")) or (text.startswith(b"<") and b"<html" in text):
        raise ImageError(f"Cannot read {name}: it is a web page, not a picture. Download the picture itself.")
    if head.startswith(b"\x93NUMPY"):
        return "array"
    is_legacy = head.startswith(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.")  # torch's format before 1.6
    header_bytes = int.from_bytes(head[:8], "little")  # of safetensors, whose header is JSON
    is_safetensors = head[8:9] == b"{" and header_bytes < MAX_FILE_BYTES
    if head.startswith(b"PK\x03\x04") or is_legacy or is_safetensors:
        return "stored tensor"
    return "picture"
