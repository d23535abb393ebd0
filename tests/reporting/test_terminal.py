import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import RenderableType
from rich.text import Text

from hookscope.commands.activations.describe import no_findings
from hookscope.commands.conversion import summary
from hookscope.reporting.document_text import unbroken
from hookscope.reporting.terminal import failure_panel, model_words, warnings_panel
from hookscope.results.activations import Activations, Flag, LayerRow
from hookscope.results.comparison import Prediction
from hookscope.results.distribution import distribution_of
from hookscope.results.network import ModuleTable
from hookscope.rules import RULES
from hookscope.rules.activations import _ALLOWANCE_ON_NOISE
from tests.reporting.conftest import FAILURE, INSPECTION, MODEL, MODULES, ROWS, in_colour, numbered, printed, statistics


def table_text(inspection: Activations, width: int, *, full: bool = False) -> str:
    return printed(summary(inspection, width=width, full=full), width)


def with_rows(*rows: LayerRow) -> Activations:
    return replace(INSPECTION, rows=numbered(*rows))


def row_lines(text: str) -> list[str]:
    """Return the lines below the header rule."""
    lines = text.splitlines()
    rule = next(position for position, line in enumerate(lines) if line.startswith("──"))
    return lines[rule + 1 :]


def header_line(text: str) -> str:
    lines = text.splitlines()
    return lines[next(position for position, line in enumerate(lines) if line.startswith("──")) - 1]


def everything(width: int) -> Sequence[RenderableType]:
    return (
        summary(replace(INSPECTION, model=replace(MODEL, random=True)), width=width),
        warnings_panel(INSPECTION.warnings),
        failure_panel(FAILURE),
        summary(ModuleTable(MODEL, MODULES), width=width),
    )


@pytest.mark.parametrize("width", [80, 200])
def test_golden_files(assert_golden: Callable[[str, str], None], width: int) -> None:
    names = ("layers", "warnings", "failure", "modules")
    for name, renderable in zip(names, everything(width), strict=True):
        assert_golden(f"{name}_{width}.txt", printed(renderable, width))
    assert_golden(f"long_{width}.txt", table_text(LONG, width))


@pytest.mark.parametrize("width", [30, 40, 60, 79, 80, 99, 100, 120, 160, 200, 300])
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    for renderable in (*everything(width), summary(LONG, width=width)):
        for line in printed(renderable, width).splitlines():
            assert cell_len(line) <= width
            assert line.isprintable()


def test_a_sentence_with_a_wide_name_is_broken_between_words_by_the_cells_of_the_terminal() -> None:
    width, name = 60, "层" * 20
    line = Text(f"  The first difference is in {name}, whose inputs are equal.")
    [broken] = unbroken([line], width)
    assert isinstance(broken, Text)
    lines = broken.plain.split("\n")
    assert " ".join(" ".join(lines).split()) == line.plain.strip()
    assert all(line.startswith("  ") for line in lines)
    assert max(map(cell_len, lines)) <= width
    assert all(cell_len(f"{line} {next_line.split()[0]}") > width for line, next_line in pairwise(lines))


# The layer table


def test_columns_that_would_say_the_same_everywhere_are_left_out() -> None:
    header = header_line(table_text(with_rows(ROWS[0], ROWS[1]), 200))
    assert not {"dtype", "NaN", "Inf", "flags"} & set(header.split())
    assert "median" in header


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("flag", get_args(Flag))
def test_every_flag_is_in_words_and_in_colour(width: int, flag: Flag) -> None:
    measured = statistics((1, 64, 7, 7), nan_count=2, inf_count=5, dead_channel_count=12)
    flagged = replace(ROWS[0], layer="flagged", flags=(flag,), activation=replace(measured, unmeasured="no reason"))
    inspection = with_rows(replace(ROWS[0], layer="plain"), flagged)
    plain, *marked = row_lines(table_text(inspection, width))
    details = {
        "non-finite": "non-finite: 2 NaN, 5 Inf",
        "dead channels": "dead channels 12/64",
        "unmeasured": "unmeasured: no reason",
    }
    assert details.get(flag, flag) in " ".join(line.strip() for line in marked)
    assert flag not in plain
    coloured = in_colour(summary(inspection, width=width), width)
    assert re.search(rf"\x1b\[[0-9;]*m[^\x1b]*{flag}", coloured)
    (line,) = (line for line in coloured.splitlines() if "plain" in line)
    assert "\x1b" not in line


def test_a_row_that_asks_for_attention_is_coloured_as_a_whole() -> None:
    lines = row_lines(in_colour(summary(with_rows(ROWS[0], ROWS[4], ROWS[5], ROWS[6]), width=200)))
    assert [bool(re.search(r"\x1b\[33m *\S*3\.250", line)) for line in lines[:2]] == [False, True]
    assert re.search(r"\x1b\[1;31m *\S*1\.000e4", lines[2])


def test_a_pass_that_reached_no_layer_says_so() -> None:
    assert "\nNo layer finished.\n" in table_text(with_rows(), 80)


# Folding

LONG = with_rows(
    *(
        replace(
            ROWS[5] if position in (70, 71, 100) else ROWS[2] if position == 80 else ROWS[0], layer=f"block{position}"
        )
        for position in range(144)
    )
)


def shown_blocks(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"block(\d+)", "\n".join(row_lines(text)))]


def test_full_shows_every_row() -> None:
    text = table_text(LONG, 80, full=True)
    assert shown_blocks(text) == list(range(144))
    assert "not shown" not in text


