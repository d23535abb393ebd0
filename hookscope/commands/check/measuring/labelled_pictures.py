"""Run a network over labelled pictures without hooks, a batch at a time, and count which are classified right."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest

import torch
from torch import Tensor

from hookscope.commands.check.measuring.outputs import class_scores, returned_tensors
from hookscope.commands.check.measuring.preparing import Prepared
from hookscope.errors import ModelError, UsageError, nearest
from hookscope.inputs.batches import Batch
from hookscope.inputs.labelled_files import LabelledFiles
from hookscope.inspection.failures import failure_message, locate, reraise_internal
from hookscope.inspection.losses.formulas import class_probabilities
from hookscope.inspection.losses.targets import Output
from hookscope.inspection.network import InspectedNetwork
from hookscope.inspection.state.preservation import preserved
from hookscope.parameters import arg
from hookscope.results.accuracy import Accuracy, ClassAccuracy, LabelledResult, WrongPicture, folded
from hookscope.results.comparison import Reading
from hookscope.results.inputs import InputRecord
from hookscope.rules.settings import CheckSettings
from hookscope.text import counted, printable

_WORST = 8  # wrong pictures kept with details: as many as a reader looks through
_DIGEST_DIGITS = 16  # of a SHA-256: a million pictures have a collision once in ten million times
_THRESHOLD = 0.5  # a label is given if its probability is above this; torchmetrics' default

VARYING_CLASSES = "The number of class scores differs between inputs."

Classes = Mapping[str, tuple[int, ...]]
"""The indices of the network's classes that each label stands for."""


def measure_labelled(prepared: Prepared, settings: CheckSettings, subject: InspectedNetwork) -> LabelledResult | None:
    """Classify the labelled pictures; None if there are none.

    A picture is right if its label has the greatest score, the first of equal ones; with several labels for each
    picture, if exactly these have a sigmoid above 0.5. One with NaN among its scores is wrong.

    Raises:
        ImageError: If a picture cannot be read.
        ModelError: If the network raises on one.
        UsageError: If the network returns no class scores, or a label is not one of its classes.
    """
    data = prepared.data
    if data is None:
        return None
    countings: list[_Counting] = []
    with preserved(subject.network, settings.seed, modules=subject.modules.values()), torch.no_grad():
        for batch in prepared.data_batches():
            scores = class_scores(_run(subject, batch), len(batch.indices), settings.output_key)
            unusable = f"{arg('data')} {printable(data.source)} cannot be used"
            if isinstance(scores, str):
                raise UsageError(f"{unusable}. {scores}")
            if scores.shape[1] < 2 and not data.multi_label:
                remedy = f"{arg('multi_label')} for a label that is there or not"
                raise UsageError(f"{unusable}: the network has one score per input ({remedy}).")
            scores = (scores.float() if scores.itemsize < 4 else scores).cpu()
            countings = countings or _countings(data, subject.info.categories, scores.shape[1])
            if scores.shape[1] != countings[-1].class_count:
                raise UsageError(f"{unusable}. {VARYING_CLASSES}")
            if data.multi_label and len(countings) > 1 and bool(((scores < 0) | (scores > 1)).any()):
                countings.pop()  # one score outside of 0 to 1 shows that no score is a probability
            for counting in countings:
                counting.add(batch.records, scores)
    return countings[-1].result() if countings else None


def _run(subject: InspectedNetwork, batch: Batch) -> Mapping[str, Tensor]:
    try:
        output = subject.network(*batch.args, **batch.kwargs)
    except (Exception, SystemExit) as raised:
        error = reraise_internal(raised)
        name = f"{subject.info.name}, given '{printable(batch.records[0].name)}' and the inputs after it,"
        raise ModelError(failure_message(name, locate(subject.modules, error), error)) from raised
    return returned_tensors(output)


def _countings(data: LabelledFiles, categories: Sequence[str], class_count: int) -> "list[_Counting]":
    """Return a counting for each possible reading of the scores; the last one holds if all scores lie in 0-1."""
    labels = [*dict.fromkeys(label for group in data.labels.values() for label in group)]
    classes, mapping = classes_of(labels, categories, class_count, in_folders=data.in_folders, columns=data.columns)
    categories = categories if len(categories) == class_count else ()
    readings: list[Reading] = ["sigmoid", "as returned"] if data.multi_label else ["softmax"]
    return [_Counting(data, LabelCounts(classes, categories), class_count, mapping, reading) for reading in readings]


