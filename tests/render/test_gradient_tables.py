import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import get_args

import pytest
from rich.cells import cell_len
from rich.console import RenderableType
from rich.control import strip_control_codes

from hookscope.render.gradient_tables import by_input_table, gradient_table, loss_lines, parameter_table, verdicts_panel
from hookscope.results.findings import Finding
from hookscope.results.gradients import GradientRow, Gradients, GradientStatus, InputGradients, LossRecord
from tests.render.conftest import (
    FAILURE,
    GRADIENT_ROWS,
    GRADIENTS,
    PARAMETER_ROWS,
    gradient_statistics,
    in_colour,
    printed,
)


def everything(inspection: Gradients, width: int) -> Sequence[RenderableType]:
    return (
        gradient_table(inspection, width=width),
        parameter_table(inspection, width=width),
        loss_lines(inspection.loss, inspection.verification),
        verdicts_panel(inspection),
    )


def with_rows(*rows: GradientRow, verdicts: tuple[Finding, ...] = ()) -> Gradients:
    numbered = tuple(replace(row, index=index) for index, row in enumerate(rows))
    return replace(GRADIENTS, gradients=numbered, verdicts=verdicts)


def shown(inspection: Gradients, width: int = 200, *, full: bool = False) -> str:
    return printed(gradient_table(inspection, width=width, full=full), width)


PLAIN = replace(GRADIENT_ROWS[3], call=0)


@pytest.mark.parametrize("width", [80, 200])
def test_golden_files(assert_golden: Callable[[str, str], None], width: int) -> None:
    for name, renderable in zip(
        ("gradients", "parameters", "loss", "verdicts"), everything(GRADIENTS, width), strict=True
    ):
        assert_golden(f"{name}_{width}.txt", printed(renderable, width))


@pytest.mark.parametrize("width", [30, 40, 60, 79, 80, 99, 100, 120, 160, 200, 300])
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    for renderable in everything(GRADIENTS, width):
        text = printed(renderable, width)
        assert strip_control_codes(text) == text
        assert all(cell_len(line) <= width and line.isprintable() for line in text.splitlines())


def test_the_title_says_in_which_mode_the_network_ran() -> None:
    assert "train mode" in shown(GRADIENTS).splitlines()[1]
    assert "eval mode" in shown(replace(GRADIENTS, mode="eval")).splitlines()[1]


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("status", [each for each in get_args(GradientStatus) if each not in ("gradient", "unknown")])
def test_what_became_of_a_gradient_is_in_words_and_in_colour(width: int, status: GradientStatus) -> None:
    odd = replace(PLAIN, layer="odd", status=status, remark="for a reason")
    parameter = replace(PARAMETER_ROWS[0], name="odd", status=status)
    inspection = replace(with_rows(PLAIN, odd), parameters=(PARAMETER_ROWS[1], parameter))
    for renderable in everything(inspection, width)[:2]:
        assert status in " ".join(printed(renderable, width).split())
        assert re.search(rf"\x1b\[[0-9;]*m[^\x1b]*{status}", in_colour(renderable, width))
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
    plain, warned, failed = (
        line for line in in_colour(gradient_table(inspection, width=200)).splitlines() if "ReLU" in line
    )
    assert "\x1b" not in plain
    assert re.search(r"\x1b\[33m *4\.500", warned)
    assert "dead-channels" in warned
    assert re.search(r"\x1b\[1;31m *4\.500", failed)
    assert "exploding-gradient" in failed


def test_a_verdict_on_the_whole_network_is_not_put_on_the_row_of_the_model() -> None:
    inspection = with_rows(replace(PLAIN, layer=""), verdicts=(Finding("zero-gradient", "fail", "", "."),))
    assert "zero-gradient" not in shown(inspection)


def test_nothing_to_show_says_so() -> None:
    bare = replace(GRADIENTS, gradients=(), parameters=())
    assert "No layer finished." in shown(bare)
    assert "no parameters" in printed(parameter_table(bare, width=80), 80)


# Folding


def blocks(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"block(\d+)", text)]


def test_a_long_table_keeps_its_ends_what_verdicts_name_and_the_ends_of_non_finite_runs() -> None:
    broken = gradient_statistics((1, 64, 56, 56), nan_count=2)
    rows = [
        replace(PLAIN, layer=f"block{number}", gradient=broken if 60 <= number < 70 else PLAIN.gradient)
        for number in range(144)
    ]
    inspection = with_rows(*rows, verdicts=(Finding("dead-gradient", "fail", "block100", "."),))
    assert blocks(shown(inspection)) == [*range(20), 60, 69, 100, *range(124, 144)]
    assert blocks(shown(inspection, full=True)) == list(range(144))


