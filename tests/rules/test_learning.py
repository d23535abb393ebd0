import math
from dataclasses import replace

import pytest

from hookscope.results.gradients import Gradients, ParameterRow
from hookscope.rules.judging import judge_gradients
from tests.commands.check.measurements import (
    chain,
    found,
    inspection,
    layer_row,
    logistic_chain,
    output_row,
    parameter,
    rules,
    tensor,
)


def learning(*ratios: float) -> list[ParameterRow]:
    """Return weights of layers in a row, by what they learn relative to their size."""
    return [parameter(f"layer{at}.weight", ratio) for at, ratio in enumerate(ratios)]


def passing(*gradients: float) -> Gradients:
    """Return layers in a row, by the norms of their outputs' gradients."""
    return inspection(gradients=[output_row(f"layer{at}", tensor(gradient)) for at, gradient in enumerate(gradients)])


def with_strange_inputs(judged: Gradients) -> Gradients:
    """Add gradients of inputs, two of them huge and one zero."""
    strange = [
        replace(judged.gradients[0], index=20 + at, role="input", gradient=tensor(l2), status=status)
        for at, (l2, status) in enumerate([(1e30, "gradient"), (1e30, "gradient"), (0.0, "zero")])
    ]
    return replace(judged, gradients=(*strange, *judged.gradients))  # type: ignore[arg-type]


def without_weights(judged: Gradients) -> Gradients:
    """Make all rows calls of one layer without weights."""
    rows = [replace(row, layer="relu", kind="ReLU", call=call) for call, row in enumerate(judged.gradients)]
    return replace(judged, gradients=tuple(rows))


SOUND: dict[str, Gradients] = {
    # Each layer halves its input, so gradients of outputs shrink by 2**-29; but every weight learns alike.
    "shrinking activations": chain([0.5] * 30),
    "calls of a layer without weights are no recurrence": without_weights(chain([0.5] * 30)),
    # As in ConvNeXt, whose branches start at 1e-6 beside a trunk that is sound.
    "small branches between sound ends": replace(
        inspection(parameters=learning(1.0, 1.0, 1.0, *[1e-6, 1e-6, 1.0] * 9)), mode="train"
    ),
    "biases, scales and zero weights": inspection(
        parameters=[
            *(parameter("first.bias", 1e-30, shape=(8,)), parameter("first.scale", 1e-30, shape=(8, 1, 1))),
            *(parameter("first.weight", 1e-30, 0.0), parameter("norm.bias", 1.0, 1e-12, shape=(8,))),
            *(*learning(*[1.0] * 10), parameter("zero.weight", 1e-12, 0.0), parameter("dead.weight", 0.0)),
        ]
    ),
    # Attention uses its output projection without calling it.
    "a weight whose module was not seen stands by the one before it": inspection(
        [layer_row(name, tensor(1.0)) for name in ("a", "b", "c")],
        parameters=[
            *(parameter("a.weight", 1.0), parameter("b.in_proj_weight", 1.0)),
            *(parameter("b.out_proj.weight", 1e-5), parameter("c.weight", 1.0)),
        ],
    ),
    "gradients of inputs": with_strange_inputs(chain([1.0] * 10)),
    "small branches at the end": passing(*[1.0] * 24, *[1e-6] * 5, 1.0),
    "one large gradient": passing(1e9, *[1.0] * 29),
    "two layers": chain([1e-9, 1e9]),
    "two weights": inspection(parameters=learning(1e-9, 1.0)),
}


@pytest.mark.parametrize("name", SOUND)
def test_what_is_sound_or_no_trend_is_left_alone(name: str) -> None:
    assert rules(SOUND[name]) == []


# Vanishing


def test_thirty_logistic_layers_vanish() -> None:
    (verdict,) = found("vanishing-gradient", logistic_chain(30))
    assert (verdict.level, verdict.where) == ("fail", "layer0.weight")
    # Medians of three at either end are 27 layers apart: 0.25**27.
    assert "shrinks to 5.6e-17 times its size (limit 1e-4)" in verdict.message
    assert "'layer29.weight' to 'layer0.weight': about 0.25 at each of 27 steps" in verdict.message


def test_six_logistic_layers_do_not_vanish_yet_and_eight_do() -> None:
    assert 0.25**6 > 1e-4 > 0.25**7
    assert rules(logistic_chain(7)) == []
    assert rules(logistic_chain(8)) == ["vanishing-gradient"]


def test_one_step_that_makes_the_difference_is_named() -> None:
    names = [f"layer{position}" for position in range(10)]
    judged = inspection(
        parameters=[parameter(f"{name}.weight", 1e-6 if position < 4 else 1.0) for position, name in enumerate(names)]
    )
    (verdict,) = found("vanishing-gradient", judged)
    assert verdict.message.endswith("most of it, 1e-6, from 'layer4.weight' to 'layer3.weight'.")


def test_weights_are_compared_in_the_order_in_which_their_layers_ran() -> None:
    # The head is defined first and runs last.
    learning = {"head": 1.0, "a": 1e-6, "b": 1e-3}
    judged = inspection(
        [layer_row(name, tensor(1.0)) for name in ("a", "b", "head")],
        parameters=[parameter(f"{name}.weight", ratio) for name, ratio in learning.items()],
    )
    (verdict,) = found("vanishing-gradient", judged)
    assert verdict.where == "a.weight"
    assert "'head.weight' to 'a.weight'" in verdict.message


