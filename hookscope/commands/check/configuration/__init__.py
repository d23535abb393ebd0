"""Read the configuration of `hookscope check`: TOML to `CheckSettings`, every mistake with file and line."""

from hookscope.commands.check.configuration.default_file import default_text
from hookscope.commands.check.configuration.document import read_settings

__all__ = ["default_text", "read_settings"]
