"""Print a document in a terminal: the answer, what was looked at, findings, notes, tables, lines."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from hookscope.render.columns import draw_table, safe_line
from hookscope.render.document import Document, FindingLine, Findings, Listing, Table
from hookscope.render.terminal import LEVEL_STYLES, about_lines, note_lines
from hookscope.text import counted

_MOST_FINDINGS, _MOST_LINES = 12, 10  # what a screen has room for
_LESS = "dim italic"
_STYLES = {**LEVEL_STYLES, "good": "green", "dim": "dim", "": ""}


def document_text(document: Document, *, width: int, full: bool = False) -> Iterator[RenderableType]:
    """Yield what a terminal of a width shows; `full` shows every finding and every row."""
    headline, *sentences = document.answer
    yield safe_line(headline, style=f"bold {_STYLES[document.level]}".strip(), overflow="fold")
    for sentence in sentences:
        yield safe_line(sentence, overflow="fold")
    yield from about_lines(document.about)
    for part in document.parts:
        if isinstance(part, Findings):
            yield from _finding_lines(part, full=full)
    yield note_lines(document.notes)
    is_first = True
    for part in document.parts:
        if isinstance(part, Table) and part.rows and (full or not part.is_extra):
            yield from _table(part, width, is_first=is_first, full=full)
            is_first = False
        elif isinstance(part, Listing) and part.lines:
            yield from _listing(part, full=full)


def finding_line(finding: FindingLine) -> str:
    """Return a finding on one line: "FAIL dead-filters at layer1 from epoch_3.pt on: 4 of 64 filters are dead."."""
    about = f" at {finding.where}" if finding.where and finding.where not in finding.message else ""
    return f"{finding.level.upper()} {finding.rule}{about} {finding.when}".rstrip() + f": {finding.message}"


def _table(table: Table, width: int, *, is_first: bool, full: bool) -> Iterator[RenderableType]:
    if not is_first:
        yield safe_line(table.title, style="bold")
    if table.remark:
        yield safe_line(table.remark, overflow="fold")
    shown = table if full else table.of_interest()
    if shown.rows:
        styles = [_STYLES[level] for level in shown.levels]
        yield draw_table(shown.columns, shown.rows, width, styles, full=full)
    if len(shown.rows) < len(table.rows):
        yield Text(f"… {counted(len(table.rows) - len(shown.rows), 'row')} not shown, --full shows all", style=_LESS)


def _listing(part: Listing, *, full: bool) -> Iterator[Text]:
    yield safe_line(part.title, style="bold", overflow="fold")
    shown = part.lines if full else part.lines[:_MOST_LINES]
    for line in shown:
        yield safe_line(f"  {line}", overflow="fold")
    if len(shown) < len(part.lines):
        yield Text(f"  … {len(part.lines) - len(shown):,} more, --full shows all", style=_LESS)


def _finding_lines(part: Findings, *, full: bool) -> Iterator[Text]:
    shown = part.findings if full else part.findings[:_MOST_FINDINGS]
    for finding in shown:
        yield safe_line(finding_line(finding), style=LEVEL_STYLES[finding.level], overflow="fold")
    if len(shown) < len(part.findings):
        yield Text(f"… {len(part.findings) - len(shown)} more, --full shows all", style=_LESS)
