"""Results as Rich renderables, for people. Every name is a `Text`, so nothing in it is read as markup."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from textwrap import wrap

from rich import box
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hookscope.results import (
    QUANTILE_LEVELS,
    Failure,
    Flag,
    Inspection,
    LayerRow,
    ModuleRow,
    TensorStatistics,
    UncalledLayer,
)
from hookscope.text import safe_text, shape_text

# A table with more rows than this is folded: the first and last rows stay, and every row somebody must see. Our choice:
# about what two screens hold.
_FOLD_ABOVE_ROWS = 60
_FOLD_KEEP_ROWS = 20

# Terminals at least this wide get two blanks between columns instead of one. Our choice.
_ROOMY_WIDTH = 100

# How wide the name column stays, if its names need it, beside columns that matter and beside the others. Our choice.
_NAME_WIDTH_AT_LEAST = 16
_NAME_WIDTH_WANTED = 28
_REMARK_WIDTH_AT_LEAST = 20

_MEDIAN = QUANTILE_LEVELS.index(0.5)

# The colour of a whole row. The other flags describe a layer; these ask for attention, so folding keeps their rows.
_ALARMS: dict[Flag, str] = {
    "non-finite": "bold red",
    "all zero": "yellow",
    "constant": "yellow",
    "dead channels": "yellow",
    "unmeasured": "yellow",
}


@dataclass(frozen=True, slots=True)
class _Column:
    """A column before it is drawn.

    Attributes:
        header: Its title, unlike any other column's.
        cells: One a row.
        rank: The lowest stays longest when the terminal is narrow. 0 is the name column, which gives way to others;
            columns below 10 matter so much that names are shortened for them.
        words: Whether it holds words, aligned left and wrapped if need be, or numbers, aligned right and never wrapped.
        max_width: Wider words are shortened or wrapped.
    """

    header: str
    cells: Sequence[Text]
    rank: int
    words: bool = False
    max_width: int = 1000

    @property
    def width(self) -> int:
        lines = (line for cell in self.cells for line in cell.plain.split("\n"))
        return min(self.max_width, max(cell_len(self.header), *map(cell_len, lines)))


def layer_table(inspection: Inspection, *, width: int, full: bool = False) -> RenderableType:
    """Return the layer rows in execution order as one table under a title, fitted to `width`.

    The wider the terminal, the more columns. Numbers are never cut or wrapped; over-long names lose their middle. A
    flagged row says so in words, in a column of their own when there is room, else beside or below the name.

    Args:
        inspection: What to show.
        width: Columns of the terminal.
        full: Show every row of a long table instead of folding it.
    """
    rows = inspection.rows
    if not rows:
        return Group(*_title(inspection), Text("No layer finished."))
    flags = [_flag_words(row) for row in rows]
    names = [Text(safe_text(row.label)) for row in rows]
    flag_column = _Column("flags", flags, 11, words=True, max_width=_REMARK_WIDTH_AT_LEAST)
    columns = _fitted([*_layer_columns(rows, names), flag_column], flags, width)
    styles = [_row_style(row) for row in rows]
    kept = range(len(rows)) if full or len(rows) <= _FOLD_ABOVE_ROWS else _kept_positions(rows)
    return Group(*_title(inspection), _table(columns, styles, kept, width))


def uncalled_lines(uncalled: Sequence[UncalledLayer], *, full: bool = False) -> RenderableType:
    """Return the selected layers that never ran, grouped by reason.

    Args:
        uncalled: What to list; nothing gives an empty renderable.
        full: Name every layer instead of the first few of each reason.
    """
    by_reason: dict[str, list[str]] = {}
    for layer in uncalled:
        by_reason.setdefault(layer.reason, []).append(_fold(safe_text(layer.layer or "(model)"), 48))
    if not by_reason:
        return Group()
    lines: list[RenderableType] = [Text(f"Never called: {_count(len(uncalled), 'selected layer')}", style="yellow")]
    for reason, layers in by_reason.items():
        shown = layers if full else layers[:6]
        more = f" … and {len(layers) - len(shown)} more, --full names all" if len(shown) < len(layers) else ""
        line = Text(f"{safe_text(reason)} ({len(layers)}): {', '.join(shown)}{more}", overflow="fold")
        lines.append(Padding(line, (0, 0, 0, 2)))
    return Group(*lines)


def warnings_panel(warnings: Sequence[str]) -> RenderableType:
    """Return the warnings in a frame, one paragraph each; nothing for none."""
    if not warnings:
        return Group()
    lines = Text("\n", overflow="fold").join(Text(f"• {safe_text(warning)}") for warning in warnings)
    return Panel(lines, title="Warning" if len(warnings) == 1 else "Warnings", title_align="left", style="yellow")


def failure_panel(failure: Failure) -> RenderableType:
    """Return where and how the forward pass broke off, in a frame."""
    grid = Table.grid(padding=(0, 1))
    grid.add_row(
        "module", Text(f"{safe_text(failure.layer or '(model)')} ({safe_text(failure.kind)})", overflow="fold")
    )
    shapes = ", ".join(safe_text(shape) for shape in failure.input_shapes)
    grid.add_row("inputs", Text(shapes or "none", overflow="fold"))
    grid.add_row("error", Text(safe_text(failure.error), overflow="fold"))
    return Panel(grid, title="The model raised", title_align="left", style="red")


def predictions_lines(inspection: Inspection, *, full: bool = False) -> RenderableType:
    """Return the top classes of every input, a line each: "cat.jpg: Egyptian cat 0.40 · tiger cat 0.23".

    Args:
        inspection: Whose predictions to show; none gives an empty renderable.
        full: Show every input instead of the first ten.
    """
    predictions = inspection.predictions
    shown = predictions if full else predictions[:10]
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column()
    for prediction in shown:
        names = prediction.class_names or tuple(f"class {index}" for index in prediction.class_indices)
        classes = (
            f"{safe_text(name)} {_probability(probability)}"
            for name, probability in zip(names, prediction.probabilities, strict=True)
        )
        name = _fold(safe_text(inspection.inputs[prediction.input_index].name), 30)
        grid.add_row(Text(f"{name}:"), Text(" · ".join(classes)))
    if not shown:
        return Group()
    hidden = len(predictions) - len(shown)
    return Group(grid, Text(f"… {_count(hidden, 'more input')}, --full shows all", style="dim")) if hidden else grid


def module_table(rows: Sequence[ModuleRow], *, width: int, title: str) -> RenderableType:
    """Return the modules of a network as a tree by their dotted names, with a line of totals.

    Args:
        rows: In the order of `named_modules()`; parents may be missing.
        width: Columns of the terminal.
        title: First line.
    """
    notes = [Text(safe_text(row.note), style="cyan") if row.note else Text() for row in rows]
    columns = [
        _Column("module", [Text(name) for name in _tree_names([row.layer for row in rows])], 0, words=True),
        _Column("type", [_kind(row.kind) for row in rows], 4, words=True),
        _Column("parameters", [Text(f"{row.total_parameter_count:,}") for row in rows], 3),
        _Column("calls", [Text(str(row.call_count)) for row in rows], 11),
        _Column("input", [_shapes(row.input_shapes) for row in rows], 10, words=True),
        _Column("output", [_shapes(row.output_shapes) for row in rows], 2, words=True),
        _Column("selected", [Text("● selected" if row.selected else "") for row in rows], 1, words=True),
        _Column("note", notes, 12, words=True, max_width=_REMARK_WIDTH_AT_LEAST),
    ]
    if all(row.call_count == 1 for row in rows):
        columns = [column for column in columns if column.header != "calls"]
    table = _table(
        _fitted(columns, notes, width), ["green" if row.selected else "" for row in rows], range(len(rows)), width
    )
    whole = [row.total_parameter_count for row in rows if not row.layer] or [sum(row.parameter_count for row in rows)]
    totals = (
        _count(len(rows), "module"),
        f"{sum(row.selected for row in rows)} selected",
        _count(whole[0], "parameter"),
    )
    return Group(Text(safe_text(title), style="bold"), table, Text(" · ".join(totals)))


def _title(inspection: Inspection) -> list[Text]:
    model = inspection.model
    kind = f" ({safe_text(model.kind)})" if model.kind.lower() != model.name.lower() else ""
    names = [safe_text(PurePath(record.name).name) for record in inspection.inputs]
    inputs = names[0] if len(names) == 1 else f"{len(names)} inputs"
    unusual = [name for name, usual in ((inspection.dtype, "float32"), (inspection.device, "cpu")) if name != usual]
    parts = (f"{safe_text(model.name)}{kind}", f"weights: {safe_text(model.weights)}", inputs, *unusual)
    lines = [Text(" · ".join(parts), style="bold", overflow="fold")]
    if model.random:
        lines.append(Text("RANDOM WEIGHTS: this network is untrained, nothing here was learned", style="bold red"))
    return lines


def _layer_columns(rows: Sequence[LayerRow], names: Sequence[Text]) -> list[_Column]:
    """Return the columns of the layer table but the flags, in the order they are shown."""
    all_statistics = [row.activation for row in rows]

    def numbers(header: str, values: Iterable[float | None], rank: int) -> _Column:
        return _Column(header, [Text(_number(value)) for value in values], rank)

    columns = [
        _Column("#", [Text(str(row.index)) for row in rows], 12),
        _Column("layer", names, 0, words=True),
        _Column("type", [_kind(row.kind) for row in rows], 10, words=True),
        _Column("shape", [_activation_shape(row) for row in rows], 6),
        _Column("dtype", [Text(safe_text(each.dtype)) for each in all_statistics], 16, words=True),
        _Column("parameters", [Text(f"{row.parameter_count:,}") for row in rows], 20),
        numbers("mean", (each.mean for each in all_statistics), 1),
        numbers("std", (each.std for each in all_statistics), 2),
        numbers("min", (each.min for each in all_statistics), 3),
        numbers("median", (each.quantiles[_MEDIAN] if each.quantiles else None for each in all_statistics), 17),
        numbers("max", (each.max for each in all_statistics), 4),
        numbers("mean |x|", (each.mean_abs for each in all_statistics), 18),
        numbers("L2", (each.l2 for each in all_statistics), 19),
        _Column("zeros", [Text(_percent(each.zero_fraction)) for each in all_statistics], 5),
        _Column("dead", [Text(_dead_channels(each)) for each in all_statistics], 13),
        _Column("NaN", [Text(_integer(each.nan_count)) for each in all_statistics], 14),
        _Column("Inf", [Text(_integer(each.inf_count)) for each in all_statistics], 15),
    ]
    # Columns that would say the same in every row are left out.
    idle = {
        "dtype": len({each.dtype for each in all_statistics}) == 1,
        "dead": not any(each.channel_count for each in all_statistics),
        "NaN": not any(each.nan_count for each in all_statistics),
        "Inf": not any(each.inf_count for each in all_statistics),
    }
    return [column for column in columns if not idle.get(column.header)]


def _fitted(columns: Sequence[_Column], remarks: Sequence[Text], width: int) -> list[_Column]:
    """Return the columns that fit `width`, names shortened; remarks join the names when their column finds no room.

    Args:
        columns: In the order they are shown, the column of remarks last.
        remarks: One a row, empty where there is nothing to say.
        width: Columns of the terminal.
    """
    name = min(columns, key=lambda column: column.rank)
    kept = {name.header}
    spare = width
    wanted = max(name.width, *(remark.cell_len + 2 for remark in remarks))
    for column in sorted(columns, key=lambda column: column.rank)[1:]:
        reserved = min(wanted, _NAME_WIDTH_AT_LEAST if column.rank < 10 else _NAME_WIDTH_WANTED)
        if column.width + _gap(width) + reserved <= spare and any(cell.plain for cell in column.cells):
            kept.add(column.header)
            spare -= column.width + _gap(width)
            wanted = name.width if column is columns[-1] else wanted
    if columns[-1].header in kept:
        cells = [Text(_fold(cell.plain, spare)) for cell in name.cells]
    else:
        cells = [_with_remark(cell.plain, remark, spare) for cell, remark in zip(name.cells, remarks, strict=True)]
    named = replace(name, cells=cells, max_width=spare)
    wider = {
        name.header: named,
        columns[-1].header: replace(columns[-1], max_width=columns[-1].width + spare - named.width),
    }
    return [wider.get(column.header, column) for column in columns if column.header in kept]


def _with_remark(name: str, remark: Text, width: int) -> Text:
    """Return a name followed by a remark, on the same line if both fit, else on lines of its own."""
    cell = Text(_fold(name, width))
    if not remark.plain:
        return cell
    if cell_len(name) + 3 + remark.cell_len <= width:
        return cell.append(" · ").append_text(remark)
    indent = " " * (len(name) - len(name.lstrip()))
    lines = wrap(
        remark.plain, width, initial_indent=f"{indent}└ ", subsequent_indent=f"{indent}  ", break_on_hyphens=False
    )
    return cell.append("\n" + "\n".join(lines), style=remark.style)


def _table(columns: Sequence[_Column], styles: Sequence[str], kept: Sequence[int], width: int) -> RenderableType:
    """Return the rows at the positions `kept` as a table that a line of its own interrupts at each gap."""
    parts: list[RenderableType] = [_section(columns, width, show_header=True)]
    shown_until = 0
    for position in (*kept, len(styles)):
        if position > shown_until:
            parts.append(Text(f"… {position - shown_until} rows not shown, --full shows all", style="dim italic"))
            parts.append(_section(columns, width, show_header=False))
        section = parts[-1]
        if position < len(styles) and isinstance(section, Table):
            section.add_row(*(column.cells[position] for column in columns), style=styles[position])
        shown_until = position + 1
    return Group(*(part for part in parts if not isinstance(part, Table) or part.row_count or part.show_header))


def _section(columns: Sequence[_Column], width: int, *, show_header: bool) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, _gap(width) - 1, 0, 0),
        show_header=show_header,
    )
    for column in columns:
        table.add_column(
            column.header,
            justify="left" if column.words else "right",
            width=column.width,
            no_wrap=not column.words,
            overflow="fold",
        )
    return table


def _kept_positions(rows: Sequence[LayerRow]) -> list[int]:
    """Return the positions that a folded table shows. A gap of one row is not worth its line."""
    last = len(rows) - 1
    shown = [
        position < _FOLD_KEEP_ROWS or position > last - _FOLD_KEEP_ROWS or bool(_row_style(row))
        for position, row in enumerate(rows)
    ]
    return [
        position
        for position in range(len(rows))
        if shown[position] or (shown[position - 1] and shown[min(position + 1, last)])
    ]


def _flag_words(row: LayerRow) -> Text:
    """Return the row's flags, with the numbers behind them."""
    statistics = row.activation
    details = {
        "non-finite": f": {_integer(statistics.nan_count)} NaN, {_integer(statistics.inf_count)} Inf",
        "dead channels": f" {_dead_channels(statistics)}",
        "unmeasured": f": {safe_text(statistics.unmeasured)}" if statistics.unmeasured else "",
    }
    words = "; ".join(flag + details.get(flag, "") for flag in row.flags)
    return Text(words, style=_row_style(row) or "cyan") if words else Text()


