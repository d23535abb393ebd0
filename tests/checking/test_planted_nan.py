"""A NaN in one element of a weight: the report names the parameter, and the layer that makes NaN of it.

`tests/examination/test_origin.py` plants one in 20 layers of seven networks; here a few go through files and rules.
"""

import random
from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision import models

from hookscope.checking import check_checkpoint
from hookscope.checks import CheckSettings, wanted_rules

LAYERS_PER_NETWORK = 4

PLANTED = ("resnet18", "vgg11_bn", "squeezenet1_1", "mobilenet_v2", "densenet121", "convnext_tiny")

# Every weight of every kernel meets a pixel of the picture, not only padding.
SETTINGS = {"shape": (1, 3, 64, 64)}


@pytest.mark.parametrize("name", PLANTED)
def test_a_nan_in_one_weight_is_reported_as_that_parameter_and_that_layer(name: str, tmp_path: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = models.get_model(name, weights=None)
    layers = [
        layer for layer, module in network.named_modules() if isinstance(getattr(module, "weight", None), nn.Parameter)
    ]
    chosen = random.Random(name)
    settings = CheckSettings(arch=name, **SETTINGS)
    for layer in chosen.sample(layers, LAYERS_PER_NETWORK):
        state = {key: value.clone() for key, value in network.state_dict().items()}
        weight = state[f"{layer}.weight"]
        weight.view(-1)[chosen.randrange(weight.numel())] = torch.nan
        path = tmp_path / "model.pt"
        torch.save(state, path)
        report = check_checkpoint(str(path), settings, wanted_rules(settings))
        failures = {finding.rule: finding for finding in report.findings if finding.level == "fail"}
        assert failures.keys() == {"non-finite-parameter", "non-finite-activation"}
        assert failures["non-finite-parameter"].where == f"{layer}.weight"
        assert f"holds 1 NaN and 0 Inf in {weight.numel():,} values" in failures["non-finite-parameter"].message
        assert failures["non-finite-activation"].where.partition("#")[0] == layer
        assert f"its '{layer}.weight' is not finite" in failures["non-finite-activation"].message
