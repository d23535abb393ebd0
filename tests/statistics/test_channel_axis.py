"""Channel axes and arrangement, on single modules and along whole networks."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchvision.models.convnext import LayerNorm2d
from torchvision.ops import Permute

from hookscope.hooks.forward_hooks import capture
from hookscope.hooks.observed import ModuleCall
from hookscope.statistics.channel_axis import AxisReader, arrange
from tests.networks import small_convnext, small_maxvit, small_mvit, small_swin, small_swin_v2, small_video_swin

Seen = tuple[str, nn.Module, tuple[int, ...], int | None, tuple[tuple[int, ...], ...]]


def walk(model: nn.Module, shape: Sequence[int]) -> list[Seen]:
    """Run the model on random values; list (name, module, shape, channel axis, grids so far) of every output."""
    reader = AxisReader()

    def observe(call: ModuleCall, _slot: str, tensor: Tensor) -> Seen:
        shape = tuple(tensor.shape)
        axis = reader.channel_axis(call.module, shape)
        return call.layer, call.module, shape, axis, tuple(reader.grids)

    values = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), capture(model.eval(), dict(model.named_modules()), observe) as captured:
        model(values)
    return [seen.value for seen in captured.observations if seen.value is not None]


def arrangement(seen: Seen) -> tuple[str, tuple[int, ...], tuple[int, ...] | None]:
    """Return the arrangement of one input's activation, and the shapes of its drawn and its extra values."""
    _, _, shape, axis, grids = seen
    kind, drawn, extra, _ = arrange(torch.zeros(shape[1:]), axis, grids)
    return kind, tuple(drawn.shape), None if extra is None else tuple(extra.shape)


# --- one module ---


@pytest.mark.parametrize(
    ("module", "shape", "axis"),
    [
        (nn.Conv2d(3, 5, 1), (2, 5, 4, 4), 1),
        (nn.Conv2d(3, 7, 1), (2, 7, 7, 7), 1),
        (nn.Conv3d(3, 5, 1), (2, 5, 4, 4, 4), 1),
        (nn.ConvTranspose2d(3, 5, 1), (2, 5, 4, 4), 1),
        (nn.BatchNorm2d(5), (2, 5, 9, 9), 1),
        (nn.GroupNorm(2, 6), (2, 6, 9, 8), 1),
        (nn.Linear(3, 5), (2, 5), 1),
        (nn.Linear(3, 5), (2, 9, 5), 2),
        (nn.Linear(3, 5), (2, 8, 9, 5), 3),
        (nn.LayerNorm(6), (2, 6, 6, 6), 3),
        (nn.LayerNorm(6), (2, 9, 9, 6), 3),
        (LayerNorm2d(6), (2, 6, 6, 6), 1),
        (nn.Embedding(10, 4), (2, 9, 4), 2),
        (nn.MultiheadAttention(4, 2), (2, 9, 4), 2),
        (nn.MaxPool2d(2), (2, 9, 9, 5), 1),
        (nn.AdaptiveAvgPool1d(1), (2, 9, 1), 1),
        (Permute([0, 2, 3, 1]), (2, 5, 5, 5), 3),
        (nn.ReLU(), (2, 5, 9, 9), 1),
        (nn.ReLU(), (2, 9, 5), 2),
        (nn.ReLU(), (2, 5), 1),
        (nn.ReLU(), (2,), None),
        (nn.ReLU(), (), None),
    ],
    ids=str,
)
def test_a_module_tells_which_axis_counts_channels(module: nn.Module, shape: tuple[int, ...], axis: int | None) -> None:
    assert AxisReader().channel_axis(module, shape) == axis


def test_a_subclass_may_lack_the_number_of_channels() -> None:
    class Unset(nn.Linear):
        def __init__(self) -> None:
            nn.Module.__init__(self)

    assert AxisReader().channel_axis(Unset(), (2, 9, 5)) == 2


