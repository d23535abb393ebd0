"""Tables of a page: rows with the grids that fit, the first maps of a few rows, and channels to search."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import quote

from hookscope.errors import InputError
from hookscope.reporting.axes import spread
from hookscope.reporting.columns import Column, telling
from hookscope.reporting.document import ChannelSearch, DetailedTable, RowDetails, Table
from hookscope.reporting.grids import colour_marks
from hookscope.reporting.html.pictures import BUDGET, Picture, first_maps, jpeg_uri, opened_picture, shrink_all
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
_MOST_CHANNELS = 20_000  # their numbers take 3 MB
_MANY_ROWS = 200  # above which the table lays out only rows near the window


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table of a page: headers are columns, cells stand row by row, and rows that call for a look are notable."""

    title: str
    headers: Sequence[Column]
    rows: Sequence[Sequence[str]]
    notable: Sequence[bool]
    remark: str = ""


def shown_table(table: Table) -> PageTable:
    """Return the rows of interest of a table, as many as a browser lays out quickly."""
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


@dataclass(frozen=True, slots=True)
class ShownGrid:
    """A grid of a row; it has no picture without maps or room. `input_file` lies under its maps, "" for none."""

    grid: Grid
    number: int
    picture: Picture | None
    input_file: str


@dataclass(frozen=True, slots=True)
class ShownRow:
    """A row of heat maps or of a detailed table, with the page that a click on it opens."""

    name: str
    number: int
    details: RowDetails
    other_names: Sequence[str] = ()
    kind: str = ""
    flags: Sequence[tuple[str, bool]] = ()
    grids: Sequence[ShownGrid] = ()

    @property
    def tables(self) -> list[PageTable]:
        """The tables of its details."""
        return [shown_table(table) for table in self.details.tables]

    @property
    def href(self) -> str:
        """Its place on the page."""
        return f"#layer={quote(safe_text(self.name), safe='')}"

    @property
    def flagged(self) -> bool:
        """Whether a flag calls for a look."""
        return any(notable for _, notable in self.flags)


@dataclass(frozen=True, slots=True)
class ShownColumn:
    """A column with the text and the sort value of each row; `shown` if it is visible at first."""

    column: Column
    shown: bool
    cells: Sequence[str]
    values: Sequence[Any]

    @property
    def name(self) -> str:
        """Its class and its name in the page's address."""
        return self.column.key or self.column.title

    @property
    def classes(self) -> str:
        """The classes of its cells."""
        return f"c-{self.name}{'' if self.column.words else ' number'}"


@dataclass(frozen=True, slots=True)
class Strip:
    """The first channels of the maps of one row, side by side; `width` of the picture on the page, in pixels."""

    row: ShownRow
    count: int
    uri: str
    width: int
    caption: Sequence[str]
    colours: str
    bar: Sequence[str]


@dataclass(frozen=True)
class ShownTable:
    """A detailed table with what its template draws."""

    part: DetailedTable
    run: StoredRun[Any] | None

    @cached_property
    def _rows(self) -> Sequence[Any]:
        return self.part.rows()

    @cached_property
    def _grids_and_remarks(self) -> tuple[list[ShownGrid], list[str]]:
        """The grids of all rows, and remarks on detail that was lost to keep the page small."""
        grids = [grid for row in self._rows for grid in row.details.grids]
        if self.run is None or not grids:
            return [], []
        room = max(BUDGET - _ROW_BYTES * len(self._rows), _LEAST)
        pictures, fidelity = shrink_all(grids, self.run.read_picture, room)
        left = sum(picture is None and grid.tiles is not None for picture, grid in zip(pictures, grids, strict=True))
        left_out = f"{counted(left, 'grid')} did not fit and are in the run's folder only." if left else ""
        files = [*self.run.record.thumbnails, *[None] * (1 + max(grid.input_index for grid in grids))]
        shown = [
            ShownGrid(grid, number, picture, files[grid.input_index] or "")
            for number, (grid, picture) in enumerate(zip(grids, pictures, strict=True))
        ]
        return shown, [*filter(None, [fidelity.sentence, left_out])]

    @property
    def remarks(self) -> Sequence[str]:
        """Remarks on detail that was lost to keep the page small."""
        return self._grids_and_remarks[1]

    @cached_property
    def details(self) -> list[ShownRow]:
        """The rows, in their order."""
        rest = iter(self._grids_and_remarks[0])
        return [
            ShownRow(
                row.name,
                number,
                row.details,
                row.other_names,
                row.type,
                row.flags,
                [next(rest) for _ in row.details.grids] if self.run is not None else (),
            )
            for number, row in enumerate(self._rows)
        ]

    @cached_property
    def columns(self) -> list[ShownColumn]:
        """The columns that are not empty."""
        is_seen = dict(self.part.columns)
        rows = [row.row for row in self._rows]
        columns = telling([*is_seen, Column("", "last", words=True, value=lambda _: "")], rows)[:-1]
        return [
            ShownColumn(column, is_seen[column], cells, [*map(column.read, rows)] if column.key else [None] * len(rows))
            for column, cells in columns
        ]

    @property
    def style(self) -> str:
        """CSS rules that hide columns."""
        return "".join(f"#table.no-{column.name} .c-{column.name} {{ display: none; }}\n" for column in self.columns)

    @property
    def kinds(self) -> list[str]:
        """The types of the rows."""
        return sorted({row.kind for row in self.details})

    @property
    def is_long(self) -> bool:
        """Whether rows are laid out only near the window."""
        return len(self._rows) > _MANY_ROWS

    @cached_property
    def strips(self) -> list[Strip]:
        """A few rows over depth with maps of the first input: the last row of each size, from large to small."""
        drawn = [
            (row, shown.grid)
            for row in self.details
            if "pad" not in row.kind.lower()
            for shown in row.grids
            if shown.grid.input_index == 0 and (tiles := shown.grid.tiles) and min(tiles.height, tiles.width) > 1
        ]
        last = {(grid.tiles.height, grid.tiles.width): place for place, (_, grid) in enumerate(drawn) if grid.tiles}
        places = sorted(last.values())
        run = self.run
        return [] if run is None else [_strip(run, *drawn[places[at]]) for at in spread(len(places), _STRIPS)]


def _strip(run: StoredRun[Any], row: ShownRow, grid: Grid) -> Strip:
    side = _LONE_MAP_SIDE if grid.tiles and grid.tiles.count == 1 else _STRIP_SIDE
    uri, count, width, colours = first_maps(run.read_picture(grid.path), grid, _STRIP_CHANNELS, side)
    return Strip(row, count, uri, width, (row.details.kind, *colour_marks(grid)), colours, grid.bar)


def shown_channels(part: ChannelSearch, read: Callable[[str], bytes]) -> dict[str, Any]:
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
