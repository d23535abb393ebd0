"""Networks that change themselves come out of every kind of run as they went in, and compute on as they would have."""

import itertools
import random
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

from hookscope.hooks.pytree import tensors_in
from hookscope.inspection.backward import PassError
from hookscope.inspection.execution import execution_order
from hookscope.inspection.forward import ForwardError, list_modules
from hookscope.inspection.network import queue_of
from hookscope.inspection.state.preservation import preserved
from tests.inspection.stateful_networks import NETWORKS, RefusingBelow
from tests.inspections import inspect, inspect_gradients
from tests.networks import Written, batch_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(deprecated|prototype|beta state|no longer supported)"),
    pytest.mark.filterwarnings("ignore:Sparse"),
]

X = torch.tensor([[0.5, -1.0, 2.0, 0.1], [1.5, 0.3, -0.7, -2.0]])


class Raising(nn.Module):
    """Raises after the network has run, if it is told to."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.raises = network, False

    def forward(self, x: Tensor) -> Tensor:
        x = self.network(x)
        if self.raises:
            raise ArithmeticError("half-way")
        return x


def built(reason: str, start: str) -> Raising:
    """Build a network with some gradients, in eval or train mode, or after a call in train mode."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = Raising(NETWORKS[reason]())
    for parameter in itertools.islice(model.parameters(), 1, None, 2):
        parameter.grad = torch.full_like(parameter, 0.3)  # which half precision rounds
    if start == "called":
        model(X.clone())
    if start == "eval":
        try:
            model.eval()
        except NotImplementedError:  # an exported program
            for module in model.modules():
                module.training = False
    return model


def seeded_calls(model: nn.Module) -> list[bytes | str]:
    """Call a model twice, differentiate the second call; return what it gives, or raises."""
    torch.manual_seed(1)
    random.seed(1)
    results: list[bytes | str] = []
    try:
        results.append(model(X.clone()).detach().numpy().tobytes())
        output = model(X.clone())
        results.append(output.detach().numpy().tobytes())
        output.sum().backward()
    except Exception as error:  # noqa: BLE001 - what a model raises by itself is a result too
        results.append(str(error).partition("[")[0])
    gradients = [parameter.grad for parameter in model.parameters()]
    return results + [b"" if gradient is None else gradient.numpy().tobytes() for gradient in gradients]


# --- an independent look: every object that a network leads to, as paths and plain values ---


def look(value: Any) -> dict[str, Any]:
    actual: dict[str, Any] = {}
    _look(value, "", actual, {})
    return actual


def _look(value: Any, path: str, actual: dict[str, Any], seen: dict[int, Any]) -> None:
    expected = isinstance(value, int | float | str | bytes | type(None) | types.FunctionType | types.MethodType)
    actual[path] = (type(value), value if expected else id(value))
    if expected or id(value) in seen:
        return
    seen[id(value)] = value
    if isinstance(value, Tensor):
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            actual[path] += tuple(_tensor(value))
            gradient = value.grad if value.is_leaf else None
        _look(gradient, path + ".grad", actual, seen)
    for step, child in _children(value):
        _look(child, path + step, actual, seen)


