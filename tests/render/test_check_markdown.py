import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from hookscope.render.github import checks_to_markdown
from hookscope.results.check import CheckReport, Finding, RuleOutcome
from hookscope.text import safe_text
from tests.render.checked import (
    CORRUPT,
    CORRUPT_TEXT,
    EVERY,
    FAILED,
    HOSTILE,
    HOSTILE_NAMES,
    KILLED,
    MANY,
    PASSING,
    SKIPPING,
    WARNED,
    hostile,
    outcome,
)

# All that our own structure is made of; everything else would come from somebody's text.
OURS = {
    *("heading_open", "heading_close", "paragraph_open", "paragraph_close", "inline", "text", "code_inline"),
    *("table_open", "table_close", "thead_open", "thead_close", "tbody_open", "tbody_close"),
    *("tr_open", "tr_close", "th_open", "th_close", "td_open", "td_close"),
    *("bullet_list_open", "bullet_list_close", "list_item_open", "list_item_close", "strong_open", "strong_close"),
}

# What GitHub makes links, mentions, references, emoji and formulas of, in text outside of code; its parser is not here.
GITHUB_ONLY = re.compile(r"@\w|#\d|\bGH-\d|://|\bwww\.|:\w+:|\$", re.IGNORECASE)

anything = st.text(st.characters(exclude_categories=[]), max_size=60) | st.text(
    "`*_[]()<>!|\\@#:~-a 1.\n&$w/", max_size=30
)


def tokens(markdown: str, *, html: bool = True) -> list[Token]:
    """Return all tokens, those within lines too."""
    blocks = MarkdownIt("commonmark", {"html": html}).enable(["table", "strikethrough"]).parse(markdown)
    return [each for block in blocks for each in (block, *(block.children or ()))]


def texts(markdown: str) -> list[str]:
    """Return what a reader sees of each line, cell or heading."""
    return ["".join(child.content for child in token.children or ()) for token in tokens(markdown) if token.children]


def table(*reports: CheckReport) -> list[list[str]]:
    """Return the cells of the body of the table."""
    rows: list[list[str]] = []
    body = False
    for token in tokens(checks_to_markdown(reports)):
        body = token.type == "tbody_open" or (body and token.type != "tbody_close")
        if body and token.type == "tr_open":
            rows.append([])
        if body and token.type == "inline":
            rows[-1].append("".join(child.content for child in token.children or ()))
    return rows


def test_the_summary_stands_above_the_table() -> None:
    assert texts(checks_to_markdown([PASSING]))[:2] == ["hookscope check", "1 checkpoint: 1 passed · 1.5 s"]


def test_the_table_has_a_row_for_each_checkpoint_the_gravest_first() -> None:
    assert table(PASSING, KILLED, FAILED, WARNED, CORRUPT) == [
        ["models/huge.pt", "could not be checked", "0", "0", "", "7.5"],
        ["models/corrupt.pt", "failed", "1", "0", "", "0.1"],
        ["models/broken.pt", "failed", "3", "1", "resnet18", "1.5"],
        ["models/warned.pt", "passed", "0", "1", "resnet18", "1.5"],
        ["models/good.pt", "passed", "0", "0", "resnet18", "1.5"],
    ]


def test_a_checkpoint_that_passes_quietly_has_a_row_and_no_more() -> None:
    assert "###" not in checks_to_markdown([PASSING])


def test_findings_stand_below_their_checkpoint_failures_first() -> None:
    seen = texts(checks_to_markdown([FAILED]))
    start = seen.index("models/broken.pt: failed")
    assert seen[start + 1 :] == [
        "fail batchnorm-variance · layer1.0.bn1.running_var: 3 of 64 variances are below zero: -0.5.",
        "fail batchnorm-variance · bn1.running_var: 1 of 64 variances is zero (limit: above 0).",
        "fail dead-channels · layer1.0.relu: 64 of 64 channels are zero over 2 inputs (limit 50%).",
        f"warn dead-channels · {FAILED.findings[3].where}: 9 of 64 channels are zero over 2 inputs (limit 5%).",
        "skipped drift: No baseline was given.",
        "evidence: evidence/models-broken.pt",
    ]


