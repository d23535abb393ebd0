"""Gradients of two networks side by side."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hookscope
from hookscope.errors import HookscopeError, ModelError, UnfitInputError, UsageError
from hookscope.render.weights_text import gradients_answer
from tests.differences.test_running import Picky, numpys, pictures, small

TARGET = 3


def autograds(network: nn.Module, x: Tensor, batch_size: int) -> dict[str, Tensor]:
    """Return what autograd gives for the cross entropy with one class, batch by batch, by our labels."""
    outputs: dict[str, list[Tensor]] = {}
    parameters = dict(network.named_parameters())
    summed = {name: torch.zeros_like(each) for name, each in parameters.items()}
    for batch in x.split(batch_size):
        values, seen = batch, {}
        for name, module in network.named_children():
            seen[name] = values = module(values.clone() if name == "relu" else values)
        loss = F.cross_entropy(values, torch.full((len(batch),), TARGET))
        found = torch.autograd.grad(loss, [*seen.values(), *parameters.values()])
        for name, gradient in zip(seen, found, strict=False):
            outputs.setdefault(name, []).append(gradient)
        for name, gradient in zip(parameters, found[len(seen) :], strict=True):
            summed[name] += gradient
    joined = {f"{name} grad_output": torch.cat(each) for name, each in outputs.items()}
    return joined | {f"{name} grad": each for name, each in summed.items()}


@pytest.mark.parametrize("batch_size", [2, 5])
def test_gradients_of_outputs_and_parameters_are_those_of_autograd(batch_size: int) -> None:
    one, other = small(), small()
    with torch.no_grad():
        other.norm.weight[1] *= 1.5
    x = pictures(5)
    result = hookscope.diff(one, other, x, batch_size=batch_size, grads=True, loss="ce", target=TARGET)
    ours, theirs = autograds(one, x, batch_size), autograds(other, x, batch_size)
    assert {row.label for row in result.gradients} == ours.keys()
    for row in result.gradients:
        assert row.measures is not None
        assert row.measures.relative_l2 == pytest.approx(numpys(ours[row.label], theirs[row.label]), rel=1e-4)
        assert row.measures.max_at is not None
        difference = (ours[row.label] - theirs[row.label]).abs()
        assert float(difference[row.measures.max_at]) == pytest.approx(float(difference.max()), rel=1e-4)
    assert [birth.layer for birth in result.births] == ["norm"]


def test_errors_of_gradients_are_those_beside_the_weights_in_float64() -> None:
    network, other, x = small(), small(), pictures(5)
    with torch.no_grad():
        other.norm.weight[1] *= 1.5
    given = {"batch_size": 2, "grads": True, "loss": "ce", "target": TARGET}
    result = hookscope.diff(network, other, x, reference="float64", **given)
    ours, theirs = autograds(network, x, 2), autograds(other, x, 2)
    exact = autograds(copy.deepcopy(network).double(), x.double(), 2)
    assert {row.label for row in result.gradients} == exact.keys()
    for row in result.gradients:
        assert row.error == pytest.approx(numpys(exact[row.label], ours[row.label]), rel=0.5)  # of some 1e-7
        assert row.error_b == pytest.approx(numpys(exact[row.label], theirs[row.label]), rel=1e-4)
        assert row.is_worse
    worst = max(result.gradients, key=lambda row: row.error_b or 0)
    assert f"B's largest error is relative L2 {worst.error_b:.3g}, at {worst.label}" in gradients_answer(result)
    assert hookscope.diff(network, "same", x, **given).gradients[0].error is None


def test_gradients_that_are_nan_on_one_side_are_said() -> None:
    one, other = small(), small()
    with torch.no_grad():
        other.fc.bias[0] = math.inf
    result = hookscope.diff(one, other, pictures(), grads=True, loss="ce", target=TARGET)
    assert "hold NaN or Inf on one side alone, conv grad_output among them" in gradients_answer(result)


def test_equal_networks_have_equal_gradients_and_are_left_as_they_were() -> None:
    one, other = small().train(), small()
    one.conv.weight.grad = torch.ones_like(one.conv.weight)
    before = copy.deepcopy(one.state_dict())
    result = hookscope.diff(one, other, pictures(3), grads=True)
    assert [row.measures.relative_l2 for row in result.gradients if row.measures] == [0.0] * 11
    assert one.training
    assert torch.equal(one.conv.weight.grad, torch.ones_like(one.conv.weight))
    assert all(each.grad is None for each in other.parameters())
    assert all(torch.equal(each, before[name]) for name, each in one.state_dict().items())


def test_an_edit_of_b_changes_its_gradients_and_the_layers_of_a_are_chosen() -> None:
    result = hookscope.diff(small(), "same", pictures(), layer="fc", edit_b="fc:grad:scale(3)", grads=True, loss="sum")
    by_label = {row.label: row for row in result.gradients}
    assert set(by_label) >= {"fc grad_output", "conv.weight grad"}
    assert not {"conv grad_output", "relu grad_output"} & by_label.keys()
    assert by_label["conv.weight grad"].measures is not None
    assert by_label["conv.weight grad"].measures.relative_l2 == pytest.approx(2.0, rel=1e-5)  # |3 g - g| / |g|
    assert result["fc"].measures is not None
    assert result["fc"].measures.relative_l2 == 0.0


def test_a_gradient_that_one_side_alone_has_is_listed() -> None:
    one, other = small(), small()
    other.conv.weight.requires_grad_(requires_grad=False)
    result = hookscope.diff(one, other, pictures(), grads=True)
    found = {row.label: row for row in result.gradients}["conv.weight grad"]
    assert (found.measures, found.note) == (None, "B has no gradient here")


def test_layers_of_other_names_are_paired_and_threads_are_as_before() -> None:
    threads = torch.get_num_threads()
    one = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    other = nn.ModuleDict({"a": copy.deepcopy(one)})
    other.forward = other["a"].forward
    result = hookscope.diff(one, other, torch.randn(2, 4), grads=True, threads_b=1, map="*=a.*")
    assert [row.label_b for row in result.gradients if row.label == "2.weight grad"] == ["a.2.weight grad"]
    assert all(row.measures is not None and row.measures.relative_l2 < 1e-6 for row in result.gradients)
    assert torch.get_num_threads() == threads


def test_inputs_that_a_network_raises_on_are_left_out_and_told_once() -> None:
    x = torch.ones(4, 4)
    x[2, 1] = 9
    failures: list[HookscopeError] = []
    network = Picky()
    result = hookscope.diff(network, "same", x, on_error=failures.append, grads=True, loss="sum")
    assert [type(each) for each in failures] == [UnfitInputError]
    assert len(result.inputs) == 3
    assert all(row.measures is not None and row.measures.relative_l2 == 0 for row in result.gradients)


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
    assert all(each is not None and each < 1e-6 for each in differences)
    beside = hookscope.diff(Filtering(weights), Filtering(weights.real.clone()), x, grads=True, loss="sum")
    assert beside.gradients[-1].note == "one is complex, the other real"


class OnlyForward(nn.Linear):
    """Its output cannot be differentiated."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach().round()


def test_a_network_without_gradients_is_an_error() -> None:
    with pytest.raises(ModelError, match="gradient"):
        hookscope.diff(OnlyForward(4, 2), "same", torch.randn(2, 4), grads=True)


def test_a_loss_needs_gradients_and_gradients_need_inputs() -> None:
    with pytest.raises(UsageError, match="need --grads"):
        hookscope.diff(small(), "same", pictures(), loss="ce")
    with pytest.raises(UsageError, match="--grads goes with models that run over pictures"):
        hookscope.diff(small(), small(), grads=True)
    with pytest.raises(UsageError, match="no loss"):
        hookscope.diff(small(), "same", pictures(), grads=True, loss="absent")
