"""How outputs are compared, what belongs to which input, and the peaks of smooth activation functions."""

import math
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hookscope.commands.check.measuring.consistency import by_input, difference, greatest, part_of, with_a_mirrored_copy
from hookscope.commands.check.measuring.network_passes import SMOOTH
from hookscope.inputs.batches import Batch
from hookscope.results.inputs import InputRecord
from tests.commands.check.measuring.networks import measure_network
from tests.networks import Written

NAN, INF = math.nan, math.inf


def batch(*args: object, count: int) -> Batch:
    return Batch(args, tuple(range(count)), (InputRecord("x", None, None, (), ()),) * count)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        pytest.param([1.0, -4.0], [1.0, -4.0], 0.0, id="equal"),
        pytest.param([1.0, -4.0], [2.0, -4.0], 1 / 4, id="by the greatest magnitude"),
        pytest.param([0.0, 0.0], [0.0, 8.0], 1.0, id="zero and something"),
        pytest.param([NAN, 1.0], [NAN, 1.0], 0.0, id="NaN in the same place"),
        pytest.param([NAN, 1.0], [NAN, 2.0], 1 / 2, id="NaN in the same place, other numbers"),
        pytest.param([NAN, 1.0], [1.0, 1.0], NAN, id="NaN and a number"),
        pytest.param([INF, 1.0], [INF, 1.0], 0.0, id="Inf in the same place"),
        pytest.param([INF, 1.0], [INF, 4.0], 3 / 4, id="Inf in the same place, other numbers"),
        pytest.param([INF, 1.0], [5.0, 1.0], INF, id="Inf and a number"),
        pytest.param([INF], [-INF], INF, id="Inf and -Inf"),
        pytest.param([1.0], [1.0, 1.0], INF, id="another length"),
        pytest.param([], [], 0.0, id="nothing"),
    ],
)
def test_a_difference_is_relative_to_the_greatest_magnitude(
    first: list[float], second: list[float], expected: float
) -> None:
    left, right = torch.tensor(first), torch.tensor(second)
    assert difference(left, right) == pytest.approx(expected, nan_ok=True, rel=1e-15)
    assert difference(right, left) == pytest.approx(expected, nan_ok=True, rel=1e-15)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        pytest.param(torch.tensor([True, False]), torch.tensor([True, True]), 1.0, id="truth"),
        pytest.param(torch.tensor([3 + 4j]), torch.tensor([0j]), 1.0, id="complex"),
        pytest.param(torch.tensor([2**40, 0]), torch.tensor([2**40, 1]), 2.0**-40, id="whole numbers"),
        pytest.param(torch.tensor([4.0, 0.0]).to_sparse(), torch.tensor([4.0, 0.0]).to_sparse(), 0.0, id="sparse"),
        pytest.param(torch.tensor([1.0]), torch.tensor([1]), INF, id="another dtype"),
        pytest.param(torch.tensor([1.0]).half(), torch.tensor([1.5]).half(), 1 / 3, id="half"),
    ],
)
def test_every_dtype_is_compared(first: Tensor, second: Tensor, expected: float) -> None:
    assert difference(first, second) == pytest.approx(expected, rel=1e-12)


def test_nested_tensors_of_two_passes_are_compared() -> None:
    def made() -> Tensor:
        return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)

    assert difference(made(), made()) == 0.0


def test_a_tensor_without_values_cannot_be_compared() -> None:
    assert difference(torch.ones(2, device="meta"), torch.ones(2, device="meta")) is None


def test_nan_is_greater_than_any_difference_and_none_is_none() -> None:
    assert greatest(None, None) is None
    assert greatest(None, 0.5) == 0.5
    assert greatest(0.1, 0.5) == 0.5
    assert math.isnan(greatest(INF, NAN) or 0.0)


def test_axis_0_tells_what_belongs_to_which_input() -> None:
    scores, loss = torch.arange(6.0).reshape(3, 2), torch.tensor(0.5)
    parts = by_input({"['scores']": scores, "['loss']": loss}, batch(torch.zeros(3, 1), count=3))
    assert [list(part) for part in parts] == [["['scores']"]] * 3
    assert torch.equal(parts[2]["['scores']"], scores[2:])


def test_a_list_of_results_for_a_list_of_inputs_is_told_by_its_items() -> None:
    returned = {"[0]['boxes']": torch.zeros(2, 4), "[1]['boxes']": torch.ones(5, 4)}
    parts = by_input(returned, batch([torch.zeros(3, 4, 4)] * 2, count=2))
    assert [tuple(part["['boxes']"].shape) for part in parts] == [(2, 4), (5, 4)]


