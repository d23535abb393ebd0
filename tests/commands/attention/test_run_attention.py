"""What a run gathers: numbers, maps, windows and rollout, against NumPy and networks built to be known."""

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor, nn

import hookscope
from hookscope.commands.attention import reductions
from hookscope.commands.attention.describe import block_columns
from hookscope.errors import LayerNotFoundError, NothingMatchedError, UsageError
from hookscope.results.attention import AttentionBlock, census_of
from tests.commands.attention.small_networks import (
    FlexAttention,
    HalfSeen,
    RedSeeker,
    SeekingBlock,
    SmallTransformer,
)
from tests.fork_server import ForkServer
from tests.networks import Written

Weights = NDArray[np.float64]


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    return SmallTransformer()


@pytest.fixture
def pictures() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def weights_of(network: nn.Module, pictures: Tensor) -> list[Weights]:
    """Return the weights of a `SmallTransformer`, as torch's layers return them when they are asked."""
    actual: list[Weights] = []

    def asked(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, object]) -> None:
        options = kwargs | {"need_weights": True, "average_attn_weights": False}
        actual.append(type(module).forward(module, *args, **options)[1].double().numpy())

    was = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    layers = [module for module in network.modules() if isinstance(module, nn.MultiheadAttention)]
    handles = [layer.register_forward_pre_hook(asked, with_kwargs=True) for layer in layers]
    training = network.training
    network.eval()
    with torch.no_grad():
        network(pictures)
    network.train(training)
    for handle in handles:
        handle.remove()
    torch.backends.mha.set_fastpath_enabled(was)
    return actual


def test_numbers_are_those_of_numpy(network: nn.Module, pictures: Tensor) -> None:
    result = hookscope.attention(network, pictures)
    assert result.census == "2 of 2 blocks seen"
    assert [*result] == [*result.maps]  # what `result["class token"]` chooses from
    expected = weights_of(network, pictures)
    rows = iter(result.rows)
    places = np.stack(np.meshgrid(np.arange(4), np.arange(4), indexing="ij"), -1).reshape(16, 2)
    away = np.linalg.norm(places[:, None] - places[None], axis=-1)
    for weights in expected:
        for head in range(3):
            row, shares = next(rows), weights[:, head]
            assert row.head == head
            entropy = -(shares * np.log(shares)).sum(-1).mean()
            on_patches = shares[:, 1:, 1:]
            distance = ((on_patches * away).sum(-1) / on_patches.sum(-1)).mean()
            assert row.entropy == pytest.approx(entropy, rel=1e-5)
            assert row.distance == pytest.approx(distance, rel=1e-5)
            assert row.class_share == pytest.approx(shares[:, :, 0].mean(), rel=1e-5)
            assert row.register_share is None
            assert row.top_share == pytest.approx(shares.mean(1).max(-1).mean(), rel=1e-5)
            assert not row.is_one_token


def test_calls_of_one_module_are_counted() -> None:
    blocks = tuple(
        AttentionBlock(label, "Lm", "scaled dot product", 1, 4, 4, None, None, None)
        for label in ("(model)", "(model)#1", "other")
    )
    assert census_of(blocks, ()) == "2 of 2 blocks seen, in 3 calls"
    assert census_of(blocks[::2], ()) == "2 of 2 blocks seen"


def test_maps_of_each_query_are_rows_of_the_weights(network: nn.Module, pictures: Tensor) -> None:
    result = hookscope.attention(network, pictures, query=["cls", "mean", "17,9"], head=[0, 2], block=[0, -1])
    expected = weights_of(network, pictures)
    assert len(result.maps) == 2 * 3 * 2 * 2  # inputs, queries, blocks, heads
    for heat_map in result.maps:
        weights = expected[[block.label for block in result.blocks].index(heat_map.block)][
            heat_map.input_index, heat_map.head
        ]
        # Pixel (17, 9) is in row 1 and column 2 of patches of 8 pixels, 1 + 4 + 2 tokens from the first.
        row = {"class token": weights[0], "mean of queries": weights.mean(0), "patch 1,2": weights[7]}[heat_map.query]
        assert np.abs(heat_map.values.reshape(-1) - row[1:]).max() < 1e-6
        assert heat_map.elsewhere == pytest.approx(row[0], abs=1e-6)
        assert heat_map.extent == (0.0, 0.0, 1.0, 1.0)
        assert heat_map.box == ((0.5, 0.25, 0.75, 0.5) if heat_map.query == "patch 1,2" else None)
    patches = next(patch for patch in result.patches if (patch.input_index, patch.block) == (1, result.blocks[1].label))
    assert np.abs(patches.values.reshape(16, 16) - expected[1][1].mean(0)[1:, 1:]).max() < 1e-6


def test_rollout_is_the_product_of_half_identities(network: nn.Module, pictures: Tensor) -> None:
    result = hookscope.attention(network, pictures, rollout=True)
    product = np.eye(17)[None]
    for weights in weights_of(network, pictures):
        product = (0.5 * weights.mean(1) + 0.5 * np.eye(17)) @ product
    for each in (one for one in result.maps if one.block == "rollout"):
        assert np.abs(each.values.reshape(-1) - product[each.input_index, 0, 1:]).max() < 1e-6


