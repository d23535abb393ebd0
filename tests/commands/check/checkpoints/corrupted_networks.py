"""The sound networks of the tables of corruptions, what a row of them is, and how it is checked."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from hookscope.commands.check.checkpoint import check_checkpoint
from hookscope.inputs.batches import load_batches
from hookscope.models.spec import load_model
from hookscope.results.check import CheckMeasurements, CheckReport
from hookscope.results.inputs import Preprocessing
from hookscope.rules.baseline import Baseline, baseline_of
from hookscope.rules.judging import wanted_rules
from hookscope.rules.settings import CheckSettings, RuleSettings
from tests.commands.check.checkpoints.corruptions import Corruption
from tests.commands.check.checkpoints.gratings import PREPARATION, draw_gratings, trained_on_gratings

_LABELS = frozenset({"accuracy", "class-accuracy", "accuracy-drop"})
SAMPLES = Path(__file__).parents[4] / "sample_images"

Change = Callable[[nn.Module], object]
Content = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sound:
    """A sound network, with what it is checked on.

    Attributes:
        noise, pictures: Settings of a check of the network alone, and with pictures and whatever else there is.
        source: The Python file and function that builds it, where it is checked as a training checkpoint; else None.
    """

    network: nn.Module
    noise: CheckSettings
    pictures: CheckSettings
    baseline: Baseline
    source: str | None = None


def demo() -> Sound:
    """Return the real weights of EfficientNet-Lite0, at 96 pixels."""
    loaded = load_model("demo")
    how = loaded.preprocessing
    settings = {"mean": ",".join(map(str, how.mean)), "std": ",".join(map(str, how.std)), "resize": "96", "crop": "96"}
    return _sound(
        loaded.module,
        CheckSettings(input_shape=(2, 3, 96, 96)),
        CheckSettings(images=(SAMPLES,), **settings),  # type: ignore[arg-type]
    )


class Block(nn.Module):
    """Two convolutions with BatchNorm, added to their input."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.bn2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        self.skip = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        self.relu, self.out = nn.ReLU(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.out(y + self.skip(x))  # type: ignore[no-any-return]


def residual() -> Sound:
    """Return a small ResNet of random weights, with statistics of BatchNorm run in over the sample images."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        stem = (nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        blocks = (Block(16, 16, 1), Block(16, 32, 2), Block(32, 32, 1), Block(32, 64, 2))
        net = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
        for norm in net.modules():
            if isinstance(norm, nn.BatchNorm2d):
                nn.init.uniform_(norm.weight, 0.5, 1.5)
                nn.init.normal_(norm.bias, 0, 0.3)
                norm.momentum = None
        with torch.no_grad():
            how = Preprocessing(resize=96, crop=(96, 96))
            for batch in load_batches(sorted(SAMPLES.glob("*.jpg")), how, 4):
                net.train()(*batch.args)
    noise = CheckSettings(input_shape=(2, 3, 96, 96))
    return _sound(net.eval(), noise, CheckSettings(images=(SAMPLES,), resize="96", crop="96"))


def transformer() -> Sound:
    """Return a small ViT of random weights whose rows and columns differ in size, as those of trained ones do."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        net = timm.create_model("test_vit", num_classes=10, img_size=64)
        for name, parameter in net.named_parameters():
            if parameter.dim() < 2 and "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif parameter.dim() < 2 or name in ("pos_embed", "cls_token"):
                parameter.normal_(0, 0.1 if parameter.dim() < 2 else 0.5)
            else:
                nn.init.kaiming_uniform_(parameter, a=5**0.5)
                sizes = [torch.randn(size).mul(0.4).exp() for size in parameter.shape[:2]]
                parameter.mul_(torch.outer(*sizes).view(*parameter.shape[:2], *[1] * (parameter.dim() - 2)))
    noise = CheckSettings(input_shape=(2, 3, 64, 64))
    return _sound(net.eval(), noise, CheckSettings(images=(SAMPLES,), resize="64", crop="64"))


