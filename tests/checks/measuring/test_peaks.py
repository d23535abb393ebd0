"""Greatest magnitudes of the channels of smooth activation functions."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hookscope.checks.measuring.measuring import SMOOTH
from tests.checks.measuring.networks import measure_network
from tests.networks import NETWORKS, Written

WANTED = {"quiet-channels"}


@pytest.mark.parametrize(
    ("activation", "formula"),
    [
        (nn.GELU(), F.gelu),
        (nn.SiLU(inplace=True), F.silu),
        (nn.Mish(), F.mish),
        (nn.Softplus(), F.softplus),
    ],
    ids=["GELU", "SiLU in place", "Mish", "Softplus"],
)
def test_peaks_are_over_all_batches_and_positions(activation: nn.Module, formula: object) -> None:
    assert callable(formula)
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, 3, 4, 4, generator=generator), torch.randn(1, 3, 4, 4, generator=generator) * 3
    network = nn.Sequential(nn.Conv2d(3, 5, 1), activation)
    (peaks,) = measure_network(network, first, second, wanted=WANTED).channel_peaks.items()
    with torch.no_grad():
        every: Tensor = formula(network[0](torch.cat([first, second])))
    assert peaks[0] == "1"
    assert peaks[1].dtype == np.float32
    np.testing.assert_allclose(peaks[1], every.abs().amax((0, 2, 3)).numpy(), rtol=1e-5)


def test_channels_of_tokens_are_their_last_axis() -> None:
    network = nn.Sequential(nn.Linear(4, 6), nn.GELU())
    inputs = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    peaks = measure_network(network, inputs, wanted=WANTED).channel_peaks["1"]
    with torch.no_grad():
        np.testing.assert_allclose(peaks, network(inputs).abs().amax((0, 1)).numpy(), rtol=1e-6)


def test_each_call_of_a_shared_activation_has_its_own_peaks() -> None:
    network = Written(lambda net, x: net.act(net.act(x) * 2), act=nn.SiLU())
    inputs = torch.tensor([[1.0, -1.0]])
    peaks = measure_network(network, inputs, wanted=WANTED).channel_peaks
    once = F.silu(inputs)
    np.testing.assert_allclose(peaks["act"], once[0].abs().numpy(), rtol=1e-6)
    np.testing.assert_allclose(peaks["act#1"], F.silu(2 * once)[0].abs().numpy(), rtol=1e-6)


@pytest.mark.parametrize("kind", [nn.ReLU, nn.Hardswish, nn.LeakyReLU, nn.Tanh, nn.Sigmoid])
def test_other_activations_have_none(kind: type[nn.Module]) -> None:
    assert measure_network(nn.Sequential(nn.Linear(2, 2), kind()), torch.ones(1, 2), wanted=WANTED).channel_peaks == {}


@pytest.mark.parametrize("kind", [nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus])
def test_smooth_means_that_the_tail_goes_to_zero(kind: type[nn.Module]) -> None:
    tail = abs(float(kind()(torch.tensor(-20.0))))
    assert (kind.__name__ in SMOOTH) == (tail < 1e-6)
    # Near -1 none of them is zero: that sets them apart from rectifiers.
    assert float(kind()(torch.tensor(-1.0))) != 0


def test_peaks_are_measured_only_if_wanted() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.GELU())
    assert measure_network(network, torch.ones(1, 2), wanted={"forward"}).channel_peaks == {}


def test_a_whole_network_has_peaks_for_each_of_its_gelus() -> None:
    torch.manual_seed(0)
    network = NETWORKS["swin"].build()
    labels = [name for name, module in network.named_modules() if isinstance(module, nn.GELU)]
    assert list(measure_network(network, torch.randn(1, 3, 32, 32), wanted=WANTED).channel_peaks) == labels
