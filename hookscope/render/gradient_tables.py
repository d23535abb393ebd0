"""Gradients as Rich renderables, for people: a table of outputs, a table of parameters, the loss and the verdicts."""

from collections.abc import Sequence
from operator import itemgetter
from statistics import median
from typing import Any

from rich.console import Group, RenderableType

from hookscope.render.columns import Column, draw_table, number_text, safe_line
from hookscope.render.layer_columns import gradient_columns, parameter_columns, verdicts_on
from hookscope.render.terminal import LEVEL_STYLES, about_lines, findings_panel, folded_lines, title_lines, verified
from hookscope.results.activations import Verification
from hookscope.results.findings import Finding
from hookscope.results.gradients import GradientRow, Gradients, InputGradients, LossRecord, ParameterRow
from hookscope.results.statistics import TensorStatistics


def gradient_table(inspection: Gradients, *, width: int, full: bool = False) -> RenderableType:
    """Return the gradients of outputs, and of inputs if measured, in forward order under a title, fitted to `width`."""
    rows = inspection.gradients
    mode = safe_line(f"Gradients of the loss by layer, {inspection.mode} mode, in forward order")
    title = [*title_lines(inspection), mode]
    if not rows:
        return Group(*title, safe_line("No layer finished."))
    columns = gradient_columns(inspection, full=full)
    return Group(*title, _flagged_table(columns, rows, inspection, width, full=full), *folded_lines(rows))


def parameter_table(inspection: Gradients, *, width: int, full: bool = False) -> RenderableType:
    """Return the gradients of the parameters in the order of `named_parameters()`, fitted to `width`."""
    rows = inspection.parameters
    title = safe_line("Gradients of the loss by parameter", style="bold")
    if not rows:
        return Group(title, safe_line("The network has no parameters."))
    columns = parameter_columns(inspection, full=full)
    return Group(title, _flagged_table(columns, rows, inspection, width, full=full))


def loss_lines(loss: LossRecord | None, verification: Verification | None) -> RenderableType:
    """Return what was differentiated: "loss projection = 12.35 · target: noise (seed 0) · output (model)"."""
    if loss is None:
        return safe_line("No loss and no gradients: the forward pass raised.", style="bold red")
    parts = [f"loss {loss.name} = {number_text(loss.value)}"]
    parts += [f"target: {loss.target}"] if loss.target else []
    parts += [f"output {', '.join(loss.outputs)}"] if loss.outputs else []
    line = safe_line(" · ".join(parts), style="bold", overflow="fold")
    return line if verification is None else Group(line, *about_lines([verified(verification, with_loss=True)]))


def verdicts_panel(inspection: Gradients) -> RenderableType:
    """Return the verdicts in a frame, the most severe first, or a line if there are none."""
    if not inspection.verdicts:
        if inspection.loss is None or inspection.failure is not None:
            return safe_line("Gradients were not judged: the pass raised.", style="yellow")
        return safe_line("No rule objects to the gradients.", style="green")
    return findings_panel(inspection.verdicts)


_ALONE = (
    Column("name", "input alone", "input", 0, words=True),
    Column("loss", "loss", "its loss", 1),
    Column("parameters_l2", "‖g‖ of parameters", "L2 norm of the gradients of all parameters", 2),
)
_SPREAD = (
    Column("", "grad_output over inputs", "layer", 0, value=itemgetter(0), words=True),
    Column("", "least ‖g‖", "smallest norm over inputs", 2, value=lambda row: min(row[1], default=None)),
    Column("", "median ‖g‖", "median over inputs", 1, value=lambda row: median(row[1]) if row[1] else None),
    Column("", "greatest ‖g‖", "largest norm over inputs", 3, value=lambda row: max(row[1], default=None)),
)


def by_input_table(inputs: Sequence[InputGradients], *, width: int, full: bool = False) -> RenderableType:
    """Return each input's loss and gradient norm, and how far the norms spread: over all parameters, and by layer."""
    labels = list(dict.fromkeys(label for each in inputs for label in each.rows_l2))
    norms = [[norm for each in inputs if (norm := each.rows_l2.get(label)) is not None] for label in labels]
    parts: list[RenderableType] = [safe_line("Gradients of each input alone", style="bold")]
    tables: list[tuple[Sequence[Column], Sequence[Any]]] = [
        (_ALONE, inputs),
        (_SPREAD, [*zip(labels, norms, strict=True)]),
    ]
    parts += [draw_table(columns, rows, width, full=full) for columns, rows in tables if rows]
    return Group(*parts)


def _flagged_table(
    columns: Sequence[Column],
    rows: Sequence[GradientRow | ParameterRow],
    inspection: Gradients,
    width: int,
    *,
    full: bool,
) -> RenderableType:
    """Return a table whose last column holds remarks on each gradient.

    Folding keeps every row that a verdict names, and both ends of a run of rows with NaN, Inf or no statistics.
    """
    found = [verdicts_on(inspection, row) for row in rows]
    odd = [False, *(_is_odd(row.gradient) for row in rows), False]
    notable = [
        bool(verdicts) or (odd[position] and not (odd[position - 1] and odd[position + 1]))
        for position, verdicts in enumerate(found, start=1)
    ]
    return draw_table(columns, rows, width, [*map(_row_style, rows, found)], notable, full=full)


def _row_style(row: GradientRow | ParameterRow, verdicts: Sequence[Finding]) -> str:
    if row.gradient.nan_count or row.gradient.inf_count:
        return LEVEL_STYLES["fail"]
    if verdicts:
        return LEVEL_STYLES[verdicts[0].level]
    if row.status == "zero" or _is_odd(row.gradient):
        return LEVEL_STYLES["warn"]
    return "" if row.status == "gradient" else "dim"


def _is_odd(statistics: TensorStatistics) -> bool:
    return bool(statistics.nan_count or statistics.inf_count or statistics.unmeasured)
