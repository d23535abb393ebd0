"""A document as one HTML page: a file that loads nothing else, as its content security policy demands.

Every text is escaped where it enters the page, and none enters the style or the script.
"""

import base64
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from importlib.resources import files
from typing import Any
from urllib.parse import quote

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hookscope.reporting.columns import number_text
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
from hookscope.reporting.html.pictures import Shown, png_uri, thumbnail_uri
from hookscope.reporting.html.tables import shown_channels, shown_row, shown_rows, shown_table
from hookscope.reporting.palettes import BACKGROUND, LEVEL_COUNT, palette_image
from hookscope.reporting.plots import MOST_COLUMNS
from hookscope.reporting.steps import HeatMap, span_text
from hookscope.results.runs.reading import StoredRun
from hookscope.results.runs.record import RunRecord
from hookscope.results.runs.reports import MARK
from hookscope.text import counted, percent_text, safe_text

# Limits for a page of at most 6 MB: rows and columns of a heat map, and numbers in all heat maps.
_MOST_ROWS = 800
_MOST_COLUMNS = 300
_LEAST_COLUMNS = 60
_MOST_CELLS = 300_000

_MOST_FINDINGS = 200
_FEW_FINDINGS = 12  # visible at first
_MOST_PLACES = 400  # places listed of one finding
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


def document_html(document: Document, run: StoredRun | None = None, pictures: Mapping[str, str] | None = None) -> str:
    """Return the page of a document, with pictures from `run`; without a run, `pictures` has data URIs by file.

    Raises:
        InputError: If a picture is missing or damaged.
    """
    parts = [part for whole in (document, *document.documents) for part in whole.parts]
    shown = {id(part): _SHOWN[type(part)](part, run, pictures or {}) for part in parts if type(part) in _SHOWN}
    detailed = [shown[id(part)] for part in parts if isinstance(part, HeatMaps | DetailedTable)]
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
    style = _asset("style.css") + "".join(table.get("style", "") for table in detailed)
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
            details = [(detailed["row"], detailed["href"]) for detailed in shown[id(part)]["details"]]
            links |= {name: href for row, href in details for name in (*row.other_names, row.name)}
        elif isinstance(part, Pictures):
            links = {picture.name: f"#{anchor}" for picture, anchor, uri in shown[id(part)] if uri} | links
    return links


def _pictures(part: Pictures, run: StoredRun | None, pictures: Mapping[str, str]) -> list[tuple[Picture, str, str]]:
    """Return each picture with its anchor and its data URI, "" if the file is missing."""

    def uri(file: str) -> str:
        if run is None or not file:
            return pictures.get(file, "")
        return thumbnail_uri(run.read_picture(file), file, part.side)

    return [
        (picture, quote(safe_text(picture.file), safe="").replace("%", "-"), uri(picture.file))
        for picture in part.pictures[:_MOST_PICTURES]
    ]


def _first_lines(lines: Sequence[Any], most: int) -> Shown:
    return {"lines": lines[:most], "left_out": max(0, len(lines) - most)}


def _figures(part: StepCharts) -> Shown:
    drawn = [over_steps(part, chart) for chart in part.charts]
    thinned = MOST_COLUMNS if len(part.steps) > MOST_COLUMNS else 0
    return {"figures": [figure for figure in drawn if figure is not None], "columns": thinned}


