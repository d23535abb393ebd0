import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
from rich.cells import cell_len
from rich.control import strip_control_codes

from hookscope.commands.conversion import summary
from hookscope.results.findings import Finding
from hookscope.results.gradients import GradientRow, Gradients, GradientStatus, InputGradients, LossRecord
from tests.reporting.conftest import (
    FAILURE,
    GRADIENT_ROWS,
    GRADIENTS,
    PARAMETER_ROWS,
    gradient_statistics,
    in_colour,
    printed,
)


def with_rows(*rows: GradientRow, verdicts: tuple[Finding, ...] = ()) -> Gradients:
    numbered = tuple(replace(row, index=index) for index, row in enumerate(rows))
    return replace(GRADIENTS, gradients=numbered, verdicts=verdicts)


def shown(inspection: Gradients, width: int = 200, *, full: bool = False) -> str:
    return printed(summary(inspection, width=width, full=full), width)


def rows_of(inspection: Gradients, width: int = 200, *, full: bool = False) -> str:
    """Return the table of outputs, without that of parameters."""
    return shown(replace(inspection, parameters=()), width, full=full)


PLAIN = replace(GRADIENT_ROWS[3], call=0)


@pytest.mark.parametrize("width", [80, 200])
def test_golden_files(assert_golden: Callable[[str, str], None], width: int) -> None:
    assert_golden(f"grads_{width}.txt", shown(GRADIENTS, width))


@pytest.mark.parametrize("width", [30, 40, 60, 79, 80, 99, 100, 120, 160, 200, 300])
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    text = shown(GRADIENTS, width)
    assert strip_control_codes(text) == text
    assert all(cell_len(line) <= width and line.isprintable() for line in text.splitlines())


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize(
    "status", [get_arg for get_arg in get_args(GradientStatus) if get_arg not in ("gradient", "unknown")]
)
def test_what_became_of_a_gradient_is_in_words_and_in_colour(width: int, status: GradientStatus) -> None:
    odd = replace(PLAIN, layer="odd", status=status, remark="for a reason")
    parameter = replace(PARAMETER_ROWS[0], name="odd", status=status)
    inspection = replace(with_rows(PLAIN, odd), parameters=(PARAMETER_ROWS[1], parameter))
    assert " ".join(shown(inspection, width).split()).count(status) >= 2
    assert len(re.findall(rf"\x1b\[[0-9;]*m[^\x1b]*{status}", in_colour(summary(inspection, width=width), width))) >= 2
    assert "for a reason" in " ".join(shown(inspection, width).split())


def test_where_the_pass_raised_first_there_is_no_status() -> None:
    row, parameter = replace(PLAIN, status="unknown"), replace(PARAMETER_ROWS[0], status="unknown")
    inspection = replace(with_rows(row), parameters=(parameter,), loss=None, verdicts=())
    assert not re.search("unknown|not reached|no gradient path", shown(inspection, 200))


def test_of_a_gradient_with_nan_the_finite_rest_is_not_shown_as_the_whole() -> None:
    values = replace(PLAIN.gradient, nan_count=149_700, element_count=401_408, mean_abs=0.0, min=0.0, max=0.0, l2=0.0)
    inspection = with_rows(replace(PLAIN, gradient=values))
    (line,) = (line for line in shown(inspection, 200).splitlines() if PLAIN.layer in line)
    assert re.search(r" -  +-  +- ", line)
    assert "149,700 NaN" in line


def test_a_row_that_a_verdict_names_says_which_and_is_coloured_as_a_whole() -> None:
    inspection = with_rows(
        PLAIN,
        replace(PLAIN, layer="warned"),
        replace(PLAIN, layer="failed"),
        verdicts=(
            Finding("exploding-gradient", "fail", "failed", "."),
            Finding("dead-channels", "warn", "warned", "."),
        ),
    )
    plain, warned, failed = (line for line in in_colour(summary(inspection, width=200)).splitlines() if "ReLU" in line)
    assert "\x1b" not in plain
    assert re.search(r"\x1b\[33m *4\.500", warned)
    assert "dead-channels" in warned
    assert re.search(r"\x1b\[1;31m *4\.500", failed)
    assert "exploding-gradient" in failed


def test_a_verdict_on_the_whole_network_is_not_put_on_the_row_of_the_model() -> None:
    inspection = with_rows(replace(PLAIN, layer=""), verdicts=(Finding("zero-gradient", "fail", "", "."),))
    assert shown(inspection).count("zero-gradient") == 2, "the answer and the finding"


