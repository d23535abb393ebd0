"""What `check` and `diff` write for CI: a format on stdout, GitHub's annotations and step summary, JUnit XML."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hookscope.errors import HookscopeError

if TYPE_CHECKING:
    from hookscope.results.check import CheckReport

_SUMMARY = "GITHUB_STEP_SUMMARY"


def chosen_format(given: str | None) -> str:
    """Return the format that was given, else "github" in GitHub Actions, else "text"."""
    return given or ("github" if os.environ.get("GITHUB_ACTIONS") == "true" else "text")


def step_summary(chosen: str) -> Path | None:
    """Return the file of the step summary, which GitHub Actions sets, for the format "github"."""
    path = os.environ.get(_SUMMARY) if chosen == "github" else None
    return Path(path) if path else None


def check_ci_files(junit: Path | None, summary: Path | None) -> None:
    """Raise an OutputError for a file that could not be written, before a model is run for nothing."""
    from hookscope.results.runs.atomic import check_writable

    for path, name in ((junit, "--junit"), (summary, _SUMMARY)):
        if path is not None:
            check_writable(path, name)


def ci_writers(
    reports: "Sequence[CheckReport]",
    junit: Path | None,
    summary: Path | None,
    *,
    seconds: float | None = None,
    job: str = "",
) -> Iterator[Callable[[], None]]:
    """Yield a function for each file to write; `seconds` and `job` are as in `checks_to_markdown`."""
    from hookscope.render.github import checks_to_markdown
    from hookscope.render.junit import checks_to_junit
    from hookscope.results.runs.atomic import append, write_whole

    if summary is not None:
        yield partial(append, summary, checks_to_markdown(reports, seconds=seconds, job=job), _SUMMARY)
    if junit is not None:
        yield partial(write_whole, junit, checks_to_junit(reports), "--junit")


def write_each(writers: Iterable[Callable[[], None]]) -> list[HookscopeError]:
    """Call every writer, also after one that raises; return the errors."""
    failures: list[HookscopeError] = []
    for write in writers:
        try:
            write()
        except HookscopeError as error:
            failures.append(error)
    return failures


def print_annotations(reports: "Sequence[CheckReport]") -> None:
    """Print the lines on stdout that GitHub Actions turns into annotations."""
    from hookscope.render.github import annotations

    repository = Path(os.environ.get("GITHUB_WORKSPACE") or ".")
    sys.stdout.flush()
    typer.echo(annotations(reports, repository=repository), nl=False)
