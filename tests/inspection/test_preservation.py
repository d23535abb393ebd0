"""A block leaves a network and random states as they were, whatever ran inside; `stateful_networks` has many more."""

import io
import itertools
import random
import threading
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hookscope.errors import ModelError
from hookscope.inspection.forward import ForwardError
from hookscope.inspection.state.preservation import Mode, preserved
from hookscope.inspection.state.snapshot import Snapshot
from tests.inspections import inspect, inspect_gradients
from tests.networks import Written


def drawn() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())


def test_random_states_go_back_to_the_beginning_and_to_a_mark() -> None:
    network: Any = Written(lambda _net, x: x, mean=torch.randn(8))
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


# --- parameters of networks that are too large to copy ---


class Large(nn.Module):
    """Twelve megabytes of parameters, and code that may write to them."""

    def __init__(self, write: Callable[..., object]) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(1000, 3000), nn.Linear(3000, 4, bias=False)
        self.words = nn.Embedding(4, 1000)
        self.calls, self.write = 0, write

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.write(self)
        return self.body(self.head(x))


def clamp(network: Any) -> None:
    network.head.weight.data.clamp_(-0.01, 0.01)


def move_away(network: Any) -> None:
    network.head.weight.data = network.head.weight.data * 0.9


def half(tensor: Tensor) -> None:
    tensor.data *= 0.5


def one_row(network: Any) -> None:
    with torch.no_grad():
        network.head.weight[0] = 0


def some_rows(network: Any) -> None:
    with torch.no_grad():
        network.head.weight[1:3] = 0


def by_numpy(network: Any) -> None:
    network.head.weight.detach().numpy()[0] = 0


def step(network: Any) -> None:
    with torch.enable_grad():
        network.head(torch.ones(1, 1000)).sum().backward()
    network.optimiser.step()


def initialise(network: Any) -> None:
    network.apply(lambda part: nn.init.ones_(part.weight) if isinstance(part, nn.Linear) else None)


def cast(network: Any) -> None:
    network.double().float()


@pytest.mark.parametrize(
    "write", [clamp, move_away, one_row, some_rows, by_numpy, step, initialise, cast], ids=lambda write: write.__name__
)
def test_what_code_is_seen_to_write_to_is_put_back_in_a_large_network(write: Callable[..., object]) -> None:
    network: Any = Large(write)
    network.optimiser = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    before = [
        (parameter, parameter.data_ptr(), parameter._version, parameter.detach().clone())
        for parameter in network.parameters()
    ]
    with preserved(network, seed=0):
        network(torch.ones(1, 1000))
        assert any(not torch.equal(each, values) for each, _, _, values in before) or write is cast
    for parameter, address, version, values in before:
        assert (parameter.data_ptr(), parameter._version) == (address, version)
        assert torch.equal(parameter, values)
        assert parameter.grad is None
    assert network.optimiser.state == {}


def test_an_embedding_that_limits_norms_is_put_back_in_a_large_network_without_code_of_its_own() -> None:
    network = nn.Sequential(nn.Embedding(3000, 1000, max_norm=0.1), nn.Linear(1000, 4))
    before = network[0].weight.detach().clone()
    with preserved(network, seed=0):
        network(torch.tensor([1, 2]))
        assert not torch.equal(network[0].weight, before)
    assert torch.equal(network[0].weight, before)


