"""Where queries and keys lie on the picture: prefix tokens, grids, and windows put back where they were cut out."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hookscope.hooks.attention import AttentionCall
from hookscope.hooks.attention_rows import AttentionRows
from hookscope.hooks.attributes import attribute_of
from hookscope.hooks.running import ModuleInput
from hookscope.parameters import arg
from hookscope.statistics.layouts import Layout, layout_of
from hookscope.statistics.token_layout import TokenLayout
from hookscope.statistics.windows import cut, cuts_windows, map_size, padded_to, pair, window_size
from hookscope.text import counted

NOWHERE = -1
"""The cell of a token that has no place on the picture."""

_CHANNELS = "its softmax is over {}, not over tokens"
_UNPLACED = "it is not known where its windows lie on the picture"


class Axes(NamedTuple):
    """How the axes in front of queries and keys count inputs, windows and heads.

    Attributes:
        order: The order of the leading axes that puts inputs first, then windows, then heads.
        inputs: N.
        windows: Number of parts into which the tokens of one input are split; each part attends to itself.
    """

    order: tuple[int, ...]
    inputs: int
    windows: int
    heads: int


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where tokens lie: the cell of each on a grid, row by row. Blocks whose tokens lie alike have the same object.

    Attributes:
        cells: (windows, tokens), `NOWHERE` for tokens without a place.
        grid: (h, w).
        prefix: Class token and registers in front of the grid; 0 where words may be among them.
    """

    cells: Tensor
    grid: tuple[int, int]
    prefix: int


def head_count_of(running: Sequence[ModuleInput]) -> int | None:
    """Return the head count that the attention module has as an attribute; None without one."""
    for frame in running[:2]:
        for name in ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead"):
            count = attribute_of(frame.module, name)
            if isinstance(count, int) and not isinstance(count, bool):
                return count
    return None