def classes_of(
    labels: Sequence[str], categories: Sequence[str], class_count: int, *, in_folders: bool, columns: Sequence[str] = ()
) -> tuple[Classes, str]:
    """Return the classes of labels, and how they were matched, in a sentence; UsageError for an unknown label.

    Labels are names of classes, whatever their case, with "_" for a space; else all are indices; else there is a folder
    or column for each class: folders in sorted order, as torchvision's ImageFolder numbers them, columns in their own.
    """
    names, categories = categories, categories if len(categories) == class_count else ()
    by_name: dict[str, tuple[int, ...]] = {}
    for index, name in enumerate(categories):
        by_name[folded(name)] = (*by_name.get(folded(name), ()), index)
    matched = {label: by_name[folded(label)] for label in labels if folded(label) in by_name}
    if len(matched) == len(labels):
        return matched, "labels are names of classes"
    are_numbers = all(label.isascii() and label.isdecimal() and len(label) < 10 for label in labels)
    in_order = sorted(labels)
    if not matched and are_numbers and max(map(int, labels)) < class_count:
        numbers = {label: (int(label),) for label in labels}
        moved = [place for place, label in enumerate(in_order) if int(label) != place]
        otherwise = in_folders and len(labels) == class_count and moved
        remark = f", not in sorted order, where '{in_order[moved[0]]}' is class {moved[0]}" if otherwise else ""
        return numbers, f"labels are indices of classes{remark}"
    if not matched and in_folders and len(labels) == class_count:
        first = f"'{printable(in_order[0], 80)}' is class 0" + (f", '{categories[0]}'" if categories else "")
        return {label: (index,) for index, label in enumerate(in_order)}, f"folders in sorted order: {first}"
    if not matched and len(columns) == class_count:
        first = f"'{printable(columns[0], 80)}' is class 0"
        return {label: (index,) for index, label in enumerate(columns)}, f"columns in order: {first}"
    wrong = max(labels, key=lambda label: (label not in matched, are_numbers and int(label) >= class_count))
    named = "none has that name" if categories else f"names are known for {len(names):,}"
    named = named if names else f"its names of classes are not known ({arg('classes')} FILE)"
    folders = f"there would have to be as many folders, not {len(labels)}" if in_folders else "labels must be folders"
    raise UsageError(
        f"The label '{printable(wrong, 80)}' is no class of the network, which has "
        f"{counted(class_count, 'class', 'classes')}: {named}, indices are 0 to {class_count - 1}, "
        f"and for sorted order {folders}.{nearest(wrong, categories) or ' Name labels by one of these.'}"
    )


@dataclass(slots=True)
class LabelCounts:
    """Pictures by label: how many, how many are right, and which classes the wrong ones are taken for.

    Attributes:
        categories: Names of the network's classes; () if they are not known.
        labels_at: The labels that stand for each class.
    """

    classes: Classes
    categories: Sequence[str]
    seen: Counter[str] = field(default_factory=Counter)
    labels_at: dict[int, list[str]] = field(init=False, default_factory=dict)
    _right: Counter[str] = field(default_factory=Counter)
    _false_positives: Counter[str] = field(default_factory=Counter)
    _taken_for: defaultdict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))

    def __post_init__(self) -> None:
        for label, indices in self.classes.items():
            for index in indices:
                self.labels_at.setdefault(index, []).append(label)

    def add(self, labels: Sequence[str], missed: Sequence[str], extra: Sequence[int]) -> None:
        """Add a picture with these labels, some of them missed, and classes that it is wrongly taken for."""
        self.seen.update(labels)
        self._right.update(label for label in labels if label not in missed)
        self._false_positives.update({label for index in extra for label in self.labels_at.get(index, ())})
        for label in missed:
            self._taken_for[label].update(extra)

    def name(self, index: int) -> str:
        """Return the name of a class of the network: its own, the label that stands for it, or its number."""
        if self.categories and index >= 0:
            return self.categories[index]
        return self.labels_at[index][0] if index in self.labels_at else "NaN" if index < 0 else f"class {index}"

    def accuracy(self, label: str) -> ClassAccuracy:
        """Return how many pictures of a label are right."""
        mistaken = [(self.name(index), count) for index, count in self._taken_for[label].most_common(1)]
        counts = self.seen[label], self._right[label], *(mistaken or [("", 0)])[0], self._false_positives[label]
        return ClassAccuracy(label, self.classes[label], *counts)


