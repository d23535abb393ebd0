"""A network that tells squares by their colour, known by construction, and pictures for it."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

CLASSES = ("blue", "green", "red")
_CHANNEL = {"red": 0, "green": 1, "blue": 2}


class Colours(nn.Module):
    """Scores are how far the mean of a colour is above that of the others; without colour it is blue."""

    def __init__(self) -> None:
        super().__init__()
        self.smooth = nn.Conv2d(3, 3, 3, padding=1, groups=3, bias=False)
        self.compare = nn.Conv2d(3, 3, 1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(3, 3)
        with torch.no_grad():
            self.smooth.weight.fill_(1 / 9)
            opposed = 1.5 * torch.eye(3) - 0.5  # a colour less the mean of the two others
            self.compare.weight[:] = opposed.view(3, 3, 1, 1)
            self.compare.bias.zero_()
            self.head.weight[:] = 40 * torch.eye(3).flip(0)  # classes in sorted order: blue, green, red
            self.head.bias[:] = torch.tensor([1.0, 0.0, 0.0])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.compare(self.smooth(x))).flatten(1))


def square(colour: str, random: np.random.Generator) -> NDArray[np.uint8]:
    """Return a coloured square in the middle of dark grey, (32, 32, 3), with noise and of a varying shade."""
    picture = random.normal(40, 8, (32, 32, 3))
    shade = random.normal(150, 12)
    picture[8:24, 8:24] = random.normal(70, 8, (16, 16, 3))
    picture[8:24, 8:24, _CHANNEL[colour]] += shade
    return picture.clip(0, 255).astype(np.uint8)


def write_pictures(folder: Path, per_class: int, seed: int = 0) -> None:
    """Write pictures into a folder for each class."""
    random = np.random.default_rng(seed)
    for colour in CLASSES:
        (folder / colour).mkdir(parents=True, exist_ok=True)
        for number in range(per_class):
            Image.fromarray(square(colour, random)).save(folder / colour / f"{number:03}.png")
