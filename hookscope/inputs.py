"""Turn files into network inputs: hides formats, colour modes, preprocessing, hostile files and batching.

Choices a reader should know, all recorded in `InputRecord.steps`:

- Preprocessing follows torchvision's presets bit for bit: pictures are resized with Pillow (antialiased), clips without
  antialiasing, because torchvision's video presets were trained that way. torchvision itself is not imported.
- An alpha channel is dropped, not composited, and a colour profile is not applied: that is what torchvision's and
  timm's data loaders do, so it is what networks saw in training.
- 16-bit and floating-point greyscale stays in floating point; it is never squeezed into 8 bits or saturated. Of 16-bit
  colour Pillow reads the high byte only.
- Of an animation or a multi-page file the first frame counts.
- A tensor file is passed as it is; nothing but its dtype and a batch axis of 1 is touched.
"""

import glob
import hashlib
import logging
import os
import re
import stat
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError

from hookscope.errors import ImageError, NothingMatchedError, UsageError
from hookscope.results import InputKind, InputRecord, Preprocessing

# Above this many pixels a picture is refused before it is decoded, and so is a resize to more than that. It is where
# Pillow starts to warn of decompression bombs (Image.MAX_IMAGE_PIXELS, 256 MiB of 24-bit pixels); ours has no switch.
MAX_PIXELS = 1024 * 1024 * 1024 // 4 // 3

# Our choice: three times the largest picture that MAX_PIXELS allows (16-bit RGBA, 0.7 GB).
MAX_FILE_BYTES = 2 * 1024**3

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
TENSOR_SUFFIXES = frozenset({".npy", ".pt", ".pth", ".safetensors"})

# Pillow logs some damage before it raises; without a handler Python would print that to stderr.
logging.getLogger("PIL").addHandler(logging.NullHandler())

# Pillow would hand an unlisted format, such as EPS, to whatever program reads it.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")

_RESAMPLING = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}

