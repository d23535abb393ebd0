"""What the rule batchnorm-statistics catches, and what passes: real weights, and a ResNet with statistics of its own.

The demo network has ImageNet's weights; the ResNet-18 is seeded, its statistics are taken over the sample images.
"""

import copy
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchvision import models

from hookscope.commands.check.checkpoint import check_checkpoint
from hookscope.commands.check.measuring.network_passes import measure
from hookscope.commands.check.measuring.preparing import prepare
from hookscope.inputs.batches import load_batches
from hookscope.models.construction import LoadedModel
from hookscope.models.spec import load_model
from hookscope.results.check import RuleOutcome
from hookscope.results.inputs import Preprocessing
from hookscope.rules.judging import judge, wanted_rules
from hookscope.rules.settings import CheckSettings

RULE = "batchnorm-statistics"
SAMPLES = Path(__file__).parents[4] / "sample_images"
PICTURES = sorted(SAMPLES.glob("*.jpg"))
RESNET_SIDE = 160


@cache
def demo() -> LoadedModel:
    return load_model("demo")


@cache
def resnet() -> nn.Module:
    """Return a ResNet-18 whose statistics are those of the sample images, with gains and biases that differ."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = models.resnet18()
        norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
        for norm in norms:
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias, 0, 0.3)
            norm.momentum = None
        how = Preprocessing(resize=RESNET_SIDE, crop=(RESNET_SIDE, RESNET_SIDE))
        with torch.no_grad():
            for batch in load_batches(PICTURES, how, 4):
                net.train()(*batch.args)
    return net.eval()


def changed(network: nn.Module, change: Callable[[nn.Module], object]) -> nn.Module:
    """Return a copy of a network after a change, with fixed random numbers."""
    other = copy.deepcopy(network)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        change(other)
    return other


def outcome(model: nn.Module | LoadedModel, **settings: Any) -> RuleOutcome:
    chosen = CheckSettings(**{"images": (SAMPLES,)} | settings)
    report = judge("net.pt", measure(prepare(model, chosen), chosen, {RULE}), chosen, {RULE})
    return next(finding for finding in report.outcomes if finding.rule == RULE)


def of_demo(change: Callable[[nn.Module], object] = lambda _: None, **settings: Any) -> RuleOutcome:
    loaded = demo()
    how = loaded.preprocessing
    options = {"mean": ",".join(map(str, how.mean)), "std": ",".join(map(str, how.std)), "resize": "224", "crop": "224"}
    return outcome(changed(loaded.module, change), **options | settings)


def of_resnet(change: Callable[[nn.Module], object] = lambda _: None, **settings: Any) -> RuleOutcome:
    return outcome(changed(resnet(), change), **{"resize": str(RESNET_SIDE), "crop": str(RESNET_SIDE)} | settings)


# --- what was changed after the training ---


def initialised_anew(net: nn.Module, name: str) -> None:
    nn.init.kaiming_normal_(net.get_submodule(name).weight, mode="fan_out")


def filters_swapped(net: nn.Module, name: str) -> None:
    weight = net.get_submodule(name).weight
    weight.copy_(weight.flip(0))


def scaled(net: nn.Module, name: str, factor: float) -> None:
    net.get_submodule(name).weight.mul_(factor)


def deviations_as_variances(net: nn.Module, name: str) -> None:
    net.get_submodule(name).running_var.sqrt_()


def channels_flipped(net: nn.Module, name: str) -> None:
    norm = net.get_submodule(name)
    norm.running_mean.copy_(norm.running_mean.flip(0))
    norm.running_var.copy_(norm.running_var.flip(0))


ON_DEMO = [
    (partial(filters_swapped, name="_blocks.1._depthwise_conv"), "_blocks.1._bn1"),
    (partial(deviations_as_variances, name="_blocks.8._bn0"), "_blocks.8._bn0"),
]

ON_RESNET = [
    (partial(initialised_anew, name="layer1.0.conv1"), "layer1.0.bn1"),
    (partial(scaled, name="layer1.0.bn1", factor=3), "layer1.0.bn2"),
    (partial(channels_flipped, name="layer1.0.bn1"), "layer1.0.bn1"),
]


def named(change: object) -> str | None:
    return f"{change.func.__name__}-{change.keywords['name']}" if isinstance(change, partial) else None


@pytest.mark.parametrize(("change", "begins"), ON_DEMO, ids=named)
@pytest.mark.sample("deviations_as_variances-_blocks.8._bn0-_blocks.8._bn0")
def test_what_was_changed_in_the_demo_network_fails_and_is_named(change: Any, begins: str) -> None:
    actual = of_demo(change)
    assert [(finding.level, finding.where) for finding in actual.findings] == [("fail", begins)]


@pytest.mark.parametrize(("change", "begins"), ON_RESNET, ids=named)
@pytest.mark.sample("initialised_anew-layer1.0.conv1-layer1.0.bn1", "scaled-layer1.0.bn1-layer1.0.bn2")
def test_what_was_changed_in_a_resnet_fails_and_is_named(change: Any, begins: str) -> None:
    actual = of_resnet(change)
    assert [(finding.level, finding.where) for finding in actual.findings] == [("fail", begins)]


# --- what passes ---


def filters_zeroed(net: nn.Module, share: float) -> None:
    """Prune the smallest weights of all convolutions together."""
    weights = [module.weight for module in net.modules() if isinstance(module, nn.Conv2d)]
    everything = torch.cat([weight.abs().flatten() for weight in weights])
    limit = everything.kthvalue(int(share * everything.numel())).values
    for weight in weights:
        weight.mul_(weight.abs() > limit)


def rounded(net: nn.Module) -> None:
    """Round the weights of convolutions to int8, with one scale for each tensor, and to float16 and back."""
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            scale = module.weight.abs().max() / 127
            module.weight.copy_((module.weight / scale).round() * scale)
    net.half().float()


def another_head(net: Any) -> None:
    net.fc = nn.Linear(net.fc.in_features, 3)


@pytest.mark.parametrize(
    ("of_network", "change"),
    [(of_demo, partial(filters_zeroed, share=0.5)), (of_resnet, rounded), (of_resnet, another_head)],
)
@pytest.mark.sample("of_resnet-rounded")
def test_healthy_networks_pass(of_network: Callable[..., RuleOutcome], change: Any) -> None:
    assert of_network(change) == RuleOutcome(RULE, "pass")


# --- preprocessing ---


def test_imagenets_mean_and_std_are_too_strong_for_the_demo_network() -> None:
    (finding,) = outcome(demo(), mean="0.485,0.456,0.406", std="0.229,0.224,0.225").findings
    assert (finding.level, finding.where) == ("warn", "_bn0")
    assert "Most of its channels vary 1.8 times as much as in training" in finding.message
    assert "Here: normalised by mean 0.485, 0.456, 0.406, std 0.229, 0.224, 0.225." in finding.message


def test_pictures_that_are_not_normalised_fail_at_the_first_layer() -> None:
    (finding,) = of_resnet(mean="none", std="none").findings
    assert (finding.level, finding.where) == ("fail", "bn1")
    assert "Most of its channels vary 0." in finding.message
    assert "preprocess the pictures as in training (mean, std, range)" in finding.message


# --- what cannot be judged ---


def stored_outcome(network: nn.Module, path: Path) -> RuleOutcome:
    torch.save(network.state_dict(), path)
    settings = CheckSettings(arch="none")
    report = check_checkpoint(str(path), settings, {"untrained-norm"})
    return next(finding for finding in report.outcomes if finding.rule == "untrained-norm")


def test_a_file_that_was_saved_before_training_is_a_warning(tmp_path: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = models.resnet18()
    actual = stored_outcome(network, tmp_path / "w.pt")
    assert actual.status == "warn"
    assert [finding.where for finding in actual.findings] == [""]
    assert "Looks untrained" in actual.findings[0].message
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:  # as after one batch of anything
        norm.running_mean += 0.01  # type: ignore[operator]
        norm.num_batches_tracked += 1  # type: ignore[operator]
    assert stored_outcome(network, tmp_path / "w.pt").status == "pass"


def test_a_network_that_was_just_built_is_no_file_and_passes() -> None:
    settings = CheckSettings(input_shape=(2, 3, 64, 64))
    report = check_checkpoint(models.resnet18(), settings, {"untrained-norm"})
    assert [finding.status for finding in report.outcomes if finding.rule == "untrained-norm"] == ["pass"]


# --- statistics that were never updated ---


class Net(nn.Module):
    """A convolution, a normalisation of sixteen channels, and a head; the test's `net.py` has the same."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 16, 3, bias=False), norm, nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


