"""Attention weights, exactly, from what a call was given: a few queries at a time, in float32 or float64."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod, sqrt
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the name it has everywhere
from torch import Tensor

from hookscope.hooks.attributes import argument


class Memory:
    """Reused memory to compute parts of weights in: page faults of fresh memory take as long as the sums."""

    def __init__(self) -> None:
        """Start without memory."""
        self._held: dict[str, Tensor] = {}

    def tensor(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor to write to, in the memory of the last one of this name."""
        count, held = prod(shape), self._held.get(name)
        if held is None or held.numel() < count or (held.dtype, held.device) != (dtype, device):
            with torch.inference_mode(False):
                held = self._held[name] = torch.empty(count, dtype=dtype, device=device)
        return held[:count].view(shape)


class Part(NamedTuple):
    """The weights of some queries.

    Attributes:
        weights: (..., queries, keys), in float32 or float64; overwritten by the next part in the same memory.
        entropy: Of each row, (..., queries), in nats; 0 for a row without weight. None unless it was asked for.
    """

    weights: Tensor
    entropy: Tensor | None


class AttentionRows(NamedTuple):
    """The weights of one call, computed when they are asked for.

    Attributes:
        shape: Sizes of batch, windows and heads, then queries, then keys.
        part: Computes queries from `begin` to before `end`; also given the memory, and whether entropy is wanted.
        features: Size of a query vector; 0 if unknown.
        strides: Those of the axes in front of queries; () if unknown.
    """

    shape: tuple[int, ...]
    part: Callable[[int, int, Memory, bool], Part]
    features: int = 0
    strides: tuple[int, ...] = ()


class NotExactError(Exception):
    """Weights cannot be computed from the arguments of a call; the message has the reason, in a few words."""


def of_scaled_dot_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,  # noqa: ARG001 - weights before dropout are meant
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionRows:
    """Return the weights that `F.scaled_dot_product_attention` multiplies its values with, before dropout.

    Raises:
        NotExactError: If its tensors are nested.
    """
    del value
    if query.is_nested or key.is_nested:
        raise NotExactError("it runs over nested tensors")
    if enable_gqa and query.dim() > 2 and key.size(-3) != query.size(-3):
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
    lead = query.shape[:-2]
    if lead != key.shape[:-2]:
        lead = torch.broadcast_shapes(lead, key.shape[:-2])  # type: ignore[no-untyped-call]
    shape = (*lead, query.size(-2), key.size(-2))
    factor = 1 / sqrt(query.size(-1)) if scale is None else float(scale)
    mask = _in_full(attn_mask)
    query, key, mask = _as_autocast(query), _as_autocast(key), None if mask is None else _as_autocast(mask)
    keys = cache(lambda: _wide(key).transpose(-2, -1))

    def part(begin: int, end: int, memory: Memory, with_entropy: bool) -> Part:
        some = _wide(query[..., begin:end, :]) * factor
        products = memory.tensor("products", (*lead, end - begin, shape[-1]), some.dtype, some.device)
        scores = torch.matmul(some, keys(), out=products)
        _hide(scores, mask, begin, end, is_causal=is_causal)
        return _softmax(scores, memory, hides=mask is not None or is_causal, with_entropy=with_entropy)

    return AttentionRows(shape, part, query.size(-1), query.stride()[:-2])


def _in_full(mask: Tensor | None) -> Tensor | None:
    """Write out torch's causal biases, which hold no values; other masks are returned unchanged."""
    if mask is None or type(mask) is Tensor:
        return mask
    from torch.nn.attention.bias import CausalBias, CausalVariant  # noqa: PLC0415 - torch itself imports it on demand

    if not isinstance(mask, CausalBias):
        return mask
    queries, keys = mask.seq_len_q, mask.seq_len_kv
    allowed = torch.ones(queries, keys, dtype=torch.bool, device=mask.device)
    return allowed.tril(keys - queries if mask.variant is CausalVariant.LOWER_RIGHT else 0)


def _as_autocast(tensor: Tensor) -> Tensor:
    """Round a tensor as autocast rounds the arguments of the fused function."""
    kind = tensor.device.type
    is_rounded = tensor.is_floating_point() and tensor.dtype is not torch.float64 and torch.is_autocast_enabled(kind)
    return tensor.to(torch.get_autocast_dtype(kind)) if is_rounded else tensor


