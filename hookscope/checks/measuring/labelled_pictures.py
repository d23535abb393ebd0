"""Run a network over labelled pictures without hooks, a batch at a time, and count which are classified right."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappush, heappushpop
from typing import NamedTuple

import torch
from torch import Tensor

from hookscope.checks.measuring.outputs import class_scores, returned_tensors
from hookscope.checks.measuring.preparing import Prepared
from hookscope.checks.settings import CheckSettings
from hookscope.errors import ModelError, UsageError, nearest
from hookscope.inputs import Batch, LabelledFiles
from hookscope.inspection.failures import failure_message, locate, reraise_internal
from hookscope.inspection.losses import Output, is_softmax
from hookscope.inspection.network import InspectedNetwork
from hookscope.inspection.state.preservation import preserved
from hookscope.results.accuracy import Accuracy, ClassAccuracy, LabelledResult, WrongPicture
from hookscope.results.inputs import InputRecord
from hookscope.text import printable

# Wrong pictures that are kept with their details. As many as a reader looks through.
_WORST = 8

# Of a SHA-256, enough that among a million pictures two are alike once in ten million times.
_DIGEST_DIGITS = 16

Classes = Mapping[str, tuple[int, ...]]
"""The indices of the network's classes that each label stands for."""


def measure_labelled(prepared: Prepared, settings: CheckSettings, subject: InspectedNetwork) -> LabelledResult | None:
    """Classify the labelled pictures; None if there are none.

    What is kept of each is a digest and whether it is right. A picture is right if its greatest score is that of its
    label, the first of equal ones; one with NaN among its scores is wrong.

    Raises:
        ImageError: If a picture cannot be read.
        ModelError: If the network raises on one.
        UsageError: If the network returns no class scores, or a label is not one of its classes.
    """
    data = prepared.data
    if data is None:
        return None
    counting: _Counting | None = None
    with preserved(subject.network, settings.seed, modules=subject.modules.values()), torch.no_grad():
        for batch in prepared.data_batches():
            scores = class_scores(_run(subject, batch), len(batch.indices), settings.output_key)
            if isinstance(scores, str):
                raise UsageError(f"--data {printable(data.source)} cannot be judged. {scores}")
            if scores.shape[1] < 2:
                raise UsageError(
                    f"--data {printable(data.source)} cannot be judged: the network has one score per input."
                )
            if counting is None:
                counting = _counting(data, subject.info.categories, scores.shape[1])
            counting.add(batch.records, (scores.float() if scores.itemsize < 4 else scores).cpu())
    return counting.result() if counting else None


def _run(subject: InspectedNetwork, batch: Batch) -> Mapping[str, Tensor]:
    try:
        output = subject.network(*batch.args, **batch.kwargs)
    except (Exception, SystemExit) as raised:
        error = reraise_internal(raised)
        name = f"{subject.info.name}, given '{printable(batch.records[0].name)}' and what follows,"
        raise ModelError(failure_message(name, locate(subject.modules, error), error)) from raised
    return returned_tensors(output)


def _counting(data: LabelledFiles, categories: Sequence[str], class_count: int) -> "_Counting":
    categories = categories if len(categories) == class_count else ()
    labels = [*dict.fromkeys(data.labels.values())]
    classes, mapping = classes_of(labels, categories, class_count, in_folders=data.in_folders)
    return _Counting(data, categories, class_count, classes, mapping)


