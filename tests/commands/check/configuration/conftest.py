"""What the tests of configuration files share."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hookscope.commands.check.configuration.reading import read_settings
from hookscope.rules import RULES
from hookscope.rules.rule import Limit, Rule
from hookscope.rules.settings import CheckSettings

Read = Callable[[str], CheckSettings]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """Write a text to hookscope.toml in an empty working directory, and read the settings found there."""
    monkeypatch.chdir(tmp_path)

    def write_and_read(text: str) -> CheckSettings:
        Path("hookscope.toml").write_text(text, encoding="utf-8", newline="")
        return read_settings(None, Path())

    return write_and_read


@pytest.fixture
def limited_rule(monkeypatch: pytest.MonkeyPatch) -> Rule:
    """Add a rule with two limits."""
    limits = {"max_fraction": Limit(0.9, "Of channels.", ""), "factor": Limit(1e4, "Of what.", "")}
    rule = replace(RULES["forward"], identifier="bright-channels", level="warn", limits=limits)
    monkeypatch.setitem(RULES, rule.identifier, rule)  # type: ignore[arg-type] # a dict that calls itself a mapping
    return rule
