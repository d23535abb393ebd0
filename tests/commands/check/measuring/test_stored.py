"""Parameters and buffers: counts against closed forms, and against torch, over whole networks."""

import math
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn.utils import prune

from hookscope.commands.check.measuring.file_alone import as_named
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
    (actual,), remarks = stored_tensors(holding(value))
    assert not remarks
    return actual


def by_name(network: nn.Module) -> dict[str, StoredValues]:
    return {stored_tensor.name: stored_tensor for stored_tensor in stored_tensors(network)[0]}


def filled(layer: Any, *zero: Any) -> Any:
    """Fill a layer's weight with ones, and zeros at some places."""
    with torch.no_grad():
        layer.weight.fill_(1.0)
        for place in zero:
            layer.weight[place] = 0.0
    return layer


def test_counts_and_bounds_are_over_the_finite_values() -> None:
    actual = measured(torch.tensor([[0.0, -3.0, math.nan], [math.inf, -math.inf, 2.0]]))
    assert actual == StoredValues("value", "Module", "parameter", (2, 3), "float32", 6, 1, 2, 1, -3.0, 2.0, 3.0, 0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int64])
def test_whole_numbers_of_every_dtype_are_measured(dtype: torch.dtype) -> None:
    greatest = torch.iinfo(dtype).max
    actual = measured(torch.tensor([0, greatest, 0], dtype=dtype))
    assert (actual.nan_count, actual.zero_count) == (0, 2)
    assert (actual.min, actual.max, actual.max_abs) == (0.0, float(greatest), float(greatest))


def test_nothing_finite_leaves_no_bounds() -> None:
    actual = measured(torch.tensor([math.nan, math.inf]))
    assert (actual.nan_count, actual.inf_count, actual.min, actual.max, actual.max_abs) == (1, 1, None, None, None)
    empty = measured(torch.empty(0, 3))
    assert (empty.element_count, empty.zero_count, empty.min, empty.max_abs) == (0, 0, None, None)


def test_what_float16_turns_to_zero_is_counted() -> None:
    # Half of 2**-24, float16's smallest magnitude, is rounded to the even neighbour, 0.
    values = torch.tensor([0.0, 2.0**-25, -(2.0**-25), 2.0**-25 * (1 + 2**-23), 2.0**-24, 1.0, 2.0**-149])
    assert int(((values.half() == 0) & (values != 0)).sum()) == 3
    actual = measured(values)
    assert (actual.zero_count, actual.fp16_zero_count) == (1, 3)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_other_floating_dtypes_are_measured(dtype: torch.dtype) -> None:
    actual = measured(torch.tensor([0.0, -2.0, math.nan, 0.5]).to(dtype))
    assert actual.dtype == str(dtype).removeprefix("torch.")
    assert (actual.nan_count, actual.zero_count, actual.min, actual.max, actual.max_abs) == (1, 1, -2.0, 0.5, 2.0)


def test_whole_numbers_are_measured() -> None:
    actual = measured(torch.tensor([[0, 7], [-9, 1]]))
    assert (actual.role, actual.zero_count, actual.min, actual.max, actual.max_abs) == ("buffer", 1, -9.0, 7.0, 9.0)
    assert actual.fp16_zero_count == 0


def test_what_has_no_order_has_no_bounds_but_a_magnitude() -> None:
    actual = measured(torch.tensor([3 + 4j, 0j, complex(math.nan, 0), complex(0, math.inf)]))
    assert (actual.nan_count, actual.inf_count, actual.zero_count) == (1, 1, 1)
    assert (actual.min, actual.max, actual.max_abs) == (None, None, 5.0)
    truth = measured(torch.tensor([True, False]))
    assert (truth.zero_count, truth.min, truth.max, truth.max_abs) == (1, None, None, 1.0)


def test_zeros_that_a_sparse_tensor_does_not_store_count() -> None:
    actual = measured(torch.tensor([[0.0, 5.0, 0.0], [0.0, 0.0, math.nan]]).to_sparse())
    assert (actual.element_count, actual.zero_count, actual.nan_count) == (6, 4, 1)
    assert (actual.min, actual.max, actual.shape) == (0.0, 5.0, (2, 3))


def test_a_tensor_without_values_is_said_to_be_unread() -> None:
    actual, remarks = stored_tensors(nn.Linear(2, 3, device="meta"))
    assert actual == ()
    assert [remark.partition(":")[0] for remark in remarks] == [
        "The values of 'weight' cannot be read",
        "The values of 'bias' cannot be read",
    ]


def test_a_tensor_longer_than_one_piece_is_counted_whole() -> None:
    values = torch.ones(3 * 2**16 + 5)
    values[0], values[2**16], values[-1] = math.nan, 0.0, -7.0
    actual = measured(values)
    assert (actual.element_count, actual.nan_count, actual.zero_count) == (values.numel(), 1, 1)
    assert (actual.min, actual.max) == (-7.0, 1.0)


def test_a_strided_view_is_counted_by_its_own_elements() -> None:
    values = torch.arange(12.0).reshape(3, 4)[:, ::2].t()
    actual = measured(values)
    assert (actual.shape, actual.element_count, actual.min, actual.max) == ((2, 3), 6, 0.0, 10.0)


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
    actual = by_name(layer)
    assert (actual["weight"].filter_count, actual["weight"].zero_filters) == (4, (1, 3))
    assert (actual["bias"].filter_count, actual["bias"].zero_filters) == (None, ())


