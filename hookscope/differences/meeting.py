"""Run networks until all have reached the same output, compare it, and continue."""

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from hookscope.differences.lockstep import RandomStates, Strand, next_stopped
from hookscope.differences.maps import KeptMaps
from hookscope.differences.measures import Sums, coarser, comparable
from hookscope.differences.party import Finished, Key, Party, Ready, Seen, Stop
from hookscope.text import exception_line


@dataclass(slots=True)
class Row:
    """The comparison of one pair of outputs.

    Attributes:
        sums: By pair of parties: (0, 1) is A and B; 2 is the reference.
        inputs: Sums of A and B for each input tensor of the layer; () if they cannot be compared.
        added: Sums of A's output and the output of B's layer on A's input.
        coarser: The coarser floating dtype of A and B.
        note: Why there are no sums of A and B, or no `added`.
    """

    sums: dict[tuple[int, int], Sums] = field(default_factory=dict)
    inputs: tuple[Sums, ...] = ()
    added: Sums | None = None
    coarser: torch.dtype = torch.float32
    note: str = ""

    @property
    def input_relative_l2(self) -> float | None:
        """The largest relative L2 difference of any input; None without inputs."""
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
        if other.added is not None:
            self.added = self.added or Sums()
            self.added.merge(other.added)
        self.coarser = other.coarser
        self.note = self.note or other.note


