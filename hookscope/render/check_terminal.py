"""Reports on checkpoints as Rich renderables, for people: what failed first, one line on all of it last."""

import re
from collections.abc import Iterator, Sequence
from textwrap import wrap

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.text import Text

from hookscope.render.check_summary import (
    by_gravity,
    level_counts,
    readable,
    skipped_rules,
    summary,
    total_seconds,
    untold_error,
    verdict,
)
from hookscope.results.check import CheckReport, RuleOutcome
from hookscope.text import counted

# Of one rule and checkpoint, this many findings are shown. Our choice: what a screen has room for.
_FEW_FINDINGS = 10

_STYLES = {"failed": "bold red", "could not be checked": "bold red", "passed": "green"}
_LEVELS = {"fail": ("FAIL", "red"), "warn": ("warn", "yellow")}


def check_report(reports: Sequence[CheckReport], width: int, *, seconds: float | None = None) -> RenderableType:
    """Return what became of each checkpoint, the gravest first, and a line on all of them last.

    Lines are broken between words, never within a name: print with `soft_wrap=True`, and a name that is longer than
    the terminal stays whole; without it, Rich folds such a name. A single checkpoint that passes takes a line, and
    another for what was skipped.
    """
    ordered = [readable(report) for report in by_gravity(reports)]
    if len(ordered) == 1 and ordered[0].passed and not ordered[0].findings:
        return Group(*_details(ordered[0], width), *_head(ordered[0], width))
    parts = [line for report in ordered for line in (*_head(report, width), *_details(report, width))]
    style = "bold" if all(report.passed for report in reports) else "bold red"
    return Group(*parts, Text(summary(reports, seconds), style=style))


def _head(report: CheckReport, width: int) -> Iterator[Text]:
    """Yield what a checkpoint is and what became of it."""
    statuses = [outcome.status for outcome in report.outcomes]
    rules = counted(statuses.count("pass"), "rule") if report.passed else ""
    model = report.model
    parts = (
        f"{report.checkpoint}: {verdict(report)}",
        level_counts(report.findings) or rules,
        model.name if model else "",
        "RANDOM WEIGHTS" if model and model.random else "",
        counted(len(report.inputs), "input") if report.inputs else "",
        f"{total_seconds(report):.1f} s",
    )
    return _lines("", " · ".join(filter(None, parts)), width, _STYLES[verdict(report)])


def _details(report: CheckReport, width: int) -> Iterator[Text]:
    """Yield all that there is to say about a checkpoint below its first line."""
    if error := untold_error(report):
        yield from _lines("ERROR", error, width, "red")
    for level in _LEVELS:
        for outcome in report.outcomes:
            yield from _findings(outcome, level, width)
    for warning in report.warnings:
        yield from _lines("note", warning, width, "yellow")
    for reason, rules in skipped_rules(report).items():
        yield from _lines("skip", f"{rules}: {reason}", width, "dim")
    if report.evidence:
        yield from _lines("see", report.evidence, width)


def _findings(outcome: RuleOutcome, level: str, width: int) -> Iterator[Text]:
    """Yield the first findings of a rule at a level, and how many more there are."""
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
        yield Text((hanging if position else indent) + safe, style=style)