def classes_of(
    labels: Sequence[str], categories: Sequence[str], class_count: int, *, in_folders: bool
) -> tuple[Classes, str]:
    """Return the classes that labels stand for, and how that is known, in a sentence.

    Labels are names of classes, whatever their case, with "_" for a space; else all of them are indices; else, as many
    folders as there are classes are taken in sorted order, which is what torchvision's ImageFolder numbers them by.
    Raises UsageError for a label that is no class.
    """
    by_name: dict[str, tuple[int, ...]] = {}
    for index, name in enumerate(categories):
        by_name[_folded(name)] = (*by_name.get(_folded(name), ()), index)
    known = {label: by_name[_folded(label)] for label in labels if _folded(label) in by_name}
    if len(known) == len(labels):
        return known, "labels are names of classes"
    are_numbers = all(label.isascii() and label.isdecimal() and len(label) < 10 for label in labels)
    in_order = sorted(labels)
    if not known and are_numbers and max(map(int, labels)) < class_count:
        numbers = {label: (int(label),) for label in labels}
        otherwise = in_folders and len(labels) == class_count and [*map(int, in_order)] != [*range(class_count)]
        remark = f", not in sorted order, where '{in_order[2]}' is class 2" if otherwise else ""
        return numbers, f"labels are indices of classes{remark}"
    if not known and in_folders and len(labels) == class_count:
        first = f"'{printable(in_order[0], 80)}' is class 0" + (f", '{categories[0]}'" if categories else "")
        return {label: (index,) for index, label in enumerate(in_order)}, f"folders in sorted order: {first}"
    wrong = next(label for label in labels if label not in known)
    names = "its names of classes are not known (--classes FILE)" if not categories else "none has that name"
    hint = (nearest(wrong, categories) if categories else "") or " Name labels by one of these."
    raise UsageError(
        f"The label '{printable(wrong, 80)}' is no class of the network, which has"
        f" {class_count:,} classes: {names}, indices are 0 to {class_count - 1}, and"
        f" for sorted order there would have to be as many folders, not {len(labels)}.{hint}"
    )


def _folded(name: str) -> str:
    return " ".join(name.replace("_", " ").casefold().split())


class _Wrong(NamedTuple):
    """A wrong picture and the network's confidence; of equal confidences the first picture is the greater."""

    surety: float
    order: int
    picture: WrongPicture


@dataclass(slots=True)
class _Counting:
    data: LabelledFiles
    categories: Sequence[str]
    class_count: int
    classes: Classes
    mapping: str
    seen: Counter[str] = field(default_factory=Counter)
    right: Counter[str] = field(default_factory=Counter)
    taken_for: defaultdict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    worst: list[_Wrong] = field(default_factory=list)
    pictures: dict[tuple[int, ...], dict[str, bool]] = field(default_factory=dict)

    def add(self, records: Sequence[InputRecord], scores: Tensor) -> None:
        """Count a batch by its scores, (N, K)."""
        shares = scores if is_softmax(scores, Output("", scores)) else scores.softmax(1)
        broken = scores.isnan().any(1).tolist()
        for place, (record, best) in enumerate(zip(records, scores.argmax(1).tolist(), strict=True)):
            label = self.data.label_of(record.name)
            indices = self.classes[label]
            is_right = best in indices and not broken[place]
            part = "" if record.name in self.data.labels else record.name[record.name.rindex("[") :]
            digest = (record.sha256 or "")[:_DIGEST_DIGITS] + part
            self.pictures.setdefault(indices, {})[digest] = is_right
            self.seen[label] += 1
            self.right[label] += is_right
            named = self._name(best)
            sure, true = float(shares[place, best]), float(shares[place, [*indices]].max())
            if broken[place]:
                self._keep(2.0, WrongPicture(record.name, record.sha256, label, "NaN", None, None))
            elif not is_right:
                self.taken_for[label][best] += 1
                self._keep(sure - true, WrongPicture(record.name, record.sha256, label, named, sure, true))

    def _keep(self, surety: float, picture: WrongPicture) -> None:
        wrong = _Wrong(surety, -self.seen.total(), picture)
        if len(self.worst) < _WORST:
            heappush(self.worst, wrong)
        else:
            heappushpop(self.worst, wrong)

    def _name(self, index: int) -> str:
        if self.categories:
            return self.categories[index]
        return next((label for label, indices in self.classes.items() if index in indices), f"class {index}")

    def result(self) -> LabelledResult:
        classes = tuple(self._class(label) for label in self.seen)
        worst = tuple(each.picture for each in sorted(self.worst, reverse=True))
        accuracy = Accuracy(self.data.source, self.mapping, self.class_count, classes, worst)
        return LabelledResult(accuracy, self.pictures)

    def _class(self, label: str) -> ClassAccuracy:
        mistaken = self.taken_for[label].most_common(1)
        named = (self._name(mistaken[0][0]), mistaken[0][1]) if mistaken else ("", 0)
        return ClassAccuracy(label, self.classes[label], self.seen[label], self.right[label], *named)
