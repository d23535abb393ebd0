"""Print a document in a terminal: the answer, findings, notes, tables."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from hookscope.render.columns import draw_table, safe_line
from hookscope.render.document import Document, FindingLine, Findings, Table
from hookscope.render.terminal import LEVEL_STYLES, about_lines, note_lines

_MOST_FINDINGS = 12  # what a screen has room for
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
    tables = [part for part in document.parts if isinstance(part, Table) and part.rows and (full or not part.is_extra)]
    for table in tables:
        if table is not tables[0]:
            yield safe_line(table.title, style="bold")
        styles = [_STYLES[level] for level in table.levels]
        yield draw_table(table.columns, table.rows, width, styles, full=full)


def finding_line(finding: FindingLine) -> str:
    """Return a finding on one line: "FAIL dead-filters at layer1 from epoch_3.pt on: 4 of 64 filters are dead."."""
    about = f" at {finding.where}" if finding.where and finding.where not in finding.message else ""
    return f"{finding.level.upper()} {finding.rule}{about} {finding.when}".rstrip() + f": {finding.message}"


def _finding_lines(part: Findings, *, full: bool) -> Iterator[Text]:
    shown = part.findings if full else part.findings[:_MOST_FINDINGS]
    for finding in shown:
        yield safe_line(finding_line(finding), style=LEVEL_STYLES[finding.level], overflow="fold")
    if len(shown) < len(part.findings):
        yield Text(f"… {len(part.findings) - len(shown)} more, --full shows all", style="dim italic")
