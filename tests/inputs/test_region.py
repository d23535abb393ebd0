"""An input's record says which part of the upright picture it covers, exactly.

A picture whose pixels say where they lie goes through the preparation; so each value of the input says what part of the
picture it shows, without any knowledge of how that was computed.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hookscope.inputs.loading import load_input
from hookscope.inputs.preprocessing import prepare_picture
from hookscope.results.inputs import Preprocessing, Region
from tests.inputs.written import PLAIN, random_pixels, save, write_tensor

RESIZES = (None, 30, (17, 90))
CROPS = (None, (31, 20), (70, 95))


def coordinates(height: int, width: int, axis: int) -> np.ndarray:
    """Return the centre of each pixel along an axis, as a share of the length, so that it lies between 0 and 1."""
    length = (height, width)[axis]
    centres = (np.arange(length, dtype=np.float32) + 0.5) / length
    return np.broadcast_to(centres[:, None] if axis == 0 else centres, (height, width)).copy()


def centres(region: Region, axis: int, count: int) -> np.ndarray:
    """Return where the region says that the centres of `count` rows or columns lie, as shares of the length."""
    low, high, length = (
        (region.top, region.bottom, region.height) if axis == 0 else (region.left, region.right, region.width)
    )
    return (low + (np.arange(count) + 0.5) * (high - low) / count) / length


def assert_on_centres(pixels_off: np.ndarray) -> None:
    """An antialiasing filter's few weights move single values by a fraction of a pixel, to either side."""
    assert np.abs(pixels_off).max() < 0.3
    assert abs(pixels_off.mean()) < 0.15


@pytest.mark.parametrize("resize", RESIZES, ids=str)
@pytest.mark.parametrize("crop", CROPS, ids=str)
@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("size", [(51, 83), (90, 33)], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_the_centres_of_the_inputs_pixels_are_where_the_region_says(resize, crop, multiple, size, axis):
    preprocessing = Preprocessing(channels=1, resize=resize, crop=crop, mean=(), std=(), multiple=multiple)
    values, region = prepare_picture(Image.fromarray(coordinates(*size, axis)), 1.0, preprocessing, "a", [])
    assert (region.height, region.width) == size
    seen = values[0].numpy() if axis == 0 else values[0].numpy().T
    expected = centres(region, axis, len(seen))
    # Near an edge a filter has less to average over; where the input was padded it shows nothing.
    inside = (expected > 0.13) & (expected < 0.87)
    middle = seen[:, seen.shape[1] // 2]
    assert_on_centres((middle - expected)[inside] * size[axis])


def test_what_is_not_cropped_covers_the_picture_to_the_last_bit():
    picture, preprocessing = random_pixels(37, 43), Preprocessing(resize=64, crop=None)
    _, region = prepare_picture(Image.fromarray(picture), 255.0, preprocessing, "a", [])
    assert region == Region(0, 0, 37, 43, 37, 43)


def test_padding_lies_outside_the_picture(tmp_path: Path):
    path = save(tmp_path / "a.png", random_pixels(7, 12))
    record = load_input(path, Preprocessing(resize=None, crop=(10, 10)))[1]
    assert record.region == Region(-1, 1, 9, 11, 7, 12)  # 3 rows are missing, 1 above and 2 below


def test_the_region_is_of_the_upright_picture(tmp_path: Path):
    exif = Image.Exif()
    exif[0x0112] = 6
    path = save(tmp_path / "a.jpg", random_pixels(40, 60), exif=exif)
    record = load_input(path, Preprocessing(resize=20, crop=(20, 20)))[1]
    assert (record.size, record.region) == ((60, 40), Region(10, 0, 50, 40, 60, 40))


def test_a_tensor_has_no_region(tmp_path: Path):
    path = write_tensor(tmp_path / "a.npy", torch.zeros(3, 8, 8))
    assert load_input(path, PLAIN)[1].region is None
