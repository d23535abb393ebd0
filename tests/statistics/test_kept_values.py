"""Which values of a tensor a run keeps: the same of every input, wherever and however the tensor lies."""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookscope.statistics import native
from hookscope.statistics.kept_values import MOST_KEPT, joined, kept_values
from hookscope.statistics.native import load_kernel
from hookscope.statistics.reducer import Reducer, collect


def numbered(*shape: int) -> Tensor:
    """Return a tensor whose values are their places."""
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape)


def kept(tensor: Tensor, axis: int | None = None, inputs: int = 1) -> NDArray[np.floating]:
    values = kept_values(tensor, axis, inputs)
    assert values is not None
    return values


@pytest.fixture(params=["compiled", "torch"])
def reducer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Reducer:
    monkeypatch.setattr(native, "load_kernel", load_kernel.__wrapped__ if request.param == "compiled" else lambda: None)
    return Reducer(distributions=True, keeps_values=True)


def reduced(reducer: Reducer, tensor: Tensor, axis: int | None, inputs: int) -> NDArray[np.floating]:
    """Return what a reduction of the tensor keeps."""
    measured = reducer.reduce(tensor, axis, inputs)
    (reduction,) = collect([measured])
    return joined(reduction.kept)


@pytest.mark.parametrize("shape", [(1, 256), (2, 4, 8, 8), (3, 5), (2, 1)])
def test_up_to_256_values_of_an_input_are_kept_whole(shape: tuple[int, ...]) -> None:
    np.testing.assert_array_equal(kept(numbered(*shape), 1, shape[0]), numbered(*shape).view(shape[0], -1))


def test_a_table_that_is_returned_for_two_inputs_and_then_for_one_is_read_as_each(reducer: Reducer) -> None:
    table = numbered(2, 3)
    assert [reduced(reducer, table, None, inputs).shape for inputs in (2, 1)] == [(2, 3), (1, 6)]


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e5m2, torch.bool])
def test_values_are_kept_of_dtypes_that_torch_cannot_index(dtype: torch.dtype, reducer: Reducer) -> None:
    largest = 1 if dtype is torch.bool else 57344.0  # the largest float8_e5m2
    tensor = torch.tensor([[0.0, largest], [1.0, 0.0]]).to(dtype)
    np.testing.assert_array_equal(reduced(reducer, tensor, None, 2), [[0, largest], [1, 0]])


