"""The photograph that an input was made of is read again, upright and whole, or it is said why not."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from hookscope.errors import ImageError
from hookscope.inputs.batches import Batch
from hookscope.inputs.loading import load_input
from hookscope.inputs.noise import noise_batch
from hookscope.inputs.pipeline import InputPipeline
from hookscope.inputs.preprocessing import thumbnails
from hookscope.results.inputs import InputRecord, Preprocessing, Region
from tests.inputs.written import random_pixels, save

CROPPED = Preprocessing(resize=20, crop=(20, 20))


def pipeline(*files, preprocessing=CROPPED, **further) -> InputPipeline:
    return InputPipeline(files, preprocessing, torch.device("cpu"), torch.float32, **further)


@pytest.mark.parametrize("orientation", [1, 7])
def test_a_file_is_read_upright(tmp_path: Path, orientation: int):
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = save(tmp_path / "a.png", random_pixels(31, 47), exif=exif)
    record = load_input(path, CROPPED)[1]
    shown = pipeline(path).photograph([record], 0)
    with Image.open(path) as picture:
        assert np.array_equal(shown.pixels, np.asarray(ImageOps.exif_transpose(picture)))
    assert (shown.region, shown.remark) == (record.region, "")


def test_a_pair_of_frames_shows_the_first(tmp_path: Path):
    frames = [save(tmp_path / name, random_pixels(31, 47, seed=seed)) for seed, name in enumerate(("a.png", "b.png"))]
    pairs = pipeline(*frames, preprocessing=replace(CROPPED, kind="flow"))
    (record,) = next(pairs.batches(1)).records
    shown = pairs.photograph([record], 0)
    assert np.array_equal(shown.pixels, random_pixels(31, 47, seed=0))
    assert (shown.region, shown.remark) == (record.region, "")


def test_a_file_that_has_changed_is_not_shown(tmp_path: Path):
    path = save(tmp_path / "a.png", random_pixels(31, 47))
    values, record = load_input(path, CROPPED)
    (seen,) = thumbnails(values[None].numpy(), CROPPED)
    save(path, random_pixels(31, 47, seed=1))
    shown = pipeline(path, pictures={record: seen}).photograph([record], 0)
    assert np.array_equal(shown.pixels, seen)
    assert shown.region == Region(0, 0, 20, 20, 20, 20)
    assert shown.remark == f"'{path}' has changed since the run. This is what the network saw."


def test_a_file_that_is_gone_leaves_an_even_ground_where_nothing_was_kept(tmp_path: Path):
    path = save(tmp_path / "a.png", random_pixels(31, 47))
    record = load_input(path, CROPPED)[1]
    path.unlink()
    shown = pipeline(path).photograph([record], 0)
    assert (shown.pixels == shown.pixels[0, 0]).all()
    assert shown.pixels.shape == (20, 20, 3)
    assert "no such file" in shown.remark
    assert shown.remark.endswith("Maps are drawn on grey, without a picture.")


def test_complex_inputs_are_shown_as_no_picture(tmp_path: Path):
    torch.save(torch.ones(1, 3, 8, 8, dtype=torch.complex64), tmp_path / "a.pt")
    inputs = pipeline(tmp_path / "a.pt")
    (batch,) = inputs.batches(1)
    in_memory = pipeline(batch=batch)
    assert not inputs.pictures
    assert in_memory.photograph(batch.records, 0).remark == "Maps are drawn on grey, without a picture."


def test_pictures_in_memory_that_look_alike_come_in_their_order():
    pictures = [Image.fromarray(random_pixels(31, 47, seed=seed)) for seed in range(3)]
    records = [load_input(picture, CROPPED)[1] for picture in pictures]
    shown = [pipeline(*pictures).photograph(records, index).pixels for index in range(3)]
    assert all(np.array_equal(each, np.asarray(picture)) for each, picture in zip(shown, pictures, strict=True))
    assert "which picture" in pipeline(*pictures).photograph(records[:2], 0).remark


def test_of_tensors_it_is_what_the_network_saw():
    values = torch.rand(2, 3, 8, 9)
    record = InputRecord("tensor", None, None, (3, 8, 9), ())
    plain = Preprocessing(mean=(), std=())
    for args, kwargs in (
        ((values,), {}),
        (([*values],), {}),
        ((), {"rate": 3, "scales": [1.0, 2.0], "none": [], "x": values}),
        ((values[:, 0], values), {}),
    ):
        batch = Batch(args, (0, 1), (record, record), kwargs)
        shown = pipeline(preprocessing=plain, batch=batch).photograph([record, record], 1)
        assert np.abs(shown.pixels.transpose(2, 0, 1) / 255 - values[1].numpy()).max() < 0.003
        assert shown.remark == ""


def test_of_noise_it_is_the_noise():
    grey = Preprocessing(mean=(0.5,), std=(0.5,), channels=1)
    inputs = pipeline(preprocessing=grey, batch=noise_batch("3,1,8,9", seed=4))
    (batch,) = inputs.batches(3)
    for index in range(3):
        shown = inputs.photograph(batch.records, index)
        expected = (batch.args[0][index] * 0.5 + 0.5).clamp(0, 1)
        assert np.abs(shown.pixels.transpose(2, 0, 1) / 255 - expected.numpy()).max() < 0.003
        assert shown.remark == ""


def test_grey_tensors_of_a_network_for_colours_stay_grey():
    (picture,) = thumbnails(np.zeros((1, 1, 4, 4), np.float32), Preprocessing())
    assert picture.shape == (4, 4)


def test_two_pictures_in_memory_of_one_size_are_told_apart():
    red, blue = (Image.new("RGB", (24, 24), colour) for colour in ("red", "blue"))
    inputs = pipeline(red, blue)
    records = [record for batch in inputs.batches(2) for record in batch.records]
    shown = [inputs.photograph(records, index).pixels[0, 0].tolist() for index in (0, 1)]
    assert shown == [[255, 0, 0], [0, 0, 255]]
    assert not inputs.pictures


@pytest.mark.parametrize("closes", [True, False])
def test_a_picture_that_is_closed_or_empty_is_one_line(tmp_path: Path, closes: bool):
    picture = Image.open(save(tmp_path / "a.png", random_pixels(31, 47)))
    if closes:
        picture.close()
    else:
        picture = picture.crop((5, 5, 5, 20))
    with pytest.raises(ImageError, match="Cannot read"):
        next(iter(pipeline(picture).batches(1)))
