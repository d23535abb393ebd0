"""Read the configuration of `hookscope check`: TOML to `CheckSettings`, every mistake with file and line."""

from hookscope.checks.configuration.default_file import default_text
from hookscope.checks.configuration.schema import read_settings

__all__ = ["default_text", "read_settings"]
