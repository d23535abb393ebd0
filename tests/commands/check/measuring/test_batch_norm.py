"""What each BatchNorm is given, measured in the pass over all inputs; and when nothing can be told by it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

from hookscope.commands.check.measuring.network_passes import measure
from hookscope.results.check import BatchNormInput, CheckMeasurements, RuleOutcome
from hookscope.rules.judging import judge
from hookscope.rules.settings import CheckSettings
from tests.commands.check.measuring.networks import measure_network, prepared

RULE = "batchnorm-statistics"
WANTED = {RULE}


def pictures(count: int, channels: int = 2, side: int = 6, seed: int = 0) -> Tensor:
    """Return pictures far from zero, where a sum of squares would lose digits."""
    return 100 + torch.randn(count, channels, side, side, generator=torch.Generator().manual_seed(seed))


def trained(norm: nn.Module) -> nn.Module:
    norm.running_mean.fill_(100.0)
    return norm


def outcome(measured: CheckMeasurements) -> RuleOutcome:
    report = judge("net.pt", measured, CheckSettings(), WANTED)
    return next(finding for finding in report.outcomes if finding.rule == RULE)


def check_moments(actual: BatchNormInput, values: Tensor) -> None:
    """Compare with NumPy, in float64, over all but the channels."""
    array = np.moveaxis(values.double().numpy(), 1, 0).reshape(values.shape[1], -1)
    assert actual.value_count == array.shape[1]
    np.testing.assert_allclose(actual.mean, array.mean(1), rtol=1e-5)
    np.testing.assert_allclose(actual.variance, array.var(1), rtol=1e-4)


def test_mean_and_variance_are_those_over_all_batches() -> None:
    first, second = pictures(3), pictures(2, seed=1) * 2
    measured = measure_network(trained(nn.BatchNorm2d(2, eps=0.5)), first, second, wanted=WANTED)
    (actual,) = measured.batch_norms
    assert (actual.layer, actual.eps) == ("", 0.5)
    assert actual.running_mean.tolist() == [100.0, 100.0]
    assert actual.running_var.tolist() == [1.0, 1.0]
    check_moments(actual, torch.cat([first, second]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_added_up_in_float32_at_least(dtype: torch.dtype) -> None:
    inputs = pictures(4).to(dtype)
    measured = measure_network(trained(nn.BatchNorm2d(2)).to(dtype), inputs, wanted=WANTED)
    check_moments(measured.batch_norms[0], inputs)


def test_each_layer_is_measured_by_what_it_is_given_also_before_activations_in_place() -> None:
    net = nn.Sequential(trained(nn.BatchNorm2d(2)), nn.ReLU(inplace=True), nn.BatchNorm2d(2), nn.ReLU(inplace=True))
    inputs = pictures(4)
    first, second = measure_network(net, inputs, wanted=WANTED).batch_norms
    check_moments(first, inputs)
    check_moments(second, (inputs - 100).relu() / (1 + 1e-5) ** 0.5)
    assert (first.layer, second.layer) == ("0", "2")


@pytest.mark.parametrize(("momentum", "batches", "share"), [(0.1, 2, 0.81), (0.5, 3, 0.125), (None, 1, 0), (0.1, 0, 0)])
def test_statistics_forget_how_they_started_by_their_momentum(
    momentum: float | None, batches: int, share: float
) -> None:
    norm = nn.BatchNorm2d(2, momentum=momentum)
    for seed in range(batches):
        norm(torch.zeros_like(pictures(2, seed=seed)))
    if batches and momentum:
        assert norm.running_var is not None  # inputs do not vary, so that only the first 1 is left
        torch.testing.assert_close(norm.running_var, torch.full((2,), share))
    (actual,) = measure_network(trained(norm), pictures(4), wanted=WANTED).batch_norms
    assert actual.start_share == pytest.approx(share)


def test_a_layer_that_is_called_twice_is_measured_over_both_calls() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = trained(nn.BatchNorm2d(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x) + self.norm(3 * x)

    inputs = pictures(4)
    (actual,) = measure_network(Twice(), inputs, wanted=WANTED).batch_norms
    check_moments(actual, torch.cat([inputs, 3 * inputs]))


def test_frozen_layers_count_and_others_that_store_nothing_of_their_input_do_not() -> None:
    for layer in (FrozenBatchNorm2d(2), nn.BatchNorm2d(2)):
        assert len(measure_network(trained(layer), pictures(4), wanted=WANTED).batch_norms) == 1
    for other in (nn.BatchNorm2d(2, track_running_stats=False), nn.InstanceNorm2d(2, track_running_stats=True)):
        measured = measure_network(other, pictures(4), wanted=WANTED)
        assert measured.batch_norms == ()
        assert outcome(measured).reason.startswith("No BatchNorm stores statistics, or ")


def test_statistics_taken_from_the_pictures_themselves_are_no_distance_away() -> None:
    net = nn.Sequential(
        nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8, momentum=None), nn.ReLU(), nn.BatchNorm2d(8, momentum=None)
    )
    inputs = pictures(4, side=12)
    with torch.no_grad():
        net.train()(inputs)
    assert outcome(measure_network(net, inputs, wanted=WANTED)) == RuleOutcome(RULE, "pass")


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        (pictures(3), "At least 4 pictures are needed; 3 were given."),
        (pictures(1), "At least 4 pictures are needed; 1 was given."),
        (pictures(6, side=4), "No BatchNorm was given 100 values in each channel: give more or larger pictures."),
    ],
)
def test_too_little_is_skipped_with_the_reason(inputs: Tensor, reason: str) -> None:
    outcome_found = outcome(measure_network(trained(nn.BatchNorm2d(2)), inputs, wanted=WANTED))
    assert (outcome_found.status, outcome_found.reason) == ("skipped", reason)


def test_statistics_as_they_start_are_skipped() -> None:
    outcome_found = outcome(measure_network(nn.BatchNorm2d(2), pictures(4), wanted=WANTED))
    assert (outcome_found.status, outcome_found.reason) == (
        "skipped",
        "BatchNorm statistics are at their initial values: mean 0, variance 1.",
    )


def test_layers_that_never_run_are_skipped_with_the_reason() -> None:
    net = nn.Identity()
    net.unused = trained(nn.BatchNorm2d(2))
    outcome_found = outcome(measure_network(net, pictures(4), wanted=WANTED))
    assert (outcome_found.status, outcome_found.reason) == (
        "skipped",
        "No BatchNorm was seen to run, as in TorchScript.",
    )


def test_noise_is_skipped() -> None:
    inputs = replace(prepared(trained(nn.BatchNorm2d(2)), (pictures(4),)), is_noise=True)
    outcome_found = outcome(measure(inputs, CheckSettings(), WANTED))
    assert outcome_found.reason == "The input is noise, which BatchNorm was not trained on: give pictures."
    assert outcome_found.status == "skipped"
