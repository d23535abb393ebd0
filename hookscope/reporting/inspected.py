"""What documents of `activations` and `grads` share: findings, inputs, and the table of layers with their details."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

from hookscope.parameters import arg
from hookscope.reporting.check_report import level_counts
from hookscope.reporting.columns import (
    NUMBERS,
    STATISTICS,
    Column,
    number_text,
    prediction_text,
    quantile_text,
    sparkline,
    statistics,
)
from hookscope.reporting.comparison import comparison_parts
from hookscope.reporting.cost_text import COSTS
from hookscope.reporting.document import (
    DetailedRow,
    DetailedTable,
    Document,
    Facts,
    Findings,
    Level,
    Listing,
    Part,
    Picture,
    Pictures,
    Section,
    Table,
    Text,
    line_of,
)
from hookscope.reporting.layer_columns import GRADIENT, HIST, layer_columns, token_table_of
from hookscope.reporting.overlays import input_picture
from hookscope.reporting.run_facts import all_facts, input_names, making_of, short_name, size_words, subject_of
from hookscope.results.activations import Activations, Flag, LayerRow, UncalledLayer
from hookscope.results.cost import ModuleCost
from hookscope.results.costs_of_rows import rows_with_costs
from hookscope.results.distribution import BIN_COUNT, EXACT_LIMIT, QUANTILE_ERROR
from hookscope.results.findings import Finding
from hookscope.results.gradients import GradientRow, Gradients, ParameterRow
from hookscope.results.grids import Grid
from hookscope.results.inputs import InputRecord
from hookscope.results.runs.record import RunRecord
from hookscope.results.statistics import QUANTILE_LEVELS, TensorStatistics
from hookscope.text import counted, shape_text, some_of

Inspection = Activations | Gradients

_MOST_CALLS = 32  # listed in the details of each call; all of them would grow with the square
_OPEN_PICTURES = 4
_THUMBNAIL = 448  # pixels a side
_MOST_STEPS = 8  # ways in which inputs were prepared

NOTABLE_FLAGS: Mapping[Flag, tuple[Level, str]] = {
    "non-finite": ("fail", "NaN or Inf in"),
    "all zero": ("warn", "All zero:"),
    "constant": ("warn", "The same value everywhere:"),
    "dead channels": ("warn", "Half of the channels or more are 0 everywhere in"),
    "unmeasured": ("warn", "Not measured:"),
}
"""Flags that call for a look, the most severe first, each with the level of its rows and the words before their names.

