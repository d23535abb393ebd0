"""The compiled hooks do as the Python ones, whatever the call, and leave nothing behind."""

import copy
import gc
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookscope.hooks import calls, compiled
from hookscope.hooks.compiled import compiled_function
from hookscope.hooks.forward_hooks import Capture, capture
from hookscope.hooks.gradient_hooks import GradientWatch
from hookscope.hooks.observed import ModuleCall
from hookscope.hooks.operations import EVERYTHING, OperationChoice
from hookscope.hooks.patterns import parse_operation_pattern
from hookscope.hooks.selection import module_index
from hookscope.inspection.rows import Recorder
from hookscope.inspection.state.preservation import preserved
from hookscope.statistics import collect
from hookscope.statistics.channel_axis import AxisReader
from hookscope.statistics.native import ALIKE
from tests.networks import NETWORKS

pytestmark = pytest.mark.skipif(compiled_function("only", ()) is None, reason="installed without the compiled library")


def seen_in(call: ModuleCall, slot: str, tensor: Tensor) -> object:
    """What an observer was given, in a form that two runs of a network share."""
    layer, module, index, inputs, operation = call
    paths = [path for path, _ in inputs]
    return layer, type(module), index, paths, operation, slot, tensor.dtype, checksum(tensor)


def checksum(tensor: Tensor) -> str:
    plain = tensor.detach().values() if tensor.is_nested else tensor.detach()
    return str((plain.dequantize() if plain.is_quantized else plain.abs()).double().sum().item())


def observations(network: nn.Module, args: tuple[Any, ...], *, ops: bool) -> list[object]:
    """Return what is observed of a pass, and with operations of gradients, too."""
    operations = OperationChoice([parse_operation_pattern(EVERYTHING)]) if ops else None
    watch: Any = (lambda _site, gradient: checksum(gradient)) if ops else None
    modules, _ = module_index(network)
    found: list[object] = []
    with (
        preserved(network, seed=0),
        torch.set_grad_enabled(ops),
        capture(network, modules, seen_in, gradients=watch, operations=operations) as captured,
    ):
        try:
            output = network(*copy.deepcopy(args))
            if isinstance(output, Tensor) and output.requires_grad:
                output.sum().backward()
        except Exception as error:  # noqa: BLE001 - some of the networks raise
            found.append(str(error))
        found += captured.observations
        found += [(site.key, site.untracked, site.arrival, site.value) for site in captured.gradients]
    return found


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors",
    "ignore:torch.ao.quantization is deprecated",
    "ignore:torch.quantize_per_tensor",
)
@pytest.mark.parametrize("ops", [False, True], ids=["modules", "operations and gradients"])
@pytest.mark.parametrize("name", NETWORKS)
def test_observes_what_the_python_hook_does(name: str, ops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    network, args = NETWORKS[name].build().eval(), NETWORKS[name].args()
    found = observations(network, args, ops=ops)
    monkeypatch.setattr(calls, "compiled_function", lambda *_: None)
    assert found == observations(network, args, ops=ops)


def recorded(network: nn.Module, args: tuple[Any, ...], observe: Callable[[Recorder], Any]) -> list[object]:
    """Return on which axis each output of modules and operations counts channels, and what is noted of shapes."""
    recorder = Recorder(0, None, None)
    recorder.start((0,))
    operations = OperationChoice([parse_operation_pattern(EVERYTHING)])
    with (
        preserved(network, seed=0),
        torch.no_grad(),
        capture(network, module_index(network)[0], observe(recorder), operations=operations) as captured,
        suppress(Exception),  # some of the networks raise
    ):
        network(*copy.deepcopy(args))
    recorder.settle()
    seen = [each for each in captured.observations if each.value is not None]
    measured = collect([each.value for each in seen if each.value is not None])
    axes = [(each.place, reduction.channel_axis) for each, reduction in zip(seen, measured, strict=True)]
    return [*axes, recorder.axes._axis_by_shape, recorder.axes.grids]


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors",
    "ignore:torch.ao.quantization is deprecated",
    "ignore:torch.quantize_per_tensor",
)
@pytest.mark.parametrize("name", NETWORKS)
def test_channels_are_counted_on_the_axis_that_python_finds(name: str) -> None:
    torch.manual_seed(1)
    network, args = NETWORKS[name].build().eval(), NETWORKS[name].args()
    found = recorded(network, args, lambda recorder: recorder.observer())
    assert found == recorded(network, args, lambda recorder: recorder.observe)


def test_python_is_asked_for_the_axis_where_a_class_or_a_shape_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    inferred = AxisReader.channel_axis

    def channel_axis(self: AxisReader, maker: nn.Module | str, shape: tuple[int, ...]) -> int | None:
        asked.append(maker)
        return inferred(self, maker, shape)

    monkeypatch.setattr(AxisReader, "channel_axis", channel_axis)
    norms = nn.LayerNorm(8), nn.LayerNorm(8), nn.LayerNorm((8, 8))
    network = nn.Sequential(
        nn.Conv2d(8, 8, 1), nn.ReLU(), nn.ReLU(), *norms, nn.ReLU(), nn.MaxPool2d(1), nn.MaxPool2d(1)
    )
    found = recorded(network.eval(), (torch.ones(1, 8, 8, 8),), lambda recorder: recorder.observer())
    # A norm over two axes does not say which one counts channels; pooling finds them on another axis.
    assert asked == [network[0], network[1], network[3], network[5], network[7], network]
    assert [each[-1] for each in found[:-2]] == [1, 1, 1, 3, 3, 3, 3, 1, 1, 1]