# EXIF orientation → what puts the picture upright (EXIF 2.3, tag 0x0112).
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# Pillow's colour modes that become 8-bit RGB or greyscale, in words.
_EIGHT_BIT_MODES = {
    "1": "1-bit",
    "L": "greyscale",
    "LA": "greyscale",
    "La": "greyscale",
    "P": "palette",
    "PA": "palette",
    "RGB": "RGB",
    "RGBA": "RGB",
    "CMYK": "CMYK",
    "YCbCr": "YCbCr",
}
_DEEP_MODES = frozenset({"I;16", "I;16B", "I;16L", "I;16N", "I", "F"})


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs of equal shape, ready for one call of the model.

    Attributes:
        args: What the model is called with, `model(*args)`: one tensor (N, C, H, W) or (N, C, T, H, W); a list of N
            tensors (C, H, W) for detection; two tensors (N, C, H, W) for optical flow.
        indices: Position of each input in `Inspection.inputs`.
        records: One per input, in the order of `indices`.
    """

    args: tuple[Any, ...]
    indices: tuple[int, ...]
    records: tuple[InputRecord, ...]


# --- Which files -----------------------------------------------------------------------------------------------------


def find_inputs(sources: Sequence[str]) -> list[Path]:
    """Expand files, folders and globs into the files to read.

    A folder stands for the image and tensor files in it and below it, in natural order ("2.jpg" before "10.jpg");
    names that begin with a dot are left out. A glob (`*`, `?`, `[…]`, `**`) is expanded only if nothing has that very
    name, and its folders likewise. A name that does not exist is kept, so that reading it fails and the others are
    finished.

    Args:
        sources: What the user named, in order.

    Returns:
        Paths in the order of `sources`.

    Raises:
        NothingMatchedError: If a folder holds no image or tensor, or a glob matches nothing.
    """
    return [path for source in sources for path in _expand(source)]


def _expand(source: str) -> list[Path]:
    path = Path(source)
    try:
        is_folder, exists = path.is_dir(), path.exists() or path.is_symlink()
    except OSError:  # e.g. a name longer than the file system allows; reading it will say so
        is_folder, exists = False, True
    if is_folder:
        found = _files_below(path)
        if not found:
            suffixes = ", ".join(sorted(IMAGE_SUFFIXES | TENSOR_SUFFIXES))
            raise NothingMatchedError(f"No image or tensor in folder {source!r}. Looked for {suffixes}.")
        return found
    if exists or not any(character in source for character in "*?["):
        return [path]
    matches = [Path(match) for match in glob.glob(source, recursive=True)]  # noqa: PTH207 takes absolute patterns too
    files = [match for match in matches if not match.is_dir()]
    if "**" not in source:  # with ** the files below a matched folder are matches themselves
        files += [file for match in matches if match.is_dir() for file in _files_below(match)]
    if not files:
        raise NothingMatchedError(f"No file matches {source!r}. Check the pattern and the folder it starts from.")
    return sorted(set(files), key=_natural_order)


def _files_below(folder: Path) -> list[Path]:
    # An unreadable subfolder is kept in the list, like a missing file, so that it cannot pass unnoticed.
    unreadable: list[Path] = []
    found = []
    for root, folders, files in os.walk(folder, onerror=lambda error: unreadable.append(Path(error.filename))):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [
            Path(root, name)
            for name in files
            if not name.startswith(".") and Path(name).suffix.lower() in IMAGE_SUFFIXES | TENSOR_SUFFIXES
        ]
    return sorted(found + unreadable, key=_natural_order)


def _natural_order(path: Path) -> tuple[list[list[str | int]], str]:
    parts: list[list[str | int]] = [
        [int(piece) if piece.isdecimal() else piece.casefold() for piece in re.split(r"(\d+)", part)]
        for part in path.parts
    ]
    return parts, str(path)


# --- One file --------------------------------------------------------------------------------------------------------


def load_input(path: Path, preprocessing: Preprocessing) -> tuple[torch.Tensor, InputRecord]:
    """Read one file into one network input.

    What the file is follows from its content, not from its suffix: JPEG, PNG, WebP, BMP, GIF and TIFF pictures, and
    tensors as NumPy arrays, safetensors with one tensor, or one tensor stored by `torch.save`. No code in a file runs.

    Args:
        path: The file.
        preprocessing: How a picture becomes an input. A tensor is passed as it is, except that an axis of 1 in front
            counts as the batch axis and is dropped, unless the tensor has the rank of (C, H, W), for clips of
            (C, T, H, W), or a single axis.

    Returns:
        The input without the batch axis, float32: (C, H, W), or (C, T, H, W) for a clip; a tensor of whole numbers,
        booleans or complex numbers keeps its dtype. And the record of what was done.

    Raises:
        ImageError: If the file is missing, unreadable, corrupt, of another kind, or over a limit.
        UsageError: If the file is a picture, and `preprocessing` does not suit pictures or contradicts itself.
    """
    name = repr(str(path))
    _check_regular(path, name)
    steps: list[str] = []
    size = None
    try:
        with path.open("rb") as file, _recorded_warnings(steps):
            read_tensor = _sniff(file.read(1024), name)
            file.seek(0)
            if read_tensor is None:
                _check_suits_pictures(preprocessing)
                picture, white, size = _read_picture(file, name, preprocessing.channels, steps)
            else:
                tensor = _read_tensor(file, name, read_tensor)
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ImageError(f"Cannot read {name}: {_one_line(error.strerror or error)}.") from error
    if read_tensor is None:
        tensor = _prepare_picture(picture, white, preprocessing, name, steps)
    else:
        tensor = _prepare_tensor(tensor, preprocessing.kind, name, steps)
    return tensor, InputRecord(str(path), digest, size, tuple(tensor.shape), tuple(steps))


@contextmanager
def _recorded_warnings(steps: list[str]) -> Iterator[None]:
    """Turn what Pillow and torch warn of while reading into steps, and a bomb warning into an exception."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield
    steps.extend(f"warning while reading: {_one_line(warning.message)}" for warning in caught)


