"""Labels of rows, and how a row is found by its label."""

from collections.abc import Iterable
from typing import Protocol, TypeVar

from hookscope.errors import LayerNotFoundError, nearest


def row_label(layer: str, call: int, slot: str) -> str:
    """Return the name of a layer's output for people and files: "layer1.0.relu#1", "backbone['out']", "(model)"."""
    return f"{layer or '(model)'}{f'#{call}' if call else ''}{slot}"


class _Labelled(Protocol):
    @property
    def label(self) -> str: ...

    @property
    def also(self) -> tuple[str, ...]: ...


Row = TypeVar("Row", bound=_Labelled)


def row_of(label: str, rows: Iterable[Row]) -> Row:
    """Return the row with a label, or the one that it was folded into.

    Raises:
        LayerNotFoundError: If there is none; with the nearest labels.
    """
    known: dict[str, Row] = {}
    for row in rows:
        for name in (row.label, *row.also):
            known.setdefault(name, row)
    if label not in known:
        raise LayerNotFoundError(f"No row is called {label!r}.{nearest(label, known)}")
    return known[label]
