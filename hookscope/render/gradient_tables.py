"""Gradients as Rich renderables, for people: a table of outputs, a table of parameters, the loss and the verdicts."""

from collections.abc import Sequence
from statistics import median

from rich.console import Group, RenderableType
from rich.text import Text

from hookscope.render.columns import (
    REMARK_WIDTH,
    Drawn,
    counts_that_vary,
    draw,
    integer_text,
    kind_cell,
    non_finite_text,
    number_column,
    number_text,
    percent_text,
    safe_line,
)
from hookscope.render.terminal import (
    LEVEL_STYLES,
    findings_panel,
    folded_lines,
    repeats_words,
    title_lines,
    verification_line,
)
from hookscope.results.activations import Verification
from hookscope.results.findings import Finding
from hookscope.results.gradients import GradientRow, Gradients, InputGradients, LossRecord, ParameterRow
from hookscope.results.statistics import TensorStatistics
from hookscope.text import shape_text


def gradient_table(inspection: Gradients, *, width: int, full: bool = False) -> RenderableType:
    """Return the gradients of outputs, and of inputs if measured, in forward order under a title, fitted to `width`."""
    rows = inspection.gradients
    mode = safe_line(f"Gradients of the loss by layer, {inspection.mode} mode, in forward order")
    title = [*title_lines(inspection), mode]
    if not rows:
        return Group(*title, safe_line("No layer finished."))
    names = [safe_line(row.label + (" (input)" if row.role == "input" else "")) for row in rows]
    statistics = [row.gradient for row in rows]
    columns = [
        Drawn("#", [safe_line(str(row.index)) for row in rows], 12),
        Drawn("layer", names, 0, words=True),
        Drawn("type", [kind_cell(row.kind, full=full) for row in rows], 10, words=True),
        Drawn("shape", [safe_line(shape_text(each.shape)) for each in statistics], 5),
        *_number_columns(statistics),
    ]
    found = [_about(inspection, row.label) if row.role == "output" else [] for row in rows]
    return Group(*title, _flagged_table(columns, rows, found, width, full=full), *folded_lines(rows))


def parameter_table(inspection: Gradients, *, width: int, full: bool = False) -> RenderableType:
    """Return the gradients of the parameters in the order of `named_parameters()`, fitted to `width`."""
    rows = inspection.parameters
    title = safe_line("Gradients of the loss by parameter", style="bold")
    if not rows:
        return Group(title, safe_line("The network has no parameters."))
    statistics = [row.gradient for row in rows]
    columns = [
        Drawn("#", [safe_line(str(row.index)) for row in rows], 12),
        Drawn("parameter", [safe_line(row.name) for row in rows], 0, words=True),
        Drawn("type", [kind_cell(row.kind, full=full) for row in rows], 13, words=True),
        Drawn("shape", [safe_line(shape_text(each.shape)) for each in statistics], 5),
        *_number_columns(statistics),
        number_column("‖w‖", (row.weight_l2 for row in rows), 6),
        number_column("‖g‖/‖w‖", (_if_finite(row.gradient, row.ratio) for row in rows), 1),
    ]
    found = [_about(inspection, row.name) for row in rows]
    return Group(title, _flagged_table(columns, rows, found, width, full=full))


def loss_lines(loss: LossRecord | None, verification: Verification | None) -> RenderableType:
    """Return what was differentiated: "loss projection = 12.35 · target: noise (seed 0) · output (model)"."""
    if loss is None:
        return safe_line("No loss and no gradients: the forward pass raised.", style="bold red")
    parts = [f"loss {loss.name} = {number_text(loss.value)}"]
    parts += [f"target: {loss.target}"] if loss.target else []
    parts += [f"output {', '.join(loss.outputs)}"] if loss.outputs else []
    line = safe_line(" · ".join(parts), style="bold", overflow="fold")
    return line if verification is None else Group(line, verification_line(verification, with_loss=True))


def verdicts_panel(inspection: Gradients) -> RenderableType:
    """Return the verdicts in a frame, the most severe first, or a line if there are none."""
    if not inspection.verdicts:
        if inspection.loss is None or inspection.failure is not None:
            return safe_line("Gradients were not judged: the pass raised.", style="yellow")
        return safe_line("No rule objects to the gradients.", style="green")
    return findings_panel(inspection.verdicts)


