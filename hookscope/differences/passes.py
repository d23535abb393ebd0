"""Run networks one after another over each batch: what A returns waits in a spool, and is compared in B's hooks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, count
from weakref import ref

import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from hookscope.differences.alignment import CallKey
from hookscope.differences.difference_maps import KeptMaps
from hookscope.differences.hooked_network import Finished, HookedNetwork, Key, Observer, PairedOutput, RandomStates
from hookscope.differences.measures import Sums, coarser, comparable
from hookscope.differences.spool import Spool, Value, Versions
from hookscope.hooks.observed import shape_of
from hookscope.inputs import Batch, length_of
from hookscope.inspection.batch_shapes import BatchShapes
from hookscope.text import exception_line

A, B, REFERENCE = range(3)
"""Positions of the networks in all that has one entry for each."""


@dataclass(slots=True)
class Row:
    """The comparison of one pair of outputs.

    Attributes:
        sums: By pair of networks: (0, 1) is A and B; 2 is the reference.
        inputs: Sums of A and B for each input tensor of the layer; () if they cannot be compared.
        input_shapes_differ: Whether an input tensor has another shape in B.
        added: Sums of A's output and the output of B's layer on A's input.
        coarser: The coarser floating dtype of A and B.
        note: Why there are no sums of A and B, or no `added`.
        shapes: Those of A's output and of B's in the batches.
    """

    sums: dict[tuple[int, int], Sums] = field(default_factory=dict)
    inputs: tuple[Sums, ...] = ()
    input_shapes_differ: bool = False
    added: Sums | None = None
    coarser: torch.dtype = torch.float32
    note: str = ""
    shapes: tuple[BatchShapes, BatchShapes] = field(default_factory=lambda: (BatchShapes(), BatchShapes()))

    @property
    def input_relative_l2(self) -> float | None:
        """The largest relative L2 difference of any input, infinite where shapes differ; None without inputs."""
        if self.input_shapes_differ:
            return math.inf
        values = [each.relative_l2 for each in self.inputs]
        return None if not values else math.nan if any(map(math.isnan, values)) else max(values)

    def merge(self, other: "Row") -> None:
        """Merge the row of another batch."""
        for pair, sums in other.sums.items():
            self.sums[pair] = _both(self.sums.get(pair), sums)
        if not self.inputs or len(self.inputs) != len(other.inputs):
            self.inputs = () if self.inputs else other.inputs
        else:
            self.inputs = tuple(map(_both, self.inputs, other.inputs))
        self.input_shapes_differ |= other.input_shapes_differ
        if other.added is not None:
            self.added = _both(self.added, other.added)
        self.coarser = other.coarser
        self.note = self.note or other.note
        for own, others in zip(self.shapes, other.shapes, strict=True):
            own.merge(others)


def _both(one: Sums | None, other: Sums) -> Sums:
    """Return merged sums, in an object of their own: rows share sums."""
    merged = Sums() if one is None else replace(one)
    merged.merge(other)
    return merged


@dataclass(slots=True)
class Passes:
    """The passes of networks over batches, and the comparisons of their outputs.

    Attributes:
        networks: A, B and, if there is one, the reference.
        maps: Maps of A-B for the first input.
        shadows: Whether B's layers also run on A's inputs.
        whole: A network whose output stands for B's; None for B's own.
        rows: Rows by key, over the batches that were kept.
    """

    networks: Sequence[HookedNetwork]
    maps: KeptMaps
    shadows: bool = False
    whole: HookedNetwork | None = None
    rows: dict[Key, Row] = field(default_factory=dict)
    _batch: dict[Key, Row] = field(default_factory=dict)
    _spooled: Sequence[dict[Key, PairedOutput]] = ()
    _sums_of: dict[tuple[tuple[int, int], int, int], Sums | None] = field(default_factory=dict)
    _shadowed: dict[CallKey, list[Tensor]] = field(default_factory=dict)
    _first_input: int = 0
    _count: int = 0

    def run(self, brought: Callable[[HookedNetwork], Batch], first_input: int, count: int) -> list[Finished]:
        """Run the networks from the same random states, B last; return how they ended, up to the first that raised.

        The next batch begins with the states that B leaves, or A if B draws no numbers.

        Args:
            brought: Makes a copy of the batch for a network.
            first_input: Position of its first input in the run.
            count: Number of its inputs.
        """
        self._first_input, self._count = first_input, count
        if not first_input:
            self.maps.clear()
        self._batch, self._spooled = {}, [{} for _ in self.networks]
        spool, start = Spool(), RandomStates()
        ends: dict[int, RandomStates] = {}
        finished: dict[int, Finished] = {}
        for place in (A, *range(REFERENCE, len(self.networks)), B):
            start.enter()
            network, keeping = (
                self.networks[place],
                Observer(Versions(spool.keep), partial(_keep, self._spooled[place])),
            )
            finished[place] = network.run(brought(network), self._comparing() if place == B else keeping)
            ends[place] = RandomStates()
            if finished[place].message:
                break
        else:
            if self.whole is not None:
                start.enter()
                finished[B] = self.whole.run(brought(self.whole), keeping)
            ends[B if ends[B].has_drawn(start) else A].enter()
        if any(each.message for each in finished.values()):
            start.enter()
            for place in finished:
                self.networks[place].rewinds = True
        for seen in (self._sums_of, self._shadowed):
            seen.clear()
        self._spooled = ()
        return [finished[place] for place in sorted(finished)]

    def keep(self) -> None:
        """Merge the rows of the last batch."""
        for key, row in self._batch.items():
            if key in self.rows:
                self.rows[key].merge(row)
            else:
                self.rows[key] = row

    def _comparing(self) -> Observer:
        numbers = count()
        versions = Versions(lambda tensor: Value(next(numbers), shape_of(tensor), ref(tensor)))
        return Observer(versions, self._compare, self._compare_input)

    def _compare(self, b: PairedOutput) -> None:
        """Compare an output of B with A's and the reference's."""
        key = b.place.key
        others = [outputs.pop(key, None) for place, outputs in enumerate(self._spooled) if place != B]
        seen = [each for each in (others[0], b, *others[1:]) if each is not None]
        if len(seen) < len(self.networks):
            return
        a, tensors = seen[A], [each.value.read() for each in seen]
        row = self._batch[key] = Row()
        row.coarser = coarser(tensors[A], tensors[B])
        for shapes, each in zip(row.shapes, seen, strict=False):
            shapes.add(self._count, each.value.shape)
        axis = a.place.channel_axis if a.place.channel_axis is not None and len(tensors[A]) == self._count else None
        for pair in combinations(range(len(seen)), 2):
            one, other = (seen[each].value for each in pair)
            sums = self._sums(pair, one, other, axis if pair == (A, B) else None)
            if sums is not None:
                row.sums[pair] = sums
        row.note = "" if (A, B) in row.sums else comparable(tensors[A], tensors[B])
        if len(a.inputs) == len(b.inputs):
            inputs = [self._sums((A, B), one, other) for one, other in zip(a.inputs, b.inputs, strict=True)]
            known = tuple(each for each in inputs if each is not None)
            row.inputs = known if len(known) == len(inputs) else ()
            row.input_shapes_differ = any(map(_shapes_differ, a.inputs, b.inputs))
        if self.shadows:
            self._shadow(row, a, b, tensors[A])
        is_drawn = not self._first_input and self.networks[A].has_rows(a.place.layer) and not tensors[A].is_nested
        if is_drawn and (A, B) in row.sums:
            added = None if row.added is None else row.added.relative_l2
            relative_l2, recorder = row.sums[A, B].relative_l2, self.networks[A].recorder
            self.maps.offer(a.place, tensors[A], tensors[B], relative_l2, added, recorder)

    def _compare_input(self, call: CallKey, b: Value) -> None:
        """Compare the input of a call of B that is about to be overwritten."""
        a = self._spooled[A].get((*call, 0))
        if a is not None and len(a.inputs) == 1:
            self._sums((A, B), a.inputs[0], b)

    def _sums(self, pair: tuple[int, int], a: Value, b: Value, channel_axis: int | None = None) -> Sums | None:
        """Return the sums of two values, those found before if there are; None if they cannot be compared."""
        key = (pair, a.number, b.number)
        if key in self._sums_of:
            known = self._sums_of[key]
            if known is None or channel_axis is None or known.squares is not None:
                return known
        one, other = a.read(), b.read()
        sums: Sums | None = None
        if one is not None and other is not None and not comparable(one, other):
            has_inputs = length_of(one) == self._count
            sums = Sums()
            sums.add(one, other, self._first_input if has_inputs else 0, channel_axis)
        self._sums_of[key] = sums
        return sums

    def _shadow(self, row: Row, a: PairedOutput, b: PairedOutput, output: Tensor) -> None:
        """Compare A's output with that of B's layer on A's input."""
        key, which, layer = a.place.key[:2], a.place.key[2], b.place.layer
        if which == 0:
            if a.kept is None or layer not in self.networks[B].hooked:
                return
            like = iter(b.inputs)
            try:
                values, form = a.kept
                leaves = [_moved(each, next(like, None)) if isinstance(each, Value) else each for each in values]
                args, kwargs = tree_unflatten(leaves, form)
                self._shadowed[key] = self.networks[B].run_alone(layer, args, kwargs, b.kept)
            except Exception as error:  # noqa: BLE001 - B's layer may refuse what A's takes
                row.note = row.note or f"B's layer on A's input: {exception_line(error)}"
                return
        outputs = self._shadowed.get(key, [])
        if which < len(outputs) and not comparable(output, outputs[which]):
            row.added = row.added or Sums()
            row.added.add(output, outputs[which])


def _keep(outputs: dict[Key, PairedOutput], seen: PairedOutput) -> None:
    outputs[seen.place.key] = seen


def _moved(value: Value, like: Value | None) -> Tensor:
    """Return a copy of an input of A where, and in which dtype, the layer of B takes it."""
    tensor: Tensor = value.read()
    other = None if like is None else like.read()
    other = tensor if other is None else other
    return tensor.to(other.device, other.dtype if tensor.is_floating_point() else tensor.dtype, copy=True)


def _shapes_differ(a: Value, b: Value) -> bool:
    is_ragged = -1 in (*a.shape, *b.shape)
    return not is_ragged and a.shape != b.shape
