"""Where transformers attend: the weights of each block and head as numbers and maps, and the blocks not seen."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hookscope.results.concentration import Extent, MapValues
from hookscope.results.inputs import InputRecord
from hookscope.results.json_form import UNSTORED, in_json
from hookscope.results.network import NetworkResult
from hookscope.text import counted, some_of

ONE_TOKEN = 0.9
"""A head is flagged if a single key has more than this share of its weight, averaged over queries."""

ROLLOUT = "rollout"
"""The `block` of a map that follows attention through all blocks."""


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """A module whose attention weights were seen.

    Attributes:
        label: Name of the module that computes it, "blocks.3.attn"; "#1" marks its second call in one pass.
        kind: Class name of the module.
        entry: What its forward calls: "scaled dot product", "multi-head", or "softmax", followed by a product.
        queries: Number of queries; in a network with windows, per window.
        keys: Number of keys, likewise.
        prefix: Tokens in front of the grid, among the keys: class token, registers; None where keys have no grid.
        query_grid: Grid of the queries on the picture, (h, w); None if it is not known, or for a pooling query.
        key_grid: Grid of the keys; the grid of the whole map if windows were put back.
        windows: Number of windows; 1 without windows.
        remark: Why no map can be drawn; "" if it can be drawn.
    """

    label: str
    kind: str
    entry: str
    heads: int
    queries: int
    keys: int
    prefix: int | None
    query_grid: tuple[int, int] | None
    key_grid: tuple[int, int] | None
    windows: int = 1
    remark: str = ""


@dataclass(frozen=True, slots=True)
class UnseenBlock:
    """A module that computes attention in a way that cannot be seen, or not over tokens.

    Attributes:
        reason: In a few words: "its softmax is over 32 channels".
    """

    label: str
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class HeadRow:
    """One head of one block, averaged over queries and inputs.

    Attributes:
        block: Label of the block.
        index: Position of the block in `Attention.blocks`, from 0.
        head: From 0.
        entropy: Of a query's weights, in nats; at most the logarithm of the number of keys.
        distance: Weighted mean distance from a query's patch to the patches it looks at, in patches of the queries'
            grid; weight on other tokens is left out. None if the grid is not known.
        class_share: Share of the weight on the class token; None without one.
        register_share: Share on registers (or a distillation token) together; None without any.
        top_share: The largest share of a single key, averaged over queries, and over windows.
        top_token: The key's index, for the first input; None for windows.
    """

    block: str
    index: int
    head: int
    entropy: float
    distance: float | None
    class_share: float | None
    register_share: float | None
    top_share: float
    top_token: int | None

    @property
    def is_one_token(self) -> bool:
        """Whether all queries of the head look at the same token."""
        return self.top_share > ONE_TOKEN


@dataclass(frozen=True, slots=True)
class AttentionMap(MapValues):
    """How much of a query's attention each place of the picture gets.

    Attributes:
        input_index: Of `Attention.inputs`.
        block: Label of the block; "rollout" for attention followed through all blocks.
        head: From 0; None for the mean over heads.
        query: The query of the weights: "class token", "register 1", "patch 3,7" (row, column), "mean of queries".
        values: (h, w) float32 on the keys' grid, as computed. Row 0 is the top.
        extent: The area that the cells fill.
        elsewhere: Share of the weight on tokens without a place: class token, registers, padding.
        box: The query's patch, (left, top, right, bottom) as shares of the network's input; None for other queries.
    """

    input_index: int
    block: str
    head: int | None
    query: str
    values: NDArray[np.float32] = field(repr=False, compare=False)
    extent: Extent = (0.0, 0.0, 1.0, 1.0)
    elsewhere: float = 0.0
    box: tuple[float, float, float, float] | None = None

    @property
    def label(self) -> str:
        """For people: "blocks.11.attn, head 3, class token"."""
        head = "" if self.head is None else f", head {self.head}"
        return f"{self.block}{head}, {self.query}"


@dataclass(frozen=True, slots=True)
class HeadMaps:
    """The maps of all heads of one block, of one input and query.

    Attributes:
        index: Position of the block in `Attention.blocks`.
        values: (heads, h, w) float32.
    """

    input_index: int
    index: int
    query: str
    values: NDArray[np.float32] = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class PatchWeights:
    """The attention of every patch of a block, mean over heads, so that any patch can be chosen later.

    Attributes:
        values: (query rows * query columns, h, w) float32, on the keys' grid.
    """

    input_index: int
    block: str
    query_grid: tuple[int, int]
    values: NDArray[np.float32] = field(repr=False, compare=False)
    extent: Extent = (0.0, 0.0, 1.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Attention(NetworkResult[AttentionMap]):
    """The attention of a network: numbers by head, and maps on the inputs.

    Attributes:
        inputs: The inputs, one record each.
        blocks: Modules whose attention was seen, in execution order.
        unseen: Modules whose attention was not seen, each with the reason.
        rows: Numbers by block, then by head.
        maps: By input, then query, then block, then head.
        head_maps: Maps of all heads and blocks, for the first inputs.
        patches: Attention of every patch as a query, in the requested blocks, for the first inputs.
        tensors: Attention weights by block, (N, heads, queries, keys), with windows on an axis after N; empty without
            `save_tensors=True`.
    """

    inputs: tuple[InputRecord, ...]
    blocks: tuple[AttentionBlock, ...]
    unseen: tuple[UnseenBlock, ...]
    rows: tuple[HeadRow, ...]
    maps: tuple[AttentionMap, ...]
    head_maps: tuple[HeadMaps, ...] = field(default=(), metadata=UNSTORED)
    patches: tuple[PatchWeights, ...] = ()
    tensors: Mapping[str, Any] = field(default_factory=dict, metadata=UNSTORED)

    _noun = "map"

    @property
    @in_json
    def census(self) -> str:
        """How many of the blocks that compute attention were seen, and why the others were not."""
        return census_of(self.blocks, self.unseen)

    def __repr__(self) -> str:
        parts = (counted(len(self.blocks), "block"), counted(len(self.maps), "map"), counted(len(self.inputs), "input"))
        return f"<{type(self).__name__} of {self.model.name}: {', '.join(parts)}>"

    def _items(self) -> tuple[AttentionMap, ...]:
        return self.maps

    def by_label(self) -> dict[str, AttentionMap]:
        """Return the first map of each block and query: "blocks.11.attn", "class token", "rollout"."""
        return {label: place for place in reversed(self.maps) for label in (place.label, place.query, place.block)}


def census_of(blocks: tuple[AttentionBlock, ...], unseen: tuple[UnseenBlock, ...]) -> str:
    """Return the census in a sentence without its full stop: "12 of 12 blocks seen"."""
    seen = len({block.label.rpartition("#")[0] or block.label for block in blocks})
    whole = seen + len(unseen)
    if not unseen:
        calls = f", in {len(blocks):,} calls" if len(blocks) > seen else ""
        return f"{seen} of {counted(whole, 'block')} seen{calls}"
    by_reason: dict[str, list[str]] = {}
    for missed in unseen:
        by_reason.setdefault(missed.reason, []).append(missed.label)
    reasons = "; ".join(f"{some_of(labels, 3)}: {reason}" for reason, labels in by_reason.items())
    return f"{seen} of {counted(whole, 'block')} seen; not seen: {reasons}"
