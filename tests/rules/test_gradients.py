"""Loss and gradients that are not finite or zero, on inspections made by hand."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import hookscope
from hookscope.results.gradients import Gradients
from tests.commands.check.measurements import chain, found, inspection, layer_row, output_row, parameter, rules, tensor

NAMES = ("a", "b", "c", "d")


@pytest.mark.parametrize(("value", "text"), [(math.nan, "NaN"), (math.inf, "Inf"), (-math.inf, "-Inf")])
def test_a_loss_that_is_not_finite_fails(value: float, text: str) -> None:
    (verdict,) = found("non-finite-loss", inspection(loss=value))
    assert (verdict.level, verdict.where) == ("fail", "")
    assert f"is {text};" in verdict.message


# Forward


def forward(**broken: tuple[int, int]) -> Gradients:
    """Return a pass through layers a to d, some with (NaN, Inf) counts."""
    counts = {name: broken.get(name, (0, 0)) for name in NAMES}
    rows = [layer_row(name, tensor(1.0, (1, 10), nan_count=nan, inf_count=inf)) for name, (nan, inf) in counts.items()]
    return inspection(rows)


def test_the_first_broken_output_is_named_and_those_after_it_are_not() -> None:
    (verdict,) = found("non-finite-activation", forward(b=(3, 1), c=(10, 0), d=(10, 0)))
    assert (verdict.level, verdict.where) == ("fail", "b")
    assert "3 NaN and 1 Inf in 10 values (limit 0); 2 later outputs have some too" in verdict.message


def test_a_mask_of_infinities_is_a_warning() -> None:
    (verdict,) = found("non-finite-activation", forward(b=(0, 5)))
    assert verdict.level == "warn"
    assert "as with a mask" in verdict.message


@pytest.mark.parametrize("change", [{"b": (1, 5)}, {"b": (0, 5), "c": (0, 1)}])
def test_what_spreads_or_is_nan_is_no_mask(change: dict[str, tuple[int, int]]) -> None:
    assert [verdict.level for verdict in found("non-finite-activation", forward(**change))] == ["fail"]


def test_infinities_that_reach_the_loss_are_no_mask() -> None:
    judged = forward(b=(0, 5))
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
    assert "The gradient just before it, of 'c', is finite" in verdict.message


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
    assert "the consumer of the output of 'b'" in verdict.message


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


# All zero, or as good as zero


def test_a_loss_that_nothing_changes_fails() -> None:
    judged = inspection(
        gradients=[output_row("a", tensor(0.0)), output_row("softmax", tensor(1.0))],
        parameters=[parameter("a.weight", 0.0), parameter("a.bias", 0.0)],
    )
    (verdict,) = found("zero-gradient", judged)
    assert verdict.level == "fail"
    assert rules(judged) == ["zero-gradient"]  # and not dead layers as well


def test_a_frozen_network_is_judged_by_its_outputs() -> None:
    assert rules(inspection(gradients=[output_row("a", tensor(0.0)), output_row("b", tensor(0.0))])) == [
        "zero-gradient"
    ]
    assert "zero-gradient" not in rules(
        inspection(gradients=[output_row("a", tensor(0.0)), output_row("b", tensor(1.0))])
    )


def test_gradients_that_are_rounding_beside_the_loss_are_a_warning() -> None:
    # A sum of probabilities is 2 for two inputs, whatever the weights are.
    judged = inspection(parameters=[parameter("fc.weight", 1e-9, 10.0), parameter("fc.bias", 1e-8, 0.5)], loss=2.0)
    (verdict,) = found("zero-gradient", judged)
    assert verdict.level == "warn"
    assert "‖g‖·‖w‖ is at most 5e-9 of the loss (limit 1e-6)" in verdict.message
    assert found("zero-gradient", judged, {"rounding": 1e-9}) == []


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_nothing_is_measured_against_a_loss_that_is_not_finite(loss: float) -> None:
    assert rules(inspection(parameters=[parameter("fc.weight", 1e-9)], loss=loss)) == ["non-finite-loss"]


@pytest.mark.parametrize(("gradient", "says"), [(1e-9, "1e-9"), (0.0, "0")])
def test_a_sum_over_what_is_normalised_is_named(gradient: float, says: str) -> None:
    judged = inspection(
        [layer_row("fc", tensor(1.0)), layer_row("norm", tensor(1.0), "LayerNorm")],
        [output_row("fc", tensor(gradient)), output_row("norm", tensor(1.0), "LayerNorm")],
        [parameter("fc.weight", gradient), parameter("norm.weight", 1.0, 8.0, shape=(64,))],
    )
    (verdict,) = found("zero-gradient", judged)
    assert (verdict.level, verdict.where) == ("warn", "norm")
    assert f"at most {says} of its own" in verdict.message


def test_a_normalising_layer_whose_scale_starts_at_zero_is_called_that() -> None:
    judged = inspection(
        [layer_row("fc", tensor(1.0)), layer_row("norm", tensor(1.0), "LayerNorm")],
        [output_row("fc", tensor(0.0)), output_row("norm", tensor(1.0), "LayerNorm")],
        [parameter("fc.weight", 0.0), parameter("norm.weight", 1.0, 0.0, shape=(64,))],
    )
    assert rules(judged) == ["dead-gradient"]


# Dead layers


def dead(*l2: float, kinds: dict[int, str] | None = None, output: float = 1.0) -> Gradients:
    """Return layers with gradients of these norms, all of whose outputs have another one; the last has a weight."""
    names = [f"layer{at}" for at in range(len(l2))]
    kind_of = {name: (kinds or {}).get(at, "Linear") for at, name in enumerate(names)}
    return inspection(
        [layer_row(name, tensor(output), kind_of[name]) for name in names],
        [output_row(name, tensor(each), kind_of[name]) for name, each in zip(names, l2, strict=True)],
        [parameter(f"{names[-1]}.weight", 1.0)],
    )


def test_a_run_of_dead_layers_is_one_verdict() -> None:
    (verdict,) = found("dead-gradient", dead(1.0, 0.0, 0.0, 0.0, 1.0))
    assert (verdict.level, verdict.where) == ("fail", "layer3")
    assert "'layer3' and 2 outputs before it is exactly 0 everywhere" in verdict.message
    assert "nothing gets through 'layer4' (Linear)" in verdict.message


def test_runs_that_do_not_touch_are_verdicts_of_their_own() -> None:
    assert [verdict.where for verdict in found("dead-gradient", dead(0.0, 1.0, 0.0, 1.0))] == ["layer0", "layer2"]


@pytest.mark.parametrize(("mode", "level"), [("train", "warn"), ("eval", "fail")])
def test_a_branch_that_stochastic_depth_left_out_in_training_is_a_warning(mode: str, level: str) -> None:
    judged = replace(dead(1.0, 0.0, 1.0, kinds={2: "StochasticDepth"}), mode=mode)
    (verdict,) = found("dead-gradient", judged)
    assert (verdict.level, verdict.where) == (level, "layer1")
    assert ("'layer2' (StochasticDepth) left the branch out by chance" in verdict.message) == (mode == "train")


def test_a_branch_left_out_by_chance_does_not_excuse_another() -> None:
    judged = replace(dead(0.0, 1.0, 0.0, 1.0, kinds={1: "DropPath"}), mode="train")
    assert [(verdict.level, verdict.where) for verdict in found("dead-gradient", judged)] == [
        ("fail", "layer2"),
        ("warn", "layer0"),
    ]


def test_underflow_is_given_as_the_cause() -> None:
    (verdict,) = found("dead-gradient", dead(0.0, 3e-44, 1e-20, 1.0))
    assert "it underflows, ‖grad_output‖ of 'layer1' being 3e-44" in verdict.message


def test_what_comes_last_and_does_not_matter_is_dead() -> None:
    (verdict,) = found("dead-gradient", dead(1.0, 1.0, 0.0))
    assert "the loss does not change with it" in verdict.message


@pytest.mark.parametrize(
    ("gate", "following"),
    [
        ("head.weight", "head"),  # the layer after
        ("block.mha.out_proj.weight", "block.mha"),  # inside the layer after
        ("block.gamma", "next"),  # around the dead one
        ("block.bn2.weight", "next"),  # in the same block
    ],
)
def test_a_weight_that_starts_at_zero_is_a_warning(gate: str, following: str) -> None:
    judged = inspection(
        gradients=[
            output_row("stem", tensor(0.0)),
            output_row("block.conv", tensor(0.0)),
            output_row(following, tensor(1.0)),
        ],
        parameters=[parameter(gate, 1.0, 0.0), parameter("block.conv.weight", 0.0)],
    )
    (verdict,) = found("dead-gradient", judged)
    assert (verdict.level, verdict.where) == ("warn", gate)
    assert f"'{gate}' is all zero and blocks the gradient of 2 outputs" in verdict.message


def test_many_weights_that_start_at_zero_are_one_warning() -> None:
    gradients, parameters = [], []
    for at in range(5):
        gradients += [output_row(f"b{at}.conv", tensor(0.0)), output_row(f"b{at}.bn", tensor(1.0))]
        parameters += [parameter(f"b{at}.bn.weight", 1.0, 0.0, shape=(8,))]
    (verdict,) = found("dead-gradient", inspection(gradients=gradients, parameters=parameters))
    assert "'b0.bn.weight', 'b1.bn.weight', 'b2.bn.weight' and 2 more are all zero and block" in verdict.message


@pytest.mark.parametrize(
    "other",
    [
        parameter("layer1.bias", 1.0, 0.0),  # a bias lets gradients through
        parameter("layer1.weight", 0.0, 0.0),  # it never opens
        parameter("layer2.weight", 1.0, 0.0),  # it stands elsewhere
        parameter("layer1.weight", 1.0, 0.1),  # it is not zero
    ],
)
def test_nothing_else_excuses_a_dead_layer(other: object) -> None:
    judged = dead(0.0, 1.0, 1.0)
    judged = replace(judged, parameters=(*judged.parameters, other))
    assert [verdict.level for verdict in found("dead-gradient", judged)] == ["fail"]


def test_a_weight_whose_layer_takes_in_zeros_is_dead() -> None:
    judged = chain([1.0] * 4)
    starved = parameter("layer2.weight", 0.0)
    judged = replace(judged, parameters=(*judged.parameters[:2], starved, judged.parameters[3]))
    (verdict,) = found("dead-gradient", judged)
    assert (verdict.level, verdict.where) == ("fail", "layer2.weight")
    assert "the layer's input is zero everywhere" in verdict.message


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize(
    ("step", "unlearnt"),
    [(-1, "recurrent.weight_hh_l0_reverse"), (0, "recurrent.weight_hh_l0"), (slice(None), None)],
    ids=["the last step", "the first step", "all steps"],
)
def test_recurrent_weights_that_only_the_first_step_uses_are_a_warning(
    kind: type[nn.RNNBase], step: int | slice, unlearnt: str | None
) -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = kind(8, 6, batch_first=True, bidirectional=True)

        def forward(self, x: Tensor) -> Tensor:
            output, _ = self.recurrent(x)
            return output[:, step]

    torch.manual_seed(0)
    run = hookscope.grads(Reader(), torch.randn(2, 5, 8), loss="sum")
    verdicts = [verdict for verdict in run.verdicts if verdict.rule == "dead-gradient"]
    assert [(verdict.level, verdict.where) for verdict in verdicts] == ([("warn", unlearnt)] if unlearnt else [])
    assert all("hidden state that it multiplies is zero" in verdict.message for verdict in verdicts)


# Unused parameters


def test_parameters_that_never_get_a_gradient_are_counted_by_reason() -> None:
    judged = inspection(
        parameters=[
            parameter("fc.weight", 1.0),
            *(parameter(f"aux.{name}", None, status="not reached") for name in ("a.weight", "a.bias", "b.w", "b.b")),
            parameter("detached.weight", None, status="no gradient path"),
        ]
    )
    first, second = found("unused-parameter", judged)
    assert (first.level, first.where) == ("warn", "aux")
    assert "4 of 6 trainable parameters never get a gradient (limit 0): no path leads from the loss" in first.message
    assert "'aux.a.weight', 'aux.a.bias', 'aux.b.w' and 1 more" in first.message
    assert second.where == "detached.weight"
    assert "no_grad" in second.message


# What is sound

OFF_THE_PATH = [
    output_row("frozen", tensor(None), status="no gradient path"),
    output_row("aux", tensor(None), status="not reached"),
]
NORM = (layer_row("norm", tensor(1.0), "LayerNorm"), output_row("norm", tensor(1.0), "LayerNorm"))

SOUND: dict[str, Gradients] = {
    "a large loss": inspection(loss=3.4e38),
    "small gradients of a small loss": inspection(parameters=[parameter("fc.weight", 1e-9, 10.0)], loss=2e-3),
    "a gradient that reaches the beginning on another way": inspection(
        [layer_row("stem", tensor(1.0)), layer_row("fc", tensor(1.0)), NORM[0]],
        [output_row("stem", tensor(1.0)), output_row("fc", tensor(1e-9)), NORM[1]],
    ),
    "the smallest gradient is not dead": dead(1.0, 1e-30, 1.0),
    "layers off the path": replace(dead(1.0, 1.0), gradients=(*dead(1.0, 1.0).gradients, *OFF_THE_PATH)),
    # As in normaliser-free networks: the kernel is scaled by a gain that starts at zero.
    "a weight that a gain of zero keeps still": inspection(
        gradients=[output_row("block.conv", tensor(1.0)), output_row("head", tensor(1.0))],
        parameters=[parameter("block.conv.weight", 0.0), parameter("block.conv.gain", 1.0, 0.0, shape=(8, 1, 1))],
    ),
    "a bias with a zero gradient": replace(
        chain([1.0] * 4), parameters=(*chain([1.0] * 4).parameters, parameter("layer2.bias", 0.0, shape=(8,)))
    ),
    "a frozen parameter": inspection(
        parameters=[
            parameter("fc.weight", 1.0),
            parameter("a.weight", None, status="no gradient path", trainable=False),
        ]
    ),
    "a zero gradient is a gradient": inspection(parameters=[parameter("a.weight", 0.0), parameter("b.weight", 1.0)]),
}


@pytest.mark.parametrize("name", SOUND)
def test_what_is_sound_is_left_alone(name: str) -> None:
    assert rules(SOUND[name]) == []
