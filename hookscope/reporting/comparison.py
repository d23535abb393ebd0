"""What edits changed, as parts of a document."""

import math
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

from hookscope.reporting.columns import NUMBERS, STATISTICS, Column, number_text, prediction_text
from hookscope.reporting.document import Document, Listing, Part, Section, Table
from hookscope.results.comparison import Change, Comparison, Prediction
from hookscope.text import counted, layer_words

# Room on a screen next to the run's own tables.
_FEW_ROWS = 20
_FEW_CLASSES = 5


def comparison_parts(comparison: Comparison) -> list[Part]:
    """Return what edits changed: the rows that changed most, in the order of the run, and a summary of all rows."""
    changes = comparison.changes
    most = sorted(range(len(changes)), key=lambda position: _log_ratio(changes[position]), reverse=True)[:_FEW_ROWS]
    lines = [_changed_words(comparison)]
    lines += [_ratio_line(kind, changes) for kind in dict.fromkeys(change.quantity for change in changes)]
    if comparison.losses is not None:
        lines.append(f"loss {number_text(comparison.losses[0])} → {number_text(comparison.losses[1])}")
    lines += [line for pair in zip(*comparison.predictions, strict=False) for line in _predictions(*pair)]
    kept = [position in {*most} for position in range(len(changes))]
    remark = "Those that changed most, in the order of the run." if len(most) < len(changes) else ""
    return [
        Table(title="Rows that changed", columns=CHANGES, rows=changes, kept=kept, remark=remark, all_in="changes.csv"),
        Listing(title=f"Effect of {', '.join(comparison.edits)}", lines=lines),
    ]


def describe_comparison(comparison: Comparison) -> Document:
    """Describe what edits changed."""
    title = f"Effect of {', '.join(comparison.edits)}"
    sections = [Section("edits", title, comparison_parts(comparison))]
    return Document(title=title, answer=[f"{_changed_words(comparison)}."], sections=sections)


def _changed_words(comparison: Comparison) -> str:
    return f"{len(comparison.changes):,} of {counted(comparison.row_count, 'row')} changed"


def _before_and_after(key: str, rank: int) -> list[Column]:
    """Return a column that people read as "before → after", and the column of "after", which only machines read."""
    before, after = (STATISTICS[key].on(attrgetter(when), key=f"{key}_{when}") for when in ("before", "after"))
    title = before.title if rank else ""
    return [
        replace(before, title=title, rank=rank, shown=lambda row: f"{before.cell(row)} → {after.cell(row)}"),
        replace(after, title=""),
    ]


CHANGES = (
    Column("label", "changed", "row or parameter", 0, words=True),
    Column("quantity", "quantity", "activation or gradient", 2, words=True),
    *_before_and_after("l2", 3),
    Column("l2_ratio", "ratio", "L2 with the edits over that without", 1),
    *_before_and_after("mean", 10),
    *(column for key in NUMBERS if key not in {"l2", "mean"} for column in _before_and_after(key, 0)),
)


def _log_ratio(change: Change) -> float:
    before, after = (None if statistics is None else statistics.l2 for statistics in (change.before, change.after))
    if not before or not after:
        return 0.0 if before == after else math.inf
    return abs(math.log(after) - math.log(before))


def _ratio_line(kind: str, changes: Sequence[Change]) -> str:
    rows = [change for change in changes if change.quantity == kind]
    ratios = [(row.l2_ratio, layer_words(row.label)) for row in rows if row.l2_ratio is not None]
    line = f"{kind}: {counted(len(rows), 'row')}"
    if not ratios:
        return line
    (least, least_at), (most, most_at) = min(ratios), max(ratios)
    if least == most:
        return f"{line}, L2 ratio {number_text(least)}"
    return f"{line}, L2 ratio {number_text(least)} ({least_at}) to {number_text(most)} ({most_at})"


def _predictions(before: Prediction, after: Prediction) -> list[str]:
    name = f"input {before.input_index}"
    if before == after:
        return [f"{name}: the same top classes, with the same probabilities"]
    pairs = ((before, "without"), (after, "with"))
    return [f"{name} {when} edits: {prediction_text(prediction, _FEW_CLASSES)}" for prediction, when in pairs]
