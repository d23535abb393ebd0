"""The files of `diff`: the overview, rows as CSV, and grids of A-B."""

from pathlib import Path

from hookscope.commands.diff.columns import WEIGHTS, difference_columns, with_unmatched
from hookscope.commands.diff.describe import describe_differences
from hookscope.commands.grid_files import write_grids
from hookscope.reporting.overviews.document import draw_document
from hookscope.reporting.tables import csv_text, write_tables
from hookscope.results.differences import Differences
from hookscope.results.runs.directory import OVERVIEW, RunFiles
from hookscope.text import counted


def write_differences(folder: Path, result: Differences) -> RunFiles:
    """Write the files of `hookscope diff`."""
    draw_document(describe_differences(result)).save(folder / OVERVIEW, compress_level=6)
    # Of the first input; all channels on one scale, so that those that differ stand out.
    drawn = write_grids(folder, result.maps, len(result.rows), result.inputs[:1], of="A-B", scale="layer")
    differing = sum(bool(row.relative_l2) for row in result.rows)
    of = f" of the {differing:,} rows that differ" if differing > len(drawn) else ""
    words = [f"{counted(len(drawn), 'grid')} of A-B{of}"] if drawn else []
    columns = WEIGHTS if result.way == "weights" else difference_columns(result)
    texts = {"diff.csv": csv_text(columns, with_unmatched(result))}
    if result.gradients:
        texts["gradients.csv"] = csv_text(columns, result.gradients)
    return RunFiles([*words, *write_tables(folder, texts)], {"overview": OVERVIEW, "grids": tuple(drawn)})
