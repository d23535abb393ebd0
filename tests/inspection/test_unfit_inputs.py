"""Inputs that the model raises on are named and left out, and the others come out as if these had never been."""

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookscope
from hookscope.errors import UnfitInputError
from hookscope.inputs.batches import Batch
from hookscope.results.activations import Activations
from hookscope.results.gradients import Gradients
from hookscope.results.inputs import InputRecord
from tests.inspections import inspect, inspect_gradients
from tests.networks import Written

VALUES = [1.0, 2.0, -3.0, 4.0, 5.0, -6.0]
GOOD = [value for value in VALUES if value > 0]


class Picky(nn.Module):
    """Refuses a batch with a negative value in it, after some of its layers have run and a buffer has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros(1))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.first(x) + self.calls
        y = y * torch.bernoulli(torch.full_like(y, 0.5))
        if (x < 0).any():
            raise ValueError("negative")
        return self.second(self.drop(y))


class _NoWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if (ctx.saved_tensors[0] < 0).any():
            raise ValueError("negative on the way back")
        return gradient


class PickyBackwards(nn.Module):
    """Refuses such a batch in the backward pass, when the last layer has its gradient already."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) + _NoWayBack.apply(x.requires_grad_()))


def build(kind: type[nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return kind()


def batches(values: Sequence[float], size: int) -> Iterator[Batch]:
    for begin in range(0, len(values), size):
        part = values[begin : begin + size]
        records = tuple(InputRecord(f"{value:g}.npy", "digest", None, (3,), ()) for value in part)
        rows = torch.tensor(part)[:, None] * torch.tensor([1.0, 0.5, 0.25])
        yield Batch((rows,), tuple(range(begin, begin + len(part))), records)


def rows_of(inspection: Activations | Gradients) -> list[tuple[object, ...]]:
    return [
        (row.label, row.activation.element_count, row.activation.mean, row.activation.l2) for row in inspection.rows
    ]


@pytest.mark.parametrize(
    "run",
    [inspect, partial(inspect_gradients, loss="sum")],  # a loss without numbers for each position
    ids=["forward", "gradients"],
)
def test_the_others_come_out_as_if_the_unfit_had_never_been(run: Callable[..., Any]) -> None:
    errors: list[UnfitInputError] = []
    network = build(Picky)
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    actual = run(network, batches(VALUES, 1), on_error=errors.append)
    expected = run(build(Picky), batches(GOOD, 1))
    assert [error.names for error in errors] == [("-3.npy",), ("-6.npy",)]
    assert str(errors[0]) == (
        "-3.npy: Picky raised in its forward pass at (model) (Picky), given an input of shape (1, 3): "
        "ValueError: negative"
    )
    assert [record.name for record in actual.inputs] == ["1.npy", "2.npy", "4.npy", "5.npy"]
    assert rows_of(actual) == rows_of(expected)
    assert actual.failure is None
    assert all(torch.equal(state[name], tensor) for name, tensor in network.state_dict().items())
    if isinstance(actual, Gradients):
        assert [row.gradient for row in actual.parameters] == [row.gradient for row in expected.parameters]
        assert [row.gradient for row in actual.gradients] == [row.gradient for row in expected.gradients]
        assert actual.loss.value == expected.loss.value


@pytest.mark.parametrize("kind", [Picky, PickyBackwards])
def test_of_a_batch_that_the_model_refuses_each_input_is_tried_alone(kind: type[nn.Module]) -> None:
    errors: list[UnfitInputError] = []
    gradients = inspect_gradients(build(kind), batches(VALUES, 4), loss="sum", on_error=errors.append)
    assert [error.names for error in errors] == [("-3.npy",), ("-6.npy",)]
    assert [record.name for record in gradients.inputs] == ["1.npy", "2.npy", "4.npy", "5.npy"]
    (message,) = [warning for warning in gradients.warnings if "one by one" in warning]
    assert message.startswith("The model raised on a batch of 4 inputs (1.npy to 4.npy) and on 1 other batch: ")


def test_a_backward_pass_that_raises_leaves_no_gradient_behind() -> None:
    network = build(PickyBackwards)
    errors: list[UnfitInputError] = []
    gradients = inspect_gradients(network, batches(VALUES, 1), loss="sum", on_error=errors.append)
    assert "raised in its backward pass" in str(errors[0])
    outputs = sum(network(next(batches([value], 1)).args[0]).sum() for value in GOOD)
    names, parameters = zip(*network.named_parameters(), strict=True)
    expected = torch.autograd.grad(outputs, parameters)
    assert [row.name for row in gradients.parameters] == list(names)
    for row, gradient in zip(gradients.parameters, expected, strict=True):
        assert row.gradient.l2 == pytest.approx(gradient.norm().item(), rel=1e-5)
    assert gradients.loss.value == pytest.approx(outputs.item(), rel=1e-5)
    assert all(parameter.grad is None for parameter in network.parameters())


def test_maps_and_predictions_belong_to_the_inputs_that_are_left() -> None:
    network = nn.Sequential(_Refusing(), nn.Conv2d(1, 2, 1))
    pictures = [torch.full((1, 1, 2, 2), value) for value in (-1.0, 2.0, -3.0, 4.0)]
    inputs = [
        Batch((picture,), (index,), (InputRecord(f"{index}", "digest", None, (1, 2, 2), ()),))
        for index, picture in enumerate(pictures)
    ]
    actual = inspect(network, inputs, ["1"], grids_for=2, on_error=lambda _error: None)
    assert [record.name for record in actual.inputs] == ["1", "3"]
    assert [maps.input_index for maps in actual.feature_maps] == [0, 1]
    for maps, picture in zip(actual.feature_maps, (pictures[1], pictures[3]), strict=True):
        with torch.no_grad():
            assert torch.equal(torch.from_numpy(maps.values), network[1](picture)[0])


class _Refusing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if (x < 0).any():
            raise RuntimeError("negative")
        return x


@pytest.mark.parametrize(
    ("run", "raised"),
    [(inspect, hookscope.ForwardError), (inspect_gradients, hookscope.PassError)],
    ids=["forward", "gradients"],
)
@pytest.mark.parametrize("size", [1, 2])
def test_if_no_input_is_left_the_first_one_counts(run: Callable[..., Any], raised: Any, size: int) -> None:
    errors: list[UnfitInputError] = []
    with pytest.raises(raised, match="negative") as caught:
        run(build(Picky), batches([-1.0, -2.0, -3.0], size), on_error=errors.append)
    assert [error.names for error in errors] == [("-1.npy",), ("-2.npy",), ("-3.npy",)]
    inspection = caught.value.inspection
    assert [record.name for record in inspection.inputs] == ["-1.npy"]
    assert [row.layer for row in inspection.rows] == ["first"]
    assert inspection.failure.layer == ""
    assert str(caught.value) == errors[0].reason


def test_in_train_mode_a_batch_is_left_out_as_a_whole() -> None:
    errors: list[UnfitInputError] = []
    gradients = inspect_gradients(build(Picky), batches([*VALUES, 7.0, 8.0], 2), mode="train", on_error=errors.append)
    assert [error.names for error in errors] == [("-3.npy", "4.npy"), ("5.npy", "-6.npy")]
    assert [record.name for record in gradients.inputs] == ["1.npy", "2.npy", "7.npy", "8.npy"]


def test_a_model_without_gradients_is_no_matter_of_inputs() -> None:
    errors: list[UnfitInputError] = []
    detached = Written(lambda net, x: net.linear(x).detach(), linear=nn.Linear(3, 2))
    with pytest.raises(hookscope.PassError, match="has no gradient: the forward pass"):
        inspect_gradients(detached, batches(GOOD, 1), on_error=errors.append)
    assert errors == []


def test_without_a_handler_the_first_error_ends_the_run() -> None:
    with pytest.raises(hookscope.ForwardError) as caught:
        inspect(build(Picky), batches(VALUES, 1))
    assert [record.name for record in caught.value.inspection.inputs] == ["1.npy", "2.npy", "-3.npy"]
    assert not math.isnan(caught.value.inspection.rows[0].activation.mean)


@pytest.mark.parametrize("run", [inspect, inspect_gradients], ids=["forward", "gradients"])
def test_inputs_that_are_overwritten_before_their_batch_is_refused_are_given_as_they_were(
    run: Callable[..., Any],
) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        is_bad = (x < 0).any()
        x.mul_(10)
        y = net.relu(x * net.scale)
        if is_bad:
            raise ValueError("negative")
        return y

    errors: list[UnfitInputError] = []
    model = Written(forward, scale=nn.Parameter(torch.tensor(2.0)), relu=nn.ReLU())
    actual = run(model, batches([1.0, 2.0, -3.0], 3), on_error=errors.append)
    assert [error.indices for error in errors] == [(2,)]
    assert actual.rows[0].activation.max == 2 * 10 * 2
    assert actual.rows[0].activation.element_count == 6


def test_what_a_refused_pass_held_is_let_go_before_the_next() -> None:
    held: list[weakref.ref[Tensor]] = []

    class Large(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert all(each() is None for each in held[:-1]), "the last one may be in a variable still"
            middle = x * 2
            held.append(weakref.ref(middle))
            if (x < 0).any():
                raise ValueError("negative")
            return x

    inspect(nn.Sequential(Large()), batches([-1.0, -2.0, -3.0, 4.0], 1), on_error=lambda _error: None)
    assert [each() for each in held] == [None] * 4
