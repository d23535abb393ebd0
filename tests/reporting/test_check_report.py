from collections.abc import Sequence
from dataclasses import replace
from io import StringIO

import pytest
from rich.cells import cell_len
from rich.console import Console

from hookscope.commands.check.describe import describe_checks
from hookscope.reporting.check_report import by_severity, finding_text, remarks, summary, verdict
from hookscope.reporting.document_text import printed
from hookscope.results.check import CheckReport, Finding, RuleOutcome
from tests.reporting.checked import (
    CORRUPT,
    CORRUPT_TEXT,
    EVERY,
    FAILED,
    HOSTILE,
    KILLED,
    LABELLED,
    LONG_NAME,
    MANY,
    PASSING,
    RAISED,
    SKIPPING,
    UNTRUSTED,
    WARNED,
    hostile,
    outcome,
)
from tests.reporting.runner import commands

# --- what every rendering says ---


def test_an_error_that_differs_in_the_name_alone_is_not_repeated() -> None:
    reports = [CheckReport(f"run/{name}.pt", (), error=f"{name}.pt (net) has an unknown shape.") for name in "abc"]
    reports = [replace(report, error_code=2) for report in reports]
    other = CheckReport("d.pt", (), error="The worker was killed.", error_code=3)
    lines = shown(*reports, other).splitlines()
    errors = [line.split(maxsplit=1)[1] for line in lines if line.startswith("  error: ")]
    assert errors == ["The worker was killed.", "a.pt (net) has an unknown shape.", *["the same as for run/a.pt"] * 2]


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (PASSING, "passed"),
        (SKIPPING, "passed"),
        (WARNED, "passed"),
        (FAILED, "failed"),
        (CORRUPT, "failed"),
        (UNTRUSTED, "failed"),
        (KILLED, "could not be checked"),
        (RAISED, "could not be checked"),
        (replace(FAILED, error="The worker was killed.", error_code=3), "failed"),
        (CheckReport("x.pt", (), error="The worker was killed.", error_code=3), "could not be checked"),
    ],
)
def test_a_verdict_is_one_of_three(report: CheckReport, words: str) -> None:
    assert verdict(report) == words


def test_the_summary_counts_checkpoints_by_verdict_and_findings_by_level() -> None:
    findings = [Finding("forward", level, "", "It raised.") for level in ("fail", "fail", "warn")]
    broken = replace(PASSING, outcomes=(outcome("forward", *findings),), seconds={"total": 2.1})
    quick = replace(PASSING, seconds={"total": 1.0})
    line = "3 checkpoints: 1 failed, 2 passed · 2 failures, 1 warning · 4.1 s"
    assert summary([quick, broken, quick]) == line


def test_the_summary_leaves_out_what_there_is_none_of() -> None:
    assert summary([PASSING]) == "1 checkpoint: 1 passed · 1.5 s"
    assert summary([KILLED]) == "1 checkpoint: 1 could not be checked · 7.5 s"
    assert summary([]) == "0 checkpoints · 0.0 s"
    assert summary([PASSING, PASSING], seconds=2.0) == "2 checkpoints: 2 passed · 2.0 s"  # that went by, not the sum


def test_the_most_severe_comes_first_in_the_order_of_the_exit_codes() -> None:
    # refused 4, unreadable 3, the model raised 6, a rule failed 1, warnings, nothing
    inputs = [PASSING, WARNED, FAILED, SKIPPING, RAISED, KILLED, UNTRUSTED, CORRUPT, MANY]
    assert by_severity(inputs) == [UNTRUSTED, KILLED, CORRUPT, RAISED, FAILED, MANY, WARNED, PASSING, SKIPPING]