class _Known:
    """Pairs of tensors that were compared: the next layer's input is usually the last one's output."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[int, int], tuple[Any, Any, tuple[int, int], Sums]] = {}

    def find(self, a: Tensor, b: Tensor) -> Sums | None:
        """Return the known sums of two tensors, unless they were modified since."""
        known = self._pairs.get((id(a), id(b)))
        if known is None or known[0]() is not a or known[1]() is not b or known[2] != _versions(a, b):
            return None
        return known[3]

    def add(self, a: Tensor, b: Tensor, sums: Sums) -> None:
        """Record the sums of two tensors."""
        self._pairs[id(a), id(b)] = (weakref.ref(a), weakref.ref(b), _versions(a, b), sums)


def _versions(a: Tensor, b: Tensor) -> tuple[int, int]:
    return (-1 if a.is_inference() else a._version, -1 if b.is_inference() else b._version)


@dataclass(slots=True)
class Meeting:
    """The parties of a run, A first, and the comparisons of their outputs.

    Attributes:
        strands: The strands, in the order of the parties.
        shadows: Whether B's layers also run on A's inputs.
        maps: Maps of A-B for the first input.
        shared_threads: Number of CPU threads for all parties if they run concurrently; None if they take turns.
        rows: Rows by key, over the batches that were kept.
        needs_turns: Whether the last batch must be repeated with the parties taking turns.
    """

    parties: Sequence[Party]
    strands: Sequence[Strand[Stop]]
    maps: KeptMaps
    shadows: bool = False
    shared_threads: int | None = None
    rows: dict[Key, Row] = field(default_factory=dict)
    needs_turns: bool = False
    _batch: dict[Key, Row] = field(default_factory=dict)
    _known: dict[tuple[int, int], _Known] = field(default_factory=dict)
    _compared: dict[Key, Sums | None] = field(default_factory=dict)
    _missed: bool = False
    _shadowed: dict[tuple[str, int], list[Tensor]] = field(default_factory=dict)
    _waiting: dict[int, Seen] = field(default_factory=dict)
    _held: list[dict[Key, Seen]] = field(default_factory=list)
    _finished: dict[int, Finished] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)
    _first_input: int = 0
    _count: int = 0

    def run(self, first_input: int, count: int) -> list[Finished] | None:
        """Run the batch that the parties hold.

        Args:
            first_input: Position of its first input in the run.
            count: Number of its inputs.

        Returns:
            How each party ended; None if the batch must be repeated: concurrent parties drew a random number or
            raised, or one has overwritten a tensor before it was compared.
        """
        self._first_input, self._count = first_input, count
        if not first_input:
            self.maps.clear()
        self._known = {pair: _Known() for pair in combinations(range(len(self.parties)), 2)}
        self._batch.clear()
        self._compared.clear()
        self._missed = self.needs_turns = False
        self._shadowed.clear()
        self._waiting, self._finished = {}, {}
        self._held = [{} for _ in self.parties]
        for strand in self.strands:
            self._prepare(strand)
        if self.shared_threads is None:
            self._run_in_turns()
        else:
            self._run_together()
        if self._missed:
            for party in self.parties:
                party.looks_before = party.rewinds = True
        if self._missed or self.needs_turns:
            return None
        return [self._finished[each] for each in range(len(self.parties))]

    def _run_in_turns(self) -> None:
        places = range(len(self.parties))
        while len(self._finished) < len(places):
            for place in places:
                if place not in self._waiting and place not in self._finished:
                    self._note(place, self.strands[place].resume())
            if any(each.error is not None for each in self._finished.values()):
                for place in places:
                    self._break_off(place)
            elif self._waiting:
                self._meet()

    def _run_together(self) -> None:
        """Run all concurrently: the last to arrive at an output compares it, in its thread, and continues at once."""
        before = self.strands[0].random
        if not all(strand.random == before for strand in self.strands):
            self.needs_turns = True
            for place in range(len(self.strands)):
                self._break_off(place)
            return
        before.enter()
        for place, strand in enumerate(self.strands):
            strand.arrive = partial(self._arrive, place)
            strand.start()
        while len(self._finished) < len(self.strands):
            strand, stop = next_stopped(self.strands)
            place = self.strands.index(strand)
            with self._lock:
                self._note(place, stop)
                self._meet_once_all_are_there(place)
        for strand in self.strands:
            strand.arrive, strand.breaks_off = None, False
        self.needs_turns = RandomStates() != before or any(each.error for each in self._finished.values())

    def _arrive(self, place: int, stop: Stop) -> bool:
        """Record a party's stop, and compare if it is the last to arrive; tell whether it continues at once."""
        with self._lock:
            if not self.strands[place].breaks_off:
                self._note(place, stop)
                self._meet_once_all_are_there(place)
            return place not in self._waiting

    def _meet_once_all_are_there(self, place: int) -> None:
        """Compare if all others wait or have finished, and start them, except the one at `place`."""
        waited = [at for at in self._waiting if at != place]
        if any(each.error is not None for each in self._finished.values()):
            for strand in self.strands:
                strand.breaks_off = True
            self._waiting.clear()
        elif len(self._waiting) + len(self._finished) == len(self.parties) and self._waiting:
            self._meet()
        for at in waited:
            if at not in self._waiting:
                self.strands[at].start()

    def _note(self, place: int, stop: Stop | None) -> None:
        """Record a party's stop, during a batch or after it.

        Raises:
            BaseException: The exception that the party raised.
        """
        error = self.strands[place].error
        if error is not None:
            raise error
        if isinstance(stop, Seen):
            self._waiting[place] = stop
        else:
            self._finished[place] = stop if isinstance(stop, Finished) else Finished()

    def keep(self) -> None:
        """Merge the rows of the last batch."""
        for key, row in self._batch.items():
            self.rows.setdefault(key, Row()).merge(row)

    def _break_off(self, place: int) -> None:
        """Make a party that is paused during a batch abandon it."""
        if place not in self._finished:
            self.strands[place].breaks_off = True
            self._note(place, self.strands[place].resume())

    def _prepare(self, strand: Strand[Stop]) -> None:
        """Advance a party to just before its forward pass."""
        stop: Stop | None = None
        while not (isinstance(stop, Ready) and stop.has_batch) and not strand.done:
            stop = strand.resume()
        if strand.error is not None:
            raise strand.error

    def _meet(self) -> None:
        """Compare the outputs that all parties have reached; hold the others."""
        waiting, held, finished = self._waiting, self._held, self._finished
        met = False
        for key in {each.key: None for each in waiting.values()}:
            there = {at: each for at, each in waiting.items() if each.key == key}
            there |= {at: each[key] for at, each in enumerate(held) if key in each and at not in there}
            if len(there) == len(self.parties):
                self._compare(key, [there[at] for at in range(len(self.parties))])
            elif not any(at in finished and at not in there for at in range(len(self.parties))):
                continue
            met = True
            for at in there:
                held[at].pop(key, None)
                if at in waiting and waiting[at].key == key:
                    del waiting[at]
        if not met:
            for at, seen in waiting.items():
                copies = tuple(each.clone() for each in seen.inputs)
                held[at][seen.key] = replace(seen, tensor=seen.tensor.clone(), inputs=copies)
            waiting.clear()

    def _compare(self, key: Key, seen: Sequence[Seen]) -> None:
        """Compare one output of all parties."""
        call, (a, b) = key[:2], seen[:2]
        if key[3] == "input":
            self._compared[key] = self._sums((0, 1), a.tensor, b.tensor)
            return
        row = self._batch.setdefault(key, Row())
        row.note = row.note or comparable(a.tensor, b.tensor)
        row.coarser = coarser(a.tensor, b.tensor)
        axis = a.channel_axis if a.channel_axis is not None and a.tensor.shape[0] == self._count else None
        for pair in combinations(range(len(seen)), 2):
            sums = self._sums(pair, seen[pair[0]].tensor, seen[pair[1]].tensor, axis if pair == (0, 1) else None)
            if sums is not None:
                row.sums.setdefault(pair, Sums()).merge(sums)
            if pair == (0, 1):
                self._compared[key] = sums
        self._compare_inputs(row, call, a, b)
        if self.shadows:
            self._shadow(row, key, a, b)
        if not self._first_input and (0, 1) in row.sums and self.parties[0].lists(a.layer):
            added = None if row.added is None else row.added.relative_l2
            with torch.no_grad():
                self.maps.offer(a, b, row.sums[0, 1].relative_l2, added, self.parties[0].recorder)

    def _sums(self, pair: tuple[int, int], a: Tensor, b: Tensor, channel_axis: int | None = None) -> Sums | None:
        """Return the sums of two tensors, cached if known; None if they cannot be compared."""
        if comparable(a, b):
            return None
        known = self._known[pair].find(a, b)
        if known is None or (channel_axis is not None and known.squares is None):
            has_inputs = a.dim() > 0 and a.shape[0] == self._count
            known = Sums()
            with torch.no_grad():
                known.add(a, b, self._first_input if has_inputs else 0, channel_axis)
            self._known[pair].add(a, b, known)
        return known

    def _compare_inputs(self, row: Row, call: tuple[str, int], a: Seen, b: Seen) -> None:
        overwritten = a.overwrote or (*call, 0, "input")
        if a.overwrote != b.overwrote:  # one of the inputs is already overwritten
            self._missed = True
            return
        if overwritten in self._compared:
            found = [self._compared[overwritten]]
        elif len(a.inputs) == len(b.inputs):
            found = [self._sums((0, 1), one, other) for one, other in zip(a.inputs, b.inputs, strict=True)]
        else:
            return
        known = tuple(each for each in found if each is not None)
        row.inputs = known if len(known) == len(found) else ()

    def _shadow(self, row: Row, key: Key, a: Seen, b: Seen) -> None:
        """Run B's layer on A's input."""
        call = key[:2]
        if key[2] == 0:
            given = self.parties[0].kept_of(a.layer)
            if given is None or b.layer not in self.parties[1].hooked:
                return
            try:
                self._shadowed[call] = self.strands[1].call(lambda: _run_alone(self.parties[1], b, given))
            except Exception as error:  # noqa: BLE001 - B's layer may refuse what A's takes
                row.note = row.note or f"B's layer on A's input: {exception_line(error)}"
                return
        outputs = self._shadowed.get(call, [])
        if key[2] < len(outputs) and not comparable(a.tensor, outputs[key[2]]):
            other = outputs[key[2]]
            row.added = row.added or Sums()
            with torch.no_grad():
                row.added.add(a.tensor, other)


def _run_alone(party: Party, seen: Seen, given: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Tensor]:
    """Run one layer of a network on inputs of another, converted to the device and dtype of its own."""
    like = iter(seen.inputs)

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            other = next(like, None)
            if other is None:
                return value
            return value.to(other.device, other.dtype if value.is_floating_point() else None)
        if isinstance(value, tuple | list) and type(value) in (tuple, list):
            return type(value)(map(moved, value))
        return {name: moved(each) for name, each in value.items()} if type(value) is dict else value

    return party.run_alone(seen.layer, moved(given[0]), moved(given[1]))
