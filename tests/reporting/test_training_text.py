"""A watched training in words: which verdict leads, what belongs together, and how it ended."""

from dataclasses import replace

import pytest

from hookscope.commands.watch.describe import answer, findings
from hookscope.results.training import TrainingFinding, TrainingLog, TrainingStep
from tests.reporting.conftest import HOSTILE_NAME, printed
from tests.reporting.trained import START, training_summary, verdict

pytestmark = pytest.mark.exhaustive


def log_of(*verdicts: TrainingFinding, steps: int = 3000) -> TrainingLog:
    done = tuple(TrainingStep(step, 1.0, 1.0, None, (), (0.1,)) for step in range(1, steps + 1))
    return TrainingLog((START,), done, (), verdicts, ())


def test_the_first_failure_leads_and_a_warning_where_nothing_fails() -> None:
    warning, failure = verdict(5, "a", "x"), verdict(1200, "b", "fc1.weight", level="fail")
    assert answer(log_of())[0] == "No problems in 3,000 steps."
    assert answer(log_of(warning))[0] == "At step 5, x: 0.75 is over its limit (0.5)."
    assert answer(log_of(warning, failure))[0] == "At step 1,200, fc1.weight: 0.75 is over its limit (0.5)."
    about_all = replace(failure, where="", message="The loss is NaN.")
    assert answer(log_of(about_all))[0] == "At step 1,200, the loss is NaN."
    named = replace(failure, message="'fc1.weight' holds NaN (limit 0). It was 0.5 before. Look at the batch.")
    assert answer(log_of(named))[0] == "At step 1,200, 'fc1.weight' holds NaN (limit 0)."
    assert answer(log_of(named))[1] == "It was 0.5 before. Look at the batch."
    assert answer(log_of(steps=0))[0] == "No step was recorded."


def test_a_rule_that_begins_again_is_another_finding_unless_it_never_ended() -> None:
    again = [verdict(7, "a", "x"), verdict(9, "a", "x", state="ended"), verdict(20, "a", "x")]
    assert [(each.verdict.step, each.ended_at) for each in findings(log_of(*again))] == [(7, 9), (20, None)]
    resumed = [verdict(7, "a", "x"), verdict(20, "a", "x"), verdict(30, "a", "x", state="ended")]
    assert [(each.verdict.step, each.ended_at) for each in findings(log_of(*resumed))] == [(7, 30)]
    stray = verdict(3, "a", "x", state="ended")
    assert findings(log_of(stray)) == []


def test_the_answer_says_what_else_there_was() -> None:
    actual = [verdict(1200, "b", "w", level="fail"), verdict(1300, "b", "w", level="fail", state="ended")]
    log = log_of(*actual, verdict(5, "a", "x"), steps=1400)
    steps = tuple(replace(step, skipped=step.step <= 7) for step in log.steps)
    assert answer(replace(log, steps=steps)) == [
        "At step 1,200, w: 0.75 is over its limit (0.5).",
        "It cleared at step 1,300.",
        "1 other problem: a.",
        "The optimiser skipped 7 steps: 1, 2, 3, 4, 5 and 2 more.",
        "The record stops at step 1,400 without an end: the training still runs, or was killed.",
    ]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_table_fits_and_hostile_names_are_spelled_out(width: int) -> None:
    log = log_of(
        verdict(5, "a-rule", HOSTILE_NAME), verdict(9, "a-rule", "blocks.0.attention.proj.weight", level="fail")
    )
    text = printed(training_summary(log, width=width), width)
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text
    assert "\n::error::" not in text
    assert "a-rule" in text
