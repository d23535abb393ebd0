"""The section of a page about labelled pictures: how many are right, the lowest classes, the worst pictures."""

import base64
import io
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from hookscope.errors import InputError
from hookscope.results.accuracy import Accuracy, ClassAccuracy, WrongPicture, accuracy_words
from hookscope.results.binomial import Interval, interval
from hookscope.results.runs.reading import read_inside
from hookscope.text import counted

# Classes that are listed, the lowest first. Our choice: what a screen has room for.
_MOST_CLASSES = 20


class ShownClass(NamedTuple):
    """A class and where its share lies with 95 % confidence, by itself."""

    accuracy: ClassAccuracy
    interval: Interval


class ShownPicture(NamedTuple):
    """A wrong picture, as what the network got; "" without one."""

    wrong: WrongPicture
    uri: str


class LabelledSection(NamedTuple):
    """What a page shows of an accuracy."""

    words: str
    classes: list[ShownClass]
    pictures: list[ShownPicture]
    byte_count: int  # of the files of pictures together


def labelled_section(accuracy: Accuracy, evidence: str, room: int) -> LabelledSection:
    """Return what a page shows of labelled pictures; files in the folder of the evidence up to `room` bytes."""
    lowest = accuracy.by_share[:_MOST_CLASSES]
    left = len(accuracy.classes) - len(lowest)
    rest = f" Of {counted(len(accuracy.classes), 'label')} the lowest are listed." if left else ""
    shown: list[ShownPicture] = []
    taken = 0
    for index, wrong in enumerate(accuracy.worst):
        png = _png(Path(evidence), index, room - taken) if evidence else b""
        taken += len(png)
        encoded = base64.b64encode(png).decode("ascii")
        shown.append(ShownPicture(wrong, f"data:image/png;base64,{encoded}" if png else ""))
    classes = [ShownClass(each, interval(each.right, each.count)) for each in lowest]
    return LabelledSection(f"{accuracy_words(accuracy)}.{rest}", classes, shown, taken)


def _png(folder: Path, index: int, room: int) -> bytes:
    """Return the file of a wrong picture; nothing if it is not there, is damaged, or does not fit."""
    try:
        png = b"" if folder.is_symlink() else read_inside(folder, f"pictures/{index}.png", room)
        if png:
            with Image.open(io.BytesIO(png), formats=["PNG"]) as file:
                file.verify()
    except (InputError, OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return b""
    return png
