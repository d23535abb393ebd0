"""A survey as one HTML page: the answer, the layers, and every channel by search, with what excites it."""

import io
import json
from collections.abc import Iterator, Sequence
from typing import Any

from markupsafe import Markup
from PIL import Image

from hookscope.errors import InputError
from hookscope.render.columns import Column, percent_text
from hookscope.render.document import DepthChart, Series
from hookscope.render.html.figures import FRAME, Figure, over_depth
from hookscope.render.html.page import page_table, render_page
from hookscope.render.html.pictures import BUDGET, thumbnail_uri
from hookscope.render.run_facts import model_facts
from hookscope.render.survey_columns import CHANNELS, FLOAT16, LAYERS
from hookscope.render.survey_failures import (
    failure_heading,
    failure_reasons,
    method_words,
    neighbour_words,
    wrong_title,
)
from hookscope.render.survey_text import answer, level_of
from hookscope.results.runs.reading import StoredRun
from hookscope.results.survey import CropSheet, Survey, SurveyChannel, SurveyRow, channel_counts
from hookscope.text import counted, safe_text

# Channels on the page; the others are in channels.csv. Their numbers take 3 MB.
_MOST_CHANNELS = 20_000
_MOST_UNUSABLE = 200
_STRIP_SIDE = 800


def survey_html(run: StoredRun[Survey]) -> str:
    """Return the page of a survey; raise an InputError if a picture is missing, or differs from the run's record."""
    result = run.result
    strips, left_out = _strips(run)
    told, places = _channels(result, strips)
    crops = {key: place for place, key in enumerate(strips)}
    remarks = (
        [f"{counted(left_out, 'sheet')} of crops did not fit and are in the run's folder only."] if left_out else []
    )
    total = channel_counts(result.rows)
    if len(places) < total:
        remarks.append(f"{len(places):,} of {counted(total, 'channel')} are here, all of them in channels.csv.")
    return render_page(
        "survey.html",
        {},
        scripts=("survey.js",),
        title=f"{result.model.name} · survey",
        sentences=answer(result),
        level=level_of(result),
        facts=_facts(result),
        warnings=result.warnings,
        notes=result.notes,
        remarks=remarks,
        unusable=[each.message for each in result.unusable[:_MOST_UNUSABLE]],
        unusable_left_out=max(0, len(result.unusable) - _MOST_UNUSABLE),
        failed=[*_failed(run)],
        wrong_title="" if run.result.failures is None else wrong_title(run.result.failures),
        failed_method=[] if result.failures is None else method_words(result.failures),
        figures=_figures(result),
        frame=FRAME,
        layers=page_table("Layers", LAYERS, result.rows),
        columns=[column for column, _ in told],
        channel_count=len(places),
        has_classes=bool(result.classes),
        data=_as_script(
            {
                "columns": [{"key": each.key, "words": each.words, "format": _format(each)} for each, _ in told],
                "channels": [*zip(*(values for _, values in told), (crops.get(at, -1) for at in places), strict=True)],
                "strips": list(strips.values()),
            }
        ),
        making=_making(run),
    )


def _facts(result: Survey) -> list[tuple[str, str, bool]]:
    left_out = f", {counted(len(result.unusable), 'other')} left out" if result.unusable else ""
    facts = [
        *model_facts(result.model),
        ("Inputs", f"{result.input_count:,}{left_out}", bool(result.unusable)),
        ("Outputs", f"{len(result.rows):,} with {counted(channel_counts(result.rows), 'channel')}", False),
        ("Device", f"{result.device}, {result.dtype}", False),
    ]
    if result.classes:
        named = ", ".join(f"{name} {count:,}" for name, count in [*result.classes.items()][:8])
        facts.append(("Classes", f"{len(result.classes):,}: {named}", False))
    return facts


def _failed(run: StoredRun[Survey]) -> Iterator[dict[str, Any]]:
    """Yield what the page shows of each wrong input."""
    failures = run.result.failures
    strips = {strip.index: strip.path for strip in run.record.wrong}
    for place, each in enumerate(failures.inputs if failures is not None else ()):
        assert failures is not None  # noqa: S101 - it has inputs
        uri = ""
        if place in strips:
            uri = thumbnail_uri(run.read_picture(strips[place]), strips[place], _STRIP_SIDE)
        yield {
            "heading": failure_heading(each),
            "reasons": failure_reasons(each, failures),
            "near": neighbour_words(each, failures),
            "picture": uri,
        }


