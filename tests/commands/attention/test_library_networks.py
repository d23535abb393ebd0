"""Networks of timm and transformers, small and random: each has one patch of the picture changed after the other.

The token whose values change most is the one that lies there. Weights are compared with softmax(q k^T) in float64 of
what the fused function was given, or with what a softmax returned.
"""

import math
from collections.abc import Callable, Mapping
from itertools import permutations
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import hookscope
from hookscope.results.attention import Attention

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")

Inputs = dict[str, Tensor]
Grid = tuple[int, int]
PIXELS = "pixel_values"


class Met(NamedTuple):
    """Weights (..., queries, keys) and what they are multiplied with."""

    weights: Tensor
    values: Tensor


class Recorder(TorchFunctionMode):
    """Keeps the weights of the fused function, and of softmaxes that a product follows."""

    def __init__(self) -> None:
        super().__init__()
        self.met: list[Met] = []
        self._softmaxes: list[Tensor] = []

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            self.met.append(Met(by_definition(*args, **(kwargs or {})), args[2]))
        elif name == "softmax":
            self._softmaxes = [*self._softmaxes[-1:], output]
        elif name in ("matmul", "bmm"):
            for weights in self._softmaxes:
                sides = [argument.data_ptr() == weights.data_ptr() for argument in args]
                if sum(sides) == 1:
                    self.met.append(Met(weights.double(), args[sides.index(False)]))
        return output


def by_definition(
    query: Tensor, key: Tensor, _value: Tensor, attn_mask: Tensor | None = None, **options: Any
) -> Tensor:
    scale = options.get("scale")
    scores = query.double() @ key.double().mT * (query.size(-1) ** -0.5 if scale is None else scale)
    if options.get("is_causal"):
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        hides = attn_mask.dtype is torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if hides else scores + attn_mask.double()
    return scores.softmax(-1)


def recorded(network: nn.Module, inputs: Inputs) -> list[Met]:
    """Run a network; return its attention."""
    torch.manual_seed(0)
    with torch.no_grad(), Recorder() as recorder:
        network(**inputs) if len(inputs) > 1 else network(inputs[PIXELS])
    return recorder.met


def spread(network: nn.Module) -> nn.Module:
    """Draw weights such that attention is not uniform, and a token is mostly what its patch makes it."""
    noise = torch.Generator().manual_seed(0)
    learned = ("pos", "bias", "cls", "reg", "token", "quer", "latent", "table", "gamma")
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            values = torch.randn(parameter.shape, generator=noise)
            if parameter.dim() > 1:
                is_learned = any(word in name.rpartition(".")[2] for word in learned)
                parameter.copy_(values * (0.5 if is_learned else 0.4 / math.sqrt(parameter[0].numel())))
            else:
                parameter.copy_(0.2 * values + ("weight" in name or "gamma" in name))
    return network.eval()


def pictures(high: int, wide: int, count: int = 2) -> Inputs:
    return {PIXELS: torch.randn(count, 3, high, wide, generator=torch.Generator().manual_seed(1))}


def words(count: int) -> Tensor:
    return torch.randint(3, 40, (2, count), generator=torch.Generator().manual_seed(2))


class Case(NamedTuple):
    """A network, what it is given, and what is expected.

    Attributes:
        grids: Where keys lie, by part of a block's label; None for nowhere. Other places are only checked to be true.
        is_local: Whether a token is mostly what its own patch makes it: no convolutions of a large field before it.
    """

    make: Callable[[], nn.Module]
    inputs: Inputs
    census: str
    grids: Mapping[str, Grid | None]
    is_local: bool = True


def of_timm(name: str, inputs: Inputs, census: str, grids: Mapping[str, Grid | None], **options: Any) -> Case:
    return Case(lambda: timm.create_model(name, **options), inputs, census, grids)


TINY = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48}
SMALL = {"depth": 2, "embed_dim": 48, "num_heads": 3}
WIDE = {"img_size": (64, 96)}
DECODER = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
}


def of_transformers(
    name: str, inputs: Inputs, census: str, grids: Mapping[str, Grid | None], part: str = "", **options: Any
) -> Case:
    def make() -> nn.Module:
        made: nn.Module = getattr(transformers, f"{name}{part}Model")(
            getattr(transformers, f"{name}{part}Config")(**options)
        )
        return made

    return Case(make, inputs, census, grids)


