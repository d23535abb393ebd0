"""What catches corruptions of real weights and of a small ResNet: alone, with pictures, with a baseline.

A table: a row for each corruption, with the rules that object in each setting, or the reason why none can.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.commands.check.checkpoints.corrupted_networks import (
    Block,
    Row,
    Sound,
    assert_caught,
    demo,
    residual,
    weights,
)
from tests.commands.check.checkpoints.corruptions import (
    State,
    block,
    both,
    cast,
    copy_layer,
    every,
    fill,
    flip,
    prune,
    reset,
    round_to,
    scale,
    swap,
    swap_classes,
    transpose,
)

pytestmark = pytest.mark.exhaustive

# --- the real weights of EfficientNet-Lite0 ---

EXPAND, DEPTHWISE, PROJECT = (
    f"_blocks.9.{part}.weight" for part in ("_expand_conv", "_depthwise_conv", "_project_conv")
)
OF_DEMO = [
    Row(
        "a flipped exponent bit of a weight",
        weights(flip(EXPAND, 30)),
        alone="(bf16-headroom) (fp16-headroom) outlier-weight overflowing-activation",
        pictures="non-finite-activation",
    ),
    Row(
        "a flipped sign bit",
        weights(flip(EXPAND, 31)),
        never="one of 75,264 weights, as large as before: no layer moves by a hundredth of its spread",
    ),
    Row("all biases removed", weights(every("bias", Tensor.zero_)), pictures="batchnorm-statistics", baseline="drift"),
    Row(
        "pruned to five in a hundred",
        weights(prune(0.95)),
        alone="(dead-filter) constant-output",
        pictures="(batchnorm-statistics)",
        baseline="drift",
    ),
    Row("two classes swapped", weights(swap_classes(281, 285, "_fc.weight", "_fc.bias")), baseline="drift"),
    Row(
        "pictures normalised as another network's",
        given={"mean": "0.485,0.456,0.406", "std": "0.229,0.224,0.225"},
        pictures="(batchnorm-statistics)",
    ),
]


@pytest.fixture(scope="module")
def real() -> Sound:
    return demo()


@pytest.mark.parametrize("row", OF_DEMO, ids=lambda row: row.what)
def test_corruptions_of_real_weights(real: Sound, row: Row) -> None:
    assert_caught(real, row)


# --- a small ResNet with statistics of pictures ---

NORMS = ["1", *(f"{at}.{norm}" for at in (3, 4, 5, 6) for norm in ("bn1", "bn2", "skip.1"))]


class AlwaysDropping(nn.Module):
    """A dropout that is not told of eval mode."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.1, training=True)


def relu_first(net: Any) -> None:
    part: Block = net[4]
    part.bn1, part.relu = part.relu, part.bn1  # type: ignore[assignment]


def copy_class(state: State) -> None:
    state["9.weight"][3] = state["9.weight"][7]


OF_RESIDUAL = [
    Row(
        "a flipped exponent bit of a weight",
        weights(flip("4.conv1.weight", 30)),
        alone="(bf16-headroom) (fp16-headroom) non-finite-activation outlier-weight overflowing-activation",
    ),
    Row(
        "a flipped exponent bit of a variance",
        weights(flip("4.bn1.running_var", 30, 5)),
        alone="(fp16-headroom) outlier-weight",
        baseline="drift",
    ),
    Row(
        "a mean that is NaN",
        weights(fill("4.bn1.running_mean", math.nan)),
        alone="non-finite-activation non-finite-parameter",
    ),
    Row(
        "a kernel times a thousandth",
        weights(scale("5.conv1.weight", 1e-3)),
        pictures="batchnorm-statistics",
        baseline="drift",
    ),
    Row(
        "a kernel times 1e20",
        weights(scale("5.conv1.weight", 1e20)),
        alone="(fp16-headroom) overflowing-activation",
        pictures="batchnorm-statistics",
        baseline="drift",
    ),
    Row(
        "two kernels swapped",
        weights(swap("3.conv1.weight", "3.conv2.weight")),
        pictures="batchnorm-statistics",
        baseline="drift",
    ),
    Row("kernels transposed", weights(transpose("5.conv1.weight")), baseline="drift"),
    Row("all BatchNorm reset", weights(both(*map(reset, NORMS))), alone="untrained-norm", baseline="drift"),
    Row("variances halved", weights(scale("6.bn1.running_var", 0.5)), baseline="drift"),
    Row(
        "variances of zero",
        weights(fill("4.bn1.running_var", 0)),
        alone="batchnorm-variance",
        pictures="batchnorm-statistics",
        baseline="drift",
    ),
    Row(
        "a bias of -100 before a ReLU",
        weights(fill("5.bn1.bias", -100)),
        alone="dead-layer",
        pictures="batchnorm-statistics",
        baseline="drift",
    ),
    Row(
        "a residual branch dropped",
        weights(both(fill("5.bn2.weight", 0), fill("5.bn2.bias", 0))),
        alone="(untrained-norm)",
        baseline="drift",
    ),
    Row("the ReLU before BatchNorm", relu_first, baseline="drift"),
    Row("a dropout left on", lambda net: net.insert(9, AlwaysDropping()), alone="repeatability", baseline="drift"),
    Row(
        "a layer there twice",
        weights(copy_layer("5.conv1.weight", "5.conv2.weight")),
        alone="(duplicate-parameter)",
        pictures="batchnorm-statistics",
        baseline="drift",
    ),
    Row(
        "half of a layer's filters zero",
        weights(block("6.conv1.weight", 0, 32 * 32 * 9, 0)),
        alone="(dead-filter)",
        pictures="batchnorm-statistics",
        baseline="drift",
    ),
    Row("all weights in two bits", weights(round_to(2)), pictures="(batchnorm-statistics)", baseline="drift"),
    Row(
        "half precision, where a scale overflows",
        weights(cast(torch.float16, 1e6)),
        alone="(fp16-headroom) non-finite-activation non-finite-parameter",
    ),
    Row(
        "a head of zeros",
        weights(both(fill("9.weight", 0), fill("9.bias", 0))),
        alone="(constant-output) (zero-parameter)",
        baseline="drift",
    ),
    Row("a head of one value", weights(fill("9.weight", 0.01)), alone="(constant-parameter)", baseline="drift"),
    Row("a class there twice", weights(copy_class), alone="(duplicate-filter)", baseline="drift"),
]


@pytest.fixture(scope="module")
def run_in() -> Sound:
    return residual()


@pytest.mark.parametrize("row", OF_RESIDUAL, ids=lambda row: row.what)
def test_corruptions_of_a_residual_network(run_in: Sound, row: Row) -> None:
    assert_caught(run_in, row)
