"""What catches corruptions of a training checkpoint: alone, with pictures, with a baseline, with labels.

A table: a row for each corruption, with the rules that object in each setting, or the reason why none can.
"""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.checks.checkpoints.corrupted_networks import (
    Content,
    Row,
    Sound,
    assert_caught,
    trained,
    weights,
)
from tests.checks.checkpoints.corruptions import (
    block,
    both,
    colours_swapped,
    copy_filters,
    disturb,
    exchange_channels,
    fill,
    initialise,
    prune,
    reverse,
    round_to,
    scale,
    swap,
    swap_classes,
    transpose,
    uniform,
    zero,
)

pytestmark = pytest.mark.exhaustive


def initialise_all(net: nn.Module) -> None:
    for each in net.modules():
        if isinstance(each, nn.Conv2d | nn.Linear | nn.BatchNorm2d):
            each.reset_parameters()


def half_written(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def bit_flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def renamed(held: Content) -> None:
    held["model"]["six.weight"] = held["model"].pop("6.weight")


def head_transposed(held: Content) -> None:
    held["model"]["17.weight"] = held["model"]["17.weight"].T.clone()


def scaler(scale: float) -> Content:
    """Return what a GradScaler of that scale saves."""
    return {**torch.amp.GradScaler("cpu").state_dict(), "scale": scale}


def moment(held: Content, name: str) -> Tensor:
    state: Tensor = held["optimizer"]["state"][0][name]
    return state


OF_TRAINED = [
    Row(
        "a kernel initialised again",
        weights(initialise("6.weight", uniform)),
        alone="(untrained-weight)",
        pictures="batchnorm-statistics",
        baseline="drift",
        labels="accuracy accuracy-drop class-accuracy",
    ),
    Row(
        "everything initialised again",
        initialise_all,
        alone="(untrained-norm)",
        baseline="drift",
        labels="accuracy accuracy-drop class-accuracy",
    ),
    Row(
        "two kernels swapped",
        weights(swap("6.weight", "9.weight")),
        pictures="batchnorm-statistics",
        baseline="drift",
        labels="accuracy accuracy-drop class-accuracy",
    ),
    Row(
        "kernels transposed",
        weights(transpose("3.weight")),
        baseline="drift",
        labels="accuracy accuracy-drop class-accuracy",
    ),
    Row(
        "input and output channels exchanged",
        weights(exchange_channels("6.weight")),
        pictures="batchnorm-statistics",
        baseline="drift",
        labels="accuracy accuracy-drop class-accuracy",
    ),
    Row("variances halved", weights(scale("4.running_var", 0.5)), baseline="drift"),
    Row(
        "variances a hundredth",
        weights(scale("4.running_var", 0.01)),
        pictures="batchnorm-statistics",
        baseline="drift",
    ),
    Row(
        "a bias of -100 before a ReLU",
        weights(fill("4.bias", -100)),
        alone="(dead-channels) constant-output dead-layer",
        pictures="batchnorm-statistics",
        baseline="drift",
        labels="accuracy accuracy-drop class-accuracy",
    ),
    Row("the biases of the head removed", weights(fill("17.bias", 0)), baseline="drift"),
    Row(
        "a head of zeros",
        weights(both(fill("17.weight", 0), fill("17.bias", 0))),
        alone="(constant-output) (zero-parameter)",
        baseline="drift",
        labels="accuracy accuracy-drop class-accuracy",
    ),
    Row(
        "classes in reverse order",
        weights(reverse("17.weight", "17.bias")),
        baseline="drift",
        labels="accuracy accuracy-drop class-accuracy",
    ),
    Row(
        "two classes swapped",
        weights(swap_classes(0, 3, "17.weight", "17.bias")),
        baseline="drift",
        labels="accuracy accuracy-drop class-accuracy",
    ),
    Row(
        "a class that is never said",
        weights(block("17.bias", 2, 3, -100)),
        baseline="drift",
        labels="accuracy accuracy-drop class-accuracy",
    ),
    Row(
        "blue for red",
        weights(colours_swapped("0.weight")),
        baseline="drift",
        labels="accuracy accuracy-drop class-accuracy",
    ),
    Row("a page of zeros", weights(zero("6.weight", 300, 500)), alone="(constant-block)", baseline="drift"),
    Row("filters there twice", weights(copy_filters("6.weight")), alone="(duplicate-filter)", baseline="drift"),
    Row(
        "all weights in two bits",
        weights(round_to(2)),
        pictures="(batchnorm-statistics)",
        baseline="drift",
        labels="accuracy accuracy-drop class-accuracy",
    ),
    Row(
        "pruned to five in a hundred",
        weights(prune(0.95)),
        pictures="(batchnorm-statistics)",
        baseline="drift",
        labels="accuracy accuracy-drop class-accuracy",
    ),
    Row(
        "noise four times as large as the weights",
        weights(disturb(4.0)),
        pictures="batchnorm-statistics",
        baseline="drift",
        labels="accuracy accuracy-drop class-accuracy",
    ),
    Row(
        "pictures from 0 to 1",
        given={"mean": "none", "std": "none"},
        pictures="batchnorm-statistics",
        labels="accuracy class-accuracy",
    ),
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
    Row("a weight renamed", content=renamed, alone="(averaged-weights) architecture"),
    Row("a transposed head", content=head_transposed, alone="architecture averaged-weights"),
    Row(
        "an average with NaN",
        content=lambda held: held["ema"]["module.17.bias"].fill_(math.nan),
        alone="averaged-weights",
    ),
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
    Row("a moment that is NaN", content=lambda held: moment(held, "exp_avg").fill_(math.nan), alone="optimizer-state"),
    Row("a negative mean of squares", content=lambda held: moment(held, "exp_avg_sq").sub_(1), alone="optimizer-state"),
    Row("steps that disagree", content=lambda held: moment(held, "step").fill_(7), alone="(optimizer-state)"),
    # 10 is more than the root of v / (1 - 0.999) for gradients of 1.
    Row(
        "the moment of another run",
        content=lambda held: moment(held, "exp_avg").fill_(10),
        alone="optimizer-state",
    ),
    Row(
        "no mean of squares",
        content=lambda held: moment(held, "exp_avg_sq").zero_(),
        alone="optimizer-state",
    ),
    Row(
        "a learning rate of NaN",
        content=lambda held: held["optimizer"]["param_groups"][0].update(lr=math.nan),
        alone="optimizer-state",
    ),
    Row(
        "a beta of 1",
        content=lambda held: held["optimizer"]["param_groups"][0].update(betas=(0.9, 1.0)),
        alone="optimizer-state",
    ),
    Row("a scaler of 0", content=lambda held: held.update(scaler=scaler(0.0)), alone="scaler-state"),
    Row("a scaler that overflowed", content=lambda held: held.update(scaler=scaler(math.inf)), alone="scaler-state"),
    Row("a scaler halved all along", content=lambda held: held.update(scaler=scaler(2**-20)), alone="(scaler-state)"),
    Row(
        "an average of another run",
        content=lambda held: held["ema"]["module.6.weight"].normal_(),
        alone="(averaged-weights)",
    ),
    Row(
        "an average with BatchNorm as it starts",
        content=lambda held: (
            held["ema"]["module.4.running_mean"].zero_(),
            held["ema"]["module.4.running_var"].fill_(1),
        ),
        alone="(averaged-weights)",
    ),
    Row(
        "weights older than their average",
        content=lambda held: held["model"]["4.num_batches_tracked"].sub_(1),
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
