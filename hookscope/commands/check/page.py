"""The page of a check, with the pictures that `--evidence` wrote about failures.

Pictures that cannot be shown are counted, and are no error. No file outside the folder is read, no link is followed.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from hookscope.commands.check.describe import Evidence, describe_checks
from hookscope.errors import InputError
from hookscope.reporting.check_report import by_severity
from hookscope.reporting.html.document import document_html
from hookscope.reporting.html.pictures import BUDGET, data_uri, opened_picture
from hookscope.results.check import CheckReport
from hookscope.results.runs.reading import read_inside
from hookscope.results.runs.record import RunRecord
from hookscope.results.runs.store import checked, parse_json
from hookscope.text import counted

_MAX_RECORD_BYTES = 64 * 2**20


def checks_html(reports: Sequence[CheckReport], *, seconds: float | None = None) -> str:
    """Return the page of the verdicts on all checkpoints; a picture that cannot be read leaves a remark."""
    evidence: dict[str, Evidence] = {}
    room = BUDGET
    for report in by_severity(reports):
        if report.evidence and report.evidence not in evidence:
            evidence[report.evidence] = kept = read_evidence(Path(report.evidence), room)
            room -= kept.byte_count
    document = describe_checks(reports, evidence=evidence, seconds=seconds)
    pictures = {f"{folder}/{path}": uri for folder, kept in evidence.items() for path, uri in kept.pictures.items()}
    return document_html(document, pictures=pictures)


def read_evidence(folder: Path, room: int) -> Evidence:
    """Read the pictures in `CheckReport.evidence`, up to `room` bytes."""
    if os.path.islink(folder):  # noqa: PTH114 - `is_symlink` raises in a folder without permission
        return Evidence(remarks=("Its pictures are not shown. The evidence folder is now a symbolic link.",))
    try:
        content = read_inside(folder, "run.json", _MAX_RECORD_BYTES)
        record: RunRecord = checked(RunRecord, parse_json(content) or {})
    except (ValueError, RecursionError):
        return Evidence(remarks=("Its pictures are not shown. The run.json in the evidence folder is damaged.",))
    except InputError as error:
        return Evidence(remarks=(f"Its pictures are not shown. {error}",))
    wrong = (path for path in record.files if path.startswith("pictures/"))
    pictures: dict[str, str] = {}
    taken = left_out = unreadable = 0
    for path in dict.fromkeys((*(grid.path for grid in record.grids), *wrong)):
        try:
            png = read_inside(folder, path, _MAX_RECORD_BYTES)
            opened_picture(png, path)
        except InputError:
            unreadable += 1
            continue
        if taken + len(png) > room:
            left_out += 1
        else:
            taken += len(png)
            pictures[path] = data_uri(png)
    remarks = (
        f"{counted(left_out, 'picture')} did not fit here: see the folder." if left_out else "",
        f"{counted(unreadable, 'picture')} of the folder cannot be read any more." if unreadable else "",
    )
    grids = [grid for grid in record.grids if grid.path in pictures]
    return Evidence(grids, pictures, taken, [*filter(None, remarks)])