def _figures(result: Survey) -> list[Figure]:
    """Return dead channels and the size of values over depth; none for what no layer has."""
    labels = [row.label or "(model)" for row in result.rows]
    dead = [len(row.dead_channels) / len(row.channels) if row.channels else None for row in result.rows]
    sizes = [
        Series("mean |x|", [row.activation.mean_abs for row in result.rows], "orange"),
        Series("largest |x|", [row.activation.max_abs for row in result.rows]),
    ]
    beyond = [any(each.format == FLOAT16 and each.overflowing for each in row.headroom) for row in result.rows]
    shares = [Series("share of the layer's channels", dead, shape="area")]
    found = (
        over_depth(DepthChart(title="Dead channels", labels=labels, series=shares, axis="percent")),
        over_depth(
            DepthChart(
                title="Size of the values", labels=labels, series=sizes, marks=[("beyond float16", "fail", beyond)]
            )
        ),
    )
    return [each for each in found if each is not None]


def _strips(run: StoredRun[Survey]) -> tuple[dict[tuple[int, int], str], int]:
    """Return the crops of each channel, by row and channel, as data URIs, and how many sheets did not fit."""
    strips: dict[tuple[int, int], str] = {}
    room, left_out = BUDGET, 0
    for sheet in run.record.crops:
        content = run.read_picture(sheet.path)
        room -= len(content)
        if room < 0:
            left_out += 1
            continue
        strips |= {
            (sheet.row, channel): uri for channel, uri in zip(sheet.channels, _lines(sheet, content), strict=True)
        }
    return strips, left_out


def _lines(sheet: CropSheet, content: bytes) -> Iterator[str]:
    try:
        with Image.open(io.BytesIO(content), formats=["JPEG"]) as opened:
            picture = opened.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError(
            f"Cannot read '{safe_text(sheet.path)}': it is no picture of a run. Run the command that made it again."
        ) from error
    step = sheet.tile + sheet.gap
    if picture.height < len(sheet.channels) * step - sheet.gap:
        raise InputError(f"Cannot read '{safe_text(sheet.path)}': it has fewer lines than run.json lists.")
    for line in range(len(sheet.channels)):
        strip = picture.crop((0, line * step, picture.width, line * step + sheet.tile))
        file = io.BytesIO()
        strip.save(file, "JPEG", quality=85)
        yield thumbnail_uri(file.getvalue(), sheet.path, picture.width)


def _channels(
    result: Survey, strips: dict[tuple[int, int], str]
) -> tuple[list[tuple[Column, list[Any]]], list[tuple[int, int]]]:
    """Return the columns that the page has of channels, with their values, and the row and number of each channel."""
    per_row = max(1, _MOST_CHANNELS // max(1, len(result.rows)))
    rows = [(row, channel) for row in result.rows for channel in _shown(row, per_row, strips)]
    told = [
        (column, [safe_text(column.cell(row)) if column.words else _rounded(column.read(row)) for row in rows])
        for column in CHANNELS
        if column.title
    ]
    places = [(row.index, channel.channel) for row, channel in rows]
    return [(column, values) for column, values in told if any(value not in {None, ""} for value in values)], places


def _format(column: Column) -> str:
    """Return how the script writes a column's values."""
    return "percent" if column.text is percent_text else "number" if not (column.words or column.text) else ""


def _shown(row: SurveyRow, most: int, strips: dict[tuple[int, int], str]) -> Sequence[SurveyChannel]:
    """Return the channels of a row that the page has: if not all, those with crops, then dead ones, then the first."""
    if len(row.channels) <= most:
        return row.channels
    dead = {*row.dead_channels}
    order = sorted(range(len(row.channels)), key=lambda at: ((row.index, at) not in strips, at not in dead, at))
    return [row.channels[at] for at in sorted(order[:most])]


def _rounded(value: float | None) -> float | None:
    return value if value is None or isinstance(value, int) else float(f"{value:.5g}")


def _as_script(document: Any) -> Markup:
    text = json.dumps(document, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # noqa: S704 - JSON without any character that could end the element


def _making(run: StoredRun[Survey]) -> list[tuple[str, str]]:
    result = run.result
    versions = ", ".join(f"{name} {number}" for name, number in run.record.versions.items())
    made = [("Command", run.record.command), ("Layers", " ".join(run.record.patterns) or "all")]
    made += [("Weights SHA-256", result.model.sha256)] if result.model.sha256 else []
    cut = f"{result.chunk_count:,} of {result.chunk_size:,} files at most"
    made += [("Batch size", str(result.batch_size)), ("Chunks", cut)]
    threads = str(run.record.threads or "")
    return [
        *made,
        ("Seed", str(result.seed)),
        ("Threads", threads),
        ("Versions", versions),
        ("Platform", run.record.platform),
    ]
