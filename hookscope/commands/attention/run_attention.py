"""Run `attention`: batches in, numbers and maps out; the network is left as it was."""

import copy
import math
import re
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from hookscope import options
from hookscope.commands.attention.census import Refusal, attention_modules, unseen_blocks
from hookscope.commands.attention.forward_pass import (
    ForwardPass,
    SeenBlock,
    Wanted,
    head_maps,
    patch_weights,
    query_maps,
    rollout_maps,
)
from hookscope.commands.attention.queries import read_queries
from hookscope.commands.attribute.forward_backward import model_errors, run_model
from hookscope.commands.attribute.input_places import alike_inputs, check_token_axes, padded_extents
from hookscope.errors import LayerNotFoundError, NothingMatchedError, UsageError, nearest
from hookscope.hooks.attention import AttentionMode
from hookscope.hooks.forward_hooks import Capture, capture
from hookscope.hooks.running import unfused
from hookscope.inputs.batches import Batch, copy_of
from hookscope.inspection.network import InspectedNetwork, inspected_network
from hookscope.inspection.saved_tensors import TensorCollector
from hookscope.inspection.session import OnError, OnProgress, Session, input_count, run_fields, session_batches
from hookscope.inspection.state.preservation import Preserved, preserved
from hookscope.inspection.verification import Outcome, outcome_of, verification_warnings, verify_outcome
from hookscope.models.torchscript import ScriptLayer
from hookscope.parameters import arg
from hookscope.results.attention import (
    Attention,
    AttentionBlock,
    AttentionMap,
    HeadMaps,
    HeadRow,
    PatchWeights,
    UnseenBlock,
    census_of,
)
from hookscope.results.inputs import PICTURE_AXES, SHOWN_INPUTS, InputRecord
from hookscope.statistics.layouts import class_token_count, parse_tokens
from hookscope.statistics.token_layout import TokenLayout
from hookscope.text import counted, layer_words, safe_text

_NOT_MET = (
    "its softmax is changed before it meets values (talking heads), "
    "or meets them by an operation other than matmul, bmm and einsum"
)
_NO_NUMBERS = "Heads were not measured, as asked: none is flagged, and the page has no patch to pick."


def run_attention(
    session: Session, option: options.Attention, on_progress: OnProgress | None, on_error: OnError | None
) -> Attention:
    """Look at the attention of all inputs."""
    inspected = inspected_network(session.loaded)
    tokens = None if option.tokens is None else parse_tokens(option.tokens)
    check_token_axes(tokens, 2)  # maps are drawn on pictures
    blocks = cast("Sequence[str | int]", option.block)
    wanted = Wanted(
        read_queries(option.query),
        [*map(_block, blocks)] or [-1],
        [*dict.fromkeys(cast("Sequence[int]", option.head))],
        option.rollout,
        option.numbers,
        option.save_tensors,
        TokenLayout(inspected.network, tokens),
        class_token_count(inspected.network),
    )
    queue = session_batches(session, option.batch_size, on_error)
    collector = TensorCollector(input_count(session.inputs), on_progress)
    candidates = attention_modules(inspected.modules)
    began = time.perf_counter()
    with (
        torch.inference_mode(False),
        preserved(inspected.network, session.seed, modules=inspected.modules.values(), differentiates=False) as state,
        unfused(),
        capture(inspected.network, candidates, lambda *_: None) as captured,
    ):
        state.mark_hooks()
        run = _Run(inspected, state, captured, wanted, collector, option.verify)
        run_model(queue, state, run.look, run.records, collector.end_batch)
    if not run.records and session.unusable:
        raise session.unusable[0]
    seconds = time.perf_counter() - began
    unseen = unseen_blocks(candidates, captured.called, run.seen_in, run.refused)
    run.check_seen(unseen)
    rows = tuple(run.rows()) if option.numbers else ()
    suffixes = ("", *(f"@{at}" for at in range(len(run.records))))  # batches are numbered where shapes differ
    settings = {"block": [*map(str, blocks)], "head": [*wanted.heads], "query": [*option.query]}
    settings |= {name: getattr(option, name) for name in ("rollout", "numbers", "tokens")}
    return Attention(
        inputs=tuple(run.records),
        blocks=tuple(run.blocks.values()),
        unseen=unseen,
        rows=rows,
        maps=tuple(run.maps),
        head_maps=tuple(run.head_maps),
        patches=tuple(run.patches),
        warnings=(*inspected.warnings, *run.warnings, *_nan_warning(rows, run.maps), *queue.remarks),
        notes=(*inspected.notes, *run.notes, *run.other_block(), *(() if option.numbers else (_NO_NUMBERS,))),
        timings={"load": session.load_seconds, "forward": seconds},
        tensors=collector.joined({f"{label}{suffix}" for label in run.blocks for suffix in suffixes}),
        **run_fields(session, inspected, (), settings),
    )


