"""Rules on what changes from file to file; the rules of `hookscope check` are about one file.

All of them warn: each has an innocent cause, such as weights that were pruned on purpose, or files out of order.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median, median_low

from hookscope.results.findings import Finding
from hookscope.results.history import HistoryFile, HistoryVerdict, WeightPoint
from hookscope.series.drift import LEAST_OF_REPLACED
from hookscope.text import counted, figure

# The norm of a weight that trains changes by a few per cent from file to file. A head that starts at zero grows
# quickly at first: a norm counts as exploded only if it also exceeds that of usual initialisations, whose gain
# (root mean square times the root of the inputs of an output) is sqrt(2) at most (He et al. 2015). For a vector the
# gain is the root mean square.
NORM_FACTOR = 10.0
_LEAST_GAIN = 3.0

# A weight has jumped if it moved by half its norm, and so many times as far as before, as later, and as the others. A
# scale starts at 1, or at 0, where any step is large: it must have moved so far in root mean square too.
JUMP_FACTOR = 4.0
_LEAST_OF_SCALES = 0.5
_PAIRS_BEFORE = 3

DEAD = "dead-filters-appear"
JUMP, NORM, TRADED, RESET = "weight-jump", "norm-jump", "weights-traded", "statistics-reset"
STOP = "weight-stops"

CHANGE_RULES: Mapping[str, str] = {
    DEAD: "Output channels whose weights, or whose scale in a normalisation, are exactly zero, more than in the first "
    "file.",
    NORM: f"The norm of a weight, bias, scale, or BatchNorm statistic grew by a factor of {NORM_FACTOR:g} since the "
    "file before, or that of a weight or scale fell by it.",
    TRADED: "Weights have exchanged their values since the file before.",
    JUMP: f"A weight or scale moved by half of its norm or more since the file before, {JUMP_FACTOR:g} times as far as "
    "between other files, and as others of its kind did.",
    STOP: "A weight that moved until the file before has the same values as there, while most others moved.",
    RESET: "A BatchNorm is as it starts, mean 0 and variance 1, or has counted fewer batches than in the file before.",
}
"""What each rule on changes objects to."""

Row = Mapping[str, WeightPoint]
"""The tensors of one file by name."""


def dead_since(first: Row, now: Row, first_label: str) -> Iterator[Finding]:
    """Yield the weights and scales that have more output channels of zeros than in the first file."""
    for name, row in now.items():
        before = first.get(name)
        if before is None or before.dead_filter_count is None or not row.dead_filter_count:
            continue
        if row.dead_filter_count > before.dead_filter_count:
            kind, holds = ("channel", "is 0") if row.is_scale else ("output channel", "has only zeros")
            channels = f"{row.dead_filter_count:,} of {counted(row.filter_count or 0, kind)}"
            was = f"in {before.dead_filter_count:,} of them" if before.dead_filter_count else "in none"
            yield Finding(DEAD, "warn", name, f"'{name}' {holds} in {channels}; in {first_label} {was}.")


def changes(files: Sequence[HistoryFile], rows: Mapping[int, Row]) -> Iterator[HistoryVerdict]:
    """Yield what happened between files that follow each other; `rows` are those of the files that were read."""
    places = [each.index for each in files if each.index in rows]
    labels = {each.index: each.label for each in files}
    for at, (before, now) in enumerate(pairwise(places), 1):
        told: set[str] = set()
        for rule, find in _RULES.items():
            found = {name: message for name, message in find(_Pair(rows, places, at)) if name not in told}
            told.update(found)
            if found:
                message = f"{next(iter(found.values()))} between {labels[before]} and {labels[now]}."
                yield HistoryVerdict(
                    rule, "warn", tuple(found), now, before, (now,), lasts=False, message=message, is_change=True
                )


class _Pair:
    """Two files that follow each other, and all the others."""

    def __init__(self, rows: Mapping[int, Row], places: Sequence[int], at: int) -> None:
        self.before, self.now = rows[places[at - 1]], rows[places[at]]
        self._rows, self._places, self._at = rows, places, at

    def alike(self, kind: Callable[[WeightPoint], bool]) -> list[tuple[WeightPoint, WeightPoint]]:
        """Return the tensors of a kind that both files have in one shape."""
        both = [(self.before[name], row) for name, row in self.now.items() if name in self.before and kind(row)]
        return [(before, row) for before, row in both if before.shape == row.shape]

    def drifts_around(self, name: str) -> tuple[list[float], list[float]]:
        """Return how far a weight moved between the files before these two, and between those after them."""
        drifts = [row.drift for place in self._places[1:] if (row := self._rows[place].get(name)) is not None]
        known = [0.0 if each is None else each for each in drifts]
        return known[: self._at - 1], known[self._at :]


def _norms(pair: _Pair) -> Iterator[tuple[str, str]]:
    for before, now in pair.alike(_has_usual_norm):
        if now.role == "buffer" and _is_new(pair.before, now.layer):  # statistics find their size at first
            continue
        was, norm = before.norm or 0.0, now.norm or 0.0
        gain = norm / max((1, *now.shape[:1])) ** 0.5
        factor = NORM_FACTOR**2 if now.name.endswith("running_var") else NORM_FACTOR  # tenfold values
        if norm >= factor * was and gain >= _LEAST_GAIN and (was or not now.is_weight):  # one of zeros may start
            grew = f"grew {figure(norm / was, 3)}-fold" if was else f"grew from 0 to {figure(norm, 3)}"
            yield now.name, f"The norm of '{now.name}' {grew}"
        elif norm and was >= NORM_FACTOR * norm and (now.is_weight or now.is_scale):
            yield now.name, f"The norm of '{now.name}' fell to {figure(norm / was)} of what it was"


def _has_usual_norm(row: WeightPoint) -> bool:
    return row.role == "parameter" or row.name.endswith(("running_mean", "running_var"))


def _traded(pair: _Pair) -> Iterator[tuple[str, str]]:
    for name, row in pair.now.items():
        if row.moved_from:
            names = [name]
            while (origin := pair.now[names[-1]].moved_from) not in names:
                names.append(origin)
            listed = ", ".join(f"'{each}'" for each in names[:-1])
            yield name, f"{listed} and '{names[-1]}' exchanged their values"


def _jumps(pair: _Pair) -> Iterator[tuple[str, str]]:
    for kind in (_is_weight, _is_scale):
        alike = [(before, now, now.drift) for before, now in pair.alike(kind) if now.drift is not None]
        for before, now, drift in alike:
            earlier, later = pair.drifts_around(now.name)
            others = [each for _, other, each in alike if other is not now]
            if drift < LEAST_OF_REPLACED or not earlier:  # after the first file weights may move as far as they like
                continue
            if now.is_weight and not before.norm:  # one of zeros may start
                continue
            moved = drift * before.norm if before.norm else now.norm or 0.0
            if now.is_scale and moved < _LEAST_OF_SCALES * now.element_count**0.5:
                continue
            usual = [
                max(earlier[-_PAIRS_BEFORE:]),
                *([median_low(later)] if len(later) > 1 else []),  # one of them may be the way back
                *([median(others)] if others else []),
            ]
            if drift >= JUMP_FACTOR * max(usual):
                compared = f"{figure(drift, 3)} times its norm ({figure(max(usual))} is usual)"
                yield now.name, f"'{now.name}' moved by {compared}"


def _stops(pair: _Pair) -> Iterator[tuple[str, str]]:
    moved = {row.name: row.drift for _, row in pair.alike(_is_weight) if row.drift is not None}
    if moved and median(moved.values()) > 0:
        for name, drift in moved.items():
            earlier, _ = pair.drifts_around(name)
            if not drift and earlier and earlier[-1]:
                yield name, f"'{name}' did not move (by {figure(earlier[-1])} of its norm before)"


def _is_weight(row: WeightPoint) -> bool:
    return row.is_weight


def _is_scale(row: WeightPoint) -> bool:
    return row.is_scale


def _resets(pair: _Pair) -> Iterator[tuple[str, str]]:
    for name, now in pair.now.items():
        layer, _, leaf = name.rpartition(".")
        before = pair.before.get(name)
        if before is None:
            continue
        if leaf == "num_batches_tracked" and (now.max or 0) < (before.max or 0):
            yield layer, f"'{name}' fell from {before.max or 0:,.0f} to {now.max or 0:,.0f}"
        elif leaf == "running_var" and _is_new(pair.now, layer) and not _is_new(pair.before, layer):
            yield layer, f"The statistics of '{layer}' were reset to mean 0 and variance 1"


def _is_new(rows: Row, layer: str) -> bool:
    prefix = f"{layer}." if layer else ""
    mean, variance = rows.get(f"{prefix}running_mean"), rows.get(f"{prefix}running_var")
    if mean is None or variance is None:
        return False
    return mean.min == mean.max == 0 and variance.min == variance.max == 1


# In the order in which they claim a tensor: what one has explained, the others leave out.
_RULES: Mapping[str, Callable[[_Pair], Iterator[tuple[str, str]]]] = {
    TRADED: _traded,
    NORM: _norms,
    JUMP: _jumps,
    STOP: _stops,
    RESET: _resets,
}
