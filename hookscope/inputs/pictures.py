"""Decode a picture: formats, colour modes, orientation, and protection against hostile files."""

import importlib
import logging
import mmap
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError

from hookscope.errors import ImageError
from hookscope.parameters import arg
from hookscope.regular_files import read_bounded
from hookscope.text import one_line

# Pillow logs some damage before it raises; without a handler Python would print that to stderr.
logging.getLogger("PIL").addHandler(logging.NullHandler())

# Pillow would start another program for an unlisted format, such as EPS.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "AVIF", "JPEG2000")

# A plugin's name for the pictures of phones, HEIC among them; Pillow itself reads none of them. Their files and those
# of AVIF begin with a brand (ISO/IEC 23008-12, 10.2).
_HEIF = "HEIF"
_HEIF_PLUGIN = "pillow_heif.HeifImagePlugin"  # registers itself when it is imported
_AVIF_BRANDS = frozenset({b"avif", b"avis"})
_HEIF_BRANDS = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1"})

_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG2000 = (b"\0\0\0\x0cjP  \r\n\x87\n", b"\xff\x4f\xff\x51")  # in boxes, and a bare codestream
_BEGINNINGS = (b"\xff\xd8\xff", _PNG, b"GIF87a", b"GIF89a", b"II*\0", b"MM\0*", *_JPEG2000)

_BLOCK_BYTES = 2**20
# Frames of an animation behind the first: damage there does not reach the picture that counts.
_LATER_FRAMES = frozenset({b"fcTL", b"fdAT"})

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
    **dict.fromkeys(("L", "LA", "La"), "greyscale"),
    **dict.fromkeys(("P", "PA"), "palette"),
    **dict.fromkeys(("RGB", "RGBA"), "RGB"),
    "CMYK": "CMYK",
    "YCbCr": "YCbCr",
}
_DEEP_MODES = frozenset({"I;16", "I;16B", "I;16L", "I;16N", "I", "F"})

# Pillow warns about these when it opens them and reads their EXIF data; for PNG see `_is_quiet_png`.
_QUIET_FORMATS = frozenset({"JPEG", "MPO", "PNG", "WEBP", "AVIF", "JPEG2000"})
_QUIET_MODES = frozenset({"L", "LA", "RGB", "RGBA"})


def looks_like_picture(path: Path) -> bool:
    """Tell whether a file begins as a picture does; False for an unreadable file."""
    try:
        head = read_bounded(path, 16)
    except (OSError, ValueError):
        return False
    is_webp = head.startswith(b"RIFF") and head[8:12] == b"WEBP"
    is_heif = _brand(head) in _HEIF_BRANDS and _HEIF in _formats(head)
    return head.startswith(_BEGINNINGS) or is_webp or _brand(head) in _AVIF_BRANDS or is_heif


def is_quiet_picture(file: BinaryIO) -> bool:
    """Tell whether `read_picture` can give no other warnings than reading the header, which is done here.

    Raises an Exception of any kind if the file is damaged or not a picture.
    """
    picture = Image.open(file, formats=_FORMATS)
    if picture.format not in _QUIET_FORMATS or picture.mode not in _QUIET_MODES:
        return False
    if picture.format == "PNG":
        return _is_quiet_png(file)
    _orientation(picture)
    return True


def _is_quiet_png(file: BinaryIO) -> bool:
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
    file: BinaryIO, name: str, channels: int, max_pixels: int, steps: list[str]
) -> tuple[Image.Image, float, tuple[int, int]]:
    """Decode the first frame and turn it upright; `steps` gets a sentence for each thing done.

    `channels` is 1 for greyscale, 3 for RGB; deep greyscale keeps its one channel. A picture of more than
    `max_pixels` is refused before it is decoded.

    Returns the picture in Pillow's mode "RGB", "L" or "F", the value that means white, and (width, height) as stored.
    Raises ImageError if it is truncated, corrupt, of another format or colour mode, or has too many pixels.
    """
    try:
        picture = _open(file, name)
        _check_pixel_count(picture.size, max_pixels, name)
        depth = _depth(picture, file, name, steps)
        stored_size = picture.size
        orientation = _orientation(picture)
        if picture.format == "TIFF" and orientation in {5, 6, 7, 8}:  # Pillow reports the upright size
            stored_size = stored_size[1], stored_size[0]
        with _quiet_libtiff() if picture.format == "TIFF" else nullcontext():
            picture.load()
        # Pillow has turned a TIFF upright by now, and finds the EXIF data of some PNG only now.
        remaining = _orientation(picture)
        upright, white = _to_channels(picture, depth, name, channels, steps)
        if remaining in _UPRIGHT:
            upright = upright.transpose(_UPRIGHT[remaining])
        if turned := {orientation, remaining} & _UPRIGHT.keys():
            steps.append(f"turned upright from EXIF orientation {turned.pop()}")
        if frames := _other_frames(picture):  # last, because counting reads on in the file
            steps.insert(0, frames)
    except ImageError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        limit = min(max_pixels, Image.MAX_IMAGE_PIXELS or max_pixels)  # from Python a lower one may be set
        raise _too_large(name, "", limit) from error
    except Exception as error:  # a damaged or hostile file can make a decoder raise anything
        raise ImageError(
            f"Cannot read {name}: the picture is truncated or corrupt ({one_line(error)}). Get the file again."
        ) from error
    return upright, white, stored_size