def _block(block: str | int) -> int | str:
    text = str(block)
    return int(text) if re.fullmatch(r"-?\d{1,5}", text.strip()) else text.strip()


@dataclass(slots=True)
class _Run:
    """The state of a run: the hooked network, the options, and the results so far.

    Attributes:
        sums: By block and name of a number, its sum over the inputs that have it, and their number, both by head.
    """

    inspected: InspectedNetwork
    state: Preserved
    captured: Capture[None]
    wanted: Wanted
    collector: TensorCollector
    verify: bool
    records: list[InputRecord] = field(default_factory=list)
    blocks: dict[str, AttentionBlock] = field(default_factory=dict)
    drawn: dict[str, None] = field(default_factory=dict)
    sums: dict[str, dict[str, tuple[Tensor, Tensor]]] = field(default_factory=dict)
    top_tokens: dict[str, Tensor | None] = field(default_factory=dict)
    maps: list[AttentionMap] = field(default_factory=list)
    head_maps: list[HeadMaps] = field(default_factory=list)
    patches: list[PatchWeights] = field(default_factory=list)
    refused: dict[str, Refusal] = field(default_factory=dict)
    seen_in: set[str] = field(default_factory=set)
    notes: dict[str, None] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    # --- Batches ---

    def look(self, batch: Batch) -> None:
        """Run a batch; add its numbers to the sums, and its maps by input."""
        first = len(self.records)
        seen = self._forward(batch, first)
        self.records.extend(batch.records)
        self.refused.update(seen.refused)
        self.seen_in.update(seen.calls)
        for block in seen.blocks:
            self.blocks.setdefault(block.block.label, block.block)
            self._sum(block)
        if not seen.blocks:
            return
        names = [block for block in self.wanted.blocks if isinstance(block, str)]  # later inputs may have more blocks
        _check_blocks(names, [*self.blocks], self.inspected.modules)
        drawn = seen.drawn()
        for block in drawn:
            self._note_drawn(block.block)
        pictures = [tensor for tensor in alike_inputs(batch) if tensor.dim() - 2 == PICTURE_AXES]
        if len(pictures) > 1:
            self.notes[
                f"The network is given {len(pictures)} tensors with the axes of a picture: maps are drawn over the "
                "first, though a block may look at another."
            ] = None
        for place in range(len(batch.records)):
            for at in range(len(self.wanted.queries)):
                self.maps += rollout_maps(seen, place, at)
                for block in drawn:
                    self.maps += query_maps(seen, block, place, at)
            if first + place < SHOWN_INPUTS:
                self.head_maps += head_maps(seen, place)
                self.patches += patch_weights(seen, drawn, place)

    def _forward(self, batch: Batch, first: int) -> ForwardPass:
        """Run a batch, and look at its attention; `first` is the position of its first input."""
        extents = cache(partial(padded_extents, self.inspected.network, batch))
        positions = {label: index for index, label in enumerate(self.blocks)}
        seen = ForwardPass(self.wanted, batch.records, first, self.collector, extents, positions)
        self.wanted.tokens.restart(batch.pictures)
        mode = AttentionMode(self.inspected.modules, seen.take)
        clone = copy_of(batch)
        self.captured.restart()
        with model_errors(self.inspected, "forward"), torch.no_grad(), mode:
            output = self.inspected.network(*clone.args, **clone.kwargs)
        for name in mode.softmaxes:
            if name not in seen.calls and name not in seen.refused:
                seen.refused[name] = Refusal(type(self.inspected.modules[name]).__name__, _NOT_MET)
        if self.verify and not first:
            self.warnings = self._verified(batch, output)
        return seen

    def _verified(self, batch: Batch, output: object) -> tuple[str, ...]:
        """Run a batch without the mode, and return a warning if its output differs."""
        began = copy.copy(self.state)
        self.state.mark()  # to go on from here

        def plain(_layers: Sequence[str]) -> Outcome:
            began.rewind()
            clone = copy_of(batch)
            with torch.no_grad(), self.captured.detached():
                return outcome_of(self.inspected.network(*clone.args, **clone.kwargs))

        try:
            return verification_warnings(verify_outcome(outcome_of(output), (), plain), self.inspected.info.name)
        finally:
            self.state.rewind()

    def _sum(self, seen: SeenBlock) -> None:
        label, numbers = seen.block.label, seen.numbers
        sums = self.sums.setdefault(label, {})
        for name, value in numbers.heads.items():
            before, count = sums.get(name, (0, 0))
            has_it = ~value.isnan() | (name != "distance")  # NaN: no query of that input looks at patches
            sums[name] = before + value.double().where(has_it, 0).sum(0), count + has_it.sum(0)
        self.top_tokens.setdefault(label, None if numbers.top_token is None else numbers.top_token[0])

    def _note_drawn(self, block: AttentionBlock) -> None:
        self.drawn[block.label] = None
        if block.remark:
            self.notes[f"{layer_words(block.label)} has no map: {block.remark}."] = None
        for head in self.wanted.heads:
            if head >= block.heads:
                raise UsageError(
                    f"{arg('head')} {head} is not possible: {layer_words(block.label)} has "
                    f"{counted(block.heads, 'head')}, counted from 0."
                )

    # --- Results ---

    def check_seen(self, unseen: tuple[UnseenBlock, ...]) -> None:
        """Raise an error if no attention was seen, or nothing that is wanted."""
        if not self.blocks:
            raise NothingMatchedError(_nothing_seen(self.inspected, census_of((), unseen), has_any=bool(unseen)))
        _check_blocks(self.wanted.blocks, [*self.blocks])
        if self.wanted.rollout and unseen:
            census = census_of(tuple(self.blocks.values()), unseen)
            raise UsageError(f"{arg('rollout')} is undefined here: {census}. Leave it out, and look at single blocks.")
        if not self.maps and any(not self.blocks[label].remark for label in self.drawn):
            asked = " ".join(f"{arg('query')} {query.text}" for query in self.wanted.queries)
            raise UsageError(
                f"{asked}: no block that was asked for in {self.inspected.info.name} has such a query. Give "
                f"{arg('query')} mean, the x,y of a pixel, or another {arg('block')}."
            )

    def rows(self) -> Iterator[HeadRow]:
        """Yield the heads of all blocks."""
        for index, block in enumerate(self.blocks.values()):
            means = {name: (total / count).tolist() for name, (total, count) in self.sums[block.label].items()}
            top_tokens = self.top_tokens[block.label]
            tokens = [None] * block.heads if top_tokens is None else top_tokens.tolist()
            distances = means.get("distance", [math.nan] * block.heads)
            for head, prefix in enumerate(means["prefix"]):
                classes = min(self.wanted.class_count, len(prefix))
                yield HeadRow(
                    block.label,
                    index,
                    head,
                    means["entropy"][head],
                    None if math.isnan(distances[head]) else distances[head],
                    prefix[0] if classes else None,
                    sum(prefix[classes:]) if len(prefix) > classes else None,
                    means["top"][head],
                    tokens[head],
                )

    def other_block(self) -> list[str]:
        """If nothing was drawn, return a note on the last block that can be drawn, if any."""
        placed = [(index, block.label) for index, block in enumerate(self.blocks.values()) if not block.remark]
        if not placed or self.maps:
            return []
        index, label = placed[-1]
        return [f"{layer_words(label)} has a map: {arg('block')} {index}."]


