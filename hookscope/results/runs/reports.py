"""Write a report whole or not at all, and never over anything that is not a report of ours."""

import os
import stat
from pathlib import Path

from hookscope.errors import OutputError
from hookscope.regular_files import read_bounded
from hookscope.results.runs.atomic import reason_of, whole_file
from hookscope.text import safe_text

MARK = "<!doctype html>\n<!-- hookscope report -->\n"
"""How every report begins."""


def default_report_path(run: Path) -> Path:
    """Return where a run's report goes by default: beside its folder, "runs/demo.html" for "runs/demo"."""
    folder = run if run.name not in {"", ".."} else Path(os.path.realpath(run))
    return folder.with_name(f"{folder.name}.html") if folder.name else Path("report.html")


def check_report_target(target: Path) -> None:
    """Raise OutputError where something else than a report stands, or nothing can be written; change nothing."""
    try:
        _refuse_foreign(target)
        folder = target.parent
        if not folder.is_dir():
            raise _refusal(target, "there is no such folder")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise _refusal(target, "no permission to write there")
    except ValueError as error:
        raise _refusal(target, "no file can have such a name") from error
    except OSError as error:
        raise _refusal(target, reason_of(error)) from error


def write_report(target: Path, page: str) -> None:
    """Write a page, which begins with `MARK`, beside its target and rename it into place.

    Raises OutputError if it cannot be written, or the target has become something else; an earlier report stays.
    """
    try:
        with whole_file(target) as file:
            file.write(page.encode())
            _refuse_foreign(target)
    except OSError as error:
        raise _refusal(target, reason_of(error)) from error


def _refuse_foreign(target: Path) -> None:
    try:
        mode = target.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISLNK(mode):
        raise _refusal(target, "it is a symbolic link")
    if stat.S_ISDIR(mode):
        raise _refusal(target, "it is a folder")
    if stat.S_ISREG(mode) and read_bounded(target, len(MARK), follow_links=False).startswith(MARK.encode()):
        return
    raise _refusal(target, "it exists and is not a hookscope report")


def _refusal(target: Path, reason: str) -> OutputError:
    return OutputError(safe_text(f"Cannot write to '{target}': {reason}. Name another file."))
