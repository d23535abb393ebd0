"""Run networks in lockstep, and compare their outputs.

A network that runs ahead leaves copies of its outputs, up to a limit; the last one to reach an output compares it, in
its own thread, and goes on at once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from hookscope.differences.difference_maps import KeptMaps
from hookscope.differences.hooked_network import Finished, HookedNetwork, Key, PairedOutput, Ready, Stop
from hookscope.differences.measures import Sums, coarser, comparable
from hookscope.differences.pausable_threads import PausableThread, RandomStates, next_stopped
from hookscope.differences.tensor_versions import TensorVersion
from hookscope.hooks.observed import shape_of
from hookscope.inputs import length_of
from hookscope.inspection.batch_shapes import BatchShapes
from hookscope.text import exception_line

# Bytes of copies that networks may hold, all together; the last output copied may exceed it. With less,
# they wait for each other more often.
_MOST_HELD = 12 * 2**20


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
            self.sums.setdefault(pair, Sums()).merge(sums)
        self.inputs = self.inputs or tuple(Sums() for _ in other.inputs)
        if len(self.inputs) == len(other.inputs):
            for each, more in zip(self.inputs, other.inputs, strict=True):
                each.merge(more)
        else:
            self.inputs = ()
        self.input_shapes_differ |= other.input_shapes_differ
        if other.added is not None:
            self.added = self.added or Sums()
            self.added.merge(other.added)
        self.coarser = other.coarser
        self.note = self.note or other.note
        for own, others in zip(self.shapes, other.shapes, strict=True):
            own.merge(others)


@dataclass(slots=True)
class Lockstep:
    """The networks of a run, A first, and the comparisons of their outputs.

    Attributes:
        threads: In which the networks run, in the same order.
        shadows: Whether B's layers also run on A's inputs.
        maps: Maps of A-B for the first input.
        shared_cpu_threads: Number of CPU threads for all networks if they run concurrently; None if they take turns.
        rows: Rows by key, over the batches that were kept.
        needs_turns: Whether the last batch must be repeated with the networks taking turns.
    """

    networks: Sequence[HookedNetwork]
    threads: Sequence[PausableThread[Stop]]
    maps: KeptMaps
    shadows: bool = False
    shared_cpu_threads: int | None = None
    rows: dict[Key, Row] = field(default_factory=dict)
    needs_turns: bool = False
    _batch: dict[Key, Row] = field(default_factory=dict)
    _known: dict[tuple[tuple[int, int], int, int], Sums | None] = field(default_factory=dict)
    _missed: bool = False
    _shadowed: dict[tuple[str, int], list[Tensor]] = field(default_factory=dict)
    _waiting: dict[int, PairedOutput] = field(default_factory=dict)
    _held: list[dict[Key, tuple[PairedOutput, int]]] = field(default_factory=list)
    _held_bytes: list[int] = field(default_factory=list)
    _finished: dict[int, Finished] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)
    _comparing: Lock = field(default_factory=Lock)
    _first_input: int = 0
    _count: int = 0

    def run(self, first_input: int, count: int) -> list[Finished] | None:
        """Run the batch that the networks hold.

        Args:
            first_input: Position of its first input in the run.
            count: Number of its inputs.

        Returns:
            How each network ended; None if the batch must be repeated: concurrent networks drew a random number or
            raised, or an input was overwritten before it was compared.
        """
        self._first_input, self._count = first_input, count
        if not first_input:
            self.maps.clear()
        for found in (self._batch, self._known, self._shadowed, self._waiting, self._finished):
            found.clear()
        self._missed = self.needs_turns = False
        self._held, self._held_bytes = [{} for _ in self.networks], [0] * len(self.networks)
        for thread in self.threads:
            self._prepare(thread)
        for place, thread in enumerate(self.threads):
            thread.goes_on = partial(self._compare_or_hold, place)
        try:
            if self.shared_cpu_threads is None:
                self._run_in_turns()
            else:
                self._run_together()
        finally:
            for thread in self.threads:
                thread.goes_on = None
            self._held.clear()
        if self._missed:
            for network in self.networks:
                network.copies_all = network.rewinds = True
        if self._missed or self.needs_turns:
            return None
        return [self._finished[each] for each in range(len(self.networks))]

    def _run_in_turns(self) -> None:
        """Run each network until it has copied enough, or to its end, and then the next one."""
        while len(self._finished) < len(self.networks):
            for place, thread in enumerate(self.threads):
                if place in self._finished:
                    continue
                seen = self._waiting.pop(place, None)
                if seen is not None and self._failed():
                    thread.breaks_off = True
                elif seen is not None:
                    thread.call(partial(self._hold, place, seen))
                self._note(place, thread.resume())

    def _run_together(self) -> None:
        before = self.threads[0].random
        if not all(thread.random == before for thread in self.threads):
            self.needs_turns = True
            for place, thread in enumerate(self.threads):
                thread.breaks_off = True
                self._note(place, thread.resume())
            return
        before.enter()
        for thread in self.threads:
            thread.start()
        while len(self._finished) < len(self.threads):
            thread, stop = next_stopped(self.threads)
            if not isinstance(stop, PairedOutput):
                with self._lock:
                    self._note(self.threads.index(thread), stop)
                    self._start_waiting()
        for thread in self.threads:
            thread.breaks_off = False
        self.needs_turns = RandomStates() != before or self._failed()

    def _start_waiting(self) -> None:
        """After a network's end: start the others, so that they do not wait for what it will not reach."""
        if self._failed():
            for thread in self.threads:
                thread.breaks_off = True
        for place, seen in [*self._waiting.items()]:
            del self._waiting[place]
            if not self._failed():
                self._hold(place, seen)
            self.threads[place].start()

    def _note(self, place: int, stop: Stop | None) -> None:
        """Record a network's stop, during a batch or after it.

        Raises:
            BaseException: The exception that the network raised.
        """
        error = self.threads[place].error
        if error is not None:
            raise error
        if isinstance(stop, PairedOutput):
            return
        self._finished[place] = stop if isinstance(stop, Finished) else Finished()
        for at, held in enumerate(self._held):
            for key in held.keys() - self._held[place].keys():
                self._held_bytes[at] -= held.pop(key)[1]

    def _compare_or_hold(self, place: int, seen: Stop) -> bool:
        """Compare an output that all others have reached, else hold a copy; return whether the network goes on."""
        if not isinstance(seen, PairedOutput):
            return False
        others = [at for at in range(len(self.networks)) if at != place]
        with self._lock:
            if self.threads[place].breaks_off:
                return True
            there = {at: each for at in others if (each := self._held_by(at, seen.key)) is not None}
            if len(there) < len(others):
                return self._goes_ahead(place, seen, others)
            waited = [at for at in others if self._waiting.get(at) is there[at]]
            for at in waited:
                del self._waiting[at]
            for at in others:
                self._held_bytes[at] -= self._held[at].pop(seen.key, (seen, 0))[1]
        there[place] = seen
        with self._comparing:
            self._compare(seen.key, [there[at] for at in range(len(self.networks))])
        if self.shared_cpu_threads is not None:
            for at in waited:
                self.threads[at].start()
        return True

    def _failed(self) -> bool:
        """Return whether a network raised: the others go on to what it did not reach, and may raise before it."""
        return any(each.error is not None for each in self._finished.values())

    def _goes_ahead(self, place: int, seen: PairedOutput, others: Sequence[int]) -> bool:
        """Hold a copy for the networks that are still to come, or let this one wait; return whether it goes on."""
        waits = self._failed() or self.shadows or sum(self._held_bytes) >= _MOST_HELD
        if self.shared_cpu_threads is not None and all(at in self._waiting or at in self._finished for at in others):
            waits = False  # if this one waited too, none would go on
        if waits:
            self._waiting[place] = seen
        else:
            self._hold(place, seen)
        return not waits

    def _held_by(self, place: int, key: Key) -> PairedOutput | None:
        """Return an output that a network waits at, or has gone on from."""
        waiting = self._waiting.get(place)
        if waiting is not None and waiting.key == key:
            return waiting
        held = self._held[place].get(key)
        return None if held is None else held[0]

    def _hold(self, place: int, seen: PairedOutput) -> None:
        """Copy an output, unless a network has ended without it."""
        if not all(seen.key in self._held[at] for at in self._finished):
            return
        held = self.networks[place].copied(seen, known_too=self.shadows)
        self._held[place][seen.key] = held
        self._held_bytes[place] += held[1]

    def take_turns(self) -> None:
        """Let networks that ran at the same time go back to before the batch, and take turns, each with all threads."""
        count, self.shared_cpu_threads = self.shared_cpu_threads, None
        if count is None:
            return
        torch.set_num_threads(count)
        for network, thread in zip(self.networks, self.threads, strict=True):
            thread.call(partial(torch.set_num_threads, count))
            network.rewinds = True

    def keep(self) -> None:
        """Merge the rows of the last batch."""
        for key, row in self._batch.items():
            self.rows.setdefault(key, Row()).merge(row)

    def _prepare(self, thread: PausableThread[Stop]) -> None:
        """Advance a network to just before its forward pass."""
        stop: Stop | None = None
        while not (isinstance(stop, Ready) and stop.has_batch) and not thread.done:
            stop = thread.resume()
        if thread.error is not None:
            raise thread.error

    def _compare(self, key: Key, seen: Sequence[PairedOutput]) -> None:
        a, b = seen[:2]
        row = self._batch.setdefault(key, Row())
        row.note = row.note or comparable(a.tensor, b.tensor)
        row.coarser = coarser(a.tensor, b.tensor)
        row.shapes = (BatchShapes(), BatchShapes())
        for shapes, each in zip(row.shapes, (a, b), strict=True):
            shapes.add(self._count, shape_of(each.tensor))
        axis = a.channel_axis if a.channel_axis is not None and a.tensor.shape[0] == self._count else None
        for pair in combinations(range(len(seen)), 2):
            sums = self._sums(pair, seen[pair[0]].output, seen[pair[1]].output, axis if pair == (0, 1) else None)
            if sums is not None:
                row.sums[pair] = sums
        if len(a.inputs) == len(b.inputs):
            found = [self._sums((0, 1), one, other) for one, other in zip(a.inputs, b.inputs, strict=True)]
            known = tuple(each for each in found if each is not None)
            row.inputs = known if len(known) == len(found) else ()
            row.input_shapes_differ = any(map(_shapes_differ, a.inputs, b.inputs))
        if self.shadows:
            self._shadow(row, key, a, b)
        is_drawn = not self._first_input and self.networks[0].has_rows(a.layer) and not a.tensor.is_nested
        if is_drawn and (0, 1) in row.sums:
            added = None if row.added is None else row.added.relative_l2
            with torch.no_grad():
                self.maps.offer(a, b, row.sums[0, 1].relative_l2, added, self.networks[0].recorder)

    def _sums(
        self, pair: tuple[int, int], a: TensorVersion, b: TensorVersion, channel_axis: int | None = None
    ) -> Sums | None:
        """Return the sums of two values, those found before if there are; None if they cannot be compared."""
        key = (pair, a.token, b.token)
        if key in self._known:
            known = self._known[key]
            if known is None or channel_axis is None or known.squares is not None:
                return known
        if a.tensor is None or b.tensor is None:
            self._missed = True
            return None
        sums: Sums | None = None
        if not comparable(a.tensor, b.tensor):
            has_inputs = length_of(a.tensor) == self._count
            sums = Sums()
            with torch.no_grad():
                sums.add(a.tensor, b.tensor, self._first_input if has_inputs else 0, channel_axis)
        self._known[key] = sums
        return sums

    def _shadow(self, row: Row, key: Key, a: PairedOutput, b: PairedOutput) -> None:
        call = key[:2]
        if key[2] == 0:
            given = self.networks[0].kept_of(a.layer)
            if given is None or b.layer not in self.networks[1].hooked:
                return
            try:
                self._shadowed[call] = self.threads[1].call(lambda: _run_alone(self.networks[1], b, given))
            except Exception as error:  # noqa: BLE001 - B's layer may refuse what A's takes
                row.note = row.note or f"B's layer on A's input: {exception_line(error)}"
                return
        outputs = self._shadowed.get(call, [])
        if key[2] < len(outputs) and not comparable(a.tensor, outputs[key[2]]):
            other = outputs[key[2]]
            row.added = row.added or Sums()
            with torch.no_grad():
                row.added.add(a.tensor, other)


