"""Every channel of a survey as a table of a page that is found by words, with what excites each."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from markupsafe import Markup

from hookscope.errors import InputError
from hookscope.reporting.columns import Column, percent_text
from hookscope.reporting.document import ChannelSearch
from hookscope.reporting.html.pictures import BUDGET, jpeg_uri, opened_picture
from hookscope.results.survey import CropSheet, SurveyChannel, SurveyRow, channel_counts
from hookscope.text import counted, safe_text

# Channels on the page. Their numbers take 3 MB.
_MOST_CHANNELS = 20_000


def shown_channels(part: ChannelSearch, read: Callable[[str], bytes]) -> dict[str, Any]:
    """Return what the template draws; `read` returns a picture of the run.

    Raises:
        InputError: If a picture is missing, or none.
    """
    strips, left_out = _strips(part.sheets, read)
    columns, places = _channels(part, strips)
    crops = {key: place for place, key in enumerate(strips)}
    total = channel_counts(part.rows)
    remarks = []
    if left_out:
        remarks.append(f"{counted(left_out, 'sheet')} of crops did not fit and are in the run's folder only.")
    if len(places) < total:
        remarks.append(f"{len(places):,} of {counted(total, 'channel')} are here, all of them in {part.all_in}.")
    data = {
        "columns": [{"key": heading.key, "words": heading.words, "format": _format(heading)} for heading, _ in columns],
        "channels": [*zip(*(values for _, values in columns), (crops.get(at, -1) for at in places), strict=True)],
        "strips": list(strips.values()),
    }
    return {
        "columns": [column for column, _ in columns],
        "count": len(places),
        "remarks": remarks,
        "data": _as_script(data),
    }


def _strips(sheets: Sequence[CropSheet], read: Callable[[str], bytes]) -> tuple[dict[tuple[int, int], str], int]:
    """Return the crops of each channel, by row and channel, as data URIs, and how many sheets did not fit."""
    strips: dict[tuple[int, int], str] = {}
    room, left_out = BUDGET, 0
    for sheet in sheets:
        content = read(sheet.path)
        room -= len(content)
        if room < 0:
            left_out += 1
            continue
        strips |= {
            (sheet.row, channel): uri for channel, uri in zip(sheet.channels, _lines(sheet, content), strict=True)
        }
    return strips, left_out


def _lines(sheet: CropSheet, content: bytes) -> Iterator[str]:
    picture = opened_picture(content, sheet.path)
    step = sheet.tile + sheet.gap
    if picture.height < len(sheet.channels) * step - sheet.gap:
        raise InputError(f"Cannot read '{safe_text(sheet.path)}': it has fewer lines than run.json lists.")
    for line in range(len(sheet.channels)):
        yield jpeg_uri(picture.crop((0, line * step, picture.width, line * step + sheet.tile)))


def _channels(
    part: ChannelSearch, strips: dict[tuple[int, int], str]
) -> tuple[list[tuple[Column, list[Any]]], list[tuple[int, int]]]:
    """Return the columns that the page has of channels, with their values, and the row and number of each channel."""
    per_row = max(1, _MOST_CHANNELS // max(1, len(part.rows)))
    rows = [(row, channel) for row in part.rows for channel in _shown(row, per_row, strips)]
    columns = [
        (column, [safe_text(column.cell(row)) if column.words else _rounded(column.read(row)) for row in rows])
        for column in part.columns
        if column.title
    ]
    places = [(row.index, channel.channel) for row, channel in rows]
    return [(column, values) for column, values in columns if any(value not in {None, ""} for value in values)], places


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