NET = """
from torch import nn
class Net(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 16, 3, bias=False), norm, nn.Linear(16, 3)
    def forward(self, x):
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))
def batch(): return Net(nn.BatchNorm2d(16))
def instance(): return Net(nn.InstanceNorm2d(16, affine=True, track_running_stats=True))
"""


def trained(norm: nn.Module, batches: int = 40, *, updates: bool = True) -> nn.Module:
    """Train on pictures whose class is their brightest colour; then forget the statistics, or not."""
    torch.manual_seed(0)
    net = Net(norm).train()
    optimiser = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for _ in range(batches):
        x, target = labelled_colours()
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x), target).backward()
        optimiser.step()
    if not updates:
        net.norm.reset_running_stats()  # type: ignore[operator, union-attr]
    return net.eval()


def labelled_colours() -> tuple[torch.Tensor, torch.Tensor]:
    target = torch.randint(3, (16,))
    return torch.rand(16, 3, 12, 12) / 4 + 3 * nn.functional.one_hot(target, 3)[..., None, None], target


NEVER_UPDATED = {
    "never updated": (lambda: trained(nn.BatchNorm2d(16), updates=False), "warn", ""),
    "momentum of 0": (lambda: trained(nn.BatchNorm2d(16, momentum=0.0)), "fail", ", after 40 batches"),
}


