"""The hooks leave nothing behind, whatever raises, and observe plain values, whatever the network has under way."""

import gc
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookscope.hooks.forward_hooks import capture
from hookscope.hooks.observed import ModuleCall
from hookscope.hooks.operations import EVERYTHING, OperationChoice
from hookscope.hooks.patterns import parse_operation_pattern
from hookscope.hooks.selection import module_index
from tests.hooks.test_operations import Counting
from tests.networks import Apply, Written


class Passed(Exception):
    pass


@pytest.fixture
def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Identity(), nn.Flatten(), nn.Linear(144, 2))


def captured_calls(network: nn.Module, forward: Callable[[], object], **options: Any) -> list[str]:
    with capture(network, module_index(network)[0], lambda call, _slot, _tensor: call.layer, **options) as captured:
        forward()
    return [seen.layer for seen in captured.observations]


def joining(change: Callable[[list[Tensor]], object]) -> nn.Module:
    """Return a layer as DenseNet's: it takes a list, which may change meanwhile."""

    def join(features: list[Tensor]) -> Tensor:
        joined = torch.cat(features, 1)
        change(features)
        return joined * 2

    return Apply(join)


@pytest.mark.parametrize(
    ("change", "in_place"),
    [
        (lambda _: None, False),
        (lambda inputs: inputs.append(inputs[0]), False),
        (lambda inputs: inputs.clear(), False),
        (lambda inputs: inputs[1].add_(1), True),
    ],
    ids=["as it was", "longer", "empty", "overwritten"],
)
@pytest.mark.parametrize("watched", [False, True])
def test_a_list_of_inputs_is_read_before_the_module_changes_it(
    change: Callable[[list[Tensor]], object], in_place: bool, watched: bool
) -> None:
    network = nn.Sequential(joining(change))
    values = torch.randn(2, 3)
    options: Any = {"gradients": lambda _site, gradient: gradient.sum().item()} if watched else {}
    with capture(network, {"join": network[0]}, lambda call, *_: [path for path, _ in call.inputs], **options) as seen:
        network([values.clone().requires_grad_() * 1 for _ in range(3)]).sum().backward()
        [observation] = seen.observations
        assert observation.value == ["[0][0]", "[0][1]", "[0][2]"]
        assert observation.in_place == in_place
        assert [gradient.value for gradient in seen.gradients] == ([18.0] if watched else [])  # ones, of 2 x 9 elements


def plain_sum(_call: ModuleCall, _slot: str, tensor: Tensor) -> tuple[object, ...]:
    """Return the shape and the sum that an observer finds, and what is under way meanwhile."""
    under_way = torch.is_grad_enabled(), torch._C._is_any_autocast_enabled()
    return tuple(tensor.shape), tensor.double().sum().item(), torch._C._functorch.maybe_current_level(), under_way


@pytest.mark.parametrize(
    "forward",
    [
        lambda network, values: network(values),
        lambda network, values: torch.autocast("cpu", torch.bfloat16)(network)(values),
        lambda network, values: torch.vmap(network)(values.unsqueeze(1)),
        lambda network, values: torch.func.grad(lambda inputs: network(inputs).sum())(values),
    ],
    ids=["plain", "autocast", "vmap", "grad"],
)
def test_observers_work_on_plain_values_whatever_is_under_way(
    forward: Callable[[nn.Module, Tensor], object], network: nn.Module
) -> None:
    with capture(network, module_index(network)[0], plain_sum) as captured:
        forward(network, torch.randn(2, 3, 8, 8))
    actual = [observation.value for observation in captured.observations]
    assert len(actual) == 6
    assert {each[2:] for each in actual if each is not None} == {(None, (False, False))}


