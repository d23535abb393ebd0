"""What counts as drift from a baseline, which layer is named first, and which baselines do not fit."""

import copy
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hookscope.results.check import CheckMeasurements
from hookscope.results.findings import Finding
from hookscope.rules import RULES
from hookscope.rules.baseline import Baseline, BaselineRow, baseline_of
from hookscope.rules.rule import terms_of
from hookscope.rules.settings import CheckSettings, LayerSettings, RuleSettings
from tests.commands.check.measurements import inspected
from tests.networks import TORCHVISION, Network

CAT = Path(__file__).parents[2] / "sample_images" / "cat.jpg"


def findings(
    baseline: Baseline,
    measured: CheckMeasurements,
    limits: Mapping[str, float] | None = None,
    layers: tuple[LayerSettings, ...] = (),
) -> list[Finding]:
    """Return what the rule says, with the limits of a configuration."""
    settings = CheckSettings(rules={"drift": RuleSettings(limits=limits or {})}, layers=layers)
    terms = terms_of(RULES["drift"], settings, baseline)
    return terms.findings(RULES["drift"].evaluate(measured, terms))


def chain(*kinds: nn.Module) -> nn.Module:
    """Return modules in a row, named after the order in which they run, backwards: "z", "y", "x" and so on."""
    return nn.Sequential(OrderedDict(zip("zyxwvu", kinds, strict=False)))


VALUES = torch.tensor([[-2.0, -1.0, 0.0, 1.0, 2.0]])  # mean 0, std sqrt(2), 5 channels


def single(values: Tensor = VALUES) -> CheckMeasurements:
    return inspected(chain(nn.Identity()), values)


def with_row(baseline: Baseline, label: str, **changes: object) -> Baseline:
    rows = tuple(replace(row, **changes) if row.label == label else row for row in baseline.rows)  # type: ignore[arg-type]
    return replace(baseline, rows=rows)


# --- what counts ---


def test_the_same_run_does_not_drift_at_a_limit_of_zero() -> None:
    limits = {"max_difference": 0.0, "max_dead_difference": 0.0, "max_gradient_ratio": 1.0}
    measured = inspected(chain(nn.Linear(5, 5), nn.ReLU()), VALUES, "projection")
    assert findings(baseline_of(measured), measured, limits) == []


@pytest.mark.parametrize(("limit", "count"), [(0.0999, 1), (0.1001, 0)])
@pytest.mark.parametrize("subject", ["mean", "std"])
def test_mean_and_std_are_compared_in_units_of_the_std(subject: str, limit: float, count: int) -> None:
    root = 2**0.5
    moved = {"mean": 0.1 * root, "std": root}[subject] if subject == "mean" else root / 1.1  # std is the unit itself
    verdicts = findings(with_row(baseline_of(single()), "z", **{subject: moved}), single(), {"max_difference": limit})
    assert len(verdicts) == count


@pytest.mark.parametrize(("limit", "count"), [(0.0706, 1), (0.0708, 0)])
def test_quantiles_are_compared_in_units_of_the_std(limit: float, count: int) -> None:
    baseline = baseline_of(single())
    row = next(row for row in baseline.rows if row.label == "z")
    quantiles = (*row.quantiles[:3], 0.1, *row.quantiles[4:])  # the median went from 0.1 to 0: 0.1 / sqrt(2)
    verdicts = findings(with_row(baseline, "z", quantiles=quantiles), single(), {"max_difference": limit})
    assert len(verdicts) == count
    if verdicts:
        assert verdicts[0].message == (
            "Drift from the baseline begins at 'z' (Identity): its 50% quantile (mean over inputs) went from 0.1 to 0,"
            " 0.0707 of its spread (limit 0.0706)."
        )


NORMAL = torch.randn(1, 200_000, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("limit", "count"), [(0.05, 1), (0.2, 0)])
def test_values_are_compared_in_their_order_in_units_of_the_std(limit: float, count: int) -> None:
    moved = NORMAL + 0.1 * torch.randn(NORMAL.shape, generator=torch.Generator().manual_seed(1))
    verdicts = findings(baseline_of(single(NORMAL)), single(moved), {"max_difference": limit})
    assert len(verdicts) == count
    if verdicts:
        assert "its values differ by about 0.1" in verdicts[0].message or "by about 0.09" in verdicts[0].message