def test_rows_that_were_folded_into_others_are_counted_and_in_full_named() -> None:
    first, *others = GRADIENTS.gradients
    folded = replace(GRADIENTS, gradients=(replace(first, also=("pool", "drop")), *others))
    short, full = (printed(gradient_table(folded, width=300, full=full), 300) for full in (False, True))
    assert "2 rows repeat others and are not shown: --repeats, or repeats=True, shows all" in short
    assert "also pool, drop" not in short
    assert "also pool, drop" in full


def test_rows_of_zeros_fold_unless_a_verdict_names_them() -> None:
    rows = [replace(PLAIN, layer=f"block{number}", status="zero") for number in range(100)]
    assert blocks(shown(with_rows(*rows))) == [*range(20), *range(80, 100)]


def test_parameters_fold_alike() -> None:
    rows = tuple(replace(PARAMETER_ROWS[0], index=number, name=f"block{number}") for number in range(100))
    inspection = replace(GRADIENTS, parameters=rows, verdicts=(Finding("dead-gradient", "warn", "block50", "."),))
    assert blocks(printed(parameter_table(inspection, width=80), 80)) == [*range(20), 50, *range(80, 100)]
    assert blocks(printed(parameter_table(inspection, width=80, full=True), 80)) == list(range(100))


# Loss and verdicts


def test_a_loss_may_have_no_target_and_a_pass_no_loss() -> None:
    assert printed(loss_lines(LossRecord("sum", "", float("nan")), None), 80) == "loss sum = NaN\n"
    assert "forward pass raised" in printed(loss_lines(None, None), 80)


def test_no_verdict_is_said_in_words() -> None:
    assert "No rule objects to the gradients." in printed(verdicts_panel(replace(GRADIENTS, verdicts=())), 80)


@pytest.mark.parametrize("change", [{"loss": None}, {"failure": FAILURE}])
def test_a_pass_that_broke_off_is_never_called_healthy(change: dict[str, object]) -> None:
    text = printed(verdicts_panel(replace(GRADIENTS, verdicts=(), **change)), 80)  # type: ignore[arg-type]
    assert "not judged" in text


# Inputs alone


def words(inputs: list[InputGradients], *, full: bool = False) -> list[list[str]]:
    return [line.split() for line in printed(by_input_table(inputs, width=80, full=full), 80).splitlines()]


def test_each_input_is_a_row_and_each_layer_shows_how_far_its_norms_spread() -> None:
    inputs = [
        InputGradients("a.jpg", 1.5, 3.0, {"conv": 1.0, "fc": 2.0}),
        InputGradients("b.jpg", -0.5, None, {"conv": 4.0, "fc": None}),
        InputGradients("c.jpg", math.nan, 0.0, {"conv": 9.0, "late": 7.0}),
    ]
    shown = words(inputs)
    assert ["a.jpg", "1.500", "3.000"] in shown
    assert ["b.jpg", "-0.5000", "-"] in shown
    assert ["c.jpg", "NaN", "0"] in shown
    assert ["conv", "1.000", "4.000", "9.000"] in shown
    assert ["fc", "2.000", "2.000", "2.000"] in shown
    assert ["late", "7.000", "7.000", "7.000"] in shown


def test_a_layer_without_any_gradient_has_no_norms() -> None:
    assert ["fc", "-", "-", "-"] in words([InputGradients("a", 1.0, 1.0, {"fc": None})])


def test_inputs_without_layers_are_one_table() -> None:
    shown = words([InputGradients("a", 1.0, 1.0, {})])
    assert shown[-1] == ["a", "1.000", "1.000"]
    assert not any("grad_output" in line for line in shown)


def test_many_inputs_are_folded_unless_asked_for() -> None:
    inputs = [InputGradients(f"{number}.jpg", 1.0, 1.0, {}) for number in range(100)]
    folded, full = (words(inputs, full=full) for full in (False, True))
    assert len([line for line in full if line and line[0].endswith(".jpg")]) == 100
    assert len([line for line in folded if line and line[0].endswith(".jpg")]) < 100