def _one_line(reason: object) -> str:
    # Messages of decoders may quote the file: no line breaks or control characters from there.
    words = " ".join(str(reason).split()) or type(reason).__name__
    return "".join(letter if letter.isprintable() else "?" for letter in words)[:160]


def _check_regular(path: Path, name: str) -> None:
    # Before opening: opening a pipe would wait for a writer, and reading a device may never end.
    try:
        status = path.stat()
    except FileNotFoundError as error:
        what = "it is a link to a file that does not exist" if path.is_symlink() else "no such file"
        raise ImageError(f"Cannot read {name}: {what}. Check the path.") from error
    except OSError as error:
        raise ImageError(f"Cannot read {name}: {_one_line(error.strerror or error)}. Check the path.") from error
    except ValueError as error:  # a NUL in the name
        raise ImageError(f"Cannot read {name}: {_one_line(error)}. Check the path.") from error
    if stat.S_ISDIR(status.st_mode):
        raise ImageError(f"Cannot read {name}: it is a folder whose files cannot be listed. Name the files in it.")
    if not stat.S_ISREG(status.st_mode):
        raise ImageError(f"Cannot read {name}: it is a pipe, socket or device. Save it to a file first.")
    if status.st_size > MAX_FILE_BYTES:
        raise ImageError(f"Cannot read {name}: {status.st_size} bytes, over the limit of {MAX_FILE_BYTES}. Split it.")


_TensorReader = Callable[[BinaryIO, str], torch.Tensor]


