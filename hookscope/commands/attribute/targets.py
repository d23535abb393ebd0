"""Parse `--target`: classes, one class against another, boxes, or the number that a function returns."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hookscope.errors import UsageError
from hookscope.inspection.losses.targets import class_index, required_class, split_at_commas
from hookscope.models.user_code import load_function
from hookscope.parameters import arg
from hookscope.text import safe_text

_BOX = re.compile(r"\s*box\s*:\s*(?P<number>\d{1,6})\s*", re.IGNORECASE)
_FUNCTION = re.compile(r"(?P<file>.+\.py):(?P<name>[^:,]+)")


@dataclass(frozen=True, slots=True)
class Wanted:
    """One target: a class, maybe `against` another; a box, by its place in the network's list; or a function.

    Attributes:
        text: As the user wrote it; a function without the folder of its file.
        function: Takes what the network returned, returns one number per input.
    """

    text: str
    index: int | None = None
    against: int | None = None
    box: int | None = None
    function: Callable[..., Any] | None = None


def read_targets(texts: Sequence[str], categories: Sequence[str]) -> tuple[Wanted, ...]:
    """Read what `--target` gives: "cat,dog", "281", "tabby-tiger cat", "box:0", "net.py:function".

    Names of classes may hold commas and hyphens: the longest name that there is counts. A target given twice is
    explained once.

    Raises:
        UsageError: If a text names no class, with the nearest names, or several.
        InputError, ModelError, ModelNotFoundError: If a function cannot be loaded.
    """
    wanted: dict[tuple[object, ...], Wanted] = {}
    for text in texts:
        function = _FUNCTION.fullmatch(text.strip())
        is_whole = function is not None and Path(function["file"]).is_file()
        for part in [text] if is_whole else split_at_commas(text, categories):
            target = _wanted(part.strip(), categories)
            # A function is loaded anew each time.
            key = (part.strip(),) if target.function else (target.index, target.against, target.box)
            wanted.setdefault(key, target)
    return tuple(wanted.values())


def _wanted(text: str, categories: Sequence[str]) -> Wanted:
    if match := _FUNCTION.fullmatch(text):
        path = Path(match["file"])
        return Wanted(f"{path.name}:{match['name']}", function=load_function(path, match["name"]))
    if match := _BOX.fullmatch(text):
        return Wanted(text, box=int(match["number"]))
    index = class_index(text, categories)
    if index is None and (pair := _contrast(text, categories)):
        if pair[0] == pair[1]:
            raise UsageError(
                f"{arg('target')} '{safe_text(text)}' compares a class with itself: give two different classes."
            )
        return Wanted(text, *pair)
    return Wanted(text, required_class(text, categories) if index is None else index)


def _contrast(text: str, categories: Sequence[str]) -> tuple[int, int] | None:
    """Split at the first hyphen with a class on either side; None if there is none."""
    for hyphen in re.finditer("-", text):
        pair = [class_index(part, categories) for part in (text[: hyphen.start()], text[hyphen.end() :])]
        if pair[0] is not None and pair[1] is not None:
            return pair[0], pair[1]
    return None