@pytest.mark.parametrize("module", [nn.ReLU(), nn.LayerNorm((4, 6, 5))], ids=str)
@pytest.mark.parametrize(("maker", "axis"), [(nn.Conv2d(3, 4, 1), 1), (nn.Linear(3, 5), 3)], ids=str)
def test_a_module_without_channels_of_its_own_keeps_those_it_was_given(
    module: nn.Module, maker: nn.Module, axis: int
) -> None:
    reader = AxisReader()
    assert reader.channel_axis(maker, (1, 4, 6, 5)) == axis
    assert reader.channel_axis(module, (1, 4, 6, 5)) == axis


def test_heads_that_are_cut_from_tokens_count_channels_last() -> None:
    reader = AxisReader()
    assert reader.channel_axis(nn.Linear(192, 576), (1, 197, 576)) == 2
    assert reader.channel_axis(nn.Identity(), (1, 3, 197, 64)) == 3
    assert reader.channel_axis(nn.Identity(), (1, 5, 197, 64)) == 1  # 320 is no part of 576


def test_what_is_left_of_a_map_keeps_its_channels() -> None:
    reader = AxisReader()
    assert reader.channel_axis(nn.Conv2d(3, 16, 3), (4, 16, 5, 7)) == 1
    assert [reader.channel_axis("mean", (4, 16, size)) for size in (5, 7, 35)] == [1, 1, 1]
    assert reader.channel_axis("transpose", (4, 35, 16)) == 2


def test_the_latest_tensor_of_a_shape_decides_whatever_the_batch_size() -> None:
    reader = AxisReader()
    reader.channel_axis(nn.Conv2d(3, 5, 1), (1, 5, 5, 5))
    reader.channel_axis(nn.Linear(3, 5), (8, 5, 5, 5))
    assert reader.channel_axis(nn.ReLU(), (1, 5, 5, 5)) == 3


