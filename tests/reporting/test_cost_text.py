"""Costs in words, tables, CSV and on the page, from figures made by hand."""

import csv
import io
from dataclasses import replace

import pytest
from rich.console import Console

from hookscope.commands.activations.describe import describe_activations
from hookscope.commands.conversion import summary
from hookscope.reporting.columns import Column, telling
from hookscope.reporting.cost_text import (
    COSTS,
    cost_lines,
    cost_sentences,
    field_text,
    seconds_text,
    trainable_text,
)
from hookscope.reporting.layer_columns import layer_table_of
from hookscope.reporting.tables import csv_text
from hookscope.results.activations import LayerRow
from hookscope.results.cost import CostSums, ModuleCost, NetworkCost, ReceptiveField, UncountedOperation, depth_of
from hookscope.results.costs_of_rows import dearest_part
from hookscope.results.statistics import TensorStatistics
from hookscope.text import scaled_text
from tests.reporting.conftest import HOSTILE_NAME, INSPECTION

LEAF = CostSums(2_000_000, 1000, 4000, 1000, 800)
COST = NetworkCost(
    ((1, 3, 8, 8),),
    (
        ModuleCost("", LEAF + LEAF + CostSums(5), CostSums(5), 40, None, 0.010),
        ModuleCost("stem", LEAF, LEAF, 256, ReceptiveField((7.0, 7.0), (2.0, 2.0), (0.0, 0.0)), 0.002),
        ModuleCost("body", LEAF, CostSums(), 256, ReceptiveField((435.0, 99.5), (32.0, 16.0), (0.0, 1.0), True), 0.004),
        ModuleCost("body.a", LEAF, LEAF, 256, None, 0.003),
        ModuleCost("body.b", CostSums(), CostSums(), None, None, None),
    ),
    LEAF + LEAF,
    CostSums(5),
    (UncountedOperation("aten._fft_r2c", 2, "body.a"),),
    5,
    "cpu",
    2,
    ("a note",),
)


def row(layer: str, dead: int | None, channels: int | None, **values: object) -> LayerRow:
    statistics = TensorStatistics((32, 4), "float32", 128, channel_count=channels, dead_channel_count=dead)
    return LayerRow(0, layer, "ReLU", 0, "", 0, statistics, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.00 k"),
        (1_814_073_344, "1.81 G"),
        (118_013_952, "118 M"),
        (12_345, "12.3 k"),
        (999_499, "999 k"),
        (999_500, "1.00 M"),
        (None, "-"),
    ],
)
def test_amounts_have_three_digits(value: int | None, text: str) -> None:
    assert scaled_text(value) == text
    assert scaled_text(value, "B") == (text if text in "0-" else f"{text}B" if " " in text else f"{text} B")


def test_times_fields_and_trainability_are_short() -> None:
    assert [*map(seconds_text, (1.2345, 0.9996, 0.0351, 0.12345, 0.00042, 3.14e-6, 0))] == [
        *("1.23 s", "1.00 s", "35.1 ms", "123 ms", "0.42 ms", "3.1 µs", "0.00 ms"),
    ]
    fields = [module.receptive_field for module in COST.modules[:3]]
    assert [*map(field_text, fields)] == ["-", "7x7 /2", "≥435x99.5 /32x16"]
    sums = (LEAF, replace(LEAF, trainable_count=0), replace(LEAF, trainable_count=1), CostSums())
    assert [*map(trainable_text, sums)] == ["yes", "no", "in part", ""]
    assert [*map(depth_of, ("", "a", "a.b.c"))] == [0, 1, 3]


def test_columns_are_left_out_where_they_would_say_nothing() -> None:
    def titles(*modules: ModuleCost) -> list[str]:
        return [column.title for column, _ in telling(COSTS, modules)]

    assert titles(*COST.modules) == ["param. bytes", "mult-adds", "out bytes", "saved", "rec. field", "time"]
    frozen = replace(COST.modules[1], total=replace(LEAF, trainable_count=0), seconds=None)
    assert titles(COST.modules[0], frozen)[0] == "trainable"
    assert "time" not in titles(frozen, COST.modules[0])[:-1]


