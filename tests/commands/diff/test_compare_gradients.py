"""Gradients of two networks."""

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookscope
from hookscope.commands.diff.describe import answer, gradients_answer
from hookscope.errors import HookscopeError, ModelError, UnfitInputError, UsageError
from tests.commands.diff.test_compare_networks import numpys, small
from tests.commands.diff.test_compare_networks import pictures as small_pictures
from tests.commands.diff.test_planted_faults import NETWORKS, seeded
from tests.inspection.odd_networks import scripted_child
from tests.networks import Apply

TARGET = 3


def autograds(network: nn.Module, x: Tensor, batch_size: int) -> dict[str, Tensor]:
    """Return what autograd gives for the cross entropy with one class, batch by batch, by our labels."""
    outputs: dict[str, list[Tensor]] = {}
    parameters = dict(network.named_parameters())
    summed = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    for batch in x.split(batch_size):
        values, seen = batch, {}
        for name, module in network.named_children():
            seen[name] = values = module(values.clone() if name == "relu" else values)
        loss = F.cross_entropy(values, torch.full((len(batch),), TARGET))
        actual = torch.autograd.grad(loss, [*seen.values(), *parameters.values()])
        for name, gradient in zip(seen, actual, strict=False):
            outputs.setdefault(name, []).append(gradient)
        for name, gradient in zip(parameters, actual[len(seen) :], strict=True):
            summed[name] += gradient
    joined = {f"{name} grad_output": torch.cat(output) for name, output in outputs.items()}
    return joined | {f"{name} grad": each for name, each in summed.items()}


@pytest.mark.parametrize("batch_size", [2, 5])
def test_gradients_of_outputs_and_parameters_are_those_of_autograd(batch_size: int) -> None:
    one, other = small(), small()
    with torch.no_grad():
        other.norm.weight[1] *= 1.5
    x = small_pictures(5)
    result = hookscope.diff(one, other, x, batch_size=batch_size, grads=True, loss="ce", target=TARGET)
    ours, theirs = autograds(one, x, batch_size), autograds(other, x, batch_size)
    assert {row.label for row in result.gradients} == ours.keys()
    for row in result.gradients:
        assert row.measures is not None
        assert row.measures.relative_l2 == pytest.approx(numpys(ours[row.label], theirs[row.label]), rel=1e-4)
        assert row.measures.max_at is not None
        difference = (ours[row.label] - theirs[row.label]).abs()
        assert float(difference[row.measures.max_at]) == pytest.approx(float(difference.max()), rel=1e-4)
    assert [difference.layer for difference in result.first_differences] == ["norm"]


def test_errors_of_gradients_are_those_beside_the_weights_in_float64() -> None:
    network, other, x = small(), small(), small_pictures(5)
    with torch.no_grad():
        other.norm.weight[1] *= 1.5
    options = {"batch_size": 2, "grads": True, "loss": "ce", "target": TARGET}
    result = hookscope.diff(network, other, x, reference="float64", **options)
    ours, theirs = autograds(network, x, 2), autograds(other, x, 2)
    exact = autograds(copy.deepcopy(network).double(), x.double(), 2)
    assert {row.label for row in result.gradients} == exact.keys()
    for row in result.gradients:
        assert row.error == pytest.approx(numpys(exact[row.label], ours[row.label]), rel=0.5)  # of some 1e-7
        assert row.error_b == pytest.approx(numpys(exact[row.label], theirs[row.label]), rel=1e-4)
        assert row.error_b > row.error
    worst = max(result.gradients, key=lambda row: row.error_b or 0)
    assert f"B's largest error is relative L2 {worst.error_b:.3g}, at {worst.label}" in gradients_answer(result)
    assert hookscope.diff(network, "same", x, **options).gradients[0].error is None


def test_sums_over_many_batches_are_not_rounded_to_half_precision() -> None:
    torch.manual_seed(0)
    network, x = nn.Linear(4, 3), torch.randn(600, 4)
    other = copy.deepcopy(network).bfloat16()
    options: dict[str, Any] = {"batch_axis": 0, "grads": True, "loss": "ce", "target": 0}
    many, one = (hookscope.diff(network, other, x, batch_size=size, **options) for size in (1, 600))
    for row, whole in zip(many.gradients, one.gradients, strict=True):
        assert row.measures is not None
        assert whole.measures is not None
        assert row.measures.relative_l2 < 0.005  # 2^-8 is the rounding of bfloat16
        assert (row.dtype_b, row.measures.ulps) == ("bfloat16", pytest.approx(whole.measures.ulps, abs=0.9))


