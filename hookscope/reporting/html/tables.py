"""Tables of a page: rows with the grids that fit, the first maps of a few rows, and channels to search."""

from collections.abc import Callable, Iterator, Sequence
from urllib.parse import quote

from hookscope.errors import InputError
from hookscope.reporting.axes import spread
from hookscope.reporting.columns import Column, telling
from hookscope.reporting.document import ChannelSearch, DetailedRow, DetailedTable, Table
from hookscope.reporting.grids import colour_marks
from hookscope.reporting.html.pictures import BUDGET, Shown, first_maps, jpeg_uri, opened_picture, shrink_all
from hookscope.results.grids import Grid
from hookscope.results.runs.reading import StoredRun
from hookscope.results.survey import CropSheet, SurveyChannel, SurveyRow, channel_counts
from hookscope.text import counted, safe_text

# Bytes that a row's text takes from the room of pictures, and the least room of pictures.
_ROW_BYTES, _LEAST = 2_000, 1_000_000

# Strips before the table: rows, channels of each, and the longer side of a map in pixels, with several channels and
# with a single map (tokens).
_STRIPS, _STRIP_CHANNELS, _STRIP_SIDE, _LONE_MAP_SIDE = 5, 8, 112, 336

_MOST_TABLE_ROWS = 5000  # above which a browser takes long to lay a table out
_MOST_CHANNELS = 20_000  # these take 3 MB of the page
_MANY_ROWS = 200  # above which the table lays out only rows near the window


def shown_table(table: Table) -> Shown:
    """Return the rows of interest of a table, as many as a browser lays out quickly; cells stand row by row."""
    shown = table.of_interest()
    rows, notable = shown.rows[:_MOST_TABLE_ROWS], [level == "fail" for level in shown.levels[:_MOST_TABLE_ROWS]]
    remark = table.remark
    if len(rows) < len(table.rows):
        first = "The first " if len(rows) < len(shown.rows) else ""
        remark += f" {first}{len(rows):,} of {counted(len(table.rows), 'row')}; {table.all_in} has all."
    columns = telling(table.columns, rows)
    return {
        "title": table.title,
        "headers": [column for column, _ in columns],
        "rows": [*zip(*(texts for _, texts in columns), strict=True)],
        "notable": notable or [False] * len(rows),
        "remark": remark.strip(),
    }


def shown_row(row: DetailedRow, number: int, grids: Sequence[Shown] = ()) -> Shown:
    """Return a row with its place on the page, its tables, and its grids."""
    return {
        "row": row,
        "number": number,
        "href": f"#layer={quote(safe_text(row.name), safe='')}",
        "is_flagged": any(notable for _, notable in row.flags),
        "tables": [*map(shown_table, row.tables)],
        "grids": grids,
    }


def shown_rows(part: DetailedTable, run: StoredRun | None) -> Shown:
    """Return what the template draws of a detailed table."""
    rows = part.rows()
    grids, remarks = _grids_and_remarks(rows, run)
    rest = iter(grids)
    details = [
        shown_row(row, number, [next(rest) for _ in row.grids] if run is not None else ())
        for number, row in enumerate(rows)
    ]
    columns = _shown_columns(part, rows)
    return {
        "details": details,
        "columns": columns,
        "style": "".join(f"#table.no-{shown['name']} .c-{shown['name']} {{ display: none; }}\n" for shown in columns),
        "kinds": sorted({row.type for row in rows}),
        "is_long": len(rows) > _MANY_ROWS,
        "strips": [] if run is None else _first_channels(details, run),
        "remarks": remarks,
    }


def _grids_and_remarks(rows: Sequence[DetailedRow], run: StoredRun | None) -> tuple[list[Shown], list[str]]:
    """Return the grids of all rows, and remarks on detail that was lost to keep the page small.

    A grid has no picture without maps or room; `input_file` lies under its maps, "" for none.
    """
    grids = [grid for row in rows for grid in row.grids]
    if run is None or not grids:
        return [], []
    room = max(BUDGET - _ROW_BYTES * len(rows), _LEAST)
    pictures, fidelity = shrink_all(grids, run.read_picture, room)
    left = sum(picture is None and grid.tiles is not None for picture, grid in zip(pictures, grids, strict=True))
    left_out = f"{counted(left, 'grid')} did not fit and are in the run's folder only." if left else ""
    files = [*run.record.thumbnails, *[None] * (1 + max(grid.input_index for grid in grids))]
    shown = [
        {"grid": grid, "number": number, "picture": picture, "input_file": files[grid.input_index] or ""}
        for number, (grid, picture) in enumerate(zip(grids, pictures, strict=True))
    ]
    return shown, [*filter(None, [fidelity.sentence, left_out])]