def test_the_foot_has_totals_how_they_add_up_and_what_is_missing() -> None:
    lines = cost_lines(COST)
    assert lines[0] == (
        "A pass of 1x3x8x8: 4.00 M multiply-adds · 2,000 parameters (8.00 kB) · 1.60 kB saved for backward · "
        "40 B of output · 10.0 ms on this machine (cpu, 2 threads, median of 5 passes)"
    )
    assert lines[1].startswith("leaf modules: 4.00 M multiply-adds")
    assert "other modules: 5 multiply-adds" in lines[1]
    assert "do not add up" in lines[2]
    assert "aten._fft_r2c (2 calls)" in lines[3]
    assert lines[4] == "note: a note"
    untimed = replace(COST, modules=(replace(COST.modules[0], seconds=None),), uncounted=(), notes=())
    assert not any("machine" in line or "time" in line for line in cost_lines(untimed))


def test_the_sentence_puts_the_dearest_part_beside_its_dead_channels() -> None:
    rows = [row("stem", 0, 4), row("body.a", 3, 4), row("body.a:relu", 2, 4, owner="body.a"), row("bodyguard", 4, 4)]
    assert dearest_part(COST, rows) == "40% of the time in body, 62% of its channels dead"
    assert dearest_part(COST, rows[:1] + rows[3:]) == "40% of the time in body"
    assert dearest_part(COST, [row("body.a", 0, 4)]).endswith("none of its channels dead")
    wrapped = replace(
        COST,
        modules=(
            COST.modules[0],
            replace(COST.modules[2], layer="net", seconds=0.0099),
            replace(COST.modules[2], layer="net.head", seconds=0.0020),
            replace(COST.modules[2], layer="net.trunk", seconds=0.0070),
        ),
    )
    assert dearest_part(wrapped, []).endswith("in net.trunk")  # not what holds nearly all
    listed = replace(
        COST,
        modules=(
            *COST.modules[:2],  # a stem of 20%
            replace(COST.modules[2], layer="blocks", seconds=None),
            replace(COST.modules[2], layer="blocks.0", seconds=0.0030),
        ),
    )
    assert dearest_part(listed, []).endswith("in blocks.0")  # a ModuleList is never called
    assert dearest_part(replace(COST, modules=COST.modules[:1]), rows) == ""
    assert dearest_part(replace(COST, modules=(replace(COST.modules[0], seconds=None),)), rows) == ""


def test_the_overview_the_table_and_the_csv_of_a_run_have_its_cost() -> None:
    statistics = INSPECTION.rows[0].activation
    rows = tuple(
        LayerRow(index, layer, "ReLU", call, "", 0, replace(statistics, channel_count=4, dead_channel_count=1))
        for index, (layer, call) in enumerate([("stem", 0), ("body.a", 0), ("body.a", 1)])
    )
    result = replace(INSPECTION, rows=rows, cost=COST)
    sentence = "40% of the time in body, 25% of its channels dead."
    whole = "A pass of 1x3x8x8 takes 4.00 M multiply-adds and 10.0 ms on this machine."
    assert [*cost_sentences(COST, rows)] == [whole, sentence]
    assert {whole, sentence} <= {*describe_activations(result).answer}, "in a terminal, a picture and on the page"
    text = io.StringIO()
    Console(file=text, width=220).print(summary(result, width=220))
    assert sentence in text.getvalue()
    lines = list(csv.DictReader(io.StringIO(csv_text(*layer_table_of(result)))))
    assert [line["multiply_adds"] for line in lines] == ["2000000", "2000000", ""], "once for all calls of a module"
    modules = list(csv.DictReader(io.StringIO(csv_text((Column("layer"), *COSTS), (*COST.modules, hostile())))))
    assert [line["layer"] for line in modules][:3] == ["", "stem", "body"]
    assert modules[2]["receptive_field"] == "435x99.5"
    assert modules[2]["receptive_field_at_least"] == "true"
    assert modules[-1]["layer"] != HOSTILE_NAME
    assert "multiply_adds" not in csv_text(*layer_table_of(INSPECTION))


def hostile() -> ModuleCost:
    return replace(COST.modules[1], layer=HOSTILE_NAME)
