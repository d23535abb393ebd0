"""Weights, norms and layers that stand out, and what stands beside weights: measurements on both sides of each rule."""

import math
from dataclasses import replace
from typing import Any

import pytest

from hookscope.results.check import CheckMeasurements, StoredValues
from hookscope.results.training_state import CopyValues, OptimiserValues, ScalerValues
from hookscope.rules.settings import CheckSettings, RuleSettings
from tests.commands.check.measurements import (
    FORWARD,
    HEALTHY,
    OUTPUT,
    findings,
    judged,
    stored,
    with_row,
    with_stored,
)


def spreads(*each: float | None) -> CheckMeasurements:
    """Return weights in a row, by their spread beyond chance."""
    return replace(
        HEALTHY, stored=tuple(stored(f"{at}.weight", spread_beyond_chance=spread) for at, spread in enumerate(each))
    )


def test_an_untrained_weight_stands_out_among_trained_ones_only() -> None:
    assert findings(judged(spreads(10.0, 2.9, 99.0, 10.0))) == [("untrained-weight", "warn", "1.weight")]
    passing = [
        (10.0, 3.0, 99.0, 10.0),  # not as random
        (10.0, 10.0, 99.0, 0.0, 0.0),  # a new head
        (0.0, 0.0, 10.0, 99.0, 10.0, 10.0),  # two thirds are trained
        (0.0, 10.0, 99.0),  # too few to stand out
        (0.0, 1.0, -1.0, 2.0, 0.5),  # all are random
        (10.0, None, 99.0, 10.0),  # too few values
    ]
    for each in passing:
        assert judged(spreads(*each)).findings == ()


WHOLE = {"shape": (32, 32), "filter_count": 32, "is_whole": True, "min": -7.0, "max": 8.0, "max_abs": 8.0}


def test_a_weight_of_whole_numbers_fails_unless_they_are_small_few_or_scaled() -> None:
    def found(*held: StoredValues) -> list[tuple[str, str, str]]:
        return findings(judged(replace(HEALTHY, stored=held)))

    assert found(stored("fc.weight", **WHOLE)) == [("integer-weight", "fail", "fc.weight")]
    assert found(stored("fc.weight", **WHOLE | {"max_abs": 3.0})) == []
    assert found(stored("fc.weight", **WHOLE | {"shape": (31, 33)})) == []
    assert found(stored("fc.weight", **WHOLE), stored("fc.weight_scale", shape=(32,))) == []
    assert found(stored("fc.weight", **WHOLE), stored("fc.weight.scale", shape=(32,))) == []


def test_weights_of_one_sign_fail_where_nearly_all_are_and_warn_alone() -> None:
    def found(*bounds: tuple[float, float], **expected: Any) -> list[tuple[str, str]]:
        held = [
            stored(f"{at}.weight", shape=(32, 64), **{"min": low, "max": high, **expected})
            for at, (low, high) in enumerate(bounds)
        ]
        return [(rule, level) for rule, level, _ in findings(judged(replace(HEALTHY, stored=tuple(held))))]

    positive, negative, both = (0.0, 0.3), (-0.3, -0.1), (-0.1, 0.3)
    assert found(positive, both, both) == found(negative, both, both) == [("unsigned-weight", "warn")]
    assert found(positive, positive, negative, both) == [("unsigned-weight", "fail")]
    assert found(positive, positive) == [("unsigned-weight", "warn")]
    assert found(both, both, both) == found(positive, both, zero_count=1) == []
    assert found((0.3, 0.3)) == [("constant-parameter", "warn")]


@pytest.mark.parametrize("leaf", ["scales", "weight_scale_inv"])  # as GPTQ and AWQ, and DeepSeek's float8, name them
def test_scales_of_quantised_weights_are_positive_by_design(leaf: str) -> None:
    scales = [stored(f"{at}.{leaf}", shape=(32, 64), min=0.01, max=0.3) for at in range(4)]
    assert judged(replace(HEALTHY, stored=tuple(scales))).findings == ()


