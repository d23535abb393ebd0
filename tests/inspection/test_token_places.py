"""Tokens lie on the picture where `activations` says so, and have no place where they do not come from it.

A network has one square of the picture changed: the token that changes most is the one of that place.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hookscope
from hookscope.errors import UsageError
from hookscope.results.activations import Activations
from tests.networks import Written

WIDTH, PATCH = 32, 8
PICTURES = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
WIDE = torch.rand(2, 3, 32, 64, generator=torch.Generator().manual_seed(0))


def words(count: int) -> Tensor:
    return torch.randint(0, 50, (2, count), generator=torch.Generator().manual_seed(1))


def attend(net: Any, tokens: Tensor, others: Tensor | None = None) -> Tensor:
    key, value = net.pair(tokens if others is None else others).chunk(2, -1)
    query, key, value = (case.unflatten(-1, (2, -1)).transpose(1, 2) for case in (net.query(tokens), key, value))
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


def attention() -> nn.Module:
    return Written(attend, query=nn.Linear(WIDTH, WIDTH), pair=nn.Linear(WIDTH, 2 * WIDTH))


def block() -> nn.Module:
    def forward(net: Any, tokens: Tensor) -> Tensor:
        tokens = tokens + net.attention(net.norm(tokens))
        return tokens + net.mlp(tokens)

    return Written(forward, norm=nn.LayerNorm(WIDTH), attention=attention(), mlp=nn.Linear(WIDTH, WIDTH))


def learned(count: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(1, count, WIDTH))


def patches(net: Any, pixels: Tensor) -> Tensor:
    return net.patches(pixels).flatten(2).transpose(1, 2)


def encoder(patch: int = PATCH, front: int = 0, behind: int = 0) -> nn.Module:
    """Return an encoder of patches, and of learned tokens in front of them or behind."""

    def forward(net: Any, pixels: Tensor) -> Tensor:
        others = (case.expand(len(pixels), -1, -1) for case in (net.front, net.behind))
        return net.block(torch.cat([next(others), patches(net, pixels), next(others)], 1))

    parts = {"patches": nn.Conv2d(3, WIDTH, patch, patch), "block": block()}
    return Written(forward, **parts, front=learned(front), behind=learned(behind))


def two_towers(more: int) -> nn.Module:
    """As CLIP, or CoCa, whose words have a class token."""

    def read(net: Any, ids: Tensor) -> Tensor:
        return net.block(torch.cat([net.words(ids), net.more.expand(len(ids), -1, -1)], 1))

    def forward(net: Any, pixels: Tensor, ids: Tensor) -> Tensor:
        return net.vision(pixels).mean(1) @ net.text(ids).mean(1).T

    text = Written(read, words=nn.Embedding(50, WIDTH), block=block(), more=learned(more))
    return Written(forward, vision=encoder(16), text=text)


def fused(*, words_first: bool) -> nn.Module:
    """Words and patches in one sequence, as ViLT."""

    def forward(net: Any, pixels: Tensor, ids: Tensor) -> Tensor:
        both = [net.words(ids), patches(net, pixels)]
        return net.block(torch.cat(both if words_first else both[::-1], 1))

    return Written(forward, patches=nn.Conv2d(3, WIDTH, 16, 16), words=nn.Embedding(50, WIDTH), block=block())


def latents(count: int) -> nn.Module:
    """As Perceiver: tokens of its own look at 64 patches, then at each other."""

    def forward(net: Any, pixels: Tensor) -> Tensor:
        seen, own = net.vision(pixels), net.own.expand(len(pixels), -1, -1)
        return net.head(net.block(own + net.cross(own, seen)))

    parts = {"cross": attention(), "block": block(), "head": nn.Linear(WIDTH, 3)}
    return Written(forward, vision=encoder(), own=learned(count), **parts)


def pruned() -> nn.Module:
    """Keeps 16 of 64 patches, those with the longest tokens."""

    def forward(net: Any, pixels: Tensor) -> Tensor:
        tokens = net.vision(pixels)
        kept = tokens.norm(dim=-1).topk(16, 1).indices[..., None].expand(-1, -1, WIDTH)
        return net.block(tokens.gather(1, kept))

    return Written(forward, vision=encoder(), block=block())


def conditioned() -> nn.Module:
    """Patches look at tokens that come from elsewhere."""

    def forward(net: Any, pixels: Tensor, states: Tensor) -> Tensor:
        tokens = net.vision(pixels)
        return tokens + net.cross(tokens, states)

    return Written(forward, vision=encoder(16), cross=attention())


def linear_patches(front: int) -> nn.Module:
    """Cuts patches by reshaping, behind a class token."""

    def forward(net: Any, pixels: Tensor) -> Tensor:
        inputs, _, high, wide = pixels.shape
        cut = pixels.reshape(inputs, 3, high // PATCH, PATCH, wide // PATCH, PATCH).permute(0, 2, 4, 3, 5, 1)
        tokens = net.project(cut.reshape(inputs, -1, 3 * PATCH**2))
        return net.block(torch.cat([net.front.expand(inputs, -1, -1), tokens], 1))

    return Written(forward, project=nn.Linear(3 * PATCH**2, WIDTH), front=learned(front), block=block())


def run(make: Callable[[], nn.Module], **options: Tensor) -> tuple[nn.Module, Activations]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = make().eval()
    return network, hookscope.activations(network, input=options, layer="*")


def layouts(result: Activations) -> dict[str, tuple[int | None, tuple[int, ...] | None]]:
    return {row.label: (row.tokens.prefix, row.tokens.grid) for row in result if row.tokens is not None}


def assert_each_lies_where_it_changes(network: nn.Module, result: Activations, pixels: Tensor, layer: str) -> None:
    """Change one patch after the other: the token that is said to lie there changes most."""
    prefix, grid = layouts(result)[layer]
    assert prefix is not None
    outputs: list[Tensor] = []
    with (
        torch.no_grad(),
        network.get_submodule(layer).register_forward_hook(lambda *arguments: outputs.append(arguments[2])),
    ):
        network(pixels)
        high, wide = pixels.shape[2] // grid[0], pixels.shape[3] // grid[1]
        for row, column in [(0, 0), (0, grid[1] - 1), (grid[0] - 1, 1), (1, 2)]:
            changed = pixels.clone()
            changed[:, :, row * high : (row + 1) * high, column * wide : (column + 1) * wide] += 1
            network(changed)
            moved = np.linalg.norm((outputs[-1] - outputs[0]).double().numpy(), axis=2)[0, prefix:]
            assert np.unravel_index(moved.argmax(), grid) == (row, column)


def assert_maps_are_weights_on_patches(network: nn.Module, front: int, behind: int) -> None:
    layout = f"prefix={front},grid=8x8,suffix={behind}"
    seen = hookscope.attention(network, PICTURES, query=["mean", "9,1"], tokens=layout)
    outputs: list[Tensor] = []
    attention = network.get_submodule("block.attention")
    with torch.no_grad(), attention.register_forward_hook(lambda *arguments: outputs.append(arguments[1][0])):
        network(PICTURES)
        query = attention.get_submodule("query")(outputs[0]).unflatten(-1, (2, -1)).transpose(1, 2)
        key = attention.get_submodule("pair")(outputs[0]).chunk(2, -1)[0].unflatten(-1, (2, -1)).transpose(1, 2)
    weights = (query @ key.transpose(2, 3) / (WIDTH / 2) ** 0.5).softmax(-1).mean(1)[0].numpy()
    expected = {"mean of queries": weights.mean(0), "patch 0,1": weights[front + 1]}
    drawn = {heat_map.query: heat_map for heat_map in seen.maps if heat_map.input_index == 0}
    assert {*drawn} == {*expected}
    for name, row in expected.items():
        on_patches = row[front : front + 64]
        np.testing.assert_allclose(drawn[name].values, on_patches.reshape(8, 8), rtol=1e-4)
        assert drawn[name].elsewhere == pytest.approx(1 - on_patches.sum(), abs=1e-5)
    assert [(block.prefix, block.key_grid) for block in seen.blocks] == [(front, (8, 8))]


@pytest.mark.parametrize("at", [1 + 9, 1 + 64], ids=["a patch", "a token behind"])
def test_attribute_looks_at_patches_between_other_tokens(at: int) -> None:
    torch.manual_seed(0)
    parts = {"encoder": encoder(PATCH, 1, 4), "head": nn.Linear(WIDTH, 5)}
    network = Written(lambda net, pixels: net.head(net.encoder(pixels)[:, at]), **parts).eval()
    options = {"target": "2", "tokens": "prefix=1,grid=8x8,suffix=4", "sanity": "none"}
    result = hookscope.attribute(network, PICTURES, layer="encoder.block.norm", **options)
    kept: list[Tensor] = []
    with network.get_submodule("encoder.block.norm").register_forward_hook(
        lambda *arguments: kept.append(arguments[2])
    ):
        score = network(PICTURES)[:, 2].sum()
    (gradient,) = torch.autograd.grad(score, kept)
    tokens, gradients = kept[0][0, 1:65].detach(), gradient[0, 1:65]
    expected = (tokens * gradients.mean(0)).sum(1).clamp(min=0).reshape(8, 8)
    np.testing.assert_allclose(result.maps[0].values, expected.numpy(), rtol=1e-3, atol=1e-7)
    if at == 1 + 64:
        with pytest.raises(UsageError, match="after it only a token outside of the grid reaches the target"):
            hookscope.attribute(network, PICTURES, layer="encoder.block", **options)


@pytest.mark.parametrize(("front", "behind", "prefix"), [(0, 0, 0), (1, 0, 1), (5, 0, 5), (0, 1, None), (1, 4, None)])
def test_registers_lie_in_front_of_patches_or_nothing_has_a_place(front: int, behind: int, prefix: int | None) -> None:
    """Some networks put them, or tokens for detection, behind (YOLOS)."""
    network, result = run(lambda: encoder(PATCH, front, behind), pixels=PICTURES)
    assert layouts(result)["block"] == (prefix, None if prefix is None else (8, 8))
    seen = hookscope.attention(network, PICTURES, query="mean")
    assert [block.prefix for block in seen.blocks] == [prefix]
    if prefix is None:
        assert "and those of the picture may not be the last of them" in seen.blocks[0].remark
        assert "give `tokens` grid=HEIGHTxWIDTH,suffix=N" in " ".join(seen.notes)
        assert not seen.maps
        assert_maps_are_weights_on_patches(network, front, behind)
    else:
        assert_each_lies_where_it_changes(network, result, PICTURES, "block")


@pytest.mark.parametrize(("count", "more"), [(16, 0), (15, 1)])
def test_words_have_no_place(count: int, more: int) -> None:
    _, result = run(lambda: two_towers(more), pixels=PICTURES, ids=words(count))
    actual = layouts(result)
    assert {each for label, each in actual.items() if label.startswith("text")} == {(None, None)}
    assert {each for label, each in actual.items() if label.startswith("vision")} == {(0, (4, 4))}


@pytest.mark.parametrize("words_first", [True, False])
@pytest.mark.parametrize("count", [5])
def test_words_in_one_sequence_with_patches_are_no_registers(count: int, words_first: bool) -> None:
    network, result = run(lambda: fused(words_first=words_first), pixels=PICTURES, ids=words(count))
    assert layouts(result)["block"] == (None, None)
    options = {"pixels": PICTURES, "ids": words(count)}
    refused = hookscope.attention(network, input=options).blocks[0]
    assert (refused.prefix, refused.key_grid) == (None, None)
    assert f"its {16 + count} keys are patches and words together" in refused.remark
    if words_first:
        placed = hookscope.attention(
            network, input=options, tokens=f"prefix={count},grid=4x4", query="mean", save_tensors=True
        )
        assert {(row.class_share, row.register_share) for row in placed.rows} == {(None, None)}
        weights = placed.tensors["block.attention"].double().numpy()[0].mean((0, 1))
        np.testing.assert_allclose(placed.maps[0].values.reshape(-1), weights[count:], atol=1e-6)


@pytest.mark.parametrize("count", [16, 64])
def test_tokens_of_the_network_s_own_have_no_place(count: int) -> None:
    """16 are as many as patches of a grid halved, 64 as patches."""
    network, result = run(lambda: latents(count), pixels=PICTURES)
    actual = layouts(result)
    assert {each for label, each in actual.items() if label.startswith("vision")} == {(0, (8, 8))}
    assert {actual[label] for label in ("cross", "block.norm", "block", "head") if label in actual} == {(None, None)}
    seen = [(block.query_grid, block.key_grid) for block in hookscope.attention(network, PICTURES).blocks]
    assert seen == [((8, 8), (8, 8)), (None, (8, 8)), (None, None)]


def test_fewer_tokens_than_patches_do_not_lie_on_a_halved_grid() -> None:
    network, result = run(pruned, pixels=PICTURES)
    assert layouts(result)["block"] == (None, None)
    last = hookscope.attention(network, PICTURES).blocks[-1]
    assert (last.keys, last.key_grid) == (16, None)
    assert "it has 16 tokens whose grid is not known" in last.remark


def test_tokens_given_beside_the_picture_have_no_place() -> None:
    states = torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(3))
    network, _ = run(conditioned, pixels=PICTURES, states=states)
    last = hookscope.attention(network, input={"pixels": PICTURES, "states": states}).blocks[-1]
    assert last.key_grid is None
    assert "as many as the tokens that the network was given beside the picture" in last.remark


@pytest.mark.parametrize("pixels", [PICTURES, WIDE], ids=["square", "wide"])
@pytest.mark.parametrize("front", [0, 1])
def test_patches_that_no_convolution_has_cut_are_squares(pixels: Tensor, front: int) -> None:
    """32 and a class token are 25 and eight others, too."""
    network, result = run(lambda: linear_patches(front), pixels=pixels)
    grid = (pixels.shape[2] // PATCH, pixels.shape[3] // PATCH)
    seen = hookscope.attention(network, pixels, query="mean").blocks
    assert [(each.prefix, each.key_grid) for each in seen] == [(front, grid)]
    if front or pixels is PICTURES:  # 32 tokens of 32 channels are taken for attention weights
        assert layouts(result)["block"] == (front, grid)
        assert_each_lies_where_it_changes(network, result, pixels, "block")


def test_layers_that_are_looked_at_alone_lie_where_they_do_among_others() -> None:
    """The convolution that cut the patches was not observed."""
    torch.manual_seed(0)
    network = latents(16).eval()
    (alone,) = hookscope.activations(network, PICTURES, layer="vision.block.mlp")
    assert (alone.tokens.prefix, alone.tokens.grid) == (0, (8, 8))
    (own,) = hookscope.activations(network, PICTURES, layer=["block.mlp", "!vision.*"])
    assert own.tokens.grid is None


def pyramid() -> nn.Module:
    """Patches of 8, 16 and 32 pixels: 64, 16 and 4 of a picture of 64 x 64."""

    def forward(net: Any, pixels: Tensor) -> list[Tensor]:
        large = net.first(pixels)
        levels = [large, net.second(large), net.third(net.second(large))]
        return [level.flatten(2).transpose(1, 2) for level in levels]

    first, second, third = (nn.Conv2d(count, WIDTH, size, size) for count, size in ((3, 8), (WIDTH, 2), (WIDTH, 2)))
    return Written(forward, first=first, second=second, third=third)


def deformable() -> nn.Module:
    """As Deformable DETR and RT-DETR: tokens of a decoder look at the patches of all levels together."""

    def decode(net: Any, hidden_states: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        return net.own(hidden_states) + net.cross(encoder_hidden_states).mean(1, keepdim=True)

    def forward(net: Any, pixels: Tensor) -> Tensor:
        memory = torch.cat(net.levels(pixels), 1)
        best = net.select(memory).topk(16, 1).indices.expand(-1, -1, WIDTH)
        return net.layer(memory.gather(1, best), encoder_hidden_states=memory)

    layer = Written(decode, own=attention(), cross=nn.Linear(WIDTH, WIDTH))
    return Written(forward, levels=pyramid(), layer=layer, select=nn.Linear(WIDTH, 1))


def test_tokens_that_look_at_all_levels_of_a_pyramid_together_have_no_place() -> None:
    """There are 16, as many as patches of the second level."""
    network, result = run(deformable, pixels=PICTURES)
    (seen,) = hookscope.attention(network, PICTURES).blocks
    assert (seen.keys, seen.query_grid, seen.key_grid) == (16, None, None)
    assert "tokens of a decoder" in seen.remark
    assert {layout for label, layout in layouts(result).items() if label.startswith("layer")} == {(None, None)}


class PaddedBlock(nn.Module):
    """Pads a map to windows of 4 x 4, as Swin where it is smaller; `shift_size` where it is Swin's."""

    window_size = 4

    def __init__(self, swins: bool) -> None:
        super().__init__()
        self.attention = attention()
        if swins:
            self.shift_size = 0

    def forward(self, maps: Tensor) -> Tensor:
        inputs, high, wide, width = maps.shape
        padded = F.pad(maps, (0, 0, 0, 4 - wide, 0, 4 - high)).reshape(inputs, 16, width)
        return self.attention(padded).reshape(inputs, 4, 4, width)[:, :high, :wide]


