import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from hookscope.reporting.github import annotations, checks_to_markdown, escaped_data, escaped_property
from hookscope.results.check import CheckReport, Finding, RuleOutcome
from hookscope.text import printable, safe_text
from tests.reporting.checked import (
    CORRUPT,
    CORRUPT_TEXT,
    EVERY,
    FAILED,
    HOSTILE,
    HOSTILE_NAMES,
    KILLED,
    LONG_NAME,
    MANY,
    PASSING,
    RAISED,
    SKIPPING,
    UNTRUSTED,
    WARNED,
    anything,
    hostile,
    outcome,
)
from tests.reporting.runner import Command, commands, read_data, read_property

escaped = anything | st.text("%0DA25:3C2,\r\n=", max_size=30)


@given(escaped)
@example("100%0A")
@example("a:b,c%\r\n")
def test_the_runner_reads_data_and_properties_as_they_were(text: str) -> None:
    assert not set(escaped_data(text)) & set("\r\n")
    assert read_data(escaped_data(text)) == text
    assert not set(escaped_property(text)) & set("\r\n:,")
    assert read_property(escaped_property(text)) == text


def test_nothing_is_said_of_what_passes_quietly() -> None:
    assert annotations([PASSING, SKIPPING]) == ""
    assert annotations([]) == ""


def test_each_rule_that_objects_is_an_annotation_with_its_findings_line_by_line() -> None:
    assert commands(annotations([FAILED])) == [
        Command(
            "error",
            {"title": "hookscope · models/broken.pt · batchnorm-variance"},
            "layer1.0.bn1.running_var: 3 of 64 variances are below zero: -0.5.\n"
            "bn1.running_var: 1 of 64 variances is zero (limit: above 0).",
        ),
        Command(
            "error",
            {"title": "hookscope · models/broken.pt · dead-channels"},
            "layer1.0.relu: 64 of 64 channels are zero over 2 inputs (limit 50%).",
        ),
        Command(
            "warning",
            {"title": "hookscope · models/broken.pt · dead-channels"},
            f"{LONG_NAME}: 9 of 64 channels are zero over 2 inputs (limit 5%).",
        ),
    ]


def test_what_could_not_be_checked_is_an_error_that_is_said_once() -> None:
    (killed,) = commands(annotations([KILLED]))
    title = {"title": "hookscope · models/huge.pt · could not be checked"}
    assert killed == Command("error", title, KILLED.error)
    (corrupt,) = commands(annotations([CORRUPT]))
    assert corrupt == Command("error", {"title": "hookscope · models/corrupt.pt · integrity"}, CORRUPT_TEXT)


def test_errors_come_before_warnings_and_the_most_severe_of_every_checkpoint_before_the_second_of_any() -> None:
    actual = commands(annotations([WARNED, MANY, FAILED, RAISED, KILLED, UNTRUSTED]))
    assert [each.name for each in actual] == ["error"] * 6 + ["warning"] * 3 + ["notice"]
    assert [each.properties["title"].removeprefix("hookscope · ") for each in actual] == [
        "models/pickle.pt · integrity",
        "models/huge.pt · could not be checked",
        "net.py:build · could not be checked",
        "models/many.pt · dead-filter",
        "models/broken.pt · batchnorm-variance",
        "models/broken.pt · dead-channels",
        "models/many.pt · dead-filter",
        "models/broken.pt · dead-channels",
        "models/warned.pt · dead-channels",
        "models/warned.pt · note",
    ]


def test_ten_broken_checkpoints_all_have_one_of_the_ten_errors_that_github_shows() -> None:
    broken = [replace(FAILED, checkpoint=f"models/{n}.pt") for n in range(10)]
    shown = [command.properties["title"] for command in commands(annotations(broken)) if command.name == "error"][:10]
    assert {title.split(" · ")[1] for title in shown} == {report.checkpoint for report in broken}


def test_of_many_findings_ten_are_said_and_the_others_counted() -> None:
    error, warning = commands(annotations([MANY]))
    assert error.data.splitlines()[0] == "blocks.1.weight: 1 of 2000 filters are zero."
    for case in (error, warning):
        assert len(case.data.splitlines()) == 11
        assert case.data.endswith("\n… and 490 more")