def _sniff(head: bytes, name: str) -> _TensorReader | None:
    """Tell from a file's first bytes who reads it; None means Pillow.

    Raises:
        ImageError: If these are the first bytes of something that is well known not to be a picture.
    """
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
        return _read_numpy
    if head.startswith(b"PK\x03\x04"):
        return _read_torch_zip
    if head.startswith(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."):  # how torch's format before 1.6 begins
        return _read_torch
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < MAX_FILE_BYTES:  # header length, then JSON
        return _read_safetensors
    return None


# --- Pictures --------------------------------------------------------------------------------------------------------


def _read_picture(
    file: BinaryIO, name: str, channels: int, steps: list[str]
) -> tuple[Image.Image, float, tuple[int, int]]:
    """Decode the first frame and turn it upright.

    Returns:
        The picture in Pillow's mode "RGB", "L" or "F", the value that means white, and (width, height) as stored.
    """
    try:
        picture = Image.open(file, formats=_FORMATS)
        _check_pixel_count(picture.size, name)
        if ";16" in str(picture.tile) and picture.mode not in _DEEP_MODES:
            steps.append("16-bit colour read by its high byte")
        stored_size = picture.size
        orientation = _orientation(picture)
        if picture.format == "TIFF" and orientation in {5, 6, 7, 8}:  # Pillow says the size it will have once upright
            stored_size = stored_size[1], stored_size[0]
        with _quiet_libtiff() if picture.format == "TIFF" else nullcontext():
            picture.load()
        # Pillow has turned a TIFF upright by now, and finds the EXIF data of some PNG only now.
        remaining = _orientation(picture)
        upright, white = _to_channels(picture, name, channels, steps)
        if remaining in _UPRIGHT:
            upright = upright.transpose(_UPRIGHT[remaining])
        if turned := {orientation, remaining} & _UPRIGHT.keys():
            steps.append(f"turned upright from EXIF orientation {turned.pop()}")
        if frames := _other_frames(picture):  # last, because counting moves on in the file
            steps.insert(0, frames)
    except ImageError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        limit = min(MAX_PIXELS, Image.MAX_IMAGE_PIXELS or MAX_PIXELS)  # whoever uses us from Python may set a lower one
        raise ImageError(f"Cannot read {name}: over the limit of {limit} pixels. Scale it down first.") from error
    except UnidentifiedImageError as error:
        raise ImageError(
            f"Cannot read {name}: it is not a JPEG, PNG, WebP, BMP, GIF or TIFF picture, nor a .npy, .pt or "
            ".safetensors tensor; or its start is damaged."
        ) from error
    except Exception as error:  # a damaged or hostile file can make a decoder raise anything
        raise ImageError(
            f"Cannot read {name}: the picture is truncated or corrupt ({_one_line(error)}). Get the file again."
        ) from error
    return upright, white, stored_size


@contextmanager
def _quiet_libtiff() -> Iterator[None]:
    """Drop what libtiff writes to file descriptor 2 about a damaged file; Pillow's exception says it as well."""
    try:
        stderr = os.dup(2)
    except OSError:  # there is no stderr
        yield
        return
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def _check_pixel_count(size: tuple[int, int], name: str) -> None:
    width, height = size
    if width * height > MAX_PIXELS:
        raise ImageError(
            f"Cannot read {name}: {height}x{width} (height x width) is over the limit of {MAX_PIXELS} pixels. "
            "Scale it down first."
        )


def _orientation(picture: Image.Image) -> object:
    try:
        return picture.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # noqa: BLE001 broken EXIF data says nothing about the picture, viewers ignore it too
        return 1


def _other_frames(picture: Image.Image) -> str:
    try:
        frame_count = getattr(picture, "n_frames", 1)
    except Exception:  # noqa: BLE001 damage behind the first frame does not make that one unreadable
        return "first of several frames; those behind it are damaged"
    return f"first of {frame_count} frames" if frame_count > 1 else ""


def _to_channels(picture: Image.Image, name: str, channels: int, steps: list[str]) -> tuple[Image.Image, float]:
    if picture.mode in _DEEP_MODES:
        return _deep_grey(picture, name, steps)
    if picture.mode not in _EIGHT_BIT_MODES:
        raise ImageError(f"Cannot read {name}: colour mode {picture.mode} is not supported. Save it as RGB.")
    if picture.has_transparency_data:
        steps.append("alpha channel dropped")
        picture.info.pop("transparency", None)
    words = _EIGHT_BIT_MODES[picture.mode]
    if picture.mode == "La":  # multiplied by alpha: divide before dropping it
        picture = picture.convert("LA")
    if channels == 1:
        if words not in {"1-bit", "greyscale"}:
            steps.append(f"{words} converted to greyscale (luma of ITU-R BT.601)")
            picture = picture.convert("RGB")
        return picture.convert("L"), 255
    if words != "RGB":
        steps.append(f"{words} converted to RGB")
    return picture.convert("RGB"), 255


def _deep_grey(picture: Image.Image, name: str, steps: list[str]) -> tuple[Image.Image, float]:
    tags = getattr(picture, "tag_v2", {})
    values: NDArray[np.float32] = np.array(picture).astype(np.float32)
    if picture.mode == "F":
        white = 1.0
        if not (values.min() >= 0 and values.max() <= 1):  # false for NaN too
            raise ImageError(
                f"Cannot read {name}: floating-point values outside 0-1, so white is unknown. Give a tensor file."
            )
        steps.append("floating-point greyscale taken as 0-1")
    else:
        bits = min((16, *tags.get(ExifTags.Base.BitsPerSample, ())))  # 12 in some TIFF; "I" may hold 32
        white = float(2**bits - 1)
        if picture.mode == "I" and not (values.min() >= 0 and values.max() <= white):
            raise ImageError(
                f"Cannot read {name}: whole numbers outside 0-65535, so white is unknown. Give a tensor file."
            )
        steps.append(f"{bits}-bit greyscale scaled to 0-1")
    if tags.get(ExifTags.Base.PhotometricInterpretation) == 0:  # Pillow inverts only up to 8 bits
        steps.append("inverted, because its white is stored as 0")
        values = white - values
    return Image.fromarray(values), white


def _prepare_picture(
    picture: Image.Image, white: float, preprocessing: Preprocessing, name: str, steps: list[str]
) -> torch.Tensor:
    """Resize, crop, scale to 0-1 and normalise."""
    pixels = _resize(picture, white, preprocessing, name, steps)  # (C, H, W), 0 to white
    if preprocessing.channels == 3 and pixels.shape[0] == 1:
        pixels = pixels.expand(3, -1, -1)
        steps.append("greyscale repeated in 3 channels")
    if preprocessing.crop is not None:
        pixels = _centre_crop(pixels, preprocessing.crop, steps)
    pixels = _crop_to_multiple(pixels, preprocessing.multiple, name, steps)
    scaled = pixels.to(torch.float32, copy=True, memory_format=torch.contiguous_format).div_(white)
    _normalise_(scaled, preprocessing, steps)
    if preprocessing.kind == "flow":
        steps.append("the same picture is both frames")
    if preprocessing.kind == "video":
        steps.append(f"repeated in {preprocessing.frames} frames")
        scaled = scaled.unsqueeze(1).repeat(1, preprocessing.frames, 1, 1)  # (C, T, H, W)
    return scaled


def _resize(
    picture: Image.Image, white: float, preprocessing: Preprocessing, name: str, steps: list[str]
) -> torch.Tensor:
    width, height = picture.size
    new_height, new_width = _target_size(height, width, preprocessing.resize)
    if (new_height, new_width) == (height, width):
        return _to_tensor(picture)
    if new_height * new_width > MAX_PIXELS:
        raise ImageError(
            f"Cannot resize {name} from {height}x{width} to {new_height}x{new_width} (height x width): over the limit "
            f"of {MAX_PIXELS} pixels. Crop it first, or give --resize HEIGHTxWIDTH."
        )
    antialiased = preprocessing.kind != "video"
    steps.append(
        f"resized from {height}x{width} to {new_height}x{new_width} (height x width), {preprocessing.interpolation}, "
        f"{'antialiased' if antialiased else 'not antialiased'}"
    )
    if antialiased:
        pixels = _to_tensor(picture.resize((new_width, new_height), _RESAMPLING[preprocessing.interpolation]))
    else:
        before = _to_tensor(picture)
        target = (new_height, new_width)
        pixels = torch.nn.functional.interpolate(
            before[None].to(torch.float32), target, mode=preprocessing.interpolation, align_corners=False
        )[0]
        if before.dtype == torch.uint8:
            pixels = pixels.clamp(0, white).round().to(torch.uint8)
    # Bicubic interpolation overshoots; Pillow clips 8-bit pictures itself.
    return pixels.clamp(0, white) if pixels.is_floating_point() else pixels


def _target_size(height: int, width: int, resize: int | tuple[int, int] | None) -> tuple[int, int]:
    if resize is None:
        return height, width
    if isinstance(resize, tuple):
        return resize
    # The longer side is rounded down, as torchvision does it.
    return (resize, int(resize * width / height)) if height <= width else (int(resize * height / width), resize)


def _to_tensor(picture: Image.Image) -> torch.Tensor:
    pixels = torch.from_numpy(np.array(picture))  # (H, W) or (H, W, C)
    return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)