def test_a_few_queries_at_a_time_come_to_the_same(
    network: nn.Module, pictures: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = hookscope.attention(network, pictures, query=["cls", "3,30"], rollout=True)
    monkeypatch.setattr(reductions, "_CHUNK_BYTES", 4 * 2 * 3 * 17 * 5)  # five queries of both inputs
    parts = hookscope.attention(network, pictures, query=["cls", "3,30"], rollout=True)
    for one, other in zip(whole.rows, parts.rows, strict=True):
        assert one.entropy == pytest.approx(other.entropy, rel=1e-6)
        assert one.distance == pytest.approx(other.distance, rel=1e-6)
        assert one.top_token == other.top_token
    for first, second in zip(whole.maps, parts.maps, strict=True):
        assert np.abs(first.values - second.values).max() < 1e-6


def test_without_numbers_maps_are_the_same(network: nn.Module, pictures: Tensor) -> None:
    asked = {"query": ["cls", "mean", "17,9"], "block": [0, -1], "head": [0, 2], "rollout": True}
    whole = hookscope.attention(network, pictures, **asked)
    maps = hookscope.attention(network, pictures, **asked, numbers=False)
    assert (maps.rows, maps.patches) == ((), ())
    assert any("Heads were not measured" in note for note in maps.notes)
    assert [heat_map.label for heat_map in maps.maps] == [heat_map.label for heat_map in whole.maps]
    for one, other in zip((*whole.maps, *whole.head_maps), (*maps.maps, *maps.head_maps), strict=True):
        assert np.abs(one.values - other.values).max() < 1e-6


def test_without_numbers_only_rows_that_are_drawn_are_computed(
    network: nn.Module, pictures: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = weights_of(network, pictures)
    monkeypatch.setattr(reductions, "chunks_of", lambda _rows: pytest.fail("all rows are computed"))
    result = hookscope.attention(network, pictures, query=["cls", "17,9"], numbers=False)
    assert [heat_map.query for heat_map in result.maps] == ["class token", "patch 1,2"] * 2
    for heat_map, token in zip(result.maps, (0, 7) * 2, strict=True):
        weights = expected[1][heat_map.input_index].mean(0)
        assert np.abs(heat_map.values.reshape(-1) - weights[token, 1:]).max() < 1e-6


def test_a_network_in_train_mode_is_looked_at_without_dropout_and_left_as_it_was(
    network: nn.Module, pictures: Tensor
) -> None:
    network.train()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    was = torch.backends.mha.get_fastpath_enabled()
    state = torch.get_rng_state()
    result = hookscope.attention(network, pictures, save_tensors=True)
    assert network.training
    assert torch.equal(state, torch.get_rng_state())
    assert torch.backends.mha.get_fastpath_enabled() is was
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())
    for block, weights in zip(result.blocks, weights_of(network, pictures), strict=True):
        assert np.abs(result.tensors[block.label].double().numpy() - weights).max() < 1e-6
    assert result.warnings == ()


def painted(path: Path, corner: tuple[int, int], orientation: int) -> Path:
    """Save a dull picture of 96 x 64 pixels with a red square, stored rotated, that EXIF puts upright."""
    upright = Image.new("RGB", (96, 64), (20, 40, 40))
    upright.paste((255, 0, 0), (corner[0], corner[1], corner[0] + 16, corner[1] + 16))
    turn = {1: None, 3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}
    stored = upright if turn[orientation] is None else upright.transpose(turn[orientation])
    exif = Image.Exif()
    exif[274] = orientation
    stored.save(path, exif=exif)
    assert ImageOps.exif_transpose(Image.open(path)).getpixel((corner[0] + 8, corner[1] + 8)) == (255, 0, 0)
    return path


@pytest.mark.parametrize(("corner", "orientation"), [((16, 0), 6), ((64, 48), 3)])
@pytest.mark.sample("corner0-6")
def test_the_class_token_finds_the_red_square_on_rotated_and_cropped_photographs(
    tmp_path: Path, corner: tuple[int, int], orientation: int
) -> None:
    picture = painted(tmp_path / "red.png", corner, orientation)
    # The input is the middle 64 x 64 of the photograph, halved: a patch is 16 pixels of it.
    result = hookscope.attention(RedSeeker(), picture, resize="32", crop="32", mean="none", std="none", head=0, block=0)
    (actual,) = result.maps
    assert actual.query == "class token"
    expected = (corner[1] // 16, (corner[0] - 16) // 16)
    assert np.unravel_index(actual.values.argmax(), (4, 4)) == expected
    assert actual.values.max() > 0.9
    saved = hookscope.attention(
        RedSeeker(), picture, resize="32", crop="32", mean="none", std="none", head=0, block=0
    ).save(tmp_path / "run")
    drawn = np.asarray(Image.open(next((saved / "overlays").glob("*.png"))).convert("RGB")).astype(int)
    grey = np.asarray(Image.new("RGB", (96, 64), (20, 40, 40))).astype(int)
    assert drawn.shape == grey.shape
    # Of the dull part, what is farthest from a grey photograph is nearest to the square.
    away = np.abs(drawn - drawn[..., :1]).sum(-1).astype(float)
    y, x = np.unravel_index(away.argmax(), away.shape)
    assert corner[0] - 12 <= x < corner[0] + 28
    assert corner[1] - 12 <= y < corner[1] + 28


def test_a_head_that_looks_at_one_token_is_flagged() -> None:
    result = hookscope.attention(RedSeeker(), torch.rand(2, 3, 32, 32))
    assert [row.is_one_token for row in result.rows] == [False, True, False, True]
    assert [row.top_token for row in result.rows[1::2]] == [0, 0]
    assert "2 heads with more than 90% of the weight on one token" in str(result)


class WrittenOut(nn.Module):
    """Attention of 4 heads over what it is given, in place of learned queries, keys and values.

    `mask` is True where a query may look at a key.
    """

    def __init__(self, way: str, mask: Tensor | None = None, window_size: int | None = None) -> None:
        super().__init__()
        self.way, self.mask = way, mask
        if window_size is not None:
            self.window_size = window_size

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = inputs.flatten(1, -2)
        parts = tokens.unflatten(-1, (4, -1)).transpose(1, 2)
        logits = parts @ parts.transpose(-2, -1)
        if self.mask is not None:
            logits = logits.masked_fill(~self.mask, -math.inf)
        if self.way == "folded":
            met = torch.bmm(logits.flatten(0, 1).softmax(-1), parts.flatten(0, 1)).unflatten(0, (-1, 4))
        elif self.way == "cleaned":
            met = torch.nan_to_num(logits.softmax(-1)) @ parts
        else:
            met = logits.softmax(-1) @ parts
        return met.transpose(1, 2).reshape(tokens.shape)

    def expected(self, tokens: Tensor) -> Weights:
        """The weights by NumPy; rows without a key are NaN."""
        parts = tokens.flatten(1, -2).double().unflatten(-1, (4, -1)).transpose(1, 2).numpy()
        logits = parts @ parts.swapaxes(-2, -1)
        if self.mask is not None:
            logits = np.where(self.mask.numpy(), logits, -np.inf)
        with np.errstate(invalid="ignore"):
            powers = np.exp(logits - logits.max(-1, keepdims=True))
        return np.asarray(powers / powers.sum(-1, keepdims=True))


def test_heads_folded_into_the_batch_axis_are_heads_though_nothing_counts_them() -> None:
    """They are no windows: the module is given as many tokens as one of them has."""
    torch.manual_seed(0)
    network, inputs = nn.Sequential(WrittenOut("folded")), torch.randn(2, 7, 16)
    result = hookscope.attention(network, inputs, batch_axis=0, save_tensors=True)
    assert [(block.heads, block.windows, block.keys) for block in result.blocks] == [(4, 1, 7)]
    expected = WrittenOut("folded").expected(inputs).reshape(result.tensors["0"].shape)
    np.testing.assert_allclose(result.tensors["0"], expected, atol=1e-6)


class Blind(nn.Module):
    """A class token and 4 x 4 patches, the first of which may look at nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.first = nn.Conv2d(3, 4, 8, 8), nn.Parameter(torch.randn(1, 1, 4))

    def tokens(self, pictures: Tensor) -> Tensor:
        tokens = self.patches(pictures).flatten(2).transpose(1, 2)
        return torch.cat([self.first.expand(len(tokens), -1, -1), tokens], 1)

    def forward(self, pictures: Tensor) -> Tensor:
        tokens = self.tokens(pictures)[:, None]
        allowed = torch.ones(17, 17, dtype=torch.bool)
        allowed[1] = False
        return torch.nn.functional.scaled_dot_product_attention(tokens, tokens, tokens, attn_mask=allowed)


ONE_ROW_EMPTY = torch.ones(7, 7, dtype=torch.bool).index_fill(0, torch.tensor([1]), value=False)


def test_a_network_that_is_given_two_pictures_may_look_at_the_other() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = SmallTransformer(1), SmallTransformer(1)

        def forward(self, x: Tensor, other: Tensor) -> Tensor:
            return self.first(x) - self.second(other)

    x, other = torch.rand(2, 1, 3, 32, 32)
    notes = hookscope.attention(Towers(), x, input={"other": other}).notes
    assert "given 2 tensors with the axes of a picture: maps are drawn over the first" in " ".join(notes)
    assert hookscope.attention(SmallTransformer(1), x).notes == ()


def test_weights_that_are_nan_are_a_warning_that_names_the_first_block() -> None:
    network = nn.Sequential(WrittenOut("plain"), WrittenOut("plain", ONE_ROW_EMPTY), WrittenOut("plain"))
    result = hookscope.attention(network, torch.randn(2, 7, 16), batch_axis=0)
    assert [math.isnan(row.entropy) for row in result.rows] == [False] * 4 + [True] * 8
    (warning,) = (warning for warning in result.warnings if "NaN" in warning)
    assert warning == (
        "Attention weights of layer 1, the first of 2 blocks, hold NaN: its mask leaves a query no key, or it was "
        "given NaN (`hookscope activations`)."
    )


def test_numbers_of_a_block_are_of_the_inputs_that_it_runs_for() -> None:
    """Tokens are equal, so that each has a seventh of the weight, and entropies are log 7."""
    blocks = {"first": WrittenOut("plain"), "second": WrittenOut("plain")}
    network = Written(lambda net, x: net.second(net.first(x)) if x.mean() > 0 else net.first(x), **blocks)
    inputs = torch.stack([torch.ones(7, 16), -torch.ones(7, 16), torch.ones(7, 16)])
    result = hookscope.attention(network, inputs, batch_axis=0, batch_size=1)
    assert [row.entropy for row in result.rows] == pytest.approx([math.log(7)] * 8)
    assert [row.top_share for row in result.rows] == pytest.approx([1 / 7] * 8)


@pytest.mark.parametrize("options", [{"add_zero_attn": True}, {"add_bias_kv": True, "add_zero_attn": True}])
def test_keys_that_torch_appends_lie_behind_the_patches_and_on_none(options: dict[str, bool], pictures: Tensor) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(12, 3, batch_first=True, **options)
    network = Written(
        lambda net, x: net.layer(*[net.patches(x).flatten(2).mT] * 3)[0], patches=nn.Conv2d(3, 12, 8, 8), layer=layer
    )
    (heat_map, _) = hookscope.attention(network, pictures, query="mean").maps
    tokens = network.patches(pictures).flatten(2).mT
    expected = layer(tokens, tokens, tokens)[1][0].mean(0).detach()
    assert np.allclose(heat_map.values.ravel(), expected[:16], atol=1e-6)
    assert heat_map.elsewhere == pytest.approx(float(expected[16:].sum()), abs=1e-6)


class Skipping(SmallTransformer):
    """Its first layer takes bright pictures only."""

    def forward(self, pictures: Tensor) -> Tensor:
        tokens = self.patches(pictures).flatten(2).transpose(1, 2)
        for layer in [*self.layers] if pictures.mean() > 0 else [self.layers[1]]:
            tokens = layer(tokens)
        return tokens.mean(1)


def test_maps_of_heads_are_of_their_block_where_an_input_skips_another() -> None:
    pictures = torch.stack([torch.ones(3, 32, 32), -torch.ones(3, 32, 32)])
    result = hookscope.attention(Skipping(), pictures, batch_size=1)
    drawn = [(maps.input_index, result.blocks[maps.index].label) for maps in result.head_maps]
    assert drawn == [(0, "layers.0.self_attn"), (0, "layers.1.self_attn"), (1, "layers.1.self_attn")]


def test_a_position_is_the_same_block_for_every_input() -> None:
    inputs = torch.stack([torch.full((3, 32, 32), value) for value in (-1.0, 1.0)])
    result = hookscope.attention(Skipping(), inputs, block=[0, -1], batch_size=1)
    by_input = [[heat_map.block for heat_map in result.maps if heat_map.input_index == index] for index in (0, 1)]
    assert [block.label for block in result.blocks] == ["layers.1.self_attn", "layers.0.self_attn"]
    assert by_input == [["layers.1.self_attn"], ["layers.1.self_attn"]]  # the last of an input is that input's


def test_patches_that_do_not_fill_the_picture_leave_a_margin(network: nn.Module) -> None:
    pictures = torch.randn(1, 3, 37, 34)  # 4 x 4 patches of 8 pixels
    result = hookscope.attention(network, pictures, query=["cls", "31,31"])
    [classes, patch] = result.maps
    assert classes.extent == (0.0, 0.0, 32 / 37, 32 / 34)
    assert "patch" in patch.query
    with pytest.raises(UsageError, match="lies in the margin of tensor that no patch covers"):
        hookscope.attention(network, pictures, query="5,35")
    with pytest.raises(UsageError, match="lies outside of what the network sees"):
        hookscope.attention(network, pictures, query="5,37")


def test_a_query_that_is_given_twice_is_drawn_once(network: nn.Module, pictures: Tensor) -> None:
    result = hookscope.attention(network, pictures[:1], query=["cls", "mean", "cls"])
    assert [heat_map.query for heat_map in result.maps] == ["class token", "mean of queries"]


def test_a_query_that_may_look_at_nothing_has_no_weight_on_other_tokens_either() -> None:
    """Its weights are zeros, as from torch's kernels; all others may look at all."""
    torch.manual_seed(0)
    network = Blind()
    pictures = torch.randn(1, 3, 32, 32)
    blind, seeing, mean = hookscope.attention(network, pictures, query=["0,0", "9,0", "mean"]).maps
    assert (blind.values.max(), blind.elsewhere) == (0.0, 0.0)
    tokens = network.tokens(pictures).detach().double().numpy()[0]
    powers = np.exp(tokens @ tokens.T / 2)
    weights = powers / powers.sum(-1, keepdims=True)
    weights[1] = 0.0
    assert seeing.elsewhere == pytest.approx(weights[2, 0], abs=1e-6)
    assert mean.elsewhere == pytest.approx(weights.mean(0)[0], abs=1e-6)
    assert np.abs(mean.values.reshape(-1) - weights.mean(0)[1:]).max() < 1e-6


def test_weights_whose_nan_the_network_replaces_are_seen_as_it_uses_them() -> None:
    torch.manual_seed(0)
    network, inputs = nn.Sequential(WrittenOut("cleaned", ONE_ROW_EMPTY)), torch.randn(2, 7, 16)
    result = hookscope.attention(network, inputs, batch_axis=0, save_tensors=True)
    expected = np.nan_to_num(WrittenOut("cleaned", ONE_ROW_EMPTY).expected(inputs))
    np.testing.assert_allclose(result.tensors["0"], expected, atol=1e-6)
    assert not any("NaN" in warning for warning in result.warnings)


def test_a_block_whose_windows_have_size_0_has_the_whole_map() -> None:
    """As SAM's blocks of global attention say it."""
    network, inputs = nn.Sequential(WrittenOut("plain", window_size=0)), torch.randn(2, 3, 5, 16)
    result = hookscope.attention(network, inputs, batch_axis=0, save_tensors=True)
    assert [(block.heads, block.windows, block.keys) for block in result.blocks] == [(4, 1, 15)]
    np.testing.assert_allclose(result.tensors["0"], WrittenOut("plain").expected(inputs), atol=1e-6)


# --- What is not seen ---


def test_a_network_that_is_seen_in_part_says_which_block_is_not(pictures: Tensor) -> None:
    torch.manual_seed(0)
    result = hookscope.attention(HalfSeen(), pictures)
    assert result.census == (
        "1 of 2 blocks seen; not seen: linear: no softmax over keys that torch functions show (linear attention, a "
        "softmax written out or over another axis than the last, or a custom kernel)"
    )
    with pytest.raises(UsageError, match="`rollout` is undefined here: 1 of 2 blocks seen"):
        hookscope.attention(HalfSeen(), pictures, rollout=True)


@pytest.mark.exhaustive  # torch traces it
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_named_as_not_seen() -> None:
    with pytest.raises(NothingMatchedError, match=r"0 of 1 block seen; not seen: 0: flex attention\. See"):
        hookscope.attention(nn.Sequential(FlexAttention()), torch.randn(1, 16, 8))


class Nested(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        parts = torch.nested.nested_tensor([tokens[0, None, :3], tokens[1, None]])
        return torch.nn.functional.scaled_dot_product_attention(parts, parts, parts).to_padded_tensor(0.0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_torchs_attention_is_a_block_whatever_the_module_is_called() -> None:
    with pytest.raises(NothingMatchedError, match=r"0 of 1 block seen; not seen: 0: it runs over nested tensors"):
        hookscope.attention(nn.Sequential(Nested()), torch.randn(2, 6, 8), batch_axis=0)


def test_maps_may_be_rolled_along_one_axis(pictures: Tensor) -> None:
    class Rolled(SmallTransformer):
        def forward(self, image: Tensor) -> Tensor:
            return super().forward(image.roll(1, 3))

    rolled = hookscope.attention(network := Rolled(), pictures).rows[0]
    shares = weights_of(network, pictures)[0][:, 0]
    assert rolled.entropy == pytest.approx(-(shares * np.log(shares)).sum(-1).mean(), rel=1e-5)


@pytest.mark.parametrize("cut", [(slice(0), slice(None)), (slice(None), slice(0))], ids=["no-input", "no-token"])
def test_attention_over_nothing_is_left_out(cut: tuple[slice, slice]) -> None:
    def forward(_: object, x: Tensor) -> Tensor:
        part = x[cut]
        empty = torch.nn.functional.scaled_dot_product_attention(part, part, part)
        return torch.nn.functional.scaled_dot_product_attention(x, x, x) + empty.sum()

    (block,) = hookscope.attention(Written(forward), torch.randn(2, 5, 8)).blocks
    assert block.label == "(model)"


def test_a_network_without_attention_is_refused(pictures: Tensor) -> None:
    with pytest.raises(NothingMatchedError, match=r"^No attention found in ") as refused:
        hookscope.attention(nn.Sequential(nn.Conv2d(3, 4, 3)), pictures)
    assert refused.value.exit_code == 5


def test_nan_in_one_head_of_a_block_shows_in_its_row_and_counts_once() -> None:
    class Broken(SeekingBlock):
        def forward(self, tokens: Tensor) -> Tensor:
            query = torch.zeros(len(tokens), 2, tokens.size(1), 4)
            query[:, 1] = torch.nan
            value = tokens[:, None].expand(-1, 2, -1, -1)
            return tokens + 0 * F.scaled_dot_product_attention(query, query, value)[:, 0]

    network = RedSeeker()
    network.blocks[1] = Broken()
    looks = hookscope.attention(network, torch.rand(1, 3, 32, 32), rollout=True)
    assert math.isfinite(looks.rows[2].entropy)
    assert math.isnan(looks.rows[3].entropy)
    assert [warning.partition(":")[0] for warning in looks.warnings] == ["Attention weights of blocks.1 hold NaN"]
    entropy = next(column for column in block_columns(looks) if column.title == "entropy")
    assert entropy.cell(looks.blocks[1]) == "NaN"


@pytest.mark.parametrize("block", ["blocks.1", 1])
def test_an_input_that_does_not_run_the_wanted_block_has_no_map_and_the_others_have(block: str | int) -> None:
    class Skips(RedSeeker):
        def forward(self, pictures: Tensor) -> Tensor:
            if pictures.mean() > 0.5:
                return super().forward(pictures)
            tokens: Tensor = self.blocks[0](self.patches(pictures).flatten(2).transpose(1, 2))
            return tokens[:, 0]

    bright, dark = torch.full((3, 32, 32), 0.9), torch.full((3, 32, 32), 0.1)
    for pictures in ([bright, dark], [dark, bright]):
        looks = hookscope.attention(Skips(), torch.stack(pictures), block=block, batch_size=1)
        assert [heat_map.input_index for heat_map in looks.maps] == [
            at for at, picture in enumerate(pictures) if picture is bright
        ]
    with pytest.raises(LayerNotFoundError, match=r"There is no block 'blocks\.1'"):
        hookscope.attention(Skips(), dark[None], block="blocks.1")


def test_an_input_whose_queries_look_at_no_patch_does_not_hide_the_distances_of_others() -> None:
    class LooksAway(nn.Module):
        """On dark pictures, all tokens look at the class token alone."""

        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, 4, 8, 8)

        def forward(self, pictures: Tensor) -> Tensor:
            tokens = self.patches(pictures).flatten(2).transpose(1, 2)
            tokens = torch.cat([torch.zeros_like(tokens[:, :1]), tokens], 1)[:, None]
            mask = torch.zeros(len(pictures), 1, 17, 17)
            mask[pictures.amax((1, 2, 3)) == 0, :, :, 1:] = -1e9
            return F.scaled_dot_product_attention(tokens, tokens, tokens, attn_mask=mask)[:, 0, 0]

    network, picture = LooksAway(), torch.rand(1, 3, 32, 32)
    ((alone,), (both,)) = (
        hookscope.attention(network, inputs).rows
        for inputs in (picture, torch.cat([picture, torch.zeros_like(picture)]))
    )
    assert alone.distance is not None
    assert both.distance == pytest.approx(alone.distance)
    assert both.entropy == pytest.approx(alone.entropy / 2)


def test_the_softmax_that_a_network_ends_in_is_no_attention_whatever_the_network_is_called(pictures: Tensor) -> None:
    class AttentionNet(SmallTransformer):
        def forward(self, pictures: Tensor) -> Tensor:
            scores: Tensor = super().forward(pictures).softmax(-1)
            return scores

    assert hookscope.attention(AttentionNet(), pictures, rollout=True).census == "2 of 2 blocks seen"


@pytest.mark.parametrize("empty", ["queries", "keys"])
def test_a_block_without_queries_or_keys_is_not_seen_and_the_others_are(pictures: Tensor, empty: str) -> None:
    class Crosses(SmallTransformer):
        def forward(self, pictures: Tensor) -> Tensor:
            tokens = self.layers[0](self.patches(pictures).flatten(2).transpose(1, 2))[:, None]
            queries, keys = (tokens[:, :, :0] if part == empty else tokens for part in ("queries", "keys"))
            return F.scaled_dot_product_attention(queries, keys, keys).sum((1, 2))

    looks = hookscope.attention(Crosses(1), pictures, block=0)
    assert looks.census == "1 of 2 blocks seen; not seen: (model): its queries or keys are empty"
    assert [row.block for row in looks.rows] == ["layers.0.self_attn"] * 3


@pytest.mark.filterwarnings("ignore:`?torch.jit")
def test_a_network_of_torchscript_is_refused_as_such() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 3)))
    with pytest.raises(NothingMatchedError, match="the calls of TorchScript are not shown"):
        hookscope.attention(scripted, torch.rand(1, 3, 32, 32))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"query": "register:1"}, UsageError, "no block that was asked for"),
        (
            {"query": "32,5"},
            UsageError,
            r"of tensor\[0\]: x from 0 to 31, y from 0 to 31",
        ),
        ({"query": "left"}, UsageError, "'left' is not possible: give cls, register:1"),
        ({"head": 3}, UsageError, "has 3 heads, counted from 0"),
        ({"head": [0, -1]}, UsageError, "`head` -1 is not possible: give 0 or more"),
        ({"head": True}, UsageError, "`head` takes a whole number or a list of whole numbers, not type bool"),
        ({"block": 2}, LayerNotFoundError, "There is no block 2: 2 blocks seen, counted from 0"),
        ({"block": "layers.1.selfattn"}, LayerNotFoundError, "layers.1.self_attn"),
        ({"tokens": "4x4"}, UsageError, "is not of the form"),
        ({"tokens": "grid=16"}, UsageError, "`tokens` grid=16 does not fit a picture: give grid=HEIGHTxWIDTH"),
    ],
)
def test_options_that_cannot_be_right_are_refused(
    network: nn.Module, pictures: Tensor, options: dict[str, str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        hookscope.attention(network, pictures, **options)  # type: ignore[arg-type]


def timm_network(name: str, **options: object) -> nn.Module:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    made: nn.Module = timm.create_model(name, **options)
    return made


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "options", "size", "census"),
    [
        ("xcit_nano_12_p16_224", {"depth": 2}, 224, "2 of 4 blocks seen; not seen: blocks.0.attn, blocks.1.attn: its"),
        ("volo_d1_224", {"img_size": 64}, 64, "16 of 20 blocks seen; not seen: network.0.0.attn"),
        ("davit_tiny", {}, 64, "6 of 12 blocks seen"),
        ("hiera_tiny_224", {}, 224, "12 of 12 blocks seen"),
    ],
)
def test_attention_over_channels_and_neighbours_is_not_drawn(
    name: str, options: dict[str, object], size: int, census: str
) -> None:
    result = hookscope.attention(timm_network(name, **options), torch.randn(2, 3, size, size))
    assert result.census.startswith(census)
    if name.startswith("hiera"):
        assert not result.maps
        assert "unrolled" in result.blocks[0].remark