def trained(folder: Path) -> Sound:
    """Return the network that tells gratings, with labelled pictures of them, as a training checkpoint holds it."""
    (folder / "net.py").write_text("from tests.commands.check.checkpoints.gratings import network\n")
    draw_gratings(folder / "data", 20)
    limits = {"accuracy": 0.9, "class-accuracy": 0.6}
    rules = {rule: RuleSettings(limits={"min_fraction": least}) for rule, least in limits.items()}
    shown = tuple(sorted((folder / "data").glob("*/*.png")))
    source = f"{folder / 'net.py'}:network"
    noise = CheckSettings(arch=source, key="model", input_shape=(8, 3, 16, 16))
    pictures = CheckSettings(arch=source, key="model", images=shown, data=folder / "data", rules=rules, **PREPARATION)
    network = trained_on_gratings()
    torch.save(training_checkpoint(network), folder / "sound.pt")
    return _sound(network, noise, pictures, str(folder / "sound.pt"))


def training_checkpoint(network: nn.Module) -> Content:
    """Return what a training saves: weights, their average, and the state of Adam after a step."""
    network = copy.deepcopy(network)
    averaged = torch.optim.swa_utils.AveragedModel(network)
    averaged.update_parameters(network)
    optimiser = torch.optim.Adam(network.parameters(), 0.0)
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimiser.step()
    return {"model": network.state_dict(), "ema": averaged.state_dict(), "optimizer": optimiser.state_dict()}


def _sound(network: nn.Module, noise: CheckSettings, pictures: CheckSettings, file: str | None = None) -> Sound:
    measured: list[CheckMeasurements] = []
    report = check_checkpoint(file or network, pictures, wanted_rules(pictures), on_measured=measured.append)
    assert (report.findings, report.error) == ((), ""), report
    return Sound(network, noise, pictures, baseline_of(measured[0]), file)


def nothing(_: Any) -> None:
    """Leave it as it is."""


def reports(
    sound: Sound,
    change: Change = nothing,
    content: Callable[[Content], object] = nothing,
    damage: Callable[[Path], object] = nothing,
    settings: Mapping[str, Any] | None = None,
) -> tuple[CheckReport, CheckReport]:
    """Return the reports on a corrupted copy alone, and with pictures, the baseline and labels.

    Args:
        sound: What to corrupt.
        change: Corrupts the network; `content`, what a training checkpoint holds; `damage`, the file itself.
        content: See there.
        damage: See there.
        given: Settings that go over those for pictures.
    """
    network = copy.deepcopy(sound.network)
    corrupted: nn.Module | str = network
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        change(network)
    if sound.source is not None:
        file = Path(sound.source).with_name("corrupted.pt")
        held = training_checkpoint(network)
        content(held)
        torch.save(held, file)
        damage(file)
        corrupted = str(file)
    pictures = replace(sound.pictures, **(settings or {}))
    alone = check_checkpoint(corrupted, sound.noise, wanted_rules(sound.noise))
    baseline = None if settings else sound.baseline  # which fits no other preparation
    return alone, check_checkpoint(corrupted, pictures, wanted_rules(pictures), baseline=baseline)


@dataclass(frozen=True, slots=True)
class Row:
    """A corruption, and the rules that object to it: "drift" fails, "(drift)" warns.

    Attributes:
        what: What is wrong, in words.
        change: Corrupts the network; `content`, what a training checkpoint holds; `damage`, the file.
        alone: Rules that object without anything else, on noise.
        pictures, baseline, labels: Those that object beside these where that is given.
        never: Why nothing objects.
        given: How pictures are prepared instead; no baseline fits then.
    """

    what: str
    change: Change = nothing
    alone: str = ""
    pictures: str = ""
    baseline: str = ""
    labels: str = ""
    never: str = ""
    content: Callable[[Content], object] = nothing
    damage: Callable[[Path], object] = nothing
    given: Mapping[str, Any] | None = None


def weights(corruption: Corruption) -> Change:
    """Corrupt what a network stores."""
    return lambda network: corruption(network.state_dict())


def found(report: CheckReport) -> set[str]:
    """Return the rules that object, those that only warn in brackets."""
    failing = {finding.rule for finding in report.findings if finding.level == "fail"}
    return failing | {f"({finding.rule})" for finding in report.findings if finding.rule not in failing}


def assert_caught(sound: Sound, row: Row) -> None:
    """Assert that the rules of a row object, and no others."""
    alone, full = reports(sound, row.change, row.content, row.damage, row.given)
    beside = found(full) - found(alone)
    of_labels = {text for text in beside if text.strip("()") in _LABELS}
    of_baseline = beside & {"drift", "(drift)"}
    caught = found(alone), beside - of_labels - of_baseline, of_baseline, of_labels
    expected = (row.alone, row.pictures, row.baseline, row.labels)
    assert caught == tuple(set(text.split()) for text in expected)
    assert bool(row.never) is not any(caught)
