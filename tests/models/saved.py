"""Small networks of nine families, saved in the ways that take trust to load, and what their calls show."""

import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.efficientnet import EfficientNet, MBConvConfig
from torchvision.models.resnet import BasicBlock, ResNet
from torchvision.models.video.resnet import BasicBlock as VideoBlock
from torchvision.models.video.resnet import BasicStem, Conv3DSimple, VideoResNet

from hookscope.checkpoints.weights_files import WeightsFiles
from hookscope.models.construction import LoadedModel
from hookscope.models.exported import load_program
from tests.networks import TORCHVISION, Network, image, small_swin, small_vit


def dense() -> nn.Module:
    return torchvision.models.DenseNet(4, (2, 1, 1, 2), 8, bn_size=2, num_classes=5)


def convnext() -> nn.Module:
    return ConvNeXt([CNBlockConfig(8, 12, 1), CNBlockConfig(12, None, 2)], stochastic_depth_prob=0.1, num_classes=5)


def efficientnet() -> nn.Module:
    blocks = [MBConvConfig(1, 3, 1, 8, 8, 1, 1.0, 1.0), MBConvConfig(4, 5, 2, 8, 12, 2, 1.0, 1.0)]
    return EfficientNet(blocks, dropout=0.2, num_classes=5, last_channel=32)


def video() -> nn.Module:
    return VideoResNet(VideoBlock, [Conv3DSimple] * 4, [1, 1, 1, 1], BasicStem, num_classes=5)


SEVEN: dict[str, Network] = {
    "resnet": Network(lambda: ResNet(BasicBlock, [1, 1, 1, 1], num_classes=5), image(2, 3, 32, 48)),
    "densenet": Network(dense, image(2, 3, 32, 32)),
    "mobilenet_v3": TORCHVISION["mobilenet_v3_small"],
    "efficientnet": Network(efficientnet, image(1, 3, 32, 32)),
    "convnext": Network(convnext, image(1, 3, 32, 32)),
    "swin": Network(partial(small_swin), image(1, 3, 64, 64)),
    "vit": Network(small_vit, image(2, 3, 112, 112)),
}

NINE: dict[str, Network] = {
    **SEVEN,
    "video resnet": Network(video, image(1, 3, 4, 32, 32)),
    "lraspp": TORCHVISION["lraspp_mobilenet_v3_large"],
}


@contextmanager
def quiet() -> Iterator[None]:
    """Let torch say what it likes about saving."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def save_scripted(network: nn.Module, _args: tuple[Any, ...], path: Path) -> None:
    with quiet():
        torch.jit.save(torch.jit.script(network), path)


def save_traced(network: nn.Module, args: tuple[Any, ...], path: Path) -> None:
    with quiet():
        torch.jit.save(torch.jit.trace(network, args, strict=False, check_trace=False), path)


def save_exported(network: nn.Module, args: tuple[Any, ...], path: Path) -> None:
    with quiet(), path.open("wb") as file:
        torch.export.save(torch.export.export(network, args), file)


def save_pickled(network: nn.Module, _args: tuple[Any, ...], path: Path) -> None:
    torch.save(network, path)


def load_script(network: nn.Module, folder: Path, args: tuple[Any, ...] | None = None) -> LoadedModel:
    """Save a network as TorchScript, traced if there is something to trace it with, and load it."""
    if args is None:
        save_scripted(network.eval(), (), folder / "model.pt")
    else:
        save_traced(network.eval(), args, folder / "model.pt")
    return load_program(WeightsFiles.at(folder / "model.pt"))


SAVERS: dict[str, Callable[[nn.Module, tuple[Any, ...], Path], None]] = {
    "scripted": save_scripted,
    "traced": save_traced,
    "exported": save_exported,
    "pickled": save_pickled,
}


def build(network: Network) -> tuple[nn.Module, tuple[Any, ...]]:
    """Return a network in eval mode and what to call it with, the same every time.

    No parameter is zero throughout, as the head of a Vision Transformer is at first: no gradient would pass it.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module, args = network.build().eval(), network.args()
        with torch.no_grad():
            for parameter in module.parameters():
                if not parameter.any():
                    parameter.normal_(std=0.1)
        return module, args


def assert_near(tensor: Tensor | None, expected: Tensor | None, tolerance: float) -> None:
    """Compare to within `tolerance` of the largest value: activations of random networks can be tiny."""
    assert tensor is not None
    assert expected is not None
    assert tensor.shape == expected.shape
    assert torch.isfinite(expected).all()
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    assert torch.all((tensor - expected).abs() <= tolerance * scale)


def tensors_of(value: Any) -> list[Tensor]:
    """List the tensors of an output in order: traces and exports flatten it and leave out what is None."""
    if isinstance(value, Tensor):
        return [value]
    parts = list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else []
    return [tensor for part in parts for tensor in tensors_of(part)]


Key = tuple[str, int, int]
"""Layer, call, position among the output's tensors."""


@dataclass
class Witness:
    """What plain hooks, none of them hookscope's, saw of every call of every module, as calls finished.

    Activations are clones; calls in `passed_through` returned an input as it was.
    """

    activations: dict[Key, Tensor] = field(default_factory=dict)
    gradients: dict[Key, Tensor] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    passed_through: set[Key] = field(default_factory=set)


def witness(network: nn.Module, args: tuple[Any, ...]) -> tuple[Witness, list[Tensor]]:
    """Run a network and differentiate a random projection of its outputs.

    Returns:
        What was seen, and the outputs.
    """
    seen, calls, handles = Witness(), dict[str, int](), []

    def after(layer: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            call = calls.get(layer, 0)
            calls[layer] = call + 1
            seen.kinds[layer] = type(module).__name__
            for position, tensor in enumerate(tensors_of(output)):
                key = (layer, call, position)
                seen.activations[key] = tensor.detach().clone()
                if any(tensor is each for each in tensors_of(inputs)):
                    seen.passed_through.add(key)
                elif tensor.requires_grad:
                    tensor.register_hook(lambda gradient, key=key: seen.gradients.__setitem__(key, gradient.clone()))

        return hook

    for layer, module in network.named_modules():
        handles.append(module.register_forward_hook(after(layer)))
    try:
        outputs = tensors_of(network(*args))
        generator = torch.Generator().manual_seed(1)
        loss = sum((output * torch.randn(output.shape, generator=generator)).sum() for output in outputs)
        assert isinstance(loss, Tensor)
        network.zero_grad()
        loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    return seen, [output.detach() for output in outputs]


def draw() -> tuple[float, float, float]:
    """Draw a number of each library's."""
    return torch.rand(()).item(), float(np.random.rand()), random.random()


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@contextmanager
def random_numbers_untouched() -> Iterator[None]:
    """Check that torch's, NumPy's and Python's random numbers go on as if the block were not there."""
    seed_all(1)
    expected = draw()
    seed_all(1)
    yield
    assert draw() == expected
