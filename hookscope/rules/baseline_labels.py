"""What a baseline keeps of labelled pictures: by class, the digests of those that were right and of the others."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hookscope.results.accuracy import LabelledResult
from hookscope.text import safe_text

# Further digits say nothing, and a digest may have "[2]" behind it for one of several inputs in a file.
_LONGEST_DIGEST = 100


@dataclass(frozen=True, slots=True)
class BaselineClass:
    """The pictures of the class of these indices, by the digests of their content, in order; `label` is for people.

    Where pictures have several labels, it is those with the same labels.
    """

    label: str
    classes: tuple[int, ...]
    right: tuple[str, ...]
    wrong: tuple[str, ...]


def labelled_of(result: LabelledResult | None) -> tuple[BaselineClass, ...]:
    """Return what a baseline keeps, in the order of the classes."""
    if result is None:
        return ()
    by_index = {index: safe_text(label.label) for label in result.accuracy.classes for index in label.indices}
    return tuple(
        BaselineClass(_label(by_index, indices), indices, _sorted(pictures, True), _sorted(pictures, False))
        for indices, pictures in sorted(result.pictures.items())
    )


def _label(by_index: Mapping[int, str], indices: Sequence[int]) -> str:
    return ", ".join(dict.fromkeys(by_index[index] for index in indices)) or "no label"


def _sorted(pictures: Mapping[str, bool], right: bool) -> tuple[str, ...]:
    return tuple(sorted(digest for digest, is_right in pictures.items() if is_right is right))


def labelled_document(classes: Sequence[BaselineClass], *, multi_label: bool) -> dict[str, Any]:
    """Return it as it stands at the top of the file; empty if there were no labelled pictures."""
    several = {"multi_label": True} if multi_label else {}
    return several | {"labelled": [asdict(label) for label in classes]} if classes else {}


def labelled_from(document: Mapping[str, Any]) -> tuple[BaselineClass, ...]:
    """Read what `labelled_document` made; raise a ValueError with what is wrong."""
    held = document.get("labelled", [])
    if not isinstance(held, list):
        raise ValueError("'labelled' is not a list")  # noqa: TRY004 (a fault of the file, as all the others)
    return tuple(_class(record, f"class {number} of 'labelled'") for number, record in enumerate(held, 1))


def _class(record: Any, place: str) -> BaselineClass:
    if not isinstance(record, dict) or record.keys() != {"label", "classes", "right", "wrong"}:
        raise ValueError(f"{place} is not an object of 'label', 'classes', 'right' and 'wrong'")
    label, classes, *digests = (record[key] for key in ("label", "classes", "right", "wrong"))
    is_count = isinstance(classes, list) and all(type(index) is int and index >= 0 for index in classes)
    if not isinstance(label, str) or not is_count:
        raise ValueError(f"{place} has no text as 'label', or no indices as 'classes'")
    for shas in digests:
        if not isinstance(shas, list) or not all(isinstance(sha, str) and len(sha) < _LONGEST_DIGEST for sha in shas):
            raise ValueError(f"'right' or 'wrong' of {place} is not a list of digests")
    return BaselineClass(label, tuple(classes), *map(tuple, digests))
