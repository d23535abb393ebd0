"""Reports on checkpoints as GitHub workflow commands, which its runner turns into annotations."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Literal

from hookscope.render.check_summary import by_gravity, finding_text, readable, untold_error
from hookscope.results.check import CheckReport
from hookscope.results.findings import Finding
from hookscope.text import printable, safe_text

# Of one rule and checkpoint, this many findings are said. Our choice: an annotation is read beside a file's lines.
_FEW_FINDINGS = 10

# The runner cuts what is longer (`_maxIssueMessageLength` in actions/runner, src/Runner.Worker/ExecutionContext.cs).
_MESSAGE_LENGTH = 4096


def annotations(reports: Sequence[CheckReport], *, repository: Path = Path()) -> str:
    """Return a line `::error title=…,file=…::…` or `::warning …` for each rule of a checkpoint that objects.

    GitHub makes annotations of the first 10 errors, warnings and notices of a step and only logs the rest. So a rule's
    findings share an annotation, errors come before warnings, what could not be checked before what failed, and the
    gravest of every checkpoint before the second of any. What is only worth knowing is a `::notice`.

    Print it as it is: a line that somebody wraps is no command any more.

    Args:
        reports: What to say.
        repository: What the annotated files are relative to. `file` is given if the checkpoint is a file below it.
    """
    ordered = [(readable(report), _file(report.checkpoint, repository)) for report in by_gravity(reports)]
    errors = [list(_errors(report, file)) for report, file in ordered]
    warnings = [list(_objections(report, "warn", file)) for report, file in ordered]
    notices = [list(_notices(report, file)) for report, file in ordered]
    turns = (*zip_longest(*errors), *zip_longest(*warnings), *zip_longest(*notices))
    return "".join(f"{line}\n" for turn in turns for line in turn if line)


def escaped_data(text: str) -> str:
    """Return `text` so that the runner reads just that after the second "::".

    Source:
        The inverse of what actions/runner undoes, percent signs last (`_escapeDataMappings` in
        src/Runner.Common/ActionCommand.cs).
    """
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def escaped_property(text: str) -> str:
    """Return `text` so that the runner reads just that as the value of a property.

    Source:
        Likewise (`_escapePropertyMappings`): as data, and then colons and commas.
    """
    return escaped_data(text).replace(":", "%3A").replace(",", "%2C")


def _errors(report: CheckReport, file: str) -> Iterator[str]:
    if error := untold_error(report):
        yield _command("error", report, "could not be checked", error, file)
    yield from _objections(report, "fail", file)


def _notices(report: CheckReport, file: str) -> Iterator[str]:
    if report.warnings:
        text = "\n".join(report.warnings)
        yield _command("notice", report, "note", text, file)


def _objections(report: CheckReport, level: Literal["fail", "warn"], file: str) -> Iterator[str]:
    name: Literal["error", "warning"] = "error" if level == "fail" else "warning"
    for outcome in report.outcomes:
        findings = [finding for finding in outcome.findings if finding.level == level]
        if findings:
            yield _command(name, report, outcome.rule, _message(findings), file)


def _message(findings: Sequence[Finding]) -> str:
    """Return the first findings, a line each, no more than the runner takes, and how many more there are."""
    lines: list[str] = []
    room = _MESSAGE_LENGTH - len("… and 1,000,000 more")
    for finding in findings[:_FEW_FINDINGS]:
        line = finding_text(finding)
        room -= len(line) + 1
        if room < 0:
            break
        lines.append(line)
    more = len(findings) - len(lines)
    return "\n".join([*lines, f"… and {more:,} more"] if more else lines)


def _command(
    name: Literal["error", "warning", "notice"], report: CheckReport, what: str, message: str, file: str
) -> str:
    properties = {"title": f"hookscope · {printable(report.checkpoint)} · {what}"}  # GitHub takes 255 characters
    properties |= {"file": file} if file else {}
    listed = ",".join(f"{key}={escaped_property(value)}" for key, value in properties.items())
    return f"::{name} {listed}::{escaped_data(message)}"


def _file(checkpoint: str, repository: Path) -> str:
    """Return the path of a checkpoint below the repository; "" if it is no file there, or its name is not printable."""
    path = Path(checkpoint)
    with suppress(OSError, ValueError):  # a name too long for a file; one outside the repository
        if path.is_file() and safe_text(checkpoint) == checkpoint:
            return (path.parent.resolve() / path.name).relative_to(repository.resolve()).as_posix()
    return ""