def _row_style(row: LayerRow) -> str:
    """Return the colour of a row that asks for attention, or an empty string."""
    return next((style for flag, style in _ALARMS.items() if flag in row.flags), "")


def _tree_names(layers: Sequence[str]) -> list[str]:
    """Return each dotted name without its nearest listed ancestor's, indented by the number of listed ancestors."""
    known = set(layers)
    names = []
    for layer in layers:
        parts = layer.split(".") if layer else []
        ancestors = [size for size in range(len(parts)) if ".".join(parts[:size]) in known]
        own = ".".join(parts[ancestors[-1] if ancestors else 0 :]) or "(model)"
        names.append("  " * len(ancestors) + safe_text(own))
    return names


def _activation_shape(row: LayerRow) -> Text:
    return Text("-" if "not a tensor" in row.flags else shape_text(row.activation.shape))


def _shapes(shapes: Sequence[tuple[int, ...]]) -> Text:
    """Return at most two shapes in words, and how many more there are."""
    more = f" +{len(shapes) - 2}" if len(shapes) > 2 else ""
    return Text(", ".join(shape_text(shape) for shape in shapes[:2]) + more or "-")


def _kind(kind: str) -> Text:
    return Text(_fold(safe_text(kind), 18))


def _number(value: float | None) -> str:
    """Return four significant digits, without a power of ten where that reads well; "0" is exactly zero."""
    if value is None:
        return "-"
    if value == 0 or not math.isfinite(value):
        return f"{abs(value):.0f}" if value == 0 else f"{value}"
    mantissa, power = f"{value:.3e}".split("e")
    if -3 <= int(power) <= 3:
        return f"{value:.{3 - int(power)}f}"
    return f"{mantissa}e{int(power)}"


