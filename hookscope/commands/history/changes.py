"""Rules on what changes from file to file; the rules of `hookscope check` are about one file.

They warn, as each change has an innocent cause, such as weights that were pruned on purpose, or files out of order.
Only a file that alone lacks a tensor, or alone has it in another shape, fails.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, takewhile
from operator import attrgetter
from statistics import median, median_low
from typing import Literal

import torch
from torch import Tensor

from hookscope.commands.history.drift import LEAST_OF_REPLACED, cosine
from hookscope.commands.history.measure_file import Weights
from hookscope.results.findings import Finding
from hookscope.results.history import HistoryFile, HistoryFinding, OptimiserPoint, WeightPoint
from hookscope.text import are, counted, figure, in_words, printable, some_of

# The norm of a weight that trains changes by a few per cent from file to file. A head that starts at zero grows
# quickly at first: a norm has exploded only if its gain, root mean square times sqrt(inputs of an output), is high too.
# Usual initialisations have a gain of sqrt(2) at most (He et al. 2015). A vector's gain is its root mean square.
NORM_FACTOR = 10.0
_LEAST_GAIN = 3.0

# A weight has jumped if it moved by half its norm, and JUMP_FACTOR times as far as it did before and later, and as
# other weights did.
# A scale may start at 0, where any step is large: its root mean square change must reach _LEAST_OF_SCALES too.
JUMP_FACTOR = 4.0
_LEAST_OF_SCALES = 0.5
_PAIRS_BEFORE = 3

_STATISTICS = ("running_mean", "running_var")

# Copies that follow a weight, as in momentum encoders and target networks, have a greater cosine with it. Unrelated
# weights have a cosine near 0.
_COSINE_OF_COPY = 0.5

_WRITTEN = "such as an average (EMA) or a merged adapter"

FROZEN = "frozen-weight-moves"

Row = Mapping[str, WeightPoint]
"""The tensors of one file by name."""


def dead_since(first: Row, now: Row, first_label: str) -> Iterator[Finding]:
    """Yield a finding for each weight and scale with more all-zero output channels than in the first file."""
    for name, row in now.items():
        before = first.get(name)
        if before is None or before.dead_filter_count is None or not row.dead_filter_count:
            continue
        if row.dead_filter_count > before.dead_filter_count:
            kind, holds = ("channel", "is 0") if row.is_scale else ("output channel", "has only zeros")
            channels = f"{row.dead_filter_count:,} of {counted(row.filter_count or 0, kind)}"
            was = f"in {before.dead_filter_count:,} of them" if before.dead_filter_count else "in none"
            message = f"'{name}' {holds} in {channels}; in {first_label} {was}."
            yield Finding("dead-filters-appear", "warn", name, message)


def changes(files: Sequence[HistoryFile], rows: Mapping[int, Row]) -> Iterator[HistoryFinding]:
    """Yield the changes between consecutive files; `rows` has the tensors of files that were read."""
    places = [file.index for file in files if file.index in rows]
    labels = {file.index: file.label for file in files}
    for at, (before, now) in enumerate(pairwise(places), 1):
        reported: set[str] = set()
        for rule, find in _RULES.items():
            messages = {name: message for name, message in find(_Pair(rows, places, at)) if name not in reported}
            reported.update(messages)
            if messages:
                message = f"{next(iter(messages.values()))} between {labels[before]} and {labels[now]}."
                yield _change(rule, "warn", messages, before, now, message)


def _change(
    rule: str, level: Literal["fail", "warn"], names: Iterable[str], before: int, now: int, message: str
) -> HistoryFinding:
    where, *others = names
    return HistoryFinding(
        rule, level, where, message, tuple(others), first=now, before=before, files=(now,), lasts=False, is_change=True
    )


class _Pair:
    """A file and the file before it; it keeps the rows of all files for comparison."""

    def __init__(self, rows: Mapping[int, Row], places: Sequence[int], at: int) -> None:
        self.before, self.now = rows[places[at - 1]], rows[places[at]]
        self._rows, self._places, self._at = rows, places, at

    def alike(self, kind: Callable[[WeightPoint], bool]) -> list[tuple[WeightPoint, WeightPoint]]:
        """Return the tensors of a kind that have the same shape in both files."""
        both = [(self.before[name], row) for name, row in self.now.items() if name in self.before and kind(row)]
        return [(before, row) for before, row in both if before.shape == row.shape]

    def drifts_around(self, name: str) -> tuple[list[float], list[float]]:
        """Return the drifts of a weight in earlier steps and in later steps."""
        rows = [self._rows[place].get(name) for place in self._places]
        drifts = [(row.file, row.drift) for row in rows if row is not None and row.drift is not None]
        now = self._places[self._at]
        return [drift for at, drift in drifts if at < now], [drift for at, drift in drifts if at > now]


def _norms(pair: _Pair) -> Iterator[tuple[str, str]]:
    for before, now in pair.alike(lambda row: row.role == "parameter" or row.name.endswith(_STATISTICS)):
        if now.role == "buffer" and _is_new(pair.before, now.layer):  # first update of statistics
            continue
        was, norm = before.norm, now.norm
        if was is None or norm is None or math.isinf(was):  # the square would overflow float64
            continue
        gain = norm / max((1, *now.shape[:1])) ** 0.5
        factor = NORM_FACTOR**2 if now.name.endswith("running_var") else NORM_FACTOR  # variances are squares
        if norm >= factor * was and gain >= _LEAST_GAIN and (was or not now.is_weight):  # zeros may begin to train
            grew = f"grew {figure(norm / was, 3)}-fold" if was else f"grew from 0 to {figure(norm, 3)}"
            yield now.name, f"The norm of '{now.name}' {grew}"
        elif norm and was >= NORM_FACTOR * norm and (now.is_weight or now.is_scale):
            yield now.name, f"The norm of '{now.name}' fell to {figure(norm / was)} of what it was"


def _traded(pair: _Pair) -> Iterator[tuple[str, str]]:
    for name, row in pair.now.items():
        if row.moved_from:
            names = [name]
            while (origin := pair.now[names[-1]].moved_from) not in names:
                names.append(origin)
            listed = ", ".join(f"'{weight}'" for weight in names[:-1])
            yield name, f"{listed} and '{names[-1]}' exchanged their values"


def _jumps(pair: _Pair) -> Iterator[tuple[str, str]]:
    for kind in (attrgetter("is_weight"), attrgetter("is_scale")):
        alike = [(before, now, now.drift) for before, now in pair.alike(kind) if now.drift is not None]
        for before, now, drift in alike:
            earlier, later = pair.drifts_around(now.name)
            others = [shift for _, other, shift in alike if other is not now]
            if drift < LEAST_OF_REPLACED or not earlier:  # the first step may be large
                continue
            if now.is_weight and not before.norm:  # zeros may begin to train
                continue
            moved = drift * before.norm if before.norm else now.norm or 0.0
            if now.is_scale and moved < _LEAST_OF_SCALES * now.element_count**0.5:
                continue
            usual = [
                max(earlier[-_PAIRS_BEFORE:]),
                *([median_low(later)] if len(later) > 1 else []),  # a later step may undo the jump
                *([median(others)] if others else []),
            ]
            if drift >= JUMP_FACTOR * max(usual):
                compared = f"by {figure(drift, 3)} times its norm ({figure(max(usual))} is usual)"
                yield now.name, f"'{now.name}' moved {compared if before.norm else 'away from 0'}"


def _stops(pair: _Pair) -> Iterator[tuple[str, str]]:
    moved = {row.name: row.drift for _, row in pair.alike(attrgetter("is_weight")) if row.drift is not None}
    if moved and median(moved.values()) > 0:
        for name, drift in moved.items():
            earlier, _ = pair.drifts_around(name)
            if not drift and earlier and earlier[-1]:
                moved_by = f"by {figure(earlier[-1])} of its norm" if math.isfinite(earlier[-1]) else "it moved from 0"
                yield name, f"'{name}' did not move ({moved_by} before)"


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


# In order of precedence: a rule skips tensors that an earlier rule has reported.
_RULES: Mapping[str, Callable[[_Pair], Iterator[tuple[str, str]]]] = {
    "weights-traded": _traded,
    "norm-jump": _norms,
    "weight-jump": _jumps,
    "weight-stops": _stops,
    "statistics-reset": _resets,
}


def moved_though_frozen(
    before: Weights, now: Weights, drift: Mapping[str, float | None], labels: Sequence[str], learnt: Sequence[str]
) -> Iterator[Finding]:
    """Yield a finding for each parameter that is frozen in both files and differs by more than rounding.

    Files without a trainable parameter are skipped: they are averaged or exported. So are parameters that share memory
    with a trainable parameter or follow it as a copy. `learnt` lists a tied parameter once.
    """
    flags, others = now.requires_grad, before.requires_grad
    if not (any(flags.values()) and any(others.values())):
        return
    dense = {name: tensor for name, tensor in now.tensors.items() if tensor.layout is torch.strided}
    trained = {name: dense[name] for name, flag in flags.items() if flag and name in dense}
    addresses = {tensor.data_ptr() for tensor in trained.values()}
    moved = {
        name: dense[name]
        for name in learnt
        if flags.get(name) is others.get(name) is False
        and name in dense
        and dense[name].dtype == before.tensors[name].dtype
        and (drift.get(name) or 0) > _rounding(dense[name])
        and dense[name].data_ptr() not in addresses
    }
    copies = set(_copies(moved, trained))
    for name in moved:
        if not any(name.startswith(prefix) and origin + name[len(prefix) :] in trained for prefix, origin in copies):
            where = f"is frozen in {labels[0]} and {labels[1]}, yet moved between them"
            yield Finding(FROZEN, "warn", name, f"'{printable(name, 80)}' {where}: {_cause(name, now.moves_by)}.")


def _rounding(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).eps if tensor.is_floating_point() or tensor.is_complex() else 0.0


def _copies(moved: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield the prefixes of copies and of the trainable weights that they follow."""
    for name, tensor in moved.items():
        for origin, other in trained.items():
            ending = _common_ending(name, origin)
            alike = ending and tensor.shape == other.shape and sum(size > 1 for size in tensor.shape) >= 2
            if alike and cosine(tensor, other) > _COSINE_OF_COPY:
                yield name.removesuffix(ending), origin.removesuffix(ending)


