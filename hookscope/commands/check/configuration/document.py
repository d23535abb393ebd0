"""Find and parse a configuration file, and find the lines of mistakes, which tomllib does not report."""

import os
import re
import tomllib
from bisect import bisect_left
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hookscope.errors import UsageError
from hookscope.regular_files import read_bounded
from hookscope.rules.settings import CheckSettings
from hookscope.text import one_line, printable

# A configuration takes a few pages; a pyproject.toml may hold much else.
_MAX_BYTES = 2**20

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
        return self.wrong(f"{_inside(self.path).removeprefix('in ') if is_row else _called(self.path)} {problem}")

    def unknown(self, key: str, hint: str) -> UsageError:
        """Return the error for a key of this table that may not be there."""
        return self.at(key).wrong(f"unknown key '{printable(key)}' {_inside(self.path)}.{hint}")


def key_of(name: str) -> str:
    """Return a setting's or limit's name as configurations write it: "max-fraction" for "max_fraction"."""
    return name.replace("_", "-")


def read_settings(config: Path | None, folder: Path) -> CheckSettings:
    """Return the settings that a configuration file holds; paths in them begin at its folder.

    Args:
        config: The file, relative to the working directory; for a "pyproject.toml" its table [tool.hookscope]. None for
            "hookscope.toml" in `folder`, else the table [tool.hookscope] of its "pyproject.toml", else the defaults.
        folder: Where to look if `config` is None.

    Raises:
        UsageError: If the file cannot be read, is not TOML, or holds an unknown key or a value that cannot be right.
    """
    name = printable(str(config or folder))
    try:
        top = _find(folder) if config is None else _read(config, str(config))
        if top is None and config is not None:
            raise UsageError(f"{name} has no table [tool.hookscope]. Add it, or give a different file.")
        if top is None:
            return CheckSettings()
        from hookscope.commands.check.configuration.schema import settings_in  # noqa: PLC0415 - pydantic takes 0.07 s to load

        return settings_in(top)
    except RecursionError as error:
        problem = "is nested too deeply. Lists in tables are all it needs."
        raise UsageError(f"The configuration of {name} {problem}") from error


def _find(folder: Path) -> Entry | None:
    for name in ("hookscope.toml", "pyproject.toml"):
        # A dangling link counts as a file: without it, the check would silently use other rules.
        if os.path.lexists(folder / name) and (entry := _read(folder / name, name)) is not None:
            return entry
    return None


def _read(path: Path, name: str) -> Entry | None:
    text = _text(path, printable(name))
    try:
        top = tomllib.loads(text)
    except ValueError as error:  # not TOML, or a number of thousands of digits
        raise UsageError(f"{printable(name)} is not TOML: {one_line(error)}.") from error
    entry = Entry(name, path.parent, text, (), top)
    if path.name != "pyproject.toml":
        return entry
    tools = top.get("tool")
    return entry.at("tool").at("hookscope") if isinstance(tools, dict) and "hookscope" in tools else None


def _text(path: Path, name: str) -> str:
    try:
        content = read_bounded(path, _MAX_BYTES)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"Cannot read the configuration {name}: {one_line(reason)}. Give a TOML file; `hookscope check --init` "
            "writes one."
        ) from error
    if len(content) > _MAX_BYTES:
        raise UsageError(f"{name} is over the limit of {_MAX_BYTES} bytes for a configuration. Give a smaller file.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{name}, line {line}: this is not UTF-8. Save the file as UTF-8.") from error


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
    return f"{printable(key)} {_inside(tuple(above))}"


def _inside(path: KeyPath) -> str:
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
