"""Reports on checkpoints: the words that all formats share, and Rich renderables for the terminal."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path, PurePath
from textwrap import wrap
from typing import Any

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.text import Text

from hookscope.errors import most_severe
from hookscope.results.accuracy import accuracy_words, lowest_words
from hookscope.results.check import CheckReport, RuleOutcome
from hookscope.results.findings import Finding
from hookscope.results.runs.directory import OVERVIEW
from hookscope.text import counted, printable, safe_text

# Where a name or a message of unknown origin is cut: no ordinary name or sentence is as long.
_NAME_LENGTH = 300
_MESSAGE_LENGTH = 1000
_SENTENCES = ("error", "message", "reason", "steps", "warnings")

# Up to this many rules that were skipped for the same reason are named, more are counted.
_FEW_RULES = 4

# This many findings are shown for one rule and checkpoint: what a screen has room for.
_FEW_FINDINGS = 10

_TOGETHER = "\N{NO-BREAK SPACE}"  # between a number and its unit, until lines are broken

_STYLES = {"failed": "bold red", "could not be checked": "bold red", "passed": "green"}
_LEVELS = {"fail": ("FAIL", "red"), "warn": ("warn", "yellow")}


def verdict(report: CheckReport) -> str:
    """Return the verdict on a checkpoint in words: it failed if a rule did, whatever else happened."""
    if any(finding.level == "fail" for finding in report.findings):
        return "failed"
    return "passed" if report.passed else "could not be checked"


def by_severity(reports: Sequence[CheckReport]) -> list[CheckReport]:
    """Return the reports with the most severe exit code first, warnings before none, and otherwise as they came."""
    left = {report.exit_code for report in reports}
    ranks: dict[int, int] = {}
    while left:
        code = most_severe(left)
        ranks[code] = len(ranks)
        left.remove(code)
    return sorted(reports, key=lambda report: (ranks[report.exit_code], report.passed and not report.findings))


def summary(reports: Sequence[CheckReport], seconds: float | None = None) -> str:
    """Return one line on all checkpoints: "3 checkpoints: 1 failed, 2 passed · 2 failures, 1 warning · 4.1 s".

    The time is `seconds`, or the sum over the checkpoints.
    """
    verdicts = [verdict(report) for report in reports]
    became = [f"{verdicts.count(style):,} {style}" for style in _STYLES if style in verdicts]
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
    counts = ((failures, "failure"), (len(findings) - failures, "warning"))
    return ", ".join(counted(count, noun) for count, noun in counts if count)


def total_seconds(report: CheckReport) -> float:
    """Return how long a checkpoint took."""
    return report.seconds.get("total", 0.0)


def untold_error(report: CheckReport) -> str:
    """Return why a checkpoint could not be checked, unless a finding reports it, as for a corrupt file."""
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
        return tuple(readable(each, limit) for each in value)
    if isinstance(value, Mapping):
        texts = {key: each if isinstance(each, int | float) else str(each) for key, each in value.items()}
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
    """Return where and what on one line; where only once, if the message quotes it."""
    where = "" if f"'{finding.where}'" in finding.message else finding.where
    return ": ".join(filter(None, (where, finding.message)))


def check_report(reports: Sequence[CheckReport], width: int, *, seconds: float | None = None) -> RenderableType:
    """Return the verdict on each checkpoint, the most severe first, and a summary line last.

    Lines are broken between words, never within a name: print with `soft_wrap=True`, or Rich folds a name that is
    longer than the terminal.
    """
    ordered = [readable(report) for report in by_severity(reports)]
    if len(ordered) == 1 and ordered[0].passed and not ordered[0].findings:
        return Group(*_head(ordered[0], width), *_details(ordered[0], width, {}))
    told: dict[str, str] = {}
    parts = [line for report in ordered for line in (*_head(report, width), *_details(report, width, told))]
    style = "bold" if all(report.passed for report in reports) else "bold red"
    return Group(*parts, Text(summary(reports, seconds), style=style))


def _head(report: CheckReport, width: int) -> Iterator[Text]:
    statuses = [outcome.status for outcome in report.outcomes]
    rules = counted(statuses.count("pass"), "rule") if report.passed else ""
    model = report.model
    of_noise = " of noise" if all(each.is_noise for each in report.inputs) else ""
    parts = (
        f"{report.checkpoint}: {verdict(report)}",
        level_counts(report.findings) or rules,
        _network(report),
        "RANDOM WEIGHTS" if model and model.random else "",
        f"{counted(len(report.inputs), 'input')}{of_noise}" if report.inputs else "",
        f"{total_seconds(report):.1f}{_TOGETHER}s",
    )
    return _lines("", " · ".join(filter(None, parts)), width, _STYLES[verdict(report)])


def _network(report: CheckReport) -> str:
    """Return the network: of "model.pt (resnet18)" what stands in parentheses, as the line begins with the file."""
    if report.model is None or report.model.name == report.checkpoint:
        return ""
    file, parenthesis, network = report.model.name.partition(" (")
    return network.removesuffix(")") if parenthesis and file == PurePath(report.checkpoint).name else report.model.name


def _details(report: CheckReport, width: int, told: dict[str, str]) -> Iterator[Text]:
    """Yield the lines below the head; an error `told` of an earlier checkpoint, but for its name, is not repeated."""
    if error := untold_error(report):
        without_name = error.replace(PurePath(report.checkpoint).name, "")
        first = told.setdefault(without_name, report.checkpoint)
        yield from _lines("ERROR", error if first == report.checkpoint else f"the same as for {first}", width, "red")
    for level in _LEVELS:
        for outcome in report.outcomes:
            yield from _findings(outcome, level, width)
    if words := accuracy_line(report):
        yield from _lines("data", words, width)
    for warning in report.warnings:
        yield from _lines("note", warning, width, "yellow")
    for reason, rules in skipped_rules(report).items():
        yield from _lines("skip", f"{rules}: {reason}", width, "dim")
    if report.evidence:
        yield from _lines("see", str(PurePath(report.evidence, OVERVIEW)), width)


def _findings(outcome: RuleOutcome, level: str, width: int) -> Iterator[Text]:
    word, style = _LEVELS[level]
    findings = [finding for finding in outcome.findings if finding.level == level]
    for finding in findings[:_FEW_FINDINGS]:
        title = " · ".join(filter(None, (finding.rule, finding.where)))
        yield from _lines(word, title, width, style)
        yield from _lines(" ", finding.message, width)
    if len(findings) > _FEW_FINDINGS:
        more = f"… and {len(findings) - _FEW_FINDINGS:,} more of {outcome.rule}, --format json lists all"
        yield from _lines(" ", more, width, "dim")


def _lines(label: str, text: str, width: int, style: str = "") -> Iterator[Text]:
    """Yield `text` behind its label, broken between words, the further lines indented as the first."""
    indent = f"  {label:<5}  " if label else ""
    hanging = " " * max(len(indent), 2)
    room = max(width - len(hanging), 20)
    for position, line in enumerate(wrap(text, room, break_long_words=False, break_on_hyphens=False)):
        # Where it is folded after all, no line may start with what GitHub's runner takes for a command.
        safe = line if cell_len(line) <= room else re.sub(":(?=:)", r"\\x3a", line)
        yield Text((hanging if position else indent) + safe.replace(_TOGETHER, " "), style=style)
