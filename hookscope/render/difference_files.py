"""The run directory of `diff`: the overview, rows as CSV and JSON, and grids of A-B."""

from dataclasses import replace
from pathlib import Path

from hookscope.errors import UsageError
from hookscope.render import grids
from hookscope.render.difference_columns import WEIGHTS, difference_columns, rows_with_those_alone
from hookscope.render.differences import describe_differences
from hookscope.render.overviews.document import draw_document
from hookscope.render.tables import csv_text
from hookscope.results.differences import Differences
from hookscope.results.grids import Grid
from hookscope.results.runs.directory import OVERVIEW, SavedRun, new_run
from hookscope.results.runs.record import record_of
from hookscope.results.runs.store import write_result
from hookscope.text import counted


def save_differences(result: Differences, path: str | Path, *, command: str = "", numbered: bool = False) -> SavedRun:
    """Write a result as `hookscope diff` does: whole or not at all, and over nothing but an earlier run.

    If `numbered`, a number is appended to the path rather than a run of another command replaced.

    Raises:
        UsageError: If there is nothing to save.
        OutputError: If something cannot be written.
    """
    provenance = result.provenance
    if provenance is None:
        raise UsageError("This comparison was not made of a run, so it cannot be saved as one.")
    with new_run(Path(path), numbered=numbered) as run:
        draw_document(describe_differences(result)).save(run.path / OVERVIEW, compress_level=6)
        drawn = _draw_grids(run.path, result)
        names = [*_write_tables(run.path, result), *write_result(run.path, result)]
        folder = run.finish(record_of("diff", command, provenance, overview=OVERVIEW, grids=tuple(drawn)))
    differing = sum(row.measures is not None and row.measures.relative_l2 != 0 for row in result.rows)
    of = f" of the {differing:,} rows that differ" if differing > len(drawn) else ""
    grids_of = [f"{counted(len(drawn), 'grid')} of A-B{of}"] if drawn else []
    return SavedRun(folder, (*grids_of, *names))


def _draw_grids(folder: Path, result: Differences) -> list[Grid]:
    """Draw A-B of each row that has maps, all channels on one scale, so that those that differ stand out."""
    drawn = []
    if result.maps:
        (folder / "grids").mkdir()
    for each in result.maps:
        name = f"grids/{grids.grid_name(each, len(result.rows))}"
        titled = replace(each, label=f"{each.label or '(model)'}: A-B")
        picture, grid = grids.draw_for_run(titled, name, scale="layer", input_name=result.inputs[each.input_index].name)
        (folder / name).write_bytes(grids.encode_png(picture))
        drawn.append(grid)
    return drawn


def _write_tables(folder: Path, result: Differences) -> list[str]:
    columns = WEIGHTS if result.way == "weights" else difference_columns(result)
    texts = {"diff.csv": csv_text(columns, rows_with_those_alone(result))}
    if result.gradients:
        texts["gradients.csv"] = csv_text(columns, result.gradients)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [*texts]
