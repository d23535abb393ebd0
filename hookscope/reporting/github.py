"""Reports on checkpoints for GitHub: workflow commands, which its runner makes annotations of, and Markdown."""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, zip_longest
from pathlib import Path

from hookscope.reporting.check_report import (
    by_severity,
    finding_text,
    readable,
    remarks,
    repository_file,
    summary,
    total_seconds,
    unreported_error,
    verdict,
)
from hookscope.results.check import CheckReport
from hookscope.results.findings import Finding
from hookscope.text import counted, printable

# This many findings are listed for one rule and checkpoint: an annotation is read beside a file's lines.
_FEW_FINDINGS = 10

# The runner cuts longer messages (`_maxIssueMessageLength` in actions/runner, src/Runner.Worker/ExecutionContext.cs).
_MESSAGE_LENGTH = 4096

# GitHub refuses a step summary above 1 MiB. This leaves room for other output of the step.
_MOST_BYTES = 1_000_000

# A word is plain if nothing in it can be markup, a link, a mention or a reference, apart from punctuation around it.
_WORD = re.compile(r"""([("']*)(.*?)([)"'.,:;?!…]*)""")
_PLAIN = re.compile(
    r"(?!www\.|gh-)[^\W_]+([-+.,/%=×'][^\W_]+)*%?|[-+]?\d+(\.\d+)?(e[-+]?\d+)?%?|[-=≤≥→·]", re.IGNORECASE
)


def annotations(reports: Sequence[CheckReport], *, repository: Path = Path()) -> str:
    """Return a line `::error title=…,file=…::…` or `::warning …` for each rule of a checkpoint that objects.

    GitHub makes annotations of the first 10 errors, warnings and notices of a step and only logs the rest. So a rule's
    findings share an annotation, errors come before warnings, and the first annotation of every checkpoint, the most
    severe checkpoint first, before the second of any. Notes are a `::notice`. `file` is given if the checkpoint is a
    file below `repository`.

    Print it unwrapped: a broken line is not a command.
    """
    said = [
        _commands(readable(report), repository_file(report.checkpoint, repository)) for report in by_severity(reports)
    ]
    turns = (turn for name in ("error", "warning", "notice") for turn in zip_longest(*(lines[name] for lines in said)))
    return "".join(f"{line}\n" for turn in turns for line in turn if line)


def escaped_data(text: str) -> str:
    """Escape `text` for the place after the second "::" of a command.

    Source: what actions/runner undoes, percent signs last (`_escapeDataMappings`, src/Runner.Common/ActionCommand.cs).
    """
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def escaped_property(text: str) -> str:
    """Escape `text` for the value of a property of a command (`_escapePropertyMappings`)."""
    return escaped_data(text).replace(":", "%3A").replace(",", "%2C")


def _commands(report: CheckReport, file: str) -> dict[str, list[str]]:

    def line(name: str, subject: str, message: str) -> str:
        properties = {"title": f"hookscope · {printable(report.checkpoint)} · {subject}"}  # GitHub takes 255 characters
        properties |= {"file": file} if file else {}
        listed = ",".join(f"{key}={escaped_property(value)}" for key, value in properties.items())
        return f"::{name} {listed}::{escaped_data(message)}"

    error = unreported_error(report)
    lines = {
        "error": [line("error", "could not be checked", error)] if error else [],
        "warning": [],
        "notice": [line("notice", "note", "\n".join(report.warnings))] if report.warnings else [],
    }
    for outcome in report.outcomes:
        for level, name in (("fail", "error"), ("warn", "warning")):
            findings = [finding for finding in outcome.findings if finding.level == level]
            if findings:
                lines[name].append(line(name, outcome.rule, _message(findings)))
    return lines


def _message(findings: Sequence[Finding]) -> str:
    """Return a line for each of the first findings, within the runner's limit, and the number of the others."""
    lines = _fitting([*map(finding_text, findings[:_FEW_FINDINGS])], _MESSAGE_LENGTH - len("… and 1,000,000 more"), len)
    more = len(findings) - len(lines)
    return "\n".join([*lines, f"… and {more:,} more"] if more else lines)


def _fitting(lines: Sequence[str], room: int, size: Callable[[str], int]) -> Sequence[str]:
    """Return the first lines that fit, with their line ends."""
    ends = accumulate(size(line) + 1 for line in lines)
    return lines[: sum(end <= room for end in ends)]


def checks_to_markdown(reports: Sequence[CheckReport], *, seconds: float | None = None, job: str = "") -> str:
    """Return a table of the checkpoints, the most severe first, then a list for each with findings or remarks.

    Whatever could be markup stands in code spans, where GitHub makes no links and no mentions either. The first line is
    an invisible comment with `job`, by which a bot finds the comment of the previous run and replaces it.

    Args:
        reports: Of every checkpoint.
        seconds: Duration of the command; default: the sum over the checkpoints.
        job: Identifies the job: equal in all its runs, different from other jobs.
    """
    ordered = [readable(report) for report in by_severity(reports)]
    lines = [
        _marker(job),
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
    return _limited(lines)


def _marker(job: str) -> str:
    """Return an HTML comment that its text cannot close."""
    named = ": ".join(filter(None, ("hookscope check", printable(job).replace("<", r"\x3c").replace(">", r"\x3e"))))
    return f"<!-- {named} -->"


def _row(report: CheckReport) -> str:
    failures = sum(finding.level == "fail" for finding in report.findings)
    # Parsers disagree on how a "|" is escaped in the code spans of a table.
    checkpoint, model = (
        _code(name.replace("|", r"\x7c")) for name in (report.checkpoint, report.model.name if report.model else "")
    )
    warnings = len(report.findings) - failures
    return f"| {checkpoint} | {verdict(report)} | {failures} | {warnings} | {model} | {total_seconds(report):.1f} |"


def _items(report: CheckReport) -> Iterator[str]:
    if error := unreported_error(report):
        yield f"- **error**: {_sentence(error)}"
    for finding in report.findings:
        where = f" · {_code(finding.where)}" if finding.where else ""
        yield f"- **{finding.level}** {_code(finding.rule)}{where}: {_sentence(finding.message)}"
    for kind, words in remarks(report):
        yield f"- {kind}: {_sentence(words)}"
    if report.evidence:
        yield f"- evidence: {_code(report.evidence)}"


def _limited(lines: Sequence[str]) -> str:
    """Join the lines that a step summary can hold, and add the number of the others."""
    kept = _fitting(lines, _MOST_BYTES - 200, lambda line: len(line.encode()))  # with room for the last line
    if left_out := lines[len(kept) :]:
        more = counted(sum(map(bool, left_out)), "more line")
        kept = [*kept, "", f"… {more}: GitHub takes 1 MiB at most, `--format json` holds all."]
    return "\n".join(kept) + "\n"


def _sentence(text: str) -> str:
    """Turn every word that is not plain, and every position such as "[0, :]", into a code span."""
    return " ".join(map(_word, re.findall(r"\S*\[[\d:, ]*\]\S*|\S+", " ".join(text.split()))))


def _word(word: str) -> str:
    before, core, after = _WORD.fullmatch(word).groups()  # type: ignore[union-attr]  # it matches everything
    return word if not core or _PLAIN.fullmatch(core) else f"{before}{_code(core)}{after}"


def _code(text: str) -> str:
    """Return a text of one line as a code span; "" for an empty text."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    blank = " " if longest else ""
    return f"{fence}{blank}{text}{blank}{fence}" if text.strip() else ""
