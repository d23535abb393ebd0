"""Attention weights, exactly, from what a call was given: a few queries at a time, in float32 or float64."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from inspect import Signature, signature
from math import sqrt
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the name it has everywhere
from torch import Tensor


class AttentionRows(NamedTuple):
    """The weights of one call, computed when they are asked for.

    Attributes:
        shape: Of all of them: batch, windows and heads first, then queries, then keys.
        part: Takes the first query and the one after the last; returns their rows in float32 or float64, in memory that
            may be overwritten.
        features: Numbers in each query; 0 where that is not known.
    """

    shape: tuple[int, ...]
    part: Callable[[int, int], Tensor]
    features: int = 0


class NotExactError(Exception):
    """Weights that cannot be computed from what a call was given; the message is why, in a few words."""


def of_scaled_dot_product(*args: Any, **kwargs: Any) -> AttentionRows:
    """Return the weights that `F.scaled_dot_product_attention` multiplies its values with, dropout apart."""
    return _of_scaled_dot_product(*args, **kwargs)


def _of_scaled_dot_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,  # noqa: ARG001 - weights before dropout are meant
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionRows:
    del value
    if query.is_nested or key.is_nested:
        raise NotExactError("it runs over nested tensors")
    if enable_gqa and query.dim() > 2 and key.size(-3) != query.size(-3):
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
    lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])  # type: ignore[no-untyped-call]
    shape = (*lead, query.size(-2), key.size(-2))
    held = partial(
        _scores_to_rows,
        query.detach(),
        _transposed(key.detach()),
        None if attn_mask is None else attn_mask.detach(),
        1 / sqrt(query.size(-1)) if scale is None else float(scale),
        is_causal=is_causal,
    )
    return AttentionRows(shape, held, query.size(-1))


def _transposed(key: Tensor) -> Callable[[], Tensor]:
    """Return the keys, (..., E, keys), in the dtype that rows are computed in, made once."""
    return cache(lambda: _wide(key).transpose(-2, -1))


def _scores_to_rows(
    query: Tensor,
    keys: Callable[[], Tensor],
    mask: Tensor | None,
    scale: float,
    begin: int,
    end: int,
    *,
    is_causal: bool,
) -> Tensor:
    scores = (_wide(query[..., begin:end, :]) * scale) @ keys()
    if mask is not None:
        mask = mask[..., begin:end, :] if mask.dim() > 1 and mask.size(-2) > 1 else mask
        hidden = mask.dtype is torch.bool
        scores = scores.masked_fill_(~mask, -torch.inf) if hidden else scores + mask.to(scores.dtype)
    if is_causal:
        places = torch.arange(scores.size(-1), device=scores.device)
        later = places > torch.arange(begin, end, device=scores.device)[:, None]
        scores = scores.masked_fill_(later, -torch.inf)
    rows = scores.softmax(-1)
    if mask is not None and not bool(torch.isfinite(rows[..., 0]).all()):
        # Queries that may look at nothing get zeros, as from torch's own kernels.
        rows = rows.masked_fill_((scores == -torch.inf).all(-1, keepdim=True), 0.0)
    return rows


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


@dataclass(slots=True)
class MultiHeadCall:
    """One call of `F.multi_head_attention_forward`, whose inner calls no mode sees: a mode is off in its own handler.

    The function is run with its own code, in which two names stand for functions that also note what they are given:
    the output is the same, and nothing is computed twice. Its own name stands for what is run, since it hands itself
    to the modes around it, such as that of a default device.
    """

    _rows: AttentionRows | None = None

    def noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function as it is to be run; itself if it is not torch's own."""
        if not isinstance(function, FunctionType) or function.__globals__ is not vars(F):
            return function
        names = vars(F) | {"scaled_dot_product_attention": self._fused, "softmax": self._softmax}
        made = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
        made.__kwdefaults__ = function.__kwdefaults__
        names[function.__name__] = made
        return made

    def rows(self, *args: Any, **kwargs: Any) -> AttentionRows:
        """Return the weights of the call, which had these arguments, before dropout.

        Raises:
            NotExactError: If nothing was noted, such as in the function of another library.
        """
        if self._rows is None:
            raise NotExactError("its attention function is not torch's own")
        *lead, queries, keys = self._rows.shape
        if len(lead) > 1:
            return self._rows
        heads = _mha_signature().bind(*args, **kwargs).arguments["num_heads"]
        part, shape = self._rows.part, (lead[0] // heads, heads)
        return AttentionRows((*shape, queries, keys), lambda begin, end: part(begin, end).reshape(*shape, -1, keys))

    def _fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
    ) -> Tensor:
        # The scale as this function has it where it returns weights, for their last bits.
        scale = sqrt(1 / query.size(-1))
        self._rows = _of_scaled_dot_product(query, key, value, attn_mask, is_causal=is_causal, scale=scale)
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal)

    def _softmax(self, scores: Tensor, dim: int) -> Tensor:
        weights = F.softmax(scores, dim=dim)
        self._rows = of_weights(weights.detach())
        return weights


@cache
def _mha_signature() -> Signature:
    return signature(F.multi_head_attention_forward)


def of_weights(weights: Tensor) -> AttentionRows:
    """Return weights (..., queries, keys) that a network has computed itself."""

    def part(begin: int, end: int) -> Tensor:
        some = weights[..., begin:end, :]
        return some.float() if some.dtype not in (torch.float32, torch.float64) else some.clone()

    return AttentionRows(tuple(weights.shape), part)


def autocasts() -> dict[str, torch.dtype]:
    """Return the dtype of each kind of device that autocast is on for."""
    kinds = ("cpu", "cuda", "mps")
    return {kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}


@contextmanager
def autocast_as(casts: dict[str, torch.dtype]) -> Iterator[None]:
    """Put autocast for the block as `autocasts` found it; {} switches it off."""
    with ExitStack() as block:
        for kind in {*casts, *autocasts()}:
            block.enter_context(torch.autocast(kind, casts.get(kind), enabled=kind in casts))
        yield
