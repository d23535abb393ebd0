"""The small networks that the frozen commands run on. Cases copy this file and name its functions."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()),
        *(nn.Conv2d(6, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)),
    )


class ViT(nn.Module):
    """A class token and 4 x 4 patches of 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 12, 8, 8)
        self.class_token = nn.Parameter(torch.randn(1, 1, 12))
        self.positions = nn.Parameter(torch.randn(1, 17, 12))
        layer = nn.TransformerEncoderLayer(12, 3, 24, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(x), -1, -1), tokens], 1) + self.positions
        scores: Tensor = self.head(self.encoder(tokens)[:, 0])
        return scores


class UNet(nn.Module):
    """One way down, one up, and what goes around both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.down = nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.last = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        around = self.first(x).relu()
        inner = self.up(self.down(around).relu())
        masks: Tensor = self.last(torch.cat([around, inner], 1))
        return masks


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(4, 6, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.recurrent(x)
        scores: Tensor = self.head(states[:, -1])
        return scores


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 5)
        self.right = nn.Linear(3, 5)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        total: Tensor = self.left(left) + self.right(right)
        return total.tanh()


class Functions(nn.Module):
    """No modules inside: parameters and functions only."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(4, 3, 3, 3) / 5)
        self.matrix = nn.Parameter(torch.randn(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.relu(F.conv2d(x, self.kernel)).mean((2, 3)), self.matrix)


def dead() -> nn.Module:
    """All channels of a ReLU but one are below zero."""
    network = cnn()
    with torch.no_grad():
        network.get_parameter("1.bias")[1:] = -100.0
    return network


class Logarithm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean()).log()


def nan() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), Logarithm(), nn.Conv2d(4, 2, 3), nn.Flatten(), nn.Linear(2 * 28 * 28, 5))


vit, unet, lstm, two_inputs, functions = ViT, UNet, LSTM, TwoInputs, Functions


def changed(build: Callable[[], nn.Module]) -> nn.Module:
    """The same network, but its first parameter."""
    network = build()
    with torch.no_grad():
        next(network.parameters()).mul_(1.5)
    return network


cnn_changed, vit_changed, unet_changed = partial(changed, cnn), partial(changed, ViT), partial(changed, UNet)
lstm_changed, two_inputs_changed = partial(changed, LSTM), partial(changed, TwoInputs)
functions_changed, dead_changed, nan_changed = (
    partial(changed, Functions),
    partial(changed, dead),
    partial(changed, nan),
)