def _centre_crop(pixels: torch.Tensor, crop: tuple[int, int], steps: list[str]) -> torch.Tensor:
    height, width = pixels.shape[1:]
    crop_height, crop_width = crop
    missing_height, missing_width = max(crop_height - height, 0), max(crop_width - width, 0)
    if (height, width) == crop:
        return pixels
    padded = ""
    if missing_height or missing_width:
        left, top = missing_width // 2, missing_height // 2
        pixels = torch.nn.functional.pad(pixels, (left, missing_width - left, top, missing_height - top))
        padded = f", padded with black from {height}x{width}"
    steps.append(f"centre crop {crop_height}x{crop_width} (height x width){padded}")
    # Halves are rounded to even, as torchvision does it.
    top, left = round((pixels.shape[1] - crop_height) / 2), round((pixels.shape[2] - crop_width) / 2)
    return pixels[:, top : top + crop_height, left : left + crop_width]


def _crop_to_multiple(pixels: torch.Tensor, multiple: int, name: str, steps: list[str]) -> torch.Tensor:
    height, width = pixels.shape[1:]
    new_height, new_width = height - height % multiple, width - width % multiple
    if not new_height or not new_width:
        raise ImageError(
            f"Cannot use {name}: {height}x{width} pixels (height x width), and the network needs at least "
            f"{multiple}x{multiple}. Give a larger picture, or --resize."
        )
    if (new_height, new_width) == (height, width):
        return pixels
    steps.append(f"centre crop {new_height}x{new_width} (height x width), to multiples of {multiple}")
    top, left = (height - new_height) // 2, (width - new_width) // 2
    return pixels[:, top : top + new_height, left : left + new_width]