def swin() -> Any:
    return transformers.SwinConfig(
        image_size=64,
        embed_dim=8,
        depths=[1] * 4,
        num_heads=[1, 2, 2, 4],
        window_size=4,
        out_features=[f"stage{number}" for number in range(1, 5)],
    )


def grounding_dino() -> nn.Module:
    text = transformers.BertConfig(vocab_size=50, max_position_embeddings=40, **TINY)
    backbone = swin()
    backbone.out_features = ["stage2", "stage3", "stage4"]
    config = transformers.GroundingDinoConfig(
        backbone_config=backbone, text_config=text, num_queries=16, num_feature_levels=3, **DECODER
    )
    return transformers.GroundingDinoModel(config)  # type: ignore[no-any-return]


def perceiver() -> nn.Module:
    sizes = {"image_size": 8, "num_latents": 64, "d_latents": 24, "d_model": 24, "num_blocks": 1}
    heads = {"num_self_attends_per_block": 2, "num_self_attention_heads": 2, "num_cross_attention_heads": 2}
    config = transformers.PerceiverConfig(**sizes, **heads)
    return transformers.PerceiverForImageClassificationLearned(config)  # type: ignore[no-any-return]


def trocr() -> nn.Module:
    encoder = transformers.ViTModel(transformers.ViTConfig(image_size=64, patch_size=16, **TINY))
    sizes = {"d_model": 24, "decoder_layers": 1, "decoder_attention_heads": 3, "decoder_ffn_dim": 24}
    config = transformers.TrOCRConfig(
        vocab_size=50, max_position_embeddings=40, is_decoder=True, add_cross_attention=True, **sizes
    )
    return transformers.VisionEncoderDecoderModel(  # type: ignore[no-any-return]
        encoder=encoder, decoder=transformers.TrOCRForCausalLM(config)
    )


CASES = {
    "nest": of_timm("nest_tiny", pictures(64, 64), "12 of 12", {"levels.2": (4, 4)}, img_size=64),
    "crossvit": of_timm(
        "crossvit_9_240", pictures(240, 240, 1), "18 of 18", {"fusion.0": (14, 14), "fusion.1": (20, 20)}
    ),
    "twins": of_timm(
        "twins_svt_small", pictures(96, 160), "18 of 18", {"0.0.attn": None, ".1.attn": (3, 5)}, img_size=(96, 160)
    ),
    "rope mixed": of_timm("vit_base_patch16_rope_mixed_224", pictures(64, 96), "2 of 2", {"": (4, 6)}, **SMALL, **WIDE),
    "cait": of_timm("cait_xxs24_224", pictures(64, 64), "2 of 4", {"token_only": (4, 4)}, img_size=64, depth=2),
    "swin v2, wide": of_timm(
        "swinv2_cr_tiny_224",
        pictures(96, 160),
        "4 of 4",
        {"stages.0": (24, 40), "stages.1": (12, 20)},
        img_size=(96, 160),
        depths=(2, 2),
        embed_dim=24,
        num_heads=(2, 4),
        window_size=4,
    ),
    "efficientvit": of_timm("efficientvit_m0", pictures(224, 224, 2), "1 of 6", {"stages.0": None}),
    "groupvit": of_transformers(
        "GroupViT",
        pictures(64, 96),
        "5 of 7",
        {"0.downsample": (4, 6), "self_attn": None},
        "Vision",
        image_size=(64, 96),
        patch_size=16,
        depths=[1, 1, 1],
        num_group_tokens=[6, 4, 0],
        num_output_groups=[6, 4, 0],
        **{**TINY, "num_hidden_layers": 3},
    ),
    "vitdet": of_transformers(
        "VitDet",
        pictures(64, 96),
        "2 of 2",
        {"layer.0": None, "layer.1": (8, 12)},
        image_size=64,
        patch_size=8,
        window_size=5,
        window_block_indices=[0],
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
    ),
    "trocr": Case(
        trocr,
        {**pictures(64, 64), "decoder_input_ids": words(17)},
        "4 of 4",
        {"encoder.": (4, 4), "decoder.layers.0.self": None, "encoder_attn": (4, 4)},
    ),
    "perceiver": Case(
        perceiver, pictures(8, 8), "4 of 4", {"encoder.cross": (8, 8), "self_attends": None, "decoding": None}
    ),
    "grounding dino": Case(
        grounding_dino,
        {**pictures(64, 64), "input_ids": words(16)},
        "12 of 15",
        {
            "text": None,
            "fusion": None,
            "decoder.layers": None,
            "backbone.conv_encoder.model.swin.encoder.layers.2": (4, 4),
        },
    ),
}


