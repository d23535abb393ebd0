"""Maps against arithmetic by hand, autograd, and captum."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from captum.attr import LayerGradCam
from torch import Tensor, nn

import hookscope
from hookscope.commands.attribute.cams import CAMS, grad_cam, grad_cam_plus_plus, hires_cam, layer_cam
from tests import networks as small

# Two channels of 1 x 2, and their gradients.
ACTIVATION = torch.tensor([[[[1.0, 2.0]], [[3.0, -1.0]]]])
GRADIENT = torch.tensor([[[[2.0, 0.0]], [[-1.0, -3.0]]]])


def test_grad_cam_weighs_channels_by_their_mean_gradient() -> None:
    # Means 1 and -2: 1 - 6 is cut off, 2 + 2 stays.
    assert grad_cam(ACTIVATION, GRADIENT).tolist() == [[[0.0, 4.0]]]


def test_layer_cam_weighs_each_place_by_its_positive_gradient() -> None:
    assert layer_cam(ACTIVATION, GRADIENT).tolist() == [[[2.0, 0.0]]]


def test_hires_cam_keeps_signs() -> None:
    assert hires_cam(ACTIVATION, GRADIENT).tolist() == [[[2.0 - 3.0, 3.0]]]


class Normed(nn.Module):
    """Each place's channels are normalised: no factor of a place changes the scores, so that sum_k g_k A_k is 0."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.conv, self.norm, self.head = nn.Conv2d(3, 64, 4, 4), nn.LayerNorm(64, eps=1e-12), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.norm(self.conv(x).permute(0, 2, 3, 1)).relu().mean((1, 2)))
        return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hires_cam_before_a_layer_norm_is_zero_and_no_map_of_rounding(dtype: torch.dtype) -> None:
    network, x = Normed().to(dtype), torch.rand(2, 3, 32, 32)
    before = hookscope.attribute(network, x, method="hires-cam", layer="conv", target=1)
    assert not any(heat_map.values.any() for heat_map in before.maps)
    assert all("0 everywhere but for rounding" in warning for warning in before.warnings)
    assert len(before.warnings) == 2
    after = hookscope.attribute(network, x, method="hires-cam", layer="norm", target=1, sanity="none")
    assert all(heat_map.values.all() for heat_map in after.maps)


def test_hires_cam_with_nan_or_infinities_is_not_said_to_cancel() -> None:
    for value in (torch.nan, torch.inf):
        assert not hires_cam(ACTIVATION * value, GRADIENT).isfinite().any()


def test_grad_cam_plus_plus_is_the_formula_of_the_paper() -> None:
    # g^2 / (2 g^2 + g^3 sum A) is 4 / (8 + 8 * 3) in the only place with a positive gradient; its weight is 2 / 8.
    assert grad_cam_plus_plus(ACTIVATION, GRADIENT).tolist() == [[[0.25, 0.5]]]


def test_grad_cam_plus_plus_is_zero_where_its_formula_divides_by_zero() -> None:
    # 2 + g sum A is 0.
    assert grad_cam_plus_plus(torch.tensor([[[[-1.0, 0.0]]]]), torch.tensor([[[[2.0, 0.0]]]])).tolist() == [
        [[0.0, 0.0]]
    ]


@pytest.mark.parametrize("method", CAMS)
def test_a_map_of_no_gradient_is_zero(method: str) -> None:
    assert not CAMS[method](ACTIVATION, torch.zeros_like(ACTIVATION)).any()


