"""The compiled hook does as the Python one, whatever the call, and leaves nothing behind."""

import copy
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookscope.hooks import calls, compiled
from hookscope.hooks.compiled import compiled_function
from hookscope.hooks.forward_hooks import Capture, capture
from hookscope.hooks.observed import ModuleCall
from hookscope.hooks.operations import EVERYTHING, OperationChoice
from hookscope.hooks.patterns import parse_operation_pattern
from hookscope.hooks.selection import module_index
from hookscope.inspection.state.preservation import preserved
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


class Passed(Exception):
    pass


@pytest.fixture
def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Identity(), nn.Flatten(), nn.Linear(144, 2))


@pytest.fixture
def left_to_python(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The layers whose calls the compiled hook has left to Python."""
    layers: list[str] = []
    only = calls.CallHooks.only

    def noted(self: calls.CallHooks[Any], layer: str, *given: Any) -> object:
        layers.append(layer)
        return only(self, layer, *given)

    monkeypatch.setattr(calls.CallHooks, "only", noted)
    return layers


def captured_calls(network: nn.Module, forward: Callable[[], object], **options: Any) -> list[str]:
    with capture(network, module_index(network)[0], lambda call, _slot, _tensor: call.layer, **options) as captured:
        forward()
    return [seen.layer for seen in captured.observations]


def test_a_usual_call_is_not_left_to_python(network: nn.Module, left_to_python: list[str]) -> None:
    values = torch.randn(1, 3, 8, 8)
    assert captured_calls(network, lambda: network(values)) == ["0", "1", "2", "3", "4", ""]
    assert captured_calls(network, lambda: network(values).sum().backward(), gradients=lambda *_: 0)
    assert left_to_python == []


class Wrapped(Tensor):
    pass


@pytest.mark.parametrize(
    "forward",
    [
        lambda network, values: torch.inference_mode()(network)(values.clone()),
        lambda network, values: network(values.as_subclass(Wrapped)),
        lambda network, values: torch.autocast("cpu", torch.bfloat16)(network)(values),
        lambda network, values: torch.vmap(network)(values.unsqueeze(0)),
        lambda network, values: network[2](input=network[:2](values)),
    ],
    ids=["inference", "subclass", "autocast", "vmap", "keyword"],
)
def test_an_unusual_call_is_left_to_python(
    forward: Callable[[nn.Module, Tensor], object], network: nn.Module, left_to_python: list[str]
) -> None:
    with torch.no_grad():
        seen = captured_calls(network, lambda: forward(network, torch.randn(1, 3, 8, 8)))
    assert {*left_to_python} & {*seen}


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


def test_no_reference_is_kept_and_none_is_lost(network: nn.Module) -> None:
    values = torch.randn(1, 3, 8, 8)
    singletons = (None, True, False, "", torch.Tensor, network[0], "0")

    def passes(count: int) -> list[int]:
        with torch.no_grad():
            for _ in range(count):
                captured_calls(network, lambda: network(values))
        gc.collect()
        return [sys.getallocatedblocks(), *map(sys.getrefcount, singletons)]

    passes(20)
    before = passes(1)
    after = passes(300)
    assert max(abs(now - then) for now, then in zip(after, before, strict=True)) < 100  # of 1,800 calls


def test_without_the_library_there_is_no_function(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiled, "LIBRARY", tmp_path / "native.bin")
    for cached in (compiled._library, compiled._definition):
        monkeypatch.setattr(compiled, cached.__name__, cached.__wrapped__)
    assert compiled_function("only", ()) is None


def test_an_interpreter_without_its_lock_uses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert compiled._library.__wrapped__() is None
