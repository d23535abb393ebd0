"""Maps lie where the picture is: properties over many networks, of torchvision and timm.

A network whose kernels are left-right symmetric, and that knows no positions, gives the mirrored map of a mirrored
picture, if its strides meet the picture's size: then the maps must agree to the last digits. Others, with windows that
are shifted and paddings on one side, must move their peak by one cell when what is in the picture moves by one stride.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import timm
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import hookscope
from tests import networks as small
from tests.networks import vision

Build = Callable[[], nn.Module]

# Names of parameters that tell places apart.
_POSITIONS = ("pos_embed", "relative_position", "rel_pos")


def of_timm(name: str, **options: Any) -> Build:
    return lambda: timm.create_model(name, pretrained=False, **options)


def alexnet() -> nn.Module:
    """Return an AlexNet whose first linear layer sees a mirrored picture as the picture."""
    network = torchvision_model("alexnet", num_classes=5)
    return with_mirrored_columns(network, network.classifier[1], 6)


def torchvision_model(name: str, **options: Any) -> nn.Module:
    return vision(name, **options)()


def with_mirrored_columns(network: nn.Module, linear: nn.Linear, side: int) -> nn.Module:
    with torch.no_grad():
        by_place = linear.weight.view(len(linear.weight), -1, side, side)
        linear.weight.copy_(((by_place + by_place.flip(-1)) / 2).flatten(1))
    return network


# Sides of pictures with which every stride begins and ends at the same distance from the edges.
MIRRORED: dict[str, tuple[Build, int]] = {
    "resnet18": (vision("resnet18"), 97),
    "mobilenet_v2": (vision("mobilenet_v2"), 97),
    "googlenet": (vision("googlenet", init_weights=False, aux_logits=False), 109),
    "convnext": (small.small_convnext, 64),
    "vit": (small.small_vit, 112),
    "fcn": (small.small_fcn, 97),
    "timm dinov2 with registers": (of_timm("vit_small_patch14_reg4_dinov2", img_size=70, depth=2), 70),
    "timm beit": (of_timm("beit_base_patch16_224", img_size=64, depth=2, embed_dim=96, num_heads=2), 64),
}

# With their strides.
MOVED: dict[str, tuple[Build, int, int]] = {
    "swin": (small.small_swin, 224, 32),
    "maxvit": (small.small_maxvit, 128, 8),
    "timm pvt": (of_timm("pvt_v2_b0"), 224, 32),
    "timm vit": (of_timm("vit_tiny_patch16_224", img_size=64, depth=2), 64, 16),
}


def without_sides(build: Build, pictures: Tensor) -> nn.Module:
    """Build a network, make its kernels symmetric and its places alike, and let it get used to pictures."""
    torch.manual_seed(0)
    network = build()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.dim() == 4:
                parameter.copy_((parameter + parameter.flip(-1)) / 2)
            if any(part in name for part in _POSITIONS):
                parameter.zero_()
            if "head" in name and parameter.dim() == 2 and not parameter.any():  # some begin with zeros: no gradient
                nn.init.normal_(parameter, std=0.02)
        network.eval()
        for module in network.modules():
            if isinstance(module, _BatchNorm):
                module.train()
                module.momentum = None
        network(pictures)
    return network.eval()


def blurred_noise(count: int, side: int) -> Tensor:
    coarse = torch.randn(count, 3, side // 8 + 1, side // 8 + 1, generator=torch.Generator().manual_seed(1))
    return nn.functional.interpolate(coarse, size=(side, side), mode="bicubic")


def spearman(first: NDArray[Any], second: NDArray[Any]) -> float:
    ranks = [case.ravel().argsort().argsort() for case in (first, second)]
    return float(np.corrcoef(*ranks)[0, 1])


@pytest.mark.parametrize("name", MIRRORED)
@pytest.mark.sample("resnet18", "mobilenet_v2", "vit", "fcn", "timm beit", "timm dinov2 with registers")
def test_the_map_of_a_mirrored_picture_is_the_mirrored_map(name: str) -> None:
    build, side = MIRRORED[name]
    picture = blurred_noise(1, side)
    both = torch.cat([picture, picture.flip(-1)])
    network = without_sides(build, both)
    run = hookscope.attribute(network, both, target=1, method="hires-cam", sanity="none")
    plain, mirrored = (heat_map.values for heat_map in run.maps)
    assert np.abs(plain).max() > 0
    assert plain.size > 1
    assert spearman(plain, mirrored[:, ::-1]) >= 0.99
    np.testing.assert_allclose(mirrored[:, ::-1], plain, atol=1e-3 * np.abs(plain).max())
    assert spearman(plain, plain[:, ::-1]) < 0.98  # or the test could not fail


@pytest.mark.parametrize("name", MOVED)
@pytest.mark.sample("swin", "timm vit", "maxvit")
def test_the_peak_moves_with_what_is_in_the_picture(name: str) -> None:
    build, side, stride = MOVED[name]
    network = without_sides(build, blurred_noise(2, side))
    cells = side // stride
    row, column = cells // 2, cells // 2 - 1
    thing = 2 * nn.functional.interpolate(
        torch.randn(1, 3, 4, 4, generator=torch.Generator().manual_seed(0)), (stride, stride)
    )
    pictures = torch.full((4, 3, side, side), 0.01)
    places = ((row, column), (row, column + 1), (row - 1, column))
    for picture, (at_row, at_column) in zip(pictures, places, strict=False):
        picture[:, at_row * stride :, at_column * stride :][:, :stride, :stride] = thing[0]
    run = hookscope.attribute(network, pictures, target=1, method="hires-cam", sanity="none")
    maps = [heat_map.values for heat_map in run.maps]
    assert maps[0].shape == (cells, cells)
    # What the thing adds to the map of the empty picture.
    peaks = [np.unravel_index(np.abs(heat_map - maps[-1]).argmax(), heat_map.shape) for heat_map in maps[:-1]]
    first = peaks[0]
    assert peaks == [first, (first[0], first[1] + 1), (first[0] - 1, first[1])]
    assert max(abs(first[0] - row), abs(first[1] - column)) <= 1