@pytest.mark.exhaustive
def test_a_network_of_linear_attention_is_refused_with_its_blocks() -> None:
    with pytest.raises(NothingMatchedError, match=r"0 of 4 blocks seen; not seen: stages\.2\.blocks\.1"):
        hookscope.attention(timm_network("efficientvit_b0"), torch.randn(1, 3, 64, 64))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        (
            "lambda_resnet26t",
            224,
            r"0 of 3 blocks seen; .*: its softmax is for each of 16 channels, not for each token",
        ),
        ("halonet26t", 256, r"0 of 3 blocks seen; .*: its softmax is over 144 keys that are not known to be tokens"),
        ("seresnet33ts", 64, "No attention found in"),  # its gates are called attn
    ],
)
def test_what_is_called_attention_and_looks_at_no_tokens_is_not_drawn(name: str, size: int, message: str) -> None:
    with pytest.raises(NothingMatchedError, match=message):
        hookscope.attention(timm_network(name), torch.randn(1, 3, size, size))


@pytest.mark.exhaustive
def test_windows_of_sam_have_numbers_of_every_head_and_in_words_no_map() -> None:
    network = timm_network("samvit_base_patch16", depth=2, img_size=256, global_attn_indexes=(0,))
    result = hookscope.attention(network, torch.randn(1, 3, 256, 256))
    shapes = [(block.windows, block.heads, block.keys, block.key_grid) for block in result.blocks]
    assert shapes == [(1, 12, 256, (16, 16)), (4, 12, 196, None)]
    assert (len(result.rows), result.maps) == (24, ())
    unplaced = "blocks.1.attn has no map: it is not known where its windows lie on the picture."
    assert result.notes == (unplaced, "blocks.0.attn has a map: `block` 0.")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "pvt_v2_b0", "cait_xxs24_224"])
