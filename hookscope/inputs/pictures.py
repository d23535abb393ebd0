"""Decode a picture: hides formats, colour modes, orientation, and what hostile files do to decoders."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError

from hookscope.errors import ImageError
from hookscope.text import one_line

# Above this many pixels a picture is refused before it is decoded, and so is a resize to more than that. It is where
# Pillow starts to warn of decompression bombs (Image.MAX_IMAGE_PIXELS, 256 MiB of 24-bit pixels); ours has no switch.
MAX_PIXELS = 1024 * 1024 * 1024 // 4 // 3

# Pillow logs some damage before it raises; without a handler Python would print that to stderr.
logging.getLogger("PIL").addHandler(logging.NullHandler())

# Pillow would hand an unlisted format, such as EPS, to whatever program reads it.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")

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

# What these have to warn of, Pillow says when it opens them and reads their EXIF data; for PNG see `_is_quiet_png`.
_QUIET_FORMATS = frozenset({"JPEG", "MPO", "PNG", "WEBP"})
_QUIET_MODES = frozenset({"L", "LA", "RGB", "RGBA"})


def is_quiet_picture(file: BinaryIO) -> bool:
    """Tell whether all that `read_picture` may warn of is said when the header is read, as it is here.

    Args:
        file: Open for reading, at its start.

    Raises:
        Exception: Of any kind, if it is damaged or not a picture.
    """
    picture = Image.open(file, formats=_FORMATS)
    if picture.format not in _QUIET_FORMATS or picture.mode not in _QUIET_MODES:
        return False
    if picture.format == "PNG":
        return _is_quiet_png(file)
    _orientation(picture)
    return True


def _is_quiet_png(file: BinaryIO) -> bool:
    """Tell whether a PNG has neither EXIF data nor animation, which may stand behind the pixels."""
    position = 8
    file.seek(position)
    # A chunk: length (4 bytes), kind (4), content, checksum (4). Content of text starts with a keyword, for example
    # "Raw profile type exif".
    while head := file.read(32):
        if b"acTL" in head or b"exif" in head.lower():
            return False
        position += int.from_bytes(head[:4], "big") + 12
        file.seek(position)
    return True


def read_picture(
    file: BinaryIO, name: str, channels: int, steps: list[str]
) -> tuple[Image.Image, float, tuple[int, int]]:
    """Decode the first frame and turn it upright.

    Args:
        file: Open for reading, at its start.
        name: What to call it in messages.
        channels: 1 for greyscale, 3 for RGB; of deep greyscale the one channel is kept.
        steps: Gets a sentence for each thing done.

    Returns:
        The picture in Pillow's mode "RGB", "L" or "F", the value that means white, and (width, height) as stored.

    Raises:
        ImageError: If it is truncated, corrupt, of another format or colour mode, or has too many pixels.
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
            f"Cannot read {name}: the picture is truncated or corrupt ({one_line(error)}). Get the file again."
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
