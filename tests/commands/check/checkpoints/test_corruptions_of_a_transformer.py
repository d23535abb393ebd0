"""What catches corruptions of a small ViT, which stores nothing of its pictures: alone, and with a baseline."""

import pytest
import torch
from torch import nn

from tests.commands.check.checkpoints.corrupted_networks import Row, Sound, assert_caught, transformer, weights
from tests.commands.check.checkpoints.corruptions import State, fill, forget_scales, forget_signs, initialise, uniform

pytestmark = pytest.mark.exhaustive

QKV, PROJECT, FIRST, SECOND = (f"blocks.2.{part}.weight" for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"))


def shuffle_positions(state: State) -> None:
    state["pos_embed"].copy_(state["pos_embed"][:, torch.randperm(17)])


def set_eps(net: nn.Module, eps: float) -> None:
    for module in net.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = eps


OF_TRANSFORMER = [
    Row("positions shuffled", weights(shuffle_positions), baseline="drift"),
    Row(
        "a last LayerNorm of zeros",
        weights(fill("norm.weight", 0)),
        alone="(zero-parameter) constant-output",
        baseline="drift",
    ),
    Row("another eps", lambda net: set_eps(net, 1.0), baseline="drift"),
    Row(
        "an eps of 1e-5 for 1e-6",
        lambda net: set_eps(net, 1e-5),
        never="variances are so much greater that no layer moves by a hundredth of its spread",
    ),
    Row(
        "a matrix initialised again", weights(initialise(FIRST, uniform)), alone="(untrained-weight)", baseline="drift"
    ),
    Row(
        "the last third of the file zero",
        weights(lambda state: [tensor.zero_() for tensor in list(state.values())[2 * len(state) // 3 :]]),
        alone="constant-output (zero-parameter)",
        baseline="drift",
    ),
    Row("int8 without its scales", weights(forget_scales(8)), alone="integer-weight (fp16-headroom)", baseline="drift"),
    Row("magnitudes without signs", weights(forget_signs), alone="unsigned-weight", baseline="drift"),
    Row(
        "pictures from 0 to 255",
        given={"mean": "none", "std": "0.00392,0.00392,0.00392"},
        never="LayerNorm stores nothing of the pictures of its training",
    ),
]


@pytest.fixture(scope="module")
def calm() -> Sound:
    return transformer()


@pytest.mark.parametrize("row", OF_TRANSFORMER, ids=lambda row: row.what)
def test_corruptions_of_a_transformer(calm: Sound, row: Row) -> None:
    assert_caught(calm, row)
