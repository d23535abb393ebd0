import math
from dataclasses import replace

import pytest

from hookscope.results.gradients import Gradients
from tests.checks.rules.by_hand import chain, found, inspection, layer_row, output_row, parameter, rules, tensor

NAMES = ("a", "b", "c", "d")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_fails(value: float) -> None:
    (verdict,) = found("non-finite-loss", inspection(loss=value))
    assert (verdict.level, verdict.where) == ("fail", "")
    assert f"is {value}" in verdict.message


def test_a_large_loss_is_finite() -> None:
    assert rules(inspection(loss=3.4e38)) == []


# Forward


def forward(**broken: tuple[int, int]) -> Gradients:
    """Return a pass through layers a to d, some with (NaN, Inf) counts."""
    counts = {name: broken.get(name, (0, 0)) for name in NAMES}
    rows = [layer_row(name, tensor(1.0, (1, 10), nan_count=nan, inf_count=inf)) for name, (nan, inf) in counts.items()]
    return inspection(rows)


def test_the_first_broken_output_is_named_and_those_after_it_are_not() -> None:
    (verdict,) = found("non-finite-activation", forward(b=(3, 1), c=(10, 0), d=(10, 0)))
    assert (verdict.level, verdict.where) == ("fail", "b")
    assert "3 NaN and 1 Inf in 10 values (limit 0); 2 outputs after it hold some too" in verdict.message


def test_finite_outputs_are_not_objected_to() -> None:
    assert rules(forward()) == []


def test_a_mask_of_infinities_is_a_warning() -> None:
    (verdict,) = found("non-finite-activation", forward(b=(0, 5)))
    assert verdict.level == "warn"
    assert "as with a mask" in verdict.message


@pytest.mark.parametrize("change", [{"b": (1, 5)}, {"b": (0, 5), "c": (0, 1)}])
def test_what_spreads_or_is_nan_is_no_mask(change: dict[str, tuple[int, int]]) -> None:
    assert [verdict.level for verdict in found("non-finite-activation", forward(**change))] == ["fail"]


def test_infinities_that_reach_the_loss_are_no_mask() -> None:
    judged = forward(b=(0, 5))
    assert judged.loss is not None
    judged = replace(judged, loss=replace(judged.loss, value=math.inf))
    assert [verdict.level for verdict in found("non-finite-activation", judged)] == ["fail"]


def test_a_weight_that_is_not_finite_is_named_as_the_culprit() -> None:
    judged = replace(forward(b=(10, 0)), parameters=(parameter("b.weight", 1.0, math.nan),))
    (verdict,) = found("non-finite-activation", judged)
    assert "its 'b.weight' is not finite" in verdict.message


# Backward


def backward(*broken: str, kinds: dict[str, str] | None = None) -> Gradients:
    """Return a pass back through layers d to a, some of whose outputs have NaN gradients."""
    rows = [
        output_row(
            name, tensor(1.0, (1, 10), nan_count=4 * (name in broken), inf_count=0), (kinds or {}).get(name, "Linear")
        )
        for name in NAMES
    ]
    return inspection(gradients=rows)


def arriving(judged: Gradients, order: str) -> Gradients:
    """Return the pass with gradients that arrived in another order of the layers."""
    rows = tuple(replace(row, backward_index=order.index(row.layer)) for row in judged.gradients)
    return replace(judged, gradients=rows)


def test_the_layer_whose_backward_breaks_the_gradient_is_named() -> None:
    (verdict,) = found("non-finite-gradient", backward("a", "b"))
    assert (verdict.level, verdict.where) == ("fail", "c")
    assert "the output of 'b' is the first in backward order with NaN or Inf: it has 4 NaN and 0 Inf in 10 values" in (
        verdict.message
    )
    assert "that of 'c', the last before it, is finite" in verdict.message


def test_finite_gradients_are_not_objected_to() -> None:
    assert found("non-finite-gradient", backward()) == []


def test_a_loss_that_sends_nan_back_is_blamed_itself() -> None:
    (verdict,) = found("non-finite-gradient", backward(*NAMES))
    assert verdict.where == ""
    assert "The loss itself" in verdict.message
    assert "'d'" in verdict.message


def test_gradients_of_inputs_make_it_certain() -> None:
    judged = backward("a", "b")
    at_input = replace(judged.gradients[1], index=9, layer="c", slot="[0]", role="input", backward_index=2)
    others = [
        replace(row, backward_index=(row.backward_index or 0) + ((row.backward_index or 0) >= 2))
        for row in judged.gradients
    ]
    (verdict,) = found("non-finite-gradient", replace(judged, gradients=(*others, at_input)))
    assert verdict.where == "c"
    assert "its grad_input has 4 NaN" in verdict.message


def test_between_branches_the_broken_output_itself_is_named() -> None:
    # c and d are branches: d's gradient arrives last before b's, but c comes after b in the forward pass.
    (verdict,) = found("non-finite-gradient", arriving(backward("a", "b"), "cdba"))
    assert verdict.where == "b"
    assert "what takes the output of 'b'" in verdict.message


def test_a_container_that_ends_with_the_broken_output_is_not_in_the_way() -> None:
    # The container's hook on the same tensor fires after its last child's.
    judged = arriving(backward("a", "b", "c", kinds={"c": "Sequential"}), "dbca")
    (verdict,) = found("non-finite-gradient", judged)
    assert verdict.where == "d"


def test_a_parameter_is_named_when_no_selected_layer_shows_it() -> None:
    judged = replace(
        backward(),
        parameters=(
            parameter("a.weight", 1.0, nan_count=2),
            parameter("c.weight", 1.0, inf_count=2),
            parameter("d.weight", 1.0),
        ),
    )
    (verdict,) = found("non-finite-gradient", judged)
    assert verdict.where == "c.weight"


def test_nothing_is_said_about_depth_where_gradients_are_not_finite() -> None:
    judged = chain([3.0] * 30)
    assert rules(judged) == ["exploding-gradient"]
    first, *others = judged.gradients
    broken = replace(first, gradient=replace(first.gradient, nan_count=1))
    assert rules(replace(judged, gradients=(broken, *others))) == ["non-finite-gradient"]
