"""What catches corruptions of a training checkpoint: alone, with pictures, with a baseline, with labels.

A table: a row for each corruption, with the rules that object in each setting, or the reason why none can.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.commands.check.checkpoints.corrupted_networks import Content, Row, Sound, assert_caught, trained, weights
from tests.commands.check.checkpoints.corruptions import fill, initialise, reverse, scale, uniform

pytestmark = pytest.mark.exhaustive


def initialise_all(net: nn.Module) -> None:
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear | nn.BatchNorm2d):
            module.reset_parameters()


def half_written(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def bit_flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def head_transposed(held: Content) -> None:
    held["model"]["17.weight"] = held["model"]["17.weight"].T.clone()


def scaler(scale: float) -> Content:
    """Return what a GradScaler of that scale saves."""
    return {**torch.amp.GradScaler("cpu").state_dict(), "scale": scale}


def moment(held: Content, name: str) -> Tensor:
    state: Tensor = held["optimizer"]["state"][0][name]
    return state


LOST = "accuracy accuracy-drop class-accuracy"

OF_TRAINED = [
    Row(
        "a kernel initialised again",
        weights(initialise("6.weight", uniform)),
        alone="(untrained-weight)",
        pictures="batchnorm-statistics",
        baseline="drift",
        labels=LOST,
    ),
    Row("everything initialised again", initialise_all, alone="(untrained-norm)", baseline="drift", labels=LOST),
    Row(
        "variances a hundredth",
        weights(scale("4.running_var", 0.01)),
        pictures="batchnorm-statistics",
        baseline="drift",
    ),
    Row("the biases of the head removed", weights(fill("17.bias", 0)), baseline="drift"),
    Row("classes in reverse order", weights(reverse("17.weight", "17.bias")), baseline="drift", labels=LOST),
    Row(
        "pictures a tenth as strong",
        given={"std": "1.25,1.25,1.25"},
        pictures="batchnorm-statistics",
        labels="accuracy class-accuracy",
    ),
    Row("half of the file", damage=half_written, alone="integrity"),
    Row("a flipped bit in the file", damage=bit_flipped, alone="integrity"),
    Row(
        "a weight missing", content=lambda held: held["model"].pop("6.weight"), alone="(averaged-weights) architecture"
    ),
    Row("a transposed head", content=head_transposed, alone="architecture averaged-weights"),
    Row(
        "an average without the head",
        content=lambda held: held["ema"].pop("module.17.bias"),
        alone="(averaged-weights)",
    ),
    Row(
        "an average that lags behind",
        content=lambda held: held["ema"]["module.17.bias"].mul_(0.5),
        never="an average lags behind the weights by any amount",
    ),
    Row("no mean of squares", content=lambda held: moment(held, "exp_avg_sq").zero_(), alone="optimizer-state"),
    Row(
        "a beta of 1",
        content=lambda held: held["optimizer"]["param_groups"][0].update(betas=(0.9, 1.0)),
        alone="optimizer-state",
    ),
    Row(
        "an average of another run",
        content=lambda held: held["ema"]["module.6.weight"].normal_(),
        alone="(averaged-weights)",
    ),
    Row(
        "no moments of one parameter",
        content=lambda held: held["optimizer"]["state"].pop(0),
        never="a parameter that was frozen has none",
    ),
]


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Sound:
    return trained(tmp_path_factory.mktemp("trained"))


@pytest.mark.parametrize("row", OF_TRAINED, ids=lambda row: row.what)
def test_corruptions_of_a_trained_network(learnt: Sound, row: Row) -> None:
    assert_caught(learnt, row)
