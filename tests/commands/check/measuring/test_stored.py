"""Parameters and buffers: counts against closed forms, and against torch, over whole networks."""

import math
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

from hookscope.commands.check.measuring.stored import stored_tensors
from hookscope.results.check import StoredValues
from tests.networks import MECHANISMS, NETWORKS, Written

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
]


def holding(value: Tensor) -> nn.Module:
    """Return a network with one parameter, or one buffer if the value cannot be learnt."""
    network = nn.Module()
    if value.is_floating_point() or value.is_complex():
        network.register_parameter("value", nn.Parameter(value, requires_grad=False))
    else:
        network.register_buffer("value", value)
    return network


def measured(value: Tensor) -> StoredValues:
    (found,), remarks = stored_tensors(holding(value))
    assert not remarks
    return found


def by_name(network: nn.Module) -> dict[str, StoredValues]:
    return {each.name: each for each in stored_tensors(network)[0]}


def filled(layer: Any, *zero: Any) -> Any:
    """Fill a layer's weight with ones, and zeros at some places."""
    with torch.no_grad():
        layer.weight.fill_(1.0)
        for place in zero:
            layer.weight[place] = 0.0
    return layer


def test_counts_and_bounds_are_over_the_finite_values() -> None:
    found = measured(torch.tensor([[0.0, -3.0, math.nan], [math.inf, -math.inf, 2.0]]))
    assert found == StoredValues("value", "Module", "parameter", (2, 3), "float32", 6, 1, 2, 1, -3.0, 2.0, 3.0, 0)


def test_nothing_finite_leaves_no_bounds() -> None:
    found = measured(torch.tensor([math.nan, math.inf]))
    assert (found.nan_count, found.inf_count, found.min, found.max, found.max_abs) == (1, 1, None, None, None)
    empty = measured(torch.empty(0, 3))
    assert (empty.element_count, empty.zero_count, empty.min, empty.max_abs) == (0, 0, None, None)


def test_what_float16_turns_to_zero_is_counted() -> None:
    # Half of 2**-24, float16's smallest magnitude, is rounded to the even neighbour, 0.
    values = torch.tensor([0.0, 2.0**-25, -(2.0**-25), 2.0**-25 * (1 + 2**-23), 2.0**-24, 1.0, 2.0**-149])
    assert int(((values.half() == 0) & (values != 0)).sum()) == 3
    found = measured(values)
    assert (found.zero_count, found.fp16_zero_count) == (1, 3)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_other_floating_dtypes_are_measured(dtype: torch.dtype) -> None:
    found = measured(torch.tensor([0.0, -2.0, math.nan, 0.5]).to(dtype))
    assert found.dtype == str(dtype).removeprefix("torch.")
    assert (found.nan_count, found.zero_count, found.min, found.max, found.max_abs) == (1, 1, -2.0, 0.5, 2.0)


def test_whole_numbers_are_measured() -> None:
    found = measured(torch.tensor([[0, 7], [-9, 1]]))
    assert (found.role, found.zero_count, found.min, found.max, found.max_abs) == ("buffer", 1, -9.0, 7.0, 9.0)
    assert found.fp16_zero_count == 0


def test_what_has_no_order_has_no_bounds_but_a_magnitude() -> None:
    found = measured(torch.tensor([3 + 4j, 0j, complex(math.nan, 0), complex(0, math.inf)]))
    assert (found.nan_count, found.inf_count, found.zero_count) == (1, 1, 1)
    assert (found.min, found.max, found.max_abs) == (None, None, 5.0)
    truth = measured(torch.tensor([True, False]))
    assert (truth.zero_count, truth.min, truth.max, truth.max_abs) == (1, None, None, 1.0)


def test_zeros_that_a_sparse_tensor_does_not_store_count() -> None:
    found = measured(torch.tensor([[0.0, 5.0, 0.0], [0.0, 0.0, math.nan]]).to_sparse())
    assert (found.element_count, found.zero_count, found.nan_count) == (6, 4, 1)
    assert (found.min, found.max, found.shape) == (0.0, 5.0, (2, 3))


def test_a_tensor_without_values_is_said_to_be_unread() -> None:
    found, remarks = stored_tensors(nn.Linear(2, 3, device="meta"))
    assert found == ()
    assert [remark.partition(":")[0] for remark in remarks] == [
        "The values of 'weight' cannot be read",
        "The values of 'bias' cannot be read",
    ]


def test_a_tensor_longer_than_one_piece_is_counted_whole() -> None:
    values = torch.ones(3 * 2**16 + 5)
    values[0], values[2**16], values[-1] = math.nan, 0.0, -7.0
    found = measured(values)
    assert (found.element_count, found.nan_count, found.zero_count) == (values.numel(), 1, 1)
    assert (found.min, found.max) == (-7.0, 1.0)


def test_a_strided_view_is_counted_by_its_own_elements() -> None:
    values = torch.arange(12.0).reshape(3, 4)[:, ::2].t()
    found = measured(values)
    assert (found.shape, found.element_count, found.min, found.max) == ((2, 3), 6, 0.0, 10.0)