def _percent(fraction: float | None) -> str:
    """Return a percentage that says 0% and 100% only when that is exact."""
    if fraction is None:
        return "-"
    if fraction in (0, 1):
        return f"{fraction:.0%}"
    return "<0.1%" if fraction < 0.001 else ">99.9%" if fraction > 0.999 else f"{fraction:.1%}"


def _probability(probability: float) -> str:
    """Return two decimals that say 0.00 and 1.00 only when that is exact."""
    if probability in (0, 1):
        return f"{probability:.2f}"
    return "<0.01" if probability < 0.01 else ">0.99" if probability > 0.99 else f"{probability:.2f}"


def _integer(value: int | None) -> str:
    return "-" if value is None else str(value)


def _dead_channels(statistics: TensorStatistics) -> str:
    if statistics.dead_channel_count is None or statistics.channel_count is None:
        return "-"
    return f"{statistics.dead_channel_count}/{statistics.channel_count}"


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _fold(name: str, width: int) -> str:
    """Return `name` in at most `width` terminal cells, "…" for its middle: the end of a dotted name says most."""
    if cell_len(name) <= width:
        return name
    head, tail = "", ""
    while name and cell_len(head) + cell_len(name[0]) <= (width - 1) // 3:
        head, name = head + name[0], name[1:]
    while name and cell_len(head) + cell_len(tail) + cell_len(name[-1]) <= width - 1:
        tail, name = name[-1] + tail, name[:-1]
    return f"{head}…{tail}"


def _gap(width: int) -> int:
    """Return the blanks between two columns."""
    return 2 if width >= _ROOMY_WIDTH else 1