def _shown_maps(part: HeatMaps) -> Shown:
    """Return heat maps, with as many columns as their rows leave room for, and their common rows, in their order."""
    maps = part.maps(_MOST_ROWS, _MOST_COLUMNS)
    columns = max(_LEAST_COLUMNS, _MOST_CELLS // max(1, sum(len(heat.names) for heat in maps)))
    maps = maps if columns >= _MOST_COLUMNS else part.maps(_MOST_ROWS, columns)
    names = dict.fromkeys(name for heat in maps for name in heat.names)
    rows = {name: shown_row(part.details(name), number) for number, name in enumerate(names)}
    return {"details": [*rows.values()], "maps": [_shown_map(heat, rows, part.all_in) for heat in maps]}


def _shown_map(heat: HeatMap, rows: Mapping[str, Shown], all_in: str) -> Shown:
    """Return a heat map as a picture with a pixel for each value, and the numbers of its rows.

    `steps` has the first and the last step of each column, "1-1 100-199", and `ends` the range of all columns.
    """
    names = [*map(safe_text, heat.column_names)]
    ends = f"{names[0]} to {names[-1]}" if names else span_text(heat.columns[0][0], heat.columns[-1][1])
    return {
        "map": heat,
        "picture": png_uri(heat.picture(BACKGROUND), transparency=BACKGROUND),
        "numbers": _numbers(heat),
        "scale": _scale(heat),
        "remarks": [*_remarks(heat, all_in)],
        "steps": " ".join(f"{first}-{last}" for first, last in heat.columns),
        "names": names,
        "ends": ends,
        "rows": [(rows[name], _cells(heat, at, rows[name]["row"].status)) for at, name in enumerate(heat.names)],
    }


def _numbers(heat: HeatMap) -> Markup:
    """Return the values as 32-bit floats, little-endian, in base64; NaN for a missing value, Inf for NaN and Inf."""
    values, largest = heat.values, float(np.finfo(np.float32).max)
    if heat.share:  # float32 must not round a share up to 1
        values = np.where(values < 1, np.minimum(values, 1 - 2**-24), values)
    in_range = np.where(np.isfinite(values), np.clip(values, -largest, largest), values)
    return Markup(base64.b64encode(in_range.astype("<f4").tobytes()).decode("ascii"))  # noqa: S704 - letters, digits, + / =


def _scale(heat: HeatMap) -> tuple[str, tuple[str, ...]] | None:
    """Return a data URI of the colours from low to high, and the words under them; None without a scale."""
    if heat.scale is None:
        return None
    text, kind = (percent_text, "linear") if heat.share else (number_text, "logarithmic")
    low, high = heat.scale
    colours = png_uri(palette_image(np.arange(LEVEL_COUNT, dtype=np.uint8)[None]))
    return colours, (text(low), kind, text(high))


def _remarks(heat: HeatMap, all_in: str) -> Iterator[str]:
    if heat.watched_count > len(heat.columns):
        yield (
            f"{heat.watched_count:,} measured steps in {len(heat.columns)} columns: each shows the value furthest "
            "from the row's median; the columns of numbers count all of them."
        )
    if heat.left_out:
        yield (
            f"{counted(heat.left_out, 'row')} left out: those with verdicts or NaN are kept, the others are spread "
            f"over the network. {all_in} has all."
        )


def _cells(heat: HeatMap, row: int, status: str) -> list[tuple[str, str, str | float]]:
    """Return key, text and sort value of each cell of a row; "" sorts last. `status` is for an empty row."""
    text = percent_text if heat.share else number_text
    last, (largest, step) = float(heat.last[row]), heat.largest[row]
    words = "NaN or Inf" if np.isinf(last) else text(last)
    if np.isnan(last):
        words = status or "-"
    broken = heat.nonfinite_counts[row]
    at = heat.column_names[step - 1] if step and heat.column_names else f"{step:,}"
    return [
        ("last", words, last if np.isfinite(last) else ""),
        ("largest", text(largest) if step else "-", largest if step else ""),
        ("at", at if step else "-", step or ""),
        ("broken", f"{broken:,}", broken),
    ]


def _making(record: RunRecord, making: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    versions = ", ".join(f"{name} {number}" for name, number in record.versions.items())
    first = (("Command", record.command), ("Layers", " ".join(record.patterns)))
    last = (("Threads", str(record.threads or "")), ("Versions", versions), ("Platform", record.platform))
    return [(term, words) for term, words in (*first, *making, *last) if words]


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
_SHOWN: Mapping[type, Callable[[Any, StoredRun | None, Mapping[str, str]], Any]] = {
    Findings: lambda part, *_: _first_lines(part.findings, _MOST_FINDINGS),
    StepCharts: lambda part, *_: _figures(part),
    DepthChart: lambda part, *_: over_depth(part),
    Table: lambda part, *_: shown_table(part),
    Listing: lambda part, *_: _first_lines(part.lines, _MOST_LINES),
    HeatMaps: lambda part, *_: _shown_maps(part),
    DetailedTable: lambda part, run, _: shown_rows(part, run),
    PhotographMaps: lambda part, run, _: run and shown_maps(part, run),
    ChannelSearch: lambda part, run, _: run and shown_channels(part, run.read_picture),
    Pictures: _pictures,
}