def norm(name: str, *, statistics: bool | str, affine: bool, batches: int | None) -> list[StoredValues]:
    """Return what a BatchNorm stores, by whether its statistics (or one of them), and weight and bias, have moved."""

    def values(leaf: str, start: float, *, moved: bool, role: str) -> StoredValues:
        bounds = {"min": 0.2, "max": 0.9} if moved else {"min": start, "max": start}
        expected = {"zero_count": 4 if not moved and not start else 0, "max_abs": bounds["max"], **bounds}
        return stored(f"{name}.{leaf}", "BatchNorm2d", (4,), role=role, **expected)

    counter = {"min": float(batches or 0), "max": float(batches or 0), "dtype": "int64"}
    return [
        values("weight", 1.0, moved=affine, role="parameter"),
        values("bias", 0.0, moved=affine, role="parameter"),
        values("running_mean", 0.0, moved=statistics in (True, "mean"), role="buffer"),
        values("running_var", 1.0, moved=statistics in (True, "variance"), role="buffer"),
        *([] if batches is None else [stored(f"{name}.num_batches_tracked", shape=(), role="buffer", **counter)]),
    ]


def norms(*each: tuple[bool | str, bool, int | None]) -> CheckMeasurements:
    made = [norm(str(at), statistics=a, affine=b, batches=c) for at, (a, b, c) in enumerate(each)]
    return replace(HEALTHY, stored=tuple(values for one in made for values in one))


MOVED = (True, True, 9)


@pytest.mark.parametrize(
    ("layers", "level", "where"),
    [
        ([MOVED, (False, False, 9), MOVED, MOVED], "fail", "1.running_mean"),
        ([MOVED, (False, True, 9), MOVED, MOVED], "fail", "1.running_mean"),
        ([MOVED, MOVED, MOVED, (False, False, 9)], "fail", "3.running_mean"),
        ([MOVED, (False, False, 0), MOVED, MOVED], "warn", "1.running_mean"),
        ([MOVED, (False, False, None), MOVED, MOVED], "warn", "1.running_mean"),
        ([MOVED, (True, False, 9), MOVED, MOVED], "warn", "1.weight"),
        ([MOVED, ("mean", True, 9), MOVED, MOVED], "fail", "1.running_var"),
        ([MOVED, ("variance", True, None), MOVED, MOVED], "warn", "1.running_mean"),
    ],
)
def test_an_untrained_norm_stands_out_among_those_that_moved(
    layers: list[tuple[bool | str, bool, int | None]], level: str, where: str
) -> None:
    assert findings(judged(norms(*layers))) == [("untrained-norm", level, where)]


@pytest.mark.parametrize(
    "layers",
    [
        [MOVED, MOVED, MOVED, (False, False, 0)],  # a new head
        [(False, False, 0)] * 4,  # never trained
        [("variance", True, 9)] * 4,  # means that a conversion put into the biases
        [(True, False, 9)] * 4,  # run, and not trained
        [MOVED, MOVED, (False, False, 9)],  # too few to stand out
        [MOVED, MOVED, MOVED, (False, False, 9), (False, False, 9), MOVED],  # a third
    ],
)
def test_norms_pass_where_as_many_are_new(layers: list[tuple[bool | str, bool, int | None]]) -> None:
    assert judged(norms(*layers)).findings == ()


def test_where_no_statistics_moved_though_weights_are_trained_it_fails_if_batches_were_counted() -> None:
    trained = spreads(10.0, 99.0, 99.0).stored
    own = "as in a new layer, though weight and bias of the same layer are trained. 2 more layers follow"
    all_weights = "as in a new layer; the weights are trained. 2 more layers follow"
    for affine, batches, level, words in ((True, 9, "fail", own), (False, None, "warn", all_weights)):
        reset = [each for at in range(3) for each in norm(f"bn{at}", statistics=False, affine=affine, batches=batches)]
        (finding,) = judged(replace(HEALTHY, stored=(*reset, *trained))).findings
        assert (finding.rule, finding.level, finding.where) == ("untrained-norm", level, "bn0.running_mean")
        assert words in finding.message


