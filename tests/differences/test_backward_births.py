"""A fault planted in a backward pass alone: the layer that it begins in is named."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookscope
from hookscope.render.differences_text import answer
from hookscope.results.differences import Differences
from tests.differences.test_planted_faults import NETWORKS, seeded


class Scaled(torch.autograd.Function):
    """The identity, with a gradient that is 1.05 times what it should be."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 1.05


def scaled(x: Tensor) -> Tensor:
    result: Tensor = Scaled.apply(x)  # type: ignore[no-untyped-call]
    return result


def wrong_at_the_input(module: nn.Module) -> None:
    plain = module.forward
    module.forward = lambda x: plain(scaled(x))  # type: ignore[method-assign]


def wrong_at_the_output(module: nn.Module) -> None:
    plain = module.forward
    module.forward = lambda x: scaled(plain(x))  # type: ignore[method-assign]


def wrong_for_the_weight(module: nn.Module) -> None:
    assert isinstance(module, nn.Conv2d)
    module.forward = lambda x: module._conv_forward(x, scaled(module.weight), module.bias)  # type: ignore[method-assign]


def detached(module: nn.Module) -> None:
    plain = module.forward
    module.forward = lambda x: plain(x).detach()  # type: ignore[method-assign]


def faults(network: nn.Module) -> Iterator[tuple[str, Callable[[nn.Module], None]]]:
    """Give every fault that can be planted in a network, with where it is."""
    for name, module in network.named_modules():
        if isinstance(module, nn.Conv2d):
            yield name, wrong_for_the_weight
            yield name, wrong_at_the_input
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d | nn.ReLU | nn.Hardswish | nn.GELU | nn.LayerNorm):
            yield name, wrong_at_the_output
            yield name, detached


@pytest.mark.parametrize(
    ("name", "every"), [("resnet of basic blocks", 14), ("mobilenet", 19), ("vision transformer", 3)]
)
def test_each_fault_is_named_where_it_is_planted(name: str, every: int) -> None:
    network = seeded(NETWORKS[name])
    picture = torch.randn(1, 3, 32, 32)
    planted = [*faults(network)][::every]
    missed = []
    for layer, plant in planted:
        faulty = copy.deepcopy(network)
        plant(faulty.get_submodule(layer))
        result = hookscope.diff(network, faulty, picture, grads=True)
        named = [birth.layer for birth in result.gradient_births]
        if named != [layer] or result.births:
            missed.append((layer, plant.__name__, named))
    assert len(planted) > 4
    assert missed == []


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.act, self.conv2 = nn.Conv2d(4, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 4, 3, padding=1)
        self.fault = ""

    def forward(self, x: Tensor) -> Tensor:
        between = self.conv1(x)
        between = {"wrong between": scaled, "cut between": Tensor.detach}.get(self.fault, lambda y: y)(between)
        values: Tensor = self.conv2(self.act(between)) + (x.detach() if self.fault == "cut residual" else x)
        return values


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), Block(), Block(), nn.Flatten(), nn.Linear(144, 5)).eval()


def pictures() -> Tensor:
    return torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("fault", "first"),
    [
        ("wrong between", "2.conv1 grad_output"),
        ("cut between", "2.conv1 grad_output"),
        ("cut residual", "2[0] grad_input"),
    ],
)
@pytest.mark.parametrize("given", [{}, {"layer": "4", "batch_size": 2}, {"ops": True}], ids=["all", "layer", "ops"])
def test_code_between_layers_is_told_from_them(fault: str, first: str, given: dict[str, Any]) -> None:
    network, faulty = blocks(), blocks()
    faulty.get_submodule("2").fault = fault  # type: ignore[assignment]
    result = hookscope.diff(network, faulty, pictures(), grads=True, loss="sum", **given)
    assert [(each.layer, each.row, each.in_own_code) for each in result.gradient_births] == [("2", first, True)]
    assert answer(result)[0].startswith("The difference is born in the backward pass of 2")
    assert "in its own code between the layers that it calls" in answer(result)[0]


def of_one_fault(result: Differences) -> tuple[str, str, float]:
    (birth,) = result.gradient_births
    assert result.births == ()
    assert [row.origin for row in result.gradients if row.label == birth.row] == ["born"]
    return birth.layer, birth.row, birth.relative_l2


def test_the_row_that_shows_a_fault_has_its_size_and_what_arrives_there() -> None:
    network, faulty = blocks(), blocks()
    wrong_at_the_input(faulty.get_submodule("2.conv2"))
    result = hookscope.diff(network, faulty, pictures(), grads=True)
    assert of_one_fault(result) == ("2.conv2", "2.conv2[0] grad_input", pytest.approx(0.05, rel=1e-4))
    rows = {row.label: row for row in result.gradients}
    assert rows["2.conv2.weight grad"].origin == "equal"
    assert rows["2.conv2.weight grad"].input_relative_l2 == 0.0
    assert rows["2.conv1.weight grad"].origin == "passed on"
    assert rows["2.conv1.weight grad"].input_relative_l2 == pytest.approx(0.05, rel=1e-4)
    first, second = answer(result)[:2]
    assert first.startswith("The difference is born in the backward pass of 2.conv2 (Conv2d): 2.conv2[0] grad_input, ")
    assert first.endswith("relative L2 0.0500; its activations agree, and the gradients of its outputs are equal.")
    assert second == "A and B are equal, bit for bit, in 9 rows."


