"""Channels reduced by compiled code against NumPy in float64, in every variant that this processor runs."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from hookscope.statistics import channels
from hookscope.statistics.channels import ChannelNumbers, reduce_by_channel
from hookscope.statistics.library import kernel_of
from hookscope.statistics.native import load_kernel
from tests.statistics.test_native import on_threads, variants

pytestmark = pytest.mark.skipif(load_kernel() is None, reason="installed without the compiled library")


@pytest.fixture(autouse=True, scope="module", params=variants())
def _variant(request: pytest.FixtureRequest) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channels, "load_kernel", lambda: kernel_of(request.param, torch._C.__file__))
        yield


def check(tensor: Tensor) -> ChannelNumbers:
    actual = reduce_by_channel(tensor, None)
    wide = tensor.double().numpy().reshape(*tensor.shape[:2], -1)
    np.testing.assert_array_equal(actual.high, wide.max(2))
    np.testing.assert_array_equal(actual.low, wide.min(2))
    np.testing.assert_array_equal(actual.positions, wide.argmax(2))
    np.testing.assert_allclose(actual.mean, wide.mean(2), rtol=1e-12, atol=1e-13)
    deviations = ((wide - wide.mean(2, keepdims=True)) ** 2).sum(2)
    np.testing.assert_allclose(actual.deviations, deviations, rtol=1e-9, atol=1e-13)
    return actual


@pytest.mark.parametrize("shape", [(3, 1, 5), (4, 17, 8, 9), (2, 8, 3, 4, 5)])
def test_channels_in_any_order_of_memory_are_numpys(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    check(torch.randn(shape))
    check(torch.randn(shape).relu())
    check(torch.randn(shape).round())  # ties: the first counts
    check(torch.randn(shape[0], *shape[2:], shape[1]).movedim(-1, 1))
    check(torch.randn(shape[1], shape[0], *shape[2:]).transpose(0, 1))


def test_any_number_of_threads_gives_the_same_bits() -> None:
    for tensor in (torch.randn(6, 16, 30, 31), torch.randn(6, 30, 31, 16).movedim(-1, 1)):
        with on_threads(1):
            alone = check(tensor)
        for threads in (2, 5):
            with on_threads(threads):
                for one, other in zip(alone, check(tensor), strict=True):
                    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("is_last", [False, True])
def test_values_far_from_zero_keep_their_digits(is_last: bool) -> None:
    torch.manual_seed(1)
    tensor = torch.randn(2, 9, 11, 5) * 1e-3 + 1e4
    tensor[:, 3] = 0.1
    actual = check(tensor.to(memory_format=torch.channels_last) if is_last else tensor)
    assert (actual.mean[:, 3] == tensor[0, 3, 0, 0].item()).all()
    assert (actual.deviations[:, 3] == 0).all()


@pytest.mark.parametrize("is_last", [False, True])
def test_positions_are_those_of_values_above_the_thresholds(is_last: bool) -> None:
    tensor = torch.zeros(2, 3, 4, 4)
    tensor[0, 0, 1, 2], tensor[1, 0, 3, 3], tensor[1, 1, 0, 1] = 2, 1, 5
    tensor = tensor.to(memory_format=torch.channels_last) if is_last else tensor
    actual = reduce_by_channel(tensor, np.array([1.0, -1.0, 0.0]))
    assert actual.positions.tolist() == [[6, 0, -1], [-1, 1, -1]]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 34])
def test_what_is_not_finite_is_left_to_torch(value: float, place: int) -> None:
    tensor = torch.randn(2, 4, 5, 7)
    tensor[1, 2].view(-1)[place] = value
    assert reduce_by_channel(tensor, None) is None
    assert reduce_by_channel(tensor.to(memory_format=torch.channels_last), None) is None


def test_nothing_beside_the_values_is_read() -> None:
    memory = torch.full((3, 6, 5, 7), math.nan)
    memory[:, 2:5] = torch.randn(3, 3, 5, 7)
    check(memory[:, 2:5])
    assert reduce_by_channel(memory[:, 2:5, :, 1:], None) is None  # rows have gaps
    assert reduce_by_channel(torch.randn(2, 3, 4).double(), None) is None
    for single in (torch.randn(2, 3, 4, 1), torch.randn(2, 3, 1, 4), torch.randn(2, 3, 1, 1)):
        assert reduce_by_channel(single.expand(2, 3, 4, 4), None) is None  # more positions than values
