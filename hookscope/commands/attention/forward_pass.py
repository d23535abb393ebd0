"""Attention in one forward pass: the reduced weights of each block, maps, and the rollout.

Source of the rollout:
    Abnar and Zuidema, Quantifying Attention Flow in Transformers, ACL 2020, section 3.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hookscope.commands.attention.census import Refusal
from hookscope.commands.attention.places import Places, axes_in, places_of
from hookscope.commands.attention.queries import Chosen, Query, chosen_in
from hookscope.commands.attention.reductions import CallNumbers, on_grid, reduced
from hookscope.errors import UsageError
from hookscope.hooks.attention import AttentionCall
from hookscope.hooks.attention_rows import Memory
from hookscope.inspection.saved_tensors import TensorCollector
from hookscope.parameters import arg
from hookscope.results.attention import ROLLOUT, AttentionBlock, AttentionMap, HeadMaps, PatchWeights
from hookscope.results.concentration import Extent
from hookscope.results.inputs import SHOWN_INPUTS, InputRecord
from hookscope.results.network import row_label
from hookscope.statistics.token_layout import TokenLayout
from hookscope.text import layer_words

# Blocks with at most this many weights (queries x keys) keep the rows of every patch: 16 MB. Ours.
_MOST_WEIGHTS = 2**22


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked of a run.

    Attributes:
        blocks: Positions among the blocks seen, or labels.
        heads: Heads to draw each by itself; () for the mean over heads.
        numbers: Whether heads are measured, and the rows of every patch kept.
        tokens: Where the network's tokens lie on a picture.
        class_count: Class tokens in front of the grid, 0 or 1.
    """

    queries: Sequence[Query]
    blocks: Sequence[int | str]
    heads: Sequence[int]
    rollout: bool
    numbers: bool
    save_tensors: bool
    tokens: TokenLayout
    class_count: int


class SeenBlock(NamedTuple):
    """One block of one batch."""

    block: AttentionBlock
    numbers: CallNumbers
    queries: Places | None
    keys: Places | None


@dataclass(slots=True)
class ForwardPass:
    """What one forward pass has shown so far.

    Attributes:
        extents: Returns the area that a grid (h, w) fills, of each input.
        positions: By label, the position of a block among those of the run, of this pass and of those before it.
        refused: By module, why its attention was not seen.
        calls: By module, how many attentions were seen.
        rollout: Attention followed through the blocks so far, (N, queries, tokens of the network's input); None if it
            was not asked for.
    """

    wanted: Wanted
    records: Sequence[InputRecord]
    first: int
    collector: TensorCollector
    extents: Callable[[tuple[int, int]], Sequence[Extent]]
    positions: dict[str, int]
    blocks: list[SeenBlock] = field(default_factory=list)
    refused: dict[str, Refusal] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    rollout: Tensor | None = None
    memory: Memory = field(default_factory=Memory)

    def take(self, call: AttentionCall) -> None:
        """Reduce the weights of one attention during its call."""
        inner = call.running[0]
        kind = type(inner.module).__name__
        axes = call.reason if call.rows is None else axes_in(call, call.rows, len(self.records))
        if call.rows is None or isinstance(axes, str):
            self.refused[inner.name] = Refusal(kind, str(axes), is_attention=call.entry != "softmax")
            return
        queries, keys, remark = places_of(call, call.rows, axes, self.wanted.tokens)
        number = self.calls.get(inner.name, 0)
        self.calls[inner.name] = number + 1
        label = row_label(inner.name, number, "")
        self.positions.setdefault(label, len(self.positions))
        query_count, key_count = call.rows.shape[-2:]
        block = AttentionBlock(
            label,
            kind,
            call.entry,
            axes.heads,
            query_count,
            key_count,
            keys.prefix if keys is not None else None,
            queries.grid if queries is not None else None,
            keys.grid if keys is not None else None,
            axes.windows,
            remark,
        )
        if self.wanted.rollout:
            self._refuse_rollout(block, queries, keys)
        keeps = (
            self.wanted.numbers
            and self._may_be_drawn(label)
            and axes.windows == 1
            and keys is not None
            and 1 < query_count <= _MOST_WEIGHTS // key_count
        )
        numbers = reduced(
            call.rows,
            axes,
            (queries, keys),
            self._chosen(queries, keys, query_count),
            keeps_whole=keeps or self.wanted.rollout,
            numbers=self.wanted.numbers,
            memory=self.memory,
            save=partial(self._save, label) if self.wanted.save_tensors else None,
        )
        if self.wanted.rollout and numbers.whole is not None:
            # Half of each row goes to the token itself, for the residual connection.
            step = (numbers.whole + torch.eye(key_count, dtype=numbers.whole.dtype, device="cpu")) / 2
            step = step / step.sum(-1, keepdim=True)
            self.rollout = step if self.rollout is None else step @ self.rollout
        if not keeps:
            numbers.whole = None
        self.blocks.append(SeenBlock(block, numbers, queries, keys))
        self._free_matrices()

    def _refuse_rollout(self, block: AttentionBlock, queries: Places | None, keys: Places | None) -> None:
        before = self.blocks[-1] if self.blocks else None
        reason = ""
        if block.windows > 1:
            reason = "attends within windows"
        elif block.queries == 1 < block.keys:
            reason = f"pools (1 query, {block.keys} keys)"
        elif block.queries != block.keys:
            reason = f"has queries and keys of different tokens ({block.queries} queries, {block.keys} keys)"
        elif before is not None and block.keys != before.block.keys:
            reason = f"has {block.keys} tokens, the blocks before it have {before.block.keys}"
        elif queries is not keys or (before is not None and (before.keys is None) != (keys is None)):
            reason = "looks at other tokens than the blocks before it"
        if reason:
            raise UsageError(
                f"{arg('rollout')} is undefined here: {layer_words(block.label)} {reason}. Leave it out, and look at "
                "single blocks."
            )

    def _chosen(self, queries: Places | None, keys: Places | None, query_count: int) -> list[list[Chosen | None]]:
        return [
            [self.chosen(query, place, queries, keys, query_count) for place in range(len(self.records))]
            for query in self.wanted.queries
        ]

    def chosen(
        self, query: Query, place: int, queries: Places | None, keys: Places | None, query_count: int
    ) -> Chosen | None:
        """Return a query's token for the input at a place in the batch."""
        record, classes = self.records[place], self.wanted.class_count
        return chosen_in(query, record, queries, keys, query_count, classes, lambda grid: self.extents(grid)[place])

    def _save(self, label: str, rows: Tensor, begin: int) -> None:
        self.collector.collect_rows(label, rows[:, 0] if rows.size(1) == 1 else rows, begin)  # one window: no axis

    def _is_wanted(self, label: str) -> bool:
        return label in self.wanted.blocks or self.positions[label] in self.wanted.blocks

    def _may_be_drawn(self, label: str) -> bool:
        """Tell whether a block may be drawn; a negative position means a block that is known only at the end."""
        counts_from_the_end = any(isinstance(block, int) and block < 0 for block in self.wanted.blocks)
        return self.first < SHOWN_INPUTS and (counts_from_the_end or self._is_wanted(label))

    def _free_matrices(self) -> None:
        """Free the whole weights of blocks that can no longer be drawn."""
        farthest = max((-block for block in self.wanted.blocks if isinstance(block, int) and block < 0), default=0)
        for block in self.blocks[: max(0, len(self.blocks) - farthest)]:
            if not self._is_wanted(block.block.label):
                block.numbers.whole = None

    def drawn(self) -> list[SeenBlock]:
        """Return the blocks to draw, in the order in which they were asked for."""
        places: dict[int | str, int] = {}
        for at, block in enumerate(self.blocks):
            label = block.block.label
            places |= {label: at, self.positions[label]: at, at - len(self.blocks): at}
        chosen = dict.fromkeys(places[block] for block in self.wanted.blocks if block in places)
        return [self.blocks[at] for at in chosen]


