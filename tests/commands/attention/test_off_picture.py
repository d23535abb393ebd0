"""Tokens that are as many as the patches of a picture, and do not lie on it: they have numbers, and no map."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hookscope
from hookscope.errors import NothingMatchedError, UsageError

PICTURES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, tokens: Tensor, key_value_states: Tensor | None = None) -> Tensor:
        query, key, value = self.project(tokens).chunk(3, -1)
        if key_value_states is not None:
            key, value = self.project(key_value_states).chunk(3, -1)[1:]
        query, key, value = (case.unflatten(-1, (2, 4)).transpose(1, 2) for case in (query, key, value))
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


class Vision(nn.Module):
    """Patches of 8 pixels: 4 x 4 of a picture of 32 x 32."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.attention = nn.Conv2d(3, 8, 8, 8), Attention()

    def forward(self, pixels: Tensor) -> Tensor:
        tokens: Tensor = self.attention(self.patches(pixels).flatten(2).transpose(1, 2))
        return tokens


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.attention = nn.Embedding(50, 8), Attention()

    def forward(self, ids: Tensor) -> Tensor:
        tokens: Tensor = self.attention(self.words(ids))
        return tokens


class TwoTowers(nn.Module):
    """As CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.vision, self.text = Vision(), Text()

    def forward(self, pixels: Tensor, ids: Tensor) -> Tensor:
        return self.vision(pixels).mean(1) @ self.text(ids).mean(1).T


@pytest.mark.parametrize("words", [16, 17])
def test_words_do_not_lie_on_the_picture_that_another_tower_was_given(words: int) -> None:
    """16 are as many as patches, 17 as patches and a class token; the last block, which is drawn, is the text's."""
    options = {"pixels": PICTURES, "ids": torch.randint(0, 50, (2, words))}
    result = hookscope.attention(TwoTowers(), input=options)
    assert result.census == "2 of 2 blocks seen"
    assert [(block.query_grid, block.key_grid) for block in result.blocks] == [((4, 4), (4, 4)), (None, None)]
    assert [row.distance is None for row in result.rows] == [False, False, True, True]
    assert result.maps == ()
    assert f"text.attention has no map: its {words} keys are words, which have no place on a picture" in result.notes[0]
    assert result.notes[1] == "vision.attention has a map: `block` 0."
    (actual, _) = hookscope.attention(TwoTowers(), input=options, block=0).maps
    assert (actual.block, actual.values.shape) == ("vision.attention", (4, 4))


def test_a_user_who_knows_better_places_words() -> None:
    """Such as codes of a picture's patches."""
    result = hookscope.attention(nn.Sequential(Text()), input_shape="1,16:int64<50", tokens="grid=4x4")
    assert result.blocks[0].key_grid == (4, 4)
    assert len(result.maps) == 1


class WrittenLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross = Attention(), Attention()

    def forward(self, hidden_states: Tensor, position: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        tokens: Tensor = self.cross(self.own(hidden_states + position), key_value_states=encoder_hidden_states)
        return tokens


class Detector(nn.Module):
    """As DETR: learned queries look at each other, then at the patches."""

    def __init__(self, queries: int, way: str) -> None:
        super().__init__()
        self.vision, self.queries, self.way = Vision(), nn.Parameter(torch.randn(1, queries, 8)), way
        torchs = nn.TransformerDecoderLayer(8, 2, 16, batch_first=way == "batch first")
        self.layer: nn.Module = WrittenLayer() if way == "written out" else torchs

    def forward(self, pixels: Tensor) -> Tensor:
        memory = self.vision(pixels)
        queries = self.queries.expand(len(pixels), -1, -1)
        if self.way == "batch second":
            queries, memory = queries.transpose(0, 1), memory.transpose(0, 1)
        arguments = (queries, queries, memory) if self.way == "written out" else (queries, memory)
        actual: Tensor = self.layer(*arguments)
        return actual.transpose(0, 1) if self.way == "batch second" else actual


@pytest.mark.parametrize(
    ("queries", "way"), [(4, "batch first"), (16, "batch second"), (16, "written out"), (17, "batch first")]
)
def test_queries_of_a_decoder_do_not_lie_on_the_picture(queries: int, way: str) -> None:
    """4 are as many as patches of the halved grid, 16 as patches, 17 as patches and a class token."""
    network = Detector(queries, way)
    result = hookscope.attention(network, PICTURES, query="mean", block=[1, 2], save_tensors=True)
    grids = [(block.query_grid, block.key_grid) for block in result.blocks]
    assert grids == [((4, 4), (4, 4)), (None, None), (None, (4, 4))]
    reason = f"has no map: its {queries} keys are tokens of a decoder, which have no place on the picture."
    assert [reason in note for note in result.notes] == [True]
    assert [heat_map.block for heat_map in result.maps] == [result.blocks[2].label] * 2
    weights = result.tensors[result.blocks[2].label].double().numpy()
    for heat_map in result.maps:
        expected = weights[heat_map.input_index].mean((0, 1))
        np.testing.assert_allclose(heat_map.values.reshape(-1), expected, atol=1e-6)


def test_attention_is_not_followed_from_the_picture_to_other_tokens_though_as_many() -> None:
    options = {"pixels": PICTURES, "ids": torch.randint(0, 50, (2, 16))}
    with pytest.raises(UsageError, match=r"text\.attention looks at other tokens than the blocks before it\."):
        hookscope.attention(TwoTowers(), input=options, rollout=True)
    with pytest.raises(UsageError, match=r"layer\.self_attn looks at other tokens than the blocks before it\."):
        hookscope.attention(Detector(16, "batch first"), PICTURES, rollout=True)


# --- No attention over tokens ---


class LinearOfChannels(nn.Module):
    """Shen et al. 2021, Efficient Attention, as in diffusion networks: softmax over tokens, for each channel."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.project = way, nn.Conv2d(8, 36, 1)

    def forward(self, maps: Tensor) -> Tensor:
        query, key, value = (part.flatten(2).unflatten(1, (2, 6)) for part in self.project(maps).chunk(3, 1))
        query, key = query.softmax(-2), key.softmax(-1)
        by_einsum = torch.einsum("bhdn,bhen->bhde", key, value) if self.way == "einsum" else None
        met = key @ value.transpose(-2, -1) if by_einsum is None else by_einsum
        mixed: Tensor = torch.einsum("bhde,bhdn->bhen", met, query)
        return mixed


@pytest.mark.parametrize("way", ["einsum", "matmul"])
def test_a_softmax_for_each_channel_is_linear_attention(way: str) -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 8, 8))
    network.add_module("attention", LinearOfChannels(way))
    with pytest.raises(NothingMatchedError) as refused:
        hookscope.attention(network, PICTURES)
    assert "0 of 1 block seen; not seen: attention: its softmax is for each of 6 channels" in str(refused.value)


class OverChannels(nn.Module):
    """El-Nouby et al. 2021, XCiT: channels look at channels, here as many as tokens."""

    num_heads = 2

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, tokens: Tensor) -> Tensor:
        parts = (part.unflatten(-1, (2, 4)).permute(0, 2, 3, 1) for part in self.project(tokens).chunk(3, -1))
        query, key, value = parts  # (N, heads, channels, tokens)
        return (query @ key.mT).softmax(-1) @ value


def test_channels_that_are_as_many_as_tokens_are_told_from_them() -> None:
    network = nn.Sequential()
    network.add_module("attention", OverChannels())
    with pytest.raises(NothingMatchedError, match=r"not seen: attention: its softmax is over 4 channels, not over tok"):
        hookscope.attention(network, torch.randn(2, 4, 8), batch_axis=0)


class SEModule(nn.Module):
    """Hu et al. 2018, squeeze and excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Conv2d(8, 8, 1)

    def forward(self, maps: Tensor) -> Tensor:
        return maps * self.fc(maps.mean((2, 3), keepdim=True)).sigmoid()


def test_gates_over_channels_are_no_blocks_though_networks_call_them_attention() -> None:
    gated = nn.Sequential(nn.Conv2d(3, 8, 8, 8))
    gated.add_module("attn", SEModule())
    with pytest.raises(NothingMatchedError, match="No attention found in"):
        hookscope.attention(gated, PICTURES)


class WindowsAndHeads(nn.Module):
    """As SAM: heads of windows in one axis."""

    num_heads = 2

    def forward(self, tokens: Tensor) -> Tensor:
        windows = tokens.reshape(-1, 4, 8)
        heads = windows.unflatten(-1, (2, 4)).transpose(1, 2).flatten(0, 1)
        return F.scaled_dot_product_attention(heads, heads, heads)


def test_heads_of_windows_in_one_axis_are_heads() -> None:
    tokens = torch.randn(3, 12, 8, generator=torch.Generator().manual_seed(4))
    result = hookscope.attention(nn.Sequential(WindowsAndHeads()), tokens, batch_axis=0, save_tensors=True)
    assert [(block.windows, block.heads, block.keys) for block in result.blocks] == [(3, 2, 4)]
    parts = tokens.double().numpy().reshape(3, 3, 4, 2, 4).transpose(0, 1, 3, 2, 4)
    powers = np.exp(parts @ parts.swapaxes(-2, -1) / 2)
    np.testing.assert_allclose(result.tensors["0"], powers / powers.sum(-1, keepdims=True), atol=1e-6)


class HeadsInFront(nn.Module):
    """Queries, keys and values are (heads, N, T, D); how many heads there are, it does not say."""

    def __init__(self, heads: int, way: str) -> None:
        super().__init__()
        self.project, self.count, self.way = nn.Linear(8, 24), heads, way

    def forward(self, tokens: Tensor) -> Tensor:
        parts = (part.unflatten(-1, (self.count, -1)).permute(2, 0, 1, 3) for part in self.project(tokens).chunk(3, -1))
        query, key, value = parts
        if self.way == "fused":
            return F.scaled_dot_product_attention(query, key, value).permute(1, 2, 0, 3).flatten(2)
        weights = (query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5).softmax(-1)
        return (weights @ value).permute(1, 2, 0, 3).flatten(2)


@pytest.mark.parametrize("way", ["fused", "written out"])
@pytest.mark.parametrize(("inputs", "heads"), [(1, 4), (3, 2), (4, 4)])
def test_heads_in_front_of_inputs_are_heads(inputs: int, heads: int, way: str) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(HeadsInFront(heads, way))
    tokens = torch.randn(inputs, 6, 8)
    result = hookscope.attention(network, tokens, batch_axis=0, save_tensors=True)
    assert [(block.windows, block.heads, block.keys) for block in result.blocks] == [(1, heads, 6)]
    with torch.no_grad():
        query, key, _ = (
            network[0].project(tokens).double().numpy().reshape(inputs, 6, 3, heads, -1).transpose(2, 0, 3, 1, 4)
        )  # type: ignore[operator, union-attr]
    powers = np.exp(query @ key.swapaxes(-2, -1) / (8 // heads) ** 0.5)
    np.testing.assert_allclose(result.tensors["0"], powers / powers.sum(-1, keepdims=True), atol=1e-6)


class GroupedAttention(nn.Module):
    """Four heads over the keys of two; the two heads of a group have an axis, or are folded into that of queries."""

    num_heads = 4

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, tokens: Tensor) -> Tensor:
        keys = tokens[..., :4].unflatten(-1, (2, 2)).transpose(1, 2)  # (N, groups, T, D)
        queries = tokens.unflatten(-1, (2, 2, 2)).permute(0, 2, 3, 1, 4)  # (N, groups, heads of each, T, D)
        if self.way == "folded":
            return (queries.flatten(2, 3) @ keys.transpose(-2, -1)).softmax(-1) @ keys
        return (queries @ keys[:, :, None].transpose(-2, -1)).softmax(-1) @ keys[:, :, None]


@pytest.mark.parametrize("inputs", [1, 3])
def test_groups_of_heads_that_share_their_keys_are_heads(inputs: int) -> None:
    tokens = torch.randn(inputs, 6, 8, generator=torch.Generator().manual_seed(4))
    network = nn.Sequential(GroupedAttention("broadcast"))
    result = hookscope.attention(network, tokens, batch_axis=0, save_tensors=True)
    assert [(block.windows, block.heads, block.keys) for block in result.blocks] == [(1, 4, 6)]
    queries = tokens.double().numpy().reshape(inputs, 6, 4, 2).transpose(0, 2, 1, 3)
    keys = tokens.double().numpy()[..., :4].reshape(inputs, 6, 2, 2).transpose(0, 2, 1, 3).repeat(2, 1)
    powers = np.exp(queries @ keys.swapaxes(-2, -1))
    np.testing.assert_allclose(result.tensors["0"], powers / powers.sum(-1, keepdims=True), atol=1e-6)


def test_queries_of_a_group_in_one_axis_are_not_called_channels() -> None:
    with pytest.raises(NothingMatchedError, match="not known whether its softmax is for each of 12 tokens or"):
        hookscope.attention(nn.Sequential(GroupedAttention("folded")), torch.randn(1, 6, 8), batch_axis=0)


class ByNames(nn.Module):
    """Attention by einsum, with axes in any order."""

    def __init__(self, heads: int, weights: str) -> None:
        super().__init__()
        self.project, self.count, self.weights = nn.Linear(8, 24), heads, weights

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (self.count, -1)) for part in self.project(tokens).chunk(3, -1))
        weights = torch.einsum(f"bihd,bjhd->{self.weights}", query, key).softmax(-1)
        return torch.einsum(f"{self.weights},bjhd->bihd", weights, value).flatten(2)


