"""On which line of a TOML file a key stands; tomllib does not say."""

import re
import tomllib
from bisect import bisect_left
from typing import Any

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


def line_of(text: str, path: KeyPath) -> int:
    """Return the number of the line on which the statement begins that first defines what is at `path`.

    Args:
        text: Valid TOML.
        path: What is looked for.

    Returns:
        Counted from 1. For a table it is its header, or whatever else creates it.

    Raises:
        KeyError: If there is nothing at `path`.
    """
    ends = _statement_ends(text)
    first = bisect_left(ends, True, key=lambda end: _holds(tomllib.loads(text[:end]), path))
    if first == len(ends):
        raise KeyError(path)
    return text.count("\n", 0, ends[first - 1] if first else 0) + 1


def _statement_ends(text: str) -> list[int]:
    """Return where each header, assignment, comment and empty line ends; what is before an end is valid TOML."""
    ends, depth = [], 0
    for token in _TOKEN.finditer(text):
        if token[0] in "[{":
            depth += 1
        elif token[0] in "]}":
            depth -= 1
        elif token[0] == "\n" and not depth:
            ends.append(token.end())
    return [*ends, len(text)]


def _holds(tree: Any, path: KeyPath) -> bool:
    for step in path:
        if isinstance(tree, dict):
            if step not in tree:
                return False
        elif not (isinstance(tree, list) and isinstance(step, int) and step < len(tree)):
            return False
        tree = tree[step]
    return True
