"""Coloured squares in class folders, and a small network that has learnt to name their colours."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

COLOURS = {"blue": (40, 60, 220), "green": (40, 200, 60), "red": (220, 50, 40), "white": (235, 235, 235)}

SOURCE = """
from torch import nn


class Colours(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.conv(x).relu().mean((2, 3)))
"""


def draw_squares(folder: Path, count: int = 20, odd: int = 2) -> None:
    """Write PNGs of 12x12 pixels: `count` of each colour, of which the last `odd` show the next colour instead."""
    random = np.random.default_rng(0)
    names = [*COLOURS]
    for place, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            shown = names[(place + (number >= count - odd)) % len(names)]
            pixels = random.integers(0, 120, (12, 12, 3))
            top, left = random.integers(0, 5, 2)
            pixels[top : top + 7, left : left + 7] = COLOURS[shown] + random.integers(-20, 20, 3)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number}.png")


def read_squares(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all pictures as inputs, (N, 3, 12, 12) from 0 to 1, and their classes, by nothing but Pillow and torch."""
    pictures, classes = [], []
    for index, name in enumerate(sorted(COLOURS)):
        for path in sorted((folder / name).iterdir()):
            with Image.open(path) as file:
                pictures.append(torch.from_numpy(np.array(file)).permute(2, 0, 1).float() / 255)
            classes.append(index)
    return torch.stack(pictures), torch.tensor(classes)


def colours() -> nn.Module:
    namespace: dict[str, type[nn.Module]] = {}
    exec(SOURCE, namespace)
    return namespace["Colours"]()


def trained_on(folder: Path) -> nn.Module:
    """Return the network after enough steps to tell the colours."""
    pictures, classes = read_squares(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = colours()
        optimiser = torch.optim.Adam(network.parameters(), 0.02)
        for _ in range(150):
            optimiser.zero_grad()
            nn.functional.cross_entropy(network(pictures), classes).backward()
            optimiser.step()
    return network.eval().requires_grad_(requires_grad=False)
