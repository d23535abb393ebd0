"""Compiled comparison of two tensors against NumPy in float64, in every variant that this processor runs."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from hookscope.statistics import difference
from hookscope.statistics.difference import SquaredSums, squared_sums
from hookscope.statistics.library import kernel_of
from hookscope.statistics.native import load_kernel
from tests.statistics.test_native import variants

pytestmark = pytest.mark.skipif(load_kernel() is None, reason="installed without the compiled library")


@pytest.fixture(autouse=True, scope="module", params=variants())
def _variant(request: pytest.FixtureRequest) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(difference, "load_kernel", lambda: kernel_of(request.param))
        yield


def sums_of(a: Tensor, b: Tensor, channel_axis: int | None = None) -> SquaredSums:
    sums = squared_sums(a, b, channel_axis)
    assert sums is not None
    return sums


def check(a: Tensor, b: Tensor, channel_axis: int | None = None) -> NDArray[np.float64] | None:
    """Compare what is found with NumPy's sums over the elements that are finite on both sides; return the squares."""
    result = sums_of(a, b, channel_axis)
    one, other = a.numpy().astype(np.float64), b.numpy().astype(np.float64)
    counted = np.isfinite(one) & np.isfinite(other)
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    apart = np.where(counted, one, 0) - np.where(counted, other, 0)
    assert result.a == pytest.approx(np.sum(one[counted] ** 2), rel=1e-13)
    assert result.b == pytest.approx(np.sum(other[counted] ** 2), rel=1e-13)
    assert result.product == pytest.approx(np.sum(one[counted] * other[counted]), rel=1e-9, abs=1e-9 * result.a)
    assert result.difference == pytest.approx(np.sum(apart**2), rel=1e-13)
    assert result.unequal == np.count_nonzero(apart)
    assert result.mismatched == np.count_nonzero(~counted & ~same)
    assert result.max_abs == np.abs(apart).max(initial=0)
    if result.max_abs:
        assert result.max_at is not None
        assert abs(apart[result.max_at]) == result.max_abs
        assert result.max_value == a[result.max_at]
    else:
        assert result.max_at is None
    return result.squares


@given(st.integers(1, 10_000), st.integers(0, 2**16), st.sampled_from([0.0, 1e-6, 1.0]))
@settings(max_examples=60)
def test_sums_of_any_length_are_numpys(count: int, seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(count, generator=generator)
    check(a, a + scale * torch.randn(count, generator=generator))


@given(
    st.lists(st.sampled_from([0.0, -0.0, 1.5, -2.0, 1e-45, 3e38, math.inf, -math.inf, math.nan]), max_size=40),
    st.data(),
)
@settings(max_examples=50)
def test_odd_values_are_counted_where_they_differ(values: list[float], data: st.DataObject) -> None:
    a = torch.tensor([1.0, *values])
    check(a, torch.tensor([1.0, *data.draw(st.permutations(values))]))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (3, 1, 0, 2)])
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (3, 40, 1, 1), (2, 1, 64, 65)])
def test_axes_may_lie_in_any_order(order: tuple[int, ...], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    a, b = (torch.randn([shape[axis] for axis in order]).permute(*np.argsort(order).tolist()) for _ in range(2))
    assert tuple(a.shape) == shape
    assert check(a, b) is None
    for axis in range(4):
        squares = check(a, b, axis)
        others = tuple(number for number in range(4) if number != axis)
        expected = ((a.double() - b.double()) ** 2).numpy().sum(axis=others)
        np.testing.assert_allclose(squares, expected, rtol=1e-13)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.ones(3, 4), torch.ones(4, 3).T),
        (torch.ones(6)[::2], torch.ones(6)[::2]),
        (torch.ones(1).expand(3), torch.ones(1).expand(3)),
        (torch.ones(3), torch.ones(3, dtype=torch.float64)),
        (torch.ones(3), torch.ones(2)),
        (torch.ones(0), torch.ones(0)),
    ],
    ids=["other strides", "gaps", "expanded", "float64", "other shape", "empty"],
)
def test_what_is_not_dense_float32_laid_out_alike_is_left(a: Tensor, b: Tensor) -> None:
    assert squared_sums(a, b) is None
    assert squared_sums(a, b, 0) is None


def test_a_single_value_has_its_place() -> None:
    assert sums_of(torch.tensor(2.0), torch.tensor(0.5)) == (4.0, 0.25, 1.0, 2.25, 1.5, 1, 0, (), None, 2.0)


@pytest.mark.parametrize("shape", [(2, 5, 3, 3), (4, 5)])
def test_a_channel_with_what_is_not_finite_has_no_squares(shape: tuple[int, ...]) -> None:
    a, b = torch.ones(shape), torch.zeros(shape)
    a[0, 3], b[1, 3] = math.inf, math.nan
    squares = check(a, b, 1)
    count = float(a.numel() / 5)
    assert np.where(np.isfinite(squares), squares, -1).tolist() == [count, count, count, -1, count]
