"""What `check` and `diff` write for CI: a format on stdout, GitHub's annotations and step summary, JUnit XML."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hookscope import options
from hookscope.errors import HookscopeError

if TYPE_CHECKING:
    from hookscope.results.check import CheckReport

_SUMMARY = "GITHUB_STEP_SUMMARY"


@dataclass(frozen=True, slots=True)
class CiOutput:
    """The format on stdout, and the files for CI; `seconds` and `job` are as in `checks_to_markdown`.

    Attributes:
        format: The given one, else "github" in GitHub Actions, else "text".
        summary: The file of the step summary, which GitHub Actions sets, for the format "github".
    """

    format: str
    junit: Path | None
    summary: Path | None

    def print(self, reports: "Sequence[CheckReport]", *, seconds: float | None = None, job: str = "") -> None:
        """Print Markdown, or the lines that GitHub Actions turns into annotations."""
        from hookscope.reporting.github import annotations, checks_to_markdown

        if self.format == "markdown":
            typer.echo(checks_to_markdown(reports, seconds=seconds, job=job), nl=False)
        if self.format == "github":
            sys.stdout.flush()
            repository = Path(os.environ.get("GITHUB_WORKSPACE") or ".")
            typer.echo(annotations(reports, repository=repository), nl=False)

    def writers(
        self, reports: "Sequence[CheckReport]", *, seconds: float | None = None, job: str = ""
    ) -> Iterator[Callable[[], None]]:
        """Yield a function for each file to write."""
        from hookscope.reporting.github import checks_to_markdown
        from hookscope.reporting.junit import checks_to_junit
        from hookscope.results.runs.atomic import append, write_whole

        if self.summary is not None:
            yield partial(append, self.summary, checks_to_markdown(reports, seconds=seconds, job=job), _SUMMARY)
        if self.junit is not None:
            yield partial(write_whole, self.junit, checks_to_junit(reports), "--junit")


def ci_output(option: options.Check | options.Diff) -> CiOutput:
    """Return what to write; raise OutputError for a file that cannot be written, before a model is run for nothing."""
    from hookscope.results.runs.atomic import check_writable

    chosen = option.report_format or ("github" if os.environ.get("GITHUB_ACTIONS") == "true" else "text")
    path = os.environ.get(_SUMMARY) if chosen == "github" else None
    output = CiOutput(chosen, option.junit, Path(path) if path else None)
    for file, name in ((output.junit, "--junit"), (output.summary, _SUMMARY)):
        if file is not None:
            check_writable(file, name)
    return output


def write_each(writers: Iterable[Callable[[], None]]) -> list[HookscopeError]:
    """Call every writer, also after one that raises; return the errors."""
    failures: list[HookscopeError] = []
    for write in writers:
        try:
            write()
        except HookscopeError as error:
            failures.append(error)
    return failures
