"""Every format, colour mode and orientation becomes exactly the pixels that it stands for."""

import hashlib
import struct
import sys
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.AvifImagePlugin import AvifImageFile

from hookscope.inputs.find_files import find_inputs
from hookscope.inputs.loading import load_input
from hookscope.results.inputs import Preprocessing
from tests.inputs.written import PLAIN, PLAIN_GREY, as_input, failure, load_steps, random_pixels, save, tiff


@pytest.mark.parametrize(
    ("suffix", "options"),
    [
        ("png", {}),
        ("bmp", {}),
        ("webp", {"lossless": True}),
        ("tif", {}),
        ("tif", {"compression": "tiff_lzw"}),
        ("jp2", {}),
    ],
)
def test_reads_lossless_formats_exactly(tmp_path, suffix, options):
    pixels = random_pixels(7, 5)
    tensor, record = load_input(save(tmp_path / f"a.{suffix}", pixels, **options), PLAIN)
    assert tensor.dtype == torch.float32
    assert torch.equal(tensor, as_input(pixels))
    assert (record.size, record.shape, record.steps) == ((5, 7), (3, 7, 5), ())


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


INDEXED = np.array([[[10, 20, 30], [40, 50, 60], [70, 80, 90]]], dtype=np.uint8)


def indexed() -> Image.Image:
    """Three pixels of a palette, `INDEXED`."""
    picture = Image.new("P", (3, 1))
    picture.putpalette(INDEXED.flatten().tolist())
    picture.putdata([0, 1, 2])
    return picture


def test_reads_palette_images_as_rgb(tmp_path):
    for suffix in ("png", "gif", "bmp", "tif"):
        path = tmp_path / f"a.{suffix}"
        indexed().save(path)
        assert torch.equal(load_input(path, PLAIN)[0], as_input(INDEXED)), suffix
        assert "palette converted to RGB" in load_steps(path)


@pytest.mark.parametrize("transparency", [1, b"\x00\x80\xff"])
def test_drops_palette_transparency(tmp_path, transparency):
    indexed().save(tmp_path / "a.png", transparency=transparency)
    assert torch.equal(load_input(tmp_path / "a.png", PLAIN)[0], as_input(INDEXED))
    assert load_steps(tmp_path / "a.png") == "alpha channel dropped; palette converted to RGB"


def test_drops_alpha_and_keeps_the_colour_under_it(tmp_path):
    pixels = random_pixels(6, 4, channels=4)
    pixels[:3, :, 3] = 0
    tensor, record = load_input(save(tmp_path / "a.png", pixels), PLAIN)
    assert torch.equal(tensor, as_input(pixels[..., :3]))
    assert record.steps == ("alpha channel dropped",)


def test_reads_cmyk_as_rgb(tmp_path):
    path = tmp_path / "a.tif"
    Image.new("CMYK", (4, 4), (255, 0, 0, 0)).save(path)  # pure cyan
    assert torch.equal(load_input(path, PLAIN)[0][:, 0, 0], torch.tensor([0.0, 1.0, 1.0]))
    assert load_steps(path) == "CMYK converted to RGB"


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


def test_lab_colour_is_refused(tmp_path):
    Image.new("LAB", (2, 2)).save(tmp_path / "a.tif")
    assert "colour mode LAB is not supported" in failure(tmp_path / "a.tif")


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
    actual = tensor.reshape(32, 32).numpy()
    assert np.abs(actual[inside, inside] - expected[inside, inside]).max() < 1e-6


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


def test_deep_colour_jpeg_2000_is_refused_for_pillow_turns_its_white_black(tmp_path):
    content = bytearray(save(tmp_path / "a.jp2", random_pixels(8, 8)).read_bytes())
    first = content.find(b"\xff\x4f\xff\x51") + 42  # the bits of each channel less one, in the SIZ marker
    assert content[first : first + 9 : 3] == bytes([7, 7, 7])
    content[first : first + 9 : 3] = bytes([11, 11, 11])
    (tmp_path / "a.jp2").write_bytes(content)
    assert "JPEG 2000 of 12 bits per channel wrongly. Save it as PNG." in failure(tmp_path / "a.jp2")
    content[first] = 7
    (tmp_path / "a.jp2").write_bytes(content)
    assert "several bits" in failure(tmp_path / "a.jp2")