def test_nothing_to_show_says_so() -> None:
    bare = replace(GRADIENTS, gradients=(), parameters=())
    assert "No layer finished." in shown(bare)
    assert "no parameters" in shown(bare, 80)


# Folding


def blocks(text: str) -> list[int]:
    lines = [line for line in text.splitlines() if not line.startswith(("FAIL", "WARN", "1 "))]
    return [int(number) for number in re.findall(r"block(\d+)", "\n".join(lines))]


def test_a_long_table_keeps_its_ends_what_verdicts_name_and_the_ends_of_non_finite_runs() -> None:
    broken = gradient_statistics((1, 64, 56, 56), nan_count=2)
    rows = [
        replace(PLAIN, layer=f"block{number}", gradient=broken if 60 <= number < 70 else PLAIN.gradient)
        for number in range(144)
    ]
    inspection = with_rows(*rows, verdicts=(Finding("dead-gradient", "fail", "block100", "."),))
    assert blocks(rows_of(inspection)) == [*range(20), 60, 69, 100, *range(124, 144)]
    assert blocks(rows_of(inspection, full=True)) == list(range(144))


def test_rows_that_were_folded_into_others_are_counted_and_in_full_named() -> None:
    first, *others = GRADIENTS.gradients
    folded = replace(GRADIENTS, gradients=(replace(first, duplicates=("pool", "drop")), *others))
    short, full = (shown(folded, 300, full=full) for full in (False, True))
    assert "2 rows repeat others and are not shown: --repeats shows all" in short
    assert "also pool, drop" not in short
    assert "also pool, drop" in full


def test_parameters_fold_alike() -> None:
    rows = tuple(replace(PARAMETER_ROWS[0], index=number, name=f"block{number}") for number in range(100))
    inspection = replace(GRADIENTS, parameters=rows, verdicts=(Finding("dead-gradient", "warn", "block50", "."),))
    assert blocks(shown(replace(inspection, gradients=()), 80)) == [*range(20), 50, *range(80, 100)]
    assert blocks(shown(replace(inspection, gradients=()), 80, full=True)) == list(range(100))


# Loss and verdicts


def test_a_loss_may_have_no_target_and_a_pass_no_loss() -> None:
    assert "loss sum = NaN\n" in shown(replace(GRADIENTS, loss=LossRecord("sum", "", float("nan"))))
    assert "No loss and no gradients: the loss raised." in shown(replace(GRADIENTS, loss=None))


def test_no_verdict_is_said_in_words() -> None:
    assert "No problems found in what was seen (12 rules)." in shown(replace(GRADIENTS, verdicts=()), 80)


@pytest.mark.parametrize("change", [{"loss": None}, {"failure": FAILURE}])
def test_a_pass_that_broke_off_is_never_called_healthy(change: dict[str, object]) -> None:
    text = shown(replace(GRADIENTS, verdicts=(), **change), 80)  # type: ignore[arg-type]
    assert "not checked" in text


# Inputs alone


def words(inputs: list[InputGradients], *, full: bool = False) -> list[list[str]]:
    return [line.split() for line in shown(replace(GRADIENTS, inputs_alone=tuple(inputs)), 80, full=full).splitlines()]


def test_each_input_is_a_row_and_each_layer_shows_how_far_its_norms_spread() -> None:
    inputs = [
        InputGradients("a.jpg", 1.5, 3.0, {"conv": 1.0, "fc": 2.0}),
        InputGradients("b.jpg", -0.5, None, {"conv": 4.0, "fc": None}),
        InputGradients("c.jpg", math.nan, 0.0, {"conv": 9.0, "late": 7.0}),
    ]
    lines = words(inputs)
    assert ["a.jpg", "1.500", "3.000"] in lines
    assert ["b.jpg", "-0.5000", "-"] in lines
    assert ["c.jpg", "NaN", "0"] in lines
    assert ["conv", "1.000", "4.000", "9.000"] in lines
    assert ["fc", "2.000", "2.000", "2.000"] in lines
    assert ["late", "7.000", "7.000", "7.000"] in lines


def test_a_layer_without_any_gradient_has_no_norms() -> None:
    assert ["fc", "-", "-", "-"] in words([InputGradients("a", 1.0, 1.0, {"fc": None})])


def test_many_inputs_are_folded_unless_asked_for() -> None:
    inputs = [InputGradients(f"{number}.jpg", 1.0, 1.0, {}) for number in range(100)]
    folded, full = (words(inputs, full=full) for full in (False, True))
    assert len([line for line in full if line and line[0].endswith(".jpg")]) == 100
    assert len([line for line in folded if line and line[0].endswith(".jpg")]) < 100