@pytest.mark.parametrize("gradients", [False, True])
def test_a_mode_of_the_network_sees_nothing_of_the_hooks(gradients: bool) -> None:
    def listens(net: Any, x: Tensor) -> Tensor:
        with net.mode:
            return net.layer(x)

    def observe(_about: object, *others: Any) -> float:
        return float(others[-1].detach().sum())

    network = Written(listens, layer=nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    network.mode = Counting()
    with capture(network, module_index(network)[0], observe, gradients=observe if gradients else None):
        network(torch.ones(1, 4))
    assert network.mode.names == ["linear", "relu"]


def test_a_gradient_that_is_differentiated_again_is_observed_without_a_graph(network: nn.Module) -> None:
    values = torch.randn(1, 3, 8, 8, requires_grad=True)
    with capture(
        network, module_index(network)[0], lambda *_: None, gradients=lambda *_: torch.is_grad_enabled()
    ) as captured:
        (of_values,) = torch.autograd.grad(network(values).square().sum(), values, create_graph=True)
        of_values.square().sum().backward()
        assert [site.value for site in captured.gradients] == [False] * 6


def assert_not_held(lock: Any) -> None:
    """Assert that an observer's lock was released as often as it was taken."""
    assert lock.acquire(blocking=False)
    lock.release()
    with pytest.raises(RuntimeError, match="release"):
        lock.release()


@pytest.mark.parametrize("ops", [False, True])
def test_an_observer_of_gradients_that_raises_leaves_everything_as_it_was(ops: bool, network: nn.Module) -> None:
    def raises(*_: object) -> None:
        raise Passed

    operations = OperationChoice([parse_operation_pattern(EVERYTHING)]) if ops else None
    with capture(
        network, module_index(network)[0], lambda *_: None, gradients=raises, operations=operations
    ) as captured:
        output = network(torch.randn(1, 3, 8, 8))
        with pytest.raises(Passed):
            output.sum().backward()
        assert_not_held(captured.lock)
    assert torch._C._len_torch_function_stack() == 0
    assert not output._backward_hooks


@pytest.mark.parametrize("raised", [Passed, KeyboardInterrupt])
def test_an_observer_that_raises_leaves_everything_as_it_was(raised: type[BaseException], network: nn.Module) -> None:
    def observe(*_: object) -> None:
        raise raised

    operations = OperationChoice([parse_operation_pattern(EVERYTHING)])
    values = torch.randn(1, 3, 8, 8)
    with capture(network, module_index(network)[0], observe, operations=operations) as captured:
        with pytest.raises(raised):
            network(values)
        assert torch.is_grad_enabled()
        assert torch._C._len_torch_function_stack() == 1
        assert_not_held(captured.lock)
    assert torch._C._len_torch_function_stack() == 0
    assert network(values).requires_grad


def test_calls_of_several_threads_are_kept_apart(network: nn.Sequential) -> None:
    def observe(_call: ModuleCall, _slot: str, tensor: Tensor) -> float:
        time.sleep(0)  # another thread runs, up to the lock
        return float(tensor.detach().sum())

    inputs = [torch.full((1, 3, 8, 8), float(at)) for at in range(60)]
    expected = sorted(float(network(each).detach().sum()) for each in inputs)
    part = network[:2]
    held = {"part": part, "part.0": part[0]}
    with capture(network, {"whole": network, **held}, observe) as captured, ThreadPoolExecutor(8) as pool:
        assert len([*pool.map(network, inputs)]) == len([*pool.map(part, inputs)]) == 60
    assert sorted(
        observation.value for observation in captured.observations if observation.layer == "whole"
    ) == pytest.approx(expected)
    assert {observation.call for observation in captured.observations if observation.layer == "part"} == {*range(60)}


def growth_of_200_passes() -> int:
    """Return by how many blocks of memory, or references to an object that is always there, have changed most."""
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Identity(), nn.Flatten(), nn.Linear(144, 2))
    values = torch.randn(1, 3, 8, 8)
    singletons = (None, True, False, "", torch.Tensor, network[0], "0")

    def passes(count: int) -> list[int]:
        for _ in range(count):
            captured_calls(network, lambda: network(values).sum().backward(), gradients=lambda *_: 0)
            with torch.no_grad():
                captured_calls(network, lambda: network(values))
        gc.collect()
        return [sys.getallocatedblocks(), *map(sys.getrefcount, singletons)]

    passes(20)
    before = passes(1)
    return max(abs(now - then) for now, then in zip(passes(200), before, strict=True))


@pytest.mark.exhaustive
def test_no_reference_is_kept_and_none_is_lost() -> None:
    # In a process of its own: what other tests leave in torch keeps references, too.
    program = "from tests.hooks.test_calls import growth_of_200_passes; print(growth_of_200_passes())"
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    # A block is left at about every sixth pass; an object of ours would be at each.
    assert int(ended.stdout) < 130