def test_rules_skipped_for_the_same_reason_are_named_together_or_counted() -> None:
    def skipped(*rules: str) -> CheckReport:
        return replace(PASSING, outcomes=tuple(RuleOutcome(rule, "skipped", reason="No file.") for rule in rules))

    assert [*remarks(skipped("a", "b", "c", "d"))] == [("skipped a, b, c, d", "No file.")]
    assert [*remarks(skipped("a", "b", "c", "d", "e"))] == [("skipped 5 rules", "No file.")]
    assert [*remarks(PASSING)] == []


def test_a_place_stands_before_a_message_unless_the_message_quotes_it() -> None:
    def said(where: str, message: str) -> str:
        return finding_text(Finding("forward", "fail", where, message))

    assert said("fc", "12 of 64 are zero.") == "fc: 12 of 64 are zero."
    assert said("fc", "'fc' (Linear) is zero.") == "'fc' (Linear) is zero."
    assert said("1", "12 of 64 in '12' are zero.") == "1: 12 of 64 in '12' are zero."
    assert said("", "The file is cut off.") == "The file is cut off."


# --- for people ---


def shown(*reports: CheckReport, width: int = 80, colour: bool = False) -> str:
    """Return what is printed; into a pipe unless `colour`."""
    console = Console(
        file=StringIO(),
        width=width,
        markup=False,
        emoji=False,
        highlight=False,
        force_terminal=colour,
        color_system="standard" if colour else None,
    )
    console.print(printed(describe_checks(reports), width=width), overflow="ignore", crop=False)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def words(text: str) -> str:
    return " ".join(text.split())


def in_order(text: str, parts: Sequence[str]) -> bool:
    positions = [text.index(part) for part in parts]
    return positions == sorted(positions)


def test_one_checkpoint_that_passes_takes_one_line_and_so_do_none() -> None:
    assert shown() == "0 checkpoints · 0.0 s\n"
    assert shown(PASSING) == "models/good.pt: passed · 3 rules · resnet18 · 2 inputs · 1.5 s\n"


def test_a_failure_is_told_with_rule_place_and_message_before_the_warnings() -> None:
    assert shown(FAILED).splitlines() == [
        "models/broken.pt: failed · 3 failures, 1 warning · resnet18 · 2 inputs · 1.5 s",
        "FAIL batchnorm-variance at 'layer1.0.bn1.running_var': 3 of 64 variances are",
        "  below zero: -0.5.",
        "FAIL batchnorm-variance at 'bn1.running_var': 1 of 64 variances is zero (limit:",
        "  above 0).",
        "FAIL dead-channels at 'layer1.0.relu': 64 of 64 channels are zero over 2 inputs",
        "  (limit 50%).",
        "WARN dead-channels at",
        f"  '{LONG_NAME}':",
        "  9 of 64 channels are zero over 2 inputs (limit 5%).",
        "note: skipped drift: No baseline was given.",
        "See evidence/models-broken.pt/overview.png",
    ]


def test_a_model_that_raised_is_an_error_and_so_is_a_killed_worker() -> None:
    assert f"error: {RAISED.error}\n" in shown(RAISED)
    text = shown(PASSING, KILLED)
    assert in_order(text, ["models/huge.pt: could not be checked", "  error: The worker was killed", "models/good.pt"])
    assert words(KILLED.error) in words(text)
    assert "  note: skipped 5 rules: Its worker was killed.\n" in text
    assert text.endswith("2 checkpoints: 1 could not be checked, 1 passed · 9.0 s\n")


def test_a_corrupt_file_says_so_once() -> None:
    text = shown(CORRUPT, width=200)
    assert text.count(CORRUPT_TEXT) == 1
    assert "error:" not in text


def test_random_weights_cannot_be_missed() -> None:
    assert PASSING.model is not None
    random = shown(replace(PASSING, model=replace(PASSING.model, random=True)))
    assert "models/good.pt: passed, untrained · " in random
    assert "RANDOM WEIGHTS" in random
    assert "passed, looks untrained · " in shown(replace(PASSING, looks_untrained=True))
    assert "untrained" not in shown(replace(FAILED, looks_untrained=True)).partition("\n")[0]
    assert not {"RANDOM WEIGHTS", "untrained"} & {*shown(PASSING).split()}


