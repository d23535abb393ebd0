import pytest
import torch
from torch import nn

from hookscope.errors import UsageError
from hookscope.models import build_on_meta, example_shape
from hookscope.models.input_spec import (
    default_preprocessing,
    infer_channels,
    infer_input_shape,
    set_input_channels,
    with_channels,
)
from hookscope.results.inputs import Preprocessing

NETWORKS = {
    "image": (nn.Sequential(nn.BatchNorm2d(5), nn.Conv2d(5, 2, 3)), (1, 5, 224, 224), 5),
    "clip": (nn.Sequential(nn.Conv3d(3, 2, 3)), (1, 3, 16, 112, 112), 3),
    "signal": (nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU()), (1, 2, 224), None),
    "vector": (nn.Sequential(nn.Linear(10, 4), nn.Linear(4, 2)), (1, 10), None),
}


@pytest.mark.parametrize(("shape", "channels"), [((8, 1, 3, 3), 1), ((8, 3, 5, 5), 3), ((8, 7, 3, 3), None)])
def test_the_first_kernel_tells_the_channels_of_a_network_of_functions(
    shape: tuple[int, ...], channels: int | None
) -> None:
    network = nn.Module()
    network.kernels = nn.ParameterList([torch.zeros(9), torch.zeros(shape), torch.zeros(4, 8, 3, 3)])
    network.head = nn.Linear(4, 2)
    assert infer_channels(network) == channels
    network.other = nn.Conv2d(5, 2, 1)
    assert infer_channels(network) is None


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


def test_parameters_beside_the_first_convolution_do_not_hide_it() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.class_token = nn.Parameter(torch.zeros(1, 1, 8))
            self.patches = nn.Conv2d(1, 8, 16, 16)

    assert infer_input_shape(Tokens()) == (1, 1, 224, 224)


def test_weights_before_the_first_linear_layer_hide_it() -> None:
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Parameter(torch.zeros(3 * 8 * 8, 32))
            self.head = nn.Linear(32, 4)

    assert infer_input_shape(Patches()) is None
    assert infer_input_shape(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 4))) == (1, 32)


def test_grey_network_gets_grey_preprocessing() -> None:
    grey = default_preprocessing(nn.Conv2d(1, 4, 3))
    assert (grey.channels, grey.kind, grey.resize, grey.crop) == (1, "image", 224, (224, 224))
    # The averages of ImageNet's published channel statistics.
    assert grey.mean == pytest.approx(((0.485 + 0.456 + 0.406) / 3,), abs=5e-4)
    assert grey.std == pytest.approx(((0.229 + 0.224 + 0.225) / 3,), abs=5e-4)


@pytest.mark.parametrize("channels", [3, 4])
def test_other_networks_get_three_channels(channels: int) -> None:
    network = nn.Conv2d(channels, 4, 3)
    colour = default_preprocessing(network)
    assert (colour.channels, colour.mean, colour.std) == (3, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert infer_channels(network) == channels


def test_network_over_clips_gets_clips() -> None:
    clip = default_preprocessing(nn.Conv3d(3, 4, 3))
    assert (clip.kind, clip.frames, clip.crop) == ("video", 16, (112, 112))


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


def test_example_shape_of_an_unknown_network_is_its_first_layers() -> None:
    network = nn.Sequential(nn.Linear(10, 2))
    assert example_shape(network, default_preprocessing(network)) == (1, 10)


def test_other_channels_are_normalised_by_the_average_of_the_former() -> None:
    four = with_channels(Preprocessing(mean=(0.1, 0.2, 0.6), std=(0.2, 0.3, 0.1)), 4)
    assert (four.channels, four.mean, four.std) == (4, (0.3,) * 4, (0.2,) * 4)
    assert with_channels(Preprocessing(mean=(), std=()), 1).mean == ()
    assert with_channels(Preprocessing(), 3) == Preprocessing()


def test_convolutions_over_colours_are_rebuilt_and_no_others() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 5, 2, 1, bias=False), nn.Conv2d(8, 4, 3), nn.Linear(3, 3)).eval()
    network[0].weight.requires_grad_(False)
    rest = list(network)[1:]
    set_input_channels(network, 2)
    assert str(network[0]) == "Conv2d(2, 8, kernel_size=(5, 5), stride=(2, 2), padding=(1, 1), bias=False)"
    assert not network[0].weight.requires_grad
    assert not network[0].training
    assert list(network)[1:] == rest
    with pytest.raises(UsageError, match="no convolution over 3 channels"):
        set_input_channels(network, 5)
