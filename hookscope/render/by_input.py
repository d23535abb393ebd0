"""Gradient norms of each input alone, as a Rich table."""

from collections.abc import Sequence
from statistics import median

from rich.console import Group, RenderableType
from rich.text import Text

from hookscope.render.columns import Column, draw_table, fitted, kept_positions, number_text
from hookscope.results.gradients import InputGradients
from hookscope.text import safe_text


def by_input_table(inputs: Sequence[InputGradients], *, width: int, full: bool = False) -> RenderableType:
    """Return each input's loss and gradient norm, and how far the norms spread: over all parameters, and by layer.

    Args:
        inputs: At least one.
        width: Columns of the terminal.
        full: Show every row of a long table instead of folding it.
    """
    alone = [
        Column("input alone", [Text(safe_text(each.name)) for each in inputs], 0, words=True),
        Column("loss", [Text(number_text(each.loss)) for each in inputs], 1),
        Column("‖g‖ of parameters", [Text(number_text(each.parameters_l2)) for each in inputs], 2),
        _no_remarks(len(inputs)),
    ]
    labels = list(dict.fromkeys(label for each in inputs for label in each.rows_l2))
    norms = [[norm for each in inputs if (norm := each.rows_l2.get(label)) is not None] for label in labels]
    spread = [
        Column("grad_output over inputs", [Text(safe_text(label)) for label in labels], 0, words=True),
        Column("least ‖g‖", [_number(min(each, default=None)) for each in norms], 2),
        Column("median ‖g‖", [_number(median(each) if each else None) for each in norms], 1),
        Column("greatest ‖g‖", [_number(max(each, default=None)) for each in norms], 3),
        _no_remarks(len(labels)),
    ]
    parts: list[RenderableType] = [Text("Gradients of each input alone", style="bold")]
    parts += [_drawn(columns, width, full=full) for columns in (alone, spread) if columns[0].cells]
    return Group(*parts)


def _drawn(columns: Sequence[Column], width: int, *, full: bool) -> RenderableType:
    count = len(columns[0].cells)
    kept = kept_positions([False] * count, full=full)
    return draw_table(fitted(columns, columns[-1].cells, width), [""] * count, kept, width)


def _number(value: float | None) -> Text:
    return Text(number_text(value))


def _no_remarks(count: int) -> Column:
    return Column("remarks", [Text()] * count, 9, words=True)
