"""A block leaves a network's buffers, modes and random states as they were, whatever ran inside."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hookscope.preservation import preserved


class Buffers(nn.Module):
    """Buffers of many kinds, several of them small and alike."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in {
            "mean": torch.randn(8),
            "variance": torch.rand(8),
            "scalar": torch.tensor(3.0),
            "count": torch.tensor(7),
            "index": torch.arange(12).reshape(3, 4),
            "turned": torch.randn(5, 6).t(),
            "broken": torch.tensor([1.0, float("nan")]),
            "empty": torch.empty(0, 3),
            "large": torch.randn(300, 300),
            "wide": torch.randn(4).double(),
            "mask": torch.tensor([True, False]),
            "few": torch.eye(3).to_sparse(),
            "waves": torch.randn(3, dtype=torch.complex64),
        }.items():
            self.register_buffer(name, value)
        self.register_buffer("none", None)


def seen(network: nn.Module) -> dict[str, tuple[int, tuple[int, ...], torch.dtype, bytes]]:
    """Return each buffer's identity, strides, dtype and values."""
    found = {}
    for name, buffer in network.named_buffers():
        dense = buffer.to_dense()
        strides = () if buffer.is_sparse else buffer.stride()
        found[name] = (id(buffer), strides, buffer.dtype, dense.numpy().tobytes())
    return found


def write(name: str) -> Callable[[nn.Module], object]:
    return lambda network: network.get_buffer(name).add_(1)


def write_through_data(name: str) -> Callable[[nn.Module], object]:
    return lambda network: network.get_buffer(name).data.mul_(3)


def replace(name: str) -> Callable[[nn.Module], object]:
    return lambda network: setattr(network, name, torch.zeros(2))


def widen(network: nn.Module) -> None:
    network.get_buffer("mean").data = torch.zeros(8, dtype=torch.float64)
    network.get_buffer("mean").data = torch.zeros(8)


@pytest.mark.parametrize(
    "change",
    [
        *[write(name) for name in ("mean", "scalar", "count", "index", "turned", "large", "wide", "waves")],
        *[write_through_data(name) for name in ("variance", "count", "turned", "large")],
        *[replace(name) for name in ("mean", "count", "large", "few", "none")],
        widen,
        lambda network: network.register_buffer("new", torch.ones(3)),
        lambda network: delattr(network, "mean"),
        lambda network: network.get_buffer("mask").logical_not_(),
        lambda _network: None,
    ],
)
def test_buffers_are_put_back(change: Callable[[nn.Module], object]) -> None:
    network = nn.Sequential(Buffers(), Buffers())
    before = seen(network)
    with preserved(network, seed=0):
        change(network[1])
    assert seen(network) == before
    assert dict(network[1].named_buffers()).keys() == dict(network[0].named_buffers()).keys()
    assert network[1].none is None


def drawn() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())


def test_random_states_go_back_to_the_beginning_and_to_a_mark() -> None:
    network = Buffers()
    outside = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with preserved(network, seed=3) as state:
        first, second = drawn(), drawn()
        network.mean.add_(1)
        state.rewind()
        assert (drawn(), drawn()) == (first, second)
        network.mean.add_(1)
        state.mark()
        marked, later = network.mean.clone(), drawn()
        network.mean.mul_(5)
        state.rewind()
        assert drawn() == later
        assert torch.equal(network.mean, marked)
    assert torch.equal(torch.get_rng_state(), outside[0])
    assert random.getstate() == outside[1]
    assert np.random.get_state()[1].tolist() == outside[2]
    with preserved(network, seed=3):
        assert drawn() == first


class Restless(nn.Module):
    """Its change of mode draws random numbers and writes to a buffer."""

    level: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.zeros(2))

    def train(self, mode: bool = True) -> "Restless":
        self.level.add_(torch.rand(2))
        return super().train(mode)


def test_the_beginning_comes_after_the_change_of_mode() -> None:
    network = Restless()
    begun = network.level.clone()
    assert network.training
    with preserved(network, seed=1) as state:
        level, first = network.level.clone(), drawn()
        assert not torch.equal(level, begun)
        network.level.zero_()
        state.rewind()
        assert torch.equal(network.level, level)
        assert drawn() == first
    assert torch.equal(network.level, begun)
    assert network.training
