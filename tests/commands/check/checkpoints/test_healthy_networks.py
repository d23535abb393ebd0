"""Sound networks pass with pictures and without: random ones of many kinds, and what people do to trained weights.

They stand for a sweep over all 80 networks of torchvision for classification and 125 of timm, one or two of each
family, 100 of them also with statistics of BatchNorm taken over crops of the sample images; 12 quantised ones of
torchvision, as built and after calibration; 40 copies of EfficientNet-Lite0 to 2; and small ones trained for seconds,
with a dozen copies of each. Of these the ones without half of their filters warn, those whose BatchNorm has seen a few
batches, and two that were pruned value by value (`untrained-weight`: what it names has hardly moved since the start).
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn.utils.prune import random_unstructured
from torchvision import models

from hookscope.commands.check.checkpoint import check_checkpoint
from hookscope.rules.judging import wanted_rules
from hookscope.rules.settings import CheckSettings
from tests.commands.check.checkpoints.corrupted_networks import Sound, demo, found, reports
from tests.commands.check.checkpoints.corruptions import Corruption, State, kernels, prune, round_to

pytestmark = pytest.mark.exhaustive

SAMPLES = Path(__file__).parents[4] / "sample_images"

# BatchNorm that is untrained passes on what it is given, and networks rely on it for their scale. What they compute may
# then shrink until the biases drown it (ConvMixer, GoogLeNet and Inception v4 as well, and quantised networks, whose
# BatchNorm was folded away), or grow beyond half precision (Inception v3, ResNet-101 and Wide ResNet-101 as well).
FADES = {"(constant-output)"}
GROWS = {"(fp16-headroom)"}

# The head starts at zero, so that all classes are equally likely: so do those of Hiera, MLP-Mixer, Sequencer, and of
# torchvision's vision transformers.
ZERO_HEAD = {"(zero-parameter)", "(constant-output)"}

RANDOM: dict[str, set[str]] = {
    "convit_tiny": {"(duplicate-parameter)"},  # all of its attention starts with an identity
    "cspnext_tiny": FADES,
    "gmlp_ti16_224": ZERO_HEAD,
    "mobileone_s0": GROWS,  # each of its blocks sums up to six branches, none of which is normalised yet
}

# Warnings of the sweep that are not repeated here, and why each is justified:
# - Quantised without training, as built or after calibration (inception_v3, mobilenet_v2, mobilenet_v3_large,
#   shufflenet_v2): constant-output, and of mobilenet_v3_large dead-channels and dead-layer. The steps are coarser than
#   what random weights leave of the signal. The table of test_torchvision.py has mobilenet_v2 and mobilenet_v3_large.
# - inception_v3, prepared for quantisation or converted without training: fp16-headroom. Its logits reach 1e9, as those
#   of the network before.
# - inception_v3 with statistics run in: untrained-weight (untrained-norm, where BatchNorm is not folded yet) of the
#   auxiliary head. It does not run in eval mode, so nothing was run in there.
# - resnet50 with statistics run in, calibrated and converted: untrained-weight of two kernels of layer1. All weights
#   are random; folding BatchNorm into them made rows differ as training does, in these two too little.
# - Prepared for quantisation-aware training, observers on: repeatability and batch-consistency are skipped, not passed.
# - mobilenet_v3_large, mixnet_s, regnety_002, tinynet_e with statistics run in, on noise: saturated-activation of gates
#   of squeeze-and-excitation. Noise lies outside the statistics, and closes them; pictures do not.
# - shvit_s1 with statistics run in: untrained-norm of GroupNorm, which was not touched.
# - eca_nfnet_l0 and others with squeeze-and-excitation: nothing, though ReLUs there may be dead in all channels. They
#   have one value a channel and input, and dead-channels asks for 32.

OF_ONE_SIZE = ("convit_tiny", "gmlp_ti16_224")


@pytest.mark.parametrize("name", RANDOM)
def test_a_random_network_passes_with_the_warnings_that_one_expects(name: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = timm.create_model(name).eval()
    side = 224 if name in OF_ONE_SIZE else 96
    noise = CheckSettings(input_shape=(2, 3, side, side))
    for settings in (noise, CheckSettings(images=(SAMPLES,), resize=str(side), crop=str(side))):
        report = check_checkpoint(network, settings, wanted_rules(settings))
        assert (report.error, found(report)) == ("", RANDOM[name])
        assert len(report.findings) == len(RANDOM[name])


def test_gates_of_an_untrained_network_may_be_closed_by_noise() -> None:
    """What hardcorenas_b gives its gates has grown on the way, and lies beyond ±3, where a hard sigmoid is flat."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = timm.create_model("hardcorenas_b").eval()
    settings = CheckSettings(input_shape=(2, 3, 96, 96))
    (finding,) = check_checkpoint(network, settings, wanted_rules(settings)).findings
    assert (finding.rule, finding.level) == ("saturated-activation", "warn")
    assert "(Hardsigmoid): 80." in finding.message


def test_auxiliary_heads_that_were_never_trained_are_named_as_such() -> None:
    """The published GoogLeNet has random ones: torchvision dropped them, and warns who asks for them."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        network = models.googlenet(init_weights=True).eval()
        for name, weight in network.named_parameters():
            if weight.dim() > 1 and not name.startswith("aux"):  # filters of unequal norm, as trained ones are
                weight.mul_(torch.rand(len(weight), *[1] * (weight.dim() - 1)) + 0.1)
    settings = CheckSettings(input_shape=(1, 3, 64, 64))
    report = check_checkpoint(network, settings, {"untrained-weight"})
    assert found(report) == {"(untrained-weight)"}
    (finding,) = report.findings
    assert {"aux1.fc1.weight", "aux2.fc2.weight"} <= {finding.where, *finding.followed_by}
    assert all(text.startswith("aux") for text in (finding.where, *finding.followed_by))


def test_statistics_older_than_pruning_only_warn_while_the_masks_are_beside_the_weights(tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32, momentum=None))
        pictures = torch.randn(4, 3, 16, 16)
    network(pictures)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        random_unstructured(network[0], "weight", 0.9)
    for index, picture in enumerate(pictures):
        torch.save(picture, tmp_path / f"{index}.pt")
    settings = CheckSettings(images=(tmp_path,))
    report = check_checkpoint(network.eval(), settings, wanted_rules(settings))
    (finding,) = (finding for finding in report.findings if finding.rule == "batchnorm-statistics")
    assert (report.error, finding.level) == ("", "warn")
    assert "90% of the weights are 0, as pruning leaves them" in finding.message


@pytest.fixture(scope="module")
def real() -> Sound:
    return demo()


def halves_of_filters(state: State) -> None:
    """Make the smaller half of the filters of each kernel zero."""
    for kernel in kernels(state):
        norms = kernel.flatten(1).norm(dim=1)
        kernel[norms < norms.median()] = 0


def stored_as(dtype: torch.dtype) -> Corruption:
    return lambda state: [tensor.copy_(tensor.to(dtype)) for tensor in state.values() if tensor.is_floating_point()]


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


@pytest.mark.parametrize(("subject", "warnings"), DONE)
def test_what_people_do_to_trained_weights_passes_with_pictures(
    real: Sound, subject: Corruption, warnings: set[str]
) -> None:
    alone, pictures = reports(real, lambda network: subject(network.state_dict()))
    assert found(alone) == warnings & {"(dead-filter)"}
    assert found(pictures) - {"drift", "(drift)"} == warnings
    assert len(alone.findings) == len(found(alone))
