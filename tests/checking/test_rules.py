"""For every rule a checkpoint that breaks exactly it, and a near miss that passes all rules.

Each pair is two real files, of one seeded network of `networks.py` with one thing changed. All rules are on, at level
"fail": a checkpoint that broke another rule besides would show.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from hookscope.baseline import Baseline, baseline_of, baseline_text
from hookscope.check_results import CheckReport, Examination
from hookscope.checking import check_checkpoint
from hookscope.checks import RULES, CheckSettings, Expectation, LayerSettings, RuleSettings, wanted_rules
from tests.checking import networks
from tests.cli.conftest import Run

NETWORKS = Path(networks.__file__)
PICTURE = "half.png"

State = dict[str, Tensor]
Change = Callable[[State], None]


def put(name: str, value: Any, at: Any = ...) -> Change:
    """Set values of a tensor."""

    def change(state: State) -> None:
        state[name][at] = torch.as_tensor(value, dtype=state[name].dtype)

    return change


def scale(name: str, factor: float) -> Change:
    def change(state: State) -> None:
        state[name] *= factor

    return change


def copy(name: str, onto: str) -> Change:
    def change(state: State) -> None:
        state[onto].copy_(state[name])

    return change


def drop(name: str) -> Change:
    def change(state: State) -> None:
        del state[name]

    return change


def behind_a_prefix(state: State) -> None:
    """Name everything as nn.DataParallel does."""
    for name in list(state):
        state[f"module.{name}"] = state.pop(name)


def both(*changes: Change) -> Change:
    def change(state: State) -> None:
        for each in changes:
            each(state)

    return change


def nothing(_: State) -> None:
    """Leave the network as it was initialised."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two checkpoints of one network, on either side of a rule's limit.

    Attributes:
        rule: Its identifier.
        network: A function of `networks.py`.
        where: What the finding has to name: a layer's label, or a tensor of the checkpoint.
        breaks: What to do to the state dict to break the rule, and nothing else.
        near_miss: What to do to it so that all rules just pass.
        settings: As for `CheckSettings`.
        expects: What the network has to say about a picture, as for `Expectation`.
        named: A text in the message, where `where` does not say which layer it was.
        consequences: Other rules that are broken by necessity.
        missed: Those that the near miss breaks too.
        because: Why they are.
        bytes_lost: How many are missing at the end of the broken file.
    """

    rule: str
    network: str
    where: str
    breaks: Change
    near_miss: Change
    settings: Mapping[str, Any] = field(default_factory=dict)
    expects: Mapping[str, Any] = field(default_factory=dict)
    named: str = ""
    consequences: frozenset[str] = frozenset()
    missed: frozenset[str] = frozenset()
    because: str = ""
    bytes_lost: int = 0


NINE_OF_TEN = slice(9)
EIGHT_OF_TEN = slice(8)
SEVEN_OF_TEN = slice(7)

# Lets layers drift by their values, so that what else may drift shows.
WHATEVER_THE_VALUES = (LayerSettings("*", {"drift": RuleSettings(limits={"max_difference": 1e9})}),)

PAIRS = [
    Pair(
        "integrity",
        "plain",
        "",
        breaks=nothing,
        near_miss=nothing,
        named="model.pt",
        bytes_lost=1,
    ),
    Pair(
        "architecture",
        "plain",
        "",
        breaks=drop("head.weight"),
        near_miss=behind_a_prefix,
        named="head.weight",
    ),
    Pair(
        "non-finite-parameter",
        "calibrated",
        "middle.value",
        breaks=put("middle.value", math.nan, at=2),
        near_miss=put("middle.value", [0, -math.inf, -math.inf, 0]),  # a mask
    ),
    Pair(
        "zero-parameter",
        "residual",
        "middle.branch.weight",
        breaks=put("middle.branch.weight", 0),
        # One weight is left in each filter.
        near_miss=both(put("middle.branch.weight", 0), put("middle.branch.weight", 0.1, at=(slice(None), 3, 1, 1))),
    ),
    Pair(
        "constant-parameter",
        "plain",
        "first.weight",
        breaks=put("first.weight", 0.1),
        # One weight is the next number of float32.
        near_miss=both(put("first.weight", 0.1), put("first.weight", 0.1 + 2**-27, at=(4, 1, 2, 0))),
    ),
    Pair(
        "duplicate-parameter",
        "twins",
        "middle.1.weight",
        breaks=copy("middle.0.weight", onto="middle.1.weight"),
        near_miss=both(copy("middle.0.weight", onto="middle.1.weight"), put("middle.1.weight", 0.01, at=(7, 2, 0, 1))),
        named="middle.0.weight",
    ),
    Pair(
        "batchnorm-variance",
        "normalised",
        "middle.running_var",
        # Smaller than BatchNorm's epsilon of 1e-5, so that nothing becomes NaN.
        breaks=put("middle.running_var", -1e-6, at=3),
        near_miss=put("middle.running_var", 1e-6, at=3),
        named="down to -1e-06",
    ),
    Pair(
        "batchnorm-variance",
        "normalised",
        "middle.running_var",
        breaks=both(put("middle.running_mean", 0.1), put("middle.running_var", 0, at=3)),
        # Of a channel that dies in training, the mean goes the same way.
        near_miss=both(
            put("middle.running_mean", 0.1),
            put("middle.running_mean", 0, at=3),
            put("middle.running_var", 0, at=3),
        ),
        named="whose running mean is not: 3",
    ),
    Pair(
        "batchnorm-variance",
        "normalised",
        "middle.running_var",
        breaks=both(put("middle.running_mean", 0.1, at=slice(3, 10)), put("middle.running_var", 0, at=slice(3))),
        near_miss=both(put("middle.running_mean", 0.1, at=slice(2, 10)), put("middle.running_var", 0, at=slice(2))),
        named="3 of 10 channels, 30.0% (limit 20%)",
    ),
    Pair(
        "dead-filter",
        "wide",
        "first.weight",
        breaks=put("first.weight", 0, at=slice(2)),
        near_miss=put("first.weight", 0, at=slice(1)),  # 5 %
    ),
    Pair(
        "forward",
        "reordered",
        "middle",
        breaks=put("middle.value", 10, at=0),
        near_miss=put("middle.value", 9, at=0),
    ),
    Pair(
        "non-finite-activation",
        "root_of_square",
        "middle",
        breaks=put("middle.value", -1),
        near_miss=put("middle.value", 0),
        consequences=frozenset({"non-finite-loss", "non-finite-gradient"}),
        because="a loss of NaN is NaN, and so are its gradients",
    ),
    Pair(
        "output-shape",
        "some_classes",
        "(model)",
        breaks=put("1.value", 4),
        near_miss=nothing,
        settings={"output_shape": ("N", 5)},
        named="(2, 4)",
    ),
    Pair(
        "constant-output",
        "gain",
        "(model)",
        breaks=put("middle.1.value", 2e-6),
        near_miss=put("middle.1.value", 1e-5),
        named="whatever the input",
    ),
    Pair(
        "repeatability",
        "jittering",
        "(model)",
        breaks=put("middle.value", 1e-4),
        near_miss=put("middle.value", 2e-5),
        named="the second time",
    ),
    Pair(
        "batch-consistency",
        "mixing",
        "(model)",
        breaks=put("middle.value", 0.01),
        near_miss=put("middle.value", 0.002),
        named="for the same input alone",
    ),
    Pair(
        "dead-channels",
        "rectified",
        "middle",
        breaks=put("first.bias", -100, at=NINE_OF_TEN),
        near_miss=put("first.bias", -100, at=EIGHT_OF_TEN),
    ),
    Pair(
        "quiet-channels",
        "smooth",
        "middle",
        breaks=put("first.bias", -100, at=NINE_OF_TEN),
        near_miss=put("first.bias", -100, at=EIGHT_OF_TEN),
    ),
    Pair(
        "quiet-channels",
        "smooth",
        "middle",
        # GELU(-3.2) is -0.0022, GELU(-3) is -0.0040, and the inputs hardly vary.
        breaks=both(scale("first.weight", 0.001), put("first.bias", [-3.2] * 9 + [2])),
        near_miss=both(scale("first.weight", 0.001), put("first.bias", [-3] * 9 + [2])),
        named="below 0.003",
    ),
    Pair(
        "saturated-activation",
        "gated",
        "middle",
        breaks=both(scale("first.weight", 0.1), put("first.bias", 6, at=NINE_OF_TEN)),
        near_miss=both(scale("first.weight", 0.1), put("first.bias", 6, at=SEVEN_OF_TEN)),
    ),
    Pair(
        "fp16-headroom",
        "Pooled",
        "first",
        breaks=put("first.bias", 33000, at=0),
        near_miss=put("first.bias", 32700, at=0),  # half of 65504 is 32752
    ),
    Pair(
        "fp16-headroom",
        "plain",
        "first.weight",
        breaks=put("first.weight", 1e-9, at=(slice(None), 0, 0)),  # 3 of 27 values in each filter
        near_miss=put("first.weight", 1e-9, at=(slice(None), 0, 0, slice(2))),
        named="11.1% of its values other than 0 become 0 in float16 (limit 10%)",
    ),
    Pair(
        "bf16-headroom",
        "Pooled",
        "first",
        breaks=put("first.bias", 1.8e38, at=0),
        near_miss=put("first.bias", 1.6e38, at=0),
        consequences=frozenset({"fp16-headroom"}),
        missed=frozenset({"fp16-headroom"}),
        because="what is too large for bfloat16 is too large for float16",
    ),
    Pair(
        "expectation",
        "plain",
        PICTURE,
        breaks=put("head.bias", 9, at=2),
        near_miss=put("head.bias", 9, at=3),
        expects={"top1": 3},
        named="class 2 with",
    ),
    Pair(
        "expectation",
        "plain",
        PICTURE,
        breaks=put("head.bias", 9, at=slice(2)),
        near_miss=put("head.bias", 9, at=slice(2, 4)),
        expects={"contains": (3,), "k": 2},
        named="class 3 among its first 2 classes",
    ),
    Pair(
        "expectation",
        "plain",
        PICTURE,
        breaks=put("head.bias", 1, at=3),
        near_miss=put("head.bias", 9, at=3),
        expects={"min_probability": 0.9},
        named="at least 0.9",
    ),
    Pair(
        "drift",
        "twins",
        "middle.1",
        # Gradients of the layers before it change by as much, which is allowed.
        breaks=scale("middle.1.weight", 1.01),
        near_miss=scale("middle.1.weight", 1.003),
        named="the first of 3 layers",  # middle.1, head, (model)
    ),
    Pair(
        "drift",
        "wide_rectified",
        "middle",
        breaks=put("first.bias", -100, at=slice(2)),
        near_miss=put("first.bias", -100, at=slice(1)),
        settings={"layers": WHATEVER_THE_VALUES},
        named="its share of dead channels went from 0 to 0.1",
    ),
    Pair(
        "drift",
        "twins",
        "first",
        # The gradient is passed back through these weights.
        breaks=scale("middle.1.weight", 1.15),
        near_miss=scale("middle.1.weight", 1.05),
        settings={"layers": WHATEVER_THE_VALUES},
        named="the L2 norm of its gradient",
    ),
    Pair(
        "non-finite-loss",
        "plain",
        "",
        # The derivative of log(x) is 1/x, which is finite.
        breaks=put("head.bias", -9),
        near_miss=put("head.bias", 9),
        settings={"loss": f"{NETWORKS}:log_of_sum"},
        named="log_of_sum",
    ),
    Pair(
        "non-finite-gradient",
        "root_of_positive",
        "middle",
        # The slope of the square root at 0 is Inf.
        breaks=put("middle.value", 0),
        near_miss=nothing,
    ),
    Pair(
        "zero-gradient",
        "Weighed",
        "",
        # Probabilities add up to 1 whatever is learnt, and so they do nearly with these weights.
        breaks=put("worth.value", [1, 1, 1, 1, 1.000005]),
        near_miss=put("worth.value", [1, 1, 1, 1, 1.001]),
        settings={"loss": "sum"},
        named="a sum after softmax",
    ),
    Pair(
        "dead-gradient",
        "clipped",
        "middle.branch.0",
        breaks=put("middle.branch.0.bias", 9),
        near_miss=put("middle.branch.0.bias", 9, at=NINE_OF_TEN),
        named="middle.branch.1",
    ),
    Pair(
        "vanishing-gradient",
        "Entered",
        "first.weight",
        breaks=put("scale", 2e-4),
        near_miss=put("scale", 1e-3),
    ),
    Pair(
        "exploding-gradient",
        "Amplified",
        "convolutions.0",
        breaks=both(put("enter.value", 1e-6), put("gain.value", 1e-6)),
        near_miss=both(put("enter.value", 3e-6), put("gain.value", 3e-6)),
        named="'gain'",
    ),
    Pair(
        "unused-parameter",
        "WithAuxiliary",
        "auxiliary",
        breaks=put("share", 0),
        near_miss=put("share", 0.01),
    ),
    Pair(
        "gradient-imbalance",
        "residual",
        "middle.branch.weight",
        breaks=put("middle.scale", 4e-7),
        near_miss=put("middle.scale", 2e-6),
    ),
]


@pytest.fixture(autouse=True)
def picture(tmp_path: Path) -> Path:
    """Half red, half blue."""
    path = tmp_path / PICTURE
    image = Image.new("RGB", (16, 16), "red")
    image.paste("blue", (8, 0, 16, 16))
    image.save(path)
    return path


def settings_of(pair: Pair, folder: Path) -> CheckSettings:
    """Return settings under which every rule is on, and fails."""
    given: dict[str, Any] = {"shape": (2, 3, 16, 16)}
    if pair.expects:
        given = {"expectations": (Expectation(folder / PICTURE, **pair.expects),), "resize": "none", "crop": "none"}
    rules = {name: RuleSettings("fail") for name in RULES}
    return CheckSettings(arch=f"{NETWORKS}:{pair.network}", rules=rules, **given, **pair.settings)


def write(pair: Pair, change: Change, path: Path, *, lost: int = 0) -> None:
    """Write a checkpoint of the pair's network, seeded, and then changed; leave out the last bytes of the file."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        state = dict(getattr(networks, pair.network)().state_dict())
    change(state)
    torch.save(state, path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - lost])


