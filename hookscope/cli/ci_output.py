"""What `check` and `diff` write for CI: a format on stdout, GitHub's annotations and step summary, JUnit XML, SARIF."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hookscope import options
from hookscope.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_TERMINATED, HookscopeError, Terminated, UsageError
from hookscope.text import exception_line, printable

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
    from hookscope.results.runs.atomic import append, check_text_target

    chosen = option.report_format or ("github" if os.environ.get("GITHUB_ACTIONS") == "true" else "text")
    path = os.environ.get(_SUMMARY) if chosen == "github" else None
    output = CiOutput(chosen, option.junit, Path(path) if path else None)
    if output.junit is not None:
        check_text_target(output.junit, "--junit", "<")
    if output.summary is not None:
        append(output.summary, "", _SUMMARY)
    return output


def refuse_one_file(option: options.Check | options.Diff) -> None:
    """Raise UsageError for a file that two options name: the second would replace what the first wrote or reads."""
    named: dict[str, str] = {}
    for name in ("config", "baseline", "junit", "sarif", "page"):
        path = getattr(option, name, None)
        if path is not None and (os.path.isfile(path) or not os.path.lexists(path)):  # noqa: PTH113 never raises
            flag = "--report" if name == "page" else f"--{name}"
            first = named.setdefault(os.path.realpath(path), flag)
            if first != flag:
                raise UsageError(f"{first} and {flag} name the same file, '{printable(str(path))}': name two.")


def write_each(writers: Iterable[Callable[[], None]]) -> list[HookscopeError]:
    """Call every writer, also after one that raises; return the errors."""
    failures: list[HookscopeError] = []
    for write in writers:
        try:
            write()
        except HookscopeError as error:
            failures.append(error)
    return failures


@contextmanager
def sarif_log(path: Path | None, config: Path | None) -> Iterator[None]:
    """Write a log to `path`, if there is one, saying that the check did not finish; `write_sarif` replaces it.

    A run that ends early must not look clean: where the block raises, the log has the reason. Raises OutputError if it
    cannot be written.
    """
    if path is None:
        yield
        return
    from hookscope.results.runs.atomic import check_text_target

    check_text_target(path, "--sarif", "{")
    if path.is_file() or not path.exists():  # what a pipe takes cannot be replaced
        write_sarif(path, (), config, error="hookscope check did not finish: it was killed.", exit_code=EXIT_BUG)
    try:
        yield
    except HookscopeError as error:
        write_sarif(path, (), config, error=str(error), exit_code=error.exit_code)
        raise
    except BaseException as error:
        code = {KeyboardInterrupt: EXIT_INTERRUPTED, Terminated: EXIT_TERMINATED}.get(type(error), EXIT_BUG)
        reason = f"hookscope check did not finish: {exception_line(error)}."
        write_sarif(path, (), config, error=reason, exit_code=code)
        raise


def write_sarif(
    path: Path, reports: "Sequence[CheckReport]", config: Path | None, *, error: str = "", exit_code: int | None = None
) -> None:
    """Write the log whole; see `checks_to_sarif`. Paths are relative to GitHub's checkout, else the working folder."""
    from hookscope.cli.rule_tables import rule_help
    from hookscope.reporting.check_report import repository_file
    from hookscope.reporting.sarif import RuleText, checks_to_sarif
    from hookscope.results.runs.atomic import write_whole
    from hookscope.rules import RULES

    repository = Path(os.environ.get("GITHUB_WORKSPACE") or ".")
    # "owner/repository/.github/workflows/ci.yml@refs/heads/main"
    workflow = os.environ.get("GITHUB_WORKFLOW_REF", "").partition("@")[0].split("/", 2)[-1]
    stand_ins = (config, "hookscope.toml", "pyproject.toml", repository / workflow)
    files = (repository_file(str(stand_in), repository) for stand_in in stand_ins if stand_in is not None)
    rules = [RuleText(rule.identifier, rule.level, rule.meaning, rule_help(rule)) for rule in RULES.values()]
    text = checks_to_sarif(
        reports,
        rules,
        version=version("hookscope"),
        repository=repository,
        instead=next(filter(None, files), ""),
        error=error,
        exit_code=exit_code,
    )
    write_whole(path, text, "--sarif")
