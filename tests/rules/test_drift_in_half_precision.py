"""A copy of a network in half precision is no drift; a change that is more than rounding is."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from hookscope.rules.baseline import Baseline, baseline_of
from tests.commands.check.measurements import inspected
from tests.networks import TORCHVISION
from tests.rules.test_drift import SIX, VALUES, built, chain, findings, with_row

HALVES = {
    "float16": lambda network, inputs: (network.half(), inputs.half()),
    "bfloat16": lambda network, inputs: (network.bfloat16(), inputs.bfloat16()),
    "weights in float16": lambda network, inputs: (network.half().float(), inputs),
    "weights in bfloat16": lambda network, inputs: (network.bfloat16().float(), inputs),
}
HALVED = ("resnet18", "squeezenet1_1", "vit")


def standardised(name: str) -> tuple[nn.Module, Tensor]:
    """Return a network whose BatchNorm stores what the input has, as training leaves it."""
    network, inputs = built(TORCHVISION[name])
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None
        norm.train()
    with torch.no_grad():
        network(torch.cat([inputs, inputs.flip(-1)]))
        for module in network.modules():
            if isinstance(module, nn.Linear) and not module.weight.any():  # a head as it starts
                nn.init.normal_(module.weight, std=0.02)
    return network.eval(), inputs


@pytest.mark.parametrize("name", HALVED)
@pytest.mark.sample("squeezenet1_1", "vit")
def test_a_copy_in_half_precision_is_no_drift_but_a_changed_one_is(name: str) -> None:
    network, inputs = standardised(name)
    baseline = baseline_of(inspected(network, inputs))
    for half in HALVES.values():
        assert findings(baseline, inspected(*half(copy.deepcopy(network), inputs))) == []
        changed, x = half(copy.deepcopy(network), inputs)
        weighted = {
            label: module for label, module in changed.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)
        }
        label, last = [*weighted.items()][-1]
        with torch.no_grad():
            last.weight.copy_(last.weight.flip(0))  # the classes in another order
        (actual,) = findings(baseline, inspected(changed, x))
        assert actual.where == label


def test_errors_that_grow_from_layer_to_layer_are_no_drift_but_a_leap_is() -> None:
    network = nn.Sequential(*[nn.Identity() for _ in range(4)])
    values = torch.randn(1, 4096, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(1, 4096, generator=torch.Generator().manual_seed(1))

    def moved(*shares: float) -> Baseline:
        """Return the baseline of layers that were each this far from what they are now."""
        rows = {
            f"{at}": baseline_of(inspected(nn.Sequential(nn.Identity()), values + share * noise)).rows[1]
            for at, share in enumerate(shares)
        }
        whole = baseline_of(inspected(network, values))
        kept = tuple(replace(rows[row.label], label=row.label) for row in whole.rows if row.label in rows)
        return replace(
            whole, weights_precision="bfloat16", rows=(*kept, *(r for r in whole.rows if r.label not in rows))
        )

    measured = replace(inspected(network, values), weights_precision="float32")
    assert findings(moved(0.08, 0.12, 0.18, 0.27), measured) == []
    (actual,) = findings(moved(0.04, 0.05, 0.4, 0.4), measured)
    assert actual.places == ("2", "3")
    same_precision = replace(moved(0.08, 0.12, 0.18, 0.27), weights_precision="float32")
    (actual,) = findings(same_precision, measured)
    assert actual.places == ("0", "1", "2", "3")


def test_values_that_vanish_in_float16_are_no_drift_there() -> None:
    """Behind a layer scale of 1e-6, as ConvNeXt starts; the smallest number of float16 is 6e-8."""
    values = 1e-8 * torch.randn(1, 1000, generator=torch.Generator().manual_seed(0))
    measured = replace(inspected(chain(nn.Identity()), values * 0), weights_precision="float16")
    baseline = baseline_of(inspected(chain(nn.Identity()), values))
    assert findings(replace(baseline, weights_precision="float32"), measured) == []
    (actual,) = findings(baseline_of(inspected(chain(nn.Identity()), values * 100)), measured)
    assert actual.where == "z"


@pytest.mark.exhaustive
def test_one_layer_in_another_dtype_than_the_network_drifts() -> None:
    class Narrow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.half()

    torch.manual_seed(0)
    first = chain(nn.Linear(5, 5), *SIX[:5])
    baseline = baseline_of(inspected(first, VALUES))
    first.u = Narrow()
    (actual,) = findings(with_row(baseline, "u", kind="Narrow"), inspected(first, VALUES))
    assert "its dtype went from float32 to float16" in actual.message
