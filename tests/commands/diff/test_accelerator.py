"""On an accelerator: a network there beside its copy on the CPU."""

import copy
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

import hookscope
from tests import far_device
from tests import networks as small


def compared(*, shadow: bool, scale: float) -> tuple[set[str], list[str], str]:
    torch.manual_seed(0)
    network, pictures = small.small_resnet().eval(), torch.randn(2, 3, 33, 33)
    other = copy.deepcopy(network)
    with torch.no_grad():
        other.get_submodule("layer2.0.conv2").weight.mul_(scale)
    result = hookscope.diff(network, far_device.network_sent(other), pictures, shadow=shadow)
    return (
        {row.origin for row in result.rows},
        [difference.layer for difference in result.first_differences],
        result.b.device,
    )


@pytest.mark.exhaustive
def test_a_network_on_a_device_is_compared_with_one_on_the_cpu(elsewhere: ProcessPoolExecutor) -> None:
    origins, first_differences, device = elsewhere.submit(compared, shadow=False, scale=1.0).result()
    assert (origins <= {"equal", "rounding"}, first_differences, device) == (True, [], "far:0")
    origins, first_differences, _ = elsewhere.submit(compared, shadow=True, scale=1.01).result()
    assert first_differences == ["layer2.0.conv2"]
    assert origins <= {"equal", "rounding", "begins", "passed on"}
