"""Measures against NumPy in float64, and torch.ao.ns."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hookscope.commands.diff.measures import Sums, squares_by_channel, sums_of
from hookscope.results.differences import Measures, NonFinite
from hookscope.statistics import difference


@pytest.fixture(autouse=True, params=["compiled", "by torch"])
def _compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "by torch":
        monkeypatch.setattr(difference, "load_kernel", lambda: None)


def measured(a: Tensor, b: Tensor, dtype: torch.dtype = torch.float32) -> Measures:
    sums = sums_of(a, b)
    assert sums is not None
    return sums.measured(dtype)


@pytest.mark.parametrize("shape", [(3,), (2, 40_000), (3, 7, 5, 11)])
@pytest.mark.parametrize("scale", [1e-6, 0.1, 10.0])
def test_measures_equal_numpys(shape: tuple[int, ...], scale: float) -> None:
    torch.manual_seed(0)
    a = torch.randn(shape)
    b = a + scale * torch.randn(shape)
    one, other = a.double().numpy(), b.double().numpy()
    result = measured(a, b)
    difference = one - other
    assert result.relative_l2 == pytest.approx(np.linalg.norm(difference) / np.linalg.norm(one), rel=1e-12)
    cosine = np.sum(one * other) / np.linalg.norm(one) / np.linalg.norm(other)
    assert result.cosine == pytest.approx(cosine, abs=1e-12)
    assert result.sqnr_db == pytest.approx(20 * np.log10(np.linalg.norm(one) / np.linalg.norm(difference)), rel=1e-12)
    assert result.max_abs == np.abs(difference).max()
    assert result.max_at == np.unravel_index(np.abs(difference).argmax(), shape)
    largest = np.abs(difference).max()
    assert result.ulps == pytest.approx(
        largest / np.spacing(np.fmax(np.abs(a.numpy()[result.max_at]), np.float32(largest)))
    )
    assert result.unequal_fraction == np.mean(difference != 0)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("shape", [(5,), (2, 40_000)])
def test_an_element_of_complex_tensors_is_one_number(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    b.view(-1)[::2] = a.view(-1)[::2]
    difference = a.to(torch.complex128).numpy() - b.to(torch.complex128).numpy()
    result = measured(a, b, dtype)
    assert result.relative_l2 == pytest.approx(np.linalg.norm(difference) / float(a.abs().double().norm()), rel=1e-6)
    assert result.max_abs == pytest.approx(np.abs(difference).max())
    assert result.max_at == np.unravel_index(np.abs(difference).argmax(), shape)
    assert result.unequal_fraction == np.mean(difference != 0)
    b.view(-1)[1] = complex(math.nan, 1)
    assert measured(a, b, dtype).nonfinite == NonFinite(0, 0, 1, 0, a.numel())


def test_signal_to_noise_equals_torchs() -> None:
    from torch.ao.ns.fx.utils import compute_cosine_similarity, compute_normalized_l2_error, compute_sqnr

    torch.manual_seed(1)
    a = torch.randn(4, 3, 8, 8)
    b = a + 0.01 * torch.randn_like(a)
    result = measured(a, b)
    assert result.sqnr_db == pytest.approx(float(compute_sqnr(a, b)), rel=1e-5)
    assert result.relative_l2 == pytest.approx(float(compute_normalized_l2_error(a, b)), rel=1e-5)
    assert result.cosine == pytest.approx(float(compute_cosine_similarity(a.flatten()[None], b.flatten()[None])), 1e-5)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(0, 2**16))
@settings(max_examples=30)
def test_parts_measured_one_after_another_are_the_whole(parts: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(sum(parts), 5, generator=generator)
    b = a + torch.randn(sum(parts), 5, generator=generator)
    sums, first = Sums(), 0
    for count in parts:
        sums += sums_of(a[first : first + count], b[first : first + count], first) or Sums()
        first += count
    whole, joined = measured(a, b), sums.measured(torch.float32)
    assert joined.max_at == whole.max_at
    assert joined.relative_l2 == pytest.approx(whole.relative_l2, rel=1e-12)


def test_equal_tensors_are_equal_though_they_hold_nan_and_infinities() -> None:
    a = torch.tensor([1.0, math.nan, math.inf, -math.inf, 2.0])
    result = measured(a, a.clone())
    assert (result.relative_l2, result.max_abs, result.unequal_fraction) == (0.0, 0.0, 0.0)
    assert result.sqnr_db == math.inf


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_on_one_side_alone_makes_the_difference_nan(odd: float) -> None:
    a = torch.tensor([1.0, 2.0, 3.0])
    b = torch.tensor([1.0, odd, 3.5])
    result = measured(a, b)
    assert math.isnan(result.relative_l2)
    assert math.isnan(result.sqnr_db)
    assert (result.max_abs, result.max_at) == (0.5, (2,))
    assert result.unequal_fraction == pytest.approx(2 / 3)
    is_nan = math.isnan(odd)
    assert result.nonfinite == NonFinite(0, 0, int(is_nan), int(not is_nan), 3)
    assert measured(b, a).nonfinite == NonFinite(int(is_nan), int(not is_nan), 0, 0, 3)
    assert measured(a.double(), b.double()).nonfinite == result.nonfinite  # not by compiled code


def test_a_difference_from_nothing_is_infinite() -> None:
    assert measured(torch.zeros(3), torch.tensor([0.0, 1.0, 0.0])).relative_l2 == math.inf
    assert measured(torch.zeros(3), torch.zeros(3)).relative_l2 == 0


@pytest.mark.parametrize(("dtype", "spacing"), [(torch.float16, 2.0**-10), (torch.bfloat16, 2.0**-7)])
def test_ulps_are_those_of_the_coarser_dtype(dtype: torch.dtype, spacing: float) -> None:
    assert measured(torch.tensor([1.5]), torch.tensor([1.5 + 3 * spacing]), dtype).ulps == 3


def test_a_difference_whose_square_is_zero_in_float64_is_a_difference() -> None:
    a = torch.tensor([1.0, 1e-200], dtype=torch.float64)
    result = measured(a, torch.tensor([1.0, 2e-200], dtype=torch.float64), torch.float64)
    assert 0 < result.relative_l2 < 1e-150
    assert result.unequal_fraction == 0.5


def test_ulps_where_a_is_zero_are_those_of_the_difference() -> None:
    assert measured(torch.tensor([0.0, 1.0]), torch.tensor([1.5, 1.0])).ulps == 1.5 * 2**23
    assert measured(torch.tensor([1e-30]), torch.tensor([-2.0])).ulps == 2.0**23


def test_squares_by_channel_are_numpys() -> None:
    torch.manual_seed(2)
    a, b = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5)
    squares = squares_by_channel(a, b, 1)
    assert np.allclose(squares, ((a - b).double().numpy() ** 2).sum((0, 2, 3)), rtol=1e-5)
    squares = squares_by_channel(a, b, 3)
    assert np.allclose(squares, ((a - b).double().numpy() ** 2).sum((0, 1, 2)), rtol=1e-5)


@pytest.mark.parametrize("size", [1e-310, 1e-200, 1e160, 1e300])
def test_float64_values_whose_squares_overflow_or_vanish_are_measured(size: float) -> None:
    a, b = (torch.tensor([3.0, 4.0, 0.0], dtype=torch.float64) * size, torch.zeros(3, dtype=torch.float64))
    b[2] = 5 * size
    result = measured(a, b, torch.float64)
    assert result.relative_l2 == pytest.approx(2**0.5)
    assert result.cosine == 0
    assert (result.max_abs, result.max_at) == (5 * size, (2,))
    assert measured(a, 1.5 * a, torch.float64).relative_l2 == pytest.approx(0.5)
    assert measured(torch.complex(a, b), torch.complex(a, 0 * b), torch.float64).relative_l2 == pytest.approx(0.5**0.5)
    sums = sums_of(a, 1.5 * a)
    assert sums is not None
    assert sums.norm == pytest.approx(5 * size)


def test_sums_of_ordinary_values_and_of_large_ones_add_up() -> None:
    small, large = (torch.tensor([size, size], dtype=torch.float64) for size in (1.0, 1e200))
    parts = [sums_of(tensor, 2 * tensor) or Sums() for tensor in (small, large)]
    for sums in (parts[0] + parts[1], parts[1] + parts[0]):
        assert sums.norm == pytest.approx(2**0.5 * 1e200)
        assert sums.relative_l2 == pytest.approx(1)
        assert (sums.count, sums.unequal, sums.max_abs) == (4, 4, 1e200)
