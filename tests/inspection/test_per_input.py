import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hookscope
from hookscope.results.gradients import InputGradients


def squares(output: Tensor) -> Tensor:
    return output.square().sum() / 2


def alone(network: nn.Module, inputs: list[list[float]]) -> tuple[InputGradients, ...]:
    return hookscope.grads(network, torch.tensor(inputs), loss=squares, per_image=True).inputs_alone


@pytest.fixture
def network() -> nn.Module:
    """y = w·x with w = (1, 2), without a bias."""
    network = nn.Sequential(nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        network[0].weight.copy_(torch.tensor([[1.0, 2.0]]))
    return network


def test_norms_of_each_input_alone_are_those_of_the_closed_form(network: nn.Module) -> None:
    inputs = [[3.0, 4.0], [1.0, 0.0], [0.0, 0.0]]
    gradients = alone(network, inputs)
    # y = w·x, the loss is y²/2, so its gradient is y for the output and y·x for the weight.
    outputs = [11.0, 1.0, 0.0]
    assert [each.name for each in gradients] == ["tensor[0]", "tensor[1]", "tensor[2]"]
    assert [each.loss for each in gradients] == [y * y / 2 for y in outputs]
    assert [each.rows_l2 for each in gradients] == [{"0": y} for y in outputs]
    assert [each.parameters_l2 for each in gradients] == [
        pytest.approx(y * math.hypot(*values)) for y, values in zip(outputs, inputs, strict=True)
    ]


def test_inputs_by_name_are_differentiated_alone_too(network: nn.Module, tmp_path: Path) -> None:
    torch.save(torch.tensor([[3.0, 4.0], [1.0, 0.0]]), tmp_path / "two.pt")
    result = hookscope.grads(network, input=f"input={tmp_path / 'two.pt'}", loss=squares, per_image=True)
    assert [each.loss for each in result.inputs_alone] == [121 / 2, 1 / 2]


def test_without_a_gradient_there_is_no_norm(network: nn.Module) -> None:
    network.requires_grad_(requires_grad=False)
    [actual] = alone(network, [[3.0, 4.0]])
    assert actual.parameters_l2 is None
    assert actual.rows_l2 == {"0": 11.0}


def test_norms_of_parameters_are_taken_together() -> None:
    network = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(2.0)
    [actual] = hookscope.grads(network, torch.tensor([[3.0]]), loss="sum", per_image=True).inputs_alone
    # y = 2(2·3 + 2) + 2: gradients 2·3 and 2 of the first layer, 8 and 1 of the second.
    assert actual.parameters_l2 == pytest.approx(math.hypot(6, 2, 8, 1))


def test_a_layer_that_needs_several_inputs_fails_alone_with_the_option_that_asked_for_it() -> None:
    network = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    errors: list[hookscope.HookscopeError] = []
    inputs = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    result = hookscope.grads(network, inputs, mode="train", per_image=True, on_error=errors.append)
    assert result.inputs_alone == ()
    assert [str(error).partition(" raised")[0] for error in errors] == [
        "tensor[0]: alone, for `per_image`: Sequential",
        "tensor[1]: alone, for `per_image`: Sequential",
    ]
    with pytest.raises(hookscope.HookscopeError, match="alone, for `per_image`"):
        hookscope.grads(network, inputs, mode="train", per_image=True)