def axes_of(lead: Sequence[int], inputs: int, heads: int | None) -> Axes | str:
    """Return what the axes in front of queries and keys count, or in words why that is not known."""
    lead = tuple(lead)
    if not lead:
        return Axes((), 1, 1, 1) if inputs == 1 else "it has no batch axis"
    has_no_batch = len(lead) == 1 and inputs == 1 and lead[0] == heads
    is_in_front = len(lead) == 2 and lead[0] != inputs == lead[1] and (heads == lead[0] or bool(lead[0] % inputs))
    if has_no_batch or is_in_front:
        return Axes((1, 0) if is_in_front else (0,), inputs, 1, lead[0])
    if lead[0] % inputs:
        return f"its first axis of {lead[0]} does not count {inputs} inputs"
    groups = lead[0] // inputs
    if len(lead) == 1:
        is_folded = heads is not None and groups % heads == 0  # SAM's windows, and the heads of each
        return Axes((0,), inputs, groups // heads, heads) if heads and is_folded else Axes((0,), inputs, groups, 1)
    places = [place for place in range(1, len(lead)) if lead[place] == heads] if len(lead) > 2 else [1]
    if math.prod(lead[1:]) == heads:  # one axis, or groups of heads that share their keys
        places = [*range(1, len(lead))]
    elif len(places) != 1:
        return f"it is not known which of its axes {'x'.join(map(str, lead))} counts heads"
    others = [place for place in range(1, len(lead)) if place not in places]
    windows = groups * math.prod(lead[place] for place in others)
    return Axes((0, *others, *places), inputs, windows, math.prod(lead[place] for place in places))


def axes_in(call: AttentionCall, rows: AttentionRows, inputs: int) -> Axes | str:
    """Return what the axes in front of queries count, or in words why they are not known or keys are no tokens."""
    if 0 in rows.shape:
        return "its queries or keys are empty"
    axes = axes_of(rows.shape[:-2], inputs, head_count_of(call.running))
    if isinstance(axes, str):
        return axes
    axes = with_heads_found(call, rows, axes)
    return not_over_tokens(call, rows, axes) or axes


def with_heads_found(call: AttentionCall, rows: AttentionRows, axes: Axes) -> Axes:
    """Return axes that count parts of an input as heads, if the module does not tell how many heads it has.

    The parts are windows if the modules were given as many tokens as all parts of an input hold together, or if the
    module was given the parts. With as many heads as inputs, strides decide: values of one head lie side by side.
    """
    *lead, _, keys = rows.shape
    if len(lead) == 1 and axes.heads > 1 and _is_given_parts(call.running[0], lead[0], keys):
        return Axes((0,), axes.inputs, lead[0] // axes.inputs, 1)
    counts = [*_token_counts(call.running)]
    strides = rows.strides if call.product is None else call.product.values.stride()[:-2]
    if len(lead) == 2 and lead[0] == lead[1] == axes.inputs > 1 and len(strides) == 2:
        return axes._replace(order=(1, 0)) if strides[0] < strides[1] else axes
    is_whole = any(axes.inputs * keys in count for count in counts)
    is_cut = any(axes.inputs * axes.windows * keys in count for count in counts)
    if axes.windows == 1 or is_cut or not is_whole:
        return axes
    if axes.order == (0,) and axes.heads == 1:
        return Axes(axes.order, axes.inputs, 1, axes.windows)
    if axes.order == (0, 1) and lead[1] == axes.inputs:
        return Axes((1, 0), axes.inputs, 1, lead[0])
    return axes


def _is_given_parts(inner: ModuleInput, parts: int, tokens: int) -> bool:
    """Tell whether a module was given `parts` windows of `tokens` each: it then computes one head at a time."""
    args = (*inner.args, *inner.kwargs.values())
    shape = next((tuple(item.shape) for item in args if isinstance(item, Tensor) and item.is_floating_point()), ())
    counts = {3: shape[1:2], 4: (math.prod(shape[1:3]), math.prod(shape[2:4]))}.get(len(shape), ())
    return shape[:1] == (parts,) and tokens in counts


def arranged(rows: Tensor, axes: Axes) -> Tensor:
    """Return rows (..., queries, keys) as (inputs, windows, heads, queries, keys)."""
    if axes.order != tuple(range(rows.dim() - 2)):
        rows = rows.permute(*axes.order, rows.dim() - 2, rows.dim() - 1)
    return rows.reshape(axes.inputs, axes.windows, axes.heads, *rows.shape[-2:])


# --- Whether it is attention over tokens ---


def not_over_tokens(call: AttentionCall, rows: AttentionRows, axes: Axes) -> str:
    """Return in a few words why the keys are no tokens; "" where they are.

    Channels (XCiT) and neighbourhoods (VOLO) are also multiplied by a softmax. Keys are tokens
    if the running modules were given as many tokens as all windows hold together; or if there are as many queries, and
    as many keys as cells of a grid that was seen. The fused function is refused only if features, not queries, are as
    many as the tokens.
    """
    *_, queries, keys = rows.shape
    counts = [*_token_counts(call.running)]
    if any(axes.inputs * axes.windows * keys in sizes for sizes in counts):
        over_channels = _over_channels(call, keys) if rows.features in (0, keys) else ""
        return over_channels or (_for_each_channel(call, rows, axes, counts) if call.entry == "softmax" else "")
    if call.entry == "multi-head":
        return ""
    if call.entry == "scaled dot product":
        swapped = any(axes.inputs * axes.windows * rows.features in sizes for sizes in counts)
        in_place = any(axes.inputs * axes.windows * queries in sizes for sizes in counts)
        return f"it attends over {counted(keys, 'channel')}" if swapped and not in_place else ""
    grids = {height * width for height, width in call.grids}
    has_queries = queries == 1 or any(axes.inputs * axes.windows * queries in sizes for sizes in counts)
    has_queries |= axes.windows == 1 and bool(grids & {queries, queries - 1})
    if has_queries and grids & {keys, keys - 1}:
        return _over_channels(call, keys)
    tokens = call.product.values.shape[-2:] if call.product is not None and queries == keys else ()
    if any(axes.inputs * axes.windows * token in count for token in tokens for count in counts):
        return _CHANNELS.format(counted(keys, "channel"))
    return f"its softmax is over {keys} keys that are not known to be tokens (neighbours, or pooled tokens)"


def _over_channels(call: AttentionCall, keys: int) -> str:
    """Return why a call with as many channels as tokens is attention over channels: values are transposed; else "".

    The channels of a token lie side by side in memory, so along the axis of tokens values are further apart.
    """
    if call.product is None:
        return ""
    values, axis = call.product.values, call.product.keys_of_values
    other = -1 if axis == -2 else -2
    if values.dim() < 2 or axis not in (-1, -2) or values.shape[other] != keys:
        return ""
    return _CHANNELS.format(counted(keys, "channel")) if values.stride(axis) < values.stride(other) else ""


def _for_each_channel(call: AttentionCall, rows: AttentionRows, axes: Axes, counts: Sequence[set[int]]) -> str:
    """Return why a softmax is for each channel, not each token (linear attention, lambda layers); "" if it is not.

    Queries are tokens if there is one, as many as the modules were given, as many as cells of a grid, or as many as
    every other row and column of the keys' grid has (LeViT).
    """
    *_, queries, keys = rows.shape
    reason = f"its softmax is for each of {queries} channels, not for each token (linear attention)"
    if queries % keys == 0:  # or grouped queries in one axis
        reason = f"it is not known whether its softmax is for each of {queries} tokens or of {queries} channels"
    heads = head_count_of(call.running[:1])
    if heads is not None and heads > 1 == axes.heads * axes.windows:
        return reason
    if queries == 1 or any(axes.inputs * axes.windows * queries in count for count in counts):
        return ""
    halved = layout_of((1, keys, 1), 1, 2, call.grids, prefix=0)
    grids = [*call.grids]
    if isinstance(halved, Layout):
        grids.append((-(-halved.grid[0] // 2), -(-halved.grid[1] // 2)))
    with_class_token = (0, 1)
    return "" if any(queries - high * wide in with_class_token for high, wide in grids) else reason


def _token_counts(running: Sequence[ModuleInput]) -> Iterator[set[int]]:
    """Yield how many tokens all inputs may have together, for each tensor that the nearest modules were given."""
    for frame in running[:3]:
        arguments = [*frame.args, *frame.kwargs.values()]
        for tensor in arguments:
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                continue
            shape = tuple(tensor.shape)
            if len(shape) == 2:
                yield {shape[0]}
            elif len(shape) == 3:
                yield {shape[0] * shape[1]}
            elif len(shape) > 3:  # pictures or clips
                sizes = {math.prod(shape[:-1]), shape[0] * math.prod(shape[2:])}
                window = pair(attribute_of(frame.module, "window_size"))
                if len(shape) == 4 and window is not None and all(window):  # SAM's global blocks have windows of 0
                    sizes.add(shape[0] * math.prod(padded_to((shape[1], shape[2]), window)))
                yield sizes


# --- Where they lie ---


def places_of(
    call: AttentionCall, rows: AttentionRows, axes: Axes, tokens: TokenLayout
) -> tuple[Places | None, Places | None, str]:
    """Return where queries and keys lie, and in words why keys have no place where they have none."""
    *_, queries, keys = rows.shape
    if tokens.stated is None and tokens.halvings:
        return None, None, "its tokens lie in the order of unrolled windows, not of the picture's rows"
    if axes.windows > 1 or any(cuts_windows(frame.module) for frame in call.running):
        windows = _windows_of(call, rows, axes)
        return (None, None, windows) if isinstance(windows, str) else (windows, windows, "")
    appended = _appended_keys(call)
    of_queries, of_keys = tokens.of_attention(call.running, queries, keys - appended, call.grids, call.patches)
    if isinstance(of_keys, str):
        return None, None, _no_place(keys, of_keys)
    has_words = tokens.are_words_in_front(call.running, of_keys.prefix or 0)
    keys_lie = _on_grid(of_keys, appended, has_words=has_words)
    if of_queries == of_keys and not appended:
        return keys_lie, keys_lie, ""
    return (_on_grid(of_queries, has_words=has_words) if isinstance(of_queries, Layout) else None), keys_lie, ""


def _appended_keys(call: AttentionCall) -> int:
    """Return the number of keys that torch's own attention appends to the tokens: a bias, a zero."""
    module = call.running[0].module
    if call.entry != "multi-head" or not isinstance(module, nn.MultiheadAttention):
        return 0
    return (module.bias_k is not None) + bool(module.add_zero_attn)


def _no_place(keys: int, reason: str) -> str:
    """Return in words why keys have no place; `reason` is from `TokenLayout.of_attention`."""
    if keys == 1:
        return "it has one token"
    if reason.startswith("has "):
        return f"it {reason}"
    hint = f"; give {arg('tokens')} prefix=1,grid=HEIGHTxWIDTH, or grid=HEIGHTxWIDTH,suffix=N with words behind patches"
    return f"its {keys} keys are {reason}{hint if 'words' in reason else ''}"


def _on_grid(layout: Layout, appended: int = 0, *, has_words: bool) -> Places:
    height, width = layout.grid
    return _row_by_row(height, width, layout.prefix or 0, layout.suffix + appended, has_words=has_words)


@lru_cache(maxsize=8)
def _row_by_row(height: int, width: int, prefix: int, suffix: int, *, has_words: bool) -> Places:
    in_front, behind = (torch.full((count,), NOWHERE, device="cpu") for count in (prefix, suffix))
    cells = torch.cat([in_front, torch.arange(height * width, device="cpu"), behind])
    return Places(cells[None], (height, width), 0 if has_words else prefix)


def _windows_of(call: AttentionCall, rows: AttentionRows, axes: Axes) -> Places | str:
    """Return the places of windows that were cut out of a map row by row, after a cyclic shift (Swin's).

    The shift is what the network was seen to do; the size of a window is the module's own. The map may be padded before
    it is shifted (torchvision, transformers) or after (timm).
    """
    queries, keys = rows.shape[-2:]
    block = next((frame for frame in call.running if cuts_windows(frame.module)), None)
    size = None if block is None else map_size((*block.args, *block.kwargs.values()))
    window = window_size((frame.module for frame in call.running), keys)
    if size is None or window is None or queries != keys:
        return _UNPLACED
    padded = padded_to(size, window)
    rolled, shift = call.roll or (size, (0, 0))
    if padded[0] // window[0] * (padded[1] // window[1]) != axes.windows or rolled not in (size, padded):
        return _UNPLACED
    return _in_windows(size, window, shift, is_padded_first=rolled == padded)


@lru_cache(maxsize=8)
def _in_windows(
    size: tuple[int, int], window: tuple[int, int], shift: tuple[int, int], *, is_padded_first: bool
) -> Places:
    padded = padded_to(size, window)
    cells = torch.arange(size[0] * size[1], device="cpu").reshape(size)
    pad = (0, padded[1] - size[1], 0, padded[0] - size[0])
    if is_padded_first:
        cells = torch.nn.functional.pad(cells, pad, value=NOWHERE).roll((-shift[0], -shift[1]), (0, 1))
    else:
        cells = torch.nn.functional.pad(cells.roll((-shift[0], -shift[1]), (0, 1)), pad, value=NOWHERE)
    return Places(cut(cells, window), size, 0)


@lru_cache(maxsize=1)  # the next block has the same places
def distances(queries: Places, keys: Places, begin: int, end: int) -> Tensor:
    """Return how far keys lie from the queries from `begin` up to `end`, (windows, queries, keys).

    In patches of the queries' grid; keys of a coarser grid lie at the middle of what they cover. 0 where either has no
    place.
    """
    cells = queries.cells[:, begin:end]
    down = queries.grid[0] / keys.grid[0], queries.grid[1] / keys.grid[1]

    def coordinates(places: Tensor, columns: int, steps: tuple[float, float]) -> Tensor:
        places = places.clamp_min(0)
        return torch.stack([(places // columns + 0.5) * steps[0], (places % columns + 0.5) * steps[1]], -1).float()

    away = torch.cdist(
        coordinates(cells, queries.grid[1], (1.0, 1.0)),
        coordinates(keys.cells, keys.grid[1], down),
        compute_mode="donot_use_mm_for_euclid_dist",
    )
    return away * ((cells >= 0)[:, :, None] & (keys.cells >= 0)[:, None, :])
