"""Gratings of two orientations and three colours, as labelled pictures, too, and a network that tells them.

Its weights are in gratings.safetensors, as training ends elsewhere on each kind of processor; `python -m
tests.commands.check.checkpoints.gratings` trains it anew.
"""

import math
from itertools import pairwise
from pathlib import Path

import safetensors.torch
import torch
from PIL import Image
from torch import Tensor, nn

_WEIGHTS = Path(__file__).with_suffix(".safetensors")
CLASSES = [f"{colour} {orientation}" for orientation in ("across", "upright") for colour in ("red", "green", "blue")]
PREPARATION = {"resize": "16", "crop": "16", "mean": "0.5,0.5,0.5", "std": "0.125,0.125,0.125"}  # as for the training


def network() -> nn.Module:
    """Return five blocks of convolution, BatchNorm and ReLU, and a linear head; for pictures of 16x16 pixels."""
    blocks = [
        (nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU())
        for before, after in pairwise([3, 16, 32, 32, 32, 32])
    ]
    pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, len(CLASSES)))
    return nn.Sequential(*(layer for block in blocks for layer in block), *pooled)


def gratings(label: Tensor) -> Tensor:
    """Return a noisy picture of random phase for each label, (N, 3, 16, 16)."""
    count = len(label)
    grid = torch.stack(torch.meshgrid(*[torch.linspace(-3, 3, 16)] * 2, indexing="ij"))
    angle = (label // 3) * math.pi / 2 + torch.randn(count) * 0.2
    wave = torch.stack([angle.cos(), angle.sin()], 1).mul(2) @ grid.flatten(1) + torch.rand(count, 1) * 6
    colour = nn.functional.one_hot(label % 3, 3) + torch.randn(count, 3) * 0.2
    return colour[:, :, None, None] * wave.sin().view(-1, 1, 16, 16) + 0.2 * torch.randn(count, 3, 16, 16)


def trained_on_gratings() -> nn.Module:
    trained = network()
    trained.load_state_dict(safetensors.torch.load_file(_WEIGHTS))
    return trained.eval()


def train() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        trained = network()
        optimiser = torch.optim.AdamW(trained.parameters(), 1e-2, weight_decay=1e-3)
        for _ in range(500):
            label = torch.randint(len(CLASSES), (32,))
            loss = nn.functional.cross_entropy(trained(gratings(label)), label)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        assert loss.item() < 0.5
    return trained.eval()


def draw_gratings(folder: Path, count: int) -> None:
    """Write PNGs into a folder for each class, in the order of their indices."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for index, name in enumerate(CLASSES):
            (folder / f"{index} {name}").mkdir(parents=True)
            for number, picture in enumerate(gratings(torch.full((count,), index))):
                pixels = ((picture / 8 + 0.5).clamp(0, 1) * 255).round().byte().permute(1, 2, 0)
                Image.fromarray(pixels.numpy()).save(folder / f"{index} {name}" / f"{number}.png")


if __name__ == "__main__":
    safetensors.torch.save_file(train().state_dict(), _WEIGHTS)
