"""The page about training lists the rules that there are, with their levels and limits, in both languages."""

import re

import pytest

from hookscope.commands.watch.rules import GRADIENT_RULES, OUTPUT_RULES, TRAINING_RULES
from tests.docs.pages import DOCS


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["training.md", "training.zh.md"])
def test_the_table_has_every_rule_with_its_level_and_limit(name: str) -> None:
    text = (DOCS / "questions" / name).read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \| (fail|warn) \| ([\d.]*) ?\|", text, re.MULTILINE)
    assert {rule: (level, float(limit) if limit else None) for rule, level, limit in rows} == {
        rule: (training_rule.level, training_rule.limit) for rule, training_rule in TRAINING_RULES.items()
    }
    assert all(f"`{rule}`" in text for rule in (*OUTPUT_RULES, *GRADIENT_RULES))