def test_rows_of_an_embedding_are_no_filters() -> None:
    actual = by_name(nn.Embedding(5, 3, padding_idx=0))["weight"]
    assert (actual.filter_count, actual.zero_filters, actual.zero_count) == (None, (), 3)


def test_a_tied_parameter_is_measured_once_with_its_other_names() -> None:
    network = nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU(), nn.Linear(3, 3, bias=False))
    network[2].weight = network[0].weight
    (actual,), _ = stored_tensors(network)
    assert (actual.name, actual.aliases, actual.twin_of) == ("0.weight", ("2.weight",), "")


def twins(first: Tensor, second: Tensor) -> str:
    parameters = [nn.Parameter(case, requires_grad=False) for case in (first, second)]
    actual = by_name(Written(lambda *_: None, first=parameters[0], second=parameters[1]))
    assert actual["first"].twin_of == ""
    return actual["second"].twin_of


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
        pytest.param(SIX[:1].expand(4, 3).log1p(), SIX[:1].expand(4, 3).log1p(), "", id="equal rows, as Mamba's A_log"),
        pytest.param(SIX[None], SIX[None].clone(), "first", id="a single row of several axes"),
    ],
)
def test_twins_are_equal_weights_that_are_not_tied(first: Tensor, second: Tensor, twin: str) -> None:
    assert twins(first, second) == twin


def test_int8_weights_are_measured_by_the_values_they_stand_for() -> None:
    network = torchvision.models.quantization.resnet18(weights=None, quantize=True)
    actual = by_name(network)
    weight = network.conv1.weight().dequantize()
    assert actual["conv1.weight"].dtype == "qint8"
    assert actual["conv1.weight"].filter_count == 64
    assert actual["conv1.weight"].max_abs == float(weight.abs().max())
    assert "fc.weight" in actual


@pytest.mark.parametrize("name", MECHANISMS)
def test_what_is_found_is_the_state_dict_as_torch_counts_it(name: str) -> None:
    torch.manual_seed(0)
    network = NETWORKS[name].build()
    actual, remarks = stored_tensors(network)
    assert not remarks
    packed = {tensor.name for tensor in actual if tensor.dtype.startswith("q")}
    state = {key: value for key, value in network.state_dict().items() if isinstance(value, Tensor)}
    names = [each.name for each in actual]
    everything = {*names, *(alias for each in actual for alias in each.aliases)}
    if not packed:
        assert everything == set(state)
        assert names == [key for key in state if key in set(names)]
    for tensor in actual:
        if tensor.name in packed or tensor.name not in state:
            continue
        value = state[tensor.name]
        assert (tensor.shape, tensor.element_count) == (tuple(value.shape), value.numel())
        assert tensor.zero_count == int((value == 0).sum())
        if value.is_floating_point() and value.numel():
            assert (tensor.min, tensor.max, tensor.max_abs) == (
                float(value.min()),
                float(value.max()),
                float(value.abs().max()),
            )
            assert tensor.fp16_zero_count == int(((value.half() == 0) & (value != 0)).sum())
        if value.dim() and tensor.filter_count == value.shape[0]:
            zero = value.flatten(1).eq(0).all(1).nonzero().flatten().tolist()
            assert tensor.zero_filters == tuple(zero)


def test_a_variance_of_zero_beside_a_mean_that_is_not_is_told_from_a_dead_channel() -> None:
    norm = nn.BatchNorm2d(6)
    running_mean, running_var = norm.running_mean, norm.running_var
    running_mean.copy_(torch.tensor([0.0, 0.5, 0.5, 1e-5, 0.5, 0.5]))  # eps 1e-5: means below 3.2e-4 make no difference
    running_var.copy_(torch.tensor([0.0, 0.0, 1.0, 0.0, 1.17e-38, 1.18e-38]))  # 2**-126 lies between the last two
    measured = {stored_tensor.name: stored_tensor.means_without_variance for stored_tensor in stored_tensors(norm)[0]}
    assert measured["running_var"] == (1, 4)
    assert measured["running_mean"] == ()
    norm.running_var = running_var.to_sparse()
    assert by_name(norm)["running_var"].means_without_variance == (1, 4)


def test_filters_under_a_mask_of_pruning_are_zero() -> None:
    network = nn.Sequential(filled(nn.Conv2d(3, 10, 3)), filled(nn.ConvTranspose2d(4, 6, 3, groups=2)))
    prune.ln_structured(network[0], "weight", 4, 2, 0)
    prune.custom_from_mask(network[1], "weight", torch.ones(4, 3, 3, 3))
    network[1].weight_mask[:2, 1] = 0  # output 1 of the first group
    with torch.no_grad():
        network[1].weight_orig[2:, 2] = 0  # output 2 of the second
    masked = network[0].weight_mask.flatten(1).sum(1)
    expected = ((masked == 0).nonzero().flatten().tolist(), [1, 5])
    for measured in (by_name(network), by_name(as_named(network.state_dict()))):
        assert [*measured["0.weight_orig"].zero_filters] == expected[0]
        assert measured["0.weight_orig"].filter_count == 10
    assert [*by_name(network)["1.weight_orig"].zero_filters] == expected[1]
    assert len(expected[0]) == 4