STATES: dict[type, Callable[[Any], object]] = {
    set: lambda value: sorted(map(repr, value)),
    dict: lambda value: [*map(id, value)],
    bytearray: bytes,
    np.ndarray: lambda value: value.tobytes(),
    torch.Generator: lambda value: value.get_state().tolist(),
    random.Random: lambda value: value.getstate(),
    np.random.Generator: lambda value: value.bit_generator.state,
    np.random.RandomState: lambda value: value.get_state(),
    torch.jit.ScriptModule: lambda value: [value.training, getattr(value, "calls", 0), getattr(value, "seen", 0)],
}
LOOKED_INTO = ("tests.", "torch.nn", "torch.optim", "torch.fx", "torch._tensor", "collections", "types", "weakref")


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    kind = type(value)
    yield from ((" state", repr(read(value))) for state, read in STATES.items() if isinstance(value, state))
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", child) for key, child in value.items())
    if isinstance(value, list | tuple | deque):
        yield from ((f"[{index}]", child) for index, child in enumerate(value))
    if isinstance(value, torch.jit.ScriptModule):
        yield from ((f".{name}", tensor) for name, tensor in [*value.named_buffers(), *value.named_parameters()])
    if kind.__module__.startswith("tests."):
        yield from ((f".class.{name}", child) for name, child in vars(kind).items() if not name.startswith("__"))
        yield from ((f".{name}", getattr(value, name, "not set")) for name in getattr(kind, "__slots__", ()))
    if hasattr(kind, "__dict__") and (kind is nn.Parameter or kind.__module__.startswith(LOOKED_INTO)):
        yield ".__dict__", getattr(value, "__dict__", None)


def _tensor(tensor: Tensor) -> list[Any]:
    seen: list[Any] = [tensor.requires_grad, tensor.dtype, repr(tensor._backward_hooks)]
    if isinstance(tensor, RefusingBelow) or tensor.is_meta:
        return seen
    if tensor.layout is torch.strided and tensor.untyped_storage().nbytes() == 0:
        return [*seen, "empty"]
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    if tensor.is_nested:
        return [*seen, *(part.numpy().tobytes() for part in tensor.unbind())]
    if tensor.layout is torch.strided:
        seen += [tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes()]
    dense = tensor.detach().to_dense().contiguous().clone()
    return [*seen, tensor.shape, bytes(dense.reshape(-1).view(torch.uint8).numpy()) if dense.numel() else b""]


def assert_same(now: dict[str, Any], before: dict[str, Any], after: str) -> None:
    changed = {path for path in before.keys() | now.keys() if now.get(path) != before.get(path)}
    assert not changed, f"{after}: {min(changed)}: {before.get(min(changed))} became {now.get(min(changed))}"


# --- what is promised ---

RUNS: dict[str, Callable[[nn.Module], object]] = {
    "execution_order": lambda model: execution_order(model, queue_of(X.clone())),
    "list_modules": lambda model: list_modules(model, (X.clone(),)),
    "inspect": lambda model: inspect(model, X.clone(), ["*"]),
    "gradients": lambda model: inspect_gradients(model, X.clone(), layers=["*"]),
    "gradients of inputs": lambda model: inspect_gradients(model, X.clone(), layers=["*"], include_inputs=True),
    "gradients in train mode": lambda model: inspect_gradients(model, X.clone(), layers=["*"], mode="train"),
}


@pytest.mark.parametrize(
    ("reason", "start"),
    [
        *((reason, "train") for reason in NETWORKS),
        *((reason, "eval" if "mode" in reason or "train" in reason else "called") for reason in NETWORKS),
    ],
)
@pytest.mark.sample("train")
def test_a_network_that_changes_itself_comes_out_as_it_went_in(reason: str, start: str) -> None:
    expected = seeded_calls(built(reason, start))
    model = built(reason, start)
    before = look(model)
    for name, run in RUNS.items():
        run(model)
        assert_same(look(model), before, name)
        model.raises = True
        with suppress(ForwardError, PassError):
            run(model)
        model.raises = False
        assert_same(look(model), before, f"{name}, raising")
    assert seeded_calls(model) == expected


@pytest.mark.parametrize("reason", NETWORKS)
def test_a_second_pass_starts_from_the_same_network(reason: str) -> None:
    model = built(reason, "train")
    before = look(model)
    with preserved(model, seed=0, mode="train") as state:
        begun = look(model)
        first = clone(model(X.clone()))
        state.rewind()
        assert_same(look(model), begun, "the beginning")
        assert torch.equal(model(X.clone()), first)
        state.mark()
        marked, later = look(model), clone(model(X.clone()))
        state.rewind()
        assert_same(look(model), marked, "the mark")
        assert torch.equal(model(X.clone()), later)
    assert_same(look(model), before, "the block")


