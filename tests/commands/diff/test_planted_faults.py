"""A fault planted at each place of a network: the first layer that shows it, and where it begins, are named."""

import copy
import types
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import mobilenetv3
from torchvision.models.resnet import BasicBlock, ResNet
from torchvision.models.vision_transformer import VisionTransformer

import hookscope

Fault = tuple[str, Callable[[nn.Module], None]]
"""Name of the module that it is in, and what plants it."""


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """Return a network whose BatchNorms have other statistics than none."""
    torch.manual_seed(0)
    network = build().eval()
    for module in network.modules():
        if isinstance(module, VisionTransformer):
            nn.init.normal_(module.heads.head.weight)  # zeros otherwise
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-0.2, 0.2)
            module.running_var.uniform_(0.5, 1.5)
    return network


def mobilenet() -> nn.Module:
    rows = [
        mobilenetv3.InvertedResidualConfig(16, 3, 16, 16, True, "RE", 2, 1, 1.0),
        mobilenetv3.InvertedResidualConfig(16, 3, 64, 16, True, "HS", 1, 1, 1.0),
        mobilenetv3.InvertedResidualConfig(16, 5, 64, 24, False, "HS", 2, 1, 1.0),
    ]
    return mobilenetv3.MobileNetV3(rows, 32, num_classes=10)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet of basic blocks": lambda: ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10),
    "mobilenet": mobilenet,
    "vision transformer": lambda: VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=10),
}


def scaled(module: nn.Module) -> None:
    with torch.no_grad():
        next(iter(module._parameters.values())).mul_(1.01)  # type: ignore[union-attr]


def in_half_precision(module: nn.Module) -> None:
    plain = module.forward

    def forward(_self: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return plain(x).float()

    module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]


def swapped(module: nn.Module) -> None:
    replaced = nn.LeakyReLU(0.1, inplace=bool(getattr(module, "inplace", False)))
    module.forward = replaced.forward  # type: ignore[method-assign]


def padded_otherwise(module: nn.Module) -> None:
    assert isinstance(module, nn.Conv2d)
    module.padding_mode = "replicate"
    module._reversed_padding_repeated_twice = [each for each in reversed(module.padding) for _ in range(2)]  # type: ignore[arg-type]


def without_residual(module: nn.Module) -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            self.downsample(x)
        return self.relu(out)

    module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]


ACTIVATIONS = (nn.ReLU, nn.Hardswish, nn.GELU, nn.Hardsigmoid)


def faults(network: nn.Module) -> Iterator[Fault]:
    """Give every fault that can be planted in a network, with where it is."""
    for name, module in network.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear | nn.BatchNorm2d | nn.LayerNorm) and "out_proj" not in name:
            yield name, scaled
        if isinstance(module, nn.Conv2d | nn.Linear) and "out_proj" not in name:
            yield name, in_half_precision
        if isinstance(module, ACTIVATIONS):
            yield name, swapped
        if isinstance(module, nn.Conv2d) and any(module.padding):
            yield name, padded_otherwise
        if isinstance(module, BasicBlock):
            yield name, without_residual


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.sample("vision transformer")
def test_each_fault_is_named_where_it_is_planted(name: str) -> None:
    network = seeded(NETWORKS[name])
    pictures = torch.randn(1, 3, 32, 32)
    missed = []
    planted = 0
    for layer, plant in faults(network):
        faulty = copy.deepcopy(network)
        plant(faulty.get_submodule(layer))
        result = hookscope.diff(network, faulty, pictures, shadow=planted % 4 == 0)
        planted += 1
        named = [difference.layer for difference in result.first_differences]
        if named != [layer]:
            missed.append((layer, plant.__name__, named))
    assert planted > 18
    assert missed == []
