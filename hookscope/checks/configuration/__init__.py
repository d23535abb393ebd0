"""Read what `hookscope check` is told in a file: TOML to `CheckSettings`, every mistake with file and line."""

from pathlib import Path

from hookscope.checks.configuration.default_file import default_text
from hookscope.checks.configuration.document import find
from hookscope.checks.configuration.schema import settings_of
from hookscope.checks.settings import CheckSettings
from hookscope.errors import UsageError
from hookscope.text import printable

__all__ = ["default_text", "read_settings"]


def read_settings(config: Path | None, folder: Path) -> CheckSettings:
    """Return the settings that a configuration file holds.

    Args:
        config: The file, relative to the working directory; of a "pyproject.toml" its table [tool.hookscope]. None for
            "hookscope.toml" in `folder`, else the table [tool.hookscope] of its "pyproject.toml", else the defaults.
        folder: Where to look if `config` is None.

    Returns:
        The settings. Paths in them begin at the file's folder.

    Raises:
        UsageError: If the file cannot be read, is not TOML, or holds an unknown key or a value that cannot be right.
    """
    try:
        top = find(config, folder)
        return CheckSettings() if top is None else settings_of(top)
    except RecursionError as error:
        name = printable(str(config or folder))
        raise UsageError(
            f"The configuration of {name} is nested too deeply. Lists in tables are all it needs."
        ) from error