def test_messages_and_titles_are_no_longer_than_the_runner_and_github_take() -> None:
    for command in commands(annotations([replace(report, checkpoint="x" * 5000) for report in EVERY])):
        assert len(command.properties["title"]) <= 255
    findings = [Finding("forward", "fail", "x" * 5000, "y" * 5000) for _ in range(9)]
    (error,) = commands(annotations([replace(PASSING, outcomes=(outcome("forward", *findings),))]))
    *said, more = error.data.splitlines()
    assert len(error.data) <= 4096
    assert 1 <= len(said) < 9
    assert more == f"… and {9 - len(said)} more"


def test_a_file_in_the_repository_is_named_relative_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "repository" / "models").mkdir(parents=True)
    inside, outside = tmp_path / "repository" / "models" / "a, b:50%.pt", tmp_path / "outside.pt"
    inside.touch()
    unprintable, link = (tmp_path / "repository" / name for name in ("a\n::error::b", "latest.pt"))
    for file in (outside, unprintable):
        file.touch()
    link.symlink_to(outside)
    monkeypatch.chdir(tmp_path / "repository")

    def files(*checkpoints: object) -> list[str | None]:
        reports = [replace(KILLED, checkpoint=str(checkpoint)) for checkpoint in checkpoints]
        return [command.properties.get("file") for command in commands(annotations(reports))]

    assert files("models/a, b:50%.pt", "models/../models/a, b:50%.pt", inside) == ["models/a, b:50%.pt"] * 3
    assert files("latest.pt") == ["latest.pt"]  # and not what it leads to
    assert files(outside, unprintable, "models", "models/none.pt", "resnet18", "x" * 5000, "a\0b") == [None] * 7
    monkeypatch.chdir(tmp_path)
    (elsewhere,) = commands(
        annotations([replace(KILLED, checkpoint="repository/models/a, b:50%.pt")], repository=tmp_path / "repository")
    )
    assert elsewhere.properties["file"] == "models/a, b:50%.pt"


def test_hostile_names_are_read_as_text_and_stay_readable() -> None:
    said = commands(annotations(HOSTILE))
    assert len(said) == 4 * len(HOSTILE)
    for name in HOSTILE_NAMES:
        actual = commands(annotations([hostile(name)]))
        assert [each.name for each in actual] == ["error", "error", "warning", "notice"]
        for each, subject in zip(actual, ("could not be checked", "forward", "forward", "note"), strict=True):
            assert each.properties == {"title": f"hookscope · {printable(name)} · {subject}".strip()}
            assert each in said
        assert actual[1].data == f"{safe_text(name)}: {safe_text(f'It says: {name}.')}"
        assert actual[3].data == f"{safe_text(name)}\n{safe_text(f'Warning: {name}')}"


# Markdown


# All that our own structure is made of; everything else would come from somebody's text.
OURS = {
    *("heading_open", "heading_close", "paragraph_open", "paragraph_close", "inline", "text", "code_inline"),
    *("table_open", "table_close", "thead_open", "thead_close", "tbody_open", "tbody_close"),
    *("tr_open", "tr_close", "th_open", "th_close", "td_open", "td_close"),
    *("bullet_list_open", "bullet_list_close", "list_item_open", "list_item_close", "strong_open", "strong_close"),
}

# What GitHub makes links, mentions, references, emoji and formulas of, in text outside of code; its parser is not here.
GITHUB_ONLY = re.compile(r"@\w|#\d|\bGH-\d|://|\bwww\.|:\w+:|\$", re.IGNORECASE)

markup = anything | st.text("`*_[]()<>!|\\@#:~-a 1.\n&$w/", max_size=30)


def tokens(markdown: str, *, html: bool = True) -> list[Token]:
    """Return all tokens, those within lines too."""
    assert markdown.startswith("<!-- hookscope check -->\n")  # tested by itself
    markdown = markdown.split("\n", 1)[1]
    blocks = MarkdownIt("commonmark", {"html": html}).enable(["table", "strikethrough"]).parse(markdown)
    return [case for block in blocks for case in (block, *(block.children or ()))]


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


def test_the_summary_stands_above_the_table_and_what_passes_quietly_has_a_row_and_no_more() -> None:
    text = checks_to_markdown([PASSING])
    assert texts(text)[:2] == ["hookscope check", "1 checkpoint: 1 passed · 1.5 s"]
    assert "###" not in text


