"""Tables for terminals of any width: columns that are kept or left out, rows that are folded, numbers as text."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Group, JustifyMethod, OverflowMethod, RenderableType
from rich.table import Table
from rich.text import Text

from hookscope.parameters import shows_all
from hookscope.results.comparison import Prediction
from hookscope.results.contents import StoredTensor
from hookscope.results.distribution import BIN_COUNT, EXACT_LIMIT, Distribution, histogram
from hookscope.results.statistics import TensorStatistics
from hookscope.results.token_norms import TokenNorms
from hookscope.text import figure, percent_text, safe_text, shape_text

# A table with more rows than this is folded: the first and last rows stay, and all notable rows; about what
# two screens hold.
_FOLD_ABOVE_ROWS = 60
_FOLD_KEEP_ROWS = 20

# Terminals at least this wide get two blanks between columns instead of one.
_ROOMY_WIDTH = 100

# Widths of the name column, in cells: the least beside columns of a rank below 10, the least beside other columns,
# and the most that it gets so that long names stay different.
_NAME_WIDTH_AT_LEAST = 16
_NAME_WIDTH_WANTED = 28
_NAME_WIDTH_AT_MOST = 32
REMARK_WIDTH = 20

# Shares of a shortened name for its head, the usual share first.
_HEAD_SHARES = (1 / 3, 2 / 3)

# Bars in a sparkline: three bins of `histogram` each, and as wide as a number.
_SPARK_WIDTH = 8
_BLOCKS = "▁▂▃▄▅▆▇█"

SPARKLINE_MEANING = (
    f"hist: {_SPARK_WIDTH} equal bins, 1st to 99th percentile of each row, the rest in the end bins; "
    "height: square root of share"
)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table, declared once: the terminal, CSV files, data frames, pages and the documentation read it.

    Attributes:
        key: Its name for machines, and the attribute that it reads without a `value`; "" if it is for people only.
        title: Its header for people, unique in its table; "" if it is for machines only.
        meaning: What it holds, in a few words; `unit`, where the title does not name it.
        rank: The lowest stays longest in a narrow terminal. 0 is the name column: its names are shortened to make room
            for columns below 10.
        text: Returns a value as text; None is always "-".
        shown: Returns its text from a row, if that is more than `text` of the value.
        in_full: Returns its text from a row in a full table, if that is more than `shown`.
        words: Whether it is aligned left, and wrapped beyond `max_width`; numbers are aligned right, never wrapped.
        fold: Length above which its text is shortened. A full table has no fold, and twice the `max_width`.
        beside: Title of a column of lower rank, without which this column means nothing.
        usual: It is left out if all rows have this text or "-"; None if it always stays.
        varies: Whether it is left out if all rows have the same text.
        style: Style of its cells in a terminal, in rows without a style of their own.
    """

    key: str
    title: str = ""
    meaning: str = ""
    rank: int = 99
    text: Callable[[Any], str] | None = None
    value: Callable[[Any], Any] | None = None
    shown: Callable[[Any], str] | None = None
    in_full: Callable[[Any], str] | None = None
    unit: str = ""
    words: bool = False
    fold: int = 0
    max_width: int = 1000
    beside: str = ""
    usual: str | None = None
    varies: bool = False
    style: str = ""

    @property
    def read(self) -> Callable[[Any], Any]:
        """What reads the value from a row."""
        return self.value or attrgetter(self.key)

    def cell(self, row: Any) -> str:
        """Return the text of a row for people."""
        if self.shown is not None:
            return self.shown(row)
        value = self.read(row)
        return "-" if value is None else (self.text or (str if self.words else number_text))(value)

    def on(self, part: Callable[[Any], Any], blank: str = "-", **changes: Any) -> "Column":
        """Return the column for rows whose `part` is the row to read; `blank` where the part is None."""

        def through(read: Callable[[Any], Any], without: Any) -> Callable[[Any], Any]:
            return lambda row: without if (held := part(row)) is None else read(held)

        in_full = self.in_full and through(self.in_full, blank)
        return replace(
            self, value=through(self.read, None), shown=through(self.cell, blank), in_full=in_full, **changes
        )


def machine_columns(*keys: str) -> tuple[Column, ...]:
    """Return columns of attributes that only machines get."""
    return tuple(map(Column, keys))


