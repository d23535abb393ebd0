"""The entries of a configuration file, and the lines of mistakes, which tomllib does not report."""

import re
import tomllib
from bisect import bisect_left
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hookscope.errors import UsageError
from hookscope.text import printable

KeyPath = tuple[str | int, ...]
"""Keys, and positions in lists and in arrays of tables, from the top down: ("layers", 1, "pattern")."""

# In a valid file a line end outside of strings and brackets ends a statement; comments may hold unmatched quotes.
_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}'  # up to two of the closing quotes belong to the string
    r"|'''.*?'{3,5}"
    r'|"(?:\\.|[^"\\])*"'
    r"|'[^']*'"
    r"|\#[^\n]*|[\[\]{}]|\n",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A table or value in a file, with its path there; and the file's name for people, its folder and its text."""

    name: str
    folder: Path
    text: str
    path: KeyPath
    value: Any

    def at(self, key: str | int) -> "Entry":
        """Return the entry below an existing key."""
        return replace(self, path=(*self.path, key), value=self.value[key])

    def wrong(self, problem: str) -> UsageError:
        """Return the error that names file and line and states the problem."""
        return UsageError(f"{printable(self.name)}, line {line_of(self.text, self.path)}: {problem}")

    def unfit(self, problem: str) -> UsageError:
        """Return the error for this value: a sentence of its name and the problem, "must be above 0."."""
        is_row = isinstance(self.value, dict) and isinstance(self.path[-1], int)
        return self.wrong(f"{inside(self.path).removeprefix('in ') if is_row else _called(self.path)} {problem}")


def key_of(name: str) -> str:
    """Return a setting's or limit's name as configurations write it: "max-fraction" for "max_fraction"."""
    return name.replace("_", "-")


def line_of(text: str, path: KeyPath) -> int:
    """Return the line, from 1, of the statement that first defines the entry at `path`, in valid TOML with this entry.

    For a table it is the line of the header, or of whatever creates it.
    """
    ends, depth = [], 0  # ends of statements, comments and empty lines: the text before an end is valid TOML
    for token in _TOKEN.finditer(text):
        depth += (token[0] in "[{") - (token[0] in "]}")
        if token[0] == "\n" and not depth:
            ends.append(token.end())
    ends.append(len(text))
    first = bisect_left(ends, True, key=lambda end: _holds(tomllib.loads(text[:end]), path))
    return text.count("\n", 0, ends[first - 1] if first else 0) + 1


def _holds(tree: Any, path: KeyPath) -> bool:
    try:
        for step in path:
            tree = tree[step]
    except (KeyError, IndexError, TypeError):
        return False
    return True


def _called(path: KeyPath) -> str:
    *above, key = path
    if isinstance(key, int):
        return f"item {key + 1} of {_called(tuple(above))}"
    return f"{printable(key)} {inside(tuple(above))}"


def inside(path: KeyPath) -> str:
    """Return where a path leads, as errors name it: "in [rules]", "in [[expect]]", "at the top level"."""
    dotted = ".".join(printable(step) for step in path if isinstance(step, str))
    if not dotted:
        return "at the top level"
    return f"in [[{dotted}]]" if isinstance(path[-1], int) else f"in [{dotted}]"


def shown_value(value: Any) -> str:
    """Return a value as errors show it."""
    if isinstance(value, str):
        return f"'{printable(value, 60)}'"
    if isinstance(value, int | float):
        is_huge = isinstance(value, int) and abs(value) >= 2**64  # Python refuses to print thousands of digits
        return "a huge one" if is_huge else repr(value).lower()
    return {"dict": "a table", "list": "a list"}.get(type(value).__name__, "a date or time")
