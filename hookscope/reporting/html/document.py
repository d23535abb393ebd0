"""A document as one HTML page: a file that loads nothing else, as its content security policy demands.

Every text is escaped where it enters the page, and none enters the style or the script.
"""

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from importlib.resources import files
from typing import Any
from urllib.parse import quote

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hookscope.reporting.columns import number_text, percent_text
from hookscope.reporting.document import (
    ChannelSearch,
    DepthChart,
    DetailedTable,
    Document,
    Findings,
    HeatMaps,
    Listing,
    PhotographMaps,
    Picture,
    Pictures,
    StepCharts,
    Table,
)
from hookscope.reporting.html.figures import Figure, over_depth, over_steps
from hookscope.reporting.html.over_photograph import shown_maps
from hookscope.reporting.html.pictures import png_uri, thumbnail_uri
from hookscope.reporting.html.tables import ShownRow, ShownTable, shown_channels, shown_table
from hookscope.reporting.palettes import BACKGROUND, LEVEL_COUNT, palette_image
from hookscope.reporting.plots import MOST_COLUMNS
from hookscope.reporting.steps import HeatMap
from hookscope.results.runs.reading import StoredRun
from hookscope.results.runs.record import RunRecord
from hookscope.results.runs.reports import MARK
from hookscope.text import counted, safe_text

# Limits for a page of at most 6 MB: rows and columns of a heat map, and numbers in all heat maps.
_MOST_ROWS = 800
_MOST_COLUMNS = 300
_LEAST_COLUMNS = 60
_MOST_CELLS = 300_000

_MOST_FINDINGS = 200
_FEW_FINDINGS = 12  # visible at first
_MOST_PLACES = 400  # of a finding
_MOST_LINES = 200
_FEW_LINES = 12
_MOST_PICTURES = 40

# The scripts of parts, in the order of loading; every page has the first.
_SCRIPTS: Mapping[type, str] = {
    Document: "page.js",
    HeatMaps: "heat.js",
    DetailedTable: "grids.js",
    PhotographMaps: "over_photograph.js",
    ChannelSearch: "channels.js",
}