# 8x8 pixels of (1023, 512, 0) in 10 bits, as libavif 1.4 writes them.
RGB_10_BIT_AVIF = bytes.fromhex(
    "00000020667479706176696600000000617669666d6966316d6961664d413141000000eb6d657461000000000000002168646c7200000000"
    "0000000070696374000000000000000000000000000000000e7069746d0000000000010000001e696c6f6300000000440000010001000000"
    "0100000113000000250000002869696e660000000000010000001a696e6665020000000001000061763031436f6c6f72000000006a697072"
    "700000004b6970636f0000001469737065000000000000000800000008000000107069786900000000030a0a0a0000000c61763143812040"
    "0000000013636f6c726e636c78000200020006800000001769706d610000000000000001000104010283040000002d6d64617412000a0838"
    "08bf6f02020690321717826304c000f2000000903d3eb357a25824d919c2206a"
)


def test_avif_of_more_than_8_bits_is_read_in_8_and_says_so(tmp_path):
    (tmp_path / "a.avif").write_bytes(RGB_10_BIT_AVIF)
    tensor, record = load_input(tmp_path / "a.avif", PLAIN)
    assert torch.allclose(tensor[:, 0, 0], torch.tensor([1, 512 / 1023, 0]), atol=0.01)
    assert record.steps == ("10-bit colour read in 8 bits",)


class _Heif(AvifImageFile):
    format = "HEIF"


def test_heic_is_a_picture_where_its_plugin_is_installed(tmp_path, monkeypatch):
    pixels = np.full((8, 8, 3), 200, dtype=np.uint8)
    path = save(tmp_path / "a.avif", pixels, subsampling="4:4:4", quality=100).rename(tmp_path / "photo.heic")
    path.write_bytes(path.read_bytes().replace(b"ftypavif", b"ftypheic", 1))
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    assert failure(path).endswith("it is a HEIC picture, which needs one more package: pip install pillow-heif")

    monkeypatch.delitem(sys.modules, "pillow_heif")
    (tmp_path / "pillow_heif").mkdir()
    (tmp_path / "pillow_heif" / "__init__.py").touch()
    (tmp_path / "pillow_heif" / "HeifImagePlugin.py").write_text(
        "from PIL import Image\nfrom tests.inputs.test_pictures import _Heif\nImage.register_open('HEIF', _Heif)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(Image, "OPEN", dict(Image.OPEN))
    monkeypatch.setattr(Image, "ID", [*Image.ID])
    try:
        tensor, _ = load_input(path, PLAIN)
        assert (tensor - 200 / 255).abs().max() < 0.01
        path.rename(tmp_path / "photo")  # without a suffix
        assert [actual.name for actual in find_inputs([str(tmp_path)])] == ["photo"]
    finally:
        for name in ("pillow_heif", "pillow_heif.HeifImagePlugin"):
            sys.modules.pop(name, None)


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


@pytest.mark.parametrize(
    ("suffix", "orientation"),
    [*(("png", orientation) for orientation in range(1, 9)), ("webp", 6), ("tif", 6), ("avif", 6)],
)
def test_turns_pictures_upright_by_exif_orientation(tmp_path, suffix, orientation):
    stored = random_pixels(4, 7)
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"webp": {"lossless": True}, "avif": {"quality": 100, "subsampling": "4:4:4"}}
    path = save(tmp_path / f"a.{suffix}", stored, exif=exif, **options.get(suffix, {}))
    tensor, record = load_input(path, PLAIN)
    assert torch.allclose(tensor, as_input(UPRIGHT[orientation](stored)), atol=0.02 if suffix == "avif" else 0)
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


@pytest.mark.parametrize("exif", [b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\x7f"])
def test_broken_exif_data_does_not_make_a_picture_unreadable(tmp_path, exif):
    pixels = random_pixels(8, 8)
    path = save(tmp_path / "a.webp", pixels, exif=exif, lossless=True)
    assert torch.equal(load_input(path, PLAIN)[0], as_input(pixels))


@pytest.mark.parametrize(("suffix", "options"), [("gif", {}), ("tif", {}), ("avif", {"quality": 100})])
def test_takes_the_first_of_several_frames(tmp_path, suffix, options):
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    first, *others = [Image.new("RGB", (5, 4), colour) for colour in colours]
    first.save(tmp_path / f"a.{suffix}", save_all=True, append_images=others, **options)
    tensor, record = load_input(tmp_path / f"a.{suffix}", PLAIN)
    red = torch.tensor([1.0, 0.0, 0.0])[:, None, None].expand(3, 4, 5)
    assert torch.allclose(tensor, red, rtol=0, atol=0.02 if suffix == "avif" else 0)
    assert record.steps[0] == "first of 3 frames"
