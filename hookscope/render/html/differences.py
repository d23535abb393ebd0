"""A run of `diff` as one HTML page: the answer, the difference over depth, maps of A-B, and every row."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from hookscope.render.columns import Column
from hookscope.render.difference_columns import WEIGHTS, difference_columns
from hookscope.render.differences_text import answer, first_mark, sides_text
from hookscope.render.html.figures import FRAME, Figure, logarithmic
from hookscope.render.html.page import PageTable, page_table, render_page
from hookscope.render.html.pictures import thumbnail_uri
from hookscope.render.terminal import model_words
from hookscope.render.weights_text import (
    differs,
    gradients_answer,
    weights_answer,
)
from hookscope.results.differences import Differences, Measures, Side
from hookscope.results.grids import Grid
from hookscope.results.runs.reading import StoredRun
from hookscope.text import are, counted

# Rows, above which a browser takes long to lay a table out; pixels a side.
_MOST_ROWS = 5000
_MOST_GRIDS = 12
_GRID_SIDE = 1100


def differences_html(run: StoredRun[Differences]) -> str:
    """Return the page of a run; an InputError is raised if a picture of it is missing, or none."""
    result = run.result
    of_weights = result.way == "weights"
    return render_page(
        "differences.html",
        {},
        title=f"{sides_text(result)} · what differs",
        sentences=list(weights_answer(result) if of_weights else answer(result)),
        sides=[(letter, side, _about(side, result)) for letter, side in (("A", result.a), ("B", result.b))],
        random=[letter for letter, side in (("A", result.a), ("B", result.b)) if side.model.random],
        result=result,
        figure=_over_tensors(result) if of_weights else _over_layers(result),
        frame=FRAME,
        grids=[_grid(run, each) for each in run.record.grids[:_MOST_GRIDS]],
        tables=[*_tables(result)],
        making=_making(run),
    )


def _over_layers(result: Differences) -> Figure | None:
    """Return the relative L2 norm of A-B over depth, with what layers add; both errors if there is a reference."""
    rows, begins = result.rows, {each.row for each in result.first_differences}
    lines = [("A and B", [_norm(row.measures) for row in rows])]
    if any(row.added for row in rows):
        lines.insert(0, ("added by the layer", [_norm(row.added) for row in rows]))
    if result.reference:
        lines = [("B and reference", [row.error_b for row in rows]), ("A and reference", [row.error for row in rows])]
    labels = [row.label for row in rows]
    names, marked = [label or "(model)" for label in labels], [label in begins for label in labels]
    return logarithmic("Relative L2 norm of the difference", names, labels, lines, marked, "a difference begins")


def _over_tensors(result: Differences) -> Figure | None:
    names = [each.name for each in result.weights]
    lines = [("A and B", [_norm(each.measures) for each in result.weights])]
    unlike = [each.measures is None for each in result.weights]
    return logarithmic("Relative L2 norm of A-B", names, names, lines, unlike, "shapes differ")


def _norm(measures: Measures | None) -> float | None:
    return measures.relative_l2 if measures is not None and math.isfinite(measures.relative_l2) else None


def _grid(run: StoredRun[Differences], grid: Grid) -> dict[str, str]:
    begins = {first.row for first in run.result.first_differences}
    row = next(row for row in run.result.rows if row.index == grid.row)
    return {
        "name": row.label or "(model)",
        "remark": first_mark(run.result) if row.label in begins else "",
        "caption": ", ".join(grid.caption),
        "uri": thumbnail_uri(run.read_picture(grid.path), grid.path, _GRID_SIDE),
    }


def _about(side: Side, result: Differences) -> str:
    """Return what a side is and how it ran."""
    if result.way == "weights":
        return f"{side.model.weights}, {side.dtype}"
    stored = [f"the run {side.run}"] if side.run else []
    drawn = [f"weights {side.model.weights}"] if side.model.random else []
    return ", ".join((model_words(side.model), *drawn, side.device, side.dtype, *side.ways, *stored))


def _tables(result: Differences) -> Iterator[PageTable]:
    begins = {first.row for first in result.first_differences}
    columns = difference_columns(result)
    if result.rows:
        yield _table("Layers", "", columns, result.rows, [row.label in begins for row in result.rows])
    if result.gradients:
        notable = [row.label == result.first_gradient_difference for row in result.gradients]
        yield _table("Gradients", gradients_answer(result), columns, result.gradients, notable)
    changed = [row for row in result.weights if differs(row)]
    equal = len(result.weights) - len(changed)
    remark = f"{counted(equal, 'tensor')} that {are(equal)} equal {are(equal)} left out." if equal else ""
    if changed:
        yield _table("Tensors", remark, WEIGHTS, changed, ())


def _table(
    title: str, remark: str, columns: Sequence[Column], rows: Sequence[Any], notable: Sequence[bool]
) -> PageTable:
    if len(rows) > _MOST_ROWS:
        remark = f"{remark} The first {_MOST_ROWS:,} of {len(rows):,} rows; diff.csv has all.".strip()
    return page_table(title, columns, rows[:_MOST_ROWS], notable=notable, remark=remark)


def _making(run: StoredRun[Differences]) -> list[tuple[str, str]]:
    """Return what is needed to reproduce the comparison: term and words, set as code."""
    record, result = run.record, run.result
    made = [("Command", record.command)] if record.command else []
    for letter, side in (("A", result.a), ("B", result.b)):
        made.append((f"Weights of {letter}", side.model.weights))
        made += [(f"SHA-256 of {letter}", side.model.sha256)] if side.model.sha256 else []
    made += [(f"SHA-256 of {each.name}", each.sha256) for each in result.inputs[:8] if each.sha256]
    versions = ", ".join(f"{name} {number}" for name, number in record.versions.items())
    return [*made, ("Seed", str(result.seed)), ("Versions", versions), ("Platform", record.platform)]