@pytest.mark.parametrize("weights", ["hbij", "bihj", "ibhj"])
@pytest.mark.parametrize(("inputs", "heads"), [(1, 4), (4, 4)])
def test_einsum_says_which_axes_are_inputs_heads_and_queries(inputs: int, heads: int, weights: str) -> None:
    torch.manual_seed(0)
    network, tokens = nn.Sequential(ByNames(heads, weights)), torch.randn(inputs, 6, 8)
    result = hookscope.attention(network, tokens, batch_axis=0, save_tensors=True)
    assert [(block.windows, block.heads, block.queries, block.keys) for block in result.blocks] == [(1, heads, 6, 6)]
    with torch.no_grad():
        project: nn.Linear = network[0].project  # type: ignore[assignment]
        query, key, _ = project(tokens).double().numpy().reshape(inputs, 6, 3, heads, -1).transpose(2, 0, 3, 1, 4)
    powers = np.exp(query @ key.swapaxes(-2, -1))
    np.testing.assert_allclose(result.tensors["0"], powers / powers.sum(-1, keepdims=True), atol=1e-6)


class AttentionByHead(nn.Module):
    """Takes its heads one by one, of windows that it is given as inputs (EfficientViT, Liu et al. 2023)."""

    num_heads = 4

    def forward(self, windows: Tensor) -> Tensor:
        heads = [part.flatten(2) for part in windows.chunk(self.num_heads, 1)]  # (N * windows, D, T)
        mixed = [head @ (head.mT @ head).softmax(-1).mT for head in heads]
        return torch.cat(mixed, 1).reshape(windows.shape)


