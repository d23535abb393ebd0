import math

from hookscope.render.gradient_tables import by_input_table
from hookscope.results.gradients import InputGradients
from tests.render.conftest import printed


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
    assert ["c.jpg", "nan", "0"] in shown
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