def _normalise_(scaled: torch.Tensor, preprocessing: Preprocessing, steps: list[str]) -> None:
    # In place, as the name says: a picture at the limit takes 1 GB here.
    mean, std = preprocessing.mean, preprocessing.std
    if mean:
        scaled.sub_(torch.tensor(mean, dtype=torch.float32)[:, None, None])
    if std:
        scaled.div_(torch.tensor(std, dtype=torch.float32)[:, None, None])
    if mean or std:
        means, stds = (", ".join(f"{value:g}" for value in values) for values in (mean or (0,), std or (1,)))
        steps.append(f"normalised by mean {means}, std {stds}")


# --- Tensor files ----------------------------------------------------------------------------------------------------


def _read_tensor(file: BinaryIO, name: str, read: _TensorReader) -> torch.Tensor:
    try:
        return read(file, name)
    except ImageError:
        raise
    except Exception as error:  # a damaged or hostile file can make a reader raise anything
        # torch's messages tell how to switch its safety off, so only the kind of error is passed on.
        reason = type(error).__name__ if read in {_read_torch, _read_torch_zip} else _one_line(error)
        raise ImageError(
            f"Cannot read {name}: not one plain tensor, or truncated or corrupt ({reason}). "
            "Save the tensor alone with torch.save, numpy.save or safetensors."
        ) from error


def _read_numpy(file: BinaryIO, name: str) -> torch.Tensor:
    array = np.load(file, allow_pickle=False)
    if array.dtype.kind not in "biufc":
        raise ImageError(f"Cannot read {name}: its dtype {array.dtype.name!r} is not numeric. Save it as float32.")
    is_wider_than_torch = array.dtype.kind == "f" and array.dtype.itemsize > 8
    dtype = np.dtype(np.float64) if is_wider_than_torch else array.dtype.newbyteorder("=")
    return torch.from_numpy(array.astype(dtype, copy=False))


def _read_safetensors(file: BinaryIO, name: str) -> torch.Tensor:
    from safetensors.torch import load  # noqa: PLC0415 only where such a file is given

    tensors = load(file.read())
    if len(tensors) != 1:
        raise ImageError(f"Cannot read {name}: it holds {len(tensors)} tensors; an input is a file with exactly one.")
    return next(iter(tensors.values()))


def _read_torch_zip(file: BinaryIO, name: str) -> torch.Tensor:
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        # torch stores members uncompressed and once; anything else is a bomb, or shows two readers two different files.
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise ImageError(f"Cannot read {name}: a zip archive with compressed members is no torch file.")
        if len({member.filename for member in members}) != len(members):
            raise ImageError(f"Cannot read {name}: a zip archive with duplicate members is no torch file.")
        for member in members:
            if member.CRC:  # 0: torch was told not to compute it. torch.load itself never compares it.
                with archive.open(member) as content:
                    while content.read(1 << 20):
                        pass
    file.seek(0)
    return _read_torch(file, name)


def _read_torch(file: BinaryIO, name: str) -> torch.Tensor:
    value = torch.load(file, map_location="cpu", weights_only=True)
    if type(value) not in {torch.Tensor, torch.nn.Parameter}:
        raise ImageError(
            f"Cannot read {name}: it holds a {type(value).__name__}, not one plain tensor. Save the tensor alone."
        )
    return torch.Tensor.detach(value)  # without attributes that the file may have put over its methods


