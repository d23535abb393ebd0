"""Maps combined by compiled code against NumPy in float64, in every variant that this processor runs."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from hookscope.statistics import maps
from hookscope.statistics.library import kernel_of
from hookscope.statistics.maps import CombinedMaps, combine_maps
from hookscope.statistics.native import load_kernel
from tests.statistics.test_native import variants

pytestmark = pytest.mark.skipif(load_kernel() is None, reason="installed without the compiled library")


@pytest.fixture(autouse=True, scope="module", params=variants())
def _variant(request: pytest.FixtureRequest) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(maps, "load_kernel", lambda: kernel_of(request.param))
        yield


def combined(tensor: Tensor, *, squared: bool = False, rounding: float = 0.0) -> CombinedMaps:
    actual = combine_maps(tensor, squared=squared, rounding=rounding)
    assert actual is not None
    return actual


def check(tensor: Tensor) -> None:
    values = tensor.numpy().astype(np.float64)
    strongest = (values**2).sum((2, 3)).argmax(1)
    for squared, expected in ((False, values.mean(1)), (True, np.sqrt((values**2).mean(1)))):
        actual = combined(tensor, squared=squared)
        np.testing.assert_allclose(actual.combined.numpy(), expected, rtol=1e-6, atol=1e-12)
        assert actual.channels.tolist() == strongest.tolist()
        np.testing.assert_array_equal(actual.strongest.numpy(), tensor.numpy()[range(len(tensor)), strongest])


@pytest.mark.parametrize("channels", [1, 4, 17])
@pytest.mark.parametrize("size", [(3, 5), (32, 33)])
def test_maps_in_any_order_of_memory_are_numpys(channels: int, size: tuple[int, int]) -> None:
    torch.manual_seed(channels)
    tensor = torch.randn(3, channels, *size)
    check(tensor)
    check(tensor.to(memory_format=torch.channels_last))
    check(torch.randn(channels, 3, *size).transpose(0, 1))
    tokens = torch.randn(3, 2 + size[0] * size[1], channels).transpose(1, 2)[:, :, 2:]
    check(tokens.unflatten(2, size))


def test_nothing_beside_the_maps_is_read() -> None:
    memory = torch.full((2, 4, 13, 11), math.nan)
    memory[:, 1:3] = torch.randn(2, 2, 13, 11)
    check(memory[:, 1:3])


def test_nan_comes_before_infinity_and_that_before_any_other_value() -> None:
    tensor = torch.ones(1, 5, 3, 3)
    tensor[0, 3] = 1e30  # its square is no float32
    assert combined(tensor).channels.tolist() == [3]
    tensor[0, 2, 1, 1] = -math.inf
    assert combined(tensor).channels.tolist() == [2]
    tensor[0, 1, 1, 1] = tensor[0, 4, 0, 0] = math.nan
    assert combined(tensor).channels.tolist() == [1]


def test_a_mean_up_to_rounding_is_zero() -> None:
    tensor = torch.tensor([1.0, -1.0]).view(1, 2, 1, 1).repeat(1, 1, 4, 4)
    tensor[0, 0, 1, 2] += 0.25
    tensor[0, 0, 3, 3] += 2.0**-10
    assert np.argwhere(combined(tensor, rounding=2.0**-10).combined[0].numpy()).tolist() == [[1, 2]]
    assert np.argwhere(combined(tensor).combined[0].numpy()).tolist() == [[1, 2], [3, 3]]


@pytest.mark.parametrize(
    "tensor",
    [torch.randn(1, 2, 3, 4).double(), torch.randn(1, 2, 3, 8)[..., ::2], torch.randn(1, 2, 6, 4)[:, :, ::2]],
    ids=["double", "gaps in a row", "gaps between rows"],
)
def test_other_maps_are_left_to_torch(tensor: Tensor) -> None:
    assert combine_maps(tensor, squared=False, rounding=0.0) is None
