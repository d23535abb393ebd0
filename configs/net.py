"""Small networks for the commands in the README: `configs/net.py:build` and the others."""

import torch
from torch import nn


def build() -> nn.Module:
    """Return a classifier of two classes for pictures of any size; `train.py` trains it."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 5, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 2),
    )


def with_log() -> nn.Module:
    """Return a network whose output is NaN, because it takes the logarithm of negative values."""
    return WithLog()


class WithLog(nn.Module):
    """Takes the logarithm before the ReLU that should come first."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, stride=2)
        self.head = nn.Linear(8, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return scores (N, 2) for images (N, 3, H, W)."""
        energy = torch.log(self.convolution(images))
        return self.head(torch.relu(energy).mean((2, 3)))


def transformer() -> nn.Module:
    """Return a vision transformer of two blocks that has random weights; its input is (N, 3, 64, 64)."""
    return Transformer()


class Transformer(nn.Module):
    """A class token and 8 by 8 patches of 8 by 8 pixels, in two blocks with four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 8, stride=8)
        self.class_token = nn.Parameter(torch.randn(1, 1, 32))
        self.positions = nn.Parameter(torch.randn(1, 65, 32) / 8)
        block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, 2)
        self.head = nn.Linear(32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return scores (N, 10)."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(images), -1, -1), patches], dim=1)
        return self.head(self.blocks(tokens + self.positions)[:, 0])