def _prepare_tensor(tensor: torch.Tensor, kind: InputKind, name: str, steps: list[str]) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_nested:
        raise ImageError(f"Cannot use {name}: a sparse, quantised, nested or data-less tensor. Save a dense one.")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise ImageError(f"Cannot use {name}: an expanded tensor, larger than its file. Save it after .contiguous().")
    if tensor.ndim == 0 or tensor.numel() == 0:
        raise ImageError(f"Cannot use {name}: shape {tuple(tensor.shape)} is not an input. Give one like (C, H, W).")
    steps.append("tensor passed without preprocessing")
    rank = 4 if kind == "video" else 3
    if tensor.shape[0] == 1 and tensor.ndim not in {1, rank}:
        tensor = tensor[0]
        steps.append("batch axis of 1 dropped")
    if tensor.is_floating_point() and tensor.dtype != torch.float32:
        steps.append(f"{str(tensor.dtype).removeprefix('torch.')} converted to float32")
        tensor = tensor.to(torch.float32)
    return tensor.contiguous()


# --- Batches ---------------------------------------------------------------------------------------------------------


def load_batches(
    paths: Iterable[Path | str],
    preprocessing: Preprocessing,
    batch_size: int = 8,
    on_error: Callable[[ImageError], None] | None = None,
) -> Iterator[Batch]:
    """Read files into batches, one batch in memory at a time.

    Only inputs of equal shape and dtype share a batch, since padding would change what the network sees; where the
    shape changes, a new batch begins. The order is kept.

    Args:
        paths: Files to read, as `find_inputs` returns them.
        preprocessing: How a picture becomes an input.
        batch_size: Most inputs in a batch.
        on_error: Called for a file that cannot be used, which is then skipped; without it the error is raised.

    Yields:
        Batches whose `indices` count the usable files from 0.

    Raises:
        ImageError: If a file cannot be used and there is no `on_error`.
        UsageError: If `batch_size` is below 1, or as in `load_input`.
    """
    if batch_size < 1:
        raise UsageError(f"A batch of {batch_size} inputs is not possible. Give a batch size of 1 or more.")
    count = 0
    usable = _load_usable(paths, preprocessing, on_error)
    for _, alike in groupby(usable, key=lambda item: (item[0].shape, item[0].dtype)):
        while chunk := list(islice(alike, batch_size)):
            records = tuple(record for _, record in chunk)
            args = _arguments(torch.stack([tensor for tensor, _ in chunk]), preprocessing.kind)
            chunk.clear()  # stacking copied them: do not hold both while the model runs
            yield Batch(args, tuple(range(count, count + len(records))), records)
            del args
            count += len(records)


def _load_usable(
    paths: Iterable[Path | str], preprocessing: Preprocessing, on_error: Callable[[ImageError], None] | None
) -> Iterator[tuple[torch.Tensor, InputRecord]]:
    for path in paths:
        try:
            loaded = load_input(Path(path), preprocessing)
        except ImageError as error:
            if on_error is None:
                raise
            on_error(error)
        else:
            yield loaded


def _arguments(stacked: torch.Tensor, kind: InputKind) -> tuple[Any, ...]:
    if kind == "detection":
        return (list(stacked),)
    # The second frame is a copy: a network that changes its input in place must not change both.
    return (stacked, stacked.clone()) if kind == "flow" else (stacked,)


def noise_batch(shape: tuple[int, ...], seed: int, kind: InputKind = "image") -> Batch:
    """Draw inputs from the standard normal distribution, without touching torch's global random state.

    Args:
        shape: Shape with the batch axis, e.g. (N, C, H, W).
        seed: Equal seeds give equal values.
        kind: What the network takes, which decides how the values are handed over.

    Raises:
        UsageError: If `shape` has no axis, or an axis below 1.
    """
    if not shape or min(shape) < 1:
        raise UsageError(f"Noise of shape {shape} is not possible. Give a batch axis first and no axis below 1.")
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    step = f"standard normal noise, seed {seed}"
    record = InputRecord("noise", None, None, tuple(shape[1:]), (step,))
    return Batch(_arguments(values, kind), tuple(range(shape[0])), (record,) * shape[0])