def picture_name(picture: Image.Image) -> str:
    """Return the name of a picture in memory."""
    return str(getattr(picture, "filename", "")) or "picture"


def take_picture(
    picture: Image.Image, name: str, channels: int, max_pixels: int, steps: list[str]
) -> tuple[Image.Image, float, tuple[int, int]]:
    """Do as `read_picture` with a picture in memory, which stays as it is."""
    _check_pixel_count(picture.size, max_pixels, name)
    try:
        orientation = _orientation(picture)
        upright, white = _to_channels(picture.copy(), 16, name, channels, steps)
    except ImageError:
        raise
    except Exception as error:  # Pillow opens pictures without reading them; a closed one raises anything
        why = one_line(error) or type(error).__name__
        raise ImageError(f"Cannot read {name}: {why}. Was it closed, or is its file damaged?") from error
    if orientation in _UPRIGHT:
        upright = upright.transpose(_UPRIGHT[orientation])
        steps.append(f"turned upright from EXIF orientation {orientation}")
    return upright, white, picture.size


@contextmanager
def _quiet_libtiff() -> Iterator[None]:
    """Drop what libtiff writes to file descriptor 2 about a damaged file; Pillow's exception has it as well."""
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


def _open(file: BinaryIO, name: str) -> ImageFile.ImageFile:
    head = file.read(16)
    if head.startswith(_PNG):
        _check_checksums(file, name)
    try:
        return Image.open(file, formats=_formats(head))
    except UnidentifiedImageError as error:
        fault = (
            "it is not a JPEG, PNG, WebP, AVIF, JPEG 2000, BMP, GIF or TIFF picture, nor a .npy, .pt or .safetensors "
            "tensor; or its start is damaged."
        )
        if _brand(head) in _HEIF_BRANDS and _HEIF not in Image.OPEN:
            fault = "it is a HEIC picture, which needs one more package: pip install pillow-heif"
        elif _brand(head) in _AVIF_BRANDS | _HEIF_BRANDS:
            fault = "the picture is truncated or corrupt. Get the file again."
        raise ImageError(f"Cannot read {name}: {fault}") from error


def _formats(head: bytes) -> tuple[str, ...]:
    if _brand(head) not in _HEIF_BRANDS:
        return _FORMATS
    if _HEIF not in Image.OPEN:
        with suppress(ImportError):
            importlib.import_module(_HEIF_PLUGIN)
    return (*_FORMATS, _HEIF) if _HEIF in Image.OPEN else _FORMATS


def _brand(head: bytes) -> bytes:
    return head[8:12] if head[4:8] == b"ftyp" else b""


def _check_checksums(file: BinaryIO, name: str) -> None:
    """Compare each chunk of a PNG with its checksum; Pillow checks few of them, but notices truncation."""
    file.seek(len(_PNG))
    while len(head := file.read(8)) == 8:
        remaining, kind = int.from_bytes(head[:4], "big"), head[4:]
        checksum = zlib.crc32(kind)
        while remaining and (block := file.read(min(remaining, _BLOCK_BYTES))):
            remaining -= len(block)
            checksum = zlib.crc32(block, checksum)
        stored = file.read(4)
        if len(stored) == 4 and int.from_bytes(stored, "big") != checksum and kind not in _LATER_FRAMES:
            shown = kind.decode() if kind.isalpha() else repr(kind)
            raise ImageError(
                f"Cannot read {name}: it is damaged: the checksum of its {shown} chunk is wrong. Get the file again."
            )
        if kind == b"IEND":
            return


