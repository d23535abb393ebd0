"""Seeded torchvision networks, and the demo's trained one: under the configurations that ship, and with a NaN."""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision import models

from hookscope.commands.check.checkpoint import check_checkpoint
from hookscope.commands.check.configuration.reading import read_settings
from hookscope.results.check import CheckReport
from hookscope.rules import RULES
from hookscope.rules.judging import wanted_rules
from hookscope.rules.settings import CheckSettings
from tests.networks import NETWORKS

CONFIGS = Path(__file__).parents[4] / "configs"
CAT = Path(__file__).parents[4] / "sample_images" / "cat.jpg"

# BatchNorm in eval mode passes on what it is given until it is trained, and networks rely on it for their scale.
FADES = {("constant-output", "BatchNorm is untrained and does not normalise yet.")}
# Quantised before anything was trained: the scales are those of no data, and the steps too coarse for what remains.
NEVER_TRAINED = ("untrained-norm", "(mean 0, variance 1), and the weights look randomly drawn.")
FADES_INTO_STEPS = {("constant-output", "Nearly all of its weights look random.")}
# Likewise: with steps of 1 the values become 0 on the way, and what Hardswish makes of 0 is 0.
CUT_OFF = FADES_INTO_STEPS | {("dead-layer", "'features.8.block.0.2', 'features.8.block.1.2' and 16 more.")}


@dataclass(frozen=True, slots=True)
class Seeded:
    """A torchvision network, and which warnings an expert expects of it while it is untrained, by rule and ending."""

    name: str
    shape: tuple[int, ...] = (2, 3, 64, 64)
    warnings: frozenset[tuple[str, str]] = frozenset()
    options: Mapping[str, Any] | None = None


WITHOUT_BACKBONE = {"weights_backbone": None}

SEEDED = [
    Seeded("resnet18"),
    Seeded("swin_t"),
    Seeded("deeplabv3_mobilenet_v3_large", (2, 3, 96, 96), frozenset(FADES), WITHOUT_BACKBONE),
    Seeded("ssdlite320_mobilenet_v3_large", (2, 3, 128, 128), frozenset(FADES), WITHOUT_BACKBONE),
    Seeded("r3d_18", (2, 3, 4, 64, 64)),
    Seeded("raft_small", (2, 3, 128, 128)),
    Seeded("quantized_resnet18", options={"quantize": True}),
    Seeded("quantized_mobilenet_v3_large", warnings=frozenset(CUT_OFF), options={"quantize": True}),
]

# Of a file, its network's name tells what inputs it takes: detectors lists, optical flow two frames.
IN_A_FILE = ("ssdlite320_mobilenet_v3_large", "raft_small", "quantized_resnet18")


