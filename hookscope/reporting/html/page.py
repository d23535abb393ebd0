"""Shared by all pages: one file that loads nothing else, as its content security policy demands.

Every text is escaped where it enters the page, and none enters the style or the script.
"""

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hookscope.reporting.columns import Column, telling
from hookscope.reporting.document import Table
from hookscope.results.runs.record import RunRecord
from hookscope.results.runs.reports import MARK
from hookscope.text import counted, safe_text

_MOST_TABLE_ROWS = 5000  # above which a browser takes long to lay a table out


def render_page(
    filters: Mapping[str, Callable[..., Any]], scripts: Sequence[str] = (), style: str = "", **values: Any
) -> str:
    """Return a page; `scripts` are file names, which make one script; values hold a `title`.

    `style` is added to that of all pages; no text of a run may be in it.
    """
    environment = Environment(
        loader=PackageLoader("hookscope.reporting.html"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"counted": counted, **filters}
    style, code = _asset("style.css") + style, "".join(map(_asset, scripts))
    return MARK + environment.get_template("document.html").render(
        style=Markup(style),  # noqa: S704 - these two are our own files
        script=Markup(code),  # noqa: S704
        policy=_policy(style, code),
        version=version("hookscope"),
        **values,
    )


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table of a page: headers are columns, cells stand row by row, and rows that call for a look are notable."""

    title: str
    headers: Sequence[Column]
    rows: Sequence[Sequence[str]]
    notable: Sequence[bool]
    remark: str = ""


def shown_table(table: Table) -> PageTable:
    """Return the rows of interest of a table, as many as a browser lays out soon."""
    shown = table.of_interest()
    rows, notable = shown.rows[:_MOST_TABLE_ROWS], [level == "fail" for level in shown.levels[:_MOST_TABLE_ROWS]]
    remark = table.remark
    if len(rows) < len(table.rows):
        first = "The first " if len(rows) < len(shown.rows) else ""
        remark += f" {first}{len(rows):,} of {counted(len(table.rows), 'row')}; {table.all_in} has all."
    columns = telling(table.columns, rows)
    cells = [*zip(*(texts for _, texts in columns), strict=True)]
    return PageTable(
        table.title, [column for column, _ in columns], cells, notable or [False] * len(rows), remark.strip()
    )


def making_facts(record: RunRecord, making: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return what is needed to reproduce a run: term and words, set as code; `making` after what the record has."""
    command = [("Command", record.command)] if record.command else []
    layers = [("Layers", " ".join(record.patterns))] if record.patterns else []
    versions = ", ".join(f"{name} {number}" for name, number in record.versions.items())
    return [*command, *layers, *making, ("Versions", versions), ("Platform", record.platform)]


def _visible(value: Any) -> Any:
    """Spell out control characters, bidirectional formatting and the like in every text that enters the page."""
    return safe_text(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _asset(name: str) -> str:
    return (files(__package__) / "templates" / name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    sources = {"style-src": style, "script-src": script}
    digests = {name: hashlib.sha256(text.encode()).digest() for name, text in sources.items() if text}
    directives = [f"{name} 'sha256-{base64.b64encode(digest).decode()}'" for name, digest in digests.items()]
    return "; ".join(("default-src 'none'", *directives, "img-src data:", "base-uri 'none'", "form-action 'none'"))
