"""Follow a series of checkpoints: read all files, or a few in a search, and report what changed and since when."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from hookscope.commands.history.changes import (
    FROZEN,
    changes,
    dead_since,
    moved_though_frozen,
    optimiser_changes,
    tensor_changes,
)
from hookscope.commands.history.drift import drifts, traded_places
from hookscope.commands.history.first_finding import ByKey, by_key, searched, verdicts
from hookscope.commands.history.measure_file import MeasuredFile, Weights, measure_history_file
from hookscope.errors import UsageError
from hookscope.inspection.device import cpu_threads
from hookscope.inspection.session import package_versions
from hookscope.parameters import arg
from hookscope.results.findings import Finding
from hookscope.results.history import History, HistoryFile, WeightPoint
from hookscope.results.inputs import Provenance
from hookscope.rules import HISTORY_RULES, RULES
from hookscope.rules.settings import NO_NETWORK, CheckSettings
from hookscope.text import counted, once_per_file, printable, some_of


def follow(
    names: Sequence[str],
    settings: CheckSettings,
    wanted: AbstractSet[str],
    *,
    searches: bool = False,
    device: torch.device | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> History:
    """Follow checkpoints, given in natural order of their names, in the order of training.

    With `searches`, halving finds since which file a rule fails, and most files are not read.

    Raises:
        UsageError: If there are fewer than two files.
    """
    if len(names) < 2:
        wrong = f"A history takes at least two files, not {len(names)}"
        if names and not os.path.lexists(names[0]):
            wrong = f"There is no '{printable(names[0])}'"
        raise UsageError(f"{wrong}: name a folder or a glob.")
    began = time.perf_counter()
    files = [HistoryFile(at, name, label) for at, (name, label) in enumerate(zip(names, labels_of(names), strict=True))]
    natural = [*range(len(files))]
    series = _Series(files, settings, wanted, device, on_progress or (lambda _done, _all: None))
    notes: list[str] = []
    all_verdicts = searched(len(files), series.look) if searches else []
    if searches and series.order() != natural:
        searches = False
        notes.append(
            f"{arg('bisect')} had no effect: the epochs or steps in the files are not in the order of their names."
        )
    if not searches:
        series.compare_in(natural)
    order = series.order()
    if searches or order != natural:
        series.compare_in([at for at in order if at in series.measured])
        notes += [] if searches else ["The files are not in the order of their names."]
    measured = series.in_order(order)
    history_files = tuple(snapshot.file for snapshot in measured)
    rows = {snapshot.file.index: {row.name: row for row in snapshot.rows} for snapshot in measured if snapshot.rows}
    if not searches:
        first = next((snapshot for snapshot in measured if snapshot.rows), None)
        judged = {at: _with_dead(first, measured[at]) for at in rows if first is not None}
        all_verdicts = [*verdicts(judged, fading={FROZEN}), *changes(history_files, rows)]
    all_verdicts += [*tensor_changes(history_files, rows), *optimiser_changes(history_files)]
    return History(
        files=history_files,
        order=series.order_words,
        verdicts=tuple(sorted(all_verdicts, key=lambda verdict: (verdict.level != "fail", verdict.first))),
        rows=tuple(row for snapshot in measured for row in snapshot.rows),
        activations=tuple(row for snapshot in measured for row in snapshot.activations),
        inputs=next((snapshot.inputs for snapshot in measured if snapshot.inputs), ()),
        scope=_scope(history_files, settings, searches=searches),
        searched=searches,
        arch="" if settings.arch == NO_NETWORK else str(settings.arch or "recognised"),
        warnings=tuple(_warnings(history_files, rows)),
        notes=(*notes, *once_per_file([(file.label, text) for file in history_files for text in file.notes])),
        timings={"total": time.perf_counter() - began},
        provenance=Provenance((), None, versions=package_versions(), threads=torch.get_num_threads()),
    )


def _with_dead(first: MeasuredFile, now: MeasuredFile) -> ByKey:
    """Return the findings on a file, and on filters that died since the first file read."""
    rows, others = ({row.name: row for row in snapshot.rows} for snapshot in (first, now))
    return by_key([*dead_since(rows, others, first.file.label), *now.findings])


class _Compared(NamedTuple):
    """How a file differs from the file before it, `since` in natural order, and from the first file."""

    since: int | None = None
    drift: Mapping[str, float | None] = {}
    drift_from_first: Mapping[str, float | None] = {}
    moved_from: Mapping[str, str] = {}
    moved_though_frozen: Sequence[Finding] = ()


@dataclass(slots=True)
class _Series:
    """The files in natural order of names, and the measurements of files that were read; two are open at most."""

    files: Sequence[HistoryFile]
    settings: CheckSettings
    wanted: AbstractSet[str]
    device: torch.device | None
    on_progress: Callable[[int, int], None]
    measured: dict[int, MeasuredFile] = field(default_factory=dict)
    weights: dict[int, Weights] = field(default_factory=dict)
    compared: dict[int, _Compared] = field(default_factory=dict)
    shapes: Mapping[str, tuple[tuple[int, ...], ...]] | None = None  # in the file that was read first
    order_words: str = ""

    def look(self, at: int) -> ByKey | None:
        """Return the findings on a file; None if it cannot be read. Later calls do not read it again."""
        if at not in self.measured:
            self._read(at)
            if at in self.weights:
                self.weights[at].release()
        readable = [self.measured[weight] for weight in sorted(self.weights)]
        return _with_dead(readable[0], self.measured[at]) if at in self.weights else None

    def compare_in(self, order: Sequence[int]) -> None:
        """Compare each file with the file before it and with the first; read files that were not read yet."""
        first = previous = None
        self.compared.clear()
        for at in order:
            if at not in self.measured:
                self._read(at)
            if at not in self.weights:
                continue
            if first is None or previous is None:
                first = at
            else:
                with cpu_threads(1):
                    self._compare(first, previous, at)
            previous = at
        if previous is not None:
            self.weights[previous].release()

    def _compare(self, first: int, previous: int, at: int) -> None:
        """Compare a file with the file before it, then with the first; release both."""
        before, now = self.weights[previous], self.weights[at]
        drift = drifts(before.tensors, now.tensors)
        moved_from = traded_places(before.tensors, now.tensors, drift)
        labels = [self.files[index].label for index in (previous, at)]
        learnt = [row.name for row in self.measured[at].rows if row.role == "parameter"]
        frozen = [*moved_though_frozen(before, now, drift, labels, learnt)]
        before.release()
        from_first = drift
        if first != previous:
            from_first = drifts(self.weights[first].tensors, now.tensors)
            self.weights[first].release()
        self.compared[at] = _Compared(previous, drift, from_first, moved_from, frozen)

    def _read(self, at: int) -> None:
        self.measured[at], weights = measure_history_file(
            self.files[at], self.settings, self.wanted, like=self.shapes, device=self.device
        )
        if weights is not None:
            self.shapes = self.shapes or {name: (tuple(tensor.shape),) for name, tensor in weights.tensors.items()}
            self.weights[at] = weights
        self.on_progress(len(self.measured), len(self.files))

    def order(self) -> list[int]:
        """Return the files in the order of training, by the counters in files that were read."""
        read = [self.measured[at].file.counters if at in self.weights else None for at in range(len(self.files))]
        order, self.order_words = order_of(read)
        return order

    def in_order(self, order: Sequence[int]) -> list[MeasuredFile]:
        """Return the measurements in an order, numbered by it, with the results of the comparisons."""
        in_order = []
        for place, at in enumerate(order):
            measured = self.measured.get(at, MeasuredFile(self.files[at]))
            since, drift, from_first, moved_from, frozen = self.compared.get(at, _Compared())
            file = replace(measured.file, index=place, compared_with=None if since is None else order.index(since))
            rows = tuple(
                replace(
                    row,
                    file=place,
                    drift=drift.get(row.name),
                    drift_from_first=from_first.get(row.name),
                    moved_from=moved_from.get(row.name, ""),
                )
                for row in measured.rows
            )
            activations = tuple(replace(row, file=place) for row in measured.activations)
            findings = (*measured.findings, *frozen)
            in_order.append(replace(measured, file=file, rows=rows, activations=activations, findings=findings))
        return in_order


def _scope(files: Sequence[HistoryFile], settings: CheckSettings, *, searches: bool) -> str:
    judged = len({rule for file in files for rule in file.judged})
    if settings.arch == NO_NETWORK:
        ran = f"Ran the {counted(judged, 'rule')} that {'needs' if judged == 1 else 'need'} only the file"
        parts = [f"{ran}; add {arg('arch')} NAME or pictures for the rest."]
    else:
        has_inputs = not isinstance(settings.images, tuple) or settings.images or settings.input
        is_noise = not (has_inputs or settings.data or settings.expectations)
        parts = [f"Ran {judged} of {len(RULES)} rules over {'noise' if is_noise else 'the inputs given'}."]
    if searches:
        read = sum(file.status == "read" for file in files)
        parts.append(
            f"{arg('bisect')} read {read} of {len(files)} files, assuming that a problem stays once it begins. Changes "
            f"from file to file ({', '.join([*HISTORY_RULES][1:7])}) were not looked for; tensors-change, "
            "dtype-change and optimizer-reset compare the files read."
        )
    return " ".join(parts)


def _warnings(files: Sequence[HistoryFile], rows: Mapping[int, Mapping[str, WeightPoint]]) -> list[str]:
    warnings = once_per_file([(file.label, text) for file in files for text in file.warnings])
    networks = _networks([file for file in files if file.index in rows], rows)
    if len(networks) > 1:
        groups = "; ".join(some_of([file.label for file in network], 3) for network in networks)
        warnings.append(
            f"The files hold {len(networks)} networks that share no tensor: {groups}. Name the files of one, as a glob."
        )
    return warnings


def _networks(files: Sequence[HistoryFile], rows: Mapping[int, Mapping[str, WeightPoint]]) -> list[list[HistoryFile]]:
    """Group files that share a tensor name."""
    networks: list[list[HistoryFile]] = []
    for file in files:
        names = rows[file.index].keys()
        same = next((network for network in networks if not names.isdisjoint(rows[network[-1].index])), None)
        if same is None:
            networks.append([file])
        else:
            same.append(file)
    return networks


def order_of(counters: Sequence[Mapping[str, int] | None]) -> tuple[list[int], str]:
    """Return the files' indices in the order of training, and in words what decides the order.

    Args:
        counters: For each file in natural order of names, its counts of epochs and steps by name, preferred names
            first; None for an unreadable file, which stays behind the file before it.
    """
    stored = [counter for counter in counters if counter is not None]
    shared = [name for name in (stored[0] if stored else {}) if all(name in counts for counts in stored)]
    distinct = {name: len({counts[name] for counts in stored}) for name in shared}
    chosen = max(shared, key=lambda name: distinct[name], default="")  # the first, if several are equal
    if not chosen or distinct[chosen] < 2:
        return [*range(len(counters))], "their names, as no stored epoch or step tells them apart"
    places: list[int] = []
    for counter in counters:
        places.append(counter[chosen] if counter is not None else places[-1] if places else -1)
    return sorted(range(len(counters)), key=lambda at: places[at]), f"the '{chosen}' that each file stores"


def labels_of(names: Sequence[str]) -> list[str]:
    """Return the files' names without the folders that all of them share."""
    folders = {os.path.dirname(name) for name in names}  # noqa: PTH120 - keeps "." and ".." as given
    if len(folders) == 1:
        return [os.path.basename(name) or name for name in names]  # noqa: PTH119 - likewise
    absolute = [os.path.abspath(name) for name in names]  # noqa: PTH100 - links stay as they are
    try:
        shared = os.path.commonpath(absolute)
    except ValueError:  # on different drives
        return [*names]
    return [os.path.relpath(path, shared) for path in absolute]