def _common_ending(first: str, second: str) -> str:
    """Return the longest common ending of two dotted names; "" if their last parts differ."""
    parts = zip(reversed(first.split(".")), reversed(second.split(".")), strict=False)
    shared = [part for part, _ in takewhile(lambda pair: pair[0] == pair[1], parts)]
    return ".".join(reversed(shared))


def _cause(name: str, moves_by: Mapping[str, Sequence[str]] | None) -> str:
    if moves_by is None:
        optimiser = "an optimizer with momentum or weight decay still moves it"
        return f"either its .grad is 0, not None, so that {optimiser}, or something else wrote to it, {_WRITTEN}"
    if name not in moves_by:
        return f"the optimizer in the file does not have it, so something else wrote to it, {_WRITTEN}"
    if by := moves_by[name]:
        remedy = "set .grad to None, or take it out of the optimizer"
        return f"its .grad is probably 0, not None, so the optimizer still moves it, by {in_words(by)}; {remedy}"
    stale = "either its .grad still holds the gradient of an earlier step, with which the optimizer still moves it"
    return f"{stale}, or something else wrote to it, {_WRITTEN}"


def tensor_changes(files: Sequence[HistoryFile], rows: Mapping[int, Row]) -> Iterator[HistoryFinding]:
    """Yield a verdict for tensors that are missing, new, or in another shape or dtype, over the files read, in order.

    If the next file reverts a change, only the first of the two files is reported.
    """
    labels = {file.index: file.label for file in files}
    places = [at for at in labels if at in rows]
    groups: dict[tuple[int, str, bool, object], list[str]] = {}
    for name in dict.fromkeys(name for at in places for name in rows[at]):
        for kind, forms in (
            ("shape", [None if (row := rows[at].get(name)) is None else row.shape for at in places]),
            ("dtype", [None if (row := rows[at].get(name)) is None else row.dtype for at in places]),
        ):
            for at, is_alone in _changed(forms):
                change = "missing" if forms[at] is None else "new" if forms[at - 1] is None else kind
                if kind == "shape" or change == "dtype":
                    dtypes = (forms[at - 1], forms[at]) if change == "dtype" else None
                    groups.setdefault((at, change, is_alone, dtypes), []).append(name)
    for (at, change, is_alone, _), names in groups.items():
        before, now = places[at - 1], places[at]
        if rows[before].keys().isdisjoint(rows[now]):  # two networks: follow.py warns of them
            continue
        is_counter = all(name.endswith("num_batches_tracked") for name in names)  # load_state_dict does not need it
        fails = is_alone and change in ("missing", "shape") and not is_counter
        message = _tensors_message(names, change, rows[before], rows[now], (labels[before], labels[now]))
        rule = "dtype-change" if change == "dtype" else "tensors-change"
        yield _change(rule, "fail" if fails else "warn", names, before, now, message)


