import math
from functools import partial

import pytest
import torch
from torch import nn

from hookscope.inputs import Batch
from hookscope.inspection.backward import gradients_by_input
from hookscope.results.inputs import InputRecord
from tests.inspections import inspect_gradients


def alone(position: int, values: list[float]) -> Batch:
    record = InputRecord(f"input {position}", None, None, (len(values),), ())
    return Batch((torch.tensor([values]),), (position,), (record,))


def squares(output: torch.Tensor, _batch: Batch) -> torch.Tensor:
    return output.square().sum() / 2


@pytest.fixture
def network() -> nn.Module:
    """y = w·x with w = (1, 2), without a bias."""
    network = nn.Sequential(nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        network[0].weight.copy_(torch.tensor([[1.0, 2.0]]))
    return network


def test_norms_of_each_input_alone_are_those_of_the_closed_form(network: nn.Module) -> None:
    inputs = [[3.0, 4.0], [1.0, 0.0], [0.0, 0.0]]
    batches = [alone(position, values) for position, values in enumerate(inputs)]
    gradients = gradients_by_input(partial(inspect_gradients, network, loss=squares), batches)
    # y = w·x, the loss is y²/2, so its gradient is y for the output and y·x for the weight.
    outputs = [11.0, 1.0, 0.0]
    assert [each.name for each in gradients] == ["input 0", "input 1", "input 2"]
    assert [each.loss for each in gradients] == [y * y / 2 for y in outputs]
    assert [each.rows_l2 for each in gradients] == [{"0": y} for y in outputs]
    assert [each.parameters_l2 for each in gradients] == [
        pytest.approx(y * math.hypot(*values)) for y, values in zip(outputs, inputs, strict=True)
    ]


def test_without_a_gradient_there_is_no_norm(network: nn.Module) -> None:
    network.requires_grad_(requires_grad=False)
    [actual] = gradients_by_input(partial(inspect_gradients, network, loss=squares), [alone(0, [3.0, 4.0])])
    assert actual.parameters_l2 is None
    assert actual.rows_l2 == {"0": 11.0}


def test_norms_of_parameters_are_taken_together() -> None:
    network = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(2.0)
    [actual] = gradients_by_input(partial(inspect_gradients, network, loss="sum"), [alone(0, [3.0])])
    # y = 2(2·3 + 2) + 2: gradients 2·3 and 2 of the first layer, 8 and 1 of the second.
    assert actual.parameters_l2 == pytest.approx(math.hypot(6, 2, 8, 1))


def test_no_inputs_give_nothing(network: nn.Module) -> None:
    assert gradients_by_input(partial(inspect_gradients, network), []) == ()
