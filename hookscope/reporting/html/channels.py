"""Every channel of a survey as a table of a page that is found by words, with what excites each."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hookscope.errors import InputError
from hookscope.reporting.columns import Column
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
    per_row = max(1, _MOST_CHANNELS // max(1, len(part.rows)))
    rows = [(row, channel) for row in part.rows for channel in _shown(row, per_row, strips)]
    places = [(row.index, channel.channel) for row, channel in rows]
    columns = _columns(part.columns, rows)
    crops = {key: place for place, key in enumerate(strips)}
    total = channel_counts(part.rows)
    remarks = []
    if left_out:
        remarks.append(f"{counted(left_out, 'sheet')} of crops did not fit and are in the run's folder only.")
    if len(rows) < total:
        remarks.append(f"{len(rows):,} of {counted(total, 'channel')} are here, all of them in {part.all_in}.")
    data = {
        "columns": [{"key": column.key, "words": column.words} for column, _ in columns],
        "channels": [*zip(*(cells for _, cells in columns), (crops.get(at, -1) for at in places), strict=True)],
        "orders": _orders([channel for _, channel in rows]),
        "strips": list(strips.values()),
    }
    return {
        "columns": [column for column, _ in columns],
        "count": len(rows),
        "remarks": remarks,
        "data": data,
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


def _columns(columns: Sequence[Column], rows: Sequence[Any]) -> list[tuple[Column, list[str]]]:
    """Return the columns for people that have a text in some row, with their texts."""
    texts = [(column, [safe_text(column.cell(row)) for row in rows]) for column in columns if column.title]
    return [(column, cells) for column, cells in texts if not {*cells} <= {"", "-"}]


def _orders(channels: Sequence[SurveyChannel]) -> dict[str, list[int]]:
    """Return the places of channels in each order that the page offers beside their own."""
    keys: dict[str, Callable[[SurveyChannel], float]] = {
        "dead": lambda channel: (
            (1 if channel.firing_inputs is None else channel.firing_inputs) + channel.firing_positions
        ),
        "selective": lambda channel: 1 if channel.selectivity is None else -channel.selectivity,
        "range": lambda channel: -channel.max_abs,
    }
    return {name: sorted(range(len(channels)), key=lambda at: key(channels[at])) for name, key in keys.items()}


def _shown(row: SurveyRow, most: int, strips: dict[tuple[int, int], str]) -> Sequence[SurveyChannel]:
    """Return the channels of a row that the page has: if not all, those with crops, then dead ones, then the first."""
    if len(row.channels) <= most:
        return row.channels
    dead = {*row.dead_channels}
    order = sorted(range(len(row.channels)), key=lambda at: ((row.index, at) not in strips, at not in dead, at))
    return [row.channels[at] for at in sorted(order[:most])]