def test_swapped_values_drift_though_every_statistic_is_the_same() -> None:
    baseline = baseline_of(single(NORMAL))
    turned = single(NORMAL.flip(1))
    before, now = baseline.rows[0], baseline_of(turned).rows[0]
    assert (before.mean, before.std, before.quantiles) == (now.mean, now.std, now.quantiles)
    (actual,) = findings(baseline, turned)
    assert actual.message.startswith("Drift from the baseline begins at 'z' (Identity): its values differ by about 1.")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_layer_that_hardly_varies_is_compared_in_units_of_its_magnitude(dtype: str) -> None:
    values = torch.full((1, 5), 8.0, dtype=getattr(torch, dtype))
    limits = dict.fromkeys(("max_difference", "max_difference_float16", "max_difference_bfloat16"), 0.1)
    for difference, count in ((0.99, 0), (1.03, 1)):
        baseline = with_row(baseline_of(single(values)), "z", mean=8.0 * (1 + difference * 0.1 * 0.1))
        assert len(findings(baseline, single(values), limits)) == count


def test_a_layer_that_was_zero_everywhere_drifts_with_any_other_value() -> None:
    verdicts = findings(baseline_of(single(torch.zeros(1, 5))), single(torch.full((1, 5), 1e-30)))
    assert [finding.places for finding in verdicts] == [("z", "(model)")]
    assert "its values are no longer all 0" in verdicts[0].message
    assert "Inf" not in verdicts[0].message
    assert findings(baseline_of(single(torch.zeros(1, 5))), single(torch.zeros(1, 5))) == []


def test_the_value_that_moved_furthest_is_named() -> None:
    baseline = with_row(baseline_of(single()), "z", mean=0.5, std=4.0)  # moved by 1/8 and by (4 - sqrt(2)) / 4
    assert "its std went from 4 to 1.41421, 0.646 of its spread" in findings(baseline, single())[0].message


# Eight channels of the values 1 to 3 of either sign in 16 places: mean 0, std sqrt(14/3) all over.
EVEN = torch.tensor([-3.0, -2.0, -1.0, 1.0, 2.0, 3.0]).view(2, 3).repeat(2, 8, 1, 1)
SPREAD = (14 / 3) ** 0.5


@pytest.mark.parametrize(
    ("moved", "says"),
    [
        ({5: 1.0}, f"(limit 0.01), in channel 5 of 8, by {1 / SPREAD:.3g}"),
        ({6: 0.5, 2: -1.0}, f"(limit 0.01), in channels 2 and 6 of 8, by up to {1 / SPREAD:.3g}"),
        ({0: 0.25, 1: 4.0, 7: 1.0}, f"(limit 0.01), in channels 1, 7 and 0 of 8, by up to {4 / SPREAD:.3g}"),
        (
            dict.fromkeys(range(8), 0.5) | {3: 2.0},
            f"(limit 0.01), in 8 of 8 channels, most in 3, 0 and 1, by up to {2 / SPREAD:.3g}",
        ),
    ],
)
def test_the_channels_that_moved_furthest_are_named(moved: dict[int, float], says: str) -> None:
    now = EVEN.clone()
    for channel, by in moved.items():
        now[:, channel] += by
    (actual,) = findings(baseline_of(single(EVEN)), single(now))
    assert f"{says}; the inputs of the network" in actual.message


def test_swapped_channels_are_named_and_channels_with_their_values_in_another_order_are_not() -> None:
    uneven = EVEN * torch.arange(1.0, 9.0)[:, None, None]
    swapped = uneven[:, [0, 1, 6, 3, 4, 5, 2, 7]]
    (actual,) = findings(baseline_of(single(uneven)), single(swapped))
    assert ", in channels 2 and 6 of 8, by up to " in actual.message
    (actual,) = findings(baseline_of(single(EVEN)), single(EVEN.flip(2, 3)))
    assert " of their spread (limit 0.01); the inputs of the network" in actual.message


@pytest.mark.parametrize(("limit", "count"), [(0.19, 1), (0.21, 0)])
def test_dead_channels_are_compared_by_share(limit: float, count: int) -> None:
    verdicts = findings(
        with_row(baseline_of(single()), "z", dead_fraction=0.4),  # 1 of 5 channels is 0
        single(),
        {"max_dead_difference": limit},
    )
    assert len(verdicts) == count
    if verdicts:
        assert "its share of dead channels went from 0.4 to 0.2 (limit 0.19 apart)" in verdicts[0].message


