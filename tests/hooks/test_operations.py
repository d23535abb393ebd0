"""Operations: what the mode sees, under which label, and that it changes nothing."""

import operator
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hookscope.hooks.forward_hooks import capture
from hookscope.hooks.observed import ModuleCall, Observation
from hookscope.hooks.operations import OperationChoice
from hookscope.hooks.patterns import parse_operation_pattern
from tests.networks import Apply, Written


def everything(*patterns: str) -> OperationChoice:
    return OperationChoice([parse_operation_pattern(text) for text in patterns or ("op:*",)])


def observed(network: nn.Module, *args: Tensor, patterns: tuple[str, ...] = ()) -> list[Observation[Tensor]]:
    with torch.no_grad(), capture(network, {}, clone, operations=everything(*patterns)) as captured:
        network(*args)
    return captured.observations


def clone(_call: object, _slot: str, tensor: Tensor) -> Tensor:
    return tensor.clone()


def labels(seen: list[Observation[Tensor]]) -> list[tuple[str, int, str]]:
    return [(row.layer, row.call, row.slot) for row in seen]


X = torch.tensor([[1.0, -2.0], [3.0, -4.0]])

ONE_OPERATION: dict[str, tuple[Callable[[Tensor], Any], str, Tensor]] = {
    "x + 1": (lambda x: x + 1, "add", X + 1),
    "1 - x": (lambda x: 1 - x, "sub", 1 - X),
    "2 ** x": (lambda x: 2**x, "pow", 2**X),
    "7 // x": (lambda x: 7 // x, "floor_divide", 7 // X),
    "7 % x": (lambda x: 7 % x, "remainder", 7 % X),
    "mask &= mask": (lambda x: operator.iand(x > 0, x < 2), "and", (X > 0) & (X < 2)),
    "x > 0": (lambda x: x > 0, "gt", X > 0),
    "x[0]": (lambda x: x[0], "getitem", X[0]),
    "x.T": (lambda x: x.T, "T", X.T),
    "F.relu": (F.relu, "relu", X.relu()),
    "F.relu in place": (lambda x: F.relu(x, inplace=True), "relu", X.relu()),
    "aten.relu": (torch.ops.aten.relu.default, "relu", X.relu()),
    "F.max_pool2d": (lambda x: F.max_pool2d(x[None], 2)[0], "max_pool2d", torch.tensor([[[3.0]]])),
    "torch.cat": (lambda x: torch.cat([x, x]), "cat", torch.cat([X, X])),
    "torch.einsum": (lambda x: torch.einsum("ij->i", x), "einsum", X.sum(1)),
    "a keyword": (lambda x: torch.sum(input=x), "sum", X.sum()),
    "torch.zeros": (lambda _x: torch.zeros(2), "zeros", torch.zeros(2)),
}


@pytest.mark.parametrize("name", ONE_OPERATION)
def test_an_operation_has_the_name_that_torch_gives_it(name: str) -> None:
    function, operation, expected = ONE_OPERATION[name]
    (seen,) = [
        row for row in observed(Written(lambda _, x: function(x)), X.clone()) if row.layer == f"(model):{operation}"
    ]
    torch.testing.assert_close(seen.value, expected, rtol=0, atol=0)
    assert (seen.operation.name, seen.operation.owner) == (operation, "")
    assert seen.operation.source.startswith("test_operations.py:")


def test_questions_about_a_tensor_are_no_operations() -> None:
    def ask(_: object, x: Tensor) -> Tensor:
        assert x.shape == x.size() == torch.Size([2, 2])
        assert (x.dim(), x.dtype, x.is_cuda, len(x), x.numel(), x.stride()) == (2, torch.float32, False, 2, 4, (2, 1))
        assert x.grad is None
        assert torch.is_tensor(x)
        return x

    assert observed(Written(ask), X.clone()) == []


def test_what_is_written_in_place_is_seen_as_it_is_then() -> None:
    def add_twice(_: object, x: Tensor) -> Tensor:
        x += 1
        x[0] = 0.0
        return x.mul_(2)

    add, setitem, mul = observed(Written(add_twice), X.clone())
    assert labels([add, setitem, mul]) == [("(model):add", 0, ""), ("(model):setitem", 0, ""), ("(model):mul", 0, "")]
    assert all(case.in_place for case in (add, setitem, mul))
    torch.testing.assert_close(add.value, X + 1, rtol=0, atol=0)
    torch.testing.assert_close(setitem.value, torch.stack([torch.zeros(2), X[1] + 1]), rtol=0, atol=0)
    torch.testing.assert_close(mul.value, torch.stack([torch.zeros(2), 2 * (X[1] + 1)]), rtol=0, atol=0)


def test_calls_are_counted_by_module_and_operation_and_several_outputs_have_slots() -> None:
    def split(_: object, x: Tensor) -> Tensor:
        first, second = x.chunk(2)
        return (first + second) + x

    assert labels(observed(Written(split), X)) == [
        ("(model):chunk", 0, "[0]"),
        ("(model):chunk", 0, "[1]"),
        ("(model):add", 0, ""),
        ("(model):add", 1, ""),
    ]


class Residual(nn.Module):
    """relu(conv(x)) + x, with the rectifier as a function and the convolution as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(2, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x)) * self.scale + x


def test_inputs_come_from_rows_parameters_and_the_input() -> None:
    network = nn.Sequential(Residual(), nn.BatchNorm2d(2)).eval()
    modules = {name: module for name, module in network.named_modules() if not module._modules}
    with torch.no_grad(), capture(network, modules, clone, operations=everything()) as captured:
        network(torch.rand(1, 2, 4, 4))
    assert [(observation.layer, observation.sources) for observation in captured.observations] == [
        ("0.conv", ("input",)),
        ("0:relu", (("0.conv", 0, ""),)),
        ("0:mul", (("0:relu", 0, ""), "0.scale")),
        ("0:add", (("0:mul", 0, ""), "input")),
        ("1", (("0:add", 0, ""),)),
    ]


def test_what_torchs_own_layers_call_is_theirs() -> None:
    network = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 2), nn.Softmax(1)
    )
    assert observed(network.eval(), torch.rand(1, 2, 4, 4)) == []
    attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    assert observed(attention, torch.rand(1, 3, 8)) == []


class Standardised(nn.Conv2d):
    """A layer of torch's with a forward of another's."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight - self.weight.mean(), self.bias)


def test_a_subclass_with_its_own_forward_shows_what_that_calls() -> None:
    seen = observed(nn.Sequential(Standardised(2, 2, 1)), torch.rand(1, 2, 4, 4))
    assert labels(seen) == [("0:mean", 0, ""), ("0:sub", 0, ""), ("0:conv2d", 0, "")]


def test_a_function_that_the_forward_calls_counts_for_its_module_and_says_its_line() -> None:
    (seen,) = observed(Written(lambda _, x: doubled(x)), X)
    line = doubled.__code__.co_firstlineno + 1
    assert (seen.layer, seen.operation.source) == ("(model):mul", f"test_operations.py:{line}")


def doubled(x: Tensor) -> Tensor:
    return x * 2


PATTERNS: dict[tuple[str, ...], list[str]] = {
    ("op:add",): ["block.0:add", "block.1:add", "(model):add"],
    ("op:a*",): ["block.0:add", "block.1:add", "(model):add"],
    ("block:add",): ["block.0:add", "block.1:add"],
    ("block.*:*",): ["block.0:relu", "block.0:mul", "block.0:add", "block.1:relu", "block.1:mul", "block.1:add"],
    ("(model):*", "!op:ad"): ["(model):add"],  # a name is whole
    ("block.1:add#0",): ["block.1:add"],
    ("op:*", "!op:add", "!block.0:*"): ["block.1:relu", "block.1:mul"],
}


@pytest.mark.parametrize("patterns", PATTERNS)
def test_patterns_select_by_module_and_name(patterns: tuple[str, ...]) -> None:
    block = nn.Sequential(Residual(), Residual())
    network = Written(lambda net, x: net.block(x) + 1, block=block)
    seen = observed(network, torch.rand(1, 2, 4, 4), patterns=patterns)
    assert [row.layer for row in seen] == PATTERNS[patterns]


def test_one_call_of_an_operation_may_be_left_out() -> None:
    choice = OperationChoice([parse_operation_pattern("op:*"), parse_operation_pattern("!op:relu#1")])
    assert [choice.lists("", "relu", call) for call in range(3)] == [True, False, True]


def test_a_call_that_never_runs_selects_nothing() -> None:
    choice = everything("op:relu#1", "op:relu#2")
    with capture(Written(lambda _, x: x.relu().relu()), {}, clone, operations=choice) as captured:
        captured.mode.modules[""](X)
    assert choice.missing().startswith("No operation matches 'op:relu#2'. Nearest: 'op:relu'")


def test_what_raises_and_is_caught_leaves_the_count_with_its_own_module() -> None:
    def fail(_: object, x: Tensor) -> Tensor:
        x = x + 1
        raise ValueError(str(x.shape))

    def forward(net: Any, x: Tensor) -> Tensor:
        try:
            net.bad(x)
        except ValueError:
            x = x * 2
        return x

    seen = observed(Written(forward, bad=Written(fail)), X)
    assert [row.layer for row in seen] == ["bad:add", "(model):mul"]


class Counting(TorchFunctionMode):
    """A mode of the network's own."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_networks_own_sees_the_same_with_ours() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        with net.mode:
            return net.attention(x * 2, x, x, need_weights=False)[0] + 1

    attention = nn.MultiheadAttention(2, 1, batch_first=True).eval()
    network = Written(forward, attention=attention).eval()
    x = torch.rand(1, 3, 2)
    names = []
    for operations in (None, everything()):
        network.mode = Counting()
        with torch.no_grad(), capture(network, {}, clone, operations=operations) as captured:
            network(x)
        names.append(network.mode.names)
    assert names[0] == names[1]
    assert [observation.layer for observation in captured.observations] == ["(model):mul", "(model):add"]


def test_attention_runs_the_kernel_that_it_runs_without_hooks() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    network = Written(lambda net, x: net.attention(x, x, x, need_weights=False)[0] * 1, attention=attention).eval()
    x = torch.rand(2, 5, 8)
    kernels = []
    for operations in (None, everything()):
        with torch.no_grad(), torch.profiler.profile() as profile:
            if operations is None:
                network(x)
            else:
                with capture(network, {}, clone, operations=operations):
                    network(x)
        kernels.append(
            {key_average.key for key_average in profile.key_averages()} & {"aten::_native_multi_head_attention"}
        )
    assert kernels == [{"aten::_native_multi_head_attention"}] * 2


def raises_and_goes_on(self: Any, x: Tensor) -> Tensor:
    with suppress(RuntimeError):
        self.linear(x[:, :1])
    return self.linear(x) + 1


def under_a_mode(self: Any, x: Tensor) -> Tensor:
    with torch.device("cpu"):
        y = self.linear(x) * 2
    return y + 1


def in_a_thread(self: Any, x: Tensor) -> Tensor:
    thread = threading.Thread(target=self.linear, args=(x,))
    thread.start()
    thread.join()
    return self.linear(x) + 1


@pytest.mark.parametrize(
    ("forward", "names"),
    [(raises_and_goes_on, ["getitem", "add"]), (under_a_mode, ["mul", "add"]), (in_a_thread, ["add"])],
)
def test_operations_are_seen_after_a_hooked_layer_of_torchs(forward: Callable[..., Any], names: list[str]) -> None:
    network = Written(forward, linear=nn.Linear(2, 2))
    with torch.no_grad(), capture(network, {"linear": network.linear}, clone, operations=everything()) as captured:
        network(X)
    seen = [observation.operation.name for observation in captured.observations if observation.operation is not None]
    assert seen == names
    assert torch.overrides._get_current_function_mode() is None


def test_hooked_layers_inside_torchs_encoder_leave_the_mode_off() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
    network = Written(lambda self, x: self.linear(self.encoder(x)), encoder=encoder, linear=nn.Linear(8, 8)).eval()
    active: dict[str, bool] = {}

    def note(call: ModuleCall, *_: object) -> None:
        active[call.layer] = torch._C._len_torch_function_stack() > 0

    parts = {name: part for name, part in network.named_modules() if "." in name or name == "linear"}
    with torch.no_grad(), capture(network, parts, note, operations=everything()):
        network(torch.rand(1, 3, 8))
    assert active.pop("linear")
    assert "encoder.layers.0.linear1" in active
    assert not any(active.values())


class Marked(Tensor):
    """A subclass that lets nobody look at it without being asked."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclasses_stay_what_they_are() -> None:
    x = X.clone().as_subclass(Marked)
    network = Apply(lambda y: (y + 1).relu())
    with torch.no_grad(), capture(network, {}, lambda *_: None, operations=everything()) as captured:
        assert type(network(x)) is Marked
    assert [observation.layer for observation in captured.observations] == ["(model):add", "(model):relu"]


def gradients_of(network: nn.Module, *args: Tensor) -> dict[tuple[str, int, str], Tensor]:
    actual: dict[tuple[str, int, str], Tensor] = {}
    with capture(
        network,
        {},
        lambda *_: torch.empty(0),
        gradients=lambda site, gradient: actual.setdefault((site.layer, site.call, site.slot), gradient.clone()),
        operations=everything(),
    ) as captured:
        loss = network(*args).sum()
        captured.must_repeat(loss)
        loss.backward()
    return actual


def test_the_gradient_of_an_operation_is_that_of_all_uses_after_it() -> None:
    """y = relu(x) = (1, 0); z = y * y; loss = sum(z + 3y), so dz = 1, dy = 2y + 3 where y counts."""
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    actual = gradients_of(Apply(lambda x: (y := F.relu(x)) * y + y * 3), x)
    assert {key: value.tolist() for key, value in actual.items()} == {
        ("(model):relu", 0, ""): [5.0, 3.0],
        ("(model):mul", 0, ""): [1.0, 1.0],
        ("(model):mul", 1, ""): [1.0, 1.0],
        ("(model):add", 0, ""): [1.0, 1.0],
    }


def test_the_gradient_before_an_operation_in_place_is_not_that_after_it() -> None:
    """y = 2x; y *= 3 in place; loss = sum(y): dy after it is 1, before it 3, whichever tensor object holds it."""
    x = torch.tensor([1.0, -2.0], requires_grad=True)

    def forward(_: object, inputs: Tensor) -> Tensor:
        y = inputs * 2
        y *= 3
        return y

    actual = gradients_of(Written(forward), x)
    assert {key: value.tolist() for key, value in actual.items()} == {
        ("(model):mul", 0, ""): [3.0, 3.0],
        ("(model):mul", 1, ""): [1.0, 1.0],
    }


def test_writing_through_a_view_keeps_what_the_network_computes() -> None:
    """A copy of the view, which would show its gradient, would leave the base as it was."""
    x = torch.tensor([[1.0, -2.0], [3.0, -4.0]], requires_grad=True)

    def forward(_: object, inputs: Tensor) -> Tensor:
        base = inputs * 1
        first = base[0]
        first *= 5
        return base

    actual = gradients_of(Written(forward), x)
    torch.testing.assert_close(x.grad, torch.tensor([[5.0, 5.0], [1.0, 1.0]]), rtol=0, atol=0)
    torch.testing.assert_close(actual["(model):mul", 0, ""], x.grad, rtol=0, atol=0)
    torch.testing.assert_close(actual["(model):getitem", 0, ""], torch.tensor([5.0, 5.0]), rtol=0, atol=0)