def _nothing_seen(inspected: InspectedNetwork, census: str, *, has_any: bool) -> str:
    name = inspected.info.name
    if any(isinstance(module, torch.jit.ScriptModule | ScriptLayer) for module in inspected.modules.values()):
        return f"No attention of {name} can be seen: the calls of TorchScript are not shown. Give the network itself."
    if not has_any:
        return f"No attention found in {name}. See `hookscope attribute`."
    return f"No attention of {name} can be seen: {census}. See `hookscope attribute`."


def _nan_warning(rows: Sequence[HeadRow], maps: Sequence[AttentionMap]) -> list[str]:
    """Return a warning of NaN in attention weights with the first block that has it; [] without NaN."""
    names = [row.block for row in rows if math.isnan(row.entropy)]
    names = names or [attention.block for attention in maps if np.isnan(attention.values).any()]
    if not (blocks := [*dict.fromkeys(names)]):
        return []
    more = f", the first of {counted(len(blocks), 'block')}," if len(blocks) > 1 else ""
    why = "its mask leaves a query no key, or it was given NaN (`hookscope activations`)"
    return [f"Attention weights of {layer_words(blocks[0])}{more} hold NaN: {why}."]


def _check_blocks(blocks: Sequence[int | str], labels: Sequence[str], modules: Collection[str] = ()) -> None:
    """Raise an error if a wanted block was not seen, unless it is in `modules`: a later input may run it."""
    for block in blocks:
        if isinstance(block, int):
            if not -len(labels) <= block < len(labels):
                raise LayerNotFoundError(
                    f"There is no block {block}: {counted(len(labels), 'block')} seen, counted from 0; -1 is the last."
                )
        elif block not in labels and block.partition("#")[0] not in modules:
            raise LayerNotFoundError(f"There is no block '{safe_text(block)}'.{nearest(block, labels)}")