def test_an_input_of_a_batch_is_taken_out_with_memory_of_its_own() -> None:
    values = torch.arange(6.0).reshape(3, 2)
    alone = part_of(batch(values, [torch.zeros(1), torch.ones(1), torch.ones(1)], count=3), 1)
    alone.args[0].zero_()
    alone.args[1][0].zero_()
    assert torch.equal(values, torch.arange(6.0).reshape(3, 2))
    assert (alone.indices, alone.args[0].shape, len(alone.args[1])) == ((1,), (1, 2), 1)


@pytest.mark.parametrize(
    ("inputs", "pair"),
    [
        (torch.tensor([[1.0, 2.0, 3.0]]), [[1.0, 2.0, 3.0], [-3.0, -2.0, -1.0]]),
        pytest.param(torch.tensor([[1, 2, 3]]), [[1, 2, 3], [3, 2, 1]], id="whole numbers, which may be indices"),
        ([torch.tensor([[1.0, 2.0]])], [[[1.0, 2.0]], [[-2.0, -1.0]]]),
    ],
)
def test_a_second_input_is_a_mirrored_negative_of_the_first(inputs: Any, pair: list[Any]) -> None:
    made = with_a_mirrored_copy(batch(inputs, count=1))
    assert [argument.tolist() for argument in made.args[0]] == pair
    assert made.indices == (0, 1)


def test_no_copy_is_made_of_what_would_equal_it() -> None:
    assert with_a_mirrored_copy(batch(torch.zeros(1, 3), count=1)) is None


WANTED = {"quiet-channels"}


@pytest.mark.parametrize(
    ("activation", "formula"),
    [(nn.GELU(), F.gelu), (nn.SiLU(inplace=True), F.silu), (nn.Mish(), F.mish), (nn.Softplus(), F.softplus)],
    ids=["GELU", "SiLU in place", "Mish", "Softplus"],
)
def test_peaks_are_over_all_batches_and_positions(activation: nn.Module, formula: object) -> None:
    assert callable(formula)
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, 3, 4, 4, generator=generator), torch.randn(1, 3, 4, 4, generator=generator) * 3
    network = nn.Sequential(nn.Conv2d(3, 5, 1), activation)
    (peaks,) = measure_network(network, first, second, wanted=WANTED).channel_peaks.items()
    with torch.no_grad():
        every: Tensor = formula(network[0](torch.cat([first, second])))
    assert peaks[0] == "1"
    assert peaks[1].dtype == np.float32
    np.testing.assert_allclose(peaks[1], every.abs().amax((0, 2, 3)).numpy(), rtol=1e-5)


def test_channels_of_tokens_are_their_last_axis() -> None:
    network = nn.Sequential(nn.Linear(4, 6), nn.GELU())
    inputs = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    peaks = measure_network(network, inputs, wanted=WANTED).channel_peaks["1"]
    with torch.no_grad():
        np.testing.assert_allclose(peaks, network(inputs).abs().amax((0, 1)).numpy(), rtol=1e-6)


def test_each_call_of_a_shared_activation_has_its_own_peaks() -> None:
    network = Written(lambda net, x: net.act(net.act(x) * 2), act=nn.SiLU())
    inputs = torch.tensor([[1.0, -1.0]])
    peaks = measure_network(network, inputs, wanted=WANTED).channel_peaks
    once = F.silu(inputs)
    np.testing.assert_allclose(peaks["act"], once[0].abs().numpy(), rtol=1e-6)
    np.testing.assert_allclose(peaks["act#1"], F.silu(2 * once)[0].abs().numpy(), rtol=1e-6)


@pytest.mark.parametrize("kind", [nn.ReLU, nn.Hardswish, nn.LeakyReLU, nn.Tanh, nn.Sigmoid])
def test_other_activations_have_none(kind: type[nn.Module]) -> None:
    assert measure_network(nn.Sequential(nn.Linear(2, 2), kind()), torch.ones(1, 2), wanted=WANTED).channel_peaks == {}
    smooth = nn.Sequential(nn.Linear(2, 2), nn.GELU())  # which is measured only if wanted
    assert measure_network(smooth, torch.ones(1, 2), wanted={"forward"}).channel_peaks == {}


def test_a_module_that_is_only_called_like_a_smooth_function_has_no_peaks() -> None:
    network = nn.Sequential(OrderedDict(gelu=nn.Linear(2, 2), silu=nn.GELU()))
    assert [*measure_network(network, torch.ones(1, 2), wanted=WANTED).channel_peaks] == ["silu"]


@pytest.mark.parametrize("kind", [nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus])
def test_smooth_means_that_the_tail_goes_to_zero(kind: type[nn.Module]) -> None:
    tail = abs(float(kind()(torch.tensor(-20.0))))
    assert (kind.__name__ in SMOOTH) == (tail < 1e-6)
    # Near -1 none of them is zero: that sets them apart from rectifiers.
    assert float(kind()(torch.tensor(-1.0))) != 0
