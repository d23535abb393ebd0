"""A NaN in one element of a weight: the report names the parameter, and the layer that makes NaN of it.

Of networks whose attention uses the weights of layers without calling them, see `measuring/test_nonfinite_origin.py`.
"""

import math
import random
from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision import models

from hookscope.checks.checkpoint import check_checkpoint
from hookscope.checks.judging import wanted_rules
from hookscope.checks.settings import CheckSettings
from hookscope.results.check import CheckReport

LAYERS_PER_NETWORK = 20

NETWORKS = ("resnet18", "squeezenet1_1", "mobilenet_v2", "shufflenet_v2_x0_5", "densenet121", "regnet_y_400mf")

# Maps stay large enough for every weight of every kernel to meet a pixel, not only padding.
SETTINGS = CheckSettings(shape=(1, 3, 64, 64))


def seeded(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return models.get_model(name, weights=None).eval()


def chosen_layers(name: str, network: nn.Module) -> list[str]:
    """Return different layers that have a weight, others for each network."""
    layers = [
        layer for layer, module in network.named_modules() if isinstance(getattr(module, "weight", None), nn.Parameter)
    ]
    return random.Random(name).sample(layers, LAYERS_PER_NETWORK)


def assert_blames(report: CheckReport, layer: str) -> None:
    """Assert that a parameter and its layer are reported, once each, and nothing else fails."""
    failures = [finding for finding in report.findings if finding.level == "fail"]
    assert [finding.rule for finding in failures] == ["non-finite-parameter", "non-finite-activation"]
    parameter, activation = failures
    assert parameter.where == f"{layer}.weight"
    assert f"'{layer}.weight'" in parameter.message
    assert " holds 1 NaN and 0 Inf in " in parameter.message
    assert activation.where.partition("#")[0] == layer  # a module that is called twice has a label for each call
    assert f"; its '{layer}.weight' is not finite" in activation.message
    assert report.exit_code == 1


@pytest.mark.parametrize("name", NETWORKS)
def test_a_nan_in_one_weight_is_reported_as_that_parameter_and_that_layer(name: str) -> None:
    network = seeded(name)
    position = random.Random(name)
    for layer in chosen_layers(name, network):
        weight = network.get_parameter(f"{layer}.weight").detach().view(-1)
        at = position.randrange(weight.numel())
        before = float(weight[at])
        weight[at] = math.nan
        assert_blames(check_checkpoint(network, SETTINGS, wanted_rules(SETTINGS)), layer)
        weight[at] = before
    assert check_checkpoint(network, SETTINGS, wanted_rules(SETTINGS)).passed


@pytest.mark.parametrize("name", NETWORKS)
def test_so_is_one_in_a_file_of_which_nothing_else_is_said(name: str, tmp_path: Path) -> None:
    network = seeded(name)
    layer = chosen_layers(name, network)[0]
    network.get_parameter(f"{layer}.weight").detach().view(-1)[-1] = math.nan
    torch.save(network.state_dict(), tmp_path / "model.pt")
    assert_blames(check_checkpoint(str(tmp_path / "model.pt"), SETTINGS, wanted_rules(SETTINGS)), layer)