@pytest.mark.parametrize("factor", [2.0, 0.5])
@pytest.mark.parametrize(("limit", "count"), [(1.99, 1), (2.01, 0)])
def test_gradients_are_compared_by_ratio_in_either_direction(factor: float, limit: float, count: int) -> None:
    measured = inspected(chain(nn.Linear(5, 5), nn.Identity()), VALUES, "sum")
    baseline = with_row(baseline_of(measured), "y", gradient_l2=5**0.5 * factor)  # of (1, 1, 1, 1, 1)
    verdicts = findings(baseline, measured, {"max_gradient_ratio": limit})
    assert [finding.where for finding in verdicts] == ["y"] * count


def test_a_gradient_that_became_zero_drifts_at_any_ratio() -> None:
    measured = inspected(chain(nn.Linear(5, 5), nn.Identity()), VALUES, "sum")
    stopped = with_row(baseline_of(measured), "y", gradient_l2=0.0)
    assert "of its gradient went from 0 to 2.23607" in findings(stopped, measured)[0].message


def test_gradients_are_not_compared_with_a_baseline_without_any() -> None:
    network = chain(nn.Linear(5, 5), nn.Identity())
    assert findings(baseline_of(inspected(network, VALUES)), inspected(network, VALUES, "sum")) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"nan_count": 2}, "its count of NaN went from 2 to 0"),
        ({"inf_count": 1}, "its count of Inf went from 1 to 0"),
        ({"dtype": "float16"}, "its dtype went from float16 to float32"),
        ({"mean": None}, "its mean went from none to 0"),
        ({"quantiles": None}, "its 1% quantile (mean over inputs) went from none to -1.96"),
        ({"dead_fraction": None}, "its share of dead channels went from none to 0.2"),
    ],
)
def test_what_no_limit_is_about_drifts_at_any_limit(changes: dict[str, object], says: str) -> None:
    limits = {"max_difference": 1e9, "max_dead_difference": 1.0, "max_gradient_ratio": 1e9}
    verdicts = findings(with_row(baseline_of(single()), "z", **changes), single(), limits)
    assert [finding.where for finding in verdicts] == ["z"]
    assert says in verdicts[0].message


GONE = BaselineRow("", "ReLU", (1,), "float32", 0, 0, *[None] * 7)
SIX = (nn.Identity(), nn.ReLU(), nn.Identity(), nn.Identity(), nn.Identity(), nn.Identity())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kind": "GELU"}, "Drift from the baseline begins at 'y' (ReLU): its type went from GELU to ReLU."),
        ({"shape": (1, 6)}, "Drift from the baseline begins at 'y' (ReLU): its shape went from 1x6 to 1x5."),
    ],
)
def test_one_layer_of_another_type_or_shape_drifts(changes: dict[str, object], says: str) -> None:
    measured = inspected(chain(*SIX), VALUES)
    assert [finding.message for finding in findings(with_row(baseline_of(measured), "y", **changes), measured)] == [
        says
    ]


def test_a_layer_that_is_not_in_the_baseline_or_does_not_run_any_more_drifts() -> None:
    measured = inspected(chain(*SIX), VALUES)
    baseline = baseline_of(measured)
    without = replace(baseline, rows=tuple(row for row in baseline.rows if row.label != "y"))
    actual = findings(without, measured)
    assert [finding.message for finding in actual] == [
        "Drift from the baseline begins at 'y' (ReLU): it is not in the baseline."
    ]
    actual = findings(replace(baseline, rows=(*baseline.rows, replace(GONE, label="t#1[0]"))), measured)
    assert [(finding.where, finding.message) for finding in actual] == [
        ("t#1[0]", "Drift from the baseline begins at 't#1[0]' (ReLU): it is in the baseline and does not run.")
    ]


# --- in which order, and to what limits ---


def test_the_first_layer_in_execution_order_is_named_first_whatever_its_name() -> None:
    torch.manual_seed(0)
    network = chain(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5), nn.Linear(5, 5))
    baseline = baseline_of(inspected(network, VALUES))
    with torch.no_grad():
        network.x.weight.mul_(2)
    (actual,) = findings(baseline, inspected(network, VALUES))
    assert actual.places == ("x", "w", "(model)")
    assert actual.message.startswith("Drift from the baseline begins at 'x' (Linear): its values differ by about ")
    assert " (limit 0.01), in 5 of 5 channels, most in " in actual.message
    assert actual.message.endswith(". 2 more layers follow: 'w', '(model)'.")


