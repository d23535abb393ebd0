"""Read the configuration of `hookscope check`: TOML to `CheckSettings`, every mistake with file and line."""

from pathlib import Path

from hookscope.commands.check.configuration.default_file import default_text
from hookscope.commands.check.configuration.document import find
from hookscope.errors import UsageError
from hookscope.rules.settings import CheckSettings
from hookscope.text import printable

__all__ = ["default_text", "read_settings"]


def read_settings(config: Path | None, folder: Path) -> CheckSettings:
    """Return the settings that a configuration file holds; paths in them begin at its folder.

    Args:
        config: The file, relative to the working directory; of a "pyproject.toml" its table [tool.hookscope]. None for
            "hookscope.toml" in `folder`, else the table [tool.hookscope] of its "pyproject.toml", else the defaults.
        folder: Where to look if `config` is None.

    Raises:
        UsageError: If the file cannot be read, is not TOML, or holds an unknown key or a value that cannot be right.
    """
    try:
        top = find(config, folder)
        if top is None:
            return CheckSettings()
        from hookscope.commands.check.configuration.schema import settings_in  # noqa: PLC0415 - pydantic takes 0.07 s to load

        return settings_in(top)
    except RecursionError as error:
        name = printable(str(config or folder))
        raise UsageError(
            f"The configuration of {name} is nested too deeply. Lists in tables are all it needs."
        ) from error
