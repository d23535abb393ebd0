"""A small network with every kind of thing to look at."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Small(nn.Module):
    """Two convolutions, a ReLU as a function, and a linear head on means."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pool(F.relu(self.second(torch.relu(self.first(x))))).flatten(1))
