import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import hookscope
from hookscope.inspection.session import compare
from hookscope.results.activations import Activations, LayerRow
from hookscope.results.gradients import GradientRow, Gradients, LossRecord, ParameterRow
from hookscope.results.network import ModelInfo
from hookscope.results.statistics import TensorStatistics
from tests.networks import Written

MODEL = ModelInfo("net", "Net", "random", random=True, sha256=None, parameter_count=1)


def with_l2(value: float) -> TensorStatistics:
    return TensorStatistics((1, 2), "float32", 2, l2=value)


def layer(name: str, value: float, call: int = 0) -> LayerRow:
    return LayerRow(0, name, "Conv2d", call, "", 0, with_l2(value))


def passed(
    activations: dict[str, float], gradients: dict[str, float], parameters: dict[str, float], loss: float
) -> Gradients:
    return Gradients(
        model=MODEL,
        inputs=(),
        loss=LossRecord("sum", "", loss),
        rows=tuple(layer(name, value) for name, value in activations.items()),
        gradients=tuple(
            GradientRow(0, 0, name, "Conv2d", 0, "", "output", "gradient", with_l2(value))
            for name, value in gradients.items()
        ),
        parameters=tuple(
            ParameterRow(0, name, "Conv2d", True, "gradient", with_l2(value), 1.0, value)
            for name, value in parameters.items()
        ),
    )


def test_rows_are_compared_with_those_of_the_same_place_and_the_equal_ones_left_out() -> None:
    before = passed({"a": 1, "b": 2}, {"a": 3, "b": 4}, {"a.w": 5, "b.w": 6}, 7)
    after = passed({"a": 1, "b": 1}, {"a": 6, "b": 4}, {"a.w": 0, "b.w": 6}, 8)
    comparison = compare(before, after, ["first", "second"])
    assert [(change.quantity, change.label, change.l2_ratio) for change in comparison.changes] == [
        ("activation", "b", 0.5),
        ("grad_output", "a", 2.0),
        ("gradient", "a.w", 0.0),
    ]
    assert (comparison.row_count, comparison.losses, comparison.edits) == (6, (7, 8), ("first", "second"))


def test_rows_that_one_run_alone_has_are_changes_without_a_ratio_those_of_the_first_last() -> None:
    before = Activations(model=MODEL, inputs=(), rows=(layer("gone", 2), layer("both", 1)))
    after = Activations(model=MODEL, inputs=(), rows=(layer("both", 1), layer("both", 3, call=1)))
    changes = compare(before, after, []).changes
    assert [(change.label, change.l2_ratio) for change in changes] == [("both#1", None), ("gone", None)]
    assert (changes[0].before, changes[1].after) == (None, None)


def test_a_row_that_was_zero_has_no_ratio() -> None:
    [change] = compare(
        *(Activations(model=MODEL, inputs=(), rows=(layer("a", value),)) for value in (0, 2)), []
    ).changes
    assert change.l2_ratio is None


@pytest.mark.parametrize("kind", ["no loss in one", "no losses"])
def test_losses_are_compared_where_both_runs_have_one(kind: str) -> None:
    run = passed({}, {}, {}, 7)
    before = replace(run, loss=None) if kind == "no loss in one" else Activations(model=MODEL, inputs=(), rows=())
    after = run if kind == "no loss in one" else before
    assert compare(before, after, []).losses is None


@pytest.mark.parametrize("command", [hookscope.activations, hookscope.grads])
def test_predictions_of_both_runs_are_those_of_the_output_that_the_key_names(
    command: Callable[..., Activations | Gradients],
) -> None:
    result = command(heads(), torch.zeros(1, 1), edit="second:output:scale(2)", output_key="b")
    # An input of zeros leaves the biases: softmax of (0, log 3), and of twice that.
    expected = [[0.75, 0.25], [0.9, 0.1]]
    assert [each.probabilities for (each,) in result.comparison.predictions] == [pytest.approx(p) for p in expected]


def heads() -> nn.Module:
    """Return a network with two outputs of two classes."""
    second = nn.Linear(1, 2)
    with torch.no_grad():
        second.bias.copy_(torch.tensor([0.0, math.log(3)]))
    return Written(lambda net, x: {"a": net.first(x), "b": net.second(x)}, first=nn.Linear(1, 2), second=second)
