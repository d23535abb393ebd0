"""Run networks one after another over each batch: what A returns waits in a spool, and is compared in B's hooks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import add
from weakref import ref

from torch import Tensor
from torch.utils._pytree import tree_unflatten

from hookscope.commands.diff.alignment import CallKey
from hookscope.commands.diff.compared import REFERENCE, A, B, Compared
from hookscope.commands.diff.difference_maps import KeptMaps
from hookscope.commands.diff.hooked_network import Finished, HookedNetwork, Key, Observer, PairedOutput, RandomStates
from hookscope.commands.diff.measures import Sums, sums_of
from hookscope.commands.diff.spool import Spool, Value, Versions
from hookscope.inputs import Batch
from hookscope.text import exception_line


@dataclass(slots=True)
class Row:
    """The comparison of one pair of outputs.

    Attributes:
        output: What the outputs differ by.
        inputs: Sums of A and B for each input tensor of the layer; () if they cannot be compared.
        input_shapes_differ: Whether an input tensor has another shape in B.
        added: Sums of A's output and the output of B's layer on A's input.
        note: Why there is no `added`.
    """

    output: Compared = field(default_factory=Compared)
    inputs: tuple[Sums, ...] = ()
    input_shapes_differ: bool = False
    added: Sums | None = None
    note: str = ""

    @property
    def input_relative_l2(self) -> float | None:
        """The largest relative L2 difference of any input, infinite where shapes differ; None without inputs."""
        if self.input_shapes_differ:
            return math.inf
        values = [sums.relative_l2 for sums in self.inputs]
        return None if not values else math.nan if any(map(math.isnan, values)) else max(values)

    def merge(self, other: "Row") -> None:
        """Merge the row of another batch."""
        self.output.merge(other.output)
        if not self.inputs or len(self.inputs) != len(other.inputs):
            self.inputs = () if self.inputs else other.inputs
        else:
            self.inputs = tuple(map(add, self.inputs, other.inputs))
        self.input_shapes_differ |= other.input_shapes_differ
        if other.added is not None:
            self.added = other.added if self.added is None else self.added + other.added
        self.note = self.note or other.note


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
    _shadowed: dict[CallKey, list[Tensor]] = field(default_factory=dict)
    _finished: dict[int, Finished] = field(default_factory=dict)
    _start: RandomStates = field(default_factory=RandomStates)
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
        self._batch, self._spooled = {}, [{} for _ in self.networks]
        spool, self._start = Spool(), RandomStates()
        ends: dict[int, RandomStates] = {}
        self._finished = {}
        finished = self._finished
        for place in (A, *range(REFERENCE, len(self.networks)), B):
            self._start.enter()
            network, kept = self.networks[place], partial(_keep, self._spooled[place])
            observer = self._comparing() if place == B else Observer(Versions(spool.keep), kept)
            finished[place] = network.run(brought(network), observer)
            ends[place] = RandomStates()
            if finished[place].message:
                break
        else:
            if self.whole is not None:
                self._start.enter()
                finished[B] = self.whole.run(brought(self.whole), None)
            ends[B if ends[B].has_drawn(self._start) else A].enter()
        if any(end.message for end in finished.values()):
            self.rewind()
        self._shadowed.clear()
        self._spooled = ()
        return [finished[place] for place in sorted(finished)]

    def rewind(self) -> None:
        """Let the next batch begin where the last one did."""
        self._start.enter()
        for place in self._finished:
            self.networks[place].rewinds = True

    def keep(self) -> None:
        """Merge the rows of the last batch."""
        for key, row in self._batch.items():
            if key in self.rows:
                self.rows[key].merge(row)
            else:
                self.rows[key] = row

    def _comparing(self) -> Observer:
        if not self._first_input:  # the first batch may be run again, or replaced by another
            shown = [output for output in self._spooled[A].values() if self.networks[A].has_rows(output.layer)]
            self.maps = KeptMaps(self.maps.eps, len(shown))
        versions = Versions(lambda tensor: Value(tensor, ref(tensor)))
        return Observer(versions, self._compare, self._compare_input)

    def _compare(self, b: PairedOutput) -> None:
        """Compare an output of B with A's and the reference's."""
        a, *rest = (outputs.pop(b.key, None) for place, outputs in enumerate(self._spooled) if place != B)
        exact = [output for output in rest if output is not None]
        if a is None or len(exact) < len(rest):
            return
        row = self._batch[b.key] = Row()
        batch = self._first_input, self._count
        axis = a.channel_axis if a.value.shape[:1] == (self._count,) else None
        row.output.add([a.value, b.value, *(output.value for output in exact)], *batch, axis)
        if len(a.inputs) == len(b.inputs):
            sums = [value.less(other, *batch) for value, other in zip(a.inputs, b.inputs, strict=True)]
            row.inputs = tuple([measure for measure in sums if measure is not None]) if None not in sums else ()
            row.input_shapes_differ = any(map(_shapes_differ, a.inputs, b.inputs))
        if self.shadows:
            self._shadow(row, a, b)
        difference = row.output.sums.get((A, B))
        if difference is not None and not self._first_input and self.networks[A].has_rows(a.layer):
            added = None if row.added is None else row.added.relative_l2
            self.maps.offer(a, b.value.read(), difference.relative_l2, added, self.networks[A].recorder)

    def _compare_input(self, call: CallKey, b: Value) -> None:
        """Compare the input of a call of B that is about to be overwritten."""
        a = self._spooled[A].get((*call, 0))
        if a is not None and len(a.inputs) == 1:
            a.inputs[0].less(b, self._first_input, self._count)

    def _shadow(self, row: Row, a: PairedOutput, b: PairedOutput) -> None:
        """Compare A's output with that of B's layer on A's input."""
        key, index = a.key[:2], a.key[2]
        if index == 0:
            if a.kept is None or b.layer not in self.networks[B].hooked:
                return
            like = iter(b.inputs)
            try:
                values, form = a.kept
                leaves = [_moved(value, next(like, None)) if isinstance(value, Value) else value for value in values]
                args, kwargs = tree_unflatten(leaves, form)
                self._shadowed[key] = self.networks[B].run_alone(b.layer, args, kwargs, b.kept)
            except Exception as error:  # noqa: BLE001 - B's layer may refuse what A's takes
                row.note = f"B's layer on A's input: {exception_line(error)}"
                return
        outputs = self._shadowed.get(key, [])
        if index < len(outputs):
            row.added = sums_of(a.value.read(), outputs[index])


def _keep(outputs: dict[Key, PairedOutput], seen: PairedOutput) -> None:
    outputs[seen.key] = seen


def _moved(value: Value, like: Value | None) -> Tensor:
    """Return a copy of an input of A where, and in which dtype, the layer of B takes it."""
    tensor: Tensor = value.read()
    other = None if like is None else like.read()
    other = tensor if other is None else other
    return tensor.to(other.device, other.dtype if tensor.is_floating_point() else tensor.dtype, copy=True)


def _shapes_differ(a: Value, b: Value) -> bool:
    is_ragged = -1 in (*a.shape, *b.shape)
    return not is_ragged and a.shape != b.shape
