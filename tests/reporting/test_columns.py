import io
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from hookscope.reporting.columns import (
    REMARK_WIDTH,
    Column,
    Drawn,
    draw,
    drawn_columns,
    fitted,
    fold_name,
    kept_positions,
    number_text,
    probability_text,
    sparkline,
    telling,
)
from hookscope.reporting.document import Table
from hookscope.reporting.html.tables import shown_table
from hookscope.reporting.tables import csv_text
from hookscope.results.distribution import distribution_of
from hookscope.text import safe_text
from tests.reporting.checked import anything


@given(anything, st.integers(min_value=1, max_value=30))
def test_a_folded_name_fits(name: str, width: int) -> None:
    folded = fold_name(name, width)
    assert cell_len(folded) <= width
    assert folded == safe_text(name) or "…" in folded


def test_a_folded_name_keeps_its_end() -> None:
    assert fold_name("encoder.layers.11.mlp.fc2", 11) == "enc…mlp.fc2"
    assert fold_name("short", 5) == "short"


def table_lines(columns: Sequence[Drawn], width: int) -> list[str]:
    console = Console(width=width, color_system=None, file=io.StringIO())
    with console.capture() as printed:
        styles = [""] * len(columns[0].cells)
        console.print(draw(fitted(columns, width), width, styles, range(len(styles))))
    return printed.get().splitlines()


@dataclass(frozen=True)
class Trip:
    name: str
    hours: float | None
    stops: tuple[str, ...] = ()
    dtype: str = "float32"


TRIP = (
    Column("name", "trip", "where it leads", 0, words=True),
    Column("hours", "time", "from start to end", 1, unit="hours"),
    Column("stops"),
    Column("dtype", "dtype", "how it is stored", 3, words=True, varies=True),
    Column("", "pace", "how fast", 2, shown=lambda trip: "slow" if (trip.hours or 0) > 2 else "quick", words=True),
)


def test_a_column_is_declared_once_for_terminal_csv_and_page() -> None:
    trips = [Trip("=home", 1.5, ("a", "b;c")), Trip("away", None)]
    lines = table_lines(drawn_columns(TRIP, trips, ["", ""], full=True), 60)
    assert [line.split() for line in (lines[0], *lines[2:4])] == [
        ["trip", "time", "pace"],
        ["=home", "1.500", "quick"],
        ["away", "-", "quick"],
    ]
    assert csv_text(TRIP, trips) == "name,hours,stops,dtype\n'=home,1.5,a;b\\x3bc,float32\naway,,,float32\n"
    page = shown_table(Table(title="Trips", columns=TRIP, rows=trips))
    assert [column.title for column in page["headers"]] == ["trip", "time", "pace"]
    assert page["rows"] == [("=home", "1.500", "quick"), ("away", "-", "quick")]


def test_a_column_that_says_nothing_or_the_same_in_every_row_is_left_out() -> None:
    counts = Column("hours", "hours", usual="0", text=lambda value: f"{value:.0f}")
    for column, rows, is_kept in (
        (TRIP[3], [Trip("a", 0), Trip("b", 0)], False),
        (TRIP[3], [Trip("a", 0), Trip("b", 0, dtype="int8")], True),
        (counts, [Trip("a", 0), Trip("b", None)], False),
        (counts, [Trip("a", 0), Trip("b", 1)], True),
    ):
        assert (column in [each for each, _ in telling([TRIP[0], column, TRIP[4]], rows)]) == is_kept


def test_a_column_of_a_part_is_blank_where_there_is_no_such_part() -> None:
    held = TRIP[1].on(lambda row: row[0], blank="")
    assert (held.cell((Trip("a", 2.0),)), held.cell((None,)), held.read((None,))) == ("2.000", "", None)
    assert held.cell((Trip("a", None),)) == "-"


def shown_names(names: list[str], width: int, remarks: list[str] | None = None) -> list[str]:
    """Return the name column of a table with three columns of numbers, 9 wide each, and a column of remarks."""
    columns = [
        Drawn("name", list(map(Text, names)), 0),
        *(Drawn(header, [Text("1.234e-05")] * len(names), rank) for rank, header in enumerate("abc", 1)),
        Drawn("remarks", list(map(Text, remarks or [""] * len(names))), 20),
    ]
    return [cell.plain for cell in fitted(columns, width)[0].cells]