@dataclass(slots=True)
class _Counting:
    data: LabelledFiles
    counts: LabelCounts
    class_count: int
    mapping: str
    reading: Reading
    count: int = 0
    exact: int = 0
    worst: list[tuple[float, int, WrongPicture]] = field(default_factory=list)  # by confidence, then the first
    pictures: dict[tuple[int, ...], dict[str, bool]] = field(default_factory=dict)

    def add(self, records: Sequence[InputRecord], scores: Tensor) -> None:
        """Count a batch by its scores, (N, K)."""
        shares = self._shares(scores)
        broken = scores.isnan().any(1).tolist()
        if self.data.multi_label:
            predicted = [row.nonzero().flatten().tolist() for row in shares > _THRESHOLD]
        else:
            predicted = [[best] for best in scores.argmax(1).tolist()]
        for place, record in enumerate(records):
            self._add(record, [] if broken[place] else predicted[place], None if broken[place] else shares[place])

    def _shares(self, scores: Tensor) -> Tensor:
        if self.reading == "softmax":
            return class_probabilities(scores, Output("", scores), multi_label=False)[0]
        return scores.sigmoid() if self.reading == "sigmoid" else scores

    def _add(self, record: InputRecord, predicted: Sequence[int], shares: Tensor | None) -> None:
        """Count a picture by its predicted classes; `shares`, (K,), is None for scores with NaN."""
        labels = self.data.labels_of(record.name)
        classes = {label: self.counts.classes[label] for label in labels}
        wanted = sorted({index for indices in classes.values() for index in indices})
        missed = [label for label, indices in classes.items() if not set(indices).intersection(predicted)]
        extra = [index for index in predicted if index not in wanted]
        is_right = not missed and not extra and shares is not None
        part = "" if record.name in self.data.labels else record.name[record.name.rindex("[") :]
        self.pictures.setdefault((*wanted,), {})[(record.sha256 or "")[:_DIGEST_DIGITS] + part] = is_right
        self.count += 1
        self.exact += is_right
        self.counts.add(labels, missed, extra)
        if shares is None:
            self._keep(2.0, WrongPicture(record.name, record.sha256, _listed(labels), "NaN", None, None))
        elif not is_right:
            sure = max((float(shares[index]) for index in extra), default=None)
            true = min((float(shares[[*classes[label]]].max()) for label in missed), default=None)
            surety = (_THRESHOLD if sure is None else sure) - (_THRESHOLD if true is None else true)
            if shares.isnan().any():  # the softmax of Inf
                surety, sure, true = 2.0, None, None
            named = _listed([*map(self.counts.name, predicted)])
            self._keep(surety, WrongPicture(record.name, record.sha256, _listed(labels), named, sure, true))

    def _keep(self, surety: float, picture: WrongPicture) -> None:
        self.worst = nlargest(_WORST, [*self.worst, (surety, -self.count, picture)])

    def result(self) -> LabelledResult:
        classes = tuple(map(self.counts.accuracy, self.counts.seen))
        worst = tuple(picture for _, _, picture in self.worst)
        source, multi_label = self.data.source, self.data.multi_label
        value = "sigmoid" if self.reading == "sigmoid" else "score"
        mapping = self.mapping + (f"; a label is given where its {value} is above 0.5" if multi_label else "")
        counts = self.class_count, self.count, self.exact
        accuracy = Accuracy(source, mapping, *counts, classes, worst, multi_label=multi_label)
        return LabelledResult(accuracy, self.pictures)


def _listed(labels: Sequence[str]) -> str:
    return ", ".join(labels) or "no label"
