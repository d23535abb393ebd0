"""What every report on checkpoints says in the same words: verdicts, counts, what was skipped and why."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal

from hookscope.errors import gravest
from hookscope.results.check import CheckReport
from hookscope.results.findings import Finding
from hookscope.text import counted, printable

# Where a name or a message of unknown origin is cut. Our choice: no name or sentence that means well is as long.
_NAME_LENGTH = 300
_MESSAGE_LENGTH = 1000
_SENTENCES = ("error", "message", "reason", "steps", "warnings")

# Up to this many rules that were skipped for the same reason are named, more are counted. Our choice.
_FEW_RULES = 4

Verdict = Literal["failed", "could not be checked", "passed"]


def verdict(report: CheckReport) -> Verdict:
    """Return what became of a checkpoint, in words: it failed if a rule did, whatever else happened."""
    if any(finding.level == "fail" for finding in report.findings):
        return "failed"
    return "passed" if report.passed else "could not be checked"


def by_gravity(reports: Sequence[CheckReport]) -> list[CheckReport]:
    """Return the reports with the gravest exit code first, warnings before none, and otherwise as they came."""
    left = {report.exit_code for report in reports}
    ranks: dict[int, int] = {}
    while left:
        code = gravest(left)
        ranks[code] = len(ranks)
        left.remove(code)
    return sorted(reports, key=lambda report: (ranks[report.exit_code], report.passed and not report.findings))


def summary(reports: Sequence[CheckReport], seconds: float | None = None) -> str:
    """Return one line on all checkpoints: "3 checkpoints: 1 failed, 2 passed · 2 failures, 1 warning · 4.1 s".

    `seconds` is how long all of it took; None for the sum over the checkpoints.
    """
    verdicts = [verdict(report) for report in reports]
    wordings: tuple[Verdict, ...] = ("failed", "could not be checked", "passed")
    became = [f"{verdicts.count(each):,} {each}" for each in wordings if each in verdicts]
    spent = sum(map(total_seconds, reports)) if seconds is None else seconds
    parts = (
        ": ".join(filter(None, (counted(len(reports), "checkpoint"), ", ".join(became)))),
        level_counts([finding for report in reports for finding in report.findings]),
        f"{spent:.1f} s",
    )
    return " · ".join(filter(None, parts))


def level_counts(findings: Sequence[Finding]) -> str:
    """Return "2 failures, 1 warning", without what there is none of."""
    failures = sum(finding.level == "fail" for finding in findings)
    warnings = len(findings) - failures
    counts = ((failures, "failure"), (warnings, "warning"))
    return ", ".join(counted(count, noun) for count, noun in counts if count)


def total_seconds(report: CheckReport) -> float:
    """Return how long a checkpoint took."""
    return report.seconds.get("total", 0.0)


def untold_error(report: CheckReport) -> str:
    """Return why a checkpoint could not be checked, unless a finding says just that: a corrupt file is both."""
    told = {finding.message for finding in report.findings}
    return "" if report.error in told else report.error


def skipped_rules(report: CheckReport) -> Mapping[str, str]:
    """Return, by reason, which rules were skipped for it: "drift, expectation", or "12 rules" of many."""
    by_reason: dict[str, list[str]] = {}
    for outcome in report.outcomes:
        if outcome.status == "skipped":
            by_reason.setdefault(outcome.reason, []).append(outcome.rule)
    return {
        reason: ", ".join(rules) if len(rules) <= _FEW_RULES else counted(len(rules), "rule")
        for reason, rules in by_reason.items()
    }


def readable(value: Any, limit: int = _NAME_LENGTH) -> Any:
    """Return a report in which every text is on one line, cut if it is very long, and safe to show."""
    if isinstance(value, str):
        return printable(value, limit)
    if isinstance(value, tuple):
        return tuple(readable(each, limit) for each in value)
    if isinstance(value, Mapping):
        texts = {key: each if isinstance(each, int | float) else str(each) for key, each in value.items()}
        return {readable(key): readable(each) for key, each in texts.items()}
    if not is_dataclass(value) or isinstance(value, type):
        return value
    limits = {each.name: _MESSAGE_LENGTH if each.name in _SENTENCES else _NAME_LENGTH for each in fields(value)}
    return replace(value, **{name: readable(getattr(value, name), room) for name, room in limits.items()})


def finding_text(finding: Finding) -> str:
    """Return where and what on one line; where only once, if the message quotes it."""
    where = "" if f"'{finding.where}'" in finding.message else finding.where
    return ": ".join(filter(None, (where, finding.message)))