def test_the_table_has_a_row_for_each_checkpoint_the_most_severe_first() -> None:
    assert table(PASSING, KILLED, FAILED, WARNED, CORRUPT) == [
        ["models/huge.pt", "could not be checked", "0", "0", "", "7.5"],
        ["models/corrupt.pt", "failed", "1", "0", "", "0.1"],
        ["models/broken.pt", "failed", "3", "1", "resnet18", "1.5"],
        ["models/warned.pt", "passed", "0", "1", "resnet18", "1.5"],
        ["models/good.pt", "passed", "0", "0", "resnet18", "1.5"],
    ]


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
    question = "Are they a different network's? The shapes fit!"
    position = "Input 1 leads to it, at [0, :]. 'b' gave ([2, 3, :])."
    markdown = checks_to_markdown([replace(WARNED, warnings=(question, position))])
    assert f"- note: {question}\n" in markdown
    assert "- note: Input 1 leads to it, at `[0, :]`. 'b' gave (`[2, 3, :]`).\n" in markdown


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
    actual = tokens(checks_to_markdown([report]), html=html)
    assert {token.type for token in actual} <= OURS
    assert {token.content for token in actual if token.type == "text" and GITHUB_ONLY.search(token.content)} == set()
    bold = {actual[n + 1].content for n, token in enumerate(actual) if token.type == "strong_open"}
    assert bold <= {"error", "fail", "warn"}


@pytest.mark.parametrize("name", [name for name in HOSTILE_NAMES if name.strip()])
def test_hostile_names_are_seen_as_text(name: str) -> None:
    seen = texts(checks_to_markdown([hostile(name)]))
    words = " ".join(safe_text(name).split())
    assert f"{safe_text(name)}: failed" in seen
    assert f"evidence: {safe_text(name)}" in seen
    assert f"error: Error: {words}" in [" ".join(text.split()) for text in seen]
    assert f"fail forward · {safe_text(name)}: It says: {words}." in seen


@pytest.mark.parametrize("name", [name for name in HOSTILE_NAMES if name.strip()])
def test_a_hostile_name_keeps_to_its_cell(name: str) -> None:
    (row,) = table(hostile(name))
    cell = safe_text(name).replace("|", r"\x7c").strip()
    assert [text.strip() for text in row] == [cell, "failed", "1", "1", cell, "1.0"]


@given(name=markup, message=markup)
def test_any_text_at_all_makes_no_markup(name: str, message: str) -> None:
    rules = (
        RuleOutcome("forward", "fail", (Finding("forward", "fail", name, message),)),
        RuleOutcome("drift", "skipped", reason=message),
    )
    markdown = checks_to_markdown([CheckReport(name, rules, warnings=(message,), evidence=name, model=PASSING.model)])
    actual = tokens(markdown)
    assert {token.type for token in actual} <= OURS
    assert not [token for token in actual if token.type == "text" and GITHUB_ONLY.search(token.content)]
    assert [token.type for token in actual].count("tr_open") == 2
    assert [token.type for token in actual].count("list_item_open") == 3 + bool(name)


def test_a_thousand_findings_are_all_there() -> None:
    assert sum(line.startswith("- **") for line in checks_to_markdown([MANY]).splitlines()) == 1000
    assert "more line" not in checks_to_markdown(EVERY)


def test_what_github_would_refuse_is_cut_and_says_how_much_is_missing() -> None:
    count = 20_000
    findings = [Finding("dead-filter", "fail", f"blocks.{n}.weight", "x" * 60) for n in range(count)]
    findings += [Finding("dead-filter", "warn", "层" * 20, "y" * 60)]
    text = checks_to_markdown([PASSING, replace(FAILED, outcomes=(outcome("dead-filter", *findings),))])
    assert 900_000 < len(text.encode("utf-8")) <= 1024 * 1024
    items = [line for line in text.splitlines() if line.startswith("- ")]
    # One more line than findings: where the evidence is.
    assert text.splitlines()[-1].startswith(f"… {count + 2 - len(items):,} more lines: GitHub takes 1 MiB at most")


@given(anything)
@example("-->\n# Heading\n<!--")
@example("--!> <script>")
def test_the_marker_is_one_comment_on_one_line_and_all_else_follows(job: str) -> None:
    text = checks_to_markdown([FAILED], job=job)
    first, rest = text.split("\n", 1)
    assert checks_to_markdown([FAILED]) == f"<!-- hookscope check -->\n{rest}"
    assert first.startswith("<!-- hookscope check")
    assert first.index(">") == len(first) - 1
    assert first.isprintable()
