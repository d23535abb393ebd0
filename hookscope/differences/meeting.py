"""Let networks run until all of them have reached the same output, compare it there, and let them go on."""

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from hookscope.differences.lockstep import RandomStates, Strand, resume_together
from hookscope.differences.maps import KeptMaps
from hookscope.differences.measures import Sums, coarser, comparable, squares_by_channel
from hookscope.differences.party import Finished, Key, Party, Ready, Seen, Stop
from hookscope.text import exception_line

# Above this share of A's norm the channels of a difference are looked at. Our choice: below, it is mostly rounding.
_LOOKS_AT_CHANNELS = 1e-6


@dataclass(slots=True)
class Row:
    """What is known of one pair of outputs.

    Attributes:
        sums: By pair of parties: (0, 1) is A and B; 2 is the reference.
        inputs: Of A and B, of each tensor that the layer is given; () if they cannot be compared.
        added: Of B's layer on A's input, beside A's output.
        squares: Of the difference by channel, if it has channels.
        coarser: The floating dtype of A and B with the longer steps.
        note: Why there are no sums of A and B, or no `added`.
    """

    sums: dict[tuple[int, int], Sums] = field(default_factory=dict)
    inputs: tuple[Sums, ...] = ()
    added: Sums | None = None
    squares: Tensor | None = None
    coarser: torch.dtype = torch.float32
    note: str = ""

    @property
    def input_relative_l2(self) -> float | None:
        """The largest of any input; None if there is none."""
        values = [each.relative_l2 for each in self.inputs]
        return None if not values else math.nan if any(map(math.isnan, values)) else max(values)

    def merge(self, other: "Row") -> None:
        """Add what another batch has shown."""
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
        if other.squares is not None and (self.squares is None or len(self.squares) == len(other.squares)):
            self.squares = other.squares if self.squares is None else self.squares + other.squares
        self.coarser = other.coarser
        self.note = self.note or other.note