KINDS = ("running_mean", "running_var", "num_batches_tracked")


def test_shortened_names_stay_unlike_each_other() -> None:
    names = [f"features.{block}.bn{place}.{subject}" for block in range(12) for place in (1, 2) for subject in KINDS]
    short = shown_names(names, 52)
    assert len(set(short)) == len(names)
    assert max(map(len, short)) < max(map(len, names))


def test_a_column_gives_way_to_names_that_could_not_be_told_apart() -> None:
    names = [f"layer{block}.a_long_name_of_a_block.norm.weight" for block in range(10)]
    assert len(set(shown_names(names, 40))) == 10
    assert len(fitted([Drawn("name", list(map(Text, names)), 0), Drawn("a", [Text("1.000")] * 10, 1)], 44)) == 2


def test_a_column_goes_with_the_column_that_it_belongs_to() -> None:
    wide, narrow = Drawn("largest", [Text("1.234e-05")], 1), Drawn("at", [Text("0,0")], 2, beside="largest")
    columns = [Drawn("name", [Text("a")], 0), wide, narrow, Drawn("remarks", [Text("")], 20)]
    assert [each.header for each in fitted(columns, 30)] == ["name", "largest", "at"]
    assert [each.header for each in fitted(columns, 12)] == ["name"]  # in which "at" alone would fit


def test_a_table_folds_above_sixty_rows_to_its_ends_and_what_is_notable() -> None:
    assert list(kept_positions([False] * 60, full=False)) == list(range(60))
    assert list(kept_positions([False] * 61, full=False)) == [*range(20), *range(41, 61)]
    assert list(kept_positions([False] * 61, full=True)) == list(range(61))
    assert list(kept_positions([n == 30 for n in range(61)], full=False)) == [*range(20), 30, *range(41, 61)]


# Numbers


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (0.0, "0"),
        (-0.0, "0"),
        (0.125, "0.1250"),
        (-0.4237, "-0.4237"),
        (1e-9, "1.000e-9"),
        (0.0012344, "0.001234"),
        (0.00099996, "0.001000"),
        (0.99996, "1.000"),
        (9999.4, "9999"),
        (9999.6, "1.000e4"),
        (123456.0, "1.235e5"),
        (-65504.0, "-6.550e4"),
        (5e-324, "4.941e-324"),
        (float("inf"), "Inf"),
    ],
)
def test_numbers_have_four_significant_digits(value: float | None, shown: str) -> None:
    assert number_text(value) == shown


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_shown_number_is_right_to_four_digits_and_never_zero_by_rounding(value: float) -> None:
    shown = number_text(value)
    assert (shown == "0") == (value == 0)
    assert float(shown) == float(f"{value:.3e}")
    assert len(shown) <= 11


@pytest.mark.parametrize(
    ("probability", "shown"), [(0.0, "0.00"), (0.004, "<0.01"), (0.4, "0.40"), (0.9999, ">0.99"), (1.0, "1.00")]
)
def test_only_a_certain_class_is_called_certain(probability: float, shown: str) -> None:
    assert probability_text(probability) == shown


# Histograms


# More than a hundredth of the values at either end, so that the percentiles are 0 and 8, and every bar is one wide.
COUNTS = {0.0: 64, 1.5: 16, 2.5: 4, 3.5: 1, 8.0: 4}
VALUES = np.repeat(list(COUNTS), list(COUNTS.values()))


def drawn(values: np.ndarray) -> str:
    return sparkline(distribution_of(values))


def test_heights_are_the_square_roots_of_the_shares_in_eighths() -> None:
    # 64, 16, 4, 1, 0, 0, 0 and 4 of the highest bar's 64: roots 1, 1/2, 1/4, 1/8, none, none, none, 1/4
    assert drawn(VALUES) == "█▄▂▁   ▂"