def test_gradients_that_are_nan_on_one_side_are_said() -> None:
    one, other = small(), small()
    with torch.no_grad():
        other.fc.bias[0] = math.inf
    result = hookscope.diff(one, other, small_pictures(), grads=True, loss="ce", target=TARGET)
    assert "hold NaN or Inf on one side only, conv grad_output among them" in gradients_answer(result)


def test_equal_networks_have_equal_gradients_and_are_left_as_they_were() -> None:
    one, other = small().train(), small()
    one.conv.weight.grad = torch.ones_like(one.conv.weight)
    before = copy.deepcopy(one.state_dict())
    result = hookscope.diff(one, other, small_pictures(3), grads=True)
    assert [row.measures.relative_l2 for row in result.gradients if row.measures] == [0.0] * 11
    assert one.training
    assert torch.equal(one.conv.weight.grad, torch.ones_like(one.conv.weight))
    assert all(parameter.grad is None for parameter in other.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in one.state_dict().items())


def test_an_edit_of_b_changes_its_gradients_and_the_layers_of_a_are_chosen() -> None:
    result = hookscope.diff(
        small(), "same", small_pictures(), layer="fc", edit_b="fc:grad:scale(3)", grads=True, loss="sum"
    )
    by_label = {row.label: row for row in result.gradients}
    assert set(by_label) >= {"fc grad_output", "conv.weight grad"}
    assert not {"conv grad_output", "relu grad_output"} & by_label.keys()
    assert by_label["conv.weight grad"].measures is not None
    assert by_label["conv.weight grad"].measures.relative_l2 == pytest.approx(2.0, rel=1e-5)  # |3 g - g| / |g|
    assert result["fc"].measures is not None
    assert result["fc"].measures.relative_l2 == 0.0


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
def test_a_copy_of_torchscript_has_the_same_gradients() -> None:
    result = hookscope.diff(scripted_child(), "same", torch.randn(2, 3), grads=True, loss="sum", shadow=True)
    assert {row.relative_l2 for row in (*result.rows, *result.gradients)} == {0.0}


def test_a_gradient_that_one_side_alone_has_is_listed() -> None:
    one, other = small(), small()
    other.conv.weight.requires_grad_(requires_grad=False)
    result = hookscope.diff(one, other, small_pictures(), grads=True)
    actual = {row.label: row for row in result.gradients}["conv.weight grad"]
    assert (actual.measures, actual.note) == (None, "B has no gradient here")


def test_layers_of_other_names_are_paired_and_threads_are_as_before() -> None:
    threads = torch.get_num_threads()
    one = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    other = nn.ModuleDict({"a": copy.deepcopy(one)})
    other.forward = other["a"].forward
    result = hookscope.diff(one, other, torch.randn(2, 4), grads=True, threads_b=1, map="*=a.*")
    assert [row.label_b for row in result.gradients if row.label == "2.weight grad"] == ["a.2.weight grad"]
    assert all(row.measures is not None and row.measures.relative_l2 < 1e-6 for row in result.gradients)
    assert torch.get_num_threads() == threads


class Forgetful(nn.Linear):
    """Raises on large inputs, unless it runs without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and x.max() > 8:
            raise ValueError("too large")
        return super().forward(x)


def test_an_input_without_gradients_is_in_no_row() -> None:
    x = torch.randn(4, 4)
    x[2, 1] = 9
    network, other = Forgetful(4, 2), Forgetful(4, 2)
    failures: list[HookscopeError] = []
    result = hookscope.diff(network, other, x, on_error=failures.append, grads=True, loss="sum")
    wanted = hookscope.diff(network, other, x[[0, 1, 3]], grads=True, loss="sum")
    assert [type(failure) for failure in failures] == [UnfitInputError]
    assert [tensor.shape for tensor in (*result.rows, *result.outputs)] == [(3, 2), (3, 2)]
    assert result.outputs[0].input_count == 3
    for row, same in zip((*result.rows, *result.gradients), (*wanted.rows, *wanted.gradients), strict=True):
        assert row.measures is not None
        assert same.measures is not None
        assert row.measures.relative_l2 == pytest.approx(same.measures.relative_l2, rel=1e-5)


class Filtering(nn.Module):
    """Weighs the frequencies of its input."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.weights = nn.Parameter(weights)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.weights, n=x.shape[-1])