def _changed(forms: Sequence[object]) -> Iterator[tuple[int, bool]]:
    """Yield each position where the form changes, and whether only that file has the new form."""
    at = 1
    while at < len(forms):
        if forms[at] != forms[at - 1]:
            is_last = at == len(forms) - 1
            returns = not is_last and forms[at + 1] == forms[at - 1]
            yield at, is_last or returns
            at += returns
        at += 1


def _tensors_message(names: Sequence[str], change: str, before: Row, now: Row, labels: tuple[str, str]) -> str:
    first, count = names[0], len(names)
    tensors, listed = counted(count, "tensor"), some_of([f"'{printable(name, 80)}'" for name in names], 3)
    if change == "missing":
        return f"{labels[1]} lacks {tensors} of {labels[0]}: {listed}."
    if change == "new":
        return f"{labels[1]} holds {tensors} that {are(count)} not in {labels[0]}: {listed}."
    if change == "dtype":
        return f"{labels[1]} stores {tensors} in {now[first].dtype}, {labels[0]} in {before[first].dtype}: {listed}."
    shapes = [" x ".join(map(str, row[first].shape)) or "scalar" for row in (now, before)]
    return f"{labels[1]} holds {tensors} in another shape than {labels[0]}: {listed} ({shapes[0]}, before {shapes[1]})."


