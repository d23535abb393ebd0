from dataclasses import replace

import pytest

from hookscope.render.check_summary import by_gravity, finding_text, skipped_rules, summary, untold_error, verdict
from hookscope.results.check import CheckReport, Finding, RuleOutcome
from tests.render.checked import (
    CORRUPT,
    EVERY,
    FAILED,
    KILLED,
    MANY,
    PASSING,
    RAISED,
    SKIPPING,
    UNTRUSTED,
    WARNED,
    outcome,
)


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


def test_the_summary_of_every_case_is_that_counted_by_hand() -> None:
    # 3 + 1 + 1 + 500 failures, 1 + 1 + 500 warnings
    counts = "9 checkpoints: 4 failed, 2 could not be checked, 3 passed · 505 failures, 502 warnings"
    assert summary(EVERY).startswith(counts)


def test_the_gravest_comes_first_in_the_order_of_the_exit_codes() -> None:
    # refused 4, unreadable 3, the model raised 6, a rule failed 1, warnings, nothing
    given = [PASSING, WARNED, FAILED, SKIPPING, RAISED, KILLED, UNTRUSTED, CORRUPT, MANY]
    assert by_gravity(given) == [UNTRUSTED, KILLED, CORRUPT, RAISED, FAILED, MANY, WARNED, PASSING, SKIPPING]


def test_an_error_that_a_finding_says_is_not_said_again() -> None:
    assert untold_error(CORRUPT) == ""
    assert untold_error(KILLED) == KILLED.error
    assert untold_error(PASSING) == ""


def test_rules_skipped_for_the_same_reason_are_named_together_or_counted() -> None:
    def skipped(*rules: str) -> CheckReport:
        return replace(PASSING, outcomes=tuple(RuleOutcome(rule, "skipped", reason="No file.") for rule in rules))

    assert skipped_rules(skipped("a", "b", "c", "d")) == {"No file.": "a, b, c, d"}
    assert skipped_rules(skipped("a", "b", "c", "d", "e")) == {"No file.": "5 rules"}
    assert skipped_rules(PASSING) == {}


def test_a_place_stands_before_a_message_unless_the_message_quotes_it() -> None:
    def said(where: str, message: str) -> str:
        return finding_text(Finding("forward", "fail", where, message))

    assert said("fc", "12 of 64 are zero.") == "fc: 12 of 64 are zero."
    assert said("fc", "'fc' (Linear) is zero.") == "'fc' (Linear) is zero."
    assert said("1", "12 of 64 in '12' are zero.") == "1: 12 of 64 in '12' are zero."
    assert said("", "The file is cut off.") == "The file is cut off."
