import re
from collections import Counter
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType

from hookscope.cli.rule_tables import rule_explanation, rules_table
from hookscope.rules import RULES
from hookscope.rules import rule as rules
from hookscope.rules.rule import Rule, RuleFinding


@rules.rule("dead-things", "warn", "forward")
@rules.limit("fraction", 0.05, "Share of things that are dead.", "one in twenty is normal")
@rules.limit("magnitude", 65504.0, "Greatest magnitude.", "IEEE 754, table 3.5: the greatest finite binary16")
@rules.limit("tiny", 1e-07, "Least magnitude.", "")
def dead_things(*_: object) -> Iterator[RuleFinding]:
    """Things behind a [thing] are dead.

    Things die
    when nobody looks.

    Look at them.
    """
    return iter(())


def piped(renderable: RenderableType, width: int = 80) -> str:
    console = Console(file=StringIO(), width=width, markup=False, emoji=False, highlight=False)
    console.print(renderable)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def cells(text: str) -> list[list[str]]:
    """Return the rows below the rule, their wrapped lines put together again."""
    lines = text.splitlines()
    header = lines[0]
    starts = [header.index(name) for name in ("rule", "level", "needs", "meaning")]
    rows: list[list[str]] = []
    for line in lines[2:]:
        parts = [line[start:end].strip() for start, end in zip(starts, [*starts[1:], None], strict=True)]
        if parts[0]:
            rows.append(parts)
        else:
            rows[-1][3] += f" {parts[3]}"
    return rows


@pytest.mark.parametrize("width", [80, 120])
def test_every_rule_has_a_row_in_order_with_its_level_needs_and_meaning(width: int) -> None:
    expected = [[rule.identifier, rule.level, rule.needs, rule.meaning] for rule in RULES.values()]
    assert cells(piped(rules_table(width), width)) == expected


@pytest.mark.parametrize("width", [24, 40, 60, 80, 120])
def test_the_table_keeps_to_the_width_has_every_level_and_meaning_and_no_colour_in_a_pipe(width: int) -> None:
    text = piped(rules_table(width), width)
    assert all(cell_len(line) <= width for line in text.splitlines())
    assert "\x1b" not in text
    expected = Counter(word for rule in RULES.values() for word in (rule.level, *rule.meaning.split()))
    assert expected <= Counter(text.split())


def test_an_explanation_gives_meaning_level_limits_with_their_basis_and_all_paragraphs() -> None:
    assert [line.rstrip() for line in piped(rule_explanation(dead_things)).splitlines()] == [
        "dead-things",
        "Things behind a [thing] are dead.",
        "Default level: warn. Looks at a forward pass.",
        "",
        "Limit fraction = 0.05",
        "  Share of things that are dead.",
        "  Basis: one in twenty is normal",
        "",
        "Limit magnitude = 65504",
        "  Greatest magnitude.",
        "  Basis: IEEE 754, table 3.5: the greatest finite binary16",
        "",
        "Limit tiny = 1e-07",
        "  Least magnitude.",
        "",
        "Things die when nobody looks.",
        "",
        "Look at them.",
    ]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_every_rule_can_be_explained_in_eighty_columns(rule: Rule) -> None:
    text = piped(rule_explanation(rule))
    assert all(cell_len(line) <= 80 for line in text.splitlines())
    together = re.sub(r"\s+", " ", text)
    for part in (rule.meaning, *(limit.meaning for limit in rule.limits.values()), rule.explanation):
        assert re.sub(r"\s+", " ", part).strip() in together
    for name, limit in rule.limits.items():
        (stated,) = re.findall(rf"^Limit {name.replace('_', '-')} = (\S+)", text, re.MULTILINE)
        assert float(stated) == limit.default


def test_the_changelog_counts_the_rules() -> None:
    changelog = (Path(__file__).parents[2] / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"(\d+) rules, with levels", changelog) == [str(len(RULES))]