class CutInFour(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = AttentionByHead()

    def forward(self, maps: Tensor) -> Tensor:
        cut = maps.reshape(-1, 8, 2, 3, 2, 3).permute(0, 2, 4, 1, 3, 5).reshape(-1, 8, 3, 3)
        return self.attention(cut)  # type: ignore[no-any-return]


@pytest.mark.parametrize("inputs", [1, 2])
def test_windows_that_are_as_many_as_heads_are_windows(inputs: int) -> None:
    maps = torch.randn(inputs, 8, 6, 6, generator=torch.Generator().manual_seed(4))
    result = hookscope.attention(CutInFour(), maps, batch_axis=0, save_tensors=True)
    assert [(block.windows, block.heads, block.keys, block.key_grid) for block in result.blocks] == [
        (4, 1, 9, None)
    ] * 4
    whole = maps.double().numpy().reshape(inputs, 4, 2, 2, 3, 2, 3).transpose(0, 3, 5, 1, 4, 6, 2)
    heads = whole.reshape(inputs, 4, 4, 9, 2)  # (inputs, windows, heads, tokens, features)
    powers = np.exp(heads @ heads.swapaxes(-2, -1))
    expected = powers / powers.sum(-1, keepdims=True)
    for number, label in enumerate(block.label for block in result.blocks):
        np.testing.assert_allclose(result.tensors[label][:, :, 0], expected[:, :, number], atol=1e-6)


def test_heads_one_by_one_over_a_whole_map_may_be_a_softmax_for_each_channel_and_are_said_to_be() -> None:
    with pytest.raises(NothingMatchedError) as refused:
        hookscope.attention(nn.Sequential(AttentionByHead()), torch.randn(2, 8, 3, 3), batch_axis=0)
    assert "it is not known whether its softmax is for each of 9 tokens or of 9 channels" in str(refused.value)
