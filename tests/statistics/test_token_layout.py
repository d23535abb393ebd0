"""Where the picture lies in outputs: maps, channels last, tokens."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.masked import masked_tensor

import hookscope
from hookscope.errors import UsageError
from hookscope.statistics.layouts import Layout, layout_of, parse_tokens, square_patches
from tests.networks import Apply, Written


def test_tokens_lie_on_the_grid_of_a_convolution_behind_those_in_front() -> None:
    assert layout_of((1, 197, 64), 1, 2, [(14, 14)]) == Layout((14, 14), 2, 1)
    assert layout_of((1, 201, 64), 1, 2, [(14, 14)]) == Layout((14, 14), 2, 5)
    assert layout_of((1, 8 * 12, 64), 1, 2, [(8, 12)], prefix=0) == Layout((8, 12), 2, 0)


def test_hierarchical_grids_are_halved_up_or_down() -> None:
    assert layout_of((1, 49, 64), 1, 2, [(56, 56)]) == Layout((7, 7), 2, 0)
    assert layout_of((1, 16, 64), 1, 2, [(7, 7)]) == Layout((4, 4), 2, 0)
    assert layout_of((1, 9, 64), 1, 2, [(7, 7)]) == Layout((3, 3), 2, 0)


def test_what_the_network_says_of_its_prefix_counts() -> None:
    assert layout_of((1, 198, 64), 1, 2, [(14, 14)], prefix=2) == Layout((14, 14), 2, 2)
    assert "not known" in str(layout_of((1, 199, 64), 1, 2, [(14, 14)], prefix=2))


def test_a_grid_is_never_guessed_from_a_square_number() -> None:
    assert "give --tokens prefix=1,grid=HEIGHTxWIDTH" in str(layout_of((1, 196, 64), 1, 2, []))


@pytest.mark.parametrize(
    ("count", "size", "grid"),
    [
        (32, (32, 64), (4, 8)),
        (64, (32, 64), None),  # 8 x 8, but of patches that are no squares
        (1, (224, 224), None),
        (16, (30, 30), None),
    ],
)
def test_square_patches_fill_the_picture(count: int, size: tuple[int, int], grid: tuple[int, int] | None) -> None:
    assert square_patches(count, size) == grid


def test_the_user_s_word_counts_more() -> None:
    inputs = Layout((2, 8), 2, 1)
    assert layout_of((1, 17, 64), 1, 2, [(4, 4)], prefix=1, tokens=inputs) == Layout((2, 8), 2, 1)
    assert layout_of((1, 18, 64), 1, 2, [(4, 4)], tokens=inputs) == "has 18 tokens, not the 1 + 2x8 of --tokens"


def test_tokens_become_maps_row_by_row() -> None:
    tokens = torch.arange(1 + 6).reshape(1, 7, 1) * torch.tensor([1, 10])
    maps = Layout((2, 3), 2, 1).maps(tokens)
    assert maps.tolist() == [[[[1, 2, 3], [4, 5, 6]], [[10, 20, 30], [40, 50, 60]]]]


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_masked_tokens_are_compared_with_nothing() -> None:
    """They refuse most functions, and hold other values where they are masked."""

    def run(net: Any, x: Tensor) -> Tensor:
        tokens = net.patches(x).flatten(2).transpose(1, 2)
        asking = net.mask(tokens)
        net.mask(torch.cat([tokens[:, :1], tokens], 1))  # as many as patches, and one in front
        output: Tensor = net.looking(asking, net.mask(tokens))
        return output

    parts = {"mask": Apply(lambda x: masked_tensor(x, x > 0)), "looking": Apply(lambda _, x: x.to_tensor(0.0))}
    network, x = Written(run, patches=nn.Conv2d(3, 8, 8, 8), **parts), torch.randn(2, 3, 32, 32)
    rows = hookscope.activations(network, x, layer="*")
    assert rows["mask#1"].activation.unmeasured == "RuntimeError: a MaskedTensor has no memory of its own"
    assert rows["looking"].activation.mean == pytest.approx(network.patches(x).relu().mean().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" grid = 7x9 ", Layout((7, 9), 2, 0)),
        ("grid=49", Layout((49,), 2, 0)),
        ("prefix=1,grid=8x7x7", Layout((8, 7, 7), 2, 1)),
        ("grid=8x8,suffix=12", Layout((8, 8), 2, 0, suffix=12)),
    ],
)
def test_tokens_are_read(text: str, expected: Layout) -> None:
    assert parse_tokens(text) == expected


@pytest.mark.parametrize("text", ["", "14x14", "prefix=1", "grid=4x4x4x4", "grid=4x4,prefix=1", "suffix=1,grid=4x4"])
def test_other_tokens_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(
        UsageError, match=r"is not of the form prefix=1,grid=14x14 \(height x width\)\. For tokens behind"
    ):
        parse_tokens(text)