def _shapes_differ(a: TensorVersion, b: TensorVersion) -> bool:
    if a.tensor is None or b.tensor is None or a.tensor.is_nested or b.tensor.is_nested:
        return False
    return a.tensor.shape != b.tensor.shape


def share_cpu_threads(networks: Sequence[HookedNetwork]) -> int | None:
    """Give each network an equal share of the CPU's threads, so that all can run at the same time.

    If they took turns, the OpenMP threads of the one that waits would spin, and slow down the one that works. To end
    them at each turn (omp_pause_resource) is no way out: new ones may start on the core of the one that works.

    Returns:
        How many threads they share; None where they take turns: on an accelerator, with a single thread, and where
        `--threads-b` sets a number.
    """
    count = torch.get_num_threads()
    if count == 1 or any(each.cpu_threads is not None or each.inspected.placed[0] != "cpu" for each in networks):
        return None
    share = max(1, count // len(networks))
    for each in networks:
        each.cpu_threads = share
    torch.set_num_threads(share)  # of this thread, which compares the outputs
    return count


def _run_alone(
    network: HookedNetwork, seen: PairedOutput, given: tuple[tuple[Any, ...], dict[str, Any]]
) -> list[Tensor]:
    """Run one layer of a network on inputs of another, moved to the device and dtype of its own."""
    like = iter([each.tensor for each in seen.inputs])

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            other = next(like, None)
            if other is None:
                return value
            return value.to(other.device, other.dtype if value.is_floating_point() else None)
        if isinstance(value, tuple | list) and type(value) in (tuple, list):
            return type(value)(map(moved, value))
        return {name: moved(each) for name, each in value.items()} if type(value) is dict else value

    return network.run_alone(seen.layer, moved(given[0]), moved(given[1]))
