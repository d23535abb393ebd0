"""What every report on checkpoints says in the same words: verdicts, counts, what was skipped and why."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from hookscope.errors import gravest
from hookscope.results.check import CheckReport, RuleOutcome
from hookscope.results.findings import Finding
from hookscope.text import counted, printable

# Where a name or a message of unknown origin is cut. Our choice: no name or sentence that means well is as long.
_NAME_LENGTH = 300
_MESSAGE_LENGTH = 1000

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


def readable(report: CheckReport) -> CheckReport:
    """Return a report in which every text is on one line, cut if it is very long, and safe to show."""
    model = report.model and replace(
        report.model,
        name=name_text(report.model.name),
        kind=name_text(report.model.kind),
        weights=name_text(report.model.weights),
        arguments={name_text(name): name_text(str(value)) for name, value in report.model.arguments.items()},
    )
    inputs = (
        replace(each, name=name_text(each.name), steps=tuple(map(message_text, each.steps))) for each in report.inputs
    )
    return replace(
        report,
        checkpoint=name_text(report.checkpoint),
        outcomes=tuple(map(_readable_outcome, report.outcomes)),
        model=model,
        inputs=tuple(inputs),
        error=message_text(report.error),
        warnings=tuple(map(message_text, report.warnings)),
        evidence=name_text(report.evidence),
    )


def finding_text(finding: Finding) -> str:
    """Return where and what on one line; where only once, if the message quotes it."""
    where = "" if f"'{finding.where}'" in finding.message else finding.where
    return ": ".join(filter(None, (where, finding.message)))


def _readable_outcome(outcome: RuleOutcome) -> RuleOutcome:
    findings = (
        replace(each, where=name_text(each.where), message=message_text(each.message)) for each in outcome.findings
    )
    return replace(outcome, findings=tuple(findings), reason=message_text(outcome.reason))


def name_text(name: str) -> str:
    """Return the name of a checkpoint, a layer or a folder on one line that is safe to show."""
    return printable(name, _NAME_LENGTH)


def message_text(message: str) -> str:
    """Return a sentence on one line that is safe to show."""
    return printable(message, _MESSAGE_LENGTH)
