"""What stands out in a weight: against closed forms, NumPy's quantiles, and many seeds of independent values."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hookscope.commands.check.measuring.weight_structure import (
    longest_run,
    outlier_ratio,
    repeated_filters,
    spread_beyond_chance,
)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count", [30, 999, 1001, 20_000, 100_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_outlier_ratio_is_over_the_greatest_thousandth(count: int, dtype: torch.dtype) -> None:
    values = drawn(count).to(dtype)
    values[::3] = 0
    magnitudes = np.sort(values[values != 0].abs().double().numpy())
    expected = magnitudes[-1] / magnitudes[-max(2, math.ceil(len(magnitudes) / 1000))]
    assert outlier_ratio(values) == pytest.approx(expected, rel=1e-6)


def test_one_value_stands_out_by_its_ratio_to_the_next() -> None:
    values = torch.ones(50)
    values[7] = -1e30
    assert outlier_ratio(values) == pytest.approx(1e30)
    assert outlier_ratio(torch.ones(50)) == 1
    assert outlier_ratio(values[:15]) is None
    assert outlier_ratio(torch.cat([values[:15], torch.zeros(90)])) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_filters_that_are_there_again_are_found(dtype: torch.dtype) -> None:
    filters = drawn(40, 27).to(dtype)
    filters[9] = filters[4]
    filters[30] = filters[4]
    filters[[11, 12]] = 0
    filters[13], filters[14] = filters[15], filters[15]
    filters[14, 26] += 1
    assert repeated_filters(filters, rounded=False) == (9, 15, 30)
    assert repeated_filters(filters, rounded=True) == ()  # 27 values are too few


def test_small_filters_that_were_rounded_to_eight_bits_may_be_equal_by_chance() -> None:
    filters = drawn(400, 25)
    filters[9] = filters[4]
    assert repeated_filters(filters, rounded=False) == (9,)
    quantum = filters.abs().max() / 127
    assert repeated_filters((filters / quantum).round() * quantum, rounded=False) == ()


def test_one_filter_over_and_over_and_nearly_empty_ones_are_on_purpose() -> None:
    assert repeated_filters(drawn(1, 1, 9).repeat(40, 1, 1), rounded=False) == ()
    sparse = torch.zeros(40, 27)
    sparse[:, 5:12] = 1.0
    sparse[0] = drawn(27)
    assert repeated_filters(sparse, rounded=False) == ()
    assert repeated_filters(drawn(4, 7).repeat(2, 1), rounded=False) == ()


@pytest.mark.parametrize(("inputs", "places"), [(16, 1), (3, 9), (2, 25), (300, 1)])
def test_one_filter_of_several_inputs_over_and_over_is_no_blur(inputs: int, places: int) -> None:
    filters = drawn(1, inputs, places).repeat(40, 1, 1)
    assert repeated_filters(filters, rounded=False) == tuple(range(1, 40))
    filters[7, 1, 0] += 1  # then it is no longer the one before it, nor that of the others
    assert repeated_filters(filters, rounded=False) == tuple(number for number in range(1, 40) if number != 7)


@pytest.mark.parametrize("begin", [0, 1, 2, 15, 16, 17, 31, 500, 20 * 300 - 32])
def test_a_run_of_any_place_is_found_from_32_values_on(begin: int) -> None:
    weight = drawn(20, 300)
    weight.view(-1)[begin : begin + 32] = 0.5
    run = longest_run(weight)
    assert run is not None
    assert (run.length, run.value, run.chance) == (32, 0.5, 1.0)
    weight.view(-1)[begin + 31] = 0.25
    assert longest_run(weight) is None


def test_numbers_below_float32s_least_normal_one_are_a_run_of_zeros() -> None:
    weight = drawn(20, 300)
    integers = torch.arange(1000, 1128, dtype=torch.int32)  # read as float32, they are multiples of 2**-149
    weight.view(-1)[700:828] = integers.view(torch.float32)
    run = longest_run(weight)
    assert run is not None
    assert (run.length, run.value) == (128, 0.0)


def test_a_run_lies_in_memory_whatever_the_order_of_axes() -> None:
    kernel = drawn(3, 3, 40, 20).permute(3, 2, 0, 1)  # as TensorFlow lays kernels out
    kernel.as_strided((7200,), (1,))[1000:1100] = 0
    run = longest_run(kernel)
    assert run is not None
    assert run.length == 100


def test_what_chance_explains_follows_from_the_share_elsewhere() -> None:
    weight = drawn(100, 200)
    weight[drawn(100, 200, seed=1) > 0] = 0
    weight[3, 20:180] = 0
    run = longest_run(weight)
    assert run is not None
    assert 160 <= run.length < 180
    assert run.chance == pytest.approx(math.log(20_000) / math.log(2), rel=0.2)  # half of the others are zero


def test_dead_channels_are_no_run() -> None:
    weight = drawn(40, 30, 3, 3)
    weight[5:20] = 0
    weight[:, 3:9] = 0
    weight[25] *= 1e-4
    weight[25].view(-1)[:200] = 0
    assert longest_run(weight) is None


def reference(values: Tensor) -> float:
    """Compute the definition, naively and in float64."""
    x = values.reshape(*values.shape[:2], -1).double()
    second, fourth = x.square().mean(), x.pow(4).mean()
    actual = []
    for axes, groups in (((1, 2), x.shape[0]), ((0, 2), x.shape[1]), ((0, 1), x.shape[2])):
        size = x.numel() // groups
        if groups > 1 and size >= 8:
            means, energies = x.mean(axes), x.square().mean(axes)
            of_means = means.square().mean() / (second / size)
            of_energies = energies.var() / ((fourth - second**2) / size)
            actual += [float((case - 1) * math.sqrt(groups / 2)) for case in (of_means, of_energies)]
    return max(actual)


@pytest.mark.parametrize("shape", [(64, 32, 1, 1), (32, 16, 3, 3), (200, 1, 5, 5), (100, 300), (8, 1000)])
def test_the_spread_is_that_of_its_definition(shape: tuple[int, ...]) -> None:
    values = drawn(*shape) * torch.linspace(0.5, 1.5, shape[0]).view(-1, *[1] * (len(shape) - 1)) + 0.1
    assert spread_beyond_chance(values) == pytest.approx(reference(values), rel=1e-4)


@pytest.mark.parametrize(
    "initialise", [nn.init.kaiming_uniform_, nn.init.xavier_normal_, nn.init.trunc_normal_, nn.init.orthogonal_]
)
def test_whatever_is_drawn_independently_is_within_chance(initialise: object) -> None:
    assert callable(initialise)
    torch.manual_seed(0)
    spreads = [spread_beyond_chance(initialise(torch.empty(64, 32, 3, 3))) for _ in range(40)]
    assert all(spread is not None and spread < 5 for spread in spreads)
    assert sum(spread < 3 for spread in spreads if spread is not None) >= 36


def test_too_little_to_tell_and_a_few_outliers_have_no_spread() -> None:
    assert spread_beyond_chance(drawn(20, 100)) is None
    pruned = drawn(64, 64)
    pruned[drawn(64, 64, seed=1) > 0] = 0
    assert spread_beyond_chance(pruned) is None
    for value in (1e3, 1e30):
        outlier = drawn(64, 64)
        outlier[3, 4] = value
        assert spread_beyond_chance(outlier) is None
