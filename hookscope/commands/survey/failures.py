"""Why inputs are classified wrong: the most confident run through the network again, with members of their classes.

An input leaves its class at the first layer whose p-value is at most `DEPARTURE_RATE`. The input and n members of the
class are a group. In every layer, distances to the group's mean are measured in median absolute deviations from the
median distance. An input like the members is as likely as each of them to have the greatest distance over all layers.
A layer's p-value is the share of the group whose greatest distance is at least the input's distance in that layer. It
holds for all layers together (the permutation test of the greatest statistic, Westfall and Young, Resampling-Based
Multiple Testing, 1993, section 2.6).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hookscope import options
from hookscope.commands.survey.classified_inputs import MOST_MEMBERS, ClassifiedInputs, WrongInput
from hookscope.commands.survey.features import pooled
from hookscope.commands.survey.judged_inputs import JudgedInputs
from hookscope.commands.survey.pictures import path_of
from hookscope.inputs.batches import Batch
from hookscope.inspection.forward import ForwardError, ForwardOptions, inspect
from hookscope.inspection.network import queued
from hookscope.inspection.session import Session
from hookscope.parameters import arg
from hookscope.results.accuracy import WrongPicture
from hookscope.results.failures import DEPARTURE_RATE, FailedInput, Failures, NearInput
from hookscope.statistics.storage import is_dense
from hookscope.text import printable, some_of

FEWEST_MEMBERS = 19
"""With fewer members no p-value is as low as `DEPARTURE_RATE`."""

# A spread below this share of the distances is rounding in float32.
_ROUNDING = 1e-6

_NEIGHBOURS = 3
# Members of the other class whose own departure is looked at.
_COMPARED = 15
# Values of features that are kept at a time.
_MOST_VALUES = 2**26

Features = Mapping[str, Sequence[NDArray[np.float32]]]
"""Means over positions of each row, (C,), by the name of the input."""

Again = Callable[[Sequence[str]], tuple[Features, Sequence[str]]]
"""Runs inputs again: returns their features, and the labels of the rows."""


def second_pass(session: Session, option: options.Survey, names: Sequence[str]) -> tuple[Features, Sequence[str]]:
    """Run inputs again; return their features, and the labels of rows with the same channels on every input."""
    recorder = _Recorder({*names})
    files = [path for path in dict.fromkeys(map(path_of, names)) if path is not None]
    inputs = replace(session.inputs, files=files, batch=None, pictures={})
    try:
        run = inspect(
            session.loaded,
            queued(inputs, option.batch_size, lambda _error: None),
            ForwardOptions(layers=option.layer, ops=option.ops, seed=session.seed),
            on_tensor=recorder.see,
            on_output=recorder.keep,
            on_batch=lambda _count: recorder.latest.clear(),
        )
    except ForwardError:
        return {}, ()
    by_name = recorder.by_name
    first = [row.label for row in run.rows if not row.duplicate_of]
    labels = [label for label in first if all(label in rows for rows in by_name.values())]
    labels = [label for label in labels if len({rows[label].size for rows in by_name.values()}) == 1]
    return {name: [rows[label] for label in labels] for name, rows in by_name.items()}, labels


@dataclass(slots=True)
class _Recorder:
    wanted: set[str]
    latest: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    by_name: dict[str, dict[str, NDArray[np.float32]]] = field(default_factory=dict)

    def see(self, label: str, tensor: Tensor, channel_axis: int | None) -> None:
        if channel_axis is not None and channel_axis > 0 and is_dense(tensor):
            self.latest[label] = pooled(tensor, channel_axis, "avg", label).float().numpy()

    def keep(self, batch: Batch, _output: object) -> None:
        count = len(batch.indices)
        rows = {label: values for label, values in self.latest.items() if len(values) == count}
        for place, record in enumerate(batch.records):
            if record.name in self.wanted:
                self.by_name[record.name] = {label: values[place].copy() for label, values in rows.items()}


def explained(
    classified: ClassifiedInputs,
    worst: Sequence[WrongPicture],
    chunks: Iterable[JudgedInputs],
    again: Again | None,
    channel_count: int,
) -> Failures:
    """Return the most confident wrong inputs with possible reasons; `again` is None where there is no network."""
    compared = _compared(classified, again, channel_count) if again is not None and classified.worst else None
    outside = classified.outside(chunks)
    inputs = [FailedInput(**asdict(wrong), outside=ways) for wrong, ways in zip(worst, outside, strict=True)]
    if compared is not None:
        inputs = [*map(compared.explain, inputs, classified.worst)]
    return Failures(
        tuple(inputs),
        compared_count=classified.right_count,
        range_rate=classified.range_rate,
        sampled_count=0 if compared is None else sum(map(len, compared.members.values())),
        neighbour_row="" if compared is None else compared.neighbour_row,
        remarks=tuple(_remarks(classified, compared)) if classified.worst else (),
    )


def _remarks(classified: ClassifiedInputs, compared: "_Compared | None") -> Iterator[str]:
    if not classified.knows_ranges and any(np.isfinite(wrong.layout).all() for wrong in classified.worst):
        few = f"too few are classified right ({classified.right_count})" if classified.right_count else "none is right"
        yield f"Ranges of pictures were not checked: {few}."
    unsearched = "The layer where an input leaves its class was not searched for"
    if compared is None:
        remedy = f"To search, run the command of the shards with {arg('resume')} and without {arg('shard')}."
        yield f"{unsearched}, because merging has no network. {remedy}"
        return
    if thin := [label for label, member in compared.members.items() if len(member) < FEWEST_MEMBERS]:
        names = some_of([f"'{printable(classified.labels[label], 80)}'" for label in thin], 3)
        needed = f"at least {FEWEST_MEMBERS} inputs of the class that are classified right"
        yield f"{unsearched} in {names}: that needs {needed}."


@dataclass(frozen=True, slots=True)
class _Compared:
    """Features of wrong inputs, and of the right inputs (`members`, by label) that they are compared with."""

    classified: ClassifiedInputs
    features: Features
    rows: Sequence[str]
    members: Mapping[int, Sequence[str]]

    @property
    def neighbour_row(self) -> str:
        """The last row with a channel count other than the class count; the last row if there is none."""
        sizes = [feature.size for feature in next(iter(self.features.values()), ())]
        fitting = [row for row, size in zip(self.rows, sizes, strict=True) if size != self.classified.class_count]
        return (fitting or [*self.rows] or [""])[-1]

    def explain(self, failed: FailedInput, wrong: WrongInput) -> FailedInput:
        """Add where a wrong input leaves its class, and its neighbours."""
        if wrong.name not in self.features or not self.rows:
            return failed
        failed = replace(failed, neighbours=self._neighbours(wrong.name))
        other = self.classified.labels_at().get(wrong.taken_for)
        p_values = self._p_values(wrong.name, wrong.label)
        first = None if p_values is None else first_departure(p_values)
        if p_values is None or first is None:
            return failed
        is_like = other is not None and self._is_like(wrong.name, other, wrong.label, first)
        return replace(failed, leaves_at=self.rows[first], p_value=float(p_values[first]), is_like_other=is_like)

    def _p_values(self, name: str, label: int) -> NDArray[np.float64] | None:
        """Return the p-values of an input among the members of a class; None where there are too few."""
        members = [other for other in self.members[label] if other != name]
        if len(members) < FEWEST_MEMBERS:
            return None
        stacked = [np.stack(rows) for rows in zip(*(self.features[member] for member in members), strict=True)]
        return departure_p_values(self.features[name], stacked)

    def _is_like(self, name: str, other: int, label: int, first: int) -> bool:
        """Tell whether an input that leaves its class at row `first` is like class `other`: see `FailedInput`."""
        among_others = self._p_values(name, other)
        if among_others is None or first_departure(among_others) is not None:
            return False
        theirs = [self._p_values(member, label) for member in self.members[other][:_COMPARED]]
        firsts = [first_departure(p_values) for p_values in theirs if p_values is not None]
        ranked = sorted(len(self.rows) if index is None else index for index in firsts)
        return first <= ranked[len(ranked) // 2]

    def _neighbours(self, name: str) -> tuple[NearInput, ...]:
        at = self.rows.index(self.neighbour_row)
        feature = self.features[name][at].astype(np.float64)
        candidates = [
            NearInput(member, self.classified.labels[label], float(np.linalg.norm(self.features[member][at] - feature)))
            for label, names in self.members.items()
            for member in names
        ]
        return tuple(sorted(candidates, key=lambda near: near.distance)[:_NEIGHBOURS])


def _compared(classified: ClassifiedInputs, again: Again, channel_count: int) -> _Compared:
    labels_at, worst = classified.labels_at(), classified.worst
    labels = sorted({wrong.label for wrong in worst} | {labels_at.get(wrong.taken_for, wrong.label) for wrong in worst})
    most = max(FEWEST_MEMBERS, min(MOST_MEMBERS, _MOST_VALUES // max(1, channel_count * len(labels))))
    chosen = {label: _evenly(classified.members[label].names, most) for label in labels}
    features, rows = again([*(wrong.name for wrong in worst), *chain.from_iterable(chosen.values())])
    members = {label: [name for name in group if name in features] for label, group in chosen.items()}
    return _Compared(classified, features, rows, members)


def _evenly(names: Sequence[str], most: int) -> list[str]:
    count = min(most, len(names))
    return [names[at * len(names) // count] for at in range(count)]


def departure_p_values(
    features: Sequence[NDArray[np.float32]], members: Sequence[NDArray[np.float32]]
) -> NDArray[np.float64]:
    """Return p-values, (L,), from the features of an input, (C,), and of members of the class, (n, C), by layer."""
    reaches = np.stack([*map(_reaches, features, members)], 1)  # (n + 1, L)
    greatest = reaches.max(1)
    shares: NDArray[np.float64] = (greatest[:, None] >= reaches[0]).mean(0)
    return shares


def first_departure(p_values: NDArray[np.float64]) -> int | None:
    """Return the first layer where an input leaves its class; None if it stays."""
    (places,) = np.nonzero(p_values <= DEPARTURE_RATE)
    return int(places[0]) if places.size else None


def _reaches(features: NDArray[np.float32], members: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return distances from the group's mean, less their median, in median absolute deviations, (n + 1,).

    The input's comes first.
    """
    group = np.nan_to_num(np.concatenate([features[None], members]).astype(np.float64))
    distances = np.sqrt(((group - group.mean(0)) ** 2).sum(1))
    apart = distances - np.median(distances)
    spread = max(float(np.median(np.abs(apart))), _ROUNDING * float(np.sqrt((group**2).sum(1)).max()))
    return apart / spread if spread else np.zeros_like(apart)
