"""Pictures become exactly the tensors that torchvision's presets promise."""

import numpy as np
import pytest
import torch
import torchvision
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import functional as reference

from hookscope.errors import UsageError
from hookscope.inputs.batches import load_batches
from hookscope.inputs.find_files import find_inputs
from hookscope.inputs.loading import load_input
from hookscope.inputs.preprocessing import check_suits_pictures
from hookscope.parameters import called_from_python
from hookscope.results.inputs import Preprocessing
from tests.inputs.written import SAMPLES, as_input, failure, random_pixels, save


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


@pytest.mark.parametrize(
    "transform", PRESETS.values(), ids=[f"{type(p).__name__}{i}" for i, p in enumerate(PRESETS.values())]
)
@pytest.mark.parametrize("size", [(300, 451), (1, 1)], ids=str)
@pytest.mark.sample(
    "(300, 451)-ImageClassification0",
    "(300, 451)-ImageClassification5",
    "(300, 451)-SemanticSegmentation4",
    "(300, 451)-ObjectDetection17",
    "(300, 451)-VideoClassification20",
    "(300, 451)-OpticalFlow22",
)
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


def test_crops_to_a_multiple(tmp_path):
    pixels = random_pixels(19, 26)
    tensor, record = load_input(
        save(tmp_path / "a.png", pixels), Preprocessing(resize=None, crop=None, mean=(), std=(), multiple=8)
    )
    assert torch.equal(tensor, as_input(pixels[1:17, 1:25]))
    assert record.steps == ("centre crop 16x24 (height x width), to multiples of 8",)


def test_sample_images_are_all_sourced_and_readable():
    sources = (SAMPLES / "SOURCES.md").read_text(encoding="utf-8")
    pictures = find_inputs([str(SAMPLES)])
    assert len(pictures) >= 4
    for picture in pictures:
        assert f"`{picture.name}`" in sources
        tensor, record = load_input(picture, Preprocessing())
        assert tensor.shape == (3, 224, 224)
        assert max(record.size) <= 640


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


def test_means_that_do_not_suit_the_channels_name_the_option_as_the_caller_writes_it() -> None:
    one_mean = Preprocessing(mean=(0.5,), source="a processor")
    with pytest.raises(UsageError, match=r"a processor has 1 mean value for 3 channels\. Give --mean\.$"):
        check_suits_pictures(one_mean)
    with pytest.raises(UsageError, match=r"Give `mean`\.$"):
        called_from_python(check_suits_pictures)(one_mean)
