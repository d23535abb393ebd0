"""A small network and pictures for it."""

import pytest
import torch
from torch import Tensor, nn

from tests.commands.attribute.small_network import Small


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    return Small()


@pytest.fixture
def pictures() -> Tensor:
    return torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
