"""Print a document in a terminal: the answer, what was looked at, findings, notes, tables, lines."""

from collections.abc import Iterable, Iterator, Sequence
from io import StringIO

from rich.console import Console, Group, RenderableType
from rich.text import Text

from hookscope.parameters import shows_all
from hookscope.reporting.columns import broken, draw, drawn_columns, fitted, kept_positions, safe_line
from hookscope.reporting.document import Document, FindingLine, Findings, Listing, Pictures, Table
from hookscope.reporting.document import Text as Sentences
from hookscope.reporting.terminal import LEVEL_STYLES
from hookscope.text import counted

_MOST_FINDINGS, _MOST_LINES = 12, 10  # what a screen has room for
_LEAST_ROWS, _OTHER_LINES = 12, 6  # rows of a table, and lines left for everything else on the screen
_LESS = "dim italic"
_INDENT = "  "  # for inner documents and continued lines


def printed(document: Document, *, width: int, full: bool = False, height: int | None = None) -> RenderableType:
    """Return a document for a terminal; the headline comes again at the end if it has left the screen.

    Without a height, tables are as long as two screens. `full` shows every finding and every row.
    """
    most = None if height is None else max(_LEAST_ROWS, height - _OTHER_LINES)
    lines = [*unbroken(_text(document, width, full=full, most=most), width)]
    console = Console(width=width, file=StringIO())
    if height is not None and len(console.render_lines(Group(*lines), pad=False)) >= height:
        lines += unbroken([_headline(document)], width)
    return Group(*lines)


def _text(document: Document, width: int, *, full: bool, most: int | None) -> Iterator[RenderableType]:
    for inner in document.documents:
        headline, *below = _text(inner, width - len(_INDENT), full=full, most=most)
        yield headline
        yield from (Text(_INDENT).append_text(line) if isinstance(line, Text) else line for line in below)
    yield _headline(document)
    yield from map(safe_line, document.answer[1:])
    for words, level in document.about:
        yield safe_line(words, style=LEVEL_STYLES[level] or "bold")
    yield from finding_lines(document, full=full, answer=" ".join(document.answer))
    for note in document.notes:
        yield safe_line(f"note: {note}", style="dim")
    yield from _parts(document, width, full=full, most=most)


def _headline(document: Document) -> Text:
    return safe_line(document.answer[0], style=f"bold {LEVEL_STYLES[document.level]}".strip())


def unbroken(lines: Iterable[RenderableType], width: int) -> Iterator[RenderableType]:
    """Yield lines broken between words, never within a name: print them with `overflow="ignore"` and `crop=False`."""
    for line in lines:
        if isinstance(line, Text):
            indent = line.plain[: len(line.plain) - len(line.plain.lstrip())]
            style = line.spans[-1].style if line.spans else line.style
            yield Text(broken(line.plain, width, indent + _INDENT), style=style)
        else:
            yield line


def _parts(document: Document, width: int, *, full: bool, most: int | None) -> Iterator[RenderableType]:
    is_first = True
    for part in document.lines:
        if isinstance(part, Table) and (full or not part.is_extra):
            yield from _table(part, width, is_first=is_first, full=full, most=most)
            is_first = False
        elif isinstance(part, Listing):
            yield from _lines(part.title, [(line, ()) for line in part.lines], full=full)
        elif isinstance(part, Pictures) and any(picture.lines for picture in part.pictures):
            yield from _lines(part.title, [(picture.name, picture.lines) for picture in part.pictures], full=full)
        elif isinstance(part, Sentences) and not part.is_extra:
            yield from (safe_line(sentence, style="dim") for sentence in part.sentences)


def finding_line(finding: FindingLine, answer: str = "") -> str:
    """Return a finding on one line: "FAIL dead-filters at layer1 from epoch_3.pt on: 4 of 64 filters are dead.".

    A message that the printed `answer` has is not repeated.
    """
    about = f" at {finding.where}" if finding.where and finding.where not in finding.message else ""
    is_new = finding.message.lower() not in answer.lower()  # the answer may add to it: "At step 3, the loss is NaN."
    return f"{finding.level.upper()} {finding.rule}{about} {finding.when}".rstrip() + f": {finding.message}" * is_new


def _table(table: Table, width: int, *, is_first: bool, full: bool, most: int | None) -> Iterator[RenderableType]:
    if not is_first:
        yield safe_line(table.title, style="bold")
    if table.remark:
        yield safe_line(table.remark)
    shown = table if full else table.of_interest()
    if shown.rows:
        levels = shown.levels or [""] * len(shown.rows)
        styles = [LEVEL_STYLES[level] for level in levels]
        columns = fitted(drawn_columns(shown.columns, shown.rows, styles, full=full), width)
        notes = zip(levels, shown.notable or levels, strict=True)
        notable = [(1 + (level == "fail")) * bool(note) for level, note in notes]
        yield draw(columns, width, styles, kept_positions(notable, full=full, most=most))
        headers = [column.header for column in columns]
        yield from (safe_line(words, style="dim") for title, words in shown.legends.items() if title in headers)
    if len(shown.rows) < len(table.rows):
        yield Text(f"… {counted(len(table.rows) - len(shown.rows), 'row')} not shown, {shows_all()}", style=_LESS)


def _lines(title: str, lines: Sequence[tuple[str, Sequence[str]]], *, full: bool) -> Iterator[Text]:
    yield safe_line(title, style="bold")
    shown = lines if full else lines[:_MOST_LINES]
    for line, sentences in shown:
        yield safe_line(f"  {line}")
        if sentences:
            yield safe_line(f"    {' '.join(sentences)}", style="dim")
    if len(shown) < len(lines):
        yield Text(f"  … {len(lines) - len(shown):,} more, {shows_all()}", style=_LESS)


def finding_lines(document: Document, *, full: bool = False, answer: str = "") -> Iterator[Text]:
    """Yield the findings of a document, a line each; see `finding_line`."""
    for part in document.parts:
        if isinstance(part, Findings):
            shown = part.findings if full else part.first(_MOST_FINDINGS)
            for finding in shown:
                yield safe_line(finding_line(finding, answer), style=LEVEL_STYLES[finding.level])
            if len(shown) < len(part.findings):
                yield Text(f"… {len(part.findings) - len(shown):,} more, {part.shown_by or shows_all()}", style=_LESS)