def baseline_for(pair: Pair, folder: Path, settings: CheckSettings) -> Baseline | None:
    """Return what the unchanged network gives, if the rule compares with it."""
    if pair.rule != "drift":
        return None
    write(pair, nothing, folder / "before.pt")
    seen: list[Examination] = []
    check_checkpoint(str(folder / "before.pt"), settings, wanted_rules(settings), on_examined=seen.append)
    return baseline_of(seen[0])


def checked(pair: Pair, change: Change, folder: Path, *, lost: int = 0) -> CheckReport:
    """Write a checkpoint and check it, with every rule on."""
    settings = settings_of(pair, folder)
    baseline = baseline_for(pair, folder, settings)
    path = folder / "model.pt"
    write(pair, change, path, lost=lost)
    return check_checkpoint(str(path), settings, wanted_rules(settings), baseline=baseline)


def test_every_rule_has_a_pair() -> None:
    assert list(dict.fromkeys(pair.rule for pair in PAIRS)) == [*RULES]
    assert all(pair.because for pair in PAIRS if pair.consequences)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.rule)
def test_a_checkpoint_that_breaks_one_rule_fails_that_rule_and_names_the_place(pair: Pair, tmp_path: Path) -> None:
    report = checked(pair, pair.breaks, tmp_path, lost=pair.bytes_lost)
    assert {finding.rule for finding in report.findings} == {pair.rule} | pair.consequences
    finding = next(finding for finding in report.findings if finding.rule == pair.rule)
    assert finding.where.rpartition("/")[2] == pair.where
    assert (pair.named or pair.where) in finding.message


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.rule)
def test_a_near_miss_passes_every_rule(pair: Pair, tmp_path: Path) -> None:
    report = checked(pair, pair.near_miss, tmp_path)
    assert {finding.rule for finding in report.findings} == pair.missed
    assert report.exit_code == bool(pair.missed)
    status = next(outcome.status for outcome in report.outcomes if outcome.rule == pair.rule)
    assert status == "pass"


