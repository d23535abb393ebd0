from types import SimpleNamespace

import pytest
import torch
import torchvision
from torch import nn

import hookscope
from hookscope.inputs.find_files import DEMO_PICTURE
from hookscope.models.input_spec import (
    default_preprocessing,
    example_shape,
    infer_channels,
    infer_input_shape,
    picture_size,
    with_channels,
)
from hookscope.models.spec import build_on_meta
from hookscope.results.inputs import Preprocessing

NETWORKS = {
    "image": (nn.Sequential(nn.BatchNorm2d(5), nn.Conv2d(5, 2, 3)), (1, 5, 224, 224), 5),
    "clip": (nn.Sequential(nn.Conv3d(3, 2, 3)), (1, 3, 16, 112, 112), 3),
    "signal": (nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU()), (1, 2, 224), None),
    "vector": (nn.Sequential(nn.Linear(10, 4), nn.Linear(4, 2)), (1, 10), None),
}


@pytest.mark.parametrize("kind", NETWORKS)
def test_first_layer_tells_a_shape_that_the_network_takes(kind: str) -> None:
    network, shape, channels = NETWORKS[kind]
    assert infer_input_shape(network) == shape
    assert infer_channels(network) == channels
    assert network(torch.zeros(shape)).shape[0] == 1


@pytest.mark.parametrize(
    "network",
    [
        nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2)),
        nn.Sequential(nn.LSTM(3, 4), nn.Linear(4, 2)),
        nn.Sequential(nn.ConvTranspose2d(100, 8, 4), nn.Conv2d(8, 3, 3)),
        nn.Sequential(nn.LazyConv2d(4, 3)),
        nn.Sequential(nn.ReLU()),
    ],
    ids=["tokens", "recurrent", "generator", "lazy", "no layer"],
)
def test_first_layer_that_does_not_tell_gives_no_shape(network: nn.Module) -> None:
    assert infer_input_shape(network) is None


def test_grey_network_gets_grey_preprocessing() -> None:
    grey = default_preprocessing(nn.Conv2d(1, 4, 3))
    assert (grey.channels, grey.kind, grey.resize, grey.crop) == (1, "image", 224, (224, 224))
    # The averages of ImageNet's published channel statistics.
    assert grey.mean == pytest.approx(((0.485 + 0.456 + 0.406) / 3,), abs=5e-4)
    assert grey.std == pytest.approx(((0.229 + 0.224 + 0.225) / 3,), abs=5e-4)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("efficientnet_b2", (1, 3, 288, 288)),
        ("r3d_18", (1, 3, 16, 112, 112)),
        ("fcn_resnet50", (1, 3, 520, 520)),
        ("ssd300_vgg16", (1, 3, 224, 224)),
    ],
)
def test_example_shape_is_what_the_weights_transforms_give(name: str, shape: tuple[int, ...]) -> None:
    loaded = build_on_meta(name, weights="none")
    assert example_shape(loaded.module, loaded.preprocessing) == shape


class Wrapped(nn.Module):
    """A network of the user's own around another, which alone has the size."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.network(pictures)
        return result


def with_attribute(name: str, value: object) -> nn.Module:
    network = nn.Sequential(nn.Conv2d(3, 4, 3))
    setattr(network, name, value)
    return network


def test_vision_transformers_run_at_the_size_that_they_are_built_for() -> None:
    timm = pytest.importorskip("timm")
    vit = torchvision.models.VisionTransformer(32, 8, 1, 2, 16, 32)
    for network, size in (
        (vit, (32, 32)),
        (Wrapped(vit), (32, 32)),
        (timm.create_model("test_vit", img_size=(64, 48)), (64, 48)),
    ):
        preprocessing = default_preprocessing(network)
        assert (preprocessing.resize, preprocessing.crop) == (max(size), size)
        assert hookscope.activations(network, DEMO_PICTURE).rows
        assert example_shape(network, preprocessing) == (1, 3, *size)
        with torch.no_grad():
            assert network(torch.zeros(1, 3, *size)).shape[0] == 1


@pytest.mark.parametrize(
    ("name", "value", "size"),
    [
        ("default_cfg", {"input_size": (3, 160, 120)}, (160, 120)),
        ("config", SimpleNamespace(image_size=30), (30, 30)),
        ("image_size", [24, 40], (24, 40)),
        *(("image_size", value, None) for value in (None, 0, True, "64", (64,), (8, -8), 3.5, torch.Size([]))),
        *(("default_cfg", cfg, None) for cfg in ({}, {"input_size": (3,)}, 5)),
    ],
)
def test_a_picture_size_is_two_numbers_of_pixels(name: str, value: object, size: tuple[int, int] | None) -> None:
    assert picture_size(with_attribute(name, value)) == size


def test_other_channels_are_normalised_by_the_average_of_the_former() -> None:
    four = with_channels(Preprocessing(mean=(0.1, 0.2, 0.6), std=(0.2, 0.3, 0.1)), 4)
    assert (four.channels, four.mean, four.std) == (4, (0.3,) * 4, (0.2,) * 4)
    assert with_channels(Preprocessing(mean=(), std=()), 1).mean == ()
    assert with_channels(Preprocessing(), 3) == Preprocessing()