class Head(nn.Module):
    """One layer, mean pooling and a linear head: C3 of the textbook cases in numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 1, bias=False)
        self.fc = nn.Linear(2, 2)
        with torch.no_grad():
            self.conv.weight.copy_(torch.tensor([1.0, -1.0]).reshape(2, 1, 1, 1))
            self.fc.weight.copy_(torch.tensor([[4.0, 8.0], [0.0, -4.0]]))
            self.fc.bias.copy_(torch.tensor([1.0, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.conv(x).mean((2, 3)))


def test_every_number_of_a_network_with_mean_pooling_and_a_linear_head() -> None:
    picture = torch.tensor([[[[1.0, 2.0], [3.0, 6.0]]]])
    run = hookscope.attribute(Head(), picture, target="0,1,1-0", method="hires-cam", sanity="none")
    # The mean of the picture is 3, so the scores are 4*3 - 8*3 + 1 and 4*3 + 2. Gradients are the weights / 4.
    assert [(heat_map.target.label, heat_map.target.score) for heat_map in run.maps] == [
        ("class 0", -11.0),
        ("class 1", 14.0),
        ("class 1 - class 0", 25.0),
    ]
    assert run.maps[0].values.tolist() == [[-1.0, -2.0], [-3.0, -6.0]]  # (4 - 8) / 4 times the picture
    assert run.maps[1].values.tolist() == [[1.0, 2.0], [3.0, 6.0]]
    assert run.maps[2].values.tolist() == [[2.0, 4.0], [6.0, 12.0]]
    # What HiResCAM promises: a map adds up to the score less its bias.
    assert [float(heat_map.values.sum()) for heat_map in run.maps] == [-12.0, 12.0, 24.0]
    # Grad-CAM keeps what speaks for the class: nothing does for class 0.
    cams = hookscope.attribute(Head(), picture, target="0,1", sanity="none")
    assert cams.maps[0].values.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert cams.warnings == ("The map of 'class 0' at conv for tensor is 0 everywhere: nothing there speaks for it.",)
    assert cams.maps[1].values.tolist() == [[1.0, 2.0], [3.0, 6.0]]


def eager_relus(network: nn.Module) -> nn.Module:
    """Let no activation overwrite what it is given: other libraries would see it overwritten."""
    for module in network.modules():
        if isinstance(module, nn.ReLU | nn.ReLU6):
            module.inplace = False
    return network.eval()


CNNS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "resnet18, inside": (small.vision("resnet18"), "layer3.0.bn2"),
    "mobilenet_v2": (small.vision("mobilenet_v2"), "features.7"),
    "convnext": (small.small_convnext, "features.3"),
}


@pytest.mark.parametrize("name", CNNS)
def test_grad_cam_is_captum_s_where_nothing_works_in_place(name: str) -> None:
    build, layer = CNNS[name]
    torch.manual_seed(0)
    network = eager_relus(build())
    pictures = torch.randn(2, 3, 64, 64)
    run = hookscope.attribute(network, pictures, target=3, layer=layer, sanity="none")
    by_captum = LayerGradCam(network, network.get_submodule(layer)).attribute(pictures, 3, relu_attributions=True)
    for heat_map, expected in zip(run.maps, by_captum.detach().squeeze(1).numpy(), strict=True):
        np.testing.assert_allclose(heat_map.values, expected, rtol=1e-4, atol=1e-6 * expected.max())
        assert expected.any()


@pytest.mark.parametrize(
    ("method", "layer"),
    [
        *(("grad-cam", "conv1"), ("grad-cam++", "bn1"), ("layer-cam", "layer1.0.bn1"), ("hires-cam", "layer4")),
    ],
)
def test_layers_that_are_overwritten_keep_what_they_returned(layer: str, method: str) -> None:
    """In torchvision's resnet, ReLU overwrites the output of every batch normalisation."""
    torch.manual_seed(0)
    network = torchvision.models.resnet18(weights=None).eval()
    picture = torch.randn(1, 3, 64, 64)
    run = hookscope.attribute(network, picture, target=3, layer=layer, method=method, sanity="none")
    kept: list[Tensor] = []

    def keep(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        kept.append(output)
        return output.clone()  # which is overwritten in its place

    with network.get_submodule(layer).register_forward_hook(keep):
        score = network(picture)[0, 3]
    (gradient,) = torch.autograd.grad(score, kept)
    expected = CAMS[method](kept[0].detach(), gradient)[0].numpy()
    np.testing.assert_allclose(run.maps[0].values, expected, rtol=1e-4, atol=1e-6 * np.abs(expected).max())
    assert expected.any()
    assert run.maps[0].target.score == pytest.approx(score.item(), rel=1e-5)


def test_the_default_layer_s_map_is_that_of_the_same_layer_given() -> None:
    torch.manual_seed(0)
    network = torchvision.models.resnet18(weights=None)
    pictures = torch.randn(3, 3, 64, 64)
    default = hookscope.attribute(network, pictures, target="3,4", sanity="none")
    inputs = hookscope.attribute(network, pictures, target="3,4", layer="layer4", sanity="none")
    assert [heat_map.layer for heat_map in default.maps] == ["layer4"] * 6
    for one, other in zip(default.maps, inputs.maps, strict=True):
        assert (one.input_index, one.target) == (other.input_index, other.target)
        np.testing.assert_allclose(one.values, other.values, rtol=1e-5, atol=1e-7)