@pytest.mark.parametrize("space", [(2, 150), (13, 13), (1, 129)])
@pytest.mark.parametrize("channels", [3, 65, 256])
@pytest.mark.parametrize("is_last", [False, True])
def test_every_channel_has_its_share_in_equal_parts_of_its_space(
    space: tuple[int, int], channels: int, is_last: bool
) -> None:
    """The value at a place of a channel is the place, and 10,000 for each channel before it."""
    places = numbered(*space) + 10_000 * torch.arange(channels)[:, None, None]
    values = kept(places.permute(1, 2, 0)[None] if is_last else places[None], 3 if is_last else 1)[0].astype(int)
    assert len({*values.tolist()}) == MOST_KEPT
    channel, place = values // 10_000, values % 10_000
    counts = np.bincount(channel, minlength=channels)
    assert (counts.size, counts.min()) == (channels, MOST_KEPT // channels)
    assert counts.max() <= counts.min() + 1
    for number, count in enumerate(counts):
        bounds = np.arange(count + 1) * math.prod(space) // count
        parts = np.searchsorted(bounds, np.sort(place[channel == number]), side="right")
        np.testing.assert_array_equal(parts, np.arange(1, count + 1))


@pytest.mark.parametrize("space", [(), (7, 7)])
@pytest.mark.parametrize("channels", [257, 2048])
def test_of_more_than_256_channels_evenly_spread_ones_have_a_value_each(channels: int, space: tuple[int, ...]) -> None:
    size = math.prod(space)
    actual = kept(numbered(1, channels, *space), 1)[0].astype(int) // size
    np.testing.assert_array_equal(actual, np.arange(MOST_KEPT) * channels // MOST_KEPT)


def test_channels_are_not_all_seen_at_the_same_places_nor_at_the_borders() -> None:
    values = kept(numbered(1, 128, 32, 32), 1)[0].astype(int) % 1024
    assert len({*values.tolist()}) > 200
    rows, columns = values // 32, values % 32
    for along in (rows, columns):
        np.testing.assert_allclose(np.bincount(along // 8, minlength=4) / MOST_KEPT, 0.25, atol=0.06)


def test_the_places_are_those_of_the_formula() -> None:
    """Two channels, of 512 values, have 128 parts of 4 values; the golden ratio is 40503 / 65536."""
    expected = [
        512 * (number % 2) + 4 * (number // 2) + (number * 40503 % 65536) * 4 // 65536 for number in range(MOST_KEPT)
    ]
    np.testing.assert_array_equal(kept(numbered(1, 2, 512), 1)[0], expected)


def test_without_channels_places_are_spread_over_all_values() -> None:
    values = np.sort(kept(numbered(1, 3, 256, 256))[0])
    np.testing.assert_array_equal(values // 768, np.arange(MOST_KEPT))
    assert len({*(values % 256 // 32).tolist()}) == 8  # and not over a border of the picture


SHAPES = [(2, 6, 9, 11), (3, 300, 4, 4), (4, 17, 64), (5,), ()]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_layout_in_memory_and_the_dtype_do_not_matter(shape: tuple[int, ...], reducer: Reducer) -> None:
    values = (numbered(*shape) - 700) / 8  # exact in float32
    axis, inputs = 1 if len(shape) > 1 else None, shape[0] if shape else 1
    expected = kept(values.double(), axis, inputs)
    wide = torch.zeros(*shape, 2)
    wide[..., 0] = values
    backwards = values.permute(tuple(range(values.dim())[::-1])).contiguous()
    others = {
        "plain": values,
        "with gaps": wide[..., 0],
        "transposed": backwards.permute(tuple(range(values.dim())[::-1])),
        "negated lazily": torch.complex(values, -values).conj().imag,
        "tracked": values.clone().requires_grad_(),
        "float64": values.double(),
    }
    if len(shape) == 4:
        others["channels last"] = values.to(memory_format=torch.channels_last)
    for name, other in others.items():
        np.testing.assert_array_equal(reduced(reducer, other, axis, inputs), expected, err_msg=name)
    with torch.inference_mode():
        np.testing.assert_array_equal(reduced(reducer, values + 0, axis, inputs), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_values_of_other_dtypes_are_kept_as_they_are(dtype: torch.dtype, reducer: Reducer) -> None:
    values = torch.randn(2, 5, 9, 9, generator=torch.Generator().manual_seed(0)).mul(9).to(dtype)
    np.testing.assert_array_equal(reduced(reducer, values, 1, 2), kept(values.double(), 1, 2))


def test_whole_numbers_that_float32_does_not_hold_are_told_apart() -> None:
    assert kept(torch.tensor([[2**24, 2**24 + 1]])).tolist() == [[2**24, 2**24 + 1]]


def test_complex_elements_count_as_two() -> None:
    values = torch.complex(numbered(2, 5), -numbered(2, 5))
    np.testing.assert_array_equal(kept(values, 1, 2), torch.view_as_real(values).reshape(2, -1))
    np.testing.assert_array_equal(
        kept(values.conj(), 1, 2), torch.view_as_real(values.conj().resolve_conj()).view(2, -1)
    )


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantised_values_are_those_that_they_stand_for() -> None:
    values = torch.quantize_per_tensor(torch.randn(2, 400), 0.05, 3, torch.qint8)
    np.testing.assert_array_equal(kept(values, 1, 2), kept(values.dequantize(), 1, 2))


def test_nan_and_inf_are_values_like_others(reducer: Reducer) -> None:
    values = torch.tensor([[1.0, math.nan, math.inf, -math.inf]])
    np.testing.assert_array_equal(reduced(reducer, values, 1, 1), values)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1, 1), (2, 4)])
@pytest.mark.parametrize(
    ("shape", "batch", "axis"),
    [
        ((6, 3, 20, 20), 0, 1),
        ((31, 6, 40), 1, 2),  # tokens first
        ((24, 49, 32), 0, 2),  # four windows of each input
        ((6,), 0, None),
    ],
)
def test_values_do_not_depend_on_how_inputs_come_in_batches(
    shape: tuple[int, ...], batch: int, axis: int | None, sizes: tuple[int, ...], reducer: Reducer
) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    per_input = shape[batch] // 6
    parts = values.split([per_input * size for size in sizes], batch)
    apart = [reduced(reducer, part, axis, size) for part, size in zip(parts, sizes, strict=True)]
    np.testing.assert_array_equal(joined(apart), reduced(reducer, values, axis, 6))


def test_a_tensor_that_does_not_count_inputs_is_that_of_one(reducer: Reducer) -> None:
    for shape in ((5, 9, 9), (1, 4), ()):
        assert len(reduced(reducer, numbered(*shape), None, 2)) == 1


def test_batches_of_other_shapes_are_joined_value_by_value() -> None:
    np.testing.assert_array_equal(joined([numbered(2, 3), numbered(1, 2)]), [[0, 1, 2, 3, 4, 5, 0, 1]])


def test_nothing_is_kept_of_what_is_sparse_ragged_or_without_data() -> None:
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    for case in (torch.eye(3).to_sparse(), ragged, torch.ones(3, device="meta")):
        assert kept_values(case) is None
    assert kept(torch.ones(3, 0)).size == 0