def to_device(batch: Batch, device: torch.device | str, dtype: torch.dtype) -> Batch:
    """Move a batch to `device`, its floating-point tensors in `dtype`; whole numbers and the like keep theirs."""

    def move(value: Any) -> Any:
        if isinstance(value, list):
            return [move(item) for item in value]
        return value.to(device=device, dtype=dtype if value.is_floating_point() else value.dtype)

    return replace(batch, args=tuple(move(value) for value in batch.args))


# --- Options ---------------------------------------------------------------------------------------------------------


def preprocessing_from_options(
    base: Preprocessing,
    *,
    resize: str | None = None,
    crop: str | None = None,
    mean: str | None = None,
    std: str | None = None,
) -> Preprocessing:
    """Put the user's options over preprocessing that comes from elsewhere.

    Args:
        base: What holds where no option is given.
        resize: "256" (shorter side), "256x320" (height x width), or "none".
        crop: "224" (square), "224x288" (height x width), or "none".
        mean: One value for all channels, one per channel ("0.485,0.456,0.406"), or "none".
        std: Likewise.

    Raises:
        UsageError: If an option is not of that form, or cannot be right.
    """
    changes: dict[str, Any] = {}
    if resize is not None:
        sizes = _parse_sizes("--resize", resize)
        changes["resize"] = sizes[0] if sizes is not None and len(sizes) == 1 else sizes
    if crop is not None:
        sizes = _parse_sizes("--crop", crop)
        changes["crop"] = sizes * 2 if sizes is not None and len(sizes) == 1 else sizes
    if mean is not None:
        changes["mean"] = _parse_values("--mean", mean, base.channels)
    if std is not None:
        changes["std"] = _parse_values("--std", std, base.channels)
        if (torch.tensor(changes["std"], dtype=torch.float32) <= 0).any():
            raise UsageError(f"--std {std!r} has a value that is not above 0. Give the standard deviation per channel.")
    if not changes:
        return base
    return replace(base, **changes, source=f"options over {base.source}")


def _parse_sizes(option: str, text: str) -> tuple[int, ...] | None:
    if text.strip().lower() == "none":
        return None
    if not re.fullmatch(r"\s*[0-9]{1,9}(x[0-9]{1,9})?\s*", text):
        raise UsageError(f"{option} {text!r} is not a size. Give pixels like 224, HEIGHTxWIDTH like 224x288, or none.")
    sizes = tuple(int(number) for number in text.split("x"))
    if min(sizes) < 1:
        raise UsageError(f"{option} {text!r} leaves no pixel. Give a size of 1 or more.")
    if sizes[0] * sizes[-1] > MAX_PIXELS:
        raise UsageError(f"{option} {text!r} is over the limit of {MAX_PIXELS} pixels. Give a smaller size.")
    return sizes


def _parse_values(option: str, text: str, channels: int) -> tuple[float, ...]:
    if text.strip().lower() == "none":
        return ()
    try:
        values = tuple(float(number) for number in text.split(","))
    except ValueError as error:
        raise UsageError(f"{option} {text!r} is not a list of numbers. Give values like 0.5 or 0.5,0.5,0.5.") from error
    if not torch.tensor(values, dtype=torch.float32).isfinite().all():  # normalisation runs in float32
        raise UsageError(f"{option} {text!r} has a value that is not a finite number. Give values like 0.5.")
    if len(values) == 1:
        return values * channels
    if len(values) != channels:
        raise UsageError(f"{option} {text!r} has {len(values)} values for {channels} channels. Give 1 or {channels}.")
    return values


def _check_suits_pictures(preprocessing: Preprocessing) -> None:
    channels = preprocessing.channels
    if channels not in {1, 3}:
        raise UsageError(f"The network takes {channels} channels; a picture has 1 or 3. Give tensor files instead.")
    for name, values in (("mean", preprocessing.mean), ("std", preprocessing.std)):
        if len(values) not in {0, channels}:
            raise UsageError(
                f"Preprocessing from {preprocessing.source} has {len(values)} {name} values for {channels} channels. "
                f"Give --{name}."
            )
