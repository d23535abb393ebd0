"""Counting NaN and Inf without loading: against torch's own tests of each element, on tensors in memory."""

import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hookscope.models import nonfinite
from hookscope.models.nonfinite import count, count_stored

FLOATING = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 64 bytes, so that small tensors are read in several."""
    monkeypatch.setattr(nonfinite, "_PIECE_BYTES", 64)


def planted(shape: tuple[int, ...], dtype: torch.dtype, nans: list[int], infs: list[int]) -> torch.Tensor:
    tensor = torch.linspace(-1, 1, torch.Size(shape).numel()).to(dtype)
    tensor[infs] = float("-inf")
    tensor[nans] = float("nan")
    return tensor.reshape(shape)


def stored(tensor: torch.Tensor, before: int = 24) -> tuple[io.BytesIO, int, torch.Tensor]:
    storage = tensor.untyped_storage()
    layout = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    layout = layout.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return io.BytesIO(b"\xff" * before + bytes(storage) + b"\xff" * 24), before, layout


@pytest.mark.parametrize("dtype", FLOATING)
def test_every_nan_and_inf_is_counted_in_every_floating_dtype(dtype: torch.dtype) -> None:
    tensor = planted((5, 13), dtype, nans=[0, 40, 64], infs=[1, 63])
    assert count(tensor) == (3, 2)
    assert count_stored(*stored(tensor)) == (3, 2)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_is_counted_though_it_has_no_arithmetic(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0.5, float("nan"), 2.0]).to(dtype)
    assert count(tensor) == (1, 0)
    assert count_stored(*stored(tensor)) == (1, 0)


@pytest.mark.parametrize("dtype", FLOATING)
def test_the_bytes_around_a_tensor_do_not_count(dtype: torch.dtype) -> None:
    assert count_stored(*stored(torch.ones(100, dtype=dtype))) == (0, 0)


def test_finite_values_whose_sum_overflows_are_finite() -> None:
    assert count(torch.full((1000,), 3e38)) == (0, 0)
    assert count(torch.full((1000,), 65504.0, dtype=torch.float16)) == (0, 0)
    assert count(torch.full((1000,), 1.7e308, dtype=torch.float64)) == (0, 0)


def test_opposite_infinities_do_not_cancel() -> None:
    assert count(torch.tensor([float("inf"), float("-inf")])) == (0, 2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_integers_have_nothing_to_count(dtype: torch.dtype) -> None:
    assert count_stored(*stored(torch.ones(10, dtype=dtype))) == (0, 0)


def test_an_empty_tensor_has_nothing_to_count() -> None:
    assert count_stored(*stored(torch.empty(0, 3))) == (0, 0)


@settings(max_examples=60, deadline=None)
@given(
    st.permutations([0, 1, 2]),
    st.lists(st.slices(6), min_size=3, max_size=3),
    st.sets(st.integers(0, 6 * 5 * 7 - 1), max_size=30),
)
def test_views_count_their_own_elements_alone(order: list[int], slices: list[slice], nans: set[int]) -> None:
    whole = planted((6, 5, 7), torch.float32, nans=sorted(nans), infs=[])
    forward = [slice(each.start, each.stop, abs(each.step or 1)) for each in slices]
    view = whole.permute(order)[tuple(forward)]
    assert count_stored(*stored(view)) == (int(view.isnan().sum()), 0)


def test_an_expanded_tensor_counts_every_element_it_shows() -> None:
    expanded = torch.tensor([[float("nan")], [1.0]]).expand(2, 5)
    assert count_stored(*stored(expanded)) == (5, 0)


def test_a_view_too_scattered_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonfinite, "_GATHER_BYTES_LIMIT", 100)
    assert count_stored(*stored(torch.ones(100, 100)[::50, ::50])) is None


def test_a_file_that_ends_within_a_tensor_is_an_error() -> None:
    file, begin, layout = stored(torch.ones(100))
    with pytest.raises(EOFError):
        count_stored(io.BytesIO(file.getvalue()[:300]), begin, layout)


EIGHT_BITS = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]


@pytest.mark.parametrize("dtype", [*EIGHT_BITS, torch.float16, torch.bfloat16])
def test_every_pattern_of_bits_counts_as_torch_reads_it(dtype: torch.dtype) -> None:
    integers = torch.int8 if dtype.itemsize == 1 else torch.int16
    limits = torch.iinfo(integers)
    patterns = torch.arange(limits.min, limits.max + 1).to(integers).view(dtype)
    values = patterns.float()
    assert count(patterns) == (int(values.isnan().sum()), int(values.isinf().sum()))
    finite = (
        patterns[values.isfinite()] if dtype.itemsize > 1 else patterns.view(integers)[values.isfinite()].view(dtype)
    )
    assert count(finite) == (0, 0)


def test_a_format_that_has_neither_counts_none() -> None:
    assert count(torch.full((4,), 0xFF, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)) == (0, 0)