@pytest.mark.parametrize("swins", [True, False])
def test_tokens_of_a_padded_map_do_not_lie_on_another_that_has_as_many_places(swins: bool) -> None:
    """2 x 2 patches are padded to 4 x 4, as many as those of the level before."""

    def forward(net: Any, pixels: Tensor) -> Tensor:
        return net.block(net.levels(pixels)[-1].reshape(len(pixels), 2, 2, WIDTH))

    network, result = run(lambda: Written(forward, levels=pyramid(), block=PaddedBlock(swins)), pixels=PICTURES)
    assert {layout for label, layout in layouts(result).items() if label.startswith("block.attention")} == {
        (None, None)
    }
    (seen,) = hookscope.attention(network, PICTURES).blocks
    assert seen.key_grid == ((2, 2) if swins else None)
    assert seen.remark == ("" if swins else "it has 16 tokens in windows that reach beyond the picture")


def test_a_sequence_that_is_convolved_is_no_map_of_one_column() -> None:
    """MGP-STR convolves tokens as a map of one column."""

    def forward(net: Any, pixels: Tensor) -> Tensor:
        tokens = net.encoder(pixels)
        return net.norm(net.learner(tokens.transpose(1, 2)[..., None])[..., 0].transpose(1, 2) + tokens)

    parts = {"learner": nn.Conv2d(WIDTH, WIDTH, 1), "norm": nn.LayerNorm(WIDTH)}
    network, result = run(lambda: Written(forward, encoder=encoder(front=1), **parts), pixels=PICTURES)
    assert layouts(result)["norm"] == (1, (8, 8))
    assert_each_lies_where_it_changes(network, result, PICTURES, "norm")