def test_weights_and_biases_that_moved_show_that_statistics_were_reset() -> None:
    reset = [each for at in range(4) for each in norm(f"{at}", statistics=False, affine=True, batches=0)]
    (finding,) = judged(replace(HEALTHY, stored=tuple(reset))).findings
    assert (finding.rule, finding.level, finding.where) == ("untrained-norm", "warn", "0.running_mean")
    assert "everywhere, as in a new layer, though weight and bias of the same layer are trained." in finding.message
    assert "3 more layers follow" in finding.message


def test_where_no_statistics_moved_for_any_batch_it_fails() -> None:
    (finding,) = judged(norms(*[(False, False, 9)] * 4)).findings
    assert (finding.rule, finding.level, finding.where) == ("untrained-norm", "fail", "0.running_mean")
    assert "after 9 batches, as in a new layer; so are those of all layers. 3 more layers follow" in finding.message


def test_a_layer_that_is_given_zeros_all_along_keeps_its_means_and_passes() -> None:
    """Its variances decay alike, from 1 on."""
    layers = norms(MOVED, ("variance", True, 9), MOVED, MOVED).stored
    decayed = tuple(replace(layer, min=1e-4, max=1e-4) if layer.name == "1.running_var" else layer for layer in layers)
    assert judged(replace(HEALTHY, stored=decayed)).findings == ()


def test_a_weight_whose_square_overflows_and_one_that_was_cut_off_fail() -> None:
    finding = judged(with_stored("bn.running_var", max_abs=2e19)).findings[0]
    assert (finding.rule, finding.level) == ("outlier-weight", "fail")
    assert finding.message == "'bn.running_var' (BatchNorm2d) reaches 2e19, whose square overflows float32."
    cut = with_stored("conv.bias", dtype="float16", max_abs=65504.0)
    message = next(finding.message for finding in judged(cut).findings if finding.rule == "outlier-weight")
    assert message.endswith("reaches 65,504, the greatest number of float16: an overflow was cut off there.")
    near = with_stored("bn.running_var", max_abs=1.8e19)
    assert "outlier-weight" not in {finding.rule for finding in judged(near).findings}


def test_a_layer_that_is_zero_everywhere_fails_once_weights_are_trained() -> None:
    dead = with_row("relu", shape=(2, 4, 16, 16), element_count=2048, dead_channel_count=4, max=0.0, zero_fraction=1.0)
    warnings = [(rule, "warn", "relu") for rule in ("dead-layer", "constant-activation")]
    assert findings(judged(dead)) == [("dead-layer", "fail", "relu"), warnings[1]]
    random = replace(dead, model=replace(dead.model, random=True))
    assert findings(judged(random)) == warnings
    linear = with_row("relu", shape=(2, 512), element_count=1024, channel_count=512, zero_fraction=1.0)
    assert findings(judged(linear)) == [("dead-layer", "fail", "relu")]


def test_a_weight_whose_pruning_mask_is_zero_everywhere_is_reported_by_its_mask() -> None:
    full, mask = stored("conv.weight_orig"), stored("conv.weight_mask", role="buffer", min=0.0, zero_count=20)
    assert findings(judged(replace(HEALTHY, stored=(full, mask)))) == []
    pruned = replace(HEALTHY, stored=(full, replace(mask, max=0.0, zero_count=48)))
    assert findings(judged(pruned)) == [("zero-parameter", "warn", "conv.weight_mask")]


def test_dead_channels_are_left_to_rules_that_report_the_same_output_as_severely() -> None:
    dead = with_row("relu", shape=(2, 4, 16, 16), element_count=2048, dead_channel_count=4, zero_fraction=1.0)
    random = replace(dead, model=replace(dead.model, random=True))
    strict = CheckSettings(rules={"dead-channels": RuleSettings("fail")})
    layer, channels = (("dead-layer", "fail", "relu"), ("dead-channels", "fail", "relu"))
    wanted = frozenset({"dead-layer", "dead-channels"})
    assert findings(judged(dead, wanted=wanted)) == [layer]
    assert findings(judged(dead, strict, wanted)) == [layer]
    assert findings(judged(random, strict, wanted)) == [channels, ("dead-layer", "warn", "relu")]
    assert findings(judged(dead, strict, wanted - {"dead-layer"})) == [channels]


