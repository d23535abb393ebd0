"""The SARIF log of `hookscope check`: there from the start, so that a run that ends early does not look clean."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from hookscope.errors import EXIT_BUG, EXIT_INTERRUPTED, HookscopeError
from hookscope.text import exception_line

if TYPE_CHECKING:
    from hookscope.results.check import CheckReport


@contextmanager
def sarif_log(path: Path | None, config: Path | None) -> Iterator[None]:
    """Write to `path` that the check did not finish, until `write_sarif` replaces it; None: do nothing.

    Where the block raises, the log has the reason. Raises OutputError if it cannot be written.
    """
    if path is None:
        yield
        return
    from hookscope.results.runs.atomic import check_writable

    check_writable(path, "--sarif")
    if path.is_file() or not path.exists():  # what a pipe takes cannot be replaced
        write_sarif(path, (), config, error="hookscope check did not finish: it was killed.", exit_code=EXIT_BUG)
    try:
        yield
    except HookscopeError as error:
        write_sarif(path, (), config, error=str(error), exit_code=error.exit_code)
        raise
    except BaseException as error:
        code = EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_BUG
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