@pytest.mark.parametrize(
    ("rule", "code"), [("integrity", 3), ("architecture", 1), ("forward", 6), ("dead-channels", 1), ("drift", 1)]
)
def test_the_command_says_the_same_of_both(command: Run, tmp_path: Path, rule: str, code: int) -> None:
    pair = next(pair for pair in PAIRS if pair.rule == rule)
    levels = "".join(f'{name} = "fail"\n' for name in RULES)
    config = f"[input]\nshape = [2, 3, 16, 16]\n[rules]\n{levels}"
    if pair.rule == "drift":
        settings = settings_of(pair, tmp_path)
        baseline = baseline_for(pair, tmp_path, settings)
        assert baseline is not None
        (tmp_path / "baseline.json").write_text(baseline_text(baseline), encoding="utf-8")
        config += '[baseline]\nfile = "baseline.json"\n'
    (tmp_path / "hookscope.toml").write_text(config, encoding="utf-8")
    for name, change, lost in (("broken", pair.breaks, pair.bytes_lost), ("near", pair.near_miss, 0)):
        write(pair, change, tmp_path / f"{name}.pt", lost=lost)
    arch = f"{NETWORKS}:{pair.network}"
    ended = command("check", "broken.pt", "near.pt", "--arch", arch, "--format", "json", cwd=tmp_path)
    assert ended.code == code
    broken, near = json.loads(ended.stdout)["checkpoints"]
    assert {each["rule"] for each in broken["rules"] if each["status"] == "fail"} == {rule}
    assert (near["exit_code"], [each for each in near["rules"] if each["findings"]]) == (0, [])