def _hide(scores: Tensor, mask: Tensor | None, begin: int, end: int, *, is_causal: bool) -> None:
    """Mask the scores of queries from `begin` to before `end`, in place."""
    if mask is not None:
        mask = mask.reshape(mask.shape[-scores.dim() :])
        mask = mask[..., begin:end, :] if mask.dim() > 1 and mask.size(-2) > 1 else mask
        if mask.dtype is torch.bool:
            scores.masked_fill_(~mask, -torch.inf)
        else:
            scores.add_(mask.to(scores.dtype))
    if is_causal:
        places = torch.arange(scores.size(-1), device=scores.device)
        scores.masked_fill_(places > torch.arange(begin, end, device=scores.device)[:, None], -torch.inf)


def _softmax(scores: Tensor, memory: Memory, *, hides: bool, with_entropy: bool) -> Part:
    """Return the softmax of scores, which are overwritten; some may be -inf where a mask `hides` keys.

    With s the scores less the largest of a row, p = exp(s) / Z and the largest p is 1 / Z. The entropy of the row is
    ln Z - sum of p s: one logarithm for a row, and no cancellation, since neither is negative.
    """
    into = memory.tensor("weights", scores.shape, scores.dtype, scores.device)
    if not (hides or with_entropy):
        return Part(torch.softmax(scores, -1, out=into), None)
    lowest = torch.finfo(scores.dtype).min
    largest = scores.amax(-1, keepdim=True)
    scores = scores.sub_(largest.clamp_min(lowest) if hides else largest)
    if hides:
        scores = scores.clamp_min_(lowest)  # 0 times it is 0, and not NaN
    weights = torch.softmax(scores, -1, out=into)
    entropy = -weights.amax(-1).log_() - scores.mul_(weights).sum(-1)
    blind = largest == -torch.inf if hides else None
    if blind is not None and bool(blind.any()):
        # Queries that may look at nothing get zeros, as from torch's own kernels.
        weights, entropy = weights.masked_fill_(blind, 0.0), entropy.masked_fill_(blind[..., 0], 0.0)
    return Part(weights, entropy if with_entropy else None)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


@dataclass(slots=True)
class MultiHeadCall:
    """One call of `F.multi_head_attention_forward`, whose inner calls no mode sees: a mode is off in its own handler.

    The function's code runs with two of its globals replaced by functions that also note their arguments: the output
    is the same, and nothing is computed twice. Its own name is replaced, too, because it passes itself to the modes
    around it, such as that of a default device.
    """

    _rows: AttentionRows | None = None

    def noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with these globals replaced; the function itself if it is not torch's own."""
        if not isinstance(function, FunctionType) or function.__globals__ is not vars(F):
            return function
        names = vars(F) | {"scaled_dot_product_attention": self._fused, "softmax": self._softmax}
        made = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
        made.__kwdefaults__ = function.__kwdefaults__
        names[function.__name__] = made
        return made

    def rows(self, *args: Any, **kwargs: Any) -> AttentionRows:
        """Return the weights, before dropout, of the call with these arguments.

        Raises:
            NotExactError: If nothing was noted, such as in the function of another library.
        """
        if self._rows is None:
            raise NotExactError("its attention function is not torch's own")
        *lead, queries, keys = self._rows.shape
        if len(lead) > 1:
            return self._rows
        heads = argument(args, kwargs, 4, "num_heads")
        held, shape = self._rows.part, (lead[0] // heads, heads)

        def part(begin: int, end: int, memory: Memory, with_entropy: bool) -> Part:
            weights, entropy = held(begin, end, memory, with_entropy)
            weights = weights.reshape(*shape, -1, keys)
            return Part(weights, None if entropy is None else entropy.reshape(weights.shape[:-1]))

        return AttentionRows((*shape, queries, keys), part)

    def _fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
    ) -> Tensor:
        # Torch computes the scale so where it returns weights: other formulas differ in the last bits.
        scale = sqrt(1 / query.size(-1))
        self._rows = of_scaled_dot_product(query, key, value, attn_mask, is_causal=is_causal, scale=scale)
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal)

    def _softmax(self, scores: Tensor, dim: int) -> Tensor:
        weights = F.softmax(scores, dim=dim)
        self._rows = of_weights(weights.detach())
        return weights


def of_weights(weights: Tensor) -> AttentionRows:
    """Return weights (..., queries, keys) that a network has computed itself."""

    def part(begin: int, end: int, memory: Memory, with_entropy: bool) -> Part:
        some = _wide(weights[..., begin:end, :])
        if not with_entropy:
            return Part(some, None)
        # torch.special.entr takes almost three times as long.
        product = memory.tensor("products", some.shape, some.dtype, some.device)
        logarithms = torch.clamp_min(some, torch.finfo(some.dtype).tiny, out=product).log_()
        return Part(some, -logarithms.mul_(some).sum(-1))

    return AttentionRows(tuple(weights.shape), part)
