"""Reports on checkpoints as Markdown, for a comment or GitHub's step summary."""

import re
from collections.abc import Iterator, Sequence

from hookscope.render.check_summary import (
    by_gravity,
    readable,
    skipped_rules,
    summary,
    total_seconds,
    untold_error,
    verdict,
)
from hookscope.results.check import CheckReport
from hookscope.text import counted

# GitHub refuses a step summary above 1 MiB. Our choice below it: something is left for what else the step says.
_MOST_BYTES = 1_000_000

# A word is plain if nothing in it can be markup, a link, a mention or a reference; what stands around it may be.
_WORD = re.compile(r"""([("']*)(.*?)([)"'.,:;…]*)""")
_PLAIN = re.compile(
    r"(?!www\.|gh-)[^\W_]+([-+.,/%=×'][^\W_]+)*%?|[-+]?\d+(\.\d+)?(e[-+]?\d+)?%?|[-=≤≥→·]", re.IGNORECASE
)


def checks_to_markdown(reports: Sequence[CheckReport], *, seconds: float | None = None) -> str:
    """Return a table of the checkpoints, the gravest first, then a list for each that has something to say.

    Whatever could be markup stands in code spans, where GitHub makes no links and no mentions either. A text that
    would be too long for a step summary is cut, and says how much is missing.
    """
    ordered = [readable(report) for report in by_gravity(reports)]
    lines = [
        "## hookscope check",
        "",
        summary(reports, seconds),
        "",
        "| checkpoint | verdict | failures | warnings | network | seconds |",
        "|:--|:--|--:|--:|:--|--:|",
        *map(_row, ordered),
    ]
    for report in ordered:
        if items := list(_items(report)):
            lines += ["", f"### {_code(report.checkpoint)}: {verdict(report)}", "", *items]
    return _cut(lines)


def _row(report: CheckReport) -> str:
    failures = sum(finding.level == "fail" for finding in report.findings)
    # Parsers disagree on how a "|" is escaped in the code spans of a table.
    checkpoint, model = (
        _code(name.replace("|", r"\x7c")) for name in (report.checkpoint, report.model.name if report.model else "")
    )
    warnings = len(report.findings) - failures
    return f"| {checkpoint} | {verdict(report)} | {failures} | {warnings} | {model} | {total_seconds(report):.1f} |"


def _items(report: CheckReport) -> Iterator[str]:
    """Yield the items of a checkpoint's list, failures first."""
    if error := untold_error(report):
        yield f"- **error**: {_sentence(error)}"
    for finding in report.findings:
        where = f" · {_code(finding.where)}" if finding.where else ""
        yield f"- **{finding.level}** {_code(finding.rule)}{where}: {_sentence(finding.message)}"
    for warning in report.warnings:
        yield f"- note: {_sentence(warning)}"
    for reason, rules in skipped_rules(report).items():
        yield f"- skipped {rules}: {_sentence(reason)}"
    if report.evidence:
        yield f"- evidence: {_code(report.evidence)}"


def _cut(lines: Sequence[str]) -> str:
    """Return as many lines as a step summary can hold, and how many more there are."""
    room = _MOST_BYTES - 200  # for the last line
    for position, line in enumerate(lines):
        room -= len(line.encode()) + 1
        if room < 0:
            more = counted(sum(map(bool, lines[position:])), "more line")
            lines = [*lines[:position], "", f"… {more}: GitHub takes 1 MiB at most, `--format json` holds all."]
            break
    return "\n".join(lines) + "\n"


def _sentence(text: str) -> str:
    """Return a sentence in which every word that is not plain is a code span."""
    return " ".join(map(_word, text.split()))


def _word(word: str) -> str:
    before, core, after = _WORD.fullmatch(word).groups()  # type: ignore[union-attr]  # it matches everything
    return word if not core or _PLAIN.fullmatch(core) else f"{before}{_code(core)}{after}"


def _code(text: str) -> str:
    """Return `text`, which has no line ends, as a code span; "" for none."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    blank = " " if longest else ""
    return f"{fence}{blank}{text}{blank}{fence}" if text.strip() else ""
