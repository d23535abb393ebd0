"""Write a report whole or not at all, and never over anything that is not a report of ours."""

import os
import stat
from pathlib import Path

from hookscope.regular_files import read_bounded
from hookscope.results.runs.atomic import check_writable, refusal, reported, whole_file

MARK = "<!doctype html>\n<!-- hookscope report -->\n"
"""How every report begins."""


def default_report_path(run: Path) -> Path:
    """Return where a run's report goes by default: beside its folder, "runs/demo.html" for "runs/demo"."""
    folder = run if run.name not in {"", ".."} else Path(os.path.realpath(run))
    return folder.with_name(f"{folder.name}.html") if folder.name else Path("report.html")


def check_report_target(target: Path) -> None:
    """Raise OutputError where something else than a report stands, or nothing can be written; change nothing."""
    with reported(target):
        _refuse_foreign(target)
    check_writable(target)


def write_report(target: Path, page: str) -> None:
    """Write a page, which begins with `MARK`, beside its target and rename it into place.

    Raises OutputError if it cannot be written, or the target has become something else; an earlier report stays.
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