def test_activations_whose_square_overflows_fail_where_they_begin() -> None:
    rows = [replace(row, activation=replace(row.activation, max=3e19)) for row in FORWARD.rows[1:3]]
    measured = replace(HEALTHY, forward=replace(FORWARD, rows=(FORWARD.rows[0], *rows, *FORWARD.rows[3:])))
    found_ = [finding for finding in judged(measured).findings if finding.rule == "overflowing-activation"]
    assert [(each.level, each.where) for each in found_] == [("fail", "relu")]
    assert found_[0].message == (
        "'relu' (ReLU) reaches 3e19, whose square overflows float32 (limit 1.8e19); 2 of 5 outputs are above it."
    )
    for passing in (with_row("gate", min=-3.4028234663852886e38), with_row("gate", min=-1e30, dtype="float64")):
        assert "overflowing-activation" not in {finding.rule for finding in judged(passing).findings}


def test_states_of_optimisers_that_cannot_be_gone_on_with_fail() -> None:
    def of(**changes: Any) -> list[tuple[str, str]]:
        measured = replace(HEALTHY, optimisers=(OptimiserValues("optimizer", 9, **changes),))
        return [(finding.level, finding.message) for finding in judged(measured).findings]

    assert of() == of(steps={0.0: 3}) == []
    assert of(steps={math.nan: 1, 3.0: 2}) == [
        ("fail", "'optimizer' in the file counts NaN steps (limit 0) for 1 parameter.")
    ]
    assert of(steps={-1.0: 3}) == [("fail", "'optimizer' in the file counts -1 steps (limit 0) for 3 parameters.")]
    assert of(steps={9.0: 5, 3.0: 60}) == [
        ("warn", "'optimizer' in the file counts steps that disagree: 3 for 60 parameters, 9 for 5 parameters.")
    ]
    assert "2 for 1 parameter and 1 more." in of(steps={float(number): 1 for number in range(4)})[0][1]
    squares = "'optimizer' in the file has negative means of squares: 'state.1.exp_avg_sq'."
    assert of(negative=("state.1.exp_avg_sq",)) == [("fail", squares)]


@pytest.mark.parametrize(
    ("changes", "level", "subject"),
    [
        ({}, "", ""),
        ({"growth_factor": 1.0}, "fail", "has a growth factor of 1 (limit: above 1, and finite)"),
        ({"growth_factor": math.inf}, "fail", "has a growth factor of Inf (limit: above 1, and finite)"),
        ({"backoff_factor": 1.0}, "fail", "has a backoff factor of 1 (limit: above 0, below 1)"),
        ({"backoff_factor": 0.0}, "fail", "has a backoff factor of 0 (limit: above 0, below 1)"),
        ({"backoff_factor": math.nan}, "fail", "has a backoff factor of NaN (limit: above 0, below 1)"),
        ({"growth_factor": 1.0001, "backoff_factor": 0.9999}, "", ""),
        ({"growth_tracker": -1.0}, "warn", "counts -1 steps since its last change (limit 2000)"),
    ],
)
def test_a_scaler_has_the_factors_that_torch_asks_for(changes: dict[str, float], level: str, subject: str) -> None:
    sound = ScalerValues("scaler", 65536.0, 2.0, 0.5, 2000.0, 1999.0)
    found_ = judged(replace(HEALTHY, scalers=(replace(sound, **changes),))).findings
    assert [(finding.rule, finding.level, finding.message) for finding in found_] == (
        [("scaler-state", level, f"'scaler' in the file {subject}.")] if level else []
    )


def test_a_copy_that_looks_as_initialised_is_stale() -> None:
    copy = CopyValues("ema", 9, untrained=("module.a", "module.b"))
    (finding,) = judged(replace(HEALTHY, copies=(copy,))).findings
    assert (finding.rule, finding.level) == ("averaged-weights", "warn")
    assert finding.message == (
        "'ema' in the file is stale: 2 tensors as initialised, while the weights are trained: 'module.a', 'module.b'."
    )