@pytest.mark.parametrize("value", [0.0, -2.5, 1e30, 5e-324])
def test_one_value_is_one_bar_in_the_middle(value: float) -> None:
    for count in (9, 9000):
        assert drawn(np.full(count, value)).strip() == "█"
        assert len(drawn(np.full(count, value))) == 8


def test_so_many_values_that_they_are_counted_in_bins_look_the_same() -> None:
    assert drawn(np.repeat(VALUES, 100)) == drawn(VALUES)


def test_what_lies_beyond_the_percentiles_stands_in_the_bars_at_the_ends() -> None:
    far = np.concatenate([np.full(500, 0.0), np.full(500, 8.0), [1e6]])
    assert drawn(far) == "█      █"
    assert drawn(np.array([0.0, 1.0])) == "█      █"


@given(
    arrays(np.float64, st.integers(1, 40), elements=st.floats(allow_nan=False, allow_infinity=False)),
    st.sampled_from([1, 1000]),
)
def test_any_values_at_all_are_eight_blocks(values: np.ndarray, times: int) -> None:
    actual = drawn(np.repeat(values, times))
    assert len(actual) == 8
    assert set(actual) <= set(" ▁▂▃▄▅▆▇█")
    assert actual.strip()


@pytest.mark.parametrize("width", [40, 50, 60])
def test_a_source_line_below_a_short_name_is_not_broken(width: int) -> None:
    columns = [
        Drawn("module", [Text("(model)"), Text("  :add")], 0, words=True),
        *(Drawn(f"number {number}", [Text("123456789")] * 2, 2) for number in range(8)),
        Drawn("note", [Text(), Text("net.py:10")], 12, words=True),
    ]
    lines = table_lines(columns, width)
    assert any(line.rstrip() == "  └ net.py:10" or line.startswith("  :add · net.py:10") for line in lines)


@pytest.mark.parametrize("width", range(44, 60))
def test_no_word_of_a_remark_is_broken(width: int) -> None:
    numbers = (
        Column(f"number {number}", f"number {number}", rank=2, shown=lambda _: "123456789") for number in range(2)
    )
    remark = Column(
        "", "remarks", shown=lambda _: "net.py:36; non-finite-activation", words=True, max_width=REMARK_WIDTH
    )
    columns = (Column("", "layer", rank=0, shown=str, words=True), *numbers, replace(remark, rank=12))
    assert "non-finite-activation" in "\n".join(table_lines(drawn_columns(columns, ["log"], [""], full=False), width))


def test_remarks_below_names_take_no_room_from_numbers_and_are_as_wide_as_the_table() -> None:
    remark = "not measured: " + "no " * 12 + "end"
    columns = [
        Drawn("#", [Text("0"), Text("1")], 1),
        Drawn("layer", [Text("conv"), Text("fc")], 0, words=True),
        *(Drawn(f"number {number}", [Text("123456789")] * 2, 2) for number in range(4)),
        Drawn("note", [Text(remark, style="red"), Text()], 12, words=True, max_width=20),
    ]
    header, _, first, *below, last = table_lines(columns, 54)
    assert header.split() == ["#", "layer", *(word for number in range(4) for word in ("number", str(number)))]
    assert first.split() == ["0", "conv", *["123456789"] * 4]
    assert below[0].startswith("  └ not measured: no")
    assert " ".join(" ".join(below).split()) == f"└ {remark}"
    assert 40 < len(below[0]) <= 54
    assert last.split()[:2] == ["1", "fc"]


def test_a_table_on_a_screen_keeps_its_ends_and_the_most_notable_rows_that_fit() -> None:
    notable = [2 if at == 40 else at in {20, 21, 30} for at in range(61)]
    assert list(kept_positions(notable, full=False, most=12)) == [*range(4), 20, 21, 30, 40, *range(57, 61)]
    assert list(kept_positions(notable, full=False, most=8)) == [0, 1, 20, 21, 30, 40, 59, 60]
    assert list(kept_positions([1] * 61, full=False, most=8)) == list(range(61)), "all notable: nothing is folded"
