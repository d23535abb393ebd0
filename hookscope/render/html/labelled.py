"""The section of a page about labelled pictures: how many are right, the lowest classes, the wrong pictures."""

from collections.abc import Sequence
from typing import NamedTuple

from hookscope.results.accuracy import Accuracy, ClassAccuracy, WrongPicture, accuracy_words
from hookscope.results.binomial import Interval, interval
from hookscope.text import counted

# Classes that are listed, the lowest first. Our choice: what a screen has room for.
_MOST_CLASSES = 20


class ShownClass(NamedTuple):
    """A class and where its share lies with 95 % confidence, by itself."""

    accuracy: ClassAccuracy
    interval: Interval


class LabelledSection(NamedTuple):
    """What a page shows of an accuracy."""

    words: str
    classes: list[ShownClass]
    worst: Sequence[WrongPicture]  # in words: the overview has their pictures


def labelled_section(accuracy: Accuracy) -> LabelledSection:
    """Return what a page shows of labelled pictures."""
    lowest = accuracy.by_share[:_MOST_CLASSES]
    left = len(accuracy.classes) - len(lowest)
    rest = f" Of {counted(len(accuracy.classes), 'label')} the lowest are listed." if left else ""
    classes = [ShownClass(each, interval(each.right, each.count)) for each in lowest]
    return LabelledSection(f"{accuracy_words(accuracy)}.{rest}", classes, accuracy.worst)