def test_more_zero_weights_at_the_end_than_heads_are_no_excuse_for_a_constant_output() -> None:
    zero = {"zero_count": 48, "min": 0.0, "max": 0.0, "max_abs": 0.0}
    for zeros, level in ((1, "warn"), (2, "warn"), (3, "fail"), (9, "fail")):
        weights = (stored("first.weight"), *(stored(f"{at}.weight", **zero) for at in range(zeros)))
        measured = replace(HEALTHY, stored=weights, outputs=(replace(OUTPUT, input_difference=0.0),))
        assert {finding.level for finding in judged(measured).findings if finding.rule == "constant-output"} == {level}


def test_weights_that_only_look_random_are_not_called_random() -> None:
    weights = tuple(replace(stored(f"{at}.weight"), spread_beyond_chance=0.0) for at in range(3))
    measured = replace(HEALTHY, stored=weights, outputs=(replace(OUTPUT, input_difference=0.0),))
    drawn = replace(measured, model=replace(measured.model, random=True))
    for network, remark in ((measured, "Nearly all of its weights look random."), (drawn, "Its weights are random.")):
        (finding,) = [finding for finding in judged(network).findings if finding.rule == "constant-output"]
        assert (finding.level, finding.message.endswith(f" {remark}")) == ("warn", True)


def test_a_network_whose_weights_look_random_is_trained_if_a_normalisation_layer_is() -> None:
    """So it is with a ViT of width 64, though it tells crops of four photographs apart: LayerNorm learns the most."""
    weights = tuple(replace(stored(f"{at}.weight"), spread_beyond_chance=0.0) for at in range(3))
    for scale, level in (({"min": 1.0, "max": 1.0}, "warn"), ({"min": 0.99, "max": 1.01}, "fail")):
        norm = stored("norm.weight", "LayerNorm", (4,), **scale)
        measured = replace(HEALTHY, stored=(*weights, norm), outputs=(replace(OUTPUT, input_difference=0.0),))
        report = judged(measured)
        assert [finding.level for finding in report.findings if finding.rule == "constant-output"] == [level]
        assert report.looks_untrained == (level == "warn")


def test_where_zero_weight_and_bias_leave_a_trained_norm_it_is_a_warning() -> None:
    zeros = {"min": 0.0, "max": 0.0, "max_abs": 0.0, "zero_count": 4}
    layers = norms(*[MOVED] * 4).stored
    dropped = tuple(replace(layer, **zeros) if layer.name in ("1.weight", "1.bias") else layer for layer in layers)
    (finding,) = judged(replace(HEALTHY, stored=dropped)).findings
    assert (finding.rule, finding.level, finding.where) == ("untrained-norm", "warn", "1.weight")
    start = norms(*[MOVED] * 4, (False, False, 0)).stored  # the last of them, as a new branch starts
    fresh = tuple(replace(each, **zeros) if each.name in ("4.weight", "4.bias") else each for each in start)
    assert judged(replace(HEALTHY, stored=fresh)).findings == ()


def test_a_copy_may_be_broken_in_several_ways_at_once() -> None:
    copy = CopyValues("ema", 9, ("a",), ("b",), ("c", "d"), ("e",))
    found_ = judged(replace(HEALTHY, copies=(copy,))).findings
    assert [(finding.rule, finding.level, finding.message) for finding in found_] == [
        ("averaged-weights", "fail", "'ema' in the file has NaN or Inf in 1 of 9 tensors: 'a'."),
        ("averaged-weights", "fail", "'ema' in the file has 1 tensor of another shape than the weights: 'b'."),
        ("averaged-weights", "warn", "'ema' in the file lacks 2 parameters: 'c', 'd'."),
        ("averaged-weights", "warn", "'ema' in the file has 1 tensor that is not among the weights: 'e'."),
    ]


def test_a_count_of_batches_that_was_nan_names_nan() -> None:
    count = -(2.0**63)  # what `load_state_dict` makes of it, on x86
    values = stored("0.num_batches_tracked", shape=(), role="buffer", dtype="int64", min=count, max=count)
    (finding,) = judged(replace(HEALTHY, stored=(values,))).findings
    assert finding.rule == "batchnorm-variance"
    assert "(limit 0), which NaN and Inf become as whole numbers" in finding.message