def _shown_columns(part: DetailedTable, rows: Sequence[DetailedRow]) -> list[Shown]:
    is_seen = dict(part.columns)
    read = [row.row for row in rows]
    columns = telling([*is_seen, Column("", "last", words=True, value=lambda _: "")], read)[:-1]
    return [
        {
            "column": column,
            "name": (name := column.key or column.title),  # also its CSS class, and its name in the page's address
            "classes": f"c-{name}{'' if column.words else ' number'}",
            "is_seen": is_seen[column],
            "cells": cells,
            "sort_values": [*map(column.read, read)] if column.key else [None] * len(read),
        }
        for column, cells in columns
    ]


def _first_channels(details: Sequence[Shown], run: StoredRun) -> list[Shown]:
    """Return the first maps of a few rows over depth: the last row of each size, from large to small."""
    drawn = [
        (shown, grid, (tiles.height, tiles.width))
        for shown in details
        if "pad" not in shown["row"].type.lower()
        for grid in shown["row"].grids
        if grid.input_index == 0 and (tiles := grid.tiles) and min(tiles.height, tiles.width) > 1
    ]
    places = sorted({size: place for place, (_, _, size) in enumerate(drawn)}.values())
    return [_strip(run, *drawn[places[at]][:2]) for at in spread(len(places), _STRIPS)]


def _strip(run: StoredRun, shown: Shown, grid: Grid) -> Shown:
    side = _LONE_MAP_SIDE if grid.tiles and grid.tiles.count == 1 else _STRIP_SIDE
    uri, count, width, colours = first_maps(run.read_picture(grid.path), grid, _STRIP_CHANNELS, side)
    caption = (shown["row"].kind, *colour_marks(grid))
    return {
        "name": shown["row"].name,
        "href": shown["href"],
        "count": count,
        "uri": uri,
        "width": width,
        "caption": caption,
        "colours": colours,
        "bar": grid.bar,
    }


def shown_channels(part: ChannelSearch, read: Callable[[str], bytes]) -> Shown:
    """Return what the template draws; `read` returns a picture of the run.

    Raises:
        InputError: If a picture is missing or damaged.
    """
    strips, left_out = _strips(part.sheets, read)
    per_row = max(1, _MOST_CHANNELS // max(1, len(part.rows)))
    rows = [(row, channel) for row in part.rows for channel in _channels_to_show(row, per_row, strips)]
    places = [(row.index, channel.channel) for row, channel in rows]
    texts = [(column, [safe_text(column.cell(row)) for row in rows]) for column in part.columns if column.title]
    columns = [(column, cells) for column, cells in texts if not {*cells} <= {"", "-"}]
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
    """Return data URIs of crops by row and channel, and the number of sheets that did not fit."""
    strips: dict[tuple[int, int], str] = {}
    room, left_out = BUDGET, 0
    for sheet in sheets:
        content = read(sheet.path)
        room -= len(content)
        if room < 0:
            left_out += 1
            continue
        strips |= {
            (sheet.row, channel): uri for channel, uri in zip(sheet.channels, _crops_of(sheet, content), strict=True)
        }
    return strips, left_out


def _crops_of(sheet: CropSheet, content: bytes) -> Iterator[str]:
    picture = opened_picture(content, sheet.path)
    step = sheet.tile + sheet.gap
    if picture.height < len(sheet.channels) * step - sheet.gap:
        raise InputError(f"Cannot read '{safe_text(sheet.path)}': it has fewer lines than run.json lists.")
    for line in range(len(sheet.channels)):
        yield jpeg_uri(picture.crop((0, line * step, picture.width, line * step + sheet.tile)))


def _orders(channels: Sequence[SurveyChannel]) -> dict[str, list[int]]:
    """Return the positions of the channels in the orders that the page offers, besides the order of the network."""
    keys: dict[str, Callable[[SurveyChannel], float]] = {
        "dead": lambda channel: (
            (1 if channel.firing_inputs is None else channel.firing_inputs) + channel.firing_positions
        ),
        "selective": lambda channel: 1 if channel.selectivity is None else -channel.selectivity,
        "range": lambda channel: -channel.max_abs,
    }
    return {name: sorted(range(len(channels)), key=lambda at: key(channels[at])) for name, key in keys.items()}


def _channels_to_show(row: SurveyRow, most: int, strips: dict[tuple[int, int], str]) -> Sequence[SurveyChannel]:
    """Return at most `most` channels of a row: first channels with crops, then dead ones, then the others in order."""
    if len(row.channels) <= most:
        return row.channels
    dead = {*row.dead_channels}
    order = sorted(range(len(row.channels)), key=lambda at: ((row.index, at) not in strips, at not in dead, at))
    return [row.channels[at] for at in sorted(order[:most])]
