"""Reports on checkpoints: the words that all formats share."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from hookscope.errors import severity_rank
from hookscope.results.accuracy import accuracy_words, lowest_words
from hookscope.results.check import CheckReport
from hookscope.results.findings import Finding
from hookscope.text import counted, printable, safe_text

# Characters at which a name or a message of unknown origin is cut: ordinary texts are shorter.
_NAME_LENGTH = 300
_MESSAGE_LENGTH = 1000
_SENTENCES = ("error", "message", "reason", "steps", "warnings")

# Rules skipped for the same reason are listed up to this number, else counted.
_FEW_RULES = 4

_VERDICTS = ("failed", "could not be checked", "passed")


def verdict(report: CheckReport) -> str:
    """Return the verdict on a checkpoint in words: it failed if a rule did, whatever else happened."""
    if any(finding.level == "fail" for finding in report.findings):
        return "failed"
    return "passed" if report.passed else "could not be checked"


def by_severity(reports: Sequence[CheckReport]) -> list[CheckReport]:
    """Return the reports, the most severe exit code first; within a code, passes without findings come last."""
    return sorted(reports, key=lambda report: (severity_rank(report.exit_code), report.passed and not report.findings))


def summary(reports: Sequence[CheckReport], seconds: float | None = None) -> str:
    """Return one line on all checkpoints: "3 checkpoints: 1 failed, 2 passed · 2 failures, 1 warning · 4.1 s".

    The time is `seconds`, or the sum over the checkpoints.
    """
    verdicts = [verdict(report) for report in reports]
    became = [f"{verdicts.count(style):,} {style}" for style in _VERDICTS if style in verdicts]
    spent = sum(map(total_seconds, reports)) if seconds is None else seconds
    parts = (
        ": ".join(filter(None, (counted(len(reports), "checkpoint"), ", ".join(became)))),
        level_counts([finding for report in reports for finding in report.findings]),
        f"{spent:.1f} s",
    )
    return " · ".join(filter(None, parts))


def level_counts(findings: Sequence[Finding]) -> str:
    """Return "2 failures, 1 warning", without counts of 0."""
    failures = sum(finding.level == "fail" for finding in findings)
    counts = ((failures, "failure"), (len(findings) - failures, "warning"))
    return ", ".join(counted(count, noun) for count, noun in counts if count)


def total_seconds(report: CheckReport) -> float:
    """Return how long a checkpoint took."""
    return report.seconds.get("total", 0.0)


def unreported_error(report: CheckReport) -> str:
    """Return why a checkpoint could not be checked, unless a finding reports it, as for a corrupt file."""
    messages = {finding.message for finding in report.findings}
    return "" if report.error in messages else report.error


def remarks(report: CheckReport) -> Iterator[tuple[str, str]]:
    """Yield what a reader should see besides findings, each with its kind: "data", "note", "skipped 12 rules"."""
    if words := accuracy_line(report):
        yield "data", words
    for warning in report.warnings:
        yield "note", warning
    by_reason: dict[str, list[str]] = {}
    for outcome in report.outcomes:
        if outcome.status == "skipped":
            by_reason.setdefault(outcome.reason, []).append(outcome.rule)
    for reason, rules in by_reason.items():
        yield f"skipped {', '.join(rules) if len(rules) <= _FEW_RULES else counted(len(rules), 'rule')}", reason


def accuracy_line(report: CheckReport) -> str:
    """Return how many labelled pictures are right, and the lowest class; "" without any, or if a finding has it."""
    if report.accuracy is None or any(finding.rule == "accuracy" for finding in report.findings):
        return ""
    return f"{accuracy_words(report.accuracy)}.{lowest_words(report.accuracy)}"


def readable(value: Any, limit: int = _NAME_LENGTH) -> Any:
    """Return a report, or a part of it, with every text on one line, cut if it is very long, and safe to show."""
    if isinstance(value, str):
        return printable(value, limit)
    if isinstance(value, tuple):
        return tuple(readable(item, limit) for item in value)
    if isinstance(value, Mapping):
        texts = {key: item if isinstance(item, int | float) else str(item) for key, item in value.items()}
        return {readable(key): readable(text) for key, text in texts.items()}
    if not is_dataclass(value) or isinstance(value, type):
        return value
    names = [field.name for field in fields(value) if field.name != "overview_parts"]
    limits = {name: _MESSAGE_LENGTH if name in _SENTENCES else _NAME_LENGTH for name in names}
    return replace(value, **{name: readable(getattr(value, name), room) for name, room in limits.items()})


def repository_file(checkpoint: str, repository: Path) -> str:
    """Return the path of a checkpoint below the repository, or of the source file that builds it: "file.py:factory".

    "" if there is no such file there, or its name is not printable.
    """
    for name in (checkpoint, checkpoint.rpartition(":")[0]):
        path = Path(name)
        with suppress(OSError, ValueError):  # a name too long for a file; one outside the repository
            if path.is_file() and safe_text(name) == name:
                return (path.parent.resolve() / path.name).relative_to(repository.resolve()).as_posix()
    return ""


def finding_text(finding: Finding) -> str:
    """Return place and message on one line; the message alone if it quotes the place."""
    where = "" if f"'{finding.where}'" in finding.message else finding.where
    return ": ".join(filter(None, (where, finding.message)))