def test_rollout_is_refused_where_it_means_nothing(name: str) -> None:
    options = {"img_size": 64, "depth": 2} if name.startswith("cait") else {}
    size = 64 if options or name.startswith("pvt") else 224
    with pytest.raises(UsageError, match=r"`rollout` is undefined here: .*(windows|different tokens|pools)"):
        hookscope.attention(timm_network(name, **options), torch.randn(1, 3, size, size), rollout=True)


# --- Windows ---


def of_swin(library: str, size: int) -> nn.Module:
    torch.manual_seed(0)
    if library == "torchvision":
        models = pytest.importorskip("torchvision").models
        made: nn.Module = models.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4])
        return made
    if library == "timm":
        options = {"window_size": 4, "depths": (2, 2), "num_heads": (2, 4), "embed_dim": 16}
        return timm_network("swin_tiny_patch4_window7_224", img_size=size, **options)
    transformers = pytest.importorskip("transformers")
    options = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "image_size": size}
    hugging: nn.Module = transformers.SwinModel(transformers.SwinConfig(**options))
    return hugging


@pytest.mark.exhaustive
@pytest.mark.parametrize(("library", "size"), [("torchvision", 72), ("timm", 72), ("transformers", 64)])
def test_windows_of_swin_are_put_back_where_they_lie(library: str, size: int) -> None:
    """Where they lie is counted here token by token, from the definition of the shift."""
    network, picture = of_swin(library, size), torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(5))
    side = size // 4
    pixel = (4 * (side - 2) + 1, 4 * 1 + 2)  # column side - 2, row 1
    result = hookscope.attention(
        network, picture, query=[f"{pixel[0]},{pixel[1]}", "mean"], block=[0, 1], save_tensors=True
    )
    assert result.census == "4 of 4 blocks seen"
    padded = -(-side // 4) * 4
    for number, shift in ((0, 0), (1, 2)):
        block = result.blocks[number]
        assert (block.key_grid, block.windows) == ((side, side), (padded // 4) ** 2)
        weights = result.tensors[block.label][0].double().numpy()  # (windows, heads, 16, 16)
        # timm shifts the map before it is padded, the others after.
        period = side if library == "timm" else padded
        token_at = {}
        for row in range(side):
            for column in range(side):
                down, across = (row - shift) % period, (column - shift) % period
                window = down // 4 * (padded // 4) + across // 4
                token_at[row, column] = (window, down % 4 * 4 + across % 4)
        ours = {heat_map.query: heat_map.values for heat_map in result.maps if heat_map.block == block.label}
        window, token = token_at[1, side - 2]
        expected = np.zeros((side, side))
        mean = np.zeros((side, side))
        for (row, column), (other, key) in token_at.items():
            if other == window:
                expected[row, column] = weights[window, :, token, key].mean()
            mean[row, column] = weights[other, :, :, key].mean() / len(weights)
        assert np.abs(ours[f"patch 1,{side - 2}"] - expected).max() < 1e-6
        assert np.abs(ours["mean of queries"] - mean).max() < 1e-6


def test_the_patch_under_a_pixel_lies_there_where_the_grid_extends_beyond_the_picture() -> None:
    # Patches of 4 pixels are 50x50; merged twice, with rows and columns added, 13x13: each is 16 pixels wide.
    options = {"batch_axis": 0, "verify": False, "block": "features.5.0.attn", "query": "95,111"}
    result = hookscope.attention(torchvision.models.swin_t(), torch.zeros(1, 3, 200, 200), **options)
    (drawn,) = result.maps
    assert (drawn.query, drawn.values.shape) == ("patch 6,5", (13, 13))
    assert drawn.box == pytest.approx((80 / 200, 96 / 200, 96 / 200, 112 / 200))


@pytest.mark.exhaustive
def test_keys_on_a_coarser_grid_have_maps_of_that_grid() -> None:
    result = hookscope.attention(timm_network("pvt_v2_b0"), torch.randn(1, 3, 64, 64), block=0, save_tensors=True)
    block = result.blocks[0]
    assert (block.query_grid, block.key_grid) == ((16, 16), (2, 2))
    weights = result.tensors[block.label][0].double().numpy()
    assert np.abs(result.maps[0].values.reshape(-1) - weights.mean((0, 1))).max() < 1e-6
    rows = np.arange(16) + 0.5
    keys = np.array([4.0, 12.0])  # the middles of halves, in patches of the queries
    places = np.stack(np.meshgrid(rows, rows, indexing="ij"), -1).reshape(256, 2)
    coarse = np.stack(np.meshgrid(keys, keys, indexing="ij"), -1).reshape(4, 2)
    away = np.linalg.norm(places[:, None] - coarse[None], axis=-1)
    assert result.rows[0].distance == pytest.approx((weights[0] * away).sum(-1).mean(), rel=1e-5)


@pytest.mark.exhaustive
def test_the_only_query_of_a_pooling_layer_has_a_map() -> None:
    network = timm_network("vit_base_patch16_siglip_224", img_size=64, depth=1)
    result = hookscope.attention(network, torch.randn(1, 3, 64, 64), query=["cls", "mean"], save_tensors=True)
    block = result.blocks[-1]
    assert (block.label, block.queries, block.keys, block.query_grid, block.key_grid) == (
        "attn_pool",
        1,
        16,
        None,
        (4, 4),
    )
    weights = result.tensors["attn_pool"][0, :, 0].double().numpy()
    assert [heat_map.query for heat_map in result.maps] == ["pooling query", "mean of queries"]
    for heat_map in result.maps:
        assert np.abs(heat_map.values.reshape(-1) - weights.mean(0)).max() < 1e-6
    assert result.rows[-1].distance is None


@pytest.mark.exhaustive
def test_registers_have_queries_and_shares_of_their_own() -> None:
    network = timm_network("vit_small_patch14_reg4_dinov2", img_size=56, depth=2)
    with torch.no_grad():
        network.reg_token.normal_()  # type: ignore[operator, union-attr]
        network.cls_token.normal_()  # type: ignore[operator, union-attr]
    asked: list[str] = ["cls", "register:1", "register:4"]
    result = hookscope.attention(network, torch.randn(1, 3, 56, 56), query=asked, save_tensors=True)
    weights = result.tensors[result.blocks[1].label][0].double().numpy()
    for heat_map, token in zip(result.maps, (0, 1, 4), strict=True):
        assert np.abs(heat_map.values.reshape(-1) - weights[:, token, 5:].mean(0)).max() < 1e-6
    row = result.rows[6]
    assert row.class_share == pytest.approx(weights[0, :, 0].mean(), rel=1e-5)
    assert row.register_share == pytest.approx(weights[0, :, 1:5].sum(-1).mean(), rel=1e-5)
    with pytest.raises(UsageError, match="no block that was asked for"):
        hookscope.attention(network, torch.randn(1, 3, 56, 56), query="register:5")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("library", "layer"), [("timm", "attn.proj"), ("transformers", "attention.o_proj")])
def test_what_layers_inside_of_windows_return_lies_on_the_picture(library: str, layer: str) -> None:
    """The output is replaced by numbers of tokens: the map must have each number where its token lies."""
    network = of_swin(library, 64)
    blocks = network.layers[0].blocks if library == "timm" else network.encoder.layers[0].blocks  # type: ignore[index, union-attr]
    prefix = "layers.0.blocks" if library == "timm" else "encoder.layers.0.blocks"
    for number, shift in ((0, 0), (1, 2)):
        expected = np.zeros((16, 16))  # windows are numbered row by row, and tokens in them
        for row in range(16):
            for column in range(16):
                down, across = (row - shift) % 16, (column - shift) % 16
                expected[row, column] = (down // 4 * 4 + across // 4) * 16 + down % 4 * 4 + across % 4
        name = f"{prefix}.{number}.{layer}"
        numbers = torch.arange(256.0).reshape(16, 16, 1).expand(-1, -1, 16)

        def numbered(_module: nn.Module, _args: object, output: Tensor, numbers: Tensor = numbers) -> Tensor:
            return output * 0 + numbers.repeat(len(output) // 16, 1, 1)

        handle = blocks[number].get_submodule(layer).register_forward_hook(numbered)  # type: ignore[index, operator, union-attr]
        pictures = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
        run = hookscope.activations(network, pictures, layer=name, grids_for=2)
        handle.remove()
        for maps in run.feature_maps:
            assert maps.arrangement == "maps"
            assert np.array_equal(maps.values[3], expected)
        assert [maps.input_index for maps in run.feature_maps] == [0, 1]


PEAK = """
import re, sys, torch, timm, hookscope
torch.manual_seed(0)
torch.set_num_threads(1)
hookscope.attention(timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1), torch.randn(1, 3, 32, 32))
network = timm.create_model("vit_base_patch14_dinov2", img_size=518, depth=2).eval()
picture = torch.randn(1, 3, 518, 518)
if sys.argv[1] == "plain":
    with torch.no_grad():
        network(picture)
else:
    result = hookscope.attention(network, picture, save_tensors=True)
    assert (result.census, result.blocks[0].keys) == ("2 of 2 blocks seen", 1370)
print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peaks are read from /proc")
def test_518_pixels_take_less_than_100_mb_more_than_the_plain_pass(tmp_path: Path, fork_server: ForkServer) -> None:
    """All weights of ViT-B/14 there are 90 MB a block."""

    def peak_megabytes(way: str) -> float:
        done = fork_server.run("-c", PEAK, way, cwd=tmp_path, environment=os.environ)
        return int(done.stdout) / 1000

    plain = peak_megabytes("plain")
    assert peak_megabytes("saved") - plain < 100