def _check_pixel_count(size: tuple[int, int], max_pixels: int, name: str) -> None:
    width, height = size
    if not width * height:
        raise ImageError(f"Cannot read {name}: {height}x{width} (height x width) has no pixel.")
    if width * height > max_pixels:
        raise _too_large(name, f"{height}x{width} (height x width) is ", max_pixels)


def _too_large(name: str, size: str, limit: int) -> ImageError:
    return ImageError(
        f"Cannot read {name}: {size}over the limit of {limit} pixels. Scale it down first, or give {arg('max_pixels')}."
    )


def _depth(picture: ImageFile.ImageFile, file: BinaryIO, name: str, steps: list[str]) -> int:
    """Return the bits of deep greyscale, as far as the format tells; note in `steps` what decoding drops."""
    is_deep = picture.mode in _DEEP_MODES
    if picture.format == "JPEG2000":
        depth = _jpeg2000_depth(file)
        if not (8 < depth <= 16 if is_deep else depth == 8):
            # Pillow adds a half before it shifts deeper colours down to 8 bits: white runs over and becomes black.
            raise ImageError(
                f"Cannot read {name}: Pillow decodes JPEG 2000 of {depth or 'several'} bits per channel wrongly. Save "
                "it as PNG."
            )
        return depth
    if ";16" in str(picture.tile) and not is_deep:
        steps.append("16-bit colour read by its high byte")
    if picture.format in {"AVIF", _HEIF} and (depth := _isobmff_depth(file)) > 8:
        steps.append(f"{depth}-bit colour read in 8 bits")
    return 16


def _jpeg2000_depth(file: BinaryIO) -> int:
    """Return the bits of every channel, by the SIZ marker (ISO/IEC 15444-1, A.5.1); 0 where they differ."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        siz = content.find(_JPEG2000[1])  # behind boxes of metadata of any length
        channel_count = int.from_bytes(content[siz + 40 : siz + 42], "big")
        depths = {byte % 128 + 1 for byte in content[siz + 42 : siz + 42 + 3 * channel_count : 3]}
    return depths.pop() if len(depths) == 1 else 0


def _isobmff_depth(file: BinaryIO) -> int:
    """Return the bits of the first channel of an AVIF or HEIF picture; 0 where it does not tell."""
    file.seek(0)
    head = file.read(_BLOCK_BYTES)
    at = head.find(b"pixi")  # pixel information: version and flags (4 bytes), number of channels, bits of each
    return head[at + 9] if 0 <= at < len(head) - 9 else 0


def _orientation(picture: Image.Image) -> object:
    try:
        return picture.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # noqa: BLE001 broken EXIF data has no bearing on the picture; viewers ignore it too
        return 1


def _other_frames(picture: Image.Image) -> str:
    try:
        frame_count = getattr(picture, "n_frames", 1)
    except Exception:  # noqa: BLE001 damage after the first frame does not make it unreadable
        return "first of several frames; later ones are damaged"
    return f"first of {frame_count} frames" if frame_count > 1 else ""


def _to_channels(
    picture: Image.Image, depth: int, name: str, channels: int, steps: list[str]
) -> tuple[Image.Image, float]:
    if picture.mode in _DEEP_MODES:
        return _deep_grey(picture, depth, name, steps)
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


def _deep_grey(picture: Image.Image, depth: int, name: str, steps: list[str]) -> tuple[Image.Image, float]:
    tags = getattr(picture, "tag_v2", {})
    values: NDArray[np.float32] = np.array(picture).astype(np.float32)
    is_float, white = picture.mode == "F", 1.0
    if not is_float:
        bits = min((depth, *tags.get(ExifTags.Base.BitsPerSample, ())))  # 12 in some TIFF; "I" may hold 32
        if picture.format == "JPEG2000":
            values /= 2 ** (16 - depth)  # Pillow has shifted them up to fill 16 bits
        white = float(2**bits - 1)
    if picture.mode in ("F", "I") and not (values.min() >= 0 and values.max() <= white):  # false for NaN too
        outside = "floating-point values outside 0-1" if is_float else "whole numbers outside 0-65535"
        raise ImageError(f"Cannot read {name}: {outside}, so white is unknown. Give a tensor file.")
    steps.append("floating-point greyscale taken as 0-1" if is_float else f"{bits}-bit greyscale scaled to 0-1")
    if tags.get(ExifTags.Base.PhotometricInterpretation) == 0:  # Pillow inverts only up to 8 bits
        steps.append("inverted, because its white is stored as 0")
        values = white - values
    return Image.fromarray(values), white
