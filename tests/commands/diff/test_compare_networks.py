"""Two networks on the same inputs."""

import copy
import gc
import math
import random
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torchvision.models import VisionTransformer

import hookscope
from hookscope.commands.diff.describe import answer
from hookscope.errors import HookscopeError, LayerNotFoundError, ModelError, UnfitInputError, UsageError
from hookscope.reporting.columns import number_text
from hookscope.results.differences import NonFinite
from hookscope.results.runs.reading import read_run
from tests.networks import BY_HAND, Apply, Written, batch_of


def small(**changes: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    parts = OrderedDict(
        conv=nn.Conv2d(3, 4, 3),
        norm=nn.BatchNorm2d(4),
        relu=nn.ReLU(inplace=True),
        flat=nn.Flatten(),
        fc=nn.Linear(144, 5),
    )
    return nn.Sequential(OrderedDict({**parts, **changes})).eval()


def pictures(count: int = 2) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def numpys(a: Tensor, b: Tensor) -> float:
    one, other = a.double().numpy(), b.double().numpy()
    return float(np.linalg.norm(one - other) / np.linalg.norm(one))


def activations_of(network: nn.Module, x: Tensor) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, module in network.named_children():
            x = module(x)
            seen[name] = x.clone()
    return seen


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_rows_are_what_numpy_makes_of_both_networks_outputs(batch_size: int) -> None:
    one, other = small(), small()
    with torch.no_grad():
        other.norm.weight[1] *= 1.5
    x = pictures(5)
    result = hookscope.diff(one, other, x, batch_size=batch_size)
    ours, theirs = activations_of(one, x), activations_of(other, x)
    for row in result.rows:
        assert row.measures is not None
        assert row.measures.relative_l2 == pytest.approx(numpys(ours[row.layer], theirs[row.layer]), rel=1e-6)
    assert result["relu"].input_relative_l2 == pytest.approx(numpys(ours["norm"], theirs["norm"]), rel=1e-6)
    difference = (ours["fc"] - theirs["fc"]).abs()
    assert result["fc"].measures.max_at == np.unravel_index(int(difference.argmax()), difference.shape)  # type: ignore[union-attr]
    assert [difference.layer for difference in result.first_differences] == ["norm"]
    assert result["norm"].channel is not None
    assert (result["norm"].channel.channel, result["norm"].channel.fraction) == (1, 1.0)
    output = result.outputs[0]
    logs = [theirs_or_ours["fc"].double().log_softmax(1) for theirs_or_ours in (ours, theirs)]
    assert output.kl == pytest.approx(float(F.kl_div(logs[1], logs[0], log_target=True, reduction="batchmean")))
    assert output.top1 == int((ours["fc"].argmax(1) == theirs["fc"].argmax(1)).sum())


def test_errors_are_those_beside_the_weights_in_float64() -> None:
    network = small()
    x = pictures()
    result = hookscope.diff(network, "same", x, dtype_b="bfloat16", reference="float64")
    exact = activations_of(copy.deepcopy(network).double(), x.double())
    ours = activations_of(network, x)
    theirs = activations_of(copy.deepcopy(network).bfloat16(), x.bfloat16())
    for row in result.rows:
        assert row.error == pytest.approx(numpys(exact[row.layer], ours[row.layer]), rel=1e-4)
        assert row.error_b == pytest.approx(numpys(exact[row.layer], theirs[row.layer]), rel=1e-4)
        assert row.error_b > row.error
    assert result.reference == "A's weights in float64"
    assert (result.a.dtype, result.b.dtype) == ("float32", "bfloat16")
    assert result.first_differences == ()


def test_shadows_say_what_each_layer_adds() -> None:
    one, other = small(), small()
    with torch.no_grad():
        other.conv.weight *= 1.1
        other.fc.bias += 1
    x = pictures()
    result = hookscope.diff(one, other, x, shadow=True)
    assert [(row.layer, row.origin) for row in result.rows] == [
        ("conv", "begins"),
        ("norm", "passed on"),
        ("relu", "passed on"),
        ("flat", "passed on"),
        ("fc", "begins"),
    ]
    ours = activations_of(one, x)
    assert result["fc"].added is not None
    assert result["fc"].added.relative_l2 == pytest.approx(numpys(ours["fc"], ours["fc"] + 1), rel=1e-5)
    assert [difference.layer for difference in result.first_differences] == ["conv", "fc"]


@pytest.mark.parametrize("shadow", [False, True])
def test_an_edited_input_is_a_difference_of_its_layer_alone(shadow: bool) -> None:
    network, x = (
        nn.Sequential(nn.Linear(6, 4), nn.Sequential(nn.Linear(4, 3), nn.ReLU()), nn.Linear(3, 2)),
        torch.randn(3, 6),
    )
    with torch.no_grad():
        before = network[0](x)
        layer, block = (numpys(part(before), part(-before)) for part in (network[1][0], network[1]))
    result = hookscope.diff(network, "same", x, edit_b="/^1.0$/:input:scale(-1)", shadow=shadow)
    amount = number_text(layer, 3)
    assert answer(result)[0] == f"First difference in layer 1.0 (Linear): relative L2 {amount}, with an edited input."
    assert [difference.layer for difference in result.first_differences] == ["1.0"]
    result = hookscope.diff(network, "same", x, edit_b="/^1$/:input:scale(-1)", shadow=shadow)
    assert answer(result)[0] == f"First difference in layer 1: relative L2 {number_text(block, 3)}."
    assert [difference.layer for difference in result.first_differences] == ["1"]
    result = hookscope.diff(network, "same", x, edit_b="/^1$/:output:scale(2)", shadow=shadow)
    where = "in its own code between the layers that it calls, or by an edit: its output is the first to show it"
    assert answer(result)[0] == f"First difference in layer 1, {where}, relative L2 1.00."


_collected: ContextVar[list[Tensor]] = ContextVar("collected")


class Counted(nn.Linear):
    """Counts its calls, draws random numbers, and adds to what its hooks see."""

    calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) + 1

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) + torch.rand(()) + random.random() + float(np.random.rand())