@pytest.mark.parametrize(
    "layer",
    [
        filled(nn.Conv2d(2, 4, 3), 1, 3),
        filled(nn.Linear(5, 4), 1, 3),
        filled(nn.Conv1d(4, 4, 3, groups=2), 1, 3),
        # (in, out / groups, height, width): channel 1 is the second of the first group, 3 of the second.
        filled(nn.ConvTranspose2d(6, 4, 3, groups=2), (slice(0, 3), 1), (slice(3, 6), 1)),
        filled(nn.ConvTranspose1d(6, 4, 3), (slice(None), 1), (slice(None), 3)),
    ],
    ids=str,
)
def test_output_channels_that_are_zero_are_listed(layer: nn.Module) -> None:
    found = by_name(layer)
    assert (found["weight"].filter_count, found["weight"].zero_filters) == (4, (1, 3))
    assert (found["bias"].filter_count, found["bias"].zero_filters) == (None, ())


def test_rows_of_an_embedding_are_no_filters() -> None:
    found = by_name(nn.Embedding(5, 3, padding_idx=0))["weight"]
    assert (found.filter_count, found.zero_filters, found.zero_count) == (None, (), 3)


def test_a_tied_parameter_is_measured_once_with_its_other_names() -> None:
    network = nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU(), nn.Linear(3, 3, bias=False))
    network[2].weight = network[0].weight
    (found,), _ = stored_tensors(network)
    assert (found.name, found.aliases, found.twin_of) == ("0.weight", ("2.weight",), "")


def twins(first: Tensor, second: Tensor) -> str:
    parameters = [nn.Parameter(each, requires_grad=False) for each in (first, second)]
    found = by_name(Written(lambda *_: None, first=parameters[0], second=parameters[1]))
    assert found["first"].twin_of == ""
    return found["second"].twin_of


SIX, SWAPPED = torch.arange(6.0).reshape(2, 3), torch.tensor([[0.0, 2.0, 1.0], [3.0, 4.0, 5.0]])


@pytest.mark.parametrize(
    ("first", "second", "twin"),
    [
        pytest.param(SIX, SIX.clone(), "first", id="equal, but not tied"),
        pytest.param(SIX, SWAPPED, "", id="two values swapped, so of equal bounds"),
        pytest.param(SIX, SIX, "", id="over one memory"),
        pytest.param(torch.ones(2, 3), torch.ones(2, 3), "", id="constant"),
        pytest.param(torch.arange(6.0), torch.arange(6.0), "", id="one axis"),
        pytest.param(torch.arange(6.0).reshape(6, 1), torch.arange(6.0).reshape(6, 1), "", id="one axis longer than 1"),
        pytest.param(SIX, torch.arange(6.0).reshape(3, 2), "", id="another shape"),
        pytest.param(SIX, SIX.half(), "", id="another dtype"),
    ],
)
def test_twins_are_equal_weights_that_are_not_tied(first: Tensor, second: Tensor, twin: str) -> None:
    assert twins(first, second) == twin


def test_int8_weights_are_measured_by_the_values_they_stand_for() -> None:
    network = torchvision.models.quantization.resnet18(weights=None, quantize=True)
    found = by_name(network)
    weight = network.conv1.weight().dequantize()
    assert found["conv1.weight"].dtype == "qint8"
    assert found["conv1.weight"].filter_count == 64
    assert found["conv1.weight"].max_abs == float(weight.abs().max())
    assert "fc.weight" in found


@pytest.mark.parametrize("name", MECHANISMS)
def test_what_is_found_is_the_state_dict_as_torch_counts_it(name: str) -> None:
    torch.manual_seed(0)
    network = NETWORKS[name].build()
    found, remarks = stored_tensors(network)
    assert not remarks
    packed = {each.name for each in found if each.dtype.startswith("q")}
    state = {key: value for key, value in network.state_dict().items() if isinstance(value, Tensor)}
    names = [each.name for each in found]
    everything = {*names, *(alias for each in found for alias in each.aliases)}
    if not packed:
        assert everything == set(state)
        assert names == [key for key in state if key in set(names)]
    for each in found:
        if each.name in packed or each.name not in state:
            continue
        value = state[each.name]
        assert (each.shape, each.element_count) == (tuple(value.shape), value.numel())
        assert each.zero_count == int((value == 0).sum())
        if value.is_floating_point() and value.numel():
            assert (each.min, each.max, each.max_abs) == (
                float(value.min()),
                float(value.max()),
                float(value.abs().max()),
            )
            assert each.fp16_zero_count == int(((value.half() == 0) & (value != 0)).sum())
        if value.dim() and each.filter_count == value.shape[0]:
            zero = value.flatten(1).eq(0).all(1).nonzero().flatten().tolist()
            assert each.zero_filters == tuple(zero)


def test_a_variance_of_zero_beside_a_mean_that_is_not_is_told_from_a_dead_channel() -> None:
    norm = nn.BatchNorm2d(6)
    running_mean, running_var = norm.running_mean, norm.running_var
    running_mean.copy_(torch.tensor([0.0, 0.5, 0.5, 1e-5, 0.5, 0.5]))  # eps 1e-5: means below 3.2e-4 make no difference
    running_var.copy_(torch.tensor([0.0, 0.0, 1.0, 0.0, 1.17e-38, 1.18e-38]))  # 2**-126 lies between the last two
    measured = {each.name: each.means_without_variance for each in stored_tensors(norm)[0]}
    assert measured["running_var"] == (1, 4)
    assert measured["running_mean"] == ()