class _Known:
    """Pairs of tensors that have been compared: the next layer's input is mostly the last one's output."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[int, int], tuple[Any, Any, tuple[int, int], Sums]] = {}

    def find(self, a: Tensor, b: Tensor) -> Sums | None:
        """Return the sums of two tensors, if nothing has been written to them since."""
        known = self._pairs.get((id(a), id(b)))
        if known is None or known[0]() is not a or known[1]() is not b or known[2] != _versions(a, b):
            return None
        return known[3]

    def add(self, a: Tensor, b: Tensor, sums: Sums) -> None:
        """Note the sums of two tensors."""
        self._pairs[id(a), id(b)] = (weakref.ref(a), weakref.ref(b), _versions(a, b), sums)


def _versions(a: Tensor, b: Tensor) -> tuple[int, int]:
    return (-1 if a.is_inference() else a._version, -1 if b.is_inference() else b._version)


@dataclass(slots=True)
class Meeting:
    """The parties of a run, A first, and what their outputs have come to.

    Attributes:
        strands: In the order of the parties.
        shadows: Whether B's layers are run on A's inputs too.
        maps: Of A-B, of the first input.
        shared_threads: Of the CPU, for all parties, which run at the same time; None if they take turns.
        rows: By key, of the batches that were kept.
    """

    parties: Sequence[Party]
    strands: Sequence[Strand[Stop]]
    maps: KeptMaps
    shadows: bool = False
    shared_threads: int | None = None
    rows: dict[Key, Row] = field(default_factory=dict)
    _batch: dict[Key, Row] = field(default_factory=dict)
    _known: dict[tuple[int, int], _Known] = field(default_factory=dict)
    _overwritten: dict[tuple[str, int], Sums | None] = field(default_factory=dict)
    _shadowed: dict[tuple[str, int], list[Tensor]] = field(default_factory=dict)
    _first_input: int = 0
    _count: int = 0

    def run(self, first_input: int, count: int) -> list[Finished] | None:
        """Run one batch, which the parties have.

        Args:
            first_input: Position of its first input in the run.
            count: Of its inputs.

        Returns:
            How each of them ended; None if the batch is to be run again, by parties that take turns: one of those that
            ran at the same time drew a random number, or raised.
        """
        self._first_input, self._count = first_input, count
        if not first_input:
            self.maps.clear()
        self._known = {pair: _Known() for pair in combinations(range(len(self.parties)), 2)}
        self._batch.clear()
        self._overwritten.clear()
        self._shadowed.clear()
        for strand in self.strands:
            self._prepare(strand)
        if self.shared_threads is None:
            return self._run()
        before = self.strands[0].random
        if all(strand.random == before for strand in self.strands):
            before.enter()
            finished = self._run()
            if RandomStates() == before and not any(each.error for each in finished):
                return finished
        else:
            self._break_off({})
        return None

    def _run(self) -> list[Finished]:
        held: list[dict[Key, Seen]] = [{} for _ in self.parties]
        waiting: dict[int, Seen] = {}
        finished: dict[int, Finished] = {}
        places = range(len(self.parties))
        while True:
            for place, stop in self._go_on([at for at in places if at not in waiting and at not in finished]):
                if isinstance(stop, Seen):
                    waiting[place] = stop
                else:
                    finished[place] = stop
                del stop  # which holds tensors
            if any(each.error is not None for each in finished.values()):
                self._break_off(finished)
            if not waiting or len(finished) == len(places):
                return [finished[each] for each in places]
            self._meet(waiting, held, finished)

    def _go_on(self, places: Sequence[int]) -> Iterator[tuple[int, Seen | Finished]]:
        """Let some parties run to their next pause."""
        if self.shared_threads is not None:
            stops = resume_together([self.strands[place] for place in places])
            for place, stop in zip(places, stops, strict=True):
                yield place, _stopped(self.strands[place], stop)
        else:
            for place in places:
                yield place, _stopped(self.strands[place], self.strands[place].resume())

    def keep(self) -> None:
        """Count the batch that ran last."""
        for key, row in self._batch.items():
            self.rows.setdefault(key, Row()).merge(row)

    def _break_off(self, finished: dict[int, Finished]) -> None:
        """Let the parties that are in the middle of a batch end it where they wait."""
        for place, strand in enumerate(self.strands):
            if place not in finished:
                strand.breaks_off = True
                stop = _stopped(strand, strand.resume())
                finished[place] = stop if isinstance(stop, Finished) else Finished()

    def _prepare(self, strand: Strand[Stop]) -> None:
        """Let a party do what comes before the forward pass."""
        stop: Stop | None = None
        while not (isinstance(stop, Ready) and stop.has_batch) and not strand.done:
            stop = strand.resume()
        if strand.error is not None:
            raise strand.error

    def _meet(self, waiting: dict[int, Seen], held: list[dict[Key, Seen]], finished: Mapping[int, Finished]) -> None:
        """Compare what all parties have reached; what some have not is held until they have."""
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
                held[at][seen.key] = Seen(seen.key, seen.layer, seen.tensor.clone(), copies, seen.channel_axis)
            waiting.clear()

    def _compare(self, key: Key, seen: Sequence[Seen]) -> None:
        """Compare what all parties have reached."""
        call, (a, b) = key[:2], seen[:2]
        if key[3] == "input":
            self._overwritten[call] = self._sums((0, 1), a.tensor, b.tensor)
            return
        row = self._batch.setdefault(key, Row())
        row.note = row.note or comparable(a.tensor, b.tensor)
        row.coarser = coarser(a.tensor, b.tensor)
        for pair in combinations(range(len(seen)), 2):
            sums = self._sums(pair, seen[pair[0]].tensor, seen[pair[1]].tensor)
            if sums is not None:
                row.sums.setdefault(pair, Sums()).merge(sums)
                if pair == (0, 1) and not sums.relative_l2 < _LOOKS_AT_CHANNELS:
                    self._add_channels(row, a, b)
        self._compare_inputs(row, call, a, b)
        if self.shadows:
            self._shadow(row, key, a, b)
        if not self._first_input and (0, 1) in row.sums and self.parties[0].lists(a.layer):
            added = None if row.added is None else row.added.relative_l2
            with torch.no_grad():
                self.maps.offer(a, b, row.sums[0, 1].relative_l2, added, self.parties[0].recorder)

    def _sums(self, pair: tuple[int, int], a: Tensor, b: Tensor) -> Sums | None:
        """Return the sums of two tensors, which may be known already; None if they cannot be compared."""
        if comparable(a, b):
            return None
        with torch.no_grad():
            known = self._known[pair].find(a, b)
            if known is None:
                has_inputs = a.dim() > 0 and a.shape[0] == self._count
                known = Sums()
                known.add(a, b, self._first_input if has_inputs else 0)
                self._known[pair].add(a, b, known)
            return known

    def _compare_inputs(self, row: Row, call: tuple[str, int], a: Seen, b: Seen) -> None:
        if call in self._overwritten:
            found = [self._overwritten[call]]
        elif len(a.inputs) == len(b.inputs):
            found = [self._sums((0, 1), one, other) for one, other in zip(a.inputs, b.inputs, strict=True)]
        else:
            return
        known = tuple(each for each in found if each is not None)
        row.inputs = known if len(known) == len(found) else ()

    def _add_channels(self, row: Row, a: Seen, b: Seen) -> None:
        if a.channel_axis is None or a.tensor.shape[0] != self._count:
            return
        with torch.no_grad():
            squares = squares_by_channel(a.tensor, b.tensor, a.channel_axis)
        if row.squares is None or len(row.squares) == len(squares):
            row.squares = squares if row.squares is None else row.squares + squares

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


def _stopped(strand: Strand[Stop], stop: Stop | None) -> Seen | Finished:
    """Return what a strand pauses with in the middle of a batch or after it.

    Raises:
        BaseException: What it raised.
    """
    if strand.error is not None:
        raise strand.error
    return Finished() if stop is None or isinstance(stop, Ready) else stop


def _run_alone(party: Party, seen: Seen, given: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Tensor]:
    """Run one layer of a network on inputs of another, brought to where and what its own are."""
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