@pytest.mark.parametrize(
    "place", ["at '(model):log' (net.py:18)", "at 'a: b' (Conv2d)", "in the code of '' (Net) between its modules"]
)
def test_the_headline_says_where_nan_starts_and_how_many_pictures_are_right(place: str) -> None:
    origin = Finding("non-finite-activation", "fail", "conv", f"NaN starts {place}: 3 NaN and 0 Inf in 9 values.")
    loss = Finding("non-finite-loss", "fail", "", "The loss (ce) is NaN; it must be finite.")
    wrong = Finding("accuracy", "warn", "", "0 of 2 labelled pictures are classified right.")
    outcomes = tuple(outcome(finding.rule, finding) for finding in (origin, loss, wrong))
    text = shown(replace(LABELLED, outcomes=outcomes), width=300).partition("\n")[0]
    assert f": failed · NaN starts {place} · 15 of 20 pictures right · 2 failures, 1 warning" in text


def test_of_a_thousand_findings_the_first_are_shown_and_the_others_counted() -> None:
    late = outcome("drift", Finding("drift", "warn", "fc", "It moved."))
    text = shown(replace(MANY, outcomes=(*MANY.outcomes, late)))
    assert (text.count("FAIL dead-filter"), text.count("WARN dead-filter"), text.count("WARN drift")) == (6, 5, 1)
    assert "… 989 more, --format json lists all\n" in text
    twelve = replace(MANY, outcomes=(outcome("dead-filter", *MANY.outcomes[0].findings[:12]),))
    assert "more" not in shown(twelve)


def test_the_summary_comes_last() -> None:
    last = shown(*EVERY, width=120).splitlines()[-1]
    assert last.startswith("9 checkpoints: 4 failed, 2 could not be checked, 3 passed · 505 failures, 502 warnings · ")


@pytest.mark.parametrize("width", [20, 40, 80, 120])
def test_no_name_is_broken(width: int) -> None:
    lines = [line.split() for line in shown(*EVERY, width=width).splitlines()]
    together = {word.strip("':") for line in lines for word in line}
    names = {finding.where for report in (FAILED, WARNED) for finding in report.findings}
    assert names <= together


def test_a_name_with_hyphens_is_not_broken_at_them() -> None:
    name = "-".join(["layer"] * 12)
    report = replace(FAILED, outcomes=(outcome("forward", Finding("forward", "fail", name, f"It is {name} again.")),))
    assert shown(report, width=60).split().count(name) == 1
    assert f"'{name}':" in shown(report, width=60).split()


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_lines_keep_to_the_width_unless_a_single_word_is_longer(width: int) -> None:
    lines = shown(*EVERY, width=width).splitlines()
    assert len(lines) > 20
    for line in lines:
        assert cell_len(line) <= width or len(line.split()) == 1
        assert line.isprintable()


def test_colours_are_for_terminals_only_and_say_nothing_that_the_words_do_not() -> None:
    assert "\x1b" not in shown(*EVERY)
    coloured = shown(FAILED, colour=True)
    assert "\x1b[" in coloured
    assert "FAIL" in coloured


@pytest.mark.parametrize("width", [20, 33, 80, 120])
def test_no_hostile_name_is_a_command_to_the_runner(width: int) -> None:
    long = [hostile("x" * padding + "::error::pwned") for padding in range(60, 100)]  # folded, it could start a line
    assert commands(shown(*HOSTILE, *long, width=width)) == []


def test_the_headline_of_several_checkpoints_has_the_colour_of_the_worst() -> None:
    levels = [describe_checks(reports).level for reports in ([PASSING, PASSING], [PASSING, WARNED], [WARNED, FAILED])]
    assert levels == ["good", "warn", "fail"]
