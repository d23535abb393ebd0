"""A-B of the first input, for the rows that matter."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hookscope
from hookscope.errors import HookscopeError
from tests.commands.diff.test_compare_networks import Picky, activations_of, pictures, small


class Steps(nn.Module):
    """Layer after layer multiplies by a factor."""

    def __init__(self, factors: list[float]) -> None:
        super().__init__()
        self.steps = nn.ModuleList([nn.Conv2d(1, 1, 1, bias=False) for _ in factors])
        with torch.no_grad():
            for step, factor in zip(self.steps, factors, strict=True):
                step.weight.fill_(factor)

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


@pytest.mark.parametrize("batch_size", [1, 3])
def test_maps_are_a_less_b_of_the_first_input_channel_by_channel(batch_size: int) -> None:
    one, other = small(), small()
    with torch.no_grad():
        other.norm.weight[1] *= 1.5
    x = pictures(3)
    result = hookscope.diff(one, other, x, batch_size=batch_size)
    ours, theirs = activations_of(one, x), activations_of(other, x)
    assert [heat_map.label for heat_map in result.maps] == ["norm", "relu", "flat", "fc"]
    for heat_map in result.maps:
        assert result.rows[heat_map.row].label == heat_map.label
        assert heat_map.input_index == 0
        expected = (ours[heat_map.label].double() - theirs[heat_map.label].double())[0].float().numpy()
        assert heat_map.values == pytest.approx(expected, abs=1e-6)  # a convolution rounds by the size of its batch
    assert [heat_map.arrangement for heat_map in result.maps] == ["maps", "maps", "vector", "vector"]


def test_equal_networks_have_no_maps() -> None:
    assert hookscope.diff(small(), "same", pictures()).maps == ()


def test_of_many_rows_the_one_where_it_begins_and_the_largest_in_each_part_are_kept() -> None:
    count = 30
    one, other = Steps([1.0] * count), Steps([1.0, 1.0, 1.001, *[1.01] * (count - 3)])
    result = hookscope.diff(one, other, torch.ones(2, 1, 4, 4))
    assert result.first_differences[0].row == "steps.2"
    # Each step makes the difference larger: the last one of each twelfth is its largest.
    largest = (4, 7, 9, 12, 14, 17, 19, 22, 24, 27, 29)
    assert [heat_map.label for heat_map in result.maps] == ["steps.2", *(f"steps.{place}" for place in largest)]
    assert result.maps[0].values == pytest.approx(np.full((1, 4, 4), -0.001), rel=1e-3)


def test_a_layer_that_adds_a_difference_is_kept_though_others_are_larger() -> None:
    factors = [1.0, 4.0, *[1.0] * 14, 0.999, *[1.0] * 10]
    result = hookscope.diff(Steps([1.0] * len(factors)), Steps(factors), torch.ones(1, 1, 4, 4), shadow=True)
    assert {difference.row for difference in result.first_differences} == {"steps.1", "steps.16"}
    assert {"steps.1", "steps.16"} <= {heat_map.label for heat_map in result.maps}


def test_what_is_held_is_bounded_and_a_large_output_keeps_its_first_channels() -> None:
    one = nn.Sequential(OrderedDict((f"conv{at}", nn.Conv2d(1 if not at else 160, 160, 1)) for at in range(8)))
    other = nn.Sequential(OrderedDict((f"conv{at}", nn.Conv2d(1 if not at else 160, 160, 1)) for at in range(8)))
    result = hookscope.diff(one, other, torch.randn(1, 1, 100, 100))
    assert result.maps[0].label == "conv0"
    assert all((heat_map.values.shape, heat_map.channel_count) == ((104, 100, 100), 160) for heat_map in result.maps)
    assert sum(heat_map.values.nbytes for heat_map in result.maps) <= 16 * 2**20


def test_values_that_are_the_same_nan_or_infinity_do_not_differ() -> None:
    x = torch.tensor([[torch.nan, torch.inf, 2.0, 1.0]])
    result = hookscope.diff(Steps([1.0]), Steps([2.0]), x.reshape(1, 1, 2, 2))
    assert result.maps[0].values.tolist() == [[[0.0, 0.0], [-2.0, -1.0]]]


def test_the_first_input_is_the_first_that_both_networks_take() -> None:
    x = torch.ones(3, 4)
    x[0, 1] = 9
    failures: list[HookscopeError] = []
    torch.manual_seed(0)
    one, other = Picky(), Picky()
    result = hookscope.diff(one, other, x * torch.tensor([[1.0], [2.0], [3.0]]), on_error=failures.append)
    assert len(failures) == 1
    assert len(result.inputs) == 2
    with torch.no_grad():
        expected = (one(2 * torch.ones(1, 4)).double() - other(2 * torch.ones(1, 4)).double())[0]
    assert result.maps[-1].values == pytest.approx(expected.numpy(), rel=1e-5)
