"""The modules of a network as a document: a tree by their dotted names, with what they cost."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from hookscope.reporting.columns import Column, integer_text
from hookscope.reporting.cost_text import COST_LEGENDS, COSTS, cost_lines
from hookscope.reporting.document import Document, Section, Table, Text
from hookscope.reporting.layer_columns import KIND, kinds_text, remarks, with_costs
from hookscope.reporting.terminal import model_words
from hookscope.results.costs_of_rows import rows_with_costs
from hookscope.results.network import ModuleRow, ModuleTable
from hookscope.text import counted, shape_text


def describe_modules(result: ModuleTable) -> Document:
    """Describe the modules of a network; no row is folded."""
    rows, cost = result.rows, result.cost
    whole = next((row.total_parameter_count for row in rows if not row.layer), None)
    parameter_count = sum(row.parameter_count for row in rows) if whole is None else whole
    selected = [row for row in rows if row.selected]
    operation_count = sum(row.owner is not None for row in rows)
    totals = [
        counted(len(rows) - operation_count, "module"),
        *([counted(operation_count, "operation")] if operation_count else []),
        f"{len(selected):,} selected{kinds_text(selected)}",
        counted(parameter_count, "parameter"),
    ]
    lines = [] if cost is None else cost_lines(cost)
    if cost is not None and operation_count:
        lines.append("Operations have no cost of their own: it counts in the module that calls them.")
    columns, pairs = module_table_of(result)
    table = Table(
        title="Modules",
        columns=columns,
        rows=pairs,
        levels=["good" if row.selected and cost is None else "" for row in rows],
        notable=[True] * len(rows),
        legends=COST_LEGENDS,
    )
    title = model_words(result.model)
    return Document(
        title=title,
        about=[(title, "")],
        answer=[*lines[:1], " · ".join(totals)],  # the first sentence comes again below a long table
        notes=result.notes,
        sections=[Section("modules", "Modules", [table, Text(lines[1:])])],
    )


def module_table_of(result: ModuleTable) -> tuple[list[Column], list[Any]]:
    """Return the columns of modules, and each module with its cost or None."""
    rows, cost = result.rows, result.cost
    names = _tree_names(rows)
    selected = "selected" if cost is None else ""  # a table of costs leaves it out
    columns = (
        Column("layer", "module", "module", 0, shown=lambda row: names[row.layer], words=True),
        replace(KIND, rank=4),
        Column("parameter_count"),
        Column("total_parameter_count", "parameters", "elements in its parameters", 3, integer_text),
        Column("call_count", "calls", "calls in a pass", 11, str, usual="1"),
        _shapes("input_shapes", "input", 10),
        _shapes("output_shapes", "output", 2 if cost is None else 9),
        Column("selected", selected, "selected by a pattern", 1, lambda value: "● selected" * value, words=True),
        Column("owner"),
        remarks("note", "why it has no shapes, or its other names", attrgetter("note"), "note", "cyan", rank=12),
    )
    costs = [] if cost is None else [column for column in COSTS if column.key != "total_parameter_count"]
    return with_costs(columns, costs, at=4), rows_with_costs(rows, cost)


def _shapes(key: str, title: str, rank: int) -> Column:
    def texts(row: ModuleRow) -> tuple[str, ...]:
        return tuple(map(shape_text, getattr(row, key)))

    def shown(row: ModuleRow) -> str:
        more = f" +{len(texts(row)) - 2}" if len(texts(row)) > 2 else ""
        return ", ".join(texts(row)[:2]) + more or "-"

    return Column(key, title, f"shapes of the {title}", rank, None, texts, shown, words=True)


def _tree_names(rows: Sequence[ModuleRow]) -> Mapping[str, str]:
    """Cut the name of the nearest listed ancestor off each name, and indent by the number of listed ancestors.

    An operation stands below its module: ":add".
    """
    layers = {row.layer for row in rows}
    names = {}
    for row in rows:
        module = row.layer if row.owner is None else row.owner
        parts = module.split(".") if module else []
        ancestors = [size for size in range(len(parts)) if ".".join(parts[:size]) in layers]
        label = ".".join(parts[ancestors[-1] if ancestors else 0 :]) or "(model)"
        indent = "  " * len(ancestors)
        names[row.layer] = f"{indent}{label}" if row.owner is None else f"{indent}  :{row.kind}"
    return names