def looked_at(case: Case, network: nn.Module, monkeypatch: pytest.MonkeyPatch) -> tuple[Attention, list[Any]]:
    """Return the result, and the cells of keys of each block; None where they have none."""
    from hookscope.commands.attention import forward_pass

    cells: list[Any] = []
    own = forward_pass.places_of

    def kept(call: Any, rows: Any, axes: Any, tokens: Any) -> Any:
        actual = own(call, rows, axes, tokens)
        cells.append((axes, actual[1]))
        return actual

    monkeypatch.setattr(forward_pass, "places_of", kept)
    torch.manual_seed(0)
    options = {"input": case.inputs} if len(case.inputs) > 1 else {"images": case.inputs[PIXELS]}
    return hookscope.attention(network, **options, save_tensors=True, query="mean"), cells


def changed(inputs: Inputs, grid: Grid, cell: int) -> Inputs:
    pixels = inputs[PIXELS].clone()
    high, wide = pixels.shape[2] // grid[0], pixels.shape[3] // grid[1]
    row, column = divmod(cell, grid[1])
    area = pixels[..., row * high : (row + 1) * high, column * wide : (column + 1) * wide]
    area += 1.5 * torch.randn(area.shape, generator=torch.Generator().manual_seed(9))
    return {**inputs, PIXELS: pixels}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_weights_and_places_are_true(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    network = spread(case.make())
    result, placed = looked_at(case, network, monkeypatch)
    assert result.census.startswith(case.census)
    assert result.warnings == ()
    for part, grid in case.grids.items():
        actual = {block.key_grid for block in result.blocks if part in block.label}
        assert actual == {grid}, part
    met = recorded(network, case.inputs)
    place_of: dict[int, int] = {}
    for index, block in enumerate(result.blocks):
        if block.entry == "multi-head":  # no mode sees its inner call; other tests compare what torch returns
            continue
        ours = result.tensors[block.label].double()
        assert (ours.sum(-1) - 1).abs().max() < 1e-5
        place_of[index] = same_weights(ours, met, [*place_of.values()])
    others: dict[tuple[Grid, int], list[Met]] = {}
    for index, (axes, keys) in enumerate(placed):
        if keys is None or index not in place_of or not case.is_local:
            continue
        high, wide = keys.grid
        for cell in {0, wide - 1, (high - 1) * wide, high // 2 * wide + wide // 3}:
            if (keys.grid, cell) not in others:
                others[keys.grid, cell] = recorded(network, changed(case.inputs, keys.grid, cell))
            other = others[keys.grid, cell][place_of[index]].values
            moved = (other.double() - met[place_of[index]].values.double()).square()
            key_axis = -2 if moved.shape[-2] == keys.cells.shape[1] else -1
            by_token = moved.sum(-1 if key_axis == -2 else -2)
            by_token = by_token.reshape(axes.inputs, axes.windows, -1, keys.cells.shape[1]).sum(2)[0]
            assert int(keys.cells.reshape(-1)[by_token.argmax()]) == cell, result.blocks[index].label


def same_weights(ours: Tensor, met: list[Met], taken: list[int]) -> int:
    """Return the place of the first recorded weights, not taken yet, that are the same but for the order of axes."""
    for place, each in enumerate(met):
        weights = each.weights
        if place in taken or weights.numel() != ours.numel() or weights.shape[-2:] != ours.shape[-2:]:
            continue
        *lead, queries, keys = range(weights.dim())
        for order in permutations(lead):
            if torch.allclose(weights.permute(*order, queries, keys).reshape(ours.shape), ours, atol=1e-6, rtol=0):
                return place
    nearest = [tuple(each.weights.shape) for each in met]
    raise AssertionError(f"no weights like {tuple(ours.shape)} in {nearest}")
