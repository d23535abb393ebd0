"""How many labelled pictures a network classifies right, in total and by class, as frozen dataclasses; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from hookscope.parameters import arg
from hookscope.results.binomial import Interval, interval
from hookscope.results.json_form import in_json
from hookscope.text import are, counted, percent_text, printable, some_of

# A message names at most this many exchanged labels.
_SHOWN = 3
# A label with fewer pictures is not examined for an exchange. Ours.
_FEWEST_TO_COMPARE = 5


@dataclass(frozen=True, slots=True)
class ClassAccuracy:
    """The pictures of one label.

    Attributes:
        label: As the data has it: a folder's name, or the second column.
        indices: The network's classes that the label stands for; two if two classes have this name.
        count: Pictures with this label.
        right: Pictures whose highest score is at one of the `indices`; with several labels for each picture, pictures
            with a score above 0.5 at one of the `indices`.
        mistaken_for: The class that most of the wrong pictures are taken for; "" for none.
        mistaken_count: Pictures that are taken for `mistaken_for`.
        false_positives: Pictures without this label for which the network gives it.
    """

    label: str
    indices: tuple[int, ...]
    count: int
    right: int
    mistaken_for: str = ""
    mistaken_count: int = 0
    false_positives: int = 0

    @property
    def share(self) -> float:
        """Share of the pictures that are classified right, 0-1: the recall."""
        return self.right / self.count

    @property
    def f1(self) -> float:
        """The harmonic mean of precision and recall, 0-1: 2 TP / (2 TP + FP + FN)."""
        return 2 * self.right / (self.count + self.right + self.false_positives)


@dataclass(frozen=True, slots=True)
class WrongPicture:
    """A labelled picture that is taken for another class.

    With several labels for each picture, `label` lists its labels, and `taken_for` the classes that the network gives
    it. `probability` is then the highest of a wrongly given class, and `label_probability` the lowest of a missed
    label; None if there is no such class.

    Attributes:
        taken_for: Name or number of the class with the greatest score; "NaN" for scores with NaN.
        probability: Of the class in `taken_for`: the softmax of the scores, or the score itself if scores are
            probabilities; None for scores with NaN or Inf.
        label_probability: Of the label's class.
    """

    name: str
    sha256: str | None
    label: str
    taken_for: str
    probability: float | None
    label_probability: float | None


@dataclass(frozen=True, slots=True)
class Accuracy:
    """A network's accuracy on labelled pictures.

    Attributes:
        source: The folder or CSV file.
        mapping: How labels became classes of the network, in a sentence.
        class_count: Classes of the network.
        count: Labelled pictures.
        right: Pictures whose highest score is at their label; with several labels for each picture, pictures that are
            given exactly their labels.
        classes: One for each label that a picture has, in the order of the data.
        worst: The wrong pictures with the highest confidence, in descending order.
        multi_label: Whether a picture may have several labels, and each class above 0.5 is given.
    """

    source: str
    mapping: str
    class_count: int
    count: int
    right: int
    classes: tuple[ClassAccuracy, ...]
    worst: tuple[WrongPicture, ...] = ()
    multi_label: bool = False

    @property
    @in_json
    def share(self) -> float:
        """The accuracy, 0-1; with several labels for each picture the exact match ratio."""
        return self.right / self.count

    @property
    @in_json
    def interval(self) -> Interval:
        """Where the accuracy on more such pictures lies with 95% confidence."""
        return interval(self.right, self.count)

    @property
    def by_share(self) -> tuple[ClassAccuracy, ...]:
        """The classes, the lowest share first; among equal shares, the most pictures first.

        With several labels for each picture F1 replaces the share: a label that is always given has a share of 1.
        """
        return tuple(sorted(self.classes, key=lambda row: (row.f1 if self.multi_label else row.share, -row.count)))

    @property
    @in_json
    def macro_f1(self) -> float | None:
        """The mean F1 of the labels that pictures have, 0-1; None where a picture has one label."""
        return sum(label.f1 for label in self.classes) / len(self.classes) if self.multi_label else None


@dataclass(frozen=True, slots=True)
class LabelledResult:
    """An accuracy, and whether each picture is right, by its label's class indices, then by its content's digest."""

    accuracy: Accuracy
    pictures: Mapping[tuple[int, ...], Mapping[str, bool]]


def accuracy_words(accuracy: Accuracy) -> str:
    """Return how many pictures are right, and the interval for others in words.

    "43 of 50 labelled pictures (86.0%) are classified right, and of all such pictures 73.3% to 94.2% (95% confidence)".
    With several labels for each picture it is "… are given exactly their labels, and of all such pictures …, macro F1
    0.912".
    """
    how = "given exactly their labels" if accuracy.multi_label else "classified right"
    macro = "" if accuracy.macro_f1 is None else f", macro F1 {accuracy.macro_f1:.3f}"
    right = f"{accuracy.right:,} of {counted(accuracy.count, 'labelled picture')} ({percent_text(accuracy.share)})"
    of_all = f"of all such pictures {accuracy.interval} (95% confidence)"
    return f"{right} {are(accuracy.right)} {how}, and {of_all}{macro}"


def class_words(entry: ClassAccuracy, *, multi_label: bool) -> str:
    """Return "'lynx' 3 of 10 (5 taken for 'tabby')", or "'lynx' 3 of 10, F1 0.400 (5 given 'tabby' instead)"."""
    mistaken = printable(entry.mistaken_for, 80)
    how = f"given '{mistaken}' instead" if multi_label else f"taken for '{mistaken}'"
    f1 = f", F1 {entry.f1:.3f}" if multi_label else ""
    often = f" ({entry.mistaken_count:,} {how})" if entry.mistaken_count else ""
    return f"'{printable(entry.label, 80)}' {entry.right:,} of {entry.count:,}{f1}{often}"


def lowest_words(accuracy: Accuracy) -> str:
    """Return a sentence about the class with the lowest share or F1; "" if all are right or there is only one class.

    If labels are mostly taken for one another, a second sentence asks whether the class list is in the right order.
    """
    lowest = accuracy.by_share[0]
    if len(accuracy.classes) < 2 or (lowest.f1 if accuracy.multi_label else lowest.share) == 1:
        return ""
    exchanged = [f"'{printable(label, 80)}' for '{printable(other, 80)}'" for label, other in _exchanged(accuracy)]
    confused = f"{counted(len(exchanged), 'label')} are mostly taken for one another ({some_of(exchanged, _SHOWN)})"
    question = (
        f" {confused}: are the classes in the order of the labels? {arg('classes')} names them." if exchanged else ""
    )
    return f" Lowest: {class_words(lowest, multi_label=accuracy.multi_label)}.{question}"


def folded(name: str) -> str:
    """Return a name in the form in which labels and classes are compared: "tiger cat" for "Tiger_Cat"."""
    return " ".join(name.replace("_", " ").casefold().split())


def _exchanged(accuracy: Accuracy) -> list[tuple[str, str]]:
    """Return labels that are permuted: each with the label that most of its pictures are taken for."""
    labels = {folded(entry.label): entry.label for entry in accuracy.classes}
    taken = {
        entry.label: labels.get(folded(entry.mistaken_for), "")
        for entry in accuracy.classes
        if not accuracy.multi_label and entry.count >= _FEWEST_TO_COMPARE and 2 * entry.mistaken_count > entry.count
    }
    while {*taken} != {*taken.values()}:
        taken = {label: other for label, other in taken.items() if label in taken.values() and other in taken}
    return [*taken.items()]


def mapping_words(accuracy: Accuracy) -> str:
    """Return "val: 500 labelled pictures with 10 labels; labels are names of classes."."""
    pictures, labels = counted(accuracy.count, "labelled picture"), counted(len(accuracy.classes), "label")
    return f"{printable(accuracy.source)}: {pictures} with {labels}; {accuracy.mapping}."
