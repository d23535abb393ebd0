"""Weights compared with what torch, torchvision, timm and transformers compute where they do show them."""

from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import hookscope
from hookscope.hooks.attention import AttentionCall, AttentionMode
from hookscope.hooks.attention_rows import Memory, Part
from hookscope.hooks.selection import module_index


def seen_by_mode(network: nn.Module, *args: Any, **kwargs: Any) -> tuple[list[AttentionCall], list[Tensor], Any]:
    """Run a network; return its calls, all rows of each, and the output."""
    calls: list[AttentionCall] = []
    rows: list[Tensor] = []

    def take(call: AttentionCall) -> None:
        calls.append(call)
        if call.rows is not None:
            rows.append(part_of(call).weights)

    with AttentionMode(module_index(network)[0], take):
        output = network(*args, **kwargs)
    return calls, rows, output


def part_of(call: AttentionCall, begin: int = 0, end: int | None = None) -> Part:
    assert call.rows is not None
    with torch.no_grad():
        return call.rows.part(begin, call.rows.shape[-2] if end is None else end, Memory(), True)


def entropy_of(part: Part) -> Tensor:
    assert part.entropy is not None
    return part.entropy


class Attends(nn.Module):
    """Calls a function with what it is given."""

    def __init__(self, function: Callable[..., Tensor], **options: Any) -> None:
        super().__init__()
        self.function, self.options = function, options

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args, **self.options)


def by_numpy(query: Tensor, key: Tensor, mask: NDArray[np.float64] | float, scale: float) -> NDArray[np.float64]:
    """Return softmax(q k^T scale + mask) in float64, by its definition."""
    scores = query.double().numpy() @ np.swapaxes(key.double().numpy(), -1, -2) * scale + mask
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    shares: NDArray[np.float64] = powers / powers.sum(-1, keepdims=True)
    return shares