def test_plain_sentences_are_not_cluttered_with_code() -> None:
    assert ": 64 of 64 channels are zero over 2 inputs (limit 50%).\n" in checks_to_markdown([FAILED])
    genitive = "No other network's names fit."
    assert f"- note: {genitive}\n" in checks_to_markdown([replace(WARNED, warnings=(genitive,))])


def test_errors_notes_and_skipped_rules_are_said() -> None:
    assert f"error: {KILLED.error}" in texts(checks_to_markdown([KILLED]))
    assert "skipped 5 rules: Its worker was killed." in texts(checks_to_markdown([KILLED]))
    assert "note: Only 2 inputs were given." in texts(checks_to_markdown([WARNED]))
    assert "skipped expectation: No expectation is configured." in texts(checks_to_markdown([SKIPPING]))
    assert checks_to_markdown([CORRUPT]).count("its archive has no end") == 1
    assert f"fail integrity: {CORRUPT_TEXT}" in texts(checks_to_markdown([CORRUPT]))


@pytest.mark.parametrize("html", [True, False])
@pytest.mark.parametrize("report", [*EVERY[:-1], *HOSTILE], ids=lambda report: ascii(report.checkpoint))
def test_there_is_no_markup_but_ours(report: CheckReport, *, html: bool) -> None:
    found = tokens(checks_to_markdown([report]), html=html)
    assert {token.type for token in found} <= OURS
    assert {token.content for token in found if token.type == "text" and GITHUB_ONLY.search(token.content)} == set()
    bold = {found[n + 1].content for n, token in enumerate(found) if token.type == "strong_open"}
    assert bold <= {"error", "fail", "warn"}


@pytest.mark.parametrize("name", [name for name in HOSTILE_NAMES if name.strip()])
def test_hostile_names_are_seen_as_text(name: str) -> None:
    seen = texts(checks_to_markdown([hostile(name)]))
    words = " ".join(safe_text(name).split())
    assert f"{safe_text(name)}: failed" in seen
    assert f"evidence: {safe_text(name)}" in seen
    assert f"error: Error: {words}" in [" ".join(each.split()) for each in seen]
    assert f"fail forward · {safe_text(name)}: It says: {words}." in seen


@pytest.mark.parametrize("name", [name for name in HOSTILE_NAMES if name.strip()])
def test_a_hostile_name_keeps_to_its_cell(name: str) -> None:
    (row,) = table(hostile(name))
    cell = safe_text(name).replace("|", r"\x7c").strip()
    assert [each.strip() for each in row] == [cell, "failed", "1", "1", cell, "1.0"]


@given(name=anything, message=anything)
def test_any_text_at_all_makes_no_markup(name: str, message: str) -> None:
    rules = (
        RuleOutcome("forward", "fail", (Finding("forward", "fail", name, message),)),
        RuleOutcome("drift", "skipped", reason=message),
    )
    markdown = checks_to_markdown([CheckReport(name, rules, warnings=(message,), evidence=name, model=PASSING.model)])
    found = tokens(markdown)
    assert {token.type for token in found} <= OURS
    assert not [token for token in found if token.type == "text" and GITHUB_ONLY.search(token.content)]
    assert [token.type for token in found].count("tr_open") == 2
    assert [token.type for token in found].count("list_item_open") == 3 + bool(name)


def test_a_thousand_findings_are_all_there() -> None:
    assert sum(line.startswith("- **") for line in checks_to_markdown([MANY]).splitlines()) == 1000


def test_what_github_would_refuse_is_cut_and_says_how_much_is_missing() -> None:
    count = 20_000
    findings = [Finding("dead-filter", "fail", f"blocks.{n}.weight", "x" * 60) for n in range(count)]
    findings += [Finding("dead-filter", "warn", "层" * 20, "y" * 60)]
    text = checks_to_markdown([PASSING, replace(FAILED, outcomes=(outcome("dead-filter", *findings),))])
    assert 900_000 < len(text.encode("utf-8")) <= 1024 * 1024
    items = [line for line in text.splitlines() if line.startswith("- ")]
    # One more line than findings: where the evidence is.
    assert text.splitlines()[-1].startswith(f"… {count + 2 - len(items):,} more lines: GitHub takes 1 MiB at most")


def test_what_is_short_enough_is_not_cut() -> None:
    assert "more line" not in checks_to_markdown(EVERY)
