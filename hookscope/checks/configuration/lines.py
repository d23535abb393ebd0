"""On which line of a TOML file a key stands; tomllib does not say."""

import re
import tomllib
from collections.abc import Iterator, Mapping
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
    table: KeyPath = ()
    last_index: dict[KeyPath, int] = {}
    for line, statement in _statements(text):
        tree = tomllib.loads(statement)
        if statement.lstrip().startswith("["):
            table = _opened(tree, last_index)
            if table[: len(path)] == path:
                return line
        elif path[: len(table)] == table and _holds(tree, path[len(table) :]):
            return line
    raise KeyError(path)


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Yield each header, assignment, comment and empty line with the number of its first line."""
    start, line, depth = 0, 1, 0
    for token in _TOKEN.finditer(text):
        if token[0] in "[{":
            depth += 1
        elif token[0] in "]}":
            depth -= 1
        elif token[0] == "\n" and not depth:
            statement = text[start : token.end()]
            yield line, statement
            start, line = token.end(), line + statement.count("\n")
    yield line, text[start:]


def _opened(header: Mapping[str, Any], last_index: dict[KeyPath, int]) -> KeyPath:
    """Return where what follows a header, such as {"a": {"b": [{}]}}, goes; bring `last_index` up to date."""
    path: KeyPath = ()
    node: Any = header
    while node:
        key, node = next(iter(node.items()))
        path = (*path, key)
        if isinstance(node, list):
            node = node[0]
            last_index[path] = last_index.get(path, -1) + 1
        if path in last_index:
            path = (*path, last_index[path])
    return path


def _holds(tree: Any, path: KeyPath) -> bool:
    for step in path:
        if isinstance(tree, dict):
            if step not in tree:
                return False
        elif not (isinstance(tree, list) and isinstance(step, int) and step < len(tree)):
            return False
        tree = tree[step]
    return True
