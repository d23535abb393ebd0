"""Measurements that break exactly one rule, and near misses; for gradients see test_grads.py."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hookscope.results.check import CheckMeasurements, ConstantRun, NonFiniteOrigin
from hookscope.results.distribution import distribution_of
from hookscope.results.gradients import Gradients
from hookscope.results.inputs import InputRecord
from hookscope.results.network import Failure
from hookscope.rules import RULES
from hookscope.rules.activations import SATURATED_BEYOND
from tests.commands.check.measurements import (
    FORWARD,
    HEALTHY,
    OUTPUT,
    findings,
    found,
    inspection,
    judged,
    layer_row,
    numbered,
    outcomes,
    row,
    rules,
    stored,
    tensor,
    with_output,
    with_peaks,
    with_prediction,
    with_row,
    with_stored,
)

ZERO: dict[str, Any] = {"min": 0.0, "max": 0.0, "max_abs": 0.0}
SATURATED = distribution_of(np.r_[np.full(9, 0.999), 0.5])
RAISED = Failure("conv", "Conv2d", ("2x3x4x4",), "RuntimeError: expected 4 channels")
HEAD = stored("out.weight", shape=(1, 64), zero_count=64, filter_count=1, **ZERO)
SCALE = stored("norm.weight", shape=(4,), zero_count=4, **ZERO)
POSITIONS = stored("rel_pos_h", shape=(27, 64), zero_count=27 * 64, **ZERO)

BREAKING: list[tuple[str, str, str, CheckMeasurements]] = [
    ("non-finite-parameter", "fail", "conv.bias", with_stored("conv.bias", nan_count=1)),
    ("non-finite-parameter", "fail", "mask", with_stored("mask", nan_count=1)),
    ("non-finite-parameter", "fail", "bn.running_var", with_stored("bn.running_var", inf_count=4)),
    ("zero-parameter", "warn", "conv.weight", with_stored("conv.weight", zero_count=48, **ZERO)),
    ("zero-parameter", "warn", "rel_pos_h", replace(HEALTHY, stored=(POSITIONS,))),
    ("zero-parameter", "warn", "out.weight", replace(HEALTHY, stored=(HEAD,))),
    ("zero-parameter", "warn", "norm.weight", replace(HEALTHY, stored=(SCALE, stored("norm.bias", shape=(4,))))),
    ("constant-parameter", "warn", "head.weight", with_stored("head.weight", min=0.1, max=0.1)),
    ("duplicate-parameter", "warn", "head.weight", with_stored("head.weight", twin_of="other.weight")),
    ("batchnorm-variance", "fail", "bn.running_var", with_stored("bn.running_var", min=-1e-9)),
    ("batchnorm-variance", "fail", "bn.running_var", with_stored("bn.running_var", min=0.0, zero_count=3)),
    ("dead-filter", "warn", "conv.weight", with_stored("conv.weight", zero_filters=(0, 2))),
    ("outlier-weight", "warn", "head.weight", with_stored("head.weight", max_abs=101.0, outlier_ratio=101.0)),
    ("outlier-weight", "warn", "head.weight", with_stored("head.weight", max_abs=999.0, outlier_ratio=1e30)),
    ("outlier-weight", "fail", "head.weight", with_stored("head.weight", max_abs=1001.0, outlier_ratio=10001.0)),
    ("outlier-weight", "fail", "bn.running_var", with_stored("bn.running_var", max_abs=1001.0, outlier_ratio=10001.0)),
    ("duplicate-filter", "warn", "conv.weight", with_stored("conv.weight", repeated_filters=(3,))),
    ("constant-block", "warn", "conv.weight", with_stored("conv.weight", constant_run=ConstantRun(64, 0.0, 3.9))),
    ("output-shape", "fail", "(model)", with_output(shape=(2, 5))),
    ("constant-output", "fail", "(model)", with_output(input_difference=9e-7)),
    ("constant-output", "warn", "(model)", with_output(input_difference=0.0, dtype="int64")),
    ("repeatability", "fail", "(model)", with_output(repeat_difference=1.1e-5)),
    ("batch-consistency", "fail", "(model)", with_output(alone_difference=1.1e-4)),
    ("dead-channels", "warn", "relu", with_row("relu", dead_channel_count=4)),
    ("quiet-channels", "warn", "gelu", with_row("gelu", max=0.0)),
    ("saturated-activation", "warn", "gate", with_row("gate", distribution=SATURATED)),
    ("fp16-headroom", "warn", "conv", with_row("conv", min=-32753.0)),
    ("fp16-headroom", "warn", "head.weight", with_stored("head.weight", max_abs=32753.0)),
    ("expectation", "fail", "cat.jpg", with_prediction(class_indices=(1, 0, 3, 2, 5))),
]
"""A rule, the level and the place of its finding, and what breaks it."""

NEAR_MISSES: list[tuple[str, CheckMeasurements]] = [
    ("non-finite-parameter", with_stored("mask", inf_count=3, zero_count=1)),
    (
        "non-finite-parameter",
        replace(HEALTHY, stored=(stored("observer.min_val", shape=(), inf_count=1, role="buffer"),)),
    ),
    ("zero-parameter", with_stored("conv.weight", zero_count=47)),
    ("zero-parameter", with_stored("conv.bias", zero_count=4, **ZERO)),
    ("zero-parameter", replace(HEALTHY, stored=(SCALE, stored("norm.bias", shape=(4,), zero_count=4, **ZERO)))),
    ("zero-parameter", replace(HEALTHY, stored=(SCALE,))),
    ("zero-parameter", replace(HEALTHY, stored=(stored("attention_biases", shape=(4, 9), zero_count=36, **ZERO),))),
    ("zero-parameter", replace(HEALTHY, stored=(POSITIONS,), model=replace(HEALTHY.model, random=True))),
    ("zero-parameter", replace(HEALTHY, stored=(stored("scale", shape=(4, 1, 1), zero_count=4, **ZERO),))),
    ("constant-parameter", with_stored("conv.bias", min=0.1, max=0.1)),
    ("constant-parameter", with_stored("head.weight", min=0.1, max=0.1000001)),
    ("constant-parameter", with_stored("mask", shape=(2, 2), min=7.0, max=7.0)),
    ("constant-parameter", replace(HEALTHY, stored=(stored("block.alpha", shape=(4, 9), min=0.1, max=0.1),))),
    ("batchnorm-variance", with_stored("bn.running_var", min=5.6e-45)),
    ("dead-filter", with_stored("conv.weight", zero_filters=(2,))),
    ("dead-filter", with_stored("head.weight", kind="Embedding", zero_filters=(0,))),
    ("outlier-weight", with_stored("head.weight", max_abs=100.0, outlier_ratio=100.0)),
    ("outlier-weight", with_stored("mask", max_abs=3e4, outlier_ratio=1e30)),
    ("constant-block", with_stored("conv.weight", constant_run=ConstantRun(63, 0.0, 1.0))),
    ("constant-block", with_stored("conv.weight", constant_run=ConstantRun(64, 0.0, 4.0))),
    ("constant-block", with_stored("conv.weight", constant_run=ConstantRun(5000, 0.0, math.inf))),
    ("output-shape", with_output(shape=(2, 5), batched=False)),
    ("output-shape", with_output(shape=(2, 5, 7))),
    ("constant-output", with_output(input_difference=1e-6)),
    ("constant-output", replace(HEALTHY, outputs=(OUTPUT, replace(OUTPUT, label="(model)[1]", input_difference=0.0)))),
    ("repeatability", with_output(repeat_difference=1e-5)),
    ("batch-consistency", with_output(alone_difference=1e-4)),
    ("dead-channels", with_row("conv", dead_channel_count=4)),
    ("dead-channels", with_row("relu", dead_channel_count=3)),
    ("dead-channels", with_row("relu", dead_channel_count=4, element_count=127)),
    ("dead-layer", with_row("conv", shape=(2, 4, 16, 16), element_count=2048, zero_fraction=1.0)),
    ("dead-layer", with_row("relu", shape=(2, 4, 16, 16), element_count=2048, zero_fraction=0.999)),
    ("quiet-channels", with_peaks(1.0, 0.001, 0.001, 0.001)),
    ("quiet-channels", with_peaks(1e-6, 1e-6, 1e-6, 1e-6)),
    ("saturated-activation", with_row("gate", distribution=distribution_of(np.r_[np.full(8, 0.999), 0.5, 0.5]))),
    ("fp16-headroom", with_row("conv", min=-32752.0)),
    ("fp16-headroom", with_row("conv", min=-1e9, dtype="int64")),
    ("fp16-headroom", with_stored("head.weight", max_abs=32752.0)),
    ("fp16-headroom", with_stored("head.weight", zero_count=4, fp16_zero_count=2)),
    ("fp16-headroom", with_stored("conv.bias", fp16_zero_count=4)),
    ("expectation", with_prediction(probabilities=(0.5, 0.3, 0.1, 0.05, 0.03))),
]


def quiet(measured: CheckMeasurements) -> CheckMeasurements:
    """Close the GELU: its peaks are those of a layer without positive outputs, whose inputs are all below -3.1."""
    return replace(measured, channel_peaks=with_peaks(*[0.002] * 4).channel_peaks)


def test_a_healthy_checkpoint_passes_every_rule() -> None:
    report = judged(HEALTHY)
    assert report.findings == ()
    assert {name for name, outcome in outcomes(report).items() if outcome.status != "pass"} == {
        "drift",
        "accuracy-drop",
    }
    assert (report.exit_code, report.passed) == (0, True)


@pytest.mark.parametrize(
    ("rule", "level", "where", "measured"), BREAKING, ids=[f"{rule}-{where}" for rule, _, where, _ in BREAKING]
)
def test_what_breaks_a_rule_breaks_no_other(rule: str, level: str, where: str, measured: CheckMeasurements) -> None:
    report = judged(quiet(measured) if rule == "quiet-channels" else measured)
    assert findings(report) == [(rule, level, where)]
    assert report.exit_code == (level == "fail")
    (finding,) = report.findings
    assert where in (*finding.message.split("'"), "(model)", "")
    assert finding.message.endswith(".")
    assert "\n" not in finding.message


@pytest.mark.parametrize(("rule", "measured"), NEAR_MISSES)
def test_what_is_just_short_of_breaking_a_rule_passes(rule: str, measured: CheckMeasurements) -> None:
    report = judged(measured)
    assert report.findings == ()
    assert outcomes(report)[rule].status == "pass"


def test_a_pass_that_raises_fails_and_skips_what_it_would_have_shown() -> None:
    report = judged(replace(HEALTHY, forward=replace(FORWARD, failure=RAISED, rows=FORWARD.rows[:1])))
    assert findings(report) == [("forward", "fail", "conv")]
    assert report.exit_code == 6
    assert report.error == report.findings[0].message
    assert report.error == (
        "The forward pass raised in 'conv' (Conv2d), given 2x3x4x4: RuntimeError: expected 4 channels"
    )
    status = {name: outcome.status for name, outcome in outcomes(report).items()}
    for name, rule in RULES.items():
        if rule.needs in ("file", "network", "stored"):
            assert status[name] == "pass"
        elif name not in ("forward", "drift", "accuracy-drop"):
            assert (status[name], outcomes(report)[name].reason) == ("skipped", "the forward pass raised")


def broken_from(*layers: str, **origin: object) -> CheckMeasurements:
    """Return measurements in which the outputs of these layers hold NaN, and the first of them makes it."""
    rows = [
        replace(each, activation=replace(each.activation, nan_count=3)) if each.layer in layers else each
        for each in FORWARD.rows
    ]
    made = NonFiniteOrigin(layers[0] or "(model)", "Conv2d", 3, 1, 128, **origin)  # type: ignore[arg-type]
    return replace(HEALTHY, forward=replace(FORWARD, rows=tuple(rows)), origin=made)


def test_the_module_that_makes_nan_is_named_with_its_parameters_and_its_victims_counted() -> None:
    report = judged(broken_from("conv", "relu", "gelu", "", parameters=("conv.weight",)))
    assert findings(report) == [("non-finite-activation", "fail", "conv")]
    assert report.findings[0].message == (
        "NaN starts at 'conv' (Conv2d): 3 NaN and 1 Inf in 128 values, out of finite inputs (limit 0);"
        " its 'conv.weight' is not finite; 3 later outputs have some too, passed on."
    )


@pytest.mark.parametrize(
    ("origin", "words"),
    [
        ({"inputs": ((5, "a.jpg"),), "input_count": 1}, "; input 5 ('a.jpg') leads to it."),
        (
            {"inputs": ((1, "b.jpg"),), "input_count": 4, "position": (2, None)},
            "; of the 4 inputs of the batch only input 1 ('b.jpg') leads to it, at [2, :].",
        ),
        (
            {"inputs": ((1, ""), (3, "")), "input_count": 4, "position": (0, 7)},
            "; 2 of the 4 inputs of the batch lead to it (1, 3), input 1 at [0, 7].",
        ),
        ({"inputs": tuple((at, "") for at in range(4)), "input_count": 4}, "; every input of the batch leads to it."),
        (
            {"inputs": ((0, "a.jpg"), (1, "b.jpg")), "input_count": 2, "position": (3, None, None)},
            "; every input of the batch leads to it, input 0 at [3, :, :].",
        ),
    ],
)
def test_what_leads_to_nan_is_told(origin: dict[str, Any], words: str) -> None:
    (finding,) = judged(broken_from("conv", **origin)).findings
    assert finding.message.endswith(f"in 128 values, out of finite inputs (limit 0){words}")


@pytest.mark.parametrize(("source", "place"), [("net.py:7", "'conv:softmax' (net.py:7)"), ("", "'conv:softmax'")])
def test_nan_starts_at_an_operation_and_its_line(source: str, place: str) -> None:
    (finding,) = judged(broken_from("conv", operation="conv:softmax", source=source)).findings
    assert finding.message.startswith(f"NaN starts at {place}: 'conv' (Conv2d) makes 3 NaN and 1 Inf in 128 values")


def test_nan_skips_what_it_would_break() -> None:
    changed = replace(broken_from("conv", ""), outputs=with_output(input_difference=0.0).outputs)
    report = outcomes(judged(changed))
    skipped = {name for name, each in report.items() if each.status == "skipped"}
    assert {"constant-output", "repeatability", "batch-consistency", "expectation", "dead-channels"} <= skipped
    assert {report[name].reason for name in skipped} == {"a module makes NaN or Inf, which causes the rest"}


def test_no_module_is_blamed_in_the_reason_to_skip_if_none_makes_nan() -> None:
    report = outcomes(judged(replace(broken_from("conv", ""), origin=None)))
    assert report["constant-output"].reason == "an output has NaN or Inf, which causes the rest"


def test_code_between_modules_is_named_by_its_container() -> None:
    (finding,) = judged(broken_from("", between=True)).findings
    assert finding.where == "(model)"
    assert finding.message.startswith("NaN starts in the code of '(model)' (Conv2d) between its modules: 3 NaN")


def test_nan_that_no_module_makes_does_not_pass() -> None:
    changed = replace(
        broken_from("conv", ""), origin=None, unmeasured={"non-finite-activation": "The input holds NaN."}
    )
    (finding,) = judged(changed).findings
    assert (finding.rule, finding.level, finding.where) == ("non-finite-activation", "fail", "conv")
    assert finding.message.endswith("out of finite inputs: check the inputs. The input holds NaN.")


def test_infinities_that_come_to_nothing_are_a_mask() -> None:
    assert judged(with_row("gate", inf_count=5)).findings == ()
    assert findings(judged(with_row("", inf_count=5))) == [("non-finite-activation", "fail", "(model)")]


def test_a_float16_output_that_overflowed_has_no_headroom() -> None:
    report = judged(with_row("gate", inf_count=5, dtype="float16"), wanted=frozenset({"fp16-headroom"}))
    assert "'gate' (Sigmoid) reaches Inf, Inf times the greatest of float16" in report.findings[0].message


def test_the_worst_of_several_without_headroom_is_named_and_the_others_counted() -> None:
    weights = [stored("a.weight", max_abs=40000.0), stored("b.weight", max_abs=50000.0), stored("c.weight")]
    (finding,) = judged(replace(HEALTHY, stored=tuple(weights))).findings
    assert finding.where == "b.weight"
    assert finding.message == (
        "'b.weight' (Conv2d) reaches 50,000, 0.763 times the greatest of float16 (limit 0.5);"  # 50000 / 65504
        " 2 of 8 outputs, parameters and buffers are above it."
    )


def test_the_weight_of_which_most_vanishes_is_named() -> None:
    weights = [stored("a.weight", fp16_zero_count=10), stored("b.weight", fp16_zero_count=12), stored("c.weight")]
    (finding,) = judged(replace(HEALTHY, stored=tuple(weights))).findings
    assert finding.message == (
        "'b.weight' (Conv2d): 25.0% of its values other than 0 become 0 in float16 (limit 10%);"  # 12 of 48
        " 2 of 3 weights are above it."
    )


@pytest.mark.parametrize(
    ("zeros", "words"),
    [
        (
            range(10, 15),
            "5 in a row, from 10 to 14, of 64 output channels are all 0, which by chance has a probability",
        ),
        (range(60, 64), "the last 4 of 64 output channels are all 0, which by chance has a probability of 7e-8 (limit"),
        (range(10, 14), ""),  # 60 places, with a probability of (1 / 62)^4 each
        (range(61, 64), ""),  # (1 / 63)^3
        (range(4, 64, 6), ""),
    ],
)
def test_filters_of_zeros_in_a_row_are_a_part_of_the_file_that_was_never_written(zeros: range, words: str) -> None:
    broken = with_stored("conv.weight", filter_count=64, zero_filters=tuple(zeros))
    messages = [finding.message for finding in judged(broken).findings]
    assert [words in message for message in messages] == [True] * bool(words)
    if zeros == range(10, 15):
        assert f"a probability of {60 * (1 / 61) ** 5:.0e} (limit".replace("e-0", "e-") in messages[0]


def test_nan_beside_a_number_is_a_difference() -> None:
    (finding,) = judged(with_output(repeat_difference=float("nan"))).findings
    assert "they differ by NaN beside the greatest magnitude (limit 1e-5)" in finding.message
    assert "they differ by 0.2 of the" in judged(with_output(repeat_difference=0.2)).findings[0].message


def test_of_a_single_input_it_is_said_that_there_is_one() -> None:
    dead = with_row("relu", dead_channel_count=4).forward
    changed = replace(HEALTHY, forward=replace(dead, inputs=dead.inputs[:1]))
    assert "are 0 over the only input (limit" in judged(changed).findings[0].message


def test_a_single_zero_variance_in_an_untrained_batchnorm_fails() -> None:
    means = stored("bn.running_mean", "BatchNorm2d", (10,), role="buffer", zero_count=10, min=0.0, max=0.0, max_abs=0.0)
    variances = stored("bn.running_var", "BatchNorm2d", (10,), role="buffer", min=0.0, zero_count=1)
    assert findings(judged(replace(HEALTHY, stored=(means, variances)))) == [
        ("batchnorm-variance", "fail", "bn.running_var")
    ]
    trained = replace(means, zero_count=0, min=-1.0, max=1.0)
    assert judged(replace(HEALTHY, stored=(trained, variances))).findings == ()


@pytest.mark.parametrize("outputs", [6, 1])
def test_a_constant_output_is_a_warning_while_the_head_is_zero(outputs: int) -> None:
    head = stored("head.weight", "Linear", (outputs, 4), zero_count=4 * outputs, filter_count=outputs, **ZERO)
    changed = replace(with_output(input_difference=0.0), stored=(stored("conv.weight"), head))
    actual = judged(changed, wanted=frozenset({"constant-output"})).findings
    assert [(finding.level, "'head.weight' is all 0" in finding.message) for finding in actual] == [("warn", True)]
    before_a_trained_head = (head, replace(head, zero_count=0, min=-1.0, max=1.0, max_abs=1.0))
    for earlier in ((head, stored("conv.weight")), before_a_trained_head):
        found_ = judged(replace(changed, stored=earlier), wanted=frozenset({"constant-output"})).findings
        assert [finding.level for finding in found_] == ["fail"]


def test_a_constant_output_is_a_warning_where_the_weights_are_random() -> None:
    random = replace(with_output(input_difference=0.0), model=replace(HEALTHY.model, random=True))
    assert findings(judged(random)) == [("constant-output", "warn", "(model)")]


def test_a_constant_output_is_a_warning_while_batchnorm_is_untrained() -> None:
    mean = stored("bn.running_mean", "BatchNorm2d", (4,), role="buffer", zero_count=4, **ZERO)
    var = stored("bn.running_var", "BatchNorm2d", (4,), role="buffer", min=1.0, max=1.0)
    changed = replace(with_output(input_difference=0.0), stored=(mean, var))
    assert findings(judged(changed)) == [("constant-output", "warn", "(model)")]
    begun = replace(changed, stored=(mean, replace(var, max=1.1)))
    assert findings(judged(begun)) == [("constant-output", "fail", "(model)")]


def test_an_output_without_a_finite_value_is_constant_without_excuse() -> None:
    changed = replace(with_output(input_difference=0.0, max_abs=None), model=replace(HEALTHY.model, random=True))
    (finding,) = judged(changed).findings
    assert (finding.rule, finding.level) == ("constant-output", "fail")
    assert finding.message == "The output is NaN or Inf everywhere, for every input."


@pytest.mark.parametrize(("dtype", "most"), [("float16", 16 * 2.0**-10), ("bfloat16", 16 * 2.0**-7)])
def test_half_precision_may_differ_by_its_own_rounding(dtype: str, most: float) -> None:
    assert judged(with_output(dtype=dtype, alone_difference=most, repeat_difference=most)).findings == ()
    report = judged(with_output(dtype=dtype, alone_difference=1.01 * most))
    assert findings(report) == [("batch-consistency", "fail", "(model)")]


@pytest.mark.parametrize(
    ("dtype", "max_abs", "most"),
    [
        ("float32", 2.0**-126, 16.0),  # a number that may count as zero
        ("float32", 2.0**-116, 2.0**-6),
        ("bfloat16", 2.0**-124, 4.0),
        ("float64", 2.0**-1012, 2.0**-6),
        ("float16", 2.0**-20, 1.0),  # sixteen steps of 2**-24
    ],
)
def test_outputs_near_the_smallest_numbers_may_differ_by_what_rounding_makes_of_these(
    dtype: str, max_abs: float, most: float
) -> None:
    near = with_output(dtype=dtype, max_abs=max_abs, alone_difference=most, repeat_difference=most)
    assert judged(near).findings == ()
    beyond = with_output(dtype=dtype, max_abs=max_abs, alone_difference=1.01 * most)
    assert findings(judged(beyond)) == [("batch-consistency", "fail", "(model)")]


def test_a_layer_of_closed_channels_beside_an_open_one_is_quiet() -> None:
    peaks = replace(
        HEALTHY,
        forward=replace(FORWARD, rows=numbered([row("gelu", "GELU", (2, 10, 4, 4))])),
        channel_peaks=with_peaks(5.0, *[0.0029] * 9).channel_peaks,
    )
    report = judged(peaks)
    assert findings(report) == [("quiet-channels", "warn", "gelu")]
    assert "90.0% of its 10 channels stay below 0.003 in magnitude over all 2 inputs (limit 80%)" in (
        report.findings[0].message
    )


SLOPES = {"Sigmoid": lambda y: 4 * y * (1 - y), "Tanh": lambda y: 1 - y * y, "Softsign": lambda y: (1 - abs(y)) ** 2}


@pytest.mark.parametrize("kind", SLOPES)
def test_saturation_begins_where_the_slope_is_a_sixteenth_of_its_greatest(kind: str) -> None:
    assert [SLOPES[kind](bound) for bound in SATURATED_BEYOND[kind]] == pytest.approx([1 / 16, 1 / 16], rel=0.02)


def bounded(kind: str, values: list[float]) -> Gradients:
    statistics = tensor(1.0, (1, len(values)), quantiles=(0.0,) * 7, distribution=distribution_of(np.array(values)))
    return inspection([layer_row("act", statistics, kind), layer_row("other", statistics, "Linear")])


@pytest.mark.parametrize(("kind", "high"), [("Sigmoid", 0.99), ("Tanh", 0.98), ("Softsign", 0.8), ("Hardsigmoid", 1.0)])
def test_a_saturated_function_is_named_with_its_share(kind: str, high: float) -> None:
    (verdict,) = found("saturated-activation", bounded(kind, [0.5] + [high] * 9))
    assert (verdict.level, verdict.where) == ("warn", "act")
    assert verdict.message == f"'act' ({kind}): 90.0% of its outputs are saturated over the only input (limit 80%)."


@pytest.mark.parametrize(
    ("kind", "high"), [("Sigmoid", 0.98), ("Tanh", 0.968), ("Softsign", 0.7), ("Hardsigmoid", 0.99)]
)
def test_outputs_short_of_the_bounds_are_not_saturated(kind: str, high: float) -> None:
    assert rules(bounded(kind, [0.5] + [high] * 9)) == []


def test_up_to_the_limit_saturation_is_accepted() -> None:
    judged = bounded("Tanh", [0.0, 0.0, *[-1.0] * 4, *[1.0] * 4])
    assert found("saturated-activation", judged) == []
    assert len(found("saturated-activation", judged, {"saturated_fraction": 0.79})) == 1


def test_without_a_distribution_quantiles_bound_the_share_from_below() -> None:
    def tanh(*quantiles: float) -> Gradients:
        return inspection([layer_row("act", tensor(1.0, (1, 10**6), quantiles=quantiles), "Tanh")])

    # Up to the 25% level at -1 and from the 50% level at 1: at least three quarters.
    limits = {"saturated_fraction": 0.74}
    assert "75.0%" in found("saturated-activation", tanh(-1, -1, -1, 1, 1, 1, 1), limits)[0].message
    assert found("saturated-activation", tanh(-1, -0.5, 0, 0, 0, 0.5, 1), {"saturated_fraction": 0.021}) == []


@pytest.mark.parametrize("kind", ["ReLU", "ReLU6", "Hardswish", "Threshold"])
def test_dead_channels_of_each_rectifier_are_judged(kind: str) -> None:
    statistics = tensor(1.0, (1, 10, 8, 8), channel_axis=1, channel_count=10, dead_channel_count=8)
    judged = inspection([layer_row("act", statistics, kind)])
    assert found("dead-channels", judged) == []
    assert len(found("dead-channels", judged, {"dead_channel_fraction": 0.79})) == 1


@pytest.mark.parametrize(("dead", "count"), [(87, 0), (88, 0), (89, 1), (100, 1)])
def test_on_noise_two_fifths_more_of_what_the_limit_leaves_may_be_dead(dead: int, count: int) -> None:
    channels = row("relu", "ReLU", (2, 100, 4, 4), min=0.0, dead_channel_count=dead)
    noise = InputRecord("noise", None, None, (3, 8, 8), ("standard normal noise, seed 0",))
    assert HEALTHY.forward is not None
    for inputs, found_ in (((noise, noise), count), ((replace(noise, name="cat.png", sha256="ab" * 32),), 1)):
        measured = replace(HEALTHY, forward=replace(HEALTHY.forward, rows=(channels,), inputs=inputs))
        report = judged(measured, wanted=frozenset({"dead-channels"}))
        assert len(findings(report)) == found_
