import numpy as np
import pytest

from hookscope.checks.rules.activations import SATURATED_BEYOND
from hookscope.results.activations import LayerRow
from hookscope.results.distribution import distribution_of
from hookscope.results.gradients import Gradients
from tests.checks.measurements import found, inspection, layer_row, rules, tensor

SLOPES = {
    "Sigmoid": lambda y: 4 * y * (1 - y),
    "Tanh": lambda y: 1 - y * y,
    "Softsign": lambda y: (1 - abs(y)) ** 2,
}


@pytest.mark.parametrize("kind", SLOPES)
def test_saturation_begins_where_the_slope_is_a_sixteenth_of_its_greatest(kind: str) -> None:
    assert [SLOPES[kind](bound) for bound in SATURATED_BEYOND[kind]] == pytest.approx([1 / 16, 1 / 16], rel=0.02)


@pytest.mark.parametrize("kind", SATURATED_BEYOND)
def test_outputs_at_the_bounds_are_counted_exactly_in_bins_too(kind: str) -> None:
    low, high = SATURATED_BEYOND[kind]
    inside, outside = np.linspace(low, high, 1002)[1:-1], np.tile([low - 0.001, high], 9500)
    distribution = distribution_of(np.concatenate([inside, outside]))
    assert distribution.share_outside(low, high) == pytest.approx(0.95, abs=1e-9)


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

    # Up to the 25 % level at -1 and from the 50 % level at 1: at least three quarters.
    limits = {"saturated_fraction": 0.74}
    assert "75.0%" in found("saturated-activation", tanh(-1, -1, -1, 1, 1, 1, 1), limits)[0].message
    assert found("saturated-activation", tanh(-1, -0.5, 0, 0, 0, 0.5, 1), {"saturated_fraction": 0.021}) == []


def test_each_layer_above_the_limit_is_named() -> None:
    def tanh(name: str, saturated: int) -> LayerRow:
        distribution = distribution_of(np.repeat([1.0, 0.0], [saturated, 100 - saturated]))
        return layer_row(name, tensor(1.0, (1, 100), quantiles=(0.0,) * 7, distribution=distribution), "Tanh")

    rows = [tanh("a", 85), tanh("b", 95), tanh("c", 10)]
    assert [finding.where for finding in found("saturated-activation", inspection(rows))] == ["a", "b"]


@pytest.mark.parametrize("kind", ["ReLU", "ReLU6", "Hardswish", "Threshold"])
def test_dead_channels_of_each_rectifier_are_judged(kind: str) -> None:
    statistics = tensor(1.0, (1, 10, 8, 8), channel_axis=1, channel_count=10, dead_channel_count=8)
    judged = inspection([layer_row("act", statistics, kind)])
    assert found("dead-channels", judged) == []
    assert len(found("dead-channels", judged, {"dead_channel_fraction": 0.79})) == 1
