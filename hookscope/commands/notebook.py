"""Results as HTML for notebooks: the answer and the terminal's tables in full; where a map is the answer, its picture.

A notebook keeps what it shows, so the pictures of other results are left to `run.show()`. The HTML has no script and
loads nothing, so a notebook shows it even in a file that it does not trust.
"""

from collections.abc import Callable, Iterable, Iterator
from html import escape
from itertools import chain

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hookscope.commands import conversion
from hookscope.commands.attention.describe import describe_attention
from hookscope.commands.attribute.describe import describe_attributions
from hookscope.commands.attribute.map_files import photograph_of
from hookscope.commands.check.describe import describe_check, wrong_pictures
from hookscope.reporting import terminal
from hookscope.reporting.document import Document
from hookscope.reporting.grids import draw_grid, encode_png
from hookscope.reporting.html.pictures import data_uri
from hookscope.reporting.overviews.document import draw_document
from hookscope.results.activations import FeatureMaps
from hookscope.results.attention import Attention
from hookscope.results.attributions import Attributions
from hookscope.results.check import CheckReport
from hookscope.results.renderers import RunResult
from hookscope.text import counted, safe_text, shape_text

# Wide enough for all columns and full names.
_EVERYTHING = 1_000_000

_MOST_PICTURES = 6  # pictures of inputs

# Long tables scroll inside their frame. Histograms and trees need a monospaced font, and all of their blanks: every
# cell has a style for that, because JupyterLab's style sheet wraps cells. Not every notebook pads cells.
_FRAME = "max-height:36em;overflow:auto;margin-bottom:1em"
_TABLE = "font-family:monospace;border-collapse:separate;border-spacing:0.8em 0;text-align:right"


def result_html(result: conversion.Result | FeatureMaps) -> str:
    """Return a result as HTML: what the command prints, every row and column of it."""
    if isinstance(result, FeatureMaps):
        about = f"{result.label} ({result.kind}), input {result.input_index}, shape {shape_text(result.shape)}"
        parts = (about, counted(result.channel_count, "channel"), result.note)
        return _picture(encode_png(draw_grid(result)), f"Grid of {', '.join(filter(None, parts))}")
    failure = getattr(result, "failure", None)
    summary = [*_flat([conversion.summary(result, width=_EVERYTHING, full=True)])]
    first_table = next((place for place, part in enumerate(summary) if isinstance(part, Table)), len(summary))
    answer = [
        terminal.warnings_panel(conversion.warnings_of(result)),
        *([] if failure is None else [terminal.failure_panel(failure)]),
        *summary[:first_table],
    ]
    if isinstance(result, RunResult) and result.provenance and not isinstance(result, Attributions | Attention):
        answer.append(Text(".show() draws the picture."))
    return "".join(chain(_blocks(answer), _overviews(result), _blocks(summary[first_table:])))


def _overviews(result: conversion.Result) -> Iterator[str]:
    if isinstance(result, CheckReport) and result.overview_parts is not None:
        drawn = draw_document(describe_check(result), wrong_pictures(result))
        yield _picture(encode_png(drawn), f"Overview of the check of {result.checkpoint}. The text has it in words.")
    if not isinstance(result, Attributions | Attention):
        return
    describe: Callable[..., Document] = describe_attention if isinstance(result, Attention) else describe_attributions
    for index in range(min(len(result.inputs), _MOST_PICTURES)):
        document = describe(result, index, photograph_of(result, index))
        yield _picture(encode_png(draw_document(document)), f"{document.title}. {document.answer[0]}")
    if len(result.inputs) > _MOST_PICTURES:
        more = counted(len(result.inputs) - _MOST_PICTURES, "more input")
        yield f"<p>{more}: <code>save</code> writes a picture of each.</p>\n"


def _picture(png: bytes, text: str) -> str:
    return f'<p><img alt="{escape(safe_text(text))}" src="{data_uri(png)}" style="max-width:100%"></p>\n'


def _flat(renderables: Iterable[RenderableType]) -> Iterator[RenderableType]:
    """Yield panels, tables and texts, without the groups that hold them and the padding around them."""
    for renderable in renderables:
        if isinstance(renderable, Group | Padding):
            yield from _flat(renderable.renderables if isinstance(renderable, Group) else [renderable.renderable])
        else:
            yield renderable


def _blocks(renderables: Iterable[RenderableType]) -> Iterator[str]:
    for part in _flat(renderables):
        if isinstance(part, Panel):
            yield f"<section><p><strong>{escape(str(part.title))}</strong></p>\n"
            yield from _blocks([part.renderable])
            yield "</section>\n"
        elif isinstance(part, Table):
            yield _table(part)
        elif isinstance(part, Text):
            lines = "<br>".join(escape(line) for line in part.plain.split("\n"))
            yield f"<p>{lines}</p>\n" if lines else ""


def _table(table: Table) -> str:
    """Return a table of texts as HTML; the first column that is aligned left heads the rows."""
    columns = [[_words(cell) for cell in column.cells] for column in table.columns]
    headers = [_words(column.header) for column in table.columns]
    blanks = "pre" if any(headers) else "pre-wrap"  # sentences stand in tables without headers
    sides = [
        f' style="{"text-align:left;" if column.justify == "left" else ""}white-space:{blanks}"'
        for column in table.columns
    ]
    naming = next((place for place, column in enumerate(table.columns) if column.justify == "left"), None)
    head = "".join(f'<th scope="col"{side}>{text}</th>' for text, side in zip(headers, sides, strict=True))
    lines = ["<thead><tr>" + head + "</tr></thead>"] if any(headers) else []
    lines.append("<tbody>")
    for cells in zip(*columns, strict=True):
        row = (
            f'<th scope="row"{side}>{cell}</th>' if place == naming else f"<td{side}>{cell}</td>"
            for place, (cell, side) in enumerate(zip(cells, sides, strict=True))
        )
        lines.append(f"<tr>{''.join(row)}</tr>")
    lines.append("</tbody>")
    return "\n".join([f'<div tabindex="0" style="{_FRAME}"><table style="{_TABLE}">', *lines, "</table></div>\n"])


def _words(cell: RenderableType) -> str:
    return escape(cell.plain if isinstance(cell, Text) else str(cell))