def half_and_whole(net: Any, x: Tensor) -> Tensor:
    rounded = net.linear.half()(x.half()).float()
    net.linear.float()
    return (rounded + net.linear(x)).square()


@pytest.mark.parametrize("verify", [False, True])
def test_gradients_are_not_rounded_by_a_further_pass_that_casts_the_layer(verify: bool) -> None:
    torch.manual_seed(0)
    model = Written(half_and_whole, linear=nn.Linear(4, 4), unused=nn.ReLU())  # whose calls are looked for
    inspection = inspect_gradients(model, X.clone(), "sum", verify=verify)
    model(X.clone()).sum().backward()
    for row, parameter in zip(inspection.parameters, model.parameters(), strict=True):
        assert not torch.equal(parameter.grad, parameter.grad.half().float())
        assert row.gradient.l2 == pytest.approx(parameter.grad.double().norm().item(), rel=1e-6)


def test_a_large_gradient_is_put_back_without_a_copy_and_may_be_added_to() -> None:
    torch.manual_seed(0)
    model = Written(lambda net, x: net.linear.half()(x.half()).float(), linear=nn.Linear(4096, 1024))  # 16 MiB
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.3)
    before = {name: (parameter, parameter.grad, parameter.grad.clone()) for name, parameter in model.named_parameters()}
    batches = [batch_of(torch.full((1, 4096), 0.01 * number)) for number in (1, 2)]
    rows = inspect_gradients(model, batches, "sum", on_error=lambda _error: None).parameters
    inspect(model, batches)
    for name, (parameter, gradient, values) in before.items():
        assert model.get_parameter(name) is parameter
        assert parameter.dtype is torch.float32
        assert parameter.grad is gradient
        assert torch.equal(gradient, values)
    assert rows[0].gradient.max == pytest.approx(0.03, rel=1e-3)


def clone(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def small_levit() -> nn.Module:
    sizes = {"embed_dim": (16, 32), "key_dim": 8, "depth": (1, 1), "num_heads": (2, 2)}
    return timm.models.levit.Levit(img_size=64, num_classes=5, **sizes).eval()


@pytest.mark.parametrize("options", [{"include_inputs": True}, {"layers": ["@-1"]}], ids=str)
def test_attention_biases_cached_by_a_pass_of_our_own_are_forgotten_before_the_next(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x = small_levit(), torch.randn(1, 3, 64, 64)
    outputs = [tensor for _, tensor in tensors_in(model(x))]
    for module in model.modules():
        getattr(module, "attention_bias_cache", {}).clear()
    before = look(model)
    rows = inspect_gradients(
        model, x, lambda output, _: sum(tensor.square().sum() for _, tensor in tensors_in(output)), **options
    ).parameters
    assert_same(look(model), before, str(options))
    biases = [parameter for name, parameter in model.named_parameters() if "attention_biases" in name]
    expected = torch.autograd.grad(sum(output.square().sum() for output in outputs), biases)
    actual = [row for row in rows if "attention_biases" in row.name]
    assert [row.status for row in actual] == ["gradient" if gradient.any() else "zero" for gradient in expected]
    assert any(gradient.any() for gradient in expected)
    for row, gradient in zip(actual, expected, strict=True):
        assert row.gradient.l2 == pytest.approx(gradient.norm().item(), rel=1e-4)


def test_a_graph_that_the_owner_keeps_can_still_be_differentiated() -> None:
    model = small_levit()
    x = torch.randn(1, 3, 64, 64)
    model(x)  # fills the caches, with their graphs
    for _ in range(2):
        inspect_gradients(model, x, layers=["*"])
    model(x).sum().backward()
    with pytest.raises(PassError, match="backward through the graph a second time"):
        inspect_gradients(model, x)
