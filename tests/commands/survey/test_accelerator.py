"""On an accelerator the numbers of channels are the same, and nothing waits for them in a hook."""

from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch

from hookscope.commands.survey.channel_rows import ChannelRows, RowsOnDevice, reduce_channels
from tests import far_device

pytestmark = pytest.mark.exhaustive


def values() -> torch.Tensor:
    torch.manual_seed(0)
    made = torch.randn(3, 4, 5, 6)
    made[0, 1] = made[1, 2, 3] = 0
    made[2, 3, 0, 0], made[1, 1, 1, 1] = torch.nan, torch.inf
    made[0, 0, 1, 2] = made[0, 0, 4, 5] = 9  # equal ones: the first counts
    return made


def _reduced_there() -> tuple[ChannelRows, list[str]]:
    there = far_device.FarTensor(values())
    far_device.looks.clear()
    rows = reduce_channels(there, 1, None)
    looks = [*far_device.looks]
    assert isinstance(rows, RowsOnDevice)
    return rows.fetched(), looks


def test_channels_are_reduced_on_the_device_and_moved_once(elsewhere: ProcessPoolExecutor) -> None:
    there, looks = elsewhere.submit(_reduced_there).result(timeout=300)
    here = reduce_channels(values(), 1, None)
    assert looks == []
    assert isinstance(here, ChannelRows)
    for name in ("finite", "high", "low", "positions"):
        np.testing.assert_array_equal(getattr(there, name), getattr(here, name))
    for name in ("mean", "deviations"):
        np.testing.assert_allclose(getattr(there, name), getattr(here, name), rtol=1e-5, atol=1e-6)
