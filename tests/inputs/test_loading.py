"""Files that are no picture, damaged or made to harm become one clear line."""

import io
import os
import random
import struct
import warnings
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile
from PIL.PngImagePlugin import PngImageFile, PngInfo

from hookscope.errors import ImageError
from hookscope.inputs.batches import load_batches
from hookscope.inputs.loading import load_input
from hookscope.results.inputs import MAX_PIXELS, Preprocessing
from tests.inputs.written import PLAIN, PLAIN_GREY, failure, random_pixels, save, tiff
from tests.models.test_hostile import without_worker


@pytest.mark.parametrize(
    ("content", "phrase"),
    [
        (b"", "it is empty"),
        (b"\n  <html lang='en'>", "it is a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "Git LFS pointer"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG drawing"),
        (b"\xef\xbb\xbf<?xml version='1.0'?>\n<svg/>", "SVG drawing"),
        (b"just some text", "it is not a JPEG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "it is not a JPEG"),
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
    assert failure(tmp_path / "missing.jpg").endswith("no such file. Check the path.")
    save(tmp_path / "photo.png", random_pixels(2, 2))
    assert failure(tmp_path / "phto.png").endswith("no such file. Check the path. Nearest: 'photo.png'.")
    (tmp_path / "dangling.jpg").symlink_to("nowhere.jpg")
    assert failure(tmp_path / "dangling.jpg").endswith("link to a file that does not exist. Check the path.")
    (tmp_path / "loop.jpg").symlink_to("loop.jpg")
    assert "symbolic links" in failure(tmp_path / "loop.jpg")
    assert "it is a folder" in failure(tmp_path)
    save(tmp_path / "a.png", random_pixels(2, 2))
    assert "Not a directory" in failure(tmp_path / "a.png" / "b.png")
    assert "File name too long" in failure(tmp_path / ("x" * 300 + ".jpg"))
    assert "embedded null" in failure(tmp_path / "a\0b.jpg")


@pytest.mark.timeout(20)
def test_pipes_and_devices_do_not_hang(tmp_path):
    os.mkfifo(tmp_path / "a.jpg")
    assert "pipe, socket or device" in failure(tmp_path / "a.jpg")
    assert "pipe, socket or device" in failure(Path("/dev/zero"))


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


@pytest.mark.parametrize(
    ("kind", "side", "pillows_limit"),
    [("PNG", 9460, None), ("BMP", 40_000, None), ("PNG", 40_000, Image.MAX_IMAGE_PIXELS)],
)
def test_decompression_bombs_are_refused_before_decoding(tmp_path, monkeypatch, kind, side, pillows_limit):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", pillows_limit)
    assert side * side > MAX_PIXELS
    (tmp_path / "a.png").write_bytes(bomb(kind, side))
    assert f"limit of {MAX_PIXELS} pixels" in failure(tmp_path / "a.png")


def test_a_picture_just_below_the_limit_is_not_refused_for_its_size(tmp_path):
    (tmp_path / "a.png").write_bytes(bomb("PNG", 9459))
    assert "truncated or corrupt" in failure(tmp_path / "a.png")


def test_more_or_fewer_pixels_are_read_where_that_is_asked_for(tmp_path, monkeypatch):
    path = save(tmp_path / "a.png", random_pixels(10, 12))
    assert failure(path, replace(PLAIN, max_pixels=119)).endswith(
        "10x12 (height x width) is over the limit of 119 pixels. Scale it down first, or give --max-pixels."
    )
    assert load_input(path, replace(PLAIN, max_pixels=120))[0].shape == (3, 10, 12)
    (tmp_path / "b.png").write_bytes(bomb("PNG", 9460))
    assert "truncated or corrupt" in failure(tmp_path / "b.png", replace(PLAIN, max_pixels=9460**2))
    assert Image.MAX_IMAGE_PIXELS == MAX_PIXELS
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert load_input(path, replace(PLAIN, max_pixels=MAX_PIXELS + 1))[0].shape == (3, 10, 12)


def test_a_wrong_checksum_in_a_png_is_found_wherever_it_is(tmp_path):
    text = PngInfo()
    text.add(b"tEXt", b"comment\0seen", after_idat=True)
    content = save(tmp_path / "a.png", random_pixels(32, 32), pnginfo=text).read_bytes()
    for kind in (b"IHDR", b"IDAT", b"tEXt", b"IEND"):
        at = content.find(kind) - 4
        last = at + 8 + int.from_bytes(content[at : at + 4], "big") + 3  # of the four bytes of the checksum
        (tmp_path / "a.png").write_bytes(content[:last] + bytes([content[last] ^ 1]) + content[last + 1 :])
        phrase = f"the checksum of its {kind.decode()} chunk is wrong. Get the file again."
        assert failure(tmp_path / "a.png").endswith(phrase)
    flipped = bytearray(content)
    flipped[content.find(b"IDAT") + 2000] ^= 4  # in the middle of compressed pixels
    (tmp_path / "a.png").write_bytes(flipped)
    assert "the checksum of its IDAT chunk is wrong" in failure(tmp_path / "a.png")


@pytest.mark.parametrize("suffix", ["jpg", "png", "avif"])
def test_what_is_cut_off_is_an_error_also_where_pillow_is_lenient(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)  # as training code likes to do
    path = save(tmp_path / f"a.{suffix}", random_pixels(64, 64))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    errors: list[ImageError] = []
    whole = save(tmp_path / "whole.png", random_pixels(4, 4))
    (batch,) = load_batches([whole, path, whole], PLAIN, 4, errors.append)
    assert len(batch.records) == 2
    assert "truncated or corrupt" in str(*errors)
    assert ImageFile.LOAD_TRUNCATED_IMAGES


def test_extreme_proportions_do_not_explode_when_resized(tmp_path):
    path = save(tmp_path / "a.png", np.zeros((1, 3000, 3), dtype=np.uint8))
    assert "over the limit" in failure(path, Preprocessing(resize=224, crop=(224, 224)))


def test_damage_behind_the_first_frame_leaves_it_readable(tmp_path):
    values = np.array([[1, 2], [3, 4]], dtype=np.uint16)
    (tmp_path / "a.tif").write_bytes(tiff(values, 16)[:-4] + b"\xff\xff\xff\x7f")  # the next page is nowhere
    tensor, record = load_input(tmp_path / "a.tif", PLAIN_GREY)
    assert torch.equal(tensor[0], torch.from_numpy(values.astype(np.float32) / np.float32(65535)))
    assert record.steps[0] == "first of several frames; later ones are damaged"


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
        ("png", picture, "PNG", {"exif": exif}),
        ("webp", picture, "WEBP", {}),
        ("avif", picture, "AVIF", {}),
        ("jpeg 2000", picture, "JPEG2000", {}),
        ("gif", picture.quantize(8), "GIF", {"save_all": True, "append_images": [picture.quantize(7)]}),
        ("lzw", picture, "TIFF", {"compression": "tiff_lzw"}),
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
    with without_worker():
        for length in range(0, len(content), max(1, len(content) // 30)):
            path.write_bytes(content[:length])
            outcomes.append(outcome(path))
    assert outcomes[: len(outcomes) // 2] == ["refused"] * (len(outcomes) // 2)


@pytest.mark.parametrize("name", ENCODED)
def test_flipped_bits_give_a_tensor_or_an_image_error(tmp_path, name):
    generator = random.Random(name)
    path = tmp_path / "a"
    outcomes = set()
    for _ in range(25):
        content = bytearray(ENCODED[name])
        for _ in range(generator.randint(1, 4)):
            content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        path.write_bytes(content)
        with without_worker():
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
