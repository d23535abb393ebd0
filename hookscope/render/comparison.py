"""What edits changed, as a Rich table."""

import math
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

from rich.console import Group, RenderableType
from rich.table import Table

from hookscope.render.columns import NUMBERS, STATISTICS, Column, draw_table, number_text, prediction_text, safe_line
from hookscope.results.comparison import Change, Comparison, Prediction
from hookscope.text import counted

# What a screen has room for beside the tables of the run itself.
_FEW_ROWS = 20
_FEW_INPUTS = 10
_FEW_CLASSES = 5


def comparison_report(comparison: Comparison, *, width: int, full: bool = False) -> RenderableType:
    """Return what edits changed: the rows that changed most, in the order of the run, and how far all of them did."""
    changes = comparison.changes
    most = sorted(range(len(changes)), key=lambda position: _amount(changes[position]), reverse=True)
    shown = changes if full else [changes[position] for position in sorted(most[:_FEW_ROWS])]
    parts: list[RenderableType] = [safe_line(f"Effect of {', '.join(comparison.edits)}", style="bold", overflow="fold")]
    if shown:
        parts.append(draw_table(CHANGES, shown, width))
    summary = f"{len(changes):,} of {counted(comparison.row_count, 'row')} changed"
    if len(shown) < len(changes):
        summary += f", the {len(shown)} above most; --full shows all"
    parts.append(safe_line(summary, style="bold"))
    parts += [
        safe_line(_range(what, changes), overflow="fold") for what in dict.fromkeys(change.what for change in changes)
    ]
    if comparison.losses is not None:
        parts.append(safe_line(f"loss {number_text(comparison.losses[0])} → {number_text(comparison.losses[1])}"))
    pairs = list(zip(*comparison.predictions, strict=False))
    parts += [_predictions(*pair) for pair in (pairs if full else pairs[:_FEW_INPUTS])]
    if len(pairs) > _FEW_INPUTS and not full:
        hidden = counted(len(pairs) - _FEW_INPUTS, "more input")
        parts.append(safe_line(f"… {hidden}, --full shows all", style="dim"))
    return Group(*parts)


def _changed(key: str, rank: int) -> list[Column]:
    """Return the column of a statistic before, whose text has the one after as well, and that for machines."""
    before, after = (STATISTICS[key].on(attrgetter(when), key=f"{key}_{when}") for when in ("before", "after"))
    title = before.title if rank else ""
    return [
        replace(before, title=title, rank=rank, shown=lambda row: f"{before.cell(row)} → {after.cell(row)}"),
        replace(after, title=""),
    ]


CHANGES = (
    Column("label", "changed", "row or parameter", 0, words=True),
    Column("what", "what", "what of it", 2, words=True),
    *_changed("l2", 3),
    Column("l2_ratio", "ratio", "L2 with the edits over that without", 1),
    *_changed("mean", 10),
    *(column for key in NUMBERS if key not in {"l2", "mean"} for column in _changed(key, 0)),
)


def _amount(change: Change) -> float:
    """Return how far a row's L2 norm has changed, as the magnitude of the logarithm of its ratio."""
    before, after = (None if each is None else each.l2 for each in (change.before, change.after))
    if not before or not after:
        return 0.0 if before == after else math.inf
    return abs(math.log(after) - math.log(before))


def _range(what: str, changes: Sequence[Change]) -> str:
    """Return one line on all rows of a kind: between what ratios their L2 norms changed, and where those are."""
    rows = [change for change in changes if change.what == what]
    known = [(row.l2_ratio, row.label) for row in rows if row.l2_ratio is not None]
    line = f"{what}: {counted(len(rows), 'row')}"
    if not known:
        return line
    (least, least_at), (most, most_at) = min(known), max(known)
    if least == most:
        return f"{line}, L2 times {number_text(least)}"
    return f"{line}, L2 times {number_text(least)} ({least_at}) to {number_text(most)} ({most_at})"


def _predictions(before: Prediction, after: Prediction) -> RenderableType:
    if before == after:
        return safe_line(f"input {before.input_index}: the same top classes, with the same probabilities")
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for prediction, which in ((before, "without"), (after, "with")):
        classes = prediction_text(prediction, _FEW_CLASSES)
        grid.add_row(f"input {prediction.input_index} {which} edits:", safe_line(classes))
    return grid