def test_a_frozen_network_is_judged_by_its_outputs() -> None:
    frozen = replace(logistic_chain(30), parameters=())
    (verdict,) = found("vanishing-gradient", frozen)
    assert verdict.where == "layer0"
    assert "‖g‖·‖x‖" in verdict.message
    assert rules(replace(chain([0.5] * 30), parameters=())) == []


def test_a_recurrence_is_judged_by_the_calls_of_its_cell() -> None:
    def unrolled(factor: float, calls: int) -> Gradients:
        gradients = [factor ** (calls - 1 - call) for call in range(calls)]
        return inspection(
            [layer_row("cell", tensor(1.0), "RNNCell", call) for call in range(calls)],
            [output_row("cell", tensor(gradient), "RNNCell", call) for call, gradient in enumerate(gradients)],
            [parameter("cell.weight_hh", 1.0)],
        )

    (verdict,) = found("vanishing-gradient", unrolled(0.5, 60))
    assert verdict.where == "cell"
    assert "from the last calls to the first, 'cell#59' to 'cell'" in verdict.message
    assert rules(unrolled(2.0, 60)) == ["exploding-gradient"]
    assert rules(unrolled(0.9, 60)) == []


# Exploding


def test_a_deep_linear_network_with_threefold_weights_explodes() -> None:
    judged = chain([3.0] * 30)
    assert {weight.ratio for weight in judged.parameters} == {3.0**28}  # by its weights nothing is to be seen
    (verdict,) = found("exploding-gradient", judged)
    assert (verdict.level, verdict.where) == ("fail", "layer0")
    # The second layer's gradient is 3**28, the greatest of the last three 3**2.
    assert "grows to 2.5e12 times its size (limit 10,000)" in verdict.message
    assert rules(judged) == ["exploding-gradient"]


@pytest.mark.parametrize(
    ("mode", "scale", "level"), [("eval", 1.0, "warn"), ("eval", 1.1, "fail"), ("train", 1.0, "fail")]
)
def test_untrained_batch_norm_in_eval_mode_is_taken_into_account(mode: str, scale: float, level: str) -> None:
    judged = chain([3.0] * 30)
    norm = parameter("bn.weight", 1.0, scale * math.sqrt(64), shape=(64,), kind="BatchNorm2d")
    unused = parameter("aux.bn.weight", None, math.sqrt(8), shape=(8,), kind="BatchNorm2d", status="not reached")
    judged = replace(judged, parameters=(*judged.parameters, norm, unused), mode=mode)  # type: ignore[arg-type]
    (verdict,) = found("exploding-gradient", judged)
    assert verdict.level == level
    assert ("train mode" in verdict.message) == (level == "warn")


def test_a_limit_on_the_other_side_of_one_objects_to_what_is_flat_and_not_to_two_layers() -> None:
    (finding,) = found("exploding-gradient", chain([1.0] * 8), {"exploding": 0.5})
    assert "to 1 times its size (limit 0.5)" in finding.message
    assert len(found("vanishing-gradient", chain([1.0] * 8), {"vanishing": 2.0})) == 1
    for few in (chain([1.0] * 2), inspection()):
        assert judge_gradients(few, {"exploding": 0.5, "vanishing": 2.0}) == ()


def test_the_smallest_and_largest_floats_are_judged_too() -> None:
    names = [f"layer{at}" for at in range(10)]
    rising = [5e-324, *[1.0] * 8, 1.7e308]
    for values in (rising, rising[::-1]):
        judged = inspection(
            [layer_row(name, tensor(1e200)) for name in names],
            [output_row(name, tensor(value)) for name, value in zip(names, values, strict=True)],
            [parameter(f"{name}.weight", value) for name, value in zip(names, values, strict=True)],
        )
        assert rules(judged)[0] == ("vanishing-gradient" if values is rising else "exploding-gradient")
    assert rules(inspection(gradients=[output_row(name, tensor(math.inf)) for name in names])) == []


# Imbalance


def test_weights_that_need_different_learning_rates_are_named() -> None:
    ratios = {"a": 1.0, "b": 2e-7, "c": 1.0, "d": 0.5}
    judged = inspection(parameters=[parameter(f"{name}.weight", ratio) for name, ratio in ratios.items()])
    (verdict,) = found("gradient-imbalance", judged)
    assert (verdict.level, verdict.where) == ("warn", "b.weight")
    assert "5e6 times" in verdict.message
    assert "2e-7 at 'b.weight'" in verdict.message
    assert found("gradient-imbalance", judged, {"imbalance": 1e7}) == []


def test_imbalance_is_not_judged_while_batch_norm_is_idle() -> None:
    norm = parameter("bn.weight", 1.0, math.sqrt(64), shape=(64,), kind="BatchNorm2d")
    weights = [parameter(f"layer{at}.weight", 1e-9 if at == 5 else 1.0) for at in range(10)]
    judged = inspection(parameters=[norm, *weights])
    assert rules(judged) == []
    assert rules(replace(judged, mode="train")) == ["gradient-imbalance"]
