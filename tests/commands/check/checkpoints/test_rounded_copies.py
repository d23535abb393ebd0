"""Copies of trained networks that round or run in another way are as accurate as the network: no accuracy is lost."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from hookscope.commands.check.checkpoint import check_checkpoint
from hookscope.results.check import CheckMeasurements
from hookscope.rules.baseline import Baseline, baseline_of
from hookscope.rules.settings import CheckSettings
from tests.commands.check.checkpoints.gratings import CLASSES, PREPARATION, draw_gratings, gratings
from tests.commands.check.measurements import findings

pytestmark = pytest.mark.exhaustive

WANTED = frozenset({"accuracy", "accuracy-drop"})
Activation = Callable[[], nn.Module]


def trained(activation: Activation, norm: Callable[[int], nn.Module], seed: int) -> nn.Module:
    """Return a small network that was trained on gratings for a second."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        convolutions = [
            layer
            for before, after in ((3, 12), (12, 16))
            for layer in (nn.Conv2d(before, after, 3, 2, 1), norm(after), activation())
        ]
        net = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, len(CLASSES)))
        optimiser = torch.optim.Adam(net.parameters(), 1e-2)
        for _ in range(60):
            label = torch.randint(len(CLASSES), (32,))
            loss = nn.functional.cross_entropy(net(gratings(label)), label)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return net.eval()


def without(_: int) -> nn.Module:
    return nn.Identity()


NETWORKS = [(nn.SiLU, nn.BatchNorm2d), (nn.ReLU, without)]


def in_eight_bits(network: nn.Module) -> nn.Module:
    with torch.no_grad():
        for weight in (parameter for parameter in network.parameters() if parameter.dim() > 1):
            step = weight.abs().max() / 127
            weight.copy_((weight / step).round() * step)
    return network


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "float16": lambda network: network.half(),
    "bfloat16": lambda network: network.bfloat16(),
    "float64": lambda network: network.double(),
    "channels last": lambda network: network.to(memory_format=torch.channels_last),
    "weights in eight bits": in_eight_bits,
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> CheckSettings:
    folder = tmp_path_factory.mktemp("gratings") / "data"
    draw_gratings(folder, 25)
    return CheckSettings(data=folder, batch_size=50, **PREPARATION)  # type: ignore[arg-type]


def baseline_and_accuracy(network: nn.Module, settings: CheckSettings) -> tuple[Baseline, float]:
    measured: list[CheckMeasurements] = []
    report = check_checkpoint(network, settings, WANTED, on_measured=measured.append)
    assert report.accuracy is not None
    return baseline_of(measured[0]), report.accuracy.share


@pytest.mark.parametrize("seed", range(len(NETWORKS)))
def test_no_copy_loses_accuracy_but_one_that_was_damaged(seed: int, settings: CheckSettings) -> None:
    activation, norm = NETWORKS[seed]
    network = trained(activation, norm, seed)
    baseline, share = baseline_and_accuracy(network, settings)
    assert share > 0.6
    for name, change in COPIES.items():
        report = check_checkpoint(change(copy.deepcopy(network)), settings, WANTED, baseline=baseline)
        assert findings(report) == [], name
    threads = torch.get_num_threads()
    torch.set_num_threads(3 - min(threads, 2))
    try:
        assert findings(check_checkpoint(network, settings, WANTED, baseline=baseline)) == []
    finally:
        torch.set_num_threads(threads)
    with torch.no_grad():
        network[0].weight.copy_(network[0].weight.flip(1))  # colours in another order
    assert ("accuracy-drop", "fail", "") in findings(check_checkpoint(network, settings, WANTED, baseline=baseline))