def entropy_by_numpy(shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sum of -p ln p of each row, where 0 ln 0 is 0."""
    logarithms = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    entropy: NDArray[np.float64] = -(shares * logarithms).sum(-1)
    return entropy


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


CAUSAL = np.where(np.tri(6, 6, dtype=bool), 0.0, -np.inf)
BIAS = drawn(3, 6, 6, seed=9)
ALLOWED = torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(3)) > 0.4
ALLOWED[..., 0] = True


@pytest.mark.parametrize(
    ("options", "mask", "scale"),
    [
        ({}, 0.0, 0.5),
        ({"scale": 0.3}, 0.0, 0.3),
        ({"is_causal": True}, CAUSAL, 0.5),
        ({"attn_mask": BIAS}, BIAS.double().numpy(), 0.5),
        ({"attn_mask": ALLOWED}, np.where(ALLOWED.numpy(), 0.0, -np.inf), 0.5),
        ({"attn_mask": BIAS[:1, :1], "dropout_p": 0.5}, BIAS[:1, :1].double().numpy(), 0.5),
    ],
    ids=["plain", "scale", "causal", "bias", "allowed", "dropout"],
)
def test_rows_are_those_of_the_definition(
    options: Mapping[str, Any], mask: NDArray[np.float64] | float, scale: float
) -> None:
    query, key, value = (drawn(2, 3, 6, 4, seed=number) for number in range(3))
    calls, (rows,), _ = seen_by_mode(Attends(F.scaled_dot_product_attention, **options), query, key, value)
    assert np.abs(rows.numpy() - by_numpy(query, key, mask, scale)).max() < 1e-6
    assert torch.allclose(rows.sum(-1), torch.ones(2, 3, 6), atol=1e-6)
    assert calls[0].entry == "scaled dot product"
    parts = [part_of(calls[0], 0, 4), part_of(calls[0], 4, 6)]
    assert torch.allclose(torch.cat([part.weights for part in parts], -2), rows, atol=1e-7)
    entropy = torch.cat([entropy_of(part) for part in parts], -1)
    assert np.abs(entropy.numpy() - entropy_by_numpy(by_numpy(query, key, mask, scale))).max() < 1e-6


def test_grouped_queries_share_keys() -> None:
    query, key, value = drawn(2, 6, 5, 4), drawn(2, 2, 5, 4, seed=1), drawn(2, 2, 5, 4, seed=2)
    _, (rows,), _ = seen_by_mode(Attends(F.scaled_dot_product_attention, enable_gqa=True), query, key, value)
    # Queries 0 to 2 look at the first head of keys, 3 to 5 at the second.
    expected = by_numpy(query, torch.stack([key[:, 0]] * 3 + [key[:, 1]] * 3, 1), 0.0, 0.5)
    assert np.abs(rows.numpy() - expected).max() < 1e-6


def test_keys_may_be_others_than_queries() -> None:
    query, key, value = drawn(2, 3, 5, 4), drawn(2, 3, 9, 4, seed=1), drawn(2, 3, 9, 4, seed=2)
    _, (rows,), _ = seen_by_mode(Attends(F.scaled_dot_product_attention), query, key, value)
    assert np.abs(rows.numpy() - by_numpy(query, key, 0.0, 0.5)).max() < 1e-6


@pytest.mark.parametrize(("bias", "shift"), [(causal_upper_left, 0), (causal_lower_right, 3)])
def test_torchs_causal_biases_hide_keys(bias: Callable[[int, int], Tensor], shift: int) -> None:
    """They are tensors that hold no values."""
    query, key = drawn(2, 3, 4, 4), drawn(2, 3, 7, 4, seed=1)
    attends = Attends(F.scaled_dot_product_attention, attn_mask=bias(4, 7))
    _, (rows,), _ = seen_by_mode(attends, query, key, key)
    hidden = np.where(np.tri(4, 7, shift, dtype=bool), 0.0, -np.inf)
    assert np.abs(rows.numpy() - by_numpy(query, key, hidden, 0.5)).max() < 1e-6


@pytest.mark.parametrize("bias", [None, BIAS])
def test_under_autocast_rows_are_those_of_what_it_rounds(bias: Tensor | None) -> None:
    query, key, value = (drawn(2, 3, 6, 4, seed=number) * 3 for number in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        attends = Attends(F.scaled_dot_product_attention, attn_mask=bias)
        _, (rows,), output = seen_by_mode(attends, query, key, value)
    assert output.dtype is torch.bfloat16
    mask = 0.0 if bias is None else bias.bfloat16().double().numpy()
    rounded = by_numpy(query.bfloat16(), key.bfloat16(), mask, 0.5)
    assert np.abs(rows.numpy() - rounded).max() < 1e-6


def test_a_query_that_may_look_at_nothing_has_no_weight_as_in_torch() -> None:
    query, key = drawn(1, 1, 3, 4), drawn(1, 1, 3, 4, seed=1)
    allowed = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])
    identity = torch.eye(3).reshape(1, 1, 3, 3)
    attends = Attends(F.scaled_dot_product_attention, attn_mask=allowed)
    calls, (rows,), output = seen_by_mode(attends, query, key, identity)
    assert torch.allclose(rows, output, atol=1e-6)
    assert rows[0, 0, 1].tolist() == [0.0, 0.0, 0.0]
    expected = by_numpy(query, key, np.where(allowed.numpy() | [[False], [True], [False]], 0.0, -np.inf), 0.5)
    assert entropy_of(part_of(calls[0]))[0, 0, 1] == 0
    assert np.abs(entropy_of(part_of(calls[0])).numpy() - entropy_by_numpy(expected))[0, 0, [0, 2]].max() < 1e-6


@pytest.mark.parametrize("hidden", [None, -np.inf, torch.finfo(torch.float32).min], ids=["none", "infinite", "finite"])
@pytest.mark.parametrize("size", [1e-4, 300.0])
def test_entropy_is_exact_for_weights_from_equal_to_one_hot(size: float, hidden: float | None) -> None:
    query, key = drawn(2, 3, 40, 16) * size, drawn(2, 3, 40, 16, seed=1) + 3
    mask = None if hidden is None else torch.where(drawn(40, 40, seed=2) > 1, hidden, 0.0)
    calls, _, _ = seen_by_mode(Attends(F.scaled_dot_product_attention, attn_mask=mask), query, key, key)
    # From the weights, for float32 cannot hold scores of thousands to 1e-6.
    expected = entropy_by_numpy(part_of(calls[0]).weights.double().numpy())
    assert np.abs(entropy_of(part_of(calls[0])).numpy() - expected).max() < 2e-6


def test_parts_of_one_size_share_their_memory() -> None:
    calls, _, _ = seen_by_mode(
        Attends(F.scaled_dot_product_attention), *(drawn(2, 3, 6, 4, seed=at) for at in range(3))
    )
    rows, memory = calls[0].rows, Memory()
    assert rows is not None
    assert rows.part(0, 3, memory, True).weights.data_ptr() == rows.part(3, 6, memory, True).weights.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_has_the_rows_of_float32(dtype: torch.dtype) -> None:
    query, key, value = (drawn(2, 3, 40, 16, seed=number, dtype=dtype) for number in range(3))
    _, (rows,), _ = seen_by_mode(Attends(F.scaled_dot_product_attention), query, key, value)
    expected = by_numpy(query, key, 0.0, 0.25)
    ulps = np.abs(rows.numpy() - expected) / (expected * torch.finfo(dtype).eps)
    assert ulps.max() < 2


@pytest.mark.parametrize("train", [False, True])
def test_torchs_own_attention_has_the_weights_that_it_returns(train: bool) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(12, 3, dropout=0.5, batch_first=True)
    tokens, others = drawn(2, 5, 12), drawn(2, 7, 12, seed=1)
    masked = torch.zeros(2, 7, dtype=torch.bool)
    masked[1, 5:] = True
    layer.train(train)
    calls, (rows,), _ = seen_by_mode(layer, tokens, others, others, key_padding_mask=masked, need_weights=False)
    layer.eval()
    expected = layer(tokens, others, others, key_padding_mask=masked, average_attn_weights=False)[1]
    assert torch.equal(rows, expected)
    parts = [part_of(calls[0], 0, 2).weights, part_of(calls[0], 2, 5).weights]
    assert torch.allclose(torch.cat(parts, 2), expected, atol=1e-6)
    assert torch.allclose(rows.sum(-1), torch.ones(2, 3, 5), atol=1e-6)


def masked_pairs(causal: bool) -> Tensor:
    hidden = ~torch.ones(5, 7, dtype=torch.bool).tril() if causal else torch.zeros(5, 7).bernoulli(0.4) > 0
    hidden[:, 0] = False
    return hidden


def hidden_keys() -> Tensor:
    hidden = torch.zeros(2, 7, dtype=torch.bool)
    hidden[1, 5:] = True
    return hidden


@pytest.mark.parametrize(
    ("layer_options", "call_options"),
    [
        ({}, {"attn_mask": lambda: drawn(5, 7, seed=4)}),
        ({}, {"attn_mask": lambda: drawn(6, 5, 7, seed=4)}),
        ({}, {"attn_mask": lambda: masked_pairs(causal=False), "key_padding_mask": hidden_keys}),
        ({}, {"attn_mask": lambda: masked_pairs(causal=True), "is_causal": lambda: True}),
        ({"add_bias_kv": True, "add_zero_attn": True}, {"key_padding_mask": hidden_keys}),
        ({"bias": False, "kdim": 9, "vdim": 6}, {}),
        ({"batch_first": False}, {}),
    ],
    ids=["bias", "bias by head", "masks", "causal", "added keys", "other widths", "batch second"],
)
@pytest.mark.parametrize("asks", ["nothing", "weights"])
def test_torchs_own_attention_has_its_weights_to_the_last_bit(
    layer_options: Mapping[str, Any], call_options: Mapping[str, Callable[[], Any]], asks: str
) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(12, 3, dropout=0.5, **{"batch_first": True, **layer_options}).eval()
    arguments = [drawn(2, 5, 12), drawn(2, 7, layer.kdim, seed=1), drawn(2, 7, layer.vdim, seed=2)]
    if not layer.batch_first:
        arguments = [tensor.transpose(0, 1) for tensor in arguments]
    options = {name: made() for name, made in call_options.items()}
    asked = {"need_weights": asks != "nothing", "average_attn_weights": asks != "weights"}
    plain = layer(*arguments, **options, **asked)[0]
    calls, (rows,), (output, _) = seen_by_mode(layer, *arguments, **options, **asked)
    assert torch.equal(output, plain)
    assert torch.equal(rows, layer(*arguments, **options, average_attn_weights=False)[1])
    assert calls[0].rows is not None
    assert calls[0].rows.shape == tuple(rows.shape)


def test_torchs_own_attention_of_one_sequence_has_its_weights() -> None:
    torch.manual_seed(0)
    layer, tokens = nn.MultiheadAttention(12, 3).eval(), drawn(5, 12)
    _, (rows,), _ = seen_by_mode(layer, tokens, tokens, tokens, need_weights=False)
    assert torch.equal(rows[0], layer(tokens, tokens, tokens, average_attn_weights=False)[1])


def test_nothing_is_projected_twice_for_the_weights_of_torchs_own_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, tokens = nn.MultiheadAttention(12, 3).eval(), drawn(5, 2, 12)
    projected, linear = [], F.linear
    monkeypatch.setattr(F, "linear", lambda *arguments: projected.append(arguments) or linear(*arguments))
    seen_by_mode(layer, tokens, tokens, tokens, need_weights=False)
    assert len(projected) == 2  # queries, keys and values at once, and the output


def test_a_default_device_hides_nothing() -> None:
    layer, tokens = nn.MultiheadAttention(12, 3).eval(), drawn(5, 2, 12)
    with torch.device("cpu"):
        _, (rows,), output = seen_by_mode(layer, tokens, tokens, tokens)
    expected, weights = layer(tokens, tokens, tokens, average_attn_weights=False)
    assert torch.equal(rows, weights)
    assert torch.equal(output[0], expected)


def test_a_function_in_the_place_of_torchs_own_is_said_not_to_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    own = F.multi_head_attention_forward
    monkeypatch.setattr(F, own.__name__, wraps(own)(partial(own)))
    layer, tokens = nn.MultiheadAttention(12, 3).eval(), drawn(5, 2, 12)
    calls, rows, _ = seen_by_mode(layer, tokens, tokens, tokens, need_weights=False)
    assert rows == []
    assert calls[0].reason == "its attention function is not torch's own"


def written_out(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = F.dropout((query @ key.transpose(-2, -1) / 2).softmax(dim=-1), 0.5)
    return weights @ value


def by_einsum(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = torch.einsum("bhid,bhjd->bhij", query, key).div(2).softmax(-1)
    return torch.einsum("b h i j, b h j d -> b h i d", weights, value)


def values_first(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = torch.softmax(query @ key.mT / 2, 3).to(torch.float64).to(torch.float32)
    return value.transpose(2, 3) @ weights.permute(0, 1, 3, 2)


def with_projection(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = torch.einsum("bhid,bhjd->bhij", query, key).div(2).softmax(-1)
    return torch.einsum("bhij,hdo,bhjd->bio", weights, drawn(3, 4, 5, seed=9), value)


def by_keywords(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = torch.softmax(input=torch.matmul(input=query, other=key.mT) / 2, dim=-1)
    return torch.matmul(input=weights, other=value)


@pytest.mark.parametrize("function", [written_out, by_einsum, with_projection, values_first, by_keywords])
def test_a_softmax_that_meets_values_is_attention(function: Callable[..., Tensor]) -> None:
    query, key, value = (drawn(2, 3, 6, 4, seed=number) for number in range(3))
    calls, (rows,), _ = seen_by_mode(Attends(function), query, key, value)
    expected = by_numpy(query, key, 0.0, 0.5)
    assert np.abs(rows.numpy() - expected).max() < 1e-6
    assert np.abs(entropy_of(part_of(calls[0])).numpy() - entropy_by_numpy(expected)).max() < 2e-6
    assert calls[0].entry == "softmax"


def overwritten(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = (query @ key.mT).softmax(-1)
    weights += 1
    return weights @ value


def test_weights_that_are_overwritten_are_not_shown() -> None:
    calls, rows, _ = seen_by_mode(Attends(overwritten), *(drawn(2, 3, 6, 4, seed=number) for number in range(3)))
    assert rows == []
    assert "overwritten" in calls[0].reason


def over_channels(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT).softmax(1) @ value


def test_a_softmax_over_another_axis_is_none() -> None:
    calls, _, _ = seen_by_mode(Attends(over_channels), *(drawn(2, 3, 6, 4, seed=number) for number in range(3)))
    assert calls == []


def test_outputs_and_gradients_are_those_without_to_the_last_bit() -> None:
    torch.manual_seed(0)
    network = nn.TransformerEncoderLayer(12, 3, 24, dropout=0.3, batch_first=True)
    tokens = drawn(2, 5, 12)

    def passed(*, looking: bool) -> list[Tensor]:
        torch.manual_seed(7)
        network.zero_grad()
        inputs = tokens.clone().requires_grad_()
        output = seen_by_mode(network, inputs)[2] if looking else network(inputs)
        output.square().sum().backward()
        gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
        assert inputs.grad is not None
        return [output.detach(), inputs.grad, *(gradient.clone() for gradient in gradients)]

    for one, other in zip(passed(looking=True), passed(looking=False), strict=True):
        assert torch.equal(one, other)


# --- Whole networks, beside what their libraries show ---


def of_timm(name: str, **options: Any) -> tuple[nn.Module, Callable[[Tensor], list[Tensor]]]:
    """Return a network, and what its attention dropouts are given where fused attention is off."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    network = timm.create_model(name, **options).eval()
    before = timm.layers.use_fused_attn()
    timm.layers.set_fused_attn(False)
    try:
        plain = timm.create_model(name, **options).eval()
    finally:
        timm.layers.set_fused_attn(bool(before))
    plain.load_state_dict(network.state_dict())

    def oracle(pictures: Tensor) -> list[Tensor]:
        actual: list[Tensor] = []
        handles = [
            module.register_forward_hook(lambda _module, _args, output: actual.append(output.detach().clone()))
            for text, module in plain.named_modules()
            if text.endswith("attn_drop") and "cls" not in text
        ]
        with torch.no_grad():
            plain(pictures)
        for handle in handles:
            handle.remove()
        return actual

    return network, oracle


def of_transformers(name: str, **options: Any) -> tuple[nn.Module, Callable[[Tensor], list[Tensor]]]:
    """Return a network that runs a fused kernel, and the attentions that it returns where it does not."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**options)
    kind = getattr(transformers, f"{name}Model")
    torch.manual_seed(0)
    network = kind(config).eval()
    plain = kind._from_config(config, attn_implementation="eager").eval()
    plain.load_state_dict(network.state_dict())

    def oracle(pictures: Tensor) -> list[Tensor]:
        actual: list[Tensor] = []  # Swin returns those of the last block of each stage alone
        for module in plain.modules():
            if type(module).__name__ == "SwinAttention":
                module.register_forward_hook(lambda _module, _args, output: actual.append(output[1].detach()))
        with torch.no_grad():
            returned = plain(pictures, output_attentions=True).attentions
        return actual or [each for each in returned if each is not None]

    return network, oracle


def of_torchvision(make: Callable[[Any], nn.Module]) -> tuple[nn.Module, Callable[[Tensor], list[Tensor]]]:
    """Return a network, and what its attention layers return when they are asked."""
    models = pytest.importorskip("torchvision").models
    torch.manual_seed(0)
    network = make(models).eval()

    def oracle(pictures: Tensor) -> list[Tensor]:
        actual: list[Tensor] = []

        def asked(module: nn.Module, args: Any, kwargs: Any) -> None:
            options = dict(kwargs) | {"need_weights": True, "average_attn_weights": False}
            actual.append(type(module).forward(module, *args, **options)[1])

        layers = [module for module in network.modules() if isinstance(module, nn.MultiheadAttention)]
        handles = [layer.register_forward_pre_hook(asked, with_kwargs=True) for layer in layers]
        with torch.no_grad():
            network(pictures)
        for handle in handles:
            handle.remove()
        return actual

    return network, oracle


TINY: Mapping[str, Any] = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48}
NETWORKS: Mapping[str, tuple[Callable[[], tuple[nn.Module, Callable[[Tensor], list[Tensor]]]], int]] = {
    "torchvision-vit": (lambda: of_torchvision(lambda m: m.VisionTransformer(64, 16, 2, 4, 64, 128)), 64),
    "timm-beit": (lambda: of_timm("beit_base_patch16_224", depth=2), 224),
    "timm-eva02": (lambda: of_timm("eva02_tiny_patch14_224", img_size=56, depth=2), 56),
    "timm-pvt": (lambda: of_timm("pvt_v2_b0"), 64),
    "timm-swin": (
        lambda: of_timm(
            "swin_tiny_patch4_window7_224", img_size=64, window_size=4, depths=(2, 2), num_heads=(2, 4), embed_dim=32
        ),
        64,
    ),
    "timm-maxvit": (lambda: of_timm("maxvit_rmlp_pico_rw_256"), 256),
    "transformers-clip": (lambda: of_transformers("CLIPVision", image_size=64, patch_size=16, **TINY), 64),
    "transformers-segformer": (
        lambda: of_transformers(
            "Segformer", depths=[1, 1, 1, 1], hidden_sizes=[8, 16, 24, 32], num_attention_heads=[1, 2, 3, 4]
        ),
        64,
    ),
    "transformers-swin": (
        lambda: of_transformers("Swin", image_size=64, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4),
        64,
    ),
}


@pytest.mark.sample("torchvision-vit")
@pytest.mark.parametrize("name", NETWORKS)
def test_every_block_has_the_weights_that_its_library_shows(name: str) -> None:
    make, size = NETWORKS[name]
    network, oracle = make()
    pictures = drawn(2, 3, size, size)
    expected = oracle(pictures)
    result = hookscope.attention(network, pictures, save_tensors=True)
    assert len(result.blocks) >= len(expected) > 0
    seen = [block for block in result.blocks if block.queries > 1]  # pooling layers have no such dropout
    for block, weights in zip(seen, expected, strict=True):
        ours = result.tensors[block.label]
        assert torch.allclose(ours.reshape(weights.shape), weights, atol=1e-6, rtol=0)
        assert torch.allclose(ours.sum(-1), torch.ones(ours.shape[:-1]), atol=1e-5)
    assert result.warnings == ()
    assert result.census.startswith(f"{len(result.blocks)} of {len(result.blocks)} block")


def test_weights_that_are_made_contiguous_may_be_viewed() -> None:
    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:  # (T, heads, D) each
        weights = torch.einsum("qhd,khd->qhk", queries, keys).softmax(-1).transpose(0, 1).contiguous()
        return torch.bmm(weights.view(-1, *weights.shape[1:]), values.transpose(0, 1))

    tensors = [torch.randn(5, 2, 4) for _ in range(3)]
    assert torch.equal(seen_by_mode(Attends(attend), *tensors)[2], attend(*tensors))