def test_complex_weights_stay_complex_in_another_dtype() -> None:
    weights, x = torch.complex(torch.linspace(1, 2, 5), torch.linspace(-1, 1, 5)), torch.randn(2, 8)
    result = hookscope.diff(Filtering(weights), "same", x, dtype_b="float64", grads=True, loss="sum")
    differences = [row.measures and row.measures.relative_l2 for row in (*result.rows, *result.gradients)]
    assert all(difference is not None and difference < 1e-6 for difference in differences)
    beside = hookscope.diff(Filtering(weights), Filtering(weights.real.clone()), x, grads=True, loss="sum")
    assert beside.gradients[-1].note == "one is complex, the other real"


class OnlyForward(nn.Linear):
    """Its output cannot be differentiated."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach().round()


def test_a_network_without_gradients_is_an_error() -> None:
    with pytest.raises(ModelError, match="gradient"):
        hookscope.diff(OnlyForward(4, 2), "same", torch.randn(2, 4), grads=True)


def divided(x: Tensor) -> Tensor:
    output = x[:, :1] * 1
    if output.requires_grad:
        output.register_hook(lambda _gradient: 1 / 0)
    return output


def overwritten(x: Tensor) -> Tensor:
    first, second = x.chunk(2, 1)
    with torch.no_grad():
        first.mul_(2)
    return second


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            divided,
            r"{} \(Sequential\) raised in its backward pass at \(model\) \(Sequential\): ZeroDivisionError:",
        ),
        (overwritten, r"The loss of {} \(Sequential\) raised RuntimeError: Output 1 of Split is a view"),
    ],
)
def test_what_raises_for_a_gradient_is_named_with_its_side(function: Callable[[Tensor], Tensor], message: str) -> None:
    x, network = torch.randn(3, 4), nn.Sequential(nn.Linear(4, 2), Apply(lambda x: x[:, :1] * 1))
    raising = nn.Sequential(network[0], Apply(function))
    for side, networks in (("A", (raising, network)), ("B", (network, raising))):
        with pytest.raises(ModelError, match=f"^{message.format(side)}") as raised:
            hookscope.diff(*networks, x, layer="0", grads=True, loss="sum")
        assert "\n" not in str(raised.value)


def test_a_loss_needs_gradients_and_gradients_need_inputs() -> None:
    with pytest.raises(UsageError, match="need `grads`"):
        hookscope.diff(small(), "same", small_pictures(), loss="ce")
    with pytest.raises(UsageError, match="`grads` applies to models that run over pictures"):
        hookscope.diff(small(), small(), grads=True)
    with pytest.raises(UsageError, match="no loss"):
        hookscope.diff(small(), "same", small_pictures(), grads=True, loss="absent")


# --- The first gradient that differs where activations agree ---


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


def first_labels(network: nn.Module, picture: Tensor) -> Iterator[tuple[str, Callable[[nn.Module], None], set[str]]]:
    """Yield every fault that can be planted in a network, with the gradients of which one differs first."""
    calls = Counter[str]()
    for name, module in network.named_modules():
        module.register_forward_hook(lambda *_, name=name: calls.update([name]))
    copy.deepcopy(network)(picture)
    for name, module in network.named_modules():
        module._forward_hooks.clear()
        last = f"{name}#{calls[name] - 1}" if calls[name] > 1 else name
        own = {f"{name}.{parameter} grad" for parameter, _ in module.named_parameters(recurse=False)} or {
            f"{last}[0] grad_input"
        }
        if isinstance(module, nn.Conv2d):
            yield name, wrong_for_the_weight, {f"{name}.weight grad"}
            yield name, wrong_at_the_input, {f"{last}[0] grad_input"}
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d | nn.ReLU | nn.Hardswish | nn.GELU | nn.LayerNorm):
            yield name, wrong_at_the_output, own
            yield name, detached, own


@pytest.mark.parametrize(("name", "every"), [("mobilenet", 19), ("vision transformer", 3)])
@pytest.mark.sample("mobilenet-19")
def test_the_first_gradient_that_a_fault_changes_is_named(name: str, every: int) -> None:
    network = seeded(NETWORKS[name])
    picture = torch.randn(1, 3, 32, 32)
    planted = [*first_labels(network, picture)][::every]
    missed = []
    for layer, plant, labels in planted:
        faulty = copy.deepcopy(network)
        plant(faulty.get_submodule(layer))
        result = hookscope.diff(network, faulty, picture, grads=True)
        if result.first_gradient_difference not in labels or result.first_differences:
            missed.append((layer, plant.__name__, result.first_gradient_difference))
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
        ("cut residual", "1.conv2 grad_output"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"layer": "4", "batch_size": 2}], ids=["all", "layer"])
def test_a_fault_between_layers_shows_first_at_the_layer_before(
    fault: str, first: str, options: dict[str, Any]
) -> None:
    network, faulty = blocks(), blocks()
    faulty.get_submodule("2").fault = fault  # type: ignore[assignment]
    result = hookscope.diff(network, faulty, pictures(), grads=True, loss="sum", **options)
    assert result.first_gradient_difference == first
    assert first in [row.label for row in result.gradients]


def test_the_first_gradient_that_differs_has_its_size_and_a_sentence() -> None:
    network, faulty = blocks(), blocks()
    wrong_at_the_input(faulty.get_submodule("2.conv2"))
    result = hookscope.diff(network, faulty, pictures(), grads=True)
    rows = {row.label: row for row in result.gradients}
    measures = rows[result.first_gradient_difference].measures
    assert measures is not None
    assert measures.relative_l2 == pytest.approx(0.05, rel=1e-4)
    assert rows["2.conv2.weight grad"].origin == "equal"
    first, second = answer(result)[:2]
    assert first == (
        "The first gradient to differ in the backward pass is 2.conv2[0] grad_input (Conv2d): relative L2 0.0500; "
        "the activations agree."
    )
    assert second == "A and B are equal in 9 rows."


def test_a_gradient_that_is_edited_is_the_first() -> None:
    result = hookscope.diff(blocks(), "same", pictures(), grads=True, edit_b="2.conv1:grad:scale(3)")
    assert (result.first_gradient_difference, result.warnings) == ("2.conv1 grad_output", ())
    result = hookscope.diff(blocks(), "same", pictures(), grads=True, edit_b="param:2.conv1.weight:grad:scale(3)")
    assert result.first_gradient_difference == "2.conv1.weight grad"


def test_where_activations_differ_the_gradients_follow() -> None:
    network, faulty = blocks(), blocks()
    with torch.no_grad():
        faulty.get_submodule("1.conv1").weight.mul_(1.01)  # type: ignore[operator, union-attr]
    result = hookscope.diff(network, faulty, pictures(), grads=True)
    assert [difference.layer for difference in result.first_differences] == ["1.conv1"]
    assert result.first_gradient_difference == ""
    assert any(text.startswith("The gradients follow: relative L2 at most") for text in answer(result))


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
@pytest.mark.parametrize(("keeps", "reentrant"), [(True, True), (False, True), (True, False)])
def test_checkpointing_makes_a_difference_only_where_it_drops_others(keeps: bool, reentrant: bool) -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Dropping(), nn.Linear(6, 6))
    network = nn.Sequential(nn.Linear(4, 6), Checkpointed(inner, {}), nn.Linear(6, 3)).eval()
    other = copy.deepcopy(network)
    other.get_submodule("1").options = {"use_reentrant": reentrant, "preserve_rng_state": keeps}  # type: ignore[assignment]
    result = hookscope.diff(network, other, torch.randn(5, 4), grads=True)
    assert result.first_differences == ()
    assert result.first_gradient_difference.startswith("1.inner.3" if not keeps else "")
    assert bool(result.first_gradient_difference) is not keeps


def test_gradients_that_are_0_but_for_rounding_are_no_fault() -> None:
    torch.manual_seed(0)
    parts = (nn.Conv2d(3, 16, 3), nn.InstanceNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.InstanceNorm2d(8))
    network = nn.Sequential(*parts, nn.Flatten(), nn.Linear(8 * 20 * 20, 5)).eval()
    result = hookscope.diff(network, "same", torch.randn(2, 3, 24, 24), grads=True, dtype_b="float64")
    rows = {row.label: row for row in result.gradients}
    assert rows["0.bias grad"].measures is not None
    assert rows["0.bias grad"].measures.relative_l2 > 0.01  # of noise: a bias before a normalisation does nothing
    assert result.first_gradient_difference == ""


class NaN(torch.autograd.Function):
    """The identity, with a gradient that is NaN for the first input."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
        gradient = gradients[0].clone()
        gradient[0] = math.nan
        return gradient


def nan_at_the_output(module: nn.Module) -> None:
    plain = module.forward
    module.forward = lambda x: NaN.apply(plain(x))  # type: ignore[method-assign, no-untyped-call]


def test_a_first_gradient_that_is_nan_is_said_with_its_side() -> None:
    network, faulty = blocks(), blocks()
    nan_at_the_output(faulty.get_submodule("2"))
    result = hookscope.diff(network, faulty, pictures(), grads=True)
    assert result.first_gradient_difference == "2.conv2 grad_output"
    assert answer(result)[0] == (
        "The first gradient to differ in the backward pass is 2.conv2 grad_output (Conv2d): "
        "B is NaN (144 of 432 values); the activations agree."
    )