# --- Maps on one input: `place` is its place in the batch, `at` the query's position ---


def query_maps(seen: ForwardPass, block: SeenBlock, place: int, at: int) -> Iterator[AttentionMap]:
    """Yield the maps of a query in one block: of the heads that were asked for, or their mean."""
    mapped = _mapped(block, place, at)
    if mapped is None:
        return
    chosen, values, elsewhere = mapped
    height, width = values.shape[1:]
    extent = seen.extents((height, width))[place]
    for head in seen.wanted.heads or (None,):
        head_map = values.mean(0) if head is None else values[head]
        rest = float(elsewhere.mean() if head is None else elsewhere[head])
        drawn = head_map.numpy().copy()
        yield AttentionMap(seen.first + place, block.block.label, head, chosen.label, drawn, extent, rest, chosen.box)


def head_maps(seen: ForwardPass, place: int) -> Iterator[HeadMaps]:
    """Yield the maps of all heads, by query and block."""
    for at in range(len(seen.wanted.queries)):
        for block in seen.blocks:
            if (mapped := _mapped(block, place, at)) is not None:
                chosen, values, _ = mapped
                yield HeadMaps(seen.first + place, seen.positions[block.block.label], chosen.label, values.numpy())


def _mapped(block: SeenBlock, place: int, at: int) -> tuple[Chosen, Tensor, Tensor] | None:
    """Return a query with its maps, (heads, h, w), and its weight on other tokens, (heads,); None without a map."""
    chosen, row, keys = block.numbers.chosen[at][place], block.numbers.rows[at][place], block.keys
    if chosen is None or keys is None:
        return None
    if row is not None:
        values, elsewhere = on_grid(row[None], keys, chosen.window)
    elif block.numbers.received is not None:
        received = block.numbers.received[place]
        values, elsewhere = on_grid(received / received.size(0), keys)  # each window has its share of the queries
    else:
        return None
    return chosen, values.reshape(-1, *keys.grid), elsewhere


def patch_weights(seen: ForwardPass, blocks: Sequence[SeenBlock], place: int) -> Iterator[PatchWeights]:
    """Yield the rows of every patch, of blocks that kept them."""
    for block in blocks:
        whole, queries, keys = block.numbers.whole, block.queries, block.keys
        if whole is None or keys is None or queries is None:
            continue
        cells = queries.cells[0]
        order = cells.argsort()[int((cells < 0).sum()) :]
        values = on_grid(whole[place][None, order], keys)[0].reshape(-1, *keys.grid).numpy().copy()
        yield PatchWeights(seen.first + place, block.block.label, queries.grid, values, seen.extents(keys.grid)[place])


def rollout_maps(seen: ForwardPass, place: int, at: int) -> Iterator[AttentionMap]:
    """Yield the map of a query after all blocks."""
    weights, places = seen.rollout, seen.blocks[-1].keys
    if weights is None or places is None:
        return
    chosen = seen.chosen(seen.wanted.queries[at], place, places, places, weights.size(1))
    if chosen is None:
        return
    row = weights[place].mean(0) if chosen.token is None else weights[place, chosen.token]
    grid, rest = on_grid(row[None, None], places)
    values, extent = grid.reshape(places.grid).numpy(), seen.extents(places.grid)[place]
    yield AttentionMap(seen.first + place, ROLLOUT, None, chosen.label, values, extent, float(rest), chosen.box)
