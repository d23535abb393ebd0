"""Find and read a configuration file."""

import os
import tomllib
from pathlib import Path

from hookscope.commands.check.configuration.document import Entry
from hookscope.errors import UsageError
from hookscope.regular_files import read_bounded
from hookscope.rules.settings import CheckSettings
from hookscope.text import one_line, printable

# A configuration takes a few pages; a pyproject.toml may hold much else.
_MAX_BYTES = 2**20


def read_settings(config: str | Path | None, folder: Path) -> CheckSettings:
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
        top = _find(folder) if config is None else _read(Path(config), str(config))
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