The other flags say how a layer works."""

# The highest ranks of columns that a page shows at first: of outputs, gradients and costs.
_VALUE_RANK, _GRADIENT_RANK, _COST_RANK = 16, 4, 6
_ROOM_FOR_GRADIENTS = frozenset({"std", "min", "max"})


def headline_of(verdicts: Sequence[Finding]) -> tuple[str, Level]:
    """Return where NaN starts, or the first finding, with how many there are, and the level of the most severe.

    "NaN starts at 'log' (net.py:18): 3 failures.", "3 warnings; first: dead-channels at 'relu'."
    """
    counts = level_counts(verdicts)
    level: Level = "fail" if any(verdict.level == "fail" for verdict in verdicts) else "warn"
    causes = [verdict for verdict in verdicts if (verdict.rule, verdict.level) == ("non-finite-activation", "fail")]
    if causes:
        return f"{causes[0].message.partition(', the first output')[0].rstrip('.')}: {counts}.", level
    first = verdicts[0]
    where = f" at '{first.where}'" if first.where else ""
    return f"{counts}{': ' if len(verdicts) == 1 else '; first: '}{first.rule}{where}.", level


def describe_inspection(
    result: Inspection,
    record: RunRecord | None,
    title: str,
    pages: str,
    size: str,
    answer: tuple[Sequence[str], Level],
    sections: Sequence[Section],
    facts: Facts = (),
) -> Document:
    """Describe a run: its answer with the level, its inputs, the given sections, and what edits changed.

    The names of inputs follow `title`. `pages` is what the page is about, `size` ends the subtitle, and `facts` come
    before the device.
    """
    sentences, level = answer
    inputs = result.inputs
    names = [*dict.fromkeys(map(short_name, inputs))]
    named = f"{counted(len(inputs), 'input')}, {names[0]}" if len(names) == 1 < len(inputs) else some_of(names, 3)
    first = f"{short_name(inputs[0])}: {size_words(inputs[0])}" if inputs else "no input"
    summaries = result.map_summaries if isinstance(result, Activations) else ()
    shown = min((summary.input_index for summary in summaries), default=0)
    edited = "" if result.comparison is None else f"With {counted(len(result.comparison.edits), 'edit')}: "
    edits = [("Edits", "; ".join(record.edits), True)] if record is not None and record.edits else []
    grids = f", {counted(len(record.grids), 'grid')}" if record is not None and record.grids else ""
    *settings, time = all_facts(result, *facts)
    rows = ("Rows", f"{counted(len(result.rows), 'output')}{grids}", False)
    findings = Findings(findings=[line_of(verdict, where=verdict.where) for verdict in result.verdicts])
    seen = Section("inputs", "Inputs and predictions" if result.predictions else "Inputs", [*_inputs(result, record)])
    changes = [] if result.comparison is None else comparison_parts(result.comparison)
    return Document(
        title=f"{title} {named}",
        subtitle=f"{first}  ·  {size}",
        page_title=f"{result.model.name} · {pages} · {some_of(names, 1)}",
        about=subject_of(result),
        answer=[f"{edited}{sentences[0]}", *sentences[1:]],
        level=level,
        input=partial(input_picture, result, shown) if inputs else None,
        warnings=result.warnings,
        notes=result.notes,
        facts=[*settings, rows, time, *edits],
        sections=[
            Section("findings", "Findings", [findings]),
            seen,
            *sections,
            Section("edits", "What the edits changed", changes),
        ],
        making=making_of(result),
        main="layers",
    )


def uncalled_layers(uncalled: Sequence[UncalledLayer]) -> Listing:
    """Return the selected layers without a row, each with the reason."""
    lines = [f"{layer.layer or '(model)'} ({layer.kind}): {layer.reason}" for layer in uncalled]
    return Listing(title=f"Without a row: {counted(len(lines), 'selected layer')}", lines=lines)


def _inputs(result: Inspection, record: RunRecord | None) -> Iterator[Part]:
    names = input_names(result.inputs)
    files = [*(record.thumbnails if record is not None else ()), *[None] * len(result.inputs)]
    pictured = [(item, file) for item, file in zip(result.inputs, files, strict=False) if file]
    others: dict[str, list[str]] = defaultdict(list)
    for item, file in zip(result.inputs, files, strict=False):
        if not file:
            others[size_words(item)].append(short_name(item))
    pictures = [
        Picture(
            name=item.name,
            remark=size_words(item),
            caption=f"{item.name}, as the network saw it",
            file=str(file),
            is_open=place < _OPEN_PICTURES,
        )
        for place, (item, file) in enumerate(pictured)
    ]
    yield Pictures("Inputs", "", pictures, side=_THUMBNAIL)
    prepared = {"; ".join(item.steps): item for item in reversed(result.inputs) if item.steps}
    counts = {size: f" ({counted(len(same), 'input')})" if len(same) > 1 else "" for size, same in others.items()}
    yield Text(
        [
            *(f"{some_of([*dict.fromkeys(same)], 3)}{counts[size]}: {size}." for size, same in others.items()),
            *(f"{short_name(item)}: {steps}." for steps, item in [*prepared.items()][::-1][:_MOST_STEPS]),
        ],
        is_extra=True,
    )
    lines = [f"{names[prediction.input_index]}: {prediction_text(prediction)}" for prediction in result.predictions]
    yield Listing(title="Best classes", lines=lines)


def folded_words(rows: Sequence[LayerRow] | Sequence[GradientRow]) -> list[str]:
    """Return a line on the rows that repeat others and are not shown; none if there are none."""
    count = sum(len(row.duplicates) for row in rows)
    words = "row repeats another and is" if count == 1 else "rows repeat others and are"
    return [f"{count:,} {words} not shown: {arg('repeats')} shows all"] if count else []


@dataclass(frozen=True, slots=True)
class _Layer:
    row: LayerRow
    gradient: GradientRow | None
    input_gradients: Sequence[GradientRow]
    parameters: Sequence[ParameterRow]
    findings: Sequence[Finding]  # those about the layer or one of its parameters
    cost: ModuleCost | None
    grids: Sequence[Grid]

    @property
    def flags(self) -> list[tuple[str, bool]]:
        """Each flag, and whether it calls for a look; rules that name the layer among them."""
        named = [(rule, True) for rule in dict.fromkeys(finding.rule for finding in self.findings)]
        return named + [(flag, flag in (*NOTABLE_FLAGS, "massive activations")) for flag in self.row.flags]


def detailed_layers(result: Inspection, record: RunRecord | None, tables: Sequence[Table]) -> DetailedTable | Text:
    """Return the table of layers of a page, or that there is none; a terminal prints `tables`."""
    if not (result.gradients if isinstance(result, Gradients) else result.rows):
        return Text(["No layer finished."])
    return DetailedTable(
        columns=[*_page_columns(result)],
        rows=lambda: _detailed_rows(result, record),
        tables=tables,
        strips="Gradient maps" if isinstance(result, Gradients) else "Feature maps",
    )


def _page_columns(result: Inspection) -> Iterator[tuple[Column, bool]]:
    is_backward = isinstance(result, Gradients)
    row, gradient, cost = attrgetter("row"), attrgetter("gradient"), attrgetter("cost")
    outputs = {column.title: column for column in layer_columns(result.rows)[1:-1] if column.title and column.rank}
    for column in outputs.values():
        is_seen = column.rank <= _VALUE_RANK and not (is_backward and column.key in _ROOM_FOR_GRADIENTS)
        lifted = column.on(row)
        if column.key == "shape":
            lifted = replace(lifted, value=lambda layer: layer.row.activation.element_count)
        yield lifted, is_seen
    if is_backward:
        status = Column("status", "gradient", "status", 1, words=True, usual="gradient")
        for column in (*GRADIENT[2:], status):
            title = f"{column.title} of g" if column.title in outputs else column.title
            about = f"{column.meaning} of the gradient"
            lifted = column.on(gradient, key=f"gradient_{column.key}", title=title, meaning=about)
            yield lifted, column.rank <= _GRADIENT_RANK
    elif isinstance(result, Activations) and result.cost is not None:
        for column in COSTS:
            lifted = column.on(cost, blank="")
            if column.key == "receptive_field":
                lifted = replace(lifted, value=_field_size)
            yield lifted, column.rank <= _COST_RANK


def _field_size(layer: "_Layer") -> float | None:
    field = layer.cost.receptive_field if layer.cost is not None else None
    return None if field is None else math.prod(field.size)


def _detailed_rows(result: Inspection, record: RunRecord | None) -> list[DetailedRow]:
    layers = _layers(result, record)
    shown = {name: layer.row for layer in layers for name in (*layer.row.duplicates, layer.row.label)}
    takers: dict[str, dict[str, LayerRow]] = defaultdict(dict)
    calls: dict[str, list[LayerRow]] = defaultdict(list)
    for layer in layers:
        calls[layer.row.layer].append(layer.row)
        for source in layer.row.inputs:
            if source in shown:
                takers[shown[source].label][layer.row.label] = layer.row
    places: dict[str, int] = defaultdict(int)
    rows = []
    for layer in layers:
        row, place = layer.row, places[layer.row.layer]
        places[row.layer] += 1
        near = [("computed from", name, shown.get(name)) for name in row.inputs if name]
        near += [("taken by", other.label, other) for other in takers[row.label].values()]
        first = min(max(place - _MOST_CALLS // 2, 0), max(len(calls[row.layer]) - _MOST_CALLS, 0))
        others = [other for other in calls[row.layer][first : first + _MOST_CALLS] if other is not row]
        near += [("another call", other.label, other) for other in others]
        rows.append(_detailed(layer, near, len(calls[row.layer]), result.inputs))
    return rows


def _layers(result: Inspection, record: RunRecord | None) -> list[_Layer]:
    gradients: Sequence[GradientRow] = result.gradients if isinstance(result, Gradients) else ()
    outputs = {gradient.label: gradient for gradient in gradients if gradient.role == "output"}
    inputs: dict[tuple[str, int], list[GradientRow]] = defaultdict(list)
    for gradient in gradients:
        if gradient.role == "input":
            inputs[gradient.layer, gradient.call].append(gradient)
    owned: dict[str, list[ParameterRow]] = defaultdict(list)
    for parameter in result.parameters if isinstance(result, Gradients) else ():
        owned[parameter.layer].append(parameter)
    labels = {row.index: row.label for row in gradients or result.rows}
    grids: dict[str, list[Grid]] = defaultdict(list)
    for grid in record.grids if record is not None else ():
        grids[labels[grid.row]].append(grid)
    verdicts: dict[str, list[Finding]] = defaultdict(list)
    for verdict in result.verdicts:
        for place in verdict.places:
            verdicts[place].append(verdict)
    layers = []
    for row, cost in rows_with_costs(result.rows, result.cost if isinstance(result, Activations) else None):
        parameters, of_inputs = owned[row.layer], inputs[row.layer, row.call]
        places = (row.label, *(parameter.name for parameter in parameters))
        findings = [*dict.fromkeys(verdict for place in places for verdict in verdicts[place])]
        own = outputs.get(row.label)
        layers.append(_Layer(row, own, of_inputs, parameters, findings, cost, grids[row.label]))
    return layers


_CONNECTED = (
    Column("", "how", "how it is connected", 1, value=itemgetter(0), words=True),
    Column("", "row", "row", 0, value=itemgetter(1), words=True),
    *(
        STATISTICS[key].on(lambda near: near[2] and near[2].activation, rank=rank)
        for rank, key in enumerate(("shape", "mean", "std"), 2)
    ),
)
_INPUTS = (Column("slot", "input", "input", 0, shown=lambda row: row.slot or "input", words=True),)
_STATUS = Column("status", "gradient", "status", 1, words=True)


def _detailed(
    layer: _Layer, near: Sequence[tuple[str, str, Any]], call_count: int, inputs: Sequence[InputRecord]
) -> DetailedRow:
    row, gradient = layer.row, layer.gradient
    kind = [row.kind, f"{shape_text(row.activation.shape)} {row.activation.dtype}"]
    shape, *norms = statistics({"shape": 2, "mean_abs": 2, "l2": 2}, "gradient", mean_abs="mean |g|", l2="‖g‖")
    prefix = f"{layer.parameters[0].layer}." if layer.parameters else ""
    parameters = (
        Column(
            "name", "parameter", "parameter", 0, shown=lambda parameter: parameter.name.removeprefix(prefix), words=True
        ),
        *(shape, Column("weight_l2", "‖w‖"), norms[1], Column("ratio", "‖g‖/‖w‖")),
        replace(_STATUS, shown=lambda parameter: f"{parameter.status}{'' if parameter.trainable else ', frozen'}"),
    )
    token_columns, tokens = token_table_of([row], inputs)
    tables = [
        _statistics(row.activation, gradient),
        Table(title="Gradients of inputs", columns=(*_INPUTS, _STATUS, *norms), rows=layer.input_gradients),
        Table(title="Parameters", columns=parameters, rows=layer.parameters),
        Table(title="Tokens that stand out", columns=token_columns, rows=tokens),
        Table(title=_connected_title(near, call_count), columns=_CONNECTED, rows=near),
    ]
    return DetailedRow(
        name=row.label or "(model)",
        kind=" · ".join([*kind, counted(row.parameter_count, "parameter")]),
        type=row.kind,
        other_names=row.duplicates,
        flags=layer.flags,
        findings=[line_of(finding, where=finding.where) for finding in layer.findings],
        facts_title="Facts",
        facts=[(term, words) for term, words in _facts(row, gradient) if words],
        tables=[table for table in tables if table.rows],
        grids=layer.grids,
        row=layer,
    )


def _connected_title(near: Sequence[tuple[str, str, Any]], call_count: int) -> str:
    shown = sum(how == "another call" for how, *_ in near) + 1
    return "Connected rows" + (f", {shown} of {call_count:,} calls" if shown < call_count else "")


def _statistics(statistics: TensorStatistics, gradient: GradientRow | None) -> Table:
    titles = {0.01: "1st percentile", 0.5: "median"}
    read: dict[str, Callable[[TensorStatistics], str]] = {HIST: lambda stats: sparkline(stats.distribution, BIN_COUNT)}
    read |= {STATISTICS[key].title: STATISTICS[key].cell for key in NUMBERS if not key.endswith("_count")}
    read["NaN, Inf"] = lambda stats: ", ".join(STATISTICS[key].cell(stats) for key in ("nan_count", "inf_count"))
    for place, level in enumerate(QUANTILE_LEVELS) if statistics.quantiles else ():
        title = titles.get(level, f"{level * 100:.0f}th percentile")
        read[title] = lambda stats, at=place: quantile_text(  # type: ignore[misc]
            stats.quantiles[at] if stats.quantiles else None, stats.element_count
        )
    columns = [Column("", "statistic", "", 0, value=itemgetter(0), words=True)]
    columns.append(Column("", "output", "", 1, shown=lambda pair: pair[1](statistics)))
    if gradient is not None:
        columns.append(Column("", "gradient", "", 2, shown=lambda pair: pair[1](gradient.gradient)))
    return Table(title="Statistics", columns=columns, rows=[*read.items()])


def _facts(row: LayerRow, gradient: GradientRow | None) -> Iterator[tuple[str, str]]:
    activation = row.activation
    yield "not measured", activation.unmeasured or ""
    exact = activation.quantiles is None or activation.element_count <= EXACT_LIMIT
    error = "" if exact else f"; quantiles within {QUANTILE_ERROR:.0%} of the value or 0.5% of its rank"
    yield "values", f"{activation.element_count:,}{error}"
    if (tokens := row.tokens) is not None:
        counts = ((tokens.high_count, "high"), (tokens.massive_count, "with a massive activation"))
        odd = ", ".join(f"{count:,} {words}" for count, words in counts if count) or "none is high"
        norms = f"median {number_text(tokens.median)}, greatest {number_text(tokens.max)}"
        yield "norms of tokens", f"{counted(tokens.token_count, 'token')}: {norms}, {odd}"
    if gradient is not None and (gradient.remark or gradient.status != "gradient"):
        yield "gradient", f"{gradient.status}{f' ({gradient.remark})' if gradient.remark else ''}"
    yield "called at", row.source
    yield "output also of", ", ".join(row.duplicates)
    yield "also known as", ", ".join(row.aliases)