def test_rows_that_were_folded_into_others_are_counted_and_in_full_named() -> None:
    folded = with_rows(
        replace(ROWS[0], duplicates=("pool", "[red]\x1b")), replace(ROWS[1], duplicate_of="stem"), *ROWS[2:]
    )
    short, full = (table_text(folded, 300, full=full) for full in (False, True))
    assert "2 rows repeat others and are not shown: --repeats shows all" in short
    assert "also" not in short
    assert r"also pool, [red]\x1b" in full
    assert "repeats stem" in full
    assert "1 row repeats another and is not shown" in table_text(with_rows(replace(ROWS[0], duplicates=("pool",))), 80)


# Beside the table


def test_the_answer_comes_again_last_where_more_was_printed_than_the_screen_is_high() -> None:
    def lines(height: int | None) -> list[str]:
        return printed(summary(LONG, width=120, height=height), 120).splitlines()

    low, high = lines(24), lines(1000)
    assert low[-1] == low[0]
    assert high[-1] != high[0]
    assert lines(None)[-1] != low[0]
    assert len(row_lines("\n".join(low))) < 50 < len(row_lines("\n".join(high)))


def test_predictions_of_many_inputs_are_folded() -> None:
    many = replace(
        INSPECTION,
        inputs=tuple(replace(INSPECTION.inputs[0], name=f"{number}.jpg") for number in range(25)),
        predictions=tuple(Prediction(number, (0,), ("tench",), (0.5,)) for number in range(25)),
    )
    lines = table_text(many, 80).splitlines()
    last = lines.index("  9.jpg: tench 0.50 (softmax)")
    assert lines[last + 1] == "  … 15 more, --full shows all"
    assert sum("tench" in line for line in table_text(many, 80, full=True).splitlines()) == 25


def test_a_failure_without_inputs_says_so() -> None:
    assert "inputs none" in printed(failure_panel(replace(FAILURE, input_shapes=())), 80)


def test_a_single_warning_is_framed_under_the_word() -> None:
    assert "─ Warning ─" in printed(warnings_panel(["a"]), 80)


# The module table


# Histograms in the layer table


def with_distributions() -> Activations:
    distribution = distribution_of(np.repeat([0.0, 1.0, 8.0], [64, 16, 4]))
    rows = (replace(row, activation=replace(row.activation, distribution=distribution)) for row in ROWS[:4])
    return with_rows(*rows, ROWS[4])


def test_a_wide_table_draws_how_values_are_distributed_and_says_what_the_bars_are() -> None:
    text = table_text(with_distributions(), 160)
    end = header_line(text).index(" hist ") + len(" hist")
    # 64, 16 and 4 of 64 are 1, 1/4 and 1/16; their roots are 8, 4 and 2 eighths
    assert [line[end - 8 : end] for line in row_lines(text)[:4]] == ["█▄     ▂"] * 4
    assert row_lines(text)[4][end - 8 : end] == "       -"
    assert "\nhist: 8 equal bins, 1st to 99th percentile of each row" in text


def test_histograms_give_way_to_what_matters() -> None:
    headers = [set(header_line(table_text(with_distributions(), width)).split()) for width in range(60, 220)]
    with_histograms = [header for header in headers if "hist" in header]
    assert 50 < len(with_histograms) < len(headers)
    for header in with_histograms:
        assert {"mean", "std", "min", "max", "zeros", "shape", "type"} <= header


@pytest.mark.parametrize(
    ("name", "kind", "shown"),
    [
        ("resnet18", "ResNet", "resnet18 (ResNet)"),
        ("ResNet", "ResNet", "ResNet"),
        ("tiny.pt (net.py:tiny)", "Sequential", "tiny.pt (net.py:tiny, Sequential)"),
    ],
)
def test_a_model_is_named_with_its_class_in_one_pair_of_parentheses(name: str, kind: str, shown: str) -> None:
    assert model_words(replace(MODEL, name=name, kind=kind)) == shown


def test_without_a_finding_the_answer_is_that_and_what_calls_for_a_look_nevertheless() -> None:
    plain = [row for row in ROWS if not {"non-finite", "all zero", "constant", "unmeasured"} & set(row.flags)]
    clear = replace(INSPECTION, rows=tuple(plain), verdicts=(), failure=None)
    first, limits, second = table_text(clear, 200).splitlines()[:3]
    assert first == "No problems found: no NaN, no Inf that spreads, no constant outputs, no dead ReLUs."
    assert limits.startswith("Looked at the layers shown and at operations; a ReLU is dead if 80% of its channels")
    flagged = replace(clear, rows=(*clear.rows, replace(clear.rows[0], flags=("constant",))))
    assert "constant" not in table_text(flagged, 200).splitlines()[0], "no more is claimed than holds"
    assert second == "Half of the channels or more are 0 everywhere in layer1.0.conv1."
    for change in ({"rows": ()}, {"failure": FAILURE}):
        assert "No problems" not in table_text(replace(clear, **change), 200)  # type: ignore[arg-type]


def test_the_share_of_dead_channels_in_the_all_clear_is_the_limit_of_the_rule() -> None:
    most = RULES["dead-channels"].limits["max_fraction"].default
    noise = replace(INSPECTION.inputs[0], name="noise", sha256=None)
    assert f"if {most:.0%} of its channels" in no_findings(INSPECTION)[1]
    on_noise = no_findings(replace(INSPECTION, inputs=(noise,)))[1]
    assert f"if {most + _ALLOWANCE_ON_NOISE * (1 - most):.0%} (noise) of its channels" in on_noise
