"""How results print, convert, save and show themselves.

The package's `__init__` lists the function for each form. Functions are imported when first needed, so that results
depend on no output library.
"""

import random
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, TypeVar

from hookscope.errors import LayerNotFoundError, nearest
from hookscope.parameters import words_for_python
from hookscope.text import some_of, strict_json

RENDERERS: dict[str, str] = {}
"""The "module:function" that makes each form: "text", "html", "dict", "frame", "picture", "save"."""

Entry_co = TypeVar("Entry_co", covariant=True)


def rendered(result: object, form: str, *args: Any, **options: Any) -> Any:
    """Return a result in one of the forms in `RENDERERS`; its words are those for a caller in Python.

    Python's random state is restored, because some libraries draw a random number when they are imported.
    """
    module, _, function = RENDERERS[form].partition(":")
    state = random.getstate()
    try:
        with words_for_python():
            return getattr(import_module(module), function)(result, *args, **options)
    finally:
        random.setstate(state)


class RenderedResult:
    """A result that prints as the command line's table and converts to forms for other tools."""

    __slots__ = ()

    def __str__(self) -> str:
        return str(rendered(self, "text"))

    def _repr_html_(self) -> str:
        return str(rendered(self, "html"))

    def to_dict(self) -> dict[str, Any]:
        """Return everything but pictures and tensors as dicts, lists, text and numbers, as `--json` prints it."""
        return dict(rendered(self, "dict"))

    def to_json(self) -> str:
        """Return `to_dict` as strict JSON, a row a line."""
        return strict_json(self.to_dict())

    def to_pandas(self, *, full: bool = False) -> Any:
        """Return the rows as a `pandas.DataFrame`, with labels as the index and exact names.

        Args:
            full: All columns of the CSV file, instead of the 20 that matter most.

        Raises:
            UsageError: If pandas is not installed.
        """
        return rendered(self, "frame", full=full)


class RowContainer(RenderedResult, Generic[Entry_co]):
    """A result that holds rows: `len(run)`, `for row in run`, `"layer1.0.conv1" in run`."""

    __slots__ = ()

    _noun = "row"

    def _items(self) -> Sequence[Any]:
        rows: Sequence[Any] = self.rows  # type: ignore[attr-defined]  # a field of the subclasses
        return rows

    def by_label(self) -> dict[str, Entry_co]:
        """Return the rows by label, and by labels of rows that repeat them; of equal labels, the first row wins."""
        return {label: row for row in reversed(self._items()) for label in (row.label, *getattr(row, "duplicates", ()))}

    def __getitem__(self, label: str) -> Entry_co:
        """Return the entry with a label: "layer1.0.conv1", "relu#1".

        Raises:
            LayerNotFoundError: If there is none; with the nearest labels.
        """
        rows = self.by_label()
        if not isinstance(label, str) or label not in rows:
            hint = nearest(label, rows) or (f" Known: {some_of([*map(repr, reversed(rows))], 3)}." if rows else "")
            raise LayerNotFoundError(f"No {self._noun} is called {label!r}.{hint}")
        return rows[label]

    def _ipython_key_completions_(self) -> list[str]:
        return [label for label in reversed(self.by_label()) if label]

    def __len__(self) -> int:
        return len(self._items())

    def __bool__(self) -> bool:
        return True  # even without rows: it may hold a failure

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items())

    def __contains__(self, label: object) -> bool:
        return isinstance(label, str) and label in self.by_label()


class RunResult(RowContainer[Entry_co]):
    """A result that its command writes as a run directory."""

    __slots__ = ()

    def show(self) -> None:
        """Show the picture of the run: in a notebook below the cell, elsewhere in the system's viewer."""
        picture = rendered(self, "picture")
        ipython = sys.modules.get("IPython")
        if ipython is not None and ipython.get_ipython() is not None:
            ipython.display.display(picture)
        else:
            picture.show()

    def save(self, path: str | Path) -> Path:
        """Write the run directory of the command.

        Args:
            path: A new folder, an empty folder, or an earlier run, which is replaced.

        Raises:
            UsageError: If the run did not finish, or was read from a folder.
            OutputError: If something cannot be written.
        """
        return Path(rendered(self, "save", path).folder)