def by_input_table(inputs: Sequence[InputGradients], *, width: int, full: bool = False) -> RenderableType:
    """Return each input's loss and gradient norm, and how far the norms spread: over all parameters, and by layer."""
    alone = [
        Drawn("input alone", [safe_line(each.name) for each in inputs], 0, words=True),
        number_column("loss", (each.loss for each in inputs), 1),
        number_column("‖g‖ of parameters", (each.parameters_l2 for each in inputs), 2),
        _no_remarks(len(inputs)),
    ]
    labels = list(dict.fromkeys(label for each in inputs for label in each.rows_l2))
    norms = [[norm for each in inputs if (norm := each.rows_l2.get(label)) is not None] for label in labels]
    spread = [
        Drawn("grad_output over inputs", [safe_line(label) for label in labels], 0, words=True),
        number_column("least ‖g‖", (min(each, default=None) for each in norms), 2),
        number_column("median ‖g‖", (median(each) if each else None for each in norms), 1),
        number_column("greatest ‖g‖", (max(each, default=None) for each in norms), 3),
        _no_remarks(len(labels)),
    ]
    parts: list[RenderableType] = [safe_line("Gradients of each input alone", style="bold")]
    parts += [draw(columns, width, full=full) for columns in (alone, spread) if columns[0].cells]
    return Group(*parts)


def _number_columns(all_statistics: Sequence[TensorStatistics]) -> list[Drawn]:
    columns = [
        Drawn("dtype", [safe_line(each.dtype) for each in all_statistics], 17, words=True),
        number_column("mean |g|", (_if_finite(each, each.mean_abs) for each in all_statistics), 2),
        number_column("max |g|", (_if_finite(each, each.max_abs) for each in all_statistics), 3),
        number_column("L2", (_if_finite(each, each.l2) for each in all_statistics), 4),
        number_column("mean", (_if_finite(each, each.mean) for each in all_statistics), 18),
        number_column("std", (_if_finite(each, each.std) for each in all_statistics), 19),
        Drawn("zeros", [safe_line(percent_text(each.zero_fraction)) for each in all_statistics], 7),
        Drawn("NaN", [safe_line(integer_text(each.nan_count)) for each in all_statistics], 14),
        Drawn("Inf", [safe_line(integer_text(each.inf_count)) for each in all_statistics], 15),
    ]
    return counts_that_vary(columns, all_statistics)


def _if_finite(statistics: TensorStatistics, value: float | None) -> float | None:
    """Return a statistic, or None where some values are NaN or Inf: of the others alone it would mislead."""
    return None if statistics.nan_count or statistics.inf_count else value


def _flagged_table(
    columns: Sequence[Drawn],
    rows: Sequence[GradientRow | ParameterRow],
    verdicts: Sequence[Sequence[Finding]],
    width: int,
    *,
    full: bool,
) -> RenderableType:
    """Return a table whose last column holds remarks on each gradient.

    Folding keeps every row that a verdict names, and both ends of a run of rows with NaN, Inf or no statistics.
    """
    styles = [_row_style(row, found) for row, found in zip(rows, verdicts, strict=True)]
    remarks = [
        safe_line(_remarks(row, found, full=full), style=style)
        for row, found, style in zip(rows, verdicts, styles, strict=True)
    ]
    last = Drawn("remarks", remarks, 11, words=True, max_width=REMARK_WIDTH * (1 + full))
    odd = [False, *(_is_odd(row.gradient) for row in rows), False]
    notable = [
        bool(found) or (odd[position] and not (odd[position - 1] and odd[position + 1]))
        for position, found in enumerate(verdicts, start=1)
    ]
    return draw([*columns, last], width, styles, notable, full=full)


def _remarks(row: GradientRow | ParameterRow, verdicts: Sequence[Finding], *, full: bool) -> str:
    """Return the line of an operation, verdicts, and a status that is not ordinary; in full, repeated rows too."""
    statistics = row.gradient
    words = [
        row.source if isinstance(row, GradientRow) else "",
        *(verdict.rule for verdict in verdicts),
        row.status if row.status not in ("gradient", "unknown") else "",
        "frozen" if isinstance(row, ParameterRow) and not row.trainable else "",
        non_finite_text(statistics),
        f"unmeasured: {statistics.unmeasured}" if statistics.unmeasured else "",
    ]
    if isinstance(row, GradientRow):
        words += [row.remark, *(repeats_words(row) if full else ())]
    return "; ".join(filter(None, words))


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


def _about(inspection: Gradients, place: str) -> list[Finding]:
    """Return the verdicts on a row: one on the whole network, without a place, is on none."""
    return [verdict for verdict in inspection.verdicts if place and place in verdict.places]


def _no_remarks(count: int) -> Drawn:
    return Drawn("remarks", [Text()] * count, 9, words=True)