@pytest.mark.parametrize(
    ("pattern", "settings", "where"),
    [
        ("type:relu", RuleSettings(limits={"max_difference": 100.0}), ["z", "x", "w", "v", "u", "(model)"]),
        ("name:z", RuleSettings(limits={"max_difference": 100.0}), ["y", "x", "w", "v", "u", "(model)"]),
        ("name:z", RuleSettings(level="off"), ["y", "x", "w", "v", "u", "(model)"]),
    ],
)
def test_limits_and_levels_hold_per_layer_pattern(pattern: str, settings: RuleSettings, where: list[str]) -> None:
    network = chain(*SIX)
    baseline = baseline_of(inspected(network, VALUES))
    some = LayerSettings(pattern, {"drift": settings})
    (actual,) = findings(baseline, inspected(network, VALUES * 1.2), layers=(some,))
    assert [*actual.places] == where
    assert ". 5 more layers follow: " in actual.message


@pytest.mark.parametrize(
    ("label", "pattern"),
    [("t#1[0]", r"name:/\At\Z/"), ("t['out']", r"name:/\At\Z/"), ("(model)[1]", r"name:/\A\Z/"), ("t", "type:relu")],
)
def test_patterns_are_also_about_layers_that_do_not_run_any_more(label: str, pattern: str) -> None:
    measured = inspected(chain(*SIX), VALUES)
    baseline = baseline_of(measured)
    gone = replace(GONE, label=label)
    off = LayerSettings(pattern, {"drift": RuleSettings(level="off")})
    assert findings(replace(baseline, rows=(*baseline.rows, gone)), measured, layers=(off,)) == []


# --- real networks ---

PORTABLE = ["squeezenet1_1", "vit"]


def built(network: Network) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return network.build().eval(), network.args()[0]


@pytest.fixture
def one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")  # torch says so of its own default
@pytest.mark.parametrize("name", PORTABLE)
def test_a_baseline_holds_for_other_threads_other_kernels_and_exact_arithmetic(name: str) -> None:
    network, inputs = built(TORCHVISION[name])
    baseline = baseline_of(inspected(network, inputs, "projection"))
    with torch.backends.mkldnn.flags(enabled=False):
        assert findings(baseline, inspected(network, inputs, "projection")) == []
    torch.set_num_threads(2)
    assert findings(baseline, inspected(network, inputs, "projection")) == []
    exact = inspected(copy.deepcopy(network).double(), inputs.double())
    as_doubles = replace(baseline, gradients=None, rows=tuple(replace(row, dtype="float64") for row in baseline.rows))
    assert findings(as_doubles, exact) == []


MIDDLE = {"resnet18": "layer3.0.conv1", "squeezenet1_1": "features.7.expand3x3", "swin": "features.3.0.mlp.0"}


@pytest.mark.parametrize("name", MIDDLE)
@pytest.mark.sample("resnet18", "squeezenet1_1")
def test_scaled_weights_of_a_middle_layer_are_found_at_that_layer(name: str) -> None:
    network, inputs = built(TORCHVISION[name])
    baseline = baseline_of(inspected(network, inputs))
    with torch.no_grad():
        network.get_submodule(MIDDLE[name]).weight.mul_(1.05)
    measured = inspected(network, inputs)
    (actual,) = findings(baseline, measured)
    assert actual.where == MIDDLE[name]
    order = [row.label for row in measured.forward.rows]
    where = [order.index(place) for place in actual.places]
    assert where == sorted(where)


# --- one cause is one finding ---


def test_where_only_gradients_changed_the_last_layer_is_named_as_they_go_back_from_there() -> None:
    measured = inspected(chain(*[nn.Linear(5, 5) for _ in range(6)]), VALUES, "projection")
    baseline = baseline_of(measured)
    rows = {row.label: row.gradient_l2 or 0.0 for row in baseline.rows}
    for label in "zyx":
        baseline = with_row(baseline, label, gradient_l2=rows[label] * 2)
    (actual,) = findings(baseline, measured)
    assert actual.places == ("x", "y", "z")
    (actual,) = findings(with_row(baseline, "v", mean=1e3), measured)
    assert actual.places == ("v",)


@pytest.mark.exhaustive
def test_inputs_that_were_prepared_in_another_way_are_said_to_be_the_cause() -> None:
    network = chain(*SIX)
    baseline = baseline_of(inspected(network, NORMAL))
    (actual,) = findings(baseline, inspected(network, NORMAL * 1.1 + 0.5))
    assert actual.where == "z"
    assert "; the inputs of the network differ already, by 0.5" in actual.message
    assert "look at how inputs are read and prepared." in actual.message


def test_two_changes_of_a_layer_are_joined_by_and() -> None:
    (finding,) = findings(baseline_of(single(NORMAL)), single(NORMAL + 3.0))
    values, _, statistic = finding.message.partition(" of their spread, and its ")
    assert "its values differ by about 3" in values
    assert " went from " in statistic
