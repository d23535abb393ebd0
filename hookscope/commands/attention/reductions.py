"""Reduce attention weights to numbers and maps during a call, a few queries at a time."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hookscope.commands.attention.places import Axes, Places, arranged, distances
from hookscope.commands.attention.queries import Chosen
from hookscope.hooks.attention_rows import AttentionRows, Memory

# Weights in memory at a time, in bytes; what is computed from them takes as much again. Ours.
_CHUNK_BYTES = 2**22


@dataclass(slots=True)
class CallNumbers:
    """The results of one call.

    Attributes:
        heads: Means over queries by name, (N, heads), on the CPU: "entropy", "top" (the largest share), "distance"
            where the grid is known, and "prefix", (N, heads, prefix), the share of each token in front of the grid. {}
            unless they were asked for.
        top_token: (N, heads), the key with the largest share; None for windows.
        received: The share of all queries that each key has, (N, windows, heads, keys); None unless it was asked for.
        rows: By query, its weights for each input, (heads, keys of its window).
        chosen: By query, its place in the block for each input; None where the block has no such query.
        whole: All weights, mean over heads, (N, queries, keys), if they were asked for.
    """

    heads: dict[str, Tensor] = field(default_factory=dict)
    top_token: Tensor | None = None
    received: Tensor | None = None
    rows: Sequence[Sequence[Tensor | None]] = ()
    chosen: Sequence[Sequence[Chosen | None]] = ()
    whole: Tensor | None = None


def chunks_of(rows: AttentionRows) -> Iterator[tuple[int, int]]:
    """Yield the first query of each chunk and the one after its last."""
    queries = rows.shape[-2]
    step = max(1, _CHUNK_BYTES * queries // (4 * math.prod(rows.shape)))
    for begin in range(0, queries, step):
        yield begin, min(begin + step, queries)


def reduced(
    rows: AttentionRows,
    axes: Axes,
    places: tuple[Places | None, Places | None],
    chosen: Sequence[Sequence[Chosen | None]],
    *,
    keeps_whole: bool,
    numbers: bool,
    memory: Memory,
    save: Callable[[Tensor, int], None] | None = None,
) -> CallNumbers:
    """Return the numbers of a call, and the rows that are drawn.

    Args:
        rows: The weights.
        axes: How their leading axes count inputs, windows and heads.
        places: Where queries lie, and where keys lie; None if that is not known.
        chosen: By query, its place in this block for each input.
        keeps_whole: Keep all weights, averaged over heads.
        numbers: Measure heads; without it, only rows that are drawn may be computed.
        memory: Reused by the blocks of a pass.
        save: Called with some rows, (N, windows, heads, some queries, keys), and the position of the first.
    """
    query_count, (queries, keys) = rows.shape[-2], places
    totals: dict[str, Tensor] = {}
    whole: list[Tensor] = []
    picked: list[list[Tensor | None]] = [[None] * axes.inputs for _ in chosen]
    tokens = {choice.token for by_input in chosen for choice in by_input if choice is not None}
    has_received = numbers or None in tokens
    needs_all = has_received or keeps_whole or save is not None
    for begin, end in chunks_of(rows) if needs_all else ((token, token + 1) for token in tokens if token is not None):
        weights, entropy = rows.part(begin, end, memory, numbers)
        part = arranged(weights, axes)  # (N, windows, heads, some queries, keys)
        if save is not None:
            save(part, begin)
        if has_received:
            _add(totals, "received", part.sum(3))
        if entropy is not None:
            _add(totals, "entropy", arranged(entropy[..., None], axes).sum((1, 3, 4)))
            if queries is not None and keys is not None and query_count > 1:
                _add_distances(totals, part, queries, keys, begin, memory)
        if keeps_whole:
            whole.append(part.mean(2)[:, 0].float().cpu())
        _copy_drawn_rows(picked, part, begin, chosen)
    received = totals["received"] / query_count if totals else None
    reduction = CallNumbers(rows=picked, chosen=chosen, whole=torch.cat(whole, 1) if whole else None)
    if None in tokens:
        reduction.received = received
    if numbers and received is not None:
        top = received.max(-1)
        reduction.top_token = top.indices[:, 0].cpu() if axes.windows == 1 else None
        reduction.heads = {
            "entropy": (totals["entropy"] / (query_count * axes.windows)).cpu(),
            "prefix": received[:, 0, :, : keys.prefix if keys is not None else 0].cpu(),
            "top": top.values.mean(1).cpu(),
        }
        if "distance" in totals:
            reduction.heads["distance"] = (totals["distance"] / totals["counted"]).cpu()
    return reduction


def _copy_drawn_rows(
    picked: Sequence[list[Tensor | None]], part: Tensor, begin: int, chosen: Sequence[Sequence[Chosen | None]]
) -> None:
    for rows, by_input in zip(picked, chosen, strict=True):
        for at, choice in enumerate(by_input):
            if choice is not None and choice.token is not None and 0 <= choice.token - begin < part.size(3):
                rows[at] = part[at, choice.window, :, choice.token - begin].clone()


def _add_distances(
    totals: dict[str, Tensor], part: Tensor, queries: Places, keys: Places, begin: int, memory: Memory
) -> None:
    """Add each query's mean distance from the keys, by their weight; only tokens on the picture count."""
    end = begin + part.size(3)
    away = distances(queries, keys, begin, end).to(part.device, part.dtype)
    with_places = (keys.cells >= 0).to(part.device, part.dtype)
    valid = (queries.cells[:, begin:end] >= 0).to(part.device)
    products = memory.tensor("products", part.shape, part.dtype, part.device)
    weighted = torch.mul(part, away[None, :, None], out=products).sum(-1)
    on_patches = torch.mul(part, with_places[None, :, None, None], out=products).sum(-1)
    counts = valid[None, :, None] & (on_patches > 0)
    _add(totals, "distance", torch.where(counts, weighted / on_patches, 0).sum((1, 3)))
    _add(totals, "counted", counts.sum((1, 3)))


def _add(totals: dict[str, Tensor], name: str, values: Tensor) -> None:
    totals[name] = totals[name] + values if name in totals else values


def on_grid(weights: Tensor, keys: Places, window: int | None = None) -> tuple[Tensor, Tensor]:
    """Return weights (windows, heads, keys) on the keys' grid, (heads, h * w), and the sum of the others, (heads,).

    The weights of a query that may look at no key are 0. `weights` hold one `window`, or all windows if it is None.
    """
    cells = keys.cells if window is None else keys.cells[window : window + 1]
    weights = weights.cpu().float().movedim(0, 1).reshape(weights.size(1), -1)
    flat = cells.reshape(-1)
    valid = flat >= 0
    grid = weights.new_zeros(weights.size(0), keys.grid[0] * keys.grid[1])
    return grid.index_add_(1, flat[valid], weights[:, valid]), weights[:, ~valid].sum(-1)