def document_html(
    document: Document, run: StoredRun[Any] | None = None, pictures: Mapping[str, str] | None = None
) -> str:
    """Return the page of a document, with pictures from `run`; without a run, `pictures` has data URIs by file.

    Raises:
        InputError: If a picture is missing or damaged.
    """
    parts = [part for whole in (document, *document.documents) for part in whole.parts]
    shown = {id(part): _SHOWN[type(part)](part, run, pictures or {}) for part in parts if type(part) in _SHOWN}
    detailed = [part for part in shown.values() if isinstance(part, ShownMaps | ShownTable)]
    kinds = {Document, *map(type, parts)}
    inner = {f"document-{number}": whole for number, whole in enumerate(document.documents, 1)}

    def href(place: str, links: Mapping[str, str]) -> str:
        """Return the link to the row of a place, of the layer that owns it, or of its first parameter."""
        names = (place or "(model)", place.rpartition(".")[0] or "(model)")
        under = (name for name in links if place and name.startswith(f"{place}."))
        return next((links[name] for name in (*names, *under) if name in links), "")

    environment = Environment(
        loader=PackageLoader("hookscope.reporting.html"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.filters |= {
        "counted": counted,
        "href": href,
        "kind": lambda part: type(part).__name__,
        "shown": lambda part: shown.get(id(part)),
    }
    # These two are our own files; the style also hides columns by their keys.
    style = _asset("style.css") + "".join(part.style for part in detailed if isinstance(part, ShownTable))
    script = "".join(_asset(name) for kind, name in _SCRIPTS.items() if kind in kinds)
    return MARK + environment.get_template("document.html").render(
        style=Markup(style),  # noqa: S704
        script=Markup(script),  # noqa: S704
        policy=_policy(style, script),
        version=version("hookscope"),
        title=document.page_title or document.title,
        document=document,
        documents=[(whole, key, _links(whole, shown)) for key, whole in inner.items()],
        details=detailed,
        links=_links(document, shown) | {whole.title: f"#{key}" for key, whole in inner.items()},
        few=_FEW_FINDINGS,
        few_lines=_FEW_LINES,
        most_places=_MOST_PLACES,
        empty=Figure("", "", [], [], [], [], []),
        unusable=run.record.unusable_inputs if run else (),
        making=_making(run.record, document.making) if run else document.making,
    )


def _links(document: Document, shown: Mapping[int, Any]) -> dict[str, str]:
    links: dict[str, str] = {}
    for part in document.parts:
        if isinstance(part, HeatMaps | DetailedTable):
            links |= {name: row.href for row in shown[id(part)].details for name in (*row.other_names, row.name)}
        elif isinstance(part, Pictures):
            links = {picture.name: f"#{anchor}" for picture, anchor, uri in shown[id(part)] if uri} | links
    return links


def _pictures(
    part: Pictures, run: StoredRun[Any] | None, pictures: Mapping[str, str]
) -> list[tuple[Picture, str, str]]:
    """Return each picture with its anchor and its data URI, "" if the file is missing."""

    def uri(file: str) -> str:
        if run is None or not file:
            return pictures.get(file, "")
        return thumbnail_uri(run.read_picture(file), file, part.side)

    return [
        (picture, quote(safe_text(picture.file), safe="").replace("%", "-"), uri(picture.file))
        for picture in part.pictures[:_MOST_PICTURES]
    ]


def _first_lines(lines: Sequence[Any], most: int) -> dict[str, Any]:
    return {"lines": lines[:most], "left_out": max(0, len(lines) - most)}


def _figures(part: StepCharts) -> dict[str, Any]:
    drawn = [over_steps(part, chart) for chart in part.charts]
    thinned = MOST_COLUMNS if len(part.steps) > MOST_COLUMNS else 0
    return {"figures": [figure for figure in drawn if figure is not None], "columns": thinned}


@dataclass(frozen=True)
class ShownMaps:
    """Heat maps and their common rows."""

    part: HeatMaps

    @property
    def details(self) -> list[ShownRow]:
        """The rows, in the order of the maps."""
        return [*self.rows.values()]

    @cached_property
    def maps(self) -> list["ShownMap"]:
        """The maps, with as many columns as their rows leave room for."""
        maps = self.part.maps(_MOST_ROWS, _MOST_COLUMNS)
        rows = sum(len(heat.names) for heat in maps)
        columns = max(_LEAST_COLUMNS, _MOST_CELLS // max(1, rows))
        maps = maps if columns >= _MOST_COLUMNS else self.part.maps(_MOST_ROWS, columns)
        return [ShownMap(heat, self.part.all_in) for heat in maps]

    @cached_property
    def rows(self) -> dict[str, ShownRow]:
        """The rows by name, in the order of the maps."""
        names = dict.fromkeys(name for shown in self.maps for name in shown.map.names)
        return {name: ShownRow(name, number, self.part.details(name)) for number, name in enumerate(names)}


@dataclass(frozen=True, slots=True)
class ShownMap:
    """A heat map with its picture; `all_in` is the file that has all rows."""

    map: HeatMap
    all_in: str

    @property
    def picture(self) -> str:
        """A data URI of a PNG file with a pixel for each value."""
        return png_uri(self.map.picture(BACKGROUND), transparency=BACKGROUND)

    @property
    def numbers(self) -> Markup:
        """The values as 32-bit floats, little-endian, in base64; NaN for a missing value, Inf for NaN and Inf."""
        values, largest = self.map.values, float(np.finfo(np.float32).max)
        if self.map.share:  # float32 must not round a share up to 1
            values = np.where(values < 1, np.minimum(values, 1 - 2**-24), values)
        in_range = np.where(np.isfinite(values), np.clip(values, -largest, largest), values)
        text = base64.b64encode(in_range.astype("<f4").tobytes()).decode("ascii")
        return Markup(text)  # noqa: S704 - letters, digits, + / =

    @property
    def scale(self) -> tuple[str, tuple[str, ...]] | None:
        """A data URI of the colours from low to high, and the words under them; None without a scale."""
        if self.map.scale is None:
            return None
        text, kind = (percent_text, "linear") if self.map.share else (number_text, "logarithmic")
        low, high = self.map.scale
        colours = png_uri(palette_image(np.arange(LEVEL_COUNT, dtype=np.uint8)[None]))
        return colours, (text(low), kind, text(high))

    @property
    def remarks(self) -> list[str]:
        """What was left out or thinned."""
        heat, remarks = self.map, []
        if heat.watched_count > len(heat.columns):
            remarks.append(
                f"{heat.watched_count:,} measured steps in {len(heat.columns)} columns: each shows the value furthest "
                "from the row's median; the columns of numbers count all of them."
            )
        if heat.left_out:
            remarks.append(
                f"{counted(heat.left_out, 'row')} left out: those with verdicts or NaN are kept, the others are spread "
                f"over the network. {self.all_in} has all."
            )
        return remarks

    @property
    def steps(self) -> str:
        """The first and last step of each column: "1-1 100-199"."""
        return " ".join(f"{first}-{last}" for first, last in self.map.columns)

    @property
    def names(self) -> list[str]:
        """The names of the columns, safe to show; none for steps."""
        return [*map(safe_text, self.map.column_names)]

    @property
    def ends(self) -> str:
        """The range of the columns: "steps 1 to 900"."""
        if self.map.column_names:
            return f"{self.map.column_names[0]} to {self.map.column_names[-1]}"
        return f"steps {self.map.columns[0][0]:,} to {self.map.columns[-1][1]:,}"

    def cells(self, row: int, status: str) -> list[tuple[str, str, str | float]]:
        """Return key, text and sort value of each cell of a row; "" sorts last. `status` is for an empty row."""
        text = percent_text if self.map.share else number_text
        last, (largest, step) = float(self.map.last[row]), self.map.largest[row]
        words = "NaN or Inf" if np.isinf(last) else text(last)
        if np.isnan(last):
            words = status or "-"
        broken = self.map.nonfinite_counts[row]
        at = self.map.column_names[step - 1] if step and self.map.column_names else f"{step:,}"
        return [
            ("last", words, last if np.isfinite(last) else ""),
            ("largest", text(largest) if step else "-", largest if step else ""),
            ("at", at if step else "-", step or ""),
            ("broken", f"{broken:,}", broken),
        ]


def _making(record: RunRecord, making: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return terms and words that reproduce a run; `making` comes after the entries of the record."""
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


# What a template draws of a part, besides the part; `run` and pictures as for `document_html`.
_SHOWN: Mapping[type, Callable[[Any, StoredRun[Any] | None, Mapping[str, str]], Any]] = {
    Findings: lambda part, *_: _first_lines(part.findings, _MOST_FINDINGS),
    StepCharts: lambda part, *_: _figures(part),
    DepthChart: lambda part, *_: over_depth(part),
    Table: lambda part, *_: shown_table(part),
    Listing: lambda part, *_: _first_lines(part.lines, _MOST_LINES),
    HeatMaps: lambda part, *_: ShownMaps(part),
    DetailedTable: lambda part, run, _: ShownTable(part, run),
    PhotographMaps: lambda part, run, _: run and shown_maps(part, run),
    ChannelSearch: lambda part, run, _: run and shown_channels(part, run.read_picture),
    Pictures: _pictures,
}