class Collecting(nn.Module):
    """Its layers' hooks collect what they return for the pass that runs, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Counted(6, 6), Counted(6, 6), nn.Linear(6, 6))
        for layer in self.layers:
            layer.register_forward_hook(self.collect)

    @staticmethod
    def collect(_module: nn.Module, _args: object, output: Tensor) -> None:
        if (expected := _collected.get(None)) is not None:
            expected.append(output)

    def forward(self, x: Tensor) -> Tensor:
        token = _collected.set([])
        self.layers(x)
        first, second, *_ = _collected.get()
        _collected.reset(token)
        return first * 3 + second + self.layers[0].calls


def test_shadows_leave_no_trace_in_the_network() -> None:
    network = Collecting()
    result = hookscope.diff(network, network, torch.randn(3, 6), shadow=True)
    assert result.first_differences == ()
    assert {row.origin for row in result.rows} == {"equal"}
    assert result.outputs[0].measures.relative_l2 == 0
    assert [row.added.relative_l2 for row in result.rows if row.added is not None] == [0.0, 0.0, 0.0]


class Counting(nn.Module):
    """Multiplies by the number of its call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


def test_a_layer_that_counts_its_calls_adds_nothing() -> None:
    network = nn.Sequential(Counting(), nn.Linear(6, 6))
    result = hookscope.diff(network, network, torch.randn(3, 6), shadow=True, batch_size=1)
    assert [row.added.relative_l2 for row in result.rows if row.added is not None] == [0.0, 0.0]
    assert result.first_differences == ()


class Functional(nn.Module):
    """Its own code works between its layers."""

    def __init__(self, residual: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.residual = nn.Linear(6, 6), nn.Linear(6, 6), residual

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x)) + self.residual * x)


def test_a_difference_between_layers_is_the_module_around_them() -> None:
    result = hookscope.diff(
        nn.Sequential(Functional(1.0), nn.Linear(6, 2)),
        nn.Sequential(Functional(0.5), nn.Linear(6, 2)),
        torch.randn(3, 6),
    )
    (first,) = result.first_differences
    assert (first.layer, first.row, first.in_own_code) == ("0", "0.second", True)


