"""Where gradients go as a document: the verdicts, gradients of outputs and parameters over depth and as tables."""

from collections.abc import Sequence
from operator import itemgetter
from statistics import median
from typing import Any

from hookscope.reporting.columns import Column, number_text
from hookscope.reporting.document import DepthChart, Document, Level, Part, Section, Series, Table, Text
from hookscope.reporting.inspected import (
    describe_inspection,
    detailed_layers,
    folded_words,
    headline_of,
    uncalled_layers,
)
from hookscope.reporting.layer_columns import gradient_columns, input_columns, parameter_columns, verdicts_on
from hookscope.results.findings import Finding
from hookscope.results.gradients import GradientRow, Gradients, LossRecord, ParameterRow
from hookscope.results.runs.record import RunRecord
from hookscope.rules import GRADS_RULES

Row = GradientRow | ParameterRow
_WITHOUT = ("no gradient path", "not reached")

_SPREAD = (
    Column("", "grad_output over inputs", "layer", 0, value=itemgetter(0), words=True),
    Column("", "least ‖g‖", "smallest norm over inputs", 2, value=lambda row: min(row[1], default=None)),
    Column("", "median ‖g‖", "median over inputs", 1, value=lambda row: median(row[1]) if row[1] else None),
    Column("", "greatest ‖g‖", "largest norm over inputs", 3, value=lambda row: max(row[1], default=None)),
)


def describe_gradients(result: Gradients, record: RunRecord | None = None) -> Document:
    """Describe the gradients of a run; `record` names the grids of its directory."""
    rows: list[Part] = []
    parameters: list[Part] = []
    charts: list[Part] = []
    if result.loss is not None:
        words = f"Gradients of the loss by layer, {result.mode} mode, in forward order"
        table = _table("Gradients of outputs", gradient_columns, result.gradients, result, words)
        rows = [detailed_layers(result, record, [table]), Text(folded_words(result.gradients))]
        table = _table("Gradients of the loss by parameter", parameter_columns, result.parameters, result)
        parameters = [table if result.parameters else Text(["The network has no parameters."])]
        outputs = [row for row in result.gradients if row.role == "output"]
        charts = [
            _flow("Gradient of the loss by each layer's output", outputs, result),
            _flow("Gradient of the loss by each parameter", result.parameters, result),
            _ratios(result.parameters),
        ]
    return describe_inspection(
        result,
        record,
        f"Gradients of {result.model.name},",
        "gradients",
        f"{result.mode} mode",
        _answer(result),
        [
            Section("depth", "Over depth", charts),
            Section("layers", "Layers", [*rows, uncalled_layers(result.uncalled)]),
            Section("parameters", "Parameters", parameters),
            Section("alone", "Gradients of each input alone", _per_input(result)),
        ],
        [("Mode", result.mode, False)],
    )


def _answer(result: Gradients) -> tuple[list[str], Level]:
    """Return the first finding or that there is none, what was differentiated, and the level."""
    loss = [] if result.loss is None else [loss_words(result.loss)]
    if result.loss is None:
        where = "the loss" if result.failure is None else "the forward pass"
        return [f"No loss and no gradients: {where} raised.", "Gradients were not checked."], "fail"
    if result.verdicts:
        headline, level = headline_of(result.verdicts)
        return [headline, *loss], level
    if result.failure is not None:
        return ["Gradients were not checked: the pass raised.", *loss], "warn"
    rows: list[Row] = [*result.gradients, *result.parameters]
    if all(row.status in _WITHOUT or not row.gradient.element_count for row in rows):
        return ["Gradients were not checked: none arrived.", *loss], "warn"
    return [f"No problems found{result.where_judged or ' in the gradients'} ({len(GRADS_RULES)} rules).", *loss], "good"


def loss_words(loss: LossRecord) -> str:
    """Return what was differentiated: "loss projection = 12.35 · target: noise (seed 0) · output (model)"."""
    parts = [f"loss {loss.name} = {number_text(loss.value)}"]
    parts += [f"target: {loss.target}"] if loss.target else []
    parts += [f"output {', '.join(loss.outputs)}"] if loss.outputs else []
    return " · ".join(parts)


def _flow(title: str, rows: Sequence[Row], result: Gradients) -> DepthChart:
    values = [row.gradient for row in rows]
    failing = {verdict.where for verdict in result.verdicts if verdict.level == "fail"}
    return DepthChart(
        title=title,
        labels=[row.label or "(model)" for row in rows],
        series=[
            Series("largest |g|", [value.max_abs for value in values], "orange"),
            Series("mean |g|", [value.mean_abs for value in values]),
        ],
        marks=[
            ("exactly 0", "fail", [row.status == "zero" for row in rows]),
            ("no gradient", "dim", [row.status in _WITHOUT for row in rows]),
            ("holds NaN or Inf", "fail", [bool(value.nan_count or value.inf_count) for value in values]),
        ],
        ground=("a rule fails", [row.label in failing for row in rows]),
    )


def _ratios(parameters: Sequence[ParameterRow]) -> DepthChart:
    return DepthChart(
        title="Gradient over weight, ratio of L2 norms",
        labels=[row.name for row in parameters],
        series=[Series("ratio", [row.ratio for row in parameters])],
        marks=[("zero or none", "fail", [row.status != "gradient" for row in parameters])],
    )


def _table(title: str, columns: Any, rows: Sequence[Row], result: Gradients, remark: str = "") -> Table:
    """Return a table whose last column holds remarks on each gradient.

    Folding keeps every row that a verdict names, and both ends of a run of rows with NaN, Inf or no statistics.
    """
    verdicts = [verdicts_on(result, row) for row in rows]
    odd = [False, *map(_is_odd, rows), False]
    return Table(
        title=title,
        columns=columns(result),
        rows=rows,
        levels=[*map(_level, rows, verdicts)],
        notable=[
            bool(named) or (odd[place] and not (odd[place - 1] and odd[place + 1]))
            for place, named in enumerate(verdicts, start=1)
        ],
        remark=remark,
    )


def _level(row: Row, verdicts: Sequence[Finding]) -> Level:
    if row.gradient.nan_count or row.gradient.inf_count:
        return "fail"
    if verdicts:
        return verdicts[0].level
    if row.status == "zero" or _is_odd(row):
        return "warn"
    return "" if row.status == "gradient" else "dim"


def _is_odd(row: Row) -> bool:
    return bool(row.gradient.nan_count or row.gradient.inf_count or row.gradient.unmeasured)


def _per_input(result: Gradients) -> list[Table]:
    """Return a table of each input's loss and gradient norm, and one of the spread of norms by layer."""
    inputs = result.inputs_alone
    labels = list(dict.fromkeys(label for gradients in inputs for label in gradients.rows_l2))
    norms = [[norm for gradients in inputs if (norm := gradients.rows_l2.get(label)) is not None] for label in labels]
    return [
        Table(title="Gradients of each input alone", columns=input_columns(inputs), rows=inputs),
        Table(title="Norms over the inputs, by layer", columns=_SPREAD, rows=[*zip(labels, norms, strict=True)]),
    ]