# --- whole networks ---


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "swin_v2, not square": (small_swin_v2, (1, 3, 96, 64)),
    "swin3d, not square": (small_video_swin, (1, 3, 4, 64, 96)),
    "convnext, not square": (small_convnext, (1, 3, 96, 64)),
    "maxvit": (small_maxvit, (1, 3, 128, 128)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_channels_are_found_along_a_network(name: str) -> None:
    build, shape = NETWORKS[name]
    seen = walk(build(), shape)
    swin_blocks = 0
    for layer, module, output, axis, _ in seen:
        last = len(output) - 1
        if isinstance(module, nn.Conv2d | nn.Conv3d | nn.BatchNorm2d | nn.BatchNorm3d | LayerNorm2d):
            assert axis == 1, layer
        elif isinstance(module, nn.Linear | nn.LayerNorm):
            assert axis == last, layer
        elif type(module).__name__ in {"SwinTransformerBlock", "SwinTransformerBlockV2"}:
            swin_blocks += 1
            assert axis == last, layer
        elif type(module).__name__ in {"CNBlock", "BasicBlock", "MBConv", "MaxVitLayer"}:
            assert axis == 1, layer
    assert swin_blocks == (8 if "swin" in name else 0)


@pytest.mark.parametrize(("size", "grid"), [((64, 96), (16, 24))])
def test_swin_rows_are_drawn_as_maps_of_their_spatial_size(size: tuple[int, int], grid: tuple[int, int]) -> None:
    rows = {seen[0]: seen for seen in walk(small_swin(), (1, 3, *size))}
    assert arrangement(rows["features.0.0"]) == ("maps", (24, *grid), None)
    assert arrangement(rows["features.1.1"]) == ("maps", (24, *grid), None)
    assert arrangement(rows["features.1.1.mlp.0"]) == ("maps", (96, *grid), None)
    assert arrangement(rows["features.7.1"]) == ("maps", (192, grid[0] // 8, grid[1] // 8), None)
    assert arrangement(rows["permute"]) == ("maps", (192, grid[0] // 8, grid[1] // 8), None)
    assert arrangement(rows["head"]) == ("vector", (1000,), None)


def test_vit_tokens_go_back_to_their_grid_with_the_class_token_apart() -> None:
    vit = torchvision.models.VisionTransformer(
        image_size=224, patch_size=16, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=48
    )
    rows = {seen[0]: seen for seen in walk(vit, (1, 3, 224, 224))}
    block = rows["encoder.layers.encoder_layer_1"]
    assert block[2] == (1, 197, 32)
    assert arrangement(block) == ("tokens", (32, 14, 14), (1, 32))
    assert arrangement(rows["encoder.layers.encoder_layer_0.mlp.0"]) == ("tokens", (48, 14, 14), (1, 48))
    assert arrangement(rows["conv_proj"]) == ("maps", (32, 14, 14), None)


class PatchNetwork(nn.Module):
    """Cut an image of any size into patches, put extra tokens in front, and mix channels."""

    def __init__(self, extra: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 6, 4, stride=4)
        self.extra = nn.Parameter(torch.zeros(1, extra, 6))
        self.mix = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 5), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)  # (N, T, D)
        return self.mix(torch.cat([self.extra.expand(x.shape[0], -1, -1), tokens], 1))


@pytest.mark.parametrize("extra", [0, 2])
@pytest.mark.parametrize("grid", [(3, 7), (8, 2), (5, 5)])
def test_token_grids_need_not_be_square(extra: int, grid: tuple[int, int]) -> None:
    rows = {seen[0]: seen for seen in walk(PatchNetwork(extra), (2, 3, 4 * grid[0], 4 * grid[1]))}
    for name, channels in (("mix.0", 6), ("mix.1", 5), ("mix.2", 5), ("mix", 5), ("", 5)):
        assert arrangement(rows[name]) == ("tokens", (channels, *grid), (extra, channels) if extra else None)


def test_the_pyramid_of_a_video_transformer_gives_each_level_its_grid() -> None:
    rows = {seen[0]: seen for seen in walk(small_mvit(), (1, 3, 4, 64, 96))}
    for block, channels, grid in ((0, 8, (2, 16, 24)), (1, 16, (2, 8, 12)), (2, 32, (2, 4, 6))):
        expected = ("frames", (channels, *grid), (1, channels))
        for part in ("", ".norm2", ".mlp.3"):
            assert arrangement(rows[f"blocks.{block}{part}"]) == expected, (block, part)


def test_a_pyramid_without_convolutions_halves_the_last_known_grid() -> None:
    assert [tuple(arrange(torch.zeros(count, 3), 2, [(12, 20)])[1].shape) for count in (240, 60, 15)] == [
        (3, 12, 20),
        (3, 6, 10),
        (3, 3, 5),
    ]


def test_a_grid_that_was_seen_is_better_than_one_that_would_have_to_be_halved() -> None:
    # (4, 50) halved is (2, 25), which one extra token would fit as well.
    kind, drawn, extra, _ = arrange(torch.zeros(51, 3), 2, [(5, 10), (4, 50)])
    assert (kind, tuple(drawn.shape)) == ("tokens", (3, 5, 10))
    assert extra is not None


@pytest.mark.parametrize(
    ("maker", "shape", "grid"),
    [
        ("softmax", (1, 3, 192, 192), None),  # heads, tokens, tokens
        (nn.LayerNorm(16), (1, 3, 192, 16), None),  # heads, tokens, features
        ("reshape", (1, 192, 6, 6), None),  # tokens, and features that were cut into squares
        (nn.LayerNorm(20), (1, 6, 8, 20), (6, 8)),  # a channels-last map of half the size
        (nn.PixelShuffle(2), (1, 5, 24, 32), (24, 32)),
        (nn.MaxPool2d((2, 1)), (1, 20, 6, 16), (6, 16)),
    ],
)
def test_sizes_count_as_grids_that_convolutions_make_or_that_follow_from_them(
    maker: nn.Module | str, shape: tuple[int, ...], grid: tuple[int, int] | None
) -> None:
    reader = AxisReader()
    reader.channel_axis("matmul", (1, 3, 12, 12))  # comes before any map
    reader.channel_axis(nn.Conv2d(3, 20, 4, 4), (1, 20, 12, 16))
    reader.channel_axis(maker, shape)
    assert reader.grids == [(12, 16), *([grid] if grid else [])]


def test_tokens_that_fit_no_known_grid_are_not_laid_out_on_a_square() -> None:
    assert arrange(torch.zeros(25, 3), 2, [(12, 16)])[1].shape == (1, 3, 25)
    assert arrange(torch.zeros(25, 3), 2, [])[1].shape == (1, 3, 25)  # words
    assert arrange(torch.zeros(14, 3), 2, [(12, 12)])[1].shape == (1, 3, 14)  # 9 of them, and 5 apart


def test_of_two_grids_that_fit_the_later_one_is_taken() -> None:
    assert arrange(torch.zeros(24, 3), 2, [(4, 6), (3, 8)])[1].shape == (3, 3, 8)
    assert arrange(torch.zeros(24, 3), 2, [(3, 8), (4, 6)])[1].shape == (3, 4, 6)


# --- any shape ---


@pytest.mark.parametrize(
    ("shape", "axis", "kind", "drawn"),
    [
        ((), None, "vector", (1,)),
        ((5,), 1, "vector", (5,)),
        ((5, 4, 3), 1, "maps", (5, 4, 3)),
        ((4, 3, 5), 3, "maps", (5, 4, 3)),
        ((5, 2, 4, 3), 1, "frames", (5, 2, 4, 3)),
        ((2, 4, 3, 5), 4, "frames", (5, 2, 4, 3)),
        ((5, 11), 1, "maps", (1, 5, 11)),
        ((35, 5), 2, "maps", (1, 5, 35)),
        ((5, 2, 2, 4, 3), 1, "frames", (5, 4, 4, 3)),
    ],
)
def test_arranges_by_the_number_of_axes(
    shape: tuple[int, ...], axis: int | None, kind: str, drawn: tuple[int, ...]
) -> None:
    arranged = arrange(torch.zeros(shape), axis, [])
    assert (arranged[0], tuple(arranged[1].shape)) == (kind, drawn)


modules = st.sampled_from(
    [
        nn.ReLU(),
        nn.Conv2d(1, 3, 1),
        nn.Linear(1, 4),
        nn.LayerNorm(3),
        nn.LayerNorm((2, 3)),
        nn.AdaptiveAvgPool2d(1),
        nn.BatchNorm2d(2),
        nn.MultiheadAttention(4, 2),
        Permute([0, 2, 3, 1]),
        Permute([1, 0]),
    ]
)
steps = st.lists(st.tuples(modules, st.lists(st.integers(0, 6), max_size=7)), max_size=8)


@settings(max_examples=120, deadline=None)
@given(steps=steps)
def test_nothing_raises_and_nothing_is_lost_on_odd_shapes(steps: list[tuple[nn.Module, list[int]]]) -> None:
    reader = AxisReader()
    for module, shape in steps:
        axis = reader.channel_axis(module, tuple(shape))
        assert axis is None or axis in (1, len(shape) - 1)
        assert (axis is None) == (len(shape) < 2)
        values = torch.arange(float(math.prod(shape[1:]))).view(shape[1:])
        kind, drawn, extra, _ = arrange(values, axis, reader.grids)
        assert drawn.dim() == {"vector": 1, "maps": 3, "tokens": 3, "frames": 4}[kind]
        shown = torch.cat([drawn.reshape(-1), torch.empty(0) if extra is None else extra.reshape(-1)])
        assert sorted(shown.tolist()) == values.reshape(-1).tolist()