def telling(columns: Sequence[Column], rows: Sequence[Any]) -> list[tuple[Column, list[str]]]:
    """Return the columns for people and their cells, without columns that are empty or usual in every row.

    The name column and the last column stay.
    """
    titled = [column for column in columns if column.title]
    pairs = [(column, [column.cell(row) for row in rows]) for column in titled]
    return [
        (column, cells)
        for column, cells in pairs
        if not column.rank
        or column is titled[-1]
        or not (
            {*cells} <= ({""} if column.usual is None else {"", "-", column.usual})
            or (column.varies and len({*cells}) == 1)
        )
    ]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A column as a terminal shows it, with a cell for each row; see `Column`."""

    header: str
    cells: Sequence[Text]
    rank: int
    words: bool = False
    max_width: int = 1000
    beside: str = ""

    @property
    def width(self) -> int:
        """Cells the widest line needs, as far as `max_width` allows."""
        lines = (line for cell in self.cells for line in cell.plain.split("\n"))
        return min(self.max_width, max(cell_len(self.header), *map(cell_len, lines)))


def drawn_columns(columns: Sequence[Column], rows: Sequence[Any], styles: Sequence[str], *, full: bool) -> list[Drawn]:
    """Return columns with their cells; the last is of remarks, empty if the last declared column is not of words."""
    drawn = []
    columns = [replace(column, shown=column.in_full) if full and column.in_full else column for column in columns]
    for column, texts in telling(columns, rows):
        short = [fold_name(text, column.fold) for text in texts] if column.fold and not full else texts
        cells = [
            safe_line(text, column.style if text and not style else "")
            for text, style in zip(short, styles, strict=True)
        ]
        words = (word for text in short for word in text.split())
        max_width = max(column.max_width * (1 + full), *map(cell_len, words), 0)  # no name is broken
        drawn.append(Drawn(column.title, cells, column.rank, column.words, max_width, column.beside))
    return drawn if drawn[-1].words else [*drawn, Drawn("", [Text()] * len(rows), 99, words=True)]


def draw(columns: Sequence[Drawn], width: int, styles: Sequence[str], positions: Iterable[int]) -> RenderableType:
    """Return a table of `fitted` columns with the rows at some positions; a line replaces each gap."""
    name = next((position for position, column in enumerate(columns) if column.rank == 0), 0)
    begin = sum(column.width + _gap(width) for column in columns[:name])
    parts: list[RenderableType] = [_section(columns, width, show_header=True)]
    shown_until = 0
    for position in (*positions, len(styles)):
        if position > shown_until:
            parts.append(Text(f"… {position - shown_until:,} rows not shown, {shows_all()}", style="dim italic"))
        if position < len(styles):
            cells = [column.cells[position] for column in columns]
            section = parts[-1]
            if not isinstance(section, Table):
                parts.append(section := _section(columns, width, show_header=False))
            short, *below = cells[name].split("\n", allow_blank=True)
            section.add_row(*cells[:name], short, *cells[name + 1 :], style=styles[position])
            parts += (_remark_below(remark, begin, width, styles[position]) for remark in below)
        shown_until = position + 1
    return Group(*parts)


def fitted(columns: Sequence[Drawn], width: int) -> list[Drawn]:
    """Return the columns that fit `width`, in their order, with shortened names.

    If the last column does not fit, its remarks join the names.
    """
    remarks = columns[-1].cells
    name = min(columns, key=lambda column: column.rank)
    kept = {name.header}
    spare = width
    names = [cell.plain for cell in name.cells]
    at_least = _telling_width(names, name.width)
    for column in sorted(columns, key=lambda column: column.rank)[1:]:
        reserved = min(name.width, at_least if column.rank < 10 else max(at_least, _NAME_WIDTH_WANTED))
        has_room = column.width + _gap(width) + reserved <= spare
        if has_room and (not column.beside or column.beside in kept) and any(cell.plain for cell in column.cells):
            kept.add(column.header)
            spare -= column.width + _gap(width)
    if columns[-1].header in kept:
        cells = [Text(short) for short in _fold_names(names, spare)]
    else:
        short = _fold_names(names, spare)
        cells = [_with_remark(*row, spare) for row in zip(names, short, remarks, strict=True)]
    named = replace(name, cells=cells, max_width=spare)
    wider = {
        name.header: named,
        columns[-1].header: replace(columns[-1], max_width=columns[-1].width + spare - named.width),
    }
    return [wider.get(column.header, column) for column in columns if column.header in kept]


def kept_positions(notable: Sequence[int], *, full: bool, most: int | None = None) -> Sequence[int]:
    """Return the positions of the rows to show: both ends, and notable rows.

    If only `most` rows fit, the most notable stay. A gap of one row is filled: its line would be as long.
    """
    count = len(notable)
    if full or all(notable) or count <= (most or _FOLD_ABOVE_ROWS):
        return range(count)
    end = most // 3 if most else _FOLD_KEEP_ROWS
    middle = sorted(filter(notable.__getitem__, range(end, count - end)), key=lambda at: -notable[at])
    kept = {*range(end), *middle[: most and most - 2 * end], *range(count - end, count)}
    return [at for at in range(count) if at in kept or {at - 1, at + 1} <= kept]


def safe_line(text: str, style: str = "", overflow: OverflowMethod | None = None) -> Text:
    """Return a line for a terminal. Every text of a result passes here: control characters are spelled out."""
    return Text(safe_text(text), style=style, overflow=overflow)


def broken(text: str, width: int, indent: str) -> str:
    """Return a text in lines of a terminal's width, broken at blanks only; `indent` stands before all but the first."""
    first, *words = text.split(" ")
    lines = [first]
    for word in words:
        if cell_len(lines[-1]) + 1 + cell_len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(indent + word)
    return "\n".join(lines)


