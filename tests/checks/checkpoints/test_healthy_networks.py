"""Sound networks pass with pictures and without: random ones of many kinds, and what people do to trained weights.

They stand for a sweep over 163 networks for classification, 77 of torchvision and 86 of timm, and for a later one over
53 of torchvision and 65 of timm, 66 of them also with statistics of BatchNorm taken over crops of the sample images.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor

from hookscope.checks.checkpoint import check_checkpoint
from hookscope.checks.judging import wanted_rules
from hookscope.checks.settings import CheckSettings
from tests.checks.checkpoints.corrupted_networks import Sound, demo, found, reports
from tests.checks.checkpoints.corruptions import Corruption, State, kernels, prune, round_to

SAMPLES = Path(__file__).parents[3] / "sample_images"

RANDOM: dict[str, set[str]] = {
    "convit_tiny": {"(duplicate-parameter)"},  # all of its attention starts with an identity
    "convnext_atto": set(),
    "cs3darknet_focus_s": set(),  # residual branches start switched off: their SiLUs are given zeros
    "efficientvit_m0": set(),  # tables of biases start at zero
    "ghostnet_050": set(),
    "lcnet_035": set(),
    "levit_128s": set(),  # likewise
    "mobilevitv2_050": set(),
    "poolformer_s12": set(),
    "repvgg_a0": {"(constant-output)"},  # BatchNorm does not normalise yet, being untrained
    "resnet10t": set(),
    "vit_tiny_patch16_224": set(),
}


@pytest.mark.parametrize("name", RANDOM)
def test_a_random_network_passes_with_the_warnings_that_one_expects(name: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = timm.create_model(name).eval()
    side = 224 if name in ("convit_tiny", "levit_128s", "vit_tiny_patch16_224") else 96
    noise = CheckSettings(shape=(2, 3, side, side))
    for settings in (noise, CheckSettings(images=(SAMPLES,), resize=str(side), crop=str(side))):
        report = check_checkpoint(network, settings, wanted_rules(settings))
        assert (report.error, found(report)) == ("", RANDOM[name])
        assert len(report.findings) == len(RANDOM[name])


@pytest.fixture(scope="module")
def real() -> Sound:
    return demo()


def halves_of_filters(state: State) -> None:
    """Make the smaller half of the filters of each kernel zero."""
    for each in kernels(state):
        norms = each.flatten(1).norm(dim=1)
        each[norms < norms.median()] = 0


def stored_as(dtype: torch.dtype) -> Corruption:
    return lambda state: [each.copy_(each.to(dtype)) for each in state.values() if each.is_floating_point()]


def new_head(state: State) -> None:
    state["_fc.weight"].uniform_(-0.03, 0.03)
    state["_fc.bias"].zero_()


DONE: list[tuple[Callable[[dict[str, Tensor]], object], set[str]]] = [
    (stored_as(torch.float16), set()),
    (prune(0.5), {"(dead-filter)"}),  # of the last depthwise kernels more than a quarter are near zero, and go
    (round_to(8), set()),
    (new_head, set()),
    (halves_of_filters, {"(dead-filter)", "(batchnorm-statistics)"}),  # statistics are older than the pruning
]


@pytest.mark.parametrize(("what", "warnings"), DONE)
def test_what_people_do_to_trained_weights_passes_with_pictures(
    real: Sound, what: Corruption, warnings: set[str]
) -> None:
    alone, pictures = reports(real, lambda network: what(network.state_dict()))
    assert found(alone) == warnings & {"(dead-filter)"}
    assert found(pictures) - {"drift", "(drift)"} == warnings
    assert len(alone.findings) == len(found(alone))
