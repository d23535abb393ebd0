"""The numbers by which what BatchNorm is given is held against what it stores, and what is said of them."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hookscope.results.check import BatchNormInput, CheckMeasurements
from hookscope.results.findings import Finding
from hookscope.results.inputs import InputRecord
from hookscope.rules.batch_norm import distance
from hookscope.rules.settings import CheckSettings, LayerSettings, RuleSettings
from tests.commands.check.measurements import FORWARD, HEALTHY, judged, numbered, row, stored

RULE = "batchnorm-statistics"
STEPS = ("resized to 224", "normalised by mean 0, std 1")


def norm(layer: str = "bn", **changes: Any) -> BatchNormInput:
    """Return a layer of four channels that is given what it stores: means about 0, unlike a new layer, variances 1."""
    expected: dict[str, Any] = {"value_count": 1000, "eps": 0.0}
    means = [1e-9, 0.0, 0.0, 0.0]
    arrays = {"running_mean": means, "running_var": [1.0] * 4, "mean": means, "variance": [1.0] * 4}
    expected |= {name: np.array(values, np.float64) for name, values in arrays.items()}
    return BatchNormInput(
        layer, **expected | {k: np.array(v, np.float64) if k in arrays else v for k, v in changes.items()}
    )


def found(*norms: BatchNormInput, settings: CheckSettings | None = None, **changes: Any) -> list[Finding]:
    """Return what the rule finds where these layers ran in this order."""
    rows = numbered(tuple(row(each.layer, "BatchNorm2d") for each in norms))
    inputs = tuple(InputRecord(f"{at}.jpg", None, None, (3, 4, 4), STEPS) for at in range(4))
    measured = replace(HEALTHY, forward=replace(FORWARD, rows=rows, inputs=inputs), batch_norms=norms, **changes)
    return only(measured, settings or CheckSettings())


def only(measured: CheckMeasurements, settings: CheckSettings) -> list[Finding]:
    return [finding for finding in judged(measured, settings, frozenset({RULE})).findings if finding.rule == RULE]


def test_variances_differ_by_the_median_factor_either_way() -> None:
    # Factors 2, 4, 4 and 8 up or down: the median of log 2, log 4, log 4, log 8 is log 4.
    far = distance(norm(variance=[2, 0.25, 4, 0.125]))
    assert far is not None
    assert far.variance_factor == pytest.approx(4)
    # The median of log 1/8, log 1/4, log 2 and log 4 is half of log 1/2.
    assert far.variance_ratio == pytest.approx(math.sqrt(0.5))
    assert not far.alike
    assert far.channel_count == 4


def test_eps_is_part_of_a_variance() -> None:
    far = distance(norm(eps=1.0, running_var=[1] * 4, variance=[5] * 4))  # (5 + 1) / (1 + 1)
    assert far is not None
    assert (far.variance_factor, far.variance_ratio, far.alike) == (pytest.approx(3), pytest.approx(3), True)


def test_means_are_apart_by_the_median_number_of_stored_standard_deviations() -> None:
    far = distance(norm(running_var=[4] * 4, variance=[4] * 4, running_mean=[1] * 4, mean=[1, 3, -3, 9]))
    assert far is not None
    assert far.mean_distance == pytest.approx(1.5)  # of 0, 1, 2 and 4
    assert far.mean_correlation is None  # of four means


def test_channels_that_never_vary_do_not_count() -> None:
    far = distance(norm(eps=1e-3, running_var=[0, 0, 0, 1], variance=[0, 0, 0, 16]))
    assert far is not None
    assert far.channel_count == 1
    assert far.variance_factor == pytest.approx(16, rel=0.02)
    assert distance(norm(eps=1e-3, running_var=[0] * 4, variance=[0] * 4)) is None


@pytest.mark.parametrize(
    ("inputs", "stored_means", "correlation"),
    [
        ([1, -1] * 16, [1, -1] * 16, 1.0),
        ([1, 1, -1, -1] * 8, [1, -1] * 16, 0.0),
        ([1, -1] * 8 + [1, 1, -1, -1] * 4, [1, -1] * 16, 0.5),
        ([1, -1] * 16, [0.1, -0.1] * 16, None),  # too much alike
        ([1, -1] * 15, [1, -1] * 15, None),  # too few
    ],
)
def test_means_are_correlated_where_enough_of_them_differ(
    inputs: list[float], stored_means: list[float], correlation: float | None
) -> None:
    ones = [1] * len(inputs)
    far = distance(norm(mean=inputs, running_mean=stored_means, running_var=ones, variance=ones))
    assert far is not None
    assert far.mean_correlation == (None if correlation is None else pytest.approx(correlation, abs=1e-12))


@pytest.mark.parametrize("factor", [1 / 4.9, 4.9])
def test_the_limit_on_variances_holds_either_way(factor: float) -> None:
    assert found(norm(), norm("bn2", variance=[factor] * 4)) == []
    beyond = 5.1 if factor > 1 else 1 / 5.1
    (finding,) = found(norm(), norm("bn2", variance=[beyond] * 4))
    assert (finding.level, finding.where) == ("fail", "bn2")
    assert "by a factor of 5.1 (limit 5)" in finding.message


def test_it_begins_at_the_first_layer_with_a_channel_far_off_though_most_channels_follow_later() -> None:
    """One filter of -100 times its weights before `bn` multiplies a variance by 1e4, and all that it feeds."""
    one_off, all_off = norm(variance=[1, 1e4, 1, 1]), norm("bn2", variance=[325] * 4)
    (finding,) = found(one_off, all_off)
    assert (finding.level, finding.where) == ("fail", "bn")
    assert finding.message.startswith(
        "The mismatch begins at 'bn' (BatchNorm2d), with an input channel that has 10,000 times the stored variance,"
        " and reaches most channels at 'bn2' (BatchNorm2d): over 4 inputs, variances of its input differ from the"
        " stored ones by a factor of 325 (limit 5), "
    )
    (finding,) = found(norm(variance=[1, 900, 1, 1]), all_off)  # as the channels of healthy layers vary
    assert finding.where == "bn2"


def test_few_values_are_allowed_three_times_as_much_and_fewer_are_not_judged() -> None:
    assert found(norm(), norm("bn2", value_count=499, variance=[14.9] * 4, mean=[2.9] * 4)) == []
    (finding,) = found(norm(), norm("bn2", value_count=499, variance=[15.1] * 4))
    assert "by a factor of 15.1 (limit 15), means by 0 stored standard deviations (limit 3)" in finding.message
    assert found(norm(), norm("bn2", value_count=99, variance=[1e9] * 4)) == []


def test_statistics_that_are_still_partly_those_of_the_start_warn() -> None:
    (finding,) = found(norm(variance=[6.0] * 4, start_share=0.101))
    assert finding.level == "warn"
    assert finding.message.endswith("After so few batches 10% of its statistics are still the initial ones.")
    (finding,) = found(norm(variance=[6.0] * 4, start_share=0.1))
    assert finding.level == "fail"
    assert "batches" not in finding.message


def test_the_first_layer_that_is_off_is_named_and_later_ones_are_counted() -> None:
    far = [3.0] * 4
    (finding,) = found(
        norm("a"), norm("b", mean=far), norm("c"), norm("d", mean=far), norm("e", value_count=9, mean=far)
    )
    assert finding.where == "b"
    assert finding.message == (
        "The mismatch begins at 'b' (BatchNorm2d): over 4 inputs, variances of its input differ from the stored ones by"
        " a factor of 1 (limit 5), means by 3 stored standard deviations (limit 1); medians over 4 channels."
        " 1 of 2 later BatchNorms follows."
    )


@pytest.mark.parametrize(
    ("layers", "ending"),
    [
        ((norm("a"), norm("b", mean=[3.0] * 4)), "over 4 channels."),
        ((norm("a"), norm("b", mean=[3.0] * 4), norm("c")), "The only later one does not."),
        ((norm("a"), norm("b", mean=[3.0] * 4), norm("c", mean=[3.0] * 4)), "The only later BatchNorm follows."),
    ],
)
def test_one_later_layer_or_none_is_not_counted(layers: tuple[Any, ...], ending: str) -> None:
    (finding,) = found(*layers)
    assert finding.message.endswith(ending)


def test_swapped_channels_are_told_by_their_means() -> None:
    ones, alternating = [1] * 32, [0.4, -0.4] * 16
    swapped = norm("b", running_mean=alternating, mean=[*alternating[1:], 0.4], running_var=ones, variance=ones)
    (finding,) = found(norm("a"), swapped)
    assert "means by 0.8 stored standard deviations (limit 1), and correlate by -1.00 with them" in finding.message


def test_a_first_layer_that_varies_more_as_a_whole_warns_of_the_preprocessing() -> None:
    assert found(norm(variance=[2.4] * 4)) == []
    assert found(norm(variance=[1 / 4.9] * 4)) == []  # pictures may be flat
    (finding,) = found(norm(variance=[4] * 4), norm("bn2"))
    assert (finding.level, finding.where) == ("warn", "bn")
    assert finding.message == (
        "'bn' (BatchNorm2d), the first BatchNorm: its input has 4 times the stored variances (limit 2.5), median"
        " over 4 channels. Most of its channels vary 2 times as much as in training (standard deviation): preprocess"
        " the pictures as in training (mean, std, range). Here: normalised by mean 0, std 1."
    )


def test_a_layer_with_the_statistics_of_a_new_one_blames_no_preprocessing() -> None:
    (finding,) = found(norm(running_mean=[0.0] * 4, variance=[0.01] * 4))
    assert finding.level == "fail"
    assert "It stores mean 0 and variance 1 in all channels, as a new layer does." in finding.message
    assert "preprocess" not in finding.message


def test_a_first_layer_that_is_off_as_a_whole_blames_the_preprocessing_too() -> None:
    (finding,) = found(norm(variance=[0.01] * 4))
    assert finding.level == "fail"
    assert "Most of its channels vary 0.1 times as much" in finding.message
    (finding,) = found(norm(variance=[100, 0.01, 100, 0.01]))  # one layer's channels
    assert "All its channels" not in finding.message
    (finding,) = found(norm(), norm("bn2", variance=[0.01] * 4))
    assert "All its channels" not in finding.message


def test_a_pruned_network_is_only_warned_of() -> None:
    weights = (stored("conv.weight", element_count=100, zero_count=50),)
    (finding,) = found(norm(), norm("bn2", variance=[9] * 4), stored=weights)
    assert finding.level == "warn"
    assert "50% of the weights are 0, as pruning leaves them" in finding.message


def test_so_is_one_of_whose_weights_half_have_filters_of_zeros() -> None:
    kernel = stored("conv.weight", element_count=100, zero_count=10, filter_count=20, zero_filters=(3,))
    dense = stored("head.weight", element_count=100, filter_count=20)
    off = (norm(), norm("bn2", variance=[9] * 4))
    (finding,) = found(*off, stored=(kernel, kernel, kernel, dense))
    assert finding.level == "warn"
    assert "8% of the weights are 0, as pruning leaves them" in finding.message
    for sound in (replace(kernel, filter_count=21), dense):  # fewer than a twentieth, or in less than half
        (finding,) = found(*off, stored=(kernel, sound, sound, dense))
        assert finding.level == "fail"


def test_limits_and_levels_of_layers_hold() -> None:
    off = [norm(), norm("bn2", variance=[9] * 4), norm("bn3", variance=[9] * 4)]
    wider = LayerSettings("bn2", {RULE: RuleSettings(limits={"max_variance_factor": 9.5})})
    (finding,) = found(*off, settings=CheckSettings(layers=(wider,)))
    assert finding.where == "bn3"
    nothing = LayerSettings("bn*", {RULE: RuleSettings("off")})
    assert found(*off, settings=CheckSettings(layers=(nothing,))) == []