def number_text(value: float | None, digits: int = 4) -> str:
    """Return a number in significant digits, without a power of ten where that reads well; "0" is exactly zero."""
    if value is None:
        return "-"
    if value == 0 or not math.isfinite(value):
        return figure(value)
    rounded = f"{value:.{digits - 1}e}"
    mantissa, power = rounded.split("e")
    if -3 <= int(power) <= 3:
        return f"{float(rounded):.{max(0, digits - 1 - int(power))}f}"
    return f"{mantissa}e{int(power)}"


def quantile_text(value: float | None, count: int) -> str:
    """Return a quantile of `count` values: in four digits if it is exact, else in the two that its error leaves."""
    return number_text(value, 4 if count <= EXACT_LIMIT else 2)


def probability_text(probability: float) -> str:
    """Return a probability in two decimals; 0.00 and 1.00 are exact."""
    if math.isnan(probability):
        return figure(probability)
    if probability in (0, 1):
        return f"{probability:.2f}"
    return "<0.01" if probability < 0.01 else ">0.99" if probability > 0.99 else f"{probability:.2f}"


def classes_text(classes: Iterable[tuple[str, float]]) -> str:
    """Return classes with their probabilities: "Egyptian cat 0.40 · tiger cat 0.23"."""
    return " · ".join(f"{name} {probability_text(probability)}" for name, probability in classes)


def prediction_text(prediction: Prediction, most: int | None = None) -> str:
    """Return the best classes of an input and what their numbers are: "Egyptian cat 0.40 · tabby 0.23 (softmax)"."""
    if prediction.is_nan:
        return "probabilities that are NaN"
    return f"{classes_text(prediction.classes[:most])} ({prediction.reading})"


def integer_text(value: int) -> str:
    """Return a count: "1,234"."""
    return f"{value:,}"


def non_finite_text(statistics: TensorStatistics | StoredTensor) -> str:
    """Return how many values are not finite: "130,310 NaN, 2 Inf"; "" for none."""
    counts = ((statistics.nan_count, "NaN"), (statistics.inf_count, "Inf"))
    return ", ".join(f"{count:,} {kind}" for count, kind in counts if count)


def sparkline(distribution: Distribution | None, width: int = _SPARK_WIDTH) -> str:
    """Draw how values are distributed, as described by `SPARKLINE_MEANING`; "-" without a distribution.

    An empty bin is blank; any other bin has at least the lowest block. If both percentiles are equal, a single bar
    stands in the middle.
    """
    counted = histogram(distribution)
    if counted is None:
        return "-"
    if len(counted.counts) < BIN_COUNT:
        return _BLOCKS[-1].center(width)
    step = BIN_COUNT // width
    bars = [sum(counted.counts[start : start + step]) for start in range(0, BIN_COUNT, step)]
    bars[0] += counted.below
    bars[-1] += counted.above
    heights = (math.ceil(math.sqrt(bar / max(bars)) * len(_BLOCKS)) for bar in bars)
    return "".join(_BLOCKS[height - 1] if height else " " for height in heights)


def fold_name(name: str, width: int, head_share: float = _HEAD_SHARES[0]) -> str:
    """Return `name` as safe text in at most `width` terminal cells, "…" for its middle.

    `head_share` of what stays is the head. The tail is usually longer, as it is the most specific.
    """
    name = safe_text(name)
    if cell_len(name) <= width:
        return name
    room = int((width - 1) * head_share)
    if name.isascii():
        return f"{name[:room]}…{name[len(name) - (width - 1 - room) :]}"
    head, tail = "", ""
    while name and cell_len(head) + cell_len(name[0]) <= room:
        head, name = head + name[0], name[1:]
    while name and cell_len(head) + cell_len(tail) + cell_len(name[-1]) <= width - 1:
        tail, name = name[-1] + tail, name[:-1]
    return f"{head}…{tail}"