class Passed(Exception):
    pass


@pytest.fixture
def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Identity(), nn.Flatten(), nn.Linear(144, 2))


@pytest.fixture
def left_to_python(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The functions that the compiled hooks have left calls of layers to, and the layers."""
    left: list[tuple[str, str]] = []

    def note(owner: type, name: str, layer: Callable[..., str]) -> None:
        function = getattr(owner, name)

        def noted(self: object, *given: Any) -> object:
            left.append((name, layer(*given)))
            return function(self, *given)

        monkeypatch.setattr(owner, name, noted)

    note(calls.CallHooks, "only", lambda layer, *_: layer)
    note(calls.CallHooks, "before", lambda layer, *_: layer)
    note(calls.CallHooks, "after", lambda entries, *_: entries[-1].call.layer if entries else "")
    note(GradientWatch, "outputs", lambda call, *_: call.layer)
    note(GradientWatch, "_arrive", lambda sites, _gradient: sites[0].layer)
    return left


def captured_calls(network: nn.Module, forward: Callable[[], object], **options: Any) -> list[str]:
    with capture(network, module_index(network)[0], lambda call, _slot, _tensor: call.layer, **options) as captured:
        forward()
    return [seen.layer for seen in captured.observations]


def test_a_usual_call_is_not_left_to_python(network: nn.Module, left_to_python: list[tuple[str, str]]) -> None:
    values = torch.randn(1, 3, 8, 8)
    assert captured_calls(network, lambda: network(values)) == ["0", "1", "2", "3", "4", ""]
    assert left_to_python == []
    assert captured_calls(network, lambda: network(values).sum().backward(), gradients=lambda *_: 0)
    # An output that is the input needs an alias, and a view is looked at again before the backward pass.
    assert left_to_python == [("outputs", "2"), ("outputs", "3"), ("_arrive", "3"), ("_arrive", "2")]


class Joins(nn.Module):
    """As a layer of DenseNet: takes a list, which may change meanwhile."""

    def __init__(self, change: Callable[[list[Tensor]], object]) -> None:
        super().__init__()
        self.change = change

    def forward(self, features: list[Tensor]) -> Tensor:
        joined = torch.cat(features, 1)
        self.change(features)
        return joined * 2


@pytest.mark.parametrize(
    "change",
    [lambda _: None, lambda given: given.append(given[0]), lambda given: given.clear(), lambda given: given[1].add_(1)],
    ids=["as it was", "longer", "empty", "overwritten"],
)
@pytest.mark.parametrize("watched", [False, True])
def test_a_list_of_inputs_is_usual_too(
    change: Callable[[list[Tensor]], object],
    watched: bool,
    left_to_python: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = nn.Sequential(Joins(change))
    values = torch.randn(2, 3)

    def seen() -> list[Any]:
        options: Any = {"gradients": lambda _site, gradient: gradient.sum().item()} if watched else {}
        modules = {"join": network[0]}
        with capture(network, modules, lambda call, *_: [path for path, _ in call.inputs], **options) as captured:
            network([values.clone().requires_grad_() * 1 for _ in range(3)]).sum().backward()
            return [*captured.observations] + [each.value for each in captured.gradients]

    found = seen()
    assert found[0].value == ["[0][0]", "[0][1]", "[0][2]"]
    assert left_to_python == []
    monkeypatch.setattr(calls, "compiled_function", lambda *_: None)
    assert found == seen()
    assert {"before", "after"} <= {name for name, _ in left_to_python}


class Wrapped(Tensor):
    pass


@pytest.mark.parametrize(
    "forward",
    [
        lambda network, values: torch.inference_mode()(network)(values.clone()),
        lambda network, values: network(values.as_subclass(Wrapped)),
        lambda network, values: network[2](input=network[:2](values)),
    ],
    ids=["inference", "subclass", "keyword"],
)
def test_an_unusual_call_is_left_to_python(
    forward: Callable[[nn.Module, Tensor], object], network: nn.Module, left_to_python: list[tuple[str, str]]
) -> None:
    with torch.no_grad():
        seen = captured_calls(network, lambda: forward(network, torch.randn(1, 3, 8, 8)))
    assert {layer for _, layer in left_to_python} & {*seen}


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
        lambda network, values: torch.func.grad(lambda given: network(given).sum())(values),
    ],
    ids=["plain", "autocast", "vmap", "grad"],
)
@pytest.mark.parametrize("observed", ["by Python", "compiled"])
def test_observers_work_on_plain_values_whatever_is_under_way(
    forward: Callable[[nn.Module, Tensor], object],
    observed: str,
    network: nn.Module,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = torch.randn(2, 3, 8, 8)

    def seen() -> list[Any]:
        recorder = Recorder(0, None, None)
        recorder.start((0,))
        observe: Any = plain_sum if observed == "by Python" else recorder.observer()
        with capture(network, module_index(network)[0], observe) as captured:
            forward(network, values)
        recorder.settle()
        found = [each.value for each in captured.observations]
        return found if observed == "by Python" else [each[:-4] for each in collect(found)]

    found = seen()
    assert len(found) == 6
    assert observed == "compiled" or {each[2:] for each in found} == {(None, (False, False))}
    monkeypatch.setattr(calls, "compiled_function", lambda *_: None)
    assert found == seen()


def test_torch_raises_once_on_tensors_that_have_no_memory(network: nn.Module) -> None:
    recorder = Recorder(0, None, None)
    recorder.start((0,))
    observe: Any = recorder.observer()
    errors = observe.__self__._held[len(ALIKE) + 3]
    with torch.no_grad(), capture(network, module_index(network)[0], observe) as captured:
        torch.vmap(network)(torch.randn(2, 1, 3, 8, 8))
    assert len(captured.observations) == 6
    assert errors == [True]  # each takes torch 0.8 ms


def test_a_gradient_that_is_differentiated_again_is_left_to_python(
    network: nn.Module, left_to_python: list[tuple[str, str]]
) -> None:
    values = torch.randn(1, 3, 8, 8, requires_grad=True)

    def forward() -> None:
        (of_values,) = torch.autograd.grad(network(values).square().sum(), values, create_graph=True)
        of_values.square().sum().backward()

    assert captured_calls(network, forward, gradients=lambda *_: torch.is_grad_enabled())
    assert {layer for function, layer in left_to_python if function == "_arrive"} == {"0", "1", "2", "3", "4"}


@pytest.mark.parametrize("ops", [False, True])
def test_an_observer_of_gradients_that_raises_leaves_everything_as_it_was(ops: bool, network: nn.Module) -> None:
    def raises(*_: object) -> None:
        raise Passed

    operations = OperationChoice([parse_operation_pattern(EVERYTHING)]) if ops else None
    output: list[Tensor] = []
    with capture(
        network, module_index(network)[0], lambda *_: None, gradients=raises, operations=operations
    ) as captured:
        output.append(network(torch.randn(1, 3, 8, 8)))
        with pytest.raises(Passed):
            output[0].sum().backward()
        lock = captured._hooks.lock
        assert lock.acquire(blocking=False)
        lock.release()
        with pytest.raises(RuntimeError, match="release"):
            lock.release()
    assert torch._C._len_torch_function_stack() == 0
    assert not output[0]._backward_hooks


def test_an_observer_that_raises_leaves_everything_as_it_was(network: nn.Module) -> None:
    def observe(*_: object) -> None:
        raise Passed

    operations = OperationChoice([parse_operation_pattern(EVERYTHING)])
    values = torch.randn(1, 3, 8, 8)
    held: list[Capture[None]] = []
    with capture(network, module_index(network)[0], observe, operations=operations) as captured:
        held.append(captured)
        with pytest.raises(Passed):
            network(values)
        assert torch.is_grad_enabled()
        assert torch._C._len_torch_function_stack() == 1
        lock = captured._hooks.lock
        assert lock.acquire(blocking=False)
        lock.release()
        with pytest.raises(RuntimeError, match="release"):  # it was held once, and not left so
            lock.release()
    assert torch._C._len_torch_function_stack() == 0
    assert network(values).requires_grad


def test_calls_of_several_threads_are_kept_apart(network: nn.Sequential) -> None:
    def observe(_call: ModuleCall, _slot: str, tensor: Tensor) -> float:
        time.sleep(0)  # another thread runs, up to the lock
        return float(tensor.detach().sum())

    given = [torch.full((1, 3, 8, 8), float(at)) for at in range(60)]
    expected = sorted(float(network(each).detach().sum()) for each in given)
    part = network[:2]
    held = {"part": part, "part.0": part[0]}
    with capture(network, {"whole": network, **held}, observe) as captured, ThreadPoolExecutor(8) as pool:
        assert len([*pool.map(network, given)]) == len([*pool.map(part, given)]) == 60
    assert sorted(each.value for each in captured.observations if each.layer == "whole") == pytest.approx(expected)
    assert {each.call for each in captured.observations if each.layer == "part"} == {*range(60)}


def test_no_reference_is_kept_and_none_is_lost(network: nn.Module) -> None:
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
    after = passes(600)
    # With hooks in Python, too, a block is left at about every sixth pass; an object of ours would be at each.
    assert max(abs(now - then) for now, then in zip(after, before, strict=True)) < 400


def test_without_the_library_there_is_no_function(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiled, "LIBRARY", tmp_path / "native.bin")
    for cached in (compiled._library, compiled._definition):
        monkeypatch.setattr(compiled, cached.__name__, cached.__wrapped__)
    assert compiled_function("only", ()) is None


def test_a_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_ENTRIES", (*compiled._ENTRIES, "Py_IncRef"))
    assert compiled._library.__wrapped__() is None


def test_an_interpreter_without_its_lock_uses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert compiled._library.__wrapped__() is None