def test_an_edited_gradient_is_named_and_is_said_to_be_applied() -> None:
    result = hookscope.diff(blocks(), "same", pictures(), grads=True, edit_b="2.conv1:grad:scale(3)")
    assert of_one_fault(result) == ("2.conv1", "2.conv1 grad_output", pytest.approx(2.0))
    assert result.warnings == ()
    result = hookscope.diff(blocks(), "same", pictures(), grads=True, edit_b="param:2.conv1.weight:grad:scale(3)")
    assert of_one_fault(result) == ("2.conv1", "2.conv1.weight grad", pytest.approx(2.0))


def test_two_faults_on_ways_apart_are_both_named_and_one_behind_another_is_not() -> None:
    network, faulty = blocks(), blocks()
    for layer in ("2.conv2", "1.conv2"):
        wrong_for_the_weight(faulty.get_submodule(layer))
    result = hookscope.diff(network, faulty, pictures(), grads=True)
    assert [birth.layer for birth in result.gradient_births] == ["2.conv2", "1.conv2"]
    assert answer(result)[1].startswith("It is born again in the backward pass of 1.conv2")
    wrong_at_the_output(faulty.get_submodule("2.act"))
    result = hookscope.diff(network, faulty, pictures(), grads=True)
    assert [birth.layer for birth in result.gradient_births] == ["2.conv2", "2.act"]


def test_a_loss_that_differs_is_named() -> None:
    network, faulty = blocks(), blocks()
    faulty.register_forward_hook(lambda _module, _args, output: scaled(output))
    result = hookscope.diff(network, faulty, pictures(), grads=True)
    assert [birth.layer for birth in result.gradient_births] == [""]


def test_where_activations_differ_the_gradients_are_a_consequence() -> None:
    network, faulty = blocks(), blocks()
    with torch.no_grad():
        faulty.get_submodule("1.conv1").weight.mul_(1.01)  # type: ignore[operator, union-attr]
    result = hookscope.diff(network, faulty, pictures(), grads=True)
    assert [birth.layer for birth in result.births] == ["1.conv1"]
    assert result.gradient_births == ()
    assert any(each.startswith("The gradients differ as a consequence: relative L2 at most") for each in answer(result))


class Dropping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, training=True)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, options: dict[str, Any]) -> None:
        super().__init__()
        self.inner, self.options = inner, options

    def forward(self, x: Tensor) -> Tensor:
        values: Tensor = checkpoint(self.inner, x, **self.options) if self.options else self.inner(x)
        return values


@pytest.mark.filterwarnings("ignore:None of the inputs:UserWarning")  # in the pass without gradients
@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "drawn again"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_checkpointing_is_named_only_where_it_drops_others(keeps: bool, reentrant: bool) -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Dropping(), nn.Linear(6, 6))
    network = nn.Sequential(nn.Linear(4, 6), Checkpointed(inner, {}), nn.Linear(6, 3)).eval()
    other = copy.deepcopy(network)
    other.get_submodule("1").options = {"use_reentrant": reentrant, "preserve_rng_state": keeps}  # type: ignore[assignment]
    result = hookscope.diff(network, other, torch.randn(5, 4), grads=True)
    assert result.births == ()
    assert [birth.layer for birth in result.gradient_births][:1] == ([] if keeps else ["1.inner.3"])


def test_gradients_that_are_0_but_for_rounding_are_no_fault() -> None:
    torch.manual_seed(0)
    parts = (nn.Conv2d(3, 16, 3), nn.InstanceNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.InstanceNorm2d(8))
    network = nn.Sequential(*parts, nn.Flatten(), nn.Linear(8 * 20 * 20, 5)).eval()
    result = hookscope.diff(network, "same", torch.randn(2, 3, 24, 24), grads=True, dtype_b="float64")
    rows = {row.label: row for row in result.gradients}
    assert rows["0.bias grad"].measures is not None
    assert rows["0.bias grad"].measures.relative_l2 > 0.01  # of noise: a bias before a normalisation does nothing
    assert result.gradient_births == ()


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.left(x), self.right(x)], 1)


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([1e5 * x[:, :2], self.branch(x[:, 2:])], 1)


def test_a_difference_that_a_large_gradient_hides_for_a_while_is_not_born_again() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(Halves(), Uneven()).eval()
    faulty = copy.deepcopy(network)
    wrong_at_the_input(faulty.get_submodule("1.branch"))
    result = hookscope.diff(network, faulty, torch.randn(3, 4), grads=True)
    rows = {row.label: row for row in result.gradients}
    assert rows["0.right grad_output"].measures is not None
    assert rows["0.right grad_output"].measures.relative_l2 == pytest.approx(0.05, rel=1e-4)
    assert of_one_fault(result)[0] == "1.branch"