class Caching(nn.Module):
    """It keeps its output in an attribute, as some layers of torchvision and timm keep a mask."""

    __module__ = "torchvision.models.caching"
    mask: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        self.mask = x * self.scale
        return self.mask


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_gradients_stay_where_a_network_of_known_layers_keeps_something(backward: bool) -> None:
    network = nn.Sequential(nn.Linear(3, 3), Caching())
    parameters = [*network.parameters()]
    gradients = [torch.ones_like(parameter) for parameter in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    parameters[0].requires_grad_(False)
    batch = torch.randn(2, 3)
    inspect_gradients(network, batch, "sum") if backward else inspect(network, batch)
    assert "mask" not in vars(network[1])
    assert [parameter.requires_grad for parameter in parameters] == [False, True, True]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert parameter.grad is gradient
        assert torch.equal(gradient, torch.ones_like(parameter))


def test_a_hook_that_writes_to_a_weight_of_a_large_network_is_seen() -> None:
    network = nn.Sequential(nn.Linear(1000, 3000), nn.Linear(3000, 4))
    network[1].register_forward_pre_hook(lambda module, _: module.weight.data.mul_(2))
    before = network[1].weight.detach().clone()
    with preserved(network, seed=0):
        network(torch.ones(1, 1000))
    assert torch.equal(network[1].weight, before)


def test_parameters_and_caches_of_a_large_network_are_not_copied_without_a_reason() -> None:
    network: Any = Large(lambda network: network.words.weight.data.zero_())
    network.cache = {"weights": network.head.weight, "large": torch.zeros(3_000_000), "small": torch.ones(3)}
    with preserved(network, seed=0):
        held = Snapshot([*network.modules()]).values
        copied = [held.tensors[place] for place, _ in held.single]
        copied += [held.tensors[place] for places, _ in held.joined for place in places]
        assert {*map(id, copied)} == {id(network.words.weight), id(network.cache["small"])}


def test_a_parameter_that_is_written_to_unseen_is_an_error_and_the_rest_is_put_back() -> None:
    network: Any = Large(lambda network: getattr(network.head.weight, "zero" + "_")())
    message = r"could not be restored: 'head.weight': it was written to, .* Rebuild it"
    with pytest.raises(ModelError, match=message):
        inspect(network, torch.ones(1, 1000))
    assert network.calls == 0
    network.write = interrupted
    with pytest.raises(KeyboardInterrupt) as raised:
        inspect(network, torch.ones(1, 1000))
    assert network.calls == 0
    assert "could not be restored" in raised.value.__notes__[0]


def interrupted(network: Any) -> None:
    getattr(network.head.weight, "zero" + "_")()
    raise KeyboardInterrupt


# --- what refuses ---


class Sticky(Tensor):
    """A tensor that can be copied and added to, but not written over."""

    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor) -> Self:
        made: Self = Tensor._make_wrapper_subclass(cls, near.shape, dtype=near.dtype)
        made.near = near
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), _kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "add_":
            args[0].near.add_(args[1])
            return args[0]
        if name in {"detach", "clone"}:
            return cls(getattr(args[0].near, name)())
        if name == "equal":
            return torch.equal(args[0].near, args[1].near)
        raise NotImplementedError(name)


def test_what_cannot_be_put_back_is_named_and_the_others_are() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        net.sticky.add_(1)
        net.other.add_(1)
        net.note = "left"
        return x

    network = Written(forward, sticky=Sticky(torch.ones(2)), other=torch.zeros(2))
    with pytest.raises(ModelError, match=r"restored: 'sticky': copy_\. Rebuild it"):
        inspect(network, torch.ones(1, 2))
    assert network.get_buffer("other").tolist() == [0, 0]
    assert not hasattr(network, "note")


class Refuses(nn.Module):
    """Refuses one of the modes."""

    def __init__(self, refused: bool) -> None:
        super().__init__()
        self.linear, self.refused, self.switches = nn.Linear(2, 2), refused, 0

    def train(self, mode: bool = True) -> "Refuses":
        self.switches += 1
        if mode == self.refused:
            raise ValueError("not this mode")
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_a_network_that_refuses_its_mode_is_refused_with_its_reason() -> None:
    network = nn.Sequential(nn.Dropout(), Refuses(refused=False))
    network[1].linear.weight.grad = gradient = torch.ones(2, 2)
    message = "Sequential cannot be put into eval mode: ValueError: not this mode"
    for run in (inspect, inspect_gradients):
        with pytest.raises(ModelError, match=message):
            run(network, torch.ones(1, 2))
        assert [module.training for module in network.modules()] == [True] * 4
        assert network[1].switches == 0
        assert network[1].linear.weight.grad is gradient


def test_a_network_that_refuses_to_go_back_is_put_back_all_the_same() -> None:
    network = nn.Sequential(nn.Dropout(), Refuses(refused=True))
    with pytest.raises(ModelError, match=r"restored: .*: its change of mode raised ValueError: not this mode"):
        inspect(network, torch.ones(1, 2))
    assert [module.training for module in network.modules()] == [True] * 4
    assert network[1].switches == 0


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_graph_of_before_can_be_differentiated_after(mode: Mode) -> None:
    torch.manual_seed(0)
    network, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(3, 4)
    loss = network(x).square().sum()
    expected = torch.autograd.grad(loss, [*network.parameters()], retain_graph=True)
    inspect_gradients(network, torch.randn(3, 4), mode=mode, include_inputs=True)
    assert all(map(torch.equal, torch.autograd.grad(loss, [*network.parameters()]), expected))


def test_hooks_on_every_module_that_a_raising_forward_pass_leaves_are_taken_away() -> None:
    class Watches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
            if x.sum() > 0:
                raise ArithmeticError("half-way")
            handle.remove()
            return x

    with pytest.raises(ForwardError, match="half-way"):
        inspect(Watches(), torch.ones(1, 2))
    assert not nn.modules.module._global_forward_hooks


def test_objects_that_cannot_be_put_back_are_left() -> None:
    class Opaque(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lock, self.counter, self.lines = threading.Lock(), itertools.count(), io.StringIO()
            self.random = random.SystemRandom()

        def forward(self, x: Tensor) -> Tensor:
            with self.lock:
                self.lines.write("called")
                return x * next(self.counter) * self.random.random()

    network = Opaque()
    held = dict(vars(network))
    inspect(network, torch.ones(1, 2))
    assert vars(network) == held
    assert network.lines.getvalue() == "called"
