"""On an accelerator: the same maps as on the CPU."""

import copy
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import hookscope
from tests import far_device
from tests import networks as small
from tests.networks import batch_of

BUILT = {"swin": (small.small_swin, 64), "fcn": (small.small_fcn, 65)}


def near_and_far(name: str, options: dict[str, Any]) -> list[list[Any]]:
    """Return what the maps are of, and the maps, on the CPU and on the device."""
    torch.manual_seed(0)
    build, side = BUILT[name]
    network, pictures = build().eval(), torch.randn(2, 3, side, side)
    far = far_device.network_sent(copy.deepcopy(network))
    runs = [
        hookscope.attribute(network, pictures, sanity="none", **options),
        hookscope.attribute(far, batch_of(far_device.sent(pictures), count=2), sanity="none", **options),
    ]
    return [[(heat_map.input_index, heat_map.target.label, heat_map.values) for heat_map in run.maps] for run in runs]


@pytest.mark.parametrize(
    ("name", "options"),
    [("swin", {"top": 2, "method": "layer-cam"}), ("fcn", {"target": "0,1-2", "method": "hires-cam"})],
)
@pytest.mark.exhaustive
def test_maps_are_those_of_the_cpu(elsewhere: ProcessPoolExecutor, name: str, options: dict[str, Any]) -> None:
    near, far = elsewhere.submit(near_and_far, name, options).result()
    for (at, label, values), (far_at, far_label, far_values) in zip(near, far, strict=True):
        assert (far_at, far_label) == (at, label)
        np.testing.assert_allclose(far_values, values, rtol=1e-4, atol=1e-5 * np.abs(values).max())
