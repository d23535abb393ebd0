"""How many labelled pictures a network classifies right, in all and by class, as frozen dataclasses; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from hookscope.results.binomial import Interval, interval
from hookscope.text import counted, printable


@dataclass(frozen=True, slots=True)
class ClassAccuracy:
    """The pictures of one label.

    Attributes:
        label: As the data has it: a folder's name, or the second column.
        indices: Of the network's classes that it stands for; two for a name that two classes have.
        count: Pictures with this label.
        right: Those of them whose greatest score is that of one of the `indices`.
        mistaken_for: The class that most of the others are taken for; "" for none.
        mistaken_count: How many are taken for that.
    """

    label: str
    indices: tuple[int, ...]
    count: int
    right: int
    mistaken_for: str = ""
    mistaken_count: int = 0

    @property
    def share(self) -> float:
        """Share of the pictures that are classified right, 0-1."""
        return self.right / self.count


@dataclass(frozen=True, slots=True)
class WrongPicture:
    """A labelled picture that is taken for another class.

    Probabilities are the softmax of the scores, or the scores themselves where they are probabilities already; None if
    a score is NaN.
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
        classes: One for each label, in natural order.
        worst: The wrong pictures with the highest confidence, in descending order.
    """

    source: str
    mapping: str
    class_count: int
    classes: tuple[ClassAccuracy, ...]
    worst: tuple[WrongPicture, ...] = ()

    @property
    def count(self) -> int:
        """All labelled pictures."""
        return sum(each.count for each in self.classes)

    @property
    def right(self) -> int:
        """Those whose greatest score is that of their label."""
        return sum(each.right for each in self.classes)

    @property
    def share(self) -> float:
        """The accuracy, 0-1."""
        return self.right / self.count

    @property
    def interval(self) -> Interval:
        """Where the accuracy on more such pictures lies with 95 % confidence."""
        return interval(self.right, self.count)

    @property
    def by_share(self) -> tuple[ClassAccuracy, ...]:
        """The classes with the lowest share first, and of equal ones those with the most pictures."""
        return tuple(sorted(self.classes, key=lambda each: (each.share, -each.count)))


@dataclass(frozen=True, slots=True)
class LabelledResult:
    """An accuracy, and which pictures are right: by the indices of the label, then by the digest of the content."""

    accuracy: Accuracy
    pictures: Mapping[tuple[int, ...], Mapping[str, bool]]


def accuracy_words(accuracy: Accuracy) -> str:
    """Return "43 of 50 labelled pictures are classified right, 86.0% (95% interval 73.3% to 94.2%)"."""
    low, high = accuracy.interval
    return (
        f"{accuracy.right:,} of {counted(accuracy.count, 'labelled picture')} are classified right, "
        f"{accuracy.share:.1%} (95% interval {low:.1%} to {high:.1%})"
    )


def class_words(each: ClassAccuracy) -> str:
    """Return "'lynx' 3 of 10 (5 taken for 'tabby')"."""
    mistaken = (
        f" ({each.mistaken_count:,} taken for '{printable(each.mistaken_for, 80)}')" if each.mistaken_count else ""
    )
    return f"'{printable(each.label, 80)}' {each.right:,} of {each.count:,}{mistaken}"


def lowest_words(accuracy: Accuracy) -> str:
    """Return the class with the lowest share in a sentence, "" if all are right or there is but one."""
    lowest = accuracy.by_share[0]
    return f" Lowest: {class_words(lowest)}." if len(accuracy.classes) > 1 and lowest.right < lowest.count else ""


def mapping_words(accuracy: Accuracy) -> str:
    """Return "val: 500 labelled pictures with 10 labels; labels are names of classes."."""
    pictures, labels = counted(accuracy.count, "labelled picture"), counted(len(accuracy.classes), "label")
    return f"{printable(accuracy.source)}: {pictures} with {labels}; {accuracy.mapping}."