class Operands(nn.Module):
    """Its own code takes a number, a buffer, a parameter and a tensor that it only holds."""

    def __init__(self, **changes: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        values = {"base": 100.0, "slope": 0.1, "offset": 1.0, "buffer": 1.0, "weight": 1.0, "held": 1.0} | changes
        self.fc, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.base, self.slope, self.offset = values["base"], values["slope"], values["offset"]
        self.register_buffer("buffer", torch.full((6,), values["buffer"]))
        self.weight = nn.Parameter(torch.full((6,), values["weight"]))
        self.held = torch.full((6,), values["held"])

    def forward(self, x: Tensor) -> Tensor:
        angles = self.base ** (torch.arange(6) / -6)
        x = F.leaky_relu(self.fc(x) - angles, negative_slope=self.slope)
        x.sub_(self.offset)
        x = x * self.buffer
        x = x / self.weight
        x = torch.hypot(x, self.held)
        return self.last(x)


@pytest.mark.parametrize(
    ("name", "value", "operation", "line", "inputs"),
    [
        ("base", 5000.0, "pow", 1, "given 100.0 in A and 5000.0 in B"),
        ("slope", 0.9, "leaky_relu", 2, "given negative_slope=0.1 in A and negative_slope=0.9 in B"),
        ("offset", 2.0, "sub", 3, "given 1.0 in A and 2.0 in B"),
        ("buffer", 1.3, "mul", 4, "given buffer, which differs by 0.3"),
        ("held", 3.0, "hypot", 6, "given held, which differs by 2"),
    ],
)
def test_an_operand_that_no_layer_returns_is_an_input_that_differs(
    name: str, value: float, operation: str, line: int, inputs: str
) -> None:
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    result = hookscope.diff(Operands(), Operands(**{name: value}), x, ops=True)
    first, number = result.first_differences[0], Operands.forward.__code__.co_firstlineno + line
    assert (first.layer, first.in_own_code) == (f"(model):{operation}", False)
    sentence = answer(result)[0]
    assert sentence.startswith(
        f"First difference in (model):{operation} ({operation}, {Path(__file__).name}:{number}): "
    )
    assert f", {inputs}" in sentence
    assert "inputs are equal" not in sentence
    assert [row.layer for row in result.rows if row.arguments] == [f"(model):{operation}"]


def test_a_pattern_of_operations_chooses_rows_of_both_networks() -> None:
    x, networks = torch.randn(3, 6, generator=torch.Generator().manual_seed(1)), (Operands(), Operands(slope=0.9))
    result = hookscope.diff(*networks, x, layer="op:leaky_relu")
    before = networks[0].fc(x) - 100.0 ** (torch.arange(6) / -6)
    a, b = (F.leaky_relu(before, slope).detach() for slope in (0.1, 0.9))
    (row,) = result.rows
    assert (row.layer, row.origin, row.input_relative_l2) == ("(model):leaky_relu", "begins", 0)
    assert row.relative_l2 == pytest.approx(numpys(a, b), rel=1e-6)
    assert result.unmatched == ()
    with pytest.raises(LayerNotFoundError, match="No operation matches 'op:gelu'"):
        hookscope.diff(*networks, x, layer=["fc", "op:gelu"])


def test_a_pattern_chooses_one_call_of_an_operation() -> None:
    networks = [Written(lambda net, x: F.relu(F.relu(net.fc(x)) - 0.1), fc=nn.Linear(2, 3)) for _ in "AB"]
    result = hookscope.diff(*networks, torch.ones(1, 2), layer="op:relu#1", grads=True)
    assert [row.label for row in (*result.rows, *result.gradients) if "relu" in row.label] == [
        "(model):relu#1",
        "(model):relu#1 grad_output",
    ]


def test_operands_that_are_the_same_are_equal_inputs_wherever_they_are_written() -> None:
    class Slope(Operands):
        by_name = True

        def forward(self, x: Tensor) -> Tensor:
            x = self.fc(x)
            x = F.leaky_relu(x, negative_slope=self.slope) if self.by_name else F.leaky_relu(x, self.slope)
            return self.last(x.flip(0) if self.base > 100 else x.flip(1))

    one, other = Slope(), Slope(base=5000.0)
    other.by_name = False
    result = hookscope.diff(one, other, torch.randn(3, 6), ops=True)
    assert [row.arguments for row in result.rows if row.arguments] == ["given 1 in A and 0 in B"]
    assert result["(model):leaky_relu"].origin == "equal"


class BeforeAContainer(nn.Module):
    """Adds a parameter before it calls a container."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.position = nn.Linear(8, 8), nn.Parameter(torch.zeros(8))
        self.body, self.fc = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        values: Tensor = self.fc(self.body(self.stem(x) + self.position))
        return values


def timm_vit() -> nn.Module:
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 3}
    return timm.create_model("vit_tiny_patch16_224", **options)


def torchvision_vit() -> nn.Module:
    network = VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=3)
    nn.init.normal_(network.heads[0].weight)
    return network


@pytest.mark.parametrize("shadow", [False, True], ids=["", "shadow"])
@pytest.mark.parametrize(
    ("make", "parameter", "layer"),
    [
        (
            lambda: nn.Sequential(nn.Linear(8, 8), nn.Sequential(BeforeAContainer()), nn.Linear(8, 2)),
            "1.0.position",
            "1.0",
        ),
        (timm_vit, "cls_token", ""),
        (torchvision_vit, "encoder.pos_embedding", "encoder"),
    ],
)
def test_code_before_a_container_is_that_of_the_module_around_it(
    make: Callable[[], nn.Module], parameter: str, layer: str, shadow: bool
) -> None:
    torch.manual_seed(0)
    one = make().eval()
    other = copy.deepcopy(one)
    with torch.no_grad():
        values = other.get_parameter(parameter)
        values += torch.randn(values.shape)
    x = torch.randn(2, 3, 32, 32) if hasattr(one, "patch_embed") or hasattr(one, "conv_proj") else torch.randn(2, 8)
    (first,) = hookscope.diff(one, other, x, batch_axis=0, shadow=shadow).first_differences
    assert (first.layer, first.in_own_code) == (layer, True)


class Padding(nn.Module):
    """Pads its input, and cuts its output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.width, self.first, self.second = width, nn.Conv1d(2, 2, 1), nn.Conv1d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        values: Tensor = self.second(F.relu(self.first(F.pad(x, (0, self.width)))))[..., :8]
        return values * 2 if self.width > 20 else values


def test_a_shape_that_differs_is_a_difference() -> None:
    x = torch.randn(2, 2, 8)
    result = hookscope.diff(Padding(4), Padding(24), x)
    (first,) = result.first_differences
    assert (first.layer, first.row, first.in_own_code, first.relative_l2) == ("", "first", True, None)
    assert "first is the first to show it, shapes differ, 2x2x12 in A and" in answer(result)[0]
    (first, *_) = hookscope.diff(Padding(4), Padding(24), x, ops=True).first_differences
    assert (first.layer, first.relative_l2) == ("(model):pad", None)
    one, other = (
        nn.Sequential(nn.Conv1d(2, 3, 1), nn.Conv1d(3, 2, 3, padding=width), nn.Flatten()) for width in (1, 2)
    )
    other.load_state_dict(one.state_dict())
    result = hookscope.diff(one, other, x, layer="*")
    assert [difference.layer for difference in result.first_differences] == ["1"]
    assert (
        answer(result)[0]
        == "First difference in layer 1 (Conv1d): shapes differ, 2x2x8 in A and 2x2x10 in B, its inputs are equal."
    )


class Cutting(nn.Module):
    """Cuts small inputs to a width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.max()) > 5 else x[:, : self.width]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (0, 2, 1)])
def test_a_shape_that_differs_in_some_batches_is_a_difference(order: tuple[int, ...]) -> None:
    """The rows of the large input, the last, are equal."""
    one, other = (nn.Sequential(nn.Flatten(), Cutting(width), Sum()) for width in (2, 3))
    inputs = torch.tensor([[1.0, 2, 3, 4], [1, 1, 1, 1], [9, 9, 9, 9]])[[*order]]
    result = hookscope.diff(one, other, inputs, batch_size=1)
    assert result["1"].relative_l2 is None
    assert result["1"].note == "shapes differ"
    assert [(first.layer, first.relative_l2) for first in result.first_differences] == [("1", None)]
    assert "First difference in layer 1 (Cutting): shapes differ, 2x2 in A and 2x3 in B" in answer(result)[0]
    assert result["2"].relative_l2 == pytest.approx((3**2 + 1) ** 0.5 / (3**2 + 2**2 + 36**2) ** 0.5)


class Sum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1, keepdim=True)


def folded(network: nn.Sequential) -> nn.Sequential:
    """Return a copy whose first BatchNorm is folded into the convolution before it."""
    other = copy.deepcopy(network)
    other[0] = fuse_conv_bn_eval(other[0], other[1])
    other[1] = nn.Identity()
    return other


@pytest.mark.parametrize("shadow", [False, True], ids=["", "shadow"])
def test_a_difference_that_is_gone_again_does_not_hide_one_behind_it(shadow: bool) -> None:
    torch.manual_seed(0)
    parts = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    network = nn.Sequential(*parts).eval()
    network[1].running_var.mul_(3)
    network[1].running_mean.add_(1)
    x = torch.randn(2, 3, 12, 12)
    result = hookscope.diff(network, folded(network), x, shadow=shadow)
    assert [(difference.layer, difference.gone_at) for difference in result.first_differences][:1] == [("0", "1")]
    assert all(difference.gone_at == "1" for difference in result.first_differences)
    first, *_, second, _ = answer(result)
    assert first.startswith("layer 0 (Conv2d) differs, relative L2")
    assert first.endswith("but the difference is gone at layer 1.")
    assert second == "The rows before and after differ no more than rounding explains."
    other = folded(network)
    with torch.no_grad():
        other[3].weight *= 1.01
        other[3].bias *= 1.01
    result = hookscope.diff(network, other, x, shadow=shadow)
    assert [(difference.layer, difference.gone_at) for difference in result.first_differences][:2] == [
        ("3", ""),
        ("0", "1"),
    ]
    assert answer(result)[0].startswith("First difference in layer 3 (Conv2d): relative L2 0.0100")


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
        self.right, self.fc = nn.Sequential(nn.Linear(6, 6), nn.ReLU()), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        values: Tensor = self.fc(torch.cat([self.left(x), self.right(x)], 1))
        return values


@pytest.mark.parametrize("scaled", [False, True])
def test_a_difference_that_a_layer_without_partner_undoes_is_gone(scaled: bool) -> None:
    a = small(deep=nn.Identity()).append(nn.Linear(5, 5)).eval()
    a.norm.running_mean.normal_()
    b = nn.Sequential(OrderedDict((name, module) for name, module in a.named_children() if name != "norm")).eval()
    b = copy.deepcopy(b)
    b.conv = fuse_conv_bn_eval(a.conv, a.norm)
    b.fc.weight.data *= 1.5 if scaled else 1
    result = hookscope.diff(a, b, pictures())
    gone_at = {difference.layer: difference.gone_at for difference in result.first_differences}
    assert gone_at == ({"conv": "", "fc": ""} if scaled else {"conv": "relu"})
    assert [row.label for row in result.unmatched] == ["norm"]


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 5), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        return self.first(x), self.second(x)


@pytest.mark.parametrize("value", [1.0, math.nan])
@pytest.mark.parametrize("shadow", [False, True])
def test_a_difference_in_an_output_is_not_gone_though_the_last_layer_agrees(value: float, shadow: bool) -> None:
    other = TwoHeads()
    with torch.no_grad():
        other.first.bias.fill_(value)
    result = hookscope.diff(TwoHeads(), other, torch.randn(3, 4), shadow=shadow)
    assert [(difference.layer, difference.gone_at) for difference in result.first_differences] == [("first", "")]
    assert answer(result)[0].startswith("First difference in first (Linear): ")


def test_only_so_many_differences_that_are_gone_are_written_out() -> None:
    layers = [layer for _ in range(7) for layer in (nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))]
    a = nn.Sequential(*layers).eval()
    for layer in layers[1::2]:
        layer.running_var.fill_(4)
    b = copy.deepcopy(a)
    for at in range(0, 14, 2):
        b[at], b[at + 1] = fuse_conv_bn_eval(a[at], a[at + 1]), nn.Identity()
    sentences = answer(hookscope.diff(a, b, pictures()))
    assert sum("but the difference is gone at" in sentence for sentence in sentences) == 5
    assert "Differences in 2 more layers disappear again." in sentences


class _Mask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scores = self.fc(x)
        return {"scores": scores, "mask": scores > 0, "best": scores.argmax(1).to(torch.uint8)}


def test_booleans_and_integers_are_compared_as_numbers() -> None:
    a = _Mask().eval()
    b = copy.deepcopy(a)
    b.fc.weight.data.neg_()
    b.fc.bias.data.neg_()
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    measures = {output.slot: output.measures for output in hookscope.diff(a, b, x, batch_axis=0).outputs}
    of_a, of_b = (network(x) for network in (a, b))
    for name in ("mask", "best"):
        one, other = (case[name].double().numpy() for case in (of_a, of_b))
        actual = measures[f"['{name}']"]
        assert actual is not None
        assert actual.relative_l2 == pytest.approx(np.linalg.norm(one - other) / np.linalg.norm(one))
        assert actual.max_abs == 1


def test_nan_in_both_networks_is_no_agreement() -> None:
    a = small()
    a.fc.weight.data[0] = math.nan
    said = answer(hookscope.diff(a, copy.deepcopy(a), pictures()))
    assert said[-1] == "Output: the probabilities of A and of B are NaN, so neither has a best class."


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))  # which undoes a shift

    def forward(self, x: Tensor) -> Tensor:
        values: Tensor = x + self.body(x)
        return values


class _Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift, self.block, self.out = nn.Parameter(torch.zeros(())), _Residual(), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        values: Tensor = self.out(self.block(x + self.shift))
        return values


def test_the_largest_difference_is_no_smaller_than_the_first() -> None:
    torch.manual_seed(0)
    a = _Shifted().eval()
    b = copy.deepcopy(a)
    b.shift.data += 0.5
    said = answer(hookscope.diff(a, b, torch.randn(2, 8), batch_axis=0))
    assert any(text.startswith("It is largest at block (") for text in said), said


def test_a_difference_that_one_branch_undoes_is_not_gone() -> None:
    torch.manual_seed(0)
    a = nn.Sequential(nn.Linear(8, 8), _Residual(), nn.Linear(8, 2)).eval()
    b = copy.deepcopy(a)
    b[0].bias.data += 0.5
    result = hookscope.diff(a, b, torch.randn(2, 8))
    assert result["1.body.0"].origin != "passed on"
    assert [(difference.layer, difference.gone_at) for difference in result.first_differences] == [("0", "")]


def test_layers_that_are_given_the_same_on_separate_branches_are_both_named() -> None:
    one, other = Branches(), Branches()
    with torch.no_grad():
        for name in ("left.0.weight", "right.0.bias", "fc.bias"):
            other.get_parameter(name).add_(1)
    result = hookscope.diff(one, other, torch.randn(3, 6))
    assert [difference.layer for difference in result.first_differences] == ["left.0", "right.0"]
    assert [difference.gone_at for difference in result.first_differences] == ["", ""]


@pytest.mark.parametrize(
    ("spoil", "said", "counts"),
    [
        ({"2.0.weight": math.nan}, "B is NaN from there on (144 of 432 values)", (0, 0, 144, 0)),
        ({"2.0.bias": -math.inf}, "B is infinite (144 of 432 values)", (0, 0, 0, 144)),
    ],
    ids=["NaN", "infinite"],
)
def test_values_that_are_not_finite_are_counted_and_left_out(
    spoil: dict[str, float], said: str, counts: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    parts = (
        nn.Conv2d(3, 4, 3),
        nn.Sequential(nn.Conv2d(4, 3, 3, padding=1), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(432, 5),
    )
    network = nn.Sequential(parts[0], nn.ReLU(), *parts[1:]).eval()
    other = copy.deepcopy(network)
    with torch.no_grad():
        for name, value in spoil.items():
            other.get_parameter(name)[1].flatten()[0] = value
    x = torch.randn(1, 3, 14, 14)
    result = hookscope.diff(network, other, x)
    measures = result["2.0"].measures
    assert measures is not None
    assert measures.nonfinite == NonFinite(*counts, 432)
    assert (measures.max_abs, measures.ulps) == (None, None)
    assert answer(result)[0] == f"First difference in layer 2.0 (Conv2d): {said}, its inputs are equal."
    assert "nan" not in " ".join(answer(result))
    with torch.no_grad():
        other.get_parameter("2.0.bias")[2] += 1
    measures = hookscope.diff(network, other, x)["2.0"].measures
    assert measures is not None
    assert (measures.max_abs, measures.nonfinite) == (pytest.approx(1), NonFinite(*counts, 432))
    for condition in ("max>5", "ulps>1e30", "rel>1", "2.0:cosine<0.1"):
        assert hookscope.diff(network, other, x, fail_over=condition).exceeded


def test_only_the_side_that_stays_infinite_is_said_to_be_so_from_there_on() -> None:
    a, b = small(), small()
    with torch.no_grad():
        a.conv.bias[0], b.conv.bias[0] = math.inf, -math.inf  # which ReLU makes 0
        a.fc.weight.abs_()  # else Inf - Inf is NaN
    said = answer(hookscope.diff(a, b, pictures()))[0]
    assert "A is infinite from there on (" in said
    assert "B is infinite (" in said


def test_a_network_that_is_equal_is_not_called_different() -> None:
    said = answer(hookscope.diff(small(), "same", pictures(), reference="float64"))
    assert said[-1].startswith("B is no worse: compared with A's weights in float64, the error of B's output is")
    broken = small()
    with torch.no_grad():
        broken.fc.bias[0] = math.nan
    assert answer(hookscope.diff(small(), broken, pictures(), reference="float64"))[-1].startswith(
        "B is worse: compared"
    )


def test_modules_that_were_in_training_mode_are_noted() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Dropout()), nn.Linear(4, 2)).eval()
    other = copy.deepcopy(network)
    x = torch.randn(3, 4)
    assert hookscope.diff(network, other, x).notes == ()
    other[1].train()
    result = hookscope.diff(network, other, x)
    note = "B was in training mode at 1, and runs in eval mode here, unless `mode_b` train is given."
    assert (result.first_differences, result.notes) == ((), (note,))
    assert hookscope.diff(network, other, x, mode_b="train").notes == ()
    network.train()
    actual = hookscope.diff(network, other, x).notes
    assert actual == ("A was in training mode, and runs in eval mode here.", note)
    assert hookscope.diff(network, other.train(), x).notes == ()
    assert (network.training, other[1].training) == (True, True)
    replaced = copy.deepcopy(network).eval()
    replaced[2] = nn.Sequential(nn.Identity(), copy.deepcopy(network[2]))  # both modes are the same to them
    assert hookscope.diff(copy.deepcopy(network).eval(), replaced, x).notes == ()
    residual, partly = Functional(1.0).eval(), Functional(1.0).train()
    partly.first.eval()
    (actual,) = hookscope.diff(residual, partly, torch.randn(3, 6)).notes
    assert actual.startswith("B was in training mode at (model), and runs")


def test_the_first_row_that_is_not_equal_is_named_though_rounding_may_explain_it() -> None:
    one, other = small(), small()
    other.norm.eps = 1.5e-5
    x = pictures()
    result = hookscope.diff(one, other, x)
    ours, theirs = activations_of(one, x), activations_of(other, x)
    distance, limit = numpys(ours["norm"], theirs["norm"]), (4 + 64) * 2.0**-23 * math.sqrt(2)
    assert 0 < distance < limit
    assert answer(result)[1] == (
        f"The first row that is not equal is norm (BatchNorm2d): relative L2 {number_text(distance, 3)}, "
        f"its inputs are equal. Rounding may explain up to {number_text(limit, 3)} there."
    )
    result = hookscope.diff(Functional(1.0), Functional(1.0 + 1e-6), torch.randn(3, 6))
    before = number_text(result["second"].input_relative_l2, 3)
    assert f"is second (Linear): relative L2 {number_text(result['second'].measures.relative_l2, 3)}, its " in " ".join(
        answer(result)
    )
    assert f", its inputs differ by {before}." in answer(result)[1]


@pytest.mark.parametrize("way", ["beyond rounding", "another dtype", "other inputs"])
def test_no_row_is_said_to_be_the_first_that_is_not_equal_where_that_means_nothing(way: str) -> None:
    other = small()
    other.norm.eps = 1.5e-5 if way == "other inputs" else 1e-2 if way == "beyond rounding" else 1e-5
    options: dict[str, dict[str, Any]] = {
        "another dtype": {"dtype_b": "bfloat16"},
        "other inputs": {"input_b": pictures() * (1 + 1e-6)},
    }
    b = "same" if way == "another dtype" else other
    result = hookscope.diff(small(), b, pictures(), **options.get(way, {}))
    assert not any("The first row" in sentence for sentence in answer(result))


class SumThenRelu(nn.Module):
    """A block, before or after somebody moved its ReLU behind the sum."""

    def __init__(self, moved: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.moved = moved

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x) + x) if self.moved else F.relu(self.conv(x)) + x


@pytest.mark.parametrize("options", [{}, {"ops": True}, {"ops": True, "shadow": True}])
def test_code_between_operations_is_that_of_their_module(options: dict[str, bool]) -> None:
    one, other = (nn.Sequential(nn.Identity(), SumThenRelu(moved)) for moved in (False, True))
    (first,) = hookscope.diff(one, other, pictures(), **options).first_differences
    assert (first.layer, first.in_own_code) == ("1", True)


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`")
def test_computed_weights_are_copied_and_the_operations_that_compute_them_are_paired() -> None:
    pruned = prune.l1_unstructured(nn.Linear(4, 4), "weight", amount=0.5)
    symmetric = parametrize.register_parametrization(nn.Linear(4, 4), "weight", Symmetric())
    network = nn.Sequential(pruned, nn.utils.weight_norm(nn.Linear(4, 4)), symmetric)
    result = hookscope.diff(network, "same", torch.randn(2, 4), ops=True, reference="float64")
    assert {row.origin for row in result.rows} == {"equal"}
    assert result["2.parametrizations.weight.0:add"].shape == (4, 4)
    assert result.unmatched == ()
    looks = hookscope.attribute(nn.Sequential(nn.Flatten(), network), torch.randn(1, 1, 2, 2), method="gradient")
    assert [check.name for check in looks.sanity][:1] == ["weights"]


@pytest.mark.parametrize(
    ("name", "shadow"), [("random noise", True), ("key-value cache", True), ("changing buffers", False)]
)
def test_odd_networks_equal_themselves(name: str, shadow: bool) -> None:
    torch.manual_seed(0)
    network = BY_HAND[name].build()
    batch = batch_of(*BY_HAND[name].args(), count=1)
    result = hookscope.diff(network, "same", batch, shadow=shadow)
    assert result.first_differences == ()
    assert {row.origin for row in result.rows} == {"equal"}


def test_operations_on_tensors_of_inference_mode_are_compared() -> None:
    torch.manual_seed(0)
    network = BY_HAND["inference mode inside"].build().eval()
    batch = batch_of(*BY_HAND["inference mode inside"].args(), count=1)
    result = hookscope.diff(network, "same", batch, ops=True)
    assert {row.origin for row in result.rows} == {"equal"}


def test_dropout_in_train_mode_draws_alike_on_both_sides() -> None:
    network = nn.Sequential(nn.Linear(6, 6), nn.Dropout(), nn.Linear(6, 2)).train()
    x = torch.randn(3, 6)
    eval_and_train = hookscope.diff(network, "same", x, mode_b="train")
    assert eval_and_train.first_differences[0].layer == "1"
    assert eval_and_train.b.ways == ("train mode",)


class Overwriting(nn.Module):
    """A convolution, a sum in place or none, and a ReLU in place."""

    def __init__(self, *, adds: bool, factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.relu = nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(inplace=True)
        self.adds, self.factor = adds, factor

    def before_relu(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x * self.factor)
        return out.add_(x) if self.adds else out

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.before_relu(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("adds", "batch_size"), [((True, True), 3), ((True, False), 1), ((False, True), 3)])
def test_what_a_layer_overwrites_is_compared_as_it_was(adds: tuple[bool, bool], batch_size: int) -> None:
    a, b = Overwriting(adds=adds[0]), Overwriting(adds=adds[1], factor=1.5)
    x = pictures(3)
    rows = {row.layer: row for row in hookscope.diff(a, b, x, batch_size=batch_size).rows}
    with torch.no_grad():
        inputs, outputs = (a.before_relu(x), b.before_relu(x)), (a(x), b(x))
        convolved = a.conv(x), b.conv(x * 1.5)
    assert rows["relu"].input_relative_l2 == pytest.approx(numpys(*inputs), rel=1e-6)
    for layer, expected in (("relu", outputs), ("conv", convolved)):
        measures = rows[layer].measures
        assert measures is not None
        assert measures.relative_l2 == pytest.approx(numpys(*expected), rel=1e-6)


def test_a_layer_that_one_side_calls_more_often_is_listed() -> None:
    class Often(nn.Module):
        def __init__(self, times: int) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body, self.end, self.times = nn.Linear(4, 4), nn.Linear(4, 2), times

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(self.times):
                x = self.body(x)
            return self.end(x)

    result = hookscope.diff(Often(3), Often(1), torch.randn(3, 4))
    assert [(row.label, row.reason) for row in result.unmatched] == [
        ("body#1", "called 3 times here, once by B"),
        ("body#2", "called 3 times here, once by B"),
    ]
    assert result["body"].origin == "equal"
    assert result["end"].origin != "equal"


def test_only_the_layer_at_hand_is_held() -> None:
    alive: list[weakref.ref[Tensor]] = []
    most: list[int] = []

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            alive.append(weakref.ref(out))
            most.append(sum(each() is not None for each in alive))
            return out

    network = nn.Sequential(*(Watched(4, 4) for _ in range(12)))
    gc.collect()
    hookscope.diff(network, "same", torch.randn(2, 4))
    assert max(most) <= 4  # the layer's input and output, of two networks


def test_networks_are_left_as_they_were() -> None:
    one, other = small().train(), small()
    states = [{name: tensor.clone() for name, tensor in network.state_dict().items()} for network in (one, other)]
    hookscope.diff(one, other, pictures(), shadow=True, reference="float64", mode_b="eval")
    hookscope.diff(one, other, pictures(), mode_b="train")
    assert (one.training, other.training) == (True, False)
    for network, state in zip((one, other), states, strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in network.state_dict().items())
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())


def test_networks_that_share_layers_are_told_apart() -> None:
    trunk = nn.Linear(4, 4)
    one, other = nn.Sequential(trunk, nn.Linear(4, 2)), nn.Sequential(trunk, nn.Linear(4, 2))
    result = hookscope.diff(one, other, torch.randn(3, 4))
    assert [row.origin for row in result.rows] == ["equal", "begins"]
    assert hookscope.diff(one, one, torch.randn(3, 4)).first_differences == ()


@pytest.mark.parametrize("option", ["dtype_b", "autocast_b"])
def test_bfloat16_throughout_is_rounding(option: str) -> None:
    result = hookscope.diff(small(), "same", pictures(), **{option: "bfloat16"})
    assert result.first_differences == ()
    assert any(row.origin == "rounding" for row in result.rows)


def test_an_edit_of_b_is_a_difference() -> None:
    result = hookscope.diff(small(), "same", pictures(), edit_b="norm:output:scale(1.1)")
    assert [difference.layer for difference in result.first_differences] == ["norm"]
    assert result.b.ways == ("edit norm:output:scale(1.1)",)
    assert result.notes == ()


# --- the same network in another file ---


def saved_as(form: str, folder: Path) -> tuple[str, dict[str, Any]]:
    network = small()
    path = folder / {"script": "net.pt", "export": "net.pt2"}[form]
    if form == "export":
        torch.export.save(torch.export.export(network, (pictures(),)), path)
    else:
        torch.jit.save(torch.jit.script(network), path)
    return str(path), {"trust": True}


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("form", ["script", "export"])
@pytest.mark.sample("script")
def test_a_saved_network_does_not_differ(form: str, tmp_path: Path) -> None:
    other, options = saved_as(form, tmp_path)
    result = hookscope.diff(small(), other, pictures(), **options)
    assert result.first_differences == ()
    assert {row.label for row in result.rows} >= {"conv", "norm", "relu", "fc"}
    assert {row.origin for row in result.rows} <= {"equal", "rounding"}


class Named(nn.Module):
    """Returns several outputs by name."""

    def __init__(self, names: str, scale: float = 1.0, extra: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.aux = nn.Linear(4, 3), nn.Linear(4, extra)
        self.names, self.scale = names, scale

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        actual = {"logits": self.body(x), "aux": self.scale * self.aux(x)}
        return {name: actual[name] for name in self.names.split()}


def test_outputs_by_name_are_compared_with_those_of_the_same_name() -> None:
    result = hookscope.diff(Named("logits aux"), Named("aux logits", 2.0), torch.randn(2, 4))
    actual = {output.slot: output.measures.relative_l2 for output in result.outputs if output.measures}
    assert actual == {"['logits']": 0.0, "['aux']": pytest.approx(1.0)}


def test_where_scores_are_nan_there_is_no_best_class(tmp_path: Path) -> None:
    class Broken(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * torch.tensor([[1.0], [math.nan]])

    torch.manual_seed(0)
    plain, broken = nn.Sequential(nn.Linear(4, 6)), nn.Sequential(Broken(4, 6))
    broken.load_state_dict(plain.state_dict())
    x = torch.randn(2, 4)
    result = hookscope.diff(plain, broken, x, fail_over="top5<0.5")
    (output,) = result.outputs
    assert output.top1 == 1
    assert output.top5 is not None
    assert output.kl is not None
    assert math.isnan(output.top5)
    assert math.isnan(output.kl)
    assert answer(result)[-1] == "Output: top-1 unchanged on 1/2 inputs; B is NaN (6 of 12 values)."
    assert len(result.exceeded) == 1
    result.save(tmp_path / "run")
    stored = read_run(tmp_path / "run").result.outputs[0].predictions[1]
    assert [[math.isnan(probability) for probability in one.probabilities] for one in stored] == [
        [False] * 5,
        [True] * 5,
    ]
    assert "B is NaN (6 of 12 values)" in hookscope.report(tmp_path / "run", tmp_path / "page.html").read_text()
    (output,) = hookscope.diff(broken, "same", x).outputs
    assert (output.top1, output.top5, output.kl) == (2, 1.0, 0.0)


def test_an_output_key_chooses_the_output() -> None:
    x = torch.randn(2, 4)
    result = hookscope.diff(Named("logits aux"), Named("logits aux", 2.0), x, output_key="aux", grads=True)
    assert [output.slot for output in result.outputs] == ["['aux']"]
    assert {row.label for row in result.gradients} >= {"aux.weight grad"}
    assert not any(row.label.startswith("body") for row in result.gradients)
    other = Named("logits aux", extra=5)
    with pytest.raises(UsageError, match=r"Give `layer` .* or `output_key` to choose an output\."):
        hookscope.diff(Named("logits aux"), other, x)
    assert hookscope.diff(Named("logits aux"), other, x, output_key="logits").outputs[0].top1 == 2
    plain = nn.Sequential(OrderedDict(body=Named("logits").body))
    assert hookscope.diff(plain, other, x, output_key="logits").outputs[0].top1 == 2
    with pytest.raises(UsageError, match=r"no floating-point output 'scores'\. It has \['logits'\], \['aux'\]"):
        hookscope.diff(Named("logits aux"), "same", x, output_key="scores")
    with pytest.raises(UsageError, match="It has a single one or none"):
        hookscope.diff(plain, "same", x, output_key="logits")


# --- what cannot be compared ---


def test_outputs_of_other_form_are_an_error_but_for_layers() -> None:
    other = small(fc=nn.Linear(144, 7))
    with pytest.raises(UsageError, match=r"A \(Sequential\) returns \(2, 5\); B \(Sequential\) returns \(2, 7\)"):
        hookscope.diff(small(), other, pictures())
    result = hookscope.diff(small(), other, pictures(), layer=["conv", "relu"], reference="float64")
    assert [(row.index, row.layer) for row in result.rows] == [(0, "conv"), (1, "relu")]
    assert "Outputs cannot be compared" in result.warnings[0]
    assert result.outputs == ()


def test_rows_that_cannot_be_compared_are_not_said_to_be_equal() -> None:
    layers = nn.Linear(4, 4), Apply(Tensor.to_sparse), Apply(Tensor.to_dense), nn.Linear(4, 2)
    equal, other, output = answer(hookscope.diff(nn.Sequential(*layers), "same", torch.ones(2, 4)))
    assert (equal, output[:6]) == ("A and B are equal in 3 rows.", "Output")
    assert other == "1 of 4 rows cannot be compared, at layer 1: A is no dense tensor."
    (only, _) = answer(hookscope.diff(nn.Sequential(layers[1]), "same", torch.ones(2, 4)))
    assert only == "The only row cannot be compared, at layer 0: A is no dense tensor."


def test_a_network_that_takes_other_inputs_raises_under_its_name() -> None:
    other = small(conv=nn.Conv2d(1, 4, 3))
    with pytest.raises(ModelError, match=r"^B \(Sequential\) raised in its forward pass at conv \(Conv2d\)"):
        hookscope.diff(small(), other, pictures())
    with pytest.raises(ModelError, match=r"^A \(Sequential\) raised in its forward pass at conv"):
        hookscope.diff(other, small(), pictures())


class Picky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        if bool((x > 5).any()):
            raise ValueError("too large")
        return self.body(x)


def test_inputs_that_a_network_raises_on_are_left_out() -> None:
    x = torch.zeros(4, 4)
    x[2, 1] = 9
    failures: list[HookscopeError] = []
    before = threading.active_count()
    result = hookscope.diff(Picky(), "same", x, on_error=failures.append)
    assert len(result.inputs) == 3
    assert [type(failure) for failure in failures] == [UnfitInputError]
    assert result.first_differences == ()
    with pytest.raises(ModelError, match="too large"):
        hookscope.diff(Picky(), "same", x)
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fail_over": "rel"}, "is no condition"),
        ({"fail_over": "size>3"}, "there is no measure 'size'"),
        ({"fail_over": "rel>nan"}, "'nan' is not a number"),
        ({"fail_over": "output:added>0"}, "added is a measure of layers"),
        ({"fail_over": "conv@0:rel>0"}, "chooses a row by its position"),
        ({"fail_over": "added>1e-3"}, "It needs `shadow`"),
        ({"fail_over": "fc:kl>1"}, "kl is a measure of the output"),
        ({"shadow": True, "mode_b": "train"}, "only possible in eval mode"),
        ({"threads_b": 0}, "give 1 or more"),
        ({"weights_b": "none"}, "load them into a second module"),
    ],
)
def test_options_that_cannot_be_right_are_said_so(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        hookscope.diff(small(), "same", pictures(), **options)


def test_conditions_are_about_rows_patterns_and_the_output() -> None:
    other = small()
    with torch.no_grad():
        other.fc.weight *= -1
    conditions = [
        "rel>1e-3",
        "conv:rel>0",
        "fc:cosine<0",
        "top1<1",
        "output:rel>0.1",
        "sqnr<20",
        "!fc:rel>0",
        "!conv:rel>0",
    ]
    result = hookscope.diff(small(), other, pictures(), fail_over=conditions)
    actual = {(finding.rule, finding.where) for finding in result.exceeded}
    assert actual == {
        *(("rel>1e-3", "fc"), ("rel>1e-3", ""), ("sqnr<20", "fc"), ("sqnr<20", "")),
        *(("top1<1", ""), ("output:rel>0.1", ""), ("!conv:rel>0", "fc")),
        *({("fc:cosine<0", "fc")} if result["fc"].measures.cosine < 0 else set()),  # type: ignore[union-attr,operator]
    }


def test_a_difference_from_zeros_has_no_cosine_and_fails_a_condition_on_it() -> None:
    network, other = nn.Sequential(nn.Linear(4, 3)), nn.Sequential(nn.Linear(4, 3))
    nn.init.zeros_(other[0].weight)
    nn.init.zeros_(other[0].bias)
    result = hookscope.diff(network, other, torch.ones(2, 4), fail_over="cosine<-1")
    beyond = "is beyond 'cosine<-1': it cannot be measured."
    assert [finding.message for finding in result.exceeded] == [f"layer 0 {beyond}", f"The output {beyond}"]
    assert not hookscope.diff(network, network, torch.ones(2, 4), fail_over="cosine<0.9").exceeded


class Refusing(nn.Linear):
    """Takes numbers below a limit alone."""

    limit = math.inf

    def forward(self, x: Tensor) -> Tensor:
        if bool((x > self.limit).any()):
            raise ValueError("a large number")
        return super().forward(x)


def test_a_layer_that_raises_on_the_inputs_of_a_is_beyond_any_limit_of_what_it_adds() -> None:
    networks = [nn.Sequential(nn.Linear(1, 1), Refusing(1, 1), nn.Linear(1, 1)).eval() for _ in range(2)]
    networks[1].load_state_dict(networks[0].state_dict())
    with torch.no_grad():
        for network, factor in zip(networks, (1.0, 0.5), strict=True):
            network[0].weight.fill_(factor)
            network[0].bias.zero_()
    networks[1][1].limit = 0.75
    result = hookscope.diff(*networks, torch.ones(2, 1), shadow=True, fail_over="added>0.6")
    assert [finding.where for finding in result.exceeded] == ["1"]


class Widening(nn.Module):
    """Returns another number of columns where it `repeats`."""

    def __init__(self, *, repeats: bool) -> None:
        super().__init__()
        self.part, self.repeats = nn.Linear(4, 4), repeats

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x).repeat(1, 1 + self.repeats)


def test_shapes_that_differ_are_said_to_differ_though_their_row_is_not_listed() -> None:
    networks = [nn.Sequential(Widening(repeats=repeats), nn.AdaptiveAvgPool1d(2)) for repeats in (False, True)]
    networks[1].load_state_dict(networks[0].state_dict())
    (first, *_) = answer(hookscope.diff(*networks, torch.ones(2, 4), layer="1"))
    assert first.endswith("its output is the first to show it, shapes differ.")


def test_a_container_whose_own_code_makes_nan_says_so() -> None:
    network, other = nn.Sequential(nn.Linear(4, 3)).eval(), nn.Sequential(nn.Linear(4, 3)).eval()
    other.load_state_dict(network.state_dict())
    plain = other.forward
    other.forward = lambda x: plain(x) / torch.tensor([1.0, 0.0, 1.0]) * 0  # type: ignore[method-assign]
    (first, *_) = answer(hookscope.diff(network, other, torch.ones(2, 4)))
    assert first.endswith("its output is the first to show it, NaN or Inf on one side only.")


def test_a_network_without_values_cannot_be_compared() -> None:
    network = small()
    result = hookscope.diff(network, copy.deepcopy(network).to("meta"), pictures())
    assert {row.note for row in result.rows} == {"B is a meta tensor, which has no values"}
    assert answer(result)[-1] == "Output: it cannot be compared."


class Listed(nn.Module):
    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.order = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]), order

    def forward(self, x: Tensor) -> Tensor:
        for place in self.order:
            x = self.layers[place](x)
        return x


def test_a_layer_of_a_list_that_one_side_leaves_out_is_named() -> None:
    (first, *_) = answer(hookscope.diff(Listed((0, 1, 2)), Listed((0, 2)), torch.ones(2, 4)))
    assert first.startswith("First difference in (model), in its own code between the layers that it calls: layers.2")
    assert first.endswith(" Only A calls layers.1 there.")
