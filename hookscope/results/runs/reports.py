"""Write a report atomically, and never over anything that is not a hookscope report."""

import os
import stat
from pathlib import Path

from hookscope.regular_files import read_bounded
from hookscope.results.runs.atomic import check_writable, refusal, reported, whole_file
from hookscope.results.runs.directory import followed

MARK = "<!doctype html>\n<!-- hookscope report -->\n"
"""The first bytes of every report."""


def default_report_path(run: Path) -> Path:
    """Return the default path of a report: "runs/demo.html" for "runs/demo", and for "runs/latest" that leads to it."""
    folder = followed(run) if run.name not in {"", ".."} else Path(os.path.realpath(run))
    return folder.with_name(f"{folder.name}.html") if folder.name else Path("report.html")


def check_report_target(target: Path) -> None:
    """Raise OutputError if `target` is something other than a report, or cannot be written; change nothing."""
    with reported(target):
        _refuse_foreign(target)
    check_writable(target)


def write_report(target: Path, page: str) -> None:
    """Write a page, which begins with `MARK`, next to its target and rename it into place.

    Raises OutputError, and keeps an earlier report, if the page cannot be written or the target is no report any more.
    """
    with reported(target), whole_file(target) as file:
        file.write(page.encode())
        _refuse_foreign(target)


def _refuse_foreign(target: Path) -> None:
    try:
        mode = target.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISLNK(mode):
        raise refusal(target, "it is a symbolic link")
    if stat.S_ISDIR(mode):
        raise refusal(target, "it is a folder")
    if stat.S_ISREG(mode) and read_bounded(target, len(MARK), follow_links=False).startswith(MARK.encode()):
        return
    raise refusal(target, "it exists and is not a hookscope report")
