"""What one forward pass shows of attention: each block's weights, reduced while they are there, and their rollout.

Source of the rollout:
    Abnar and Zuidema, Quantifying Attention Flow in Transformers, ACL 2020, section 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hookscope.commands.attention.census import Refusal
from hookscope.commands.attention.places import (
    Arrangement,
    Places,
    axes_of,
    head_count_of,
    not_over_tokens,
    places_of,
    with_heads_found,
)
from hookscope.commands.attention.queries import Chosen, Query, chosen_in
from hookscope.commands.attention.reductions import CallNumbers, Room, reduced
from hookscope.errors import UsageError
from hookscope.hooks.attention import AttentionCall
from hookscope.inspection.saved_tensors import TensorCollector
from hookscope.parameters import arg
from hookscope.results.attention import AttentionBlock
from hookscope.results.inputs import SHOWN_INPUTS, InputRecord
from hookscope.results.network import row_label

# Rows of every patch are kept of maps with at most so many weights: 16 MB. Ours.
_MOST_WEIGHTS = 2**22


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked of a run.

    Attributes:
        blocks: Positions among the blocks seen, or labels.
        heads: Heads to draw each by itself; () for the mean over heads.
        numbers: Whether heads are measured, and the rows of every patch kept.
    """

    queries: Sequence[Query]
    blocks: Sequence[int | str]
    heads: Sequence[int]
    rollout: bool
    numbers: bool
    save_tensors: bool
    arrangement: Arrangement


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
        refused: By module, why its attention was not seen.
        rollout: Attention followed through the blocks so far, (N, queries, tokens of the network's input); None if it
            was not asked for.
    """

    wanted: Wanted
    records: Sequence[InputRecord]
    first: int
    collector: TensorCollector
    room: Room
    blocks: list[SeenBlock] = field(default_factory=list)
    refused: dict[str, Refusal] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    rollout: Tensor | None = None

    def take(self, call: AttentionCall) -> None:
        """Reduce the weights of one attention, while they are there."""
        inner, inputs = call.running[0], len(self.records)
        kind = type(inner.module).__name__
        if call.rows is None:
            self.refused[inner.name] = Refusal(kind, call.reason, is_attention=call.entry != "softmax")
            return
        axes = axes_of(call.rows.shape[:-2], inputs, head_count_of(call.running))
        axes = axes if isinstance(axes, str) else with_heads_found(call, axes)
        reason = axes if isinstance(axes, str) else not_over_tokens(call, axes)
        if reason or isinstance(axes, str):
            self.refused[inner.name] = Refusal(kind, reason, is_attention=call.entry != "softmax")
            return
        queries, keys, remark = places_of(call, axes, self.wanted.arrangement)
        number = self.calls.get(inner.name, 0)
        self.calls[inner.name] = number + 1
        label = row_label(inner.name, number, "")
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
            and self._keeps_patches(len(self.blocks), label)
            and axes.windows == 1
            and keys is not None
            and 1 < query_count <= _MOST_WEIGHTS // key_count
        )
        numbers = reduced(
            call.rows,
            axes,
            queries,
            keys,
            self._chosen(queries, keys, query_count),
            keeps_whole=keeps or self.wanted.rollout,
            room=self.room,
            save=partial(self._save, label) if self.wanted.save_tensors else None,
        )
        if self.wanted.rollout and numbers.whole is not None:
            # Half of each row goes to the token itself, for the residual connection.
            step = (numbers.whole + torch.eye(key_count)) / 2
            step = step / step.sum(-1, keepdim=True)
            self.rollout = step if self.rollout is None else step @ self.rollout
        if not keeps:
            numbers.whole = None
        self._drop_patches()
        self.blocks.append(SeenBlock(block, numbers, queries, keys))

    def _refuse_rollout(self, block: AttentionBlock, queries: Places | None, keys: Places | None) -> None:
        """Refuse a block that attends within windows, pools, or looks at other tokens than the block before it."""
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
                f"{arg('rollout')} is undefined here: {block.label} {reason}. Leave it out, and look at single blocks."
            )

    def _chosen(self, queries: Places | None, keys: Places | None, query_count: int) -> dict[int, list[Chosen | None]]:
        """Return the tokens that each query means, one for each input."""
        classes = self.wanted.arrangement.class_count
        return {
            at: [chosen_in(query, record, queries, keys, query_count, classes) for record in self.records]
            for at, query in enumerate(self.wanted.queries)
        }

    def _save(self, label: str, rows: Tensor, begin: int) -> None:
        self.collector.collect_rows(label, rows[:, 0] if rows.size(1) == 1 else rows, begin)

    def _keeps_patches(self, index: int, label: str) -> bool:
        """Tell whether the rows of every patch may be asked for: negative positions are known at the end alone."""
        if self.first >= SHOWN_INPUTS:
            return False
        return any(block in (index, label) or (isinstance(block, int) and block < 0) for block in self.wanted.blocks)

    def _drop_patches(self) -> None:
        """Let go of rows that no negative position can mean any more."""
        farthest = max((-block for block in self.wanted.blocks if isinstance(block, int) and block < 0), default=0)
        for index, block in enumerate(self.blocks[: max(0, len(self.blocks) + 1 - farthest)]):
            if index not in self.wanted.blocks and block.block.label not in self.wanted.blocks:
                block.numbers.whole = None