def checked(config: str, model: str | torch.nn.Module, **changes: Any) -> CheckReport:
    settings: CheckSettings = replace(read_settings(CONFIGS / config, Path()), **changes)
    return check_checkpoint(model, settings, wanted_rules(settings))


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:torch.quantize_per_tensor")
@pytest.mark.filterwarnings("ignore:must run observer", "ignore:.*reduce_range will be deprecated")
@pytest.mark.parametrize("seeded", SEEDED, ids=lambda seeded: seeded.name)
@pytest.mark.sample("resnet18")
def test_a_seeded_network_gets_the_warnings_that_one_expects_and_no_more(seeded: Seeded, tmp_path: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = models.get_model(seeded.name, weights=None, **(seeded.options or {})).eval()
    report, expected = checked("smoke.toml", network, input_shape=seeded.shape), seeded.warnings
    if seeded.name in IN_A_FILE:
        torch.save(network.state_dict(), tmp_path / "model.pt")
        report = checked("smoke.toml", str(tmp_path / "model.pt"), arch=seeded.name, input_shape=seeded.shape)
        expected |= {NEVER_TRAINED} if seeded.name == "ssdlite320_mobilenet_v3_large" else set()
    assert (report.exit_code, report.error) == (0, "")
    assert {finding.level for finding in report.findings} <= {"warn"}
    assert len(report.findings) == len(expected)
    for finding in report.findings:
        assert any(finding.rule == rule and finding.message.endswith(end) for rule, end in expected)


@pytest.fixture
def resnet18(tmp_path: Path) -> str:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        torch.save(models.resnet18().state_dict(), tmp_path / "resnet18.pt")
    return str(tmp_path / "resnet18.pt")


@pytest.mark.parametrize(("config", "images"), [("smoke.toml", (CAT,)), ("gradients.toml", ())])
@pytest.mark.sample("smoke.toml-images0")
def test_the_trained_demo_network_passes_without_a_word(config: str, images: tuple[Path, ...]) -> None:
    report = checked(config, "demo", images=images)
    assert report.passed
    assert (report.findings, report.warnings) == ((), ())
    assert not_passed(report) == {"batchnorm-statistics": "skipped"}


@pytest.mark.exhaustive
def test_the_trained_demo_network_passes_every_rule_with_four_pictures() -> None:
    report = checked("smoke.toml", "demo", images=tuple(sorted(CAT.parent.glob("*.jpg"))))
    assert (report.findings, report.warnings, not_passed(report)) == ((), (), {})


def not_passed(report: CheckReport) -> dict[str, str]:
    """Return what became of the rules that were on, but for those that passed."""
    return {outcome.rule: outcome.status for outcome in report.outcomes if outcome.status not in ("off", "pass")}


@pytest.mark.exhaustive
def test_the_strict_configuration_objects_to_the_dead_channels_of_the_demo_network_only() -> None:
    report = checked("strict.toml", "demo", images=(CAT,))
    assert report.exit_code == 1
    assert {(finding.rule, finding.level) for finding in report.findings} == {("dead-channels", "fail")}
    assert all("(ReLU6)" in finding.message for finding in report.findings)


@pytest.mark.parametrize(("config", "images"), [("gradients.toml", ()), ("strict.toml", (CAT,))])
@pytest.mark.exhaustive
def test_a_seeded_resnet18_passes_the_other_configurations_as_one_that_was_never_trained(
    config: str, images: tuple[Path, ...], resnet18: str
) -> None:
    report = checked(config, resnet18, images=images)
    assert report.passed
    assert [finding.rule for finding in report.findings] == ["untrained-norm"]
    assert report.findings[0].message.endswith(NEVER_TRAINED[1])
    judged = {outcome.rule for outcome in report.outcomes if outcome.status == "pass"}
    # There is nothing to hold it to, and nothing to hold it against in what BatchNorm stores.
    missing = {"expectation", "drift", "batchnorm-statistics", "accuracy", "class-accuracy", "accuracy-drop"}
    missing.add("float8-range")  # off: few networks are meant for it
    missing.add("untrained-norm")  # a warning: it was never trained
    if config == "gradients.toml":
        missing |= {"constant-activation", "massive-activation"}  # off unless they are named
    assert judged == RULES.keys() - missing


# Maps are large enough for every weight of every kernel to meet a pixel, not only padding.
PLANTED = {**dict.fromkeys(("resnet18", "swin"), 64)}


def called_modules(network: nn.Module, size: int) -> set[str]:
    """Return the names of the modules that run, as torch's own hooks tell."""
    called: set[str] = set()
    handles = [
        module.register_forward_hook(lambda *_, name=name: called.add(name)) for name, module in network.named_modules()
    ]
    with torch.no_grad():
        network(torch.ones(1, 3, size, size))
    for handle in handles:
        handle.remove()
    return called


def assert_blames(report: CheckReport, weight: str, layer: str) -> None:
    """Assert that a weight, and the layer that makes NaN of it, are reported, once each, and nothing else fails."""
    failures = [finding for finding in report.findings if finding.level == "fail"]
    assert [finding.rule for finding in failures] == ["non-finite-parameter", "non-finite-activation"]
    parameter, activation = failures
    assert parameter.where == weight
    assert f"'{weight}'" in parameter.message
    assert " has 1 NaN and 0 Inf in " in parameter.message
    assert activation.where.partition("#")[0] == layer  # a module that is called twice has a label for each call
    assert f"; its '{weight}' is not finite" in activation.message
    assert report.exit_code == 1


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.exhaustive
def test_a_nan_in_one_weight_is_reported_as_that_parameter_and_that_layer(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network, size = NETWORKS[name].build().eval(), PLANTED[name]
    settings = CheckSettings(input_shape=(1, 3, size, size))
    called, chance = called_modules(network, size), random.Random(name)
    layers = [layer for layer, module in network.named_modules() if isinstance(getattr(module, "weight", None), Tensor)]
    # MultiheadAttention and Swin's attention use the weights of layers inside them without calling those.
    uncalled = [layer for layer in layers if layer not in called]
    for layer in {*chance.sample(layers, 6), *uncalled[:2]}:
        weight = network.get_parameter(f"{layer}.weight").detach().view(-1)
        at = chance.randrange(weight.numel())
        before = float(weight[at])
        weight[at] = math.nan
        blamed = layer if layer in called else layer.rpartition(".")[0]
        assert_blames(check_checkpoint(network, settings, wanted_rules(settings)), f"{layer}.weight", blamed)
        weight[at] = before
    assert check_checkpoint(network, settings, wanted_rules(settings)).passed
    if name == "resnet18":  # a file of it, of which nothing else is said
        network.fc.weight.data[3, 4] = math.nan
        torch.save(network.state_dict(), tmp_path / "model.pt")
        assert_blames(check_checkpoint(str(tmp_path / "model.pt"), settings, wanted_rules(settings)), "fc.weight", "fc")