def _fold_names(names: Sequence[str], width: int) -> list[str]:
    """Shorten names by the share in `_HEAD_SHARES` that keeps most of them different."""
    folded = ([fold_name(name, width, share) for name in names] for share in _HEAD_SHARES)
    return max(folded, key=lambda short: len({*short}))


def _telling_width(names: Sequence[str], widest: int) -> int:
    """Return the smallest width of a name column at which `_fold_names` keeps all names different."""
    narrowest = min(widest, _NAME_WIDTH_AT_LEAST)
    widths = range(narrowest, min(widest, _NAME_WIDTH_AT_MOST) + 1)
    apart = len({*names})
    return next((width for width in widths if len({*_fold_names(names, width)}) == apart), widths[-1])


def _with_remark(name: str, short: str, remark: Text, width: int) -> Text:
    """Put a remark after the name `short`, or on the next line if they do not fit on one."""
    cell = Text(short)
    if not remark.plain:
        return cell
    if cell_len(name) + 3 + remark.cell_len <= width:
        return cell.append(" · ").append_text(remark)
    indent = len(name) - len(name.lstrip())
    return cell.append("\n").append(" " * indent + "└ ").append_text(remark)


def _remark_below(remark: Text, begin: int, width: int, style: str) -> Text:
    """Break a remark that stands under its name at the width of the table."""
    words = remark.plain.lstrip()
    first = " " * (begin + remark.cell_len - cell_len(words))
    lines = broken(first + words, width, first + " " * len("└ "))
    return Text(lines, style=remark.spans[-1].style if remark.spans else style)


def _section(columns: Sequence[Drawn], width: int, *, show_header: bool) -> Table:
    padding = (0, _gap(width) - 1, 0, 0)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=padding, show_header=show_header)
    for column in columns:
        justify: JustifyMethod = "left" if column.words else "right"
        table.add_column(column.header, justify=justify, width=column.width, no_wrap=not column.words, overflow="fold")
    return table


def _gap(width: int) -> int:
    return 2 if width >= _ROOMY_WIDTH else 1


def token_norms_text(tokens: TokenNorms | None) -> str:
    """Return "27.71 to 30.62", the median and the greatest norm, with how many tokens are beyond the limit."""
    if tokens is None:
        return "-"
    high = f", {tokens.high_count:,} high" if tokens.high_count else ""
    return f"{number_text(tokens.median)} to {number_text(tokens.max)}{high}"


STATISTICS: Mapping[str, Column] = {
    column.key: column
    for column in (
        Column("shape", "shape", "shape of the tensor", value=lambda stats: shape_text(stats.shape), text=str),
        Column("dtype", "dtype", "dtype of the tensor", words=True, varies=True),
        Column("element_count", "values", "number of values", text=integer_text),
        Column("mean", "mean", "arithmetic mean"),
        Column("std", "std", "population standard deviation"),
        Column("min", "min", "smallest value"),
        Column("max", "max", "largest value"),
        Column("mean_abs", "mean |x|", "mean absolute value"),
        Column("l2", "L2", "root of the sum of squares"),
        Column("zero_fraction", "zeros", "share of exact zeros", text=percent_text),
        Column("nan_count", "NaN", "values that are NaN", text=integer_text, usual="0"),
        Column("inf_count", "Inf", "values that are infinite", text=integer_text, usual="0"),
        Column("nonfinite_count", "NaN, Inf", "values that are not finite", text=integer_text),
        Column("dead_channel_fraction", "dead channels", "share of channels that are 0 everywhere", text=percent_text),
        Column("max_abs", "max |x|", "largest magnitude"),
        *machine_columns("channel_axis", "channel_count", "unmeasured"),
    )
}
"""Statistics that rows have as attributes, or that their `statistics` have; all but counts are over finite values."""


NUMBERS = (
    "mean",
    "std",
    "min",
    "max",
    "mean_abs",
    "l2",
    "zero_fraction",
    "dead_channel_fraction",
    "nan_count",
    "inf_count",
)
"""The statistics of any tensor in files for machines."""


def statistics(ranks: Mapping[str, int], of: str = "", **titles: str) -> tuple[Column, ...]:
    """Return columns of statistics with their ranks in a table; only machines get columns of rank 0.

    `of` is the attribute of a row that has the statistics; `titles` replace the usual ones, by key.
    """
    named = [
        replace(STATISTICS[key], rank=rank, title=titles.get(key, STATISTICS[key].title) if rank else "")
        for key, rank in ranks.items()
    ]
    return tuple(column.on(attrgetter(of)) if of else column for column in named)