def verdicts(**settings: Any) -> list[tuple[str, str, str]]:
    """Check the file `w.pt` by all rules."""
    chosen = CheckSettings(**settings)
    report = check_checkpoint("w.pt", chosen, wanted_rules(chosen))
    assert not report.error
    return [(finding.rule, finding.level, finding.message) for finding in report.findings]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET, "utf-8")
    torch.manual_seed(1)
    torch.save(labelled_colours()[0], "x.pth")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("fault", NEVER_UPDATED)
def test_statistics_beside_a_trained_weight_and_bias_were_never_updated(fault: str) -> None:
    make, level, after = NEVER_UPDATED[fault]
    torch.save(make().state_dict(), "w.pt")
    start = f"'norm.running_mean' is 0 and 'norm.running_var' is 1 everywhere{after}"
    beside = "as in a new layer, though weight and bias of the same layer are trained."
    stored = ("untrained-norm", level, f"{start}, {beside}")
    assert verdicts(arch="none") == [stored]
    assert verdicts(arch="net.py:batch", input_shape=(4, 3, 12, 12)) == [stored]
    (rule, level, message), other = sorted(verdicts(arch="net.py:batch", images=(Path("x.pth"),)))
    assert (rule, level, other) == (RULE, "fail", stored)
    assert "It stores mean 0 and variance 1 in all channels, as a new layer does." in message


@pytest.mark.usefixtures("here")
def test_statistics_of_an_instance_norm_that_were_never_updated_are_a_warning() -> None:
    norm = nn.InstanceNorm2d(16, affine=True, track_running_stats=True)
    torch.save(trained(norm, updates=False).state_dict(), "w.pt")
    ((rule, level, _),) = verdicts(arch="net.py:instance", images=(Path("x.pth"),))
    assert (rule, level) == ("untrained-norm", "warn")


def drawn(norm: nn.BatchNorm2d) -> nn.Module:
    nn.init.normal_(norm.weight, 1.0, 0.02)
    return norm


HEALTHY = {
    "trained": lambda: trained(nn.BatchNorm2d(16)),
    "fresh": lambda: trained(nn.BatchNorm2d(16), 0),
    "scales drawn at random, as DCGAN's": lambda: trained(drawn(nn.BatchNorm2d(16)), 0),
}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", HEALTHY)
def test_no_healthy_or_fresh_network_is_said_to_lack_updates(name: str) -> None:
    torch.save(HEALTHY[name]().state_dict(), "w.pt")
    assert verdicts(arch="net.py:batch", images=(Path("x.pth"),)) == []


def test_scales_and_biases_that_repvgg_draws_at_random_are_not_said_to_be_trained(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(case for _ in range(4) for case in (nn.Conv2d(32, 32, 3), nn.BatchNorm2d(32))))
    for norm in net[1::2]:
        nn.init.normal_(norm.weight, 0.1, 0.1)  # type: ignore[arg-type]
        nn.init.normal_(norm.bias, 0.0, 0.1)  # type: ignore[arg-type]
    (finding,) = stored_outcome(net, tmp_path / "w.pt").findings
    assert finding.message.startswith("Looks untrained: BatchNorm")
    for norm in net[1::2]:  # near where torch starts them: trained for seconds
        nn.init.normal_(norm.weight, 1.0, 0.02)  # type: ignore[arg-type]
    (finding,) = stored_outcome(net, tmp_path / "w.pt").findings
    assert "though weight and bias of the same layer are trained" in finding.message