def optimiser_changes(files: Sequence[HistoryFile]) -> Iterator[HistoryFinding]:
    """Yield a verdict where an optimiser's state is lost or cleared, or its step count falls, over files in order."""
    read = [checkpoint for checkpoint in files if checkpoint.status == "read"]
    for key in dict.fromkeys(state.key for file in read for state in file.optimisers):
        states = [next((state for state in file.optimisers if state.key == key), None) for file in read]
        last_steps = 0.0
        for at, (before, now) in enumerate(pairwise(states), 1):
            last_steps = max(last_steps, (before.steps or 0.0) if before else 0.0)
            lost = _lost_state(before, now, last_steps, is_last=at == len(states) - 1)
            if lost:
                labels = read[at - 1].label, read[at].label
                message = f"The state of '{printable(key, 80)}' {lost.format(*labels)}."
                yield _change("optimizer-reset", "warn", (key,), read[at - 1].index, read[at].index, message)
                last_steps = 0.0
                states[at] = replace(now, steps=None) if now else None


def _lost_state(before: OptimiserPoint | None, now: OptimiserPoint | None, steps: float, *, is_last: bool) -> str:
    """Return the end of a sentence on what a state lost, with {0} and {1} for both labels; "" for nothing."""
    if before is None:
        return ""
    if now is None:  # a last file may be stripped for release
        return "" if is_last or not before.live_count else "is in {0} and not in {1}"
    was, live = before.live_count or 0, now.live_count or 0
    if was and not live:
        how = "only zeros are left" if now.tensor_count else "it is empty"
        return f"was cleared in {{1}}: {how}; in {{0}} {counted(was, 'tensor')} held other values"
    if was and live < was / 2:
        return f"was cleared in part in {{1}}: {counted(live, 'tensor')} with values other than 0; {was:,} in {{0}}"
    if now.steps is not None and now.steps < steps:
        return f"was reset: it counts {now.steps:,.0f} steps in {{1}}, and {steps:,.0f} before"
    return ""
