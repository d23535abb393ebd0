"""Which baselines do not fit a run."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn

from hookscope.errors import UsageError
from hookscope.inputs.batches import load_batches, part_of
from hookscope.inputs.noise import noise_batch
from hookscope.models.spec import load_model
from hookscope.results.check import CheckMeasurements
from hookscope.results.network import Failure
from hookscope.rules.baseline import Baseline, baseline_of, require_fit
from hookscope.rules.judging import judge
from hookscope.rules.settings import CheckSettings
from tests.commands.check.measurements import inspected
from tests.rules.test_drift import CAT, SIX, VALUES, chain, findings


def misfit(baseline: Baseline, measured: CheckMeasurements) -> str:
    with pytest.raises(UsageError) as raised:
        require_fit(baseline, measured)
    message = str(raised.value)
    assert raised.value.exit_code == 2
    assert message.isprintable()
    assert message.startswith("The baseline does not fit: ")
    assert message.endswith("Write a new one with `hookscope check --update-baseline`.")
    return message


def vision(name: str, **options: object) -> CheckMeasurements:
    torch.manual_seed(0)
    return inspected(torchvision.models.get_model(name, weights=None, **options).eval(), torch.ones(1, 3, 64, 64))


def test_a_baseline_of_another_class_does_not_fit() -> None:
    message = misfit(baseline_of(vision("shufflenet_v2_x0_5")), vision("squeezenet1_1"))
    assert "it is of ShuffleNetV2 (ShuffleNetV2), and this is SqueezeNet (SqueezeNet)" in message


def test_a_baseline_of_another_architecture_of_the_same_class_does_not_fit() -> None:
    message = misfit(baseline_of(vision("shufflenet_v2_x0_5")), vision("shufflenet_v2_x1_0"))
    assert "layers have the same name, type and shape, so it was made with a different network" in message


def test_another_head_is_drift_and_no_misfit() -> None:
    network, inputs = torchvision.models.resnet18().eval(), torch.ones(1, 3, 64, 64)
    baseline = baseline_of(inspected(network, inputs))
    network.fc = nn.Linear(512, 10)
    verdicts = findings(baseline, inspected(network, inputs))
    assert [finding.places for finding in verdicts] == [("fc", "(model)")]
    assert "its shape went from 1x1000 to 1x10" in verdicts[0].message


def test_a_baseline_of_another_batch_size_fits() -> None:
    network, whole = chain(*SIX), noise_batch((2, 5), 0)
    baseline = baseline_of(inspected(network, whole))
    again = inspected(network, [part_of(whole, 0), part_of(whole, 1)])
    require_fit(baseline, again)
    assert findings(baseline, again) == []


def noise(shape: tuple[int, ...], seed: int) -> CheckMeasurements:
    return inspected(chain(nn.ReLU()), noise_batch(shape, seed))


def picture(path: Path, **options: object) -> CheckMeasurements:
    preprocessing = replace(load_model("demo").preprocessing, **options)  # type: ignore[arg-type]
    return inspected(chain(nn.ReLU()), load_batches([path], preprocessing))


@pytest.mark.parametrize(
    ("shape", "seed", "says"),
    [
        ((2, 3, 8, 8), 1, "input 1 was prepared by 'standard normal noise, seed 0', and now by 'standard"),
        ((2, 3, 8, 9), 0, "input 1 was 3x8x8, and is 3x8x9"),
        ((1, 3, 8, 8), 0, "it was made with 2 inputs, and this run has 1"),
    ],
)
def test_noise_of_another_seed_size_or_number_does_not_fit(shape: tuple[int, ...], seed: int, says: str) -> None:
    assert says in misfit(baseline_of(noise((2, 3, 8, 8), 0)), noise(shape, seed))


def test_another_picture_of_the_same_name_does_not_fit(tmp_path: Path) -> None:
    other = tmp_path / "cat.jpg"
    other.write_bytes((CAT.parent / "rocket.jpg").read_bytes())
    message = misfit(baseline_of(picture(CAT)), picture(other))
    assert "input 1 was 'cat.jpg' (sha256 586b6d319e8e…), and is 'cat.jpg' (sha256 " in message


def test_the_same_picture_under_another_name_fits(tmp_path: Path) -> None:
    other = tmp_path / "renamed.jpg"
    other.write_bytes(CAT.read_bytes())
    assert findings(baseline_of(picture(CAT)), picture(other)) == []


def test_another_picture_after_equal_ones_is_named_by_its_own_number(tmp_path: Path) -> None:
    for folder, name in (("a", "cat.jpg"), ("b", "cat.jpg"), ("c", "rocket.jpg"), ("d", "rocket.jpg")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes((CAT.parent / name).read_bytes())
    first, again, other, last = sorted(tmp_path.glob("*/*.jpg"))
    preprocessing = load_model("demo").preprocessing
    run, now = (
        inspected(chain(nn.ReLU()), load_batches(paths, preprocessing))
        for paths in ([first, again, other], [first, other, last])
    )
    assert [entry.count for entry in baseline_of(run).inputs] == [2, 1]
    assert "input 2 was 'cat.jpg' (sha256 586b6d319e8e…), and is 'rocket.jpg' (" in misfit(baseline_of(run), now)


def test_another_preparation_of_the_picture_does_not_fit() -> None:
    message = misfit(baseline_of(picture(CAT)), picture(CAT, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)))
    assert "input 1 was prepared by 'normalised by mean 0.498" in message
    assert "and now by 'normalised by mean 0.5, 0.5, 0.5" in message


def test_a_preparation_in_another_order_does_not_fit() -> None:
    baseline = baseline_of(picture(CAT))
    (entry,) = baseline.inputs
    first, *others = entry.steps
    turned = replace(baseline, inputs=(replace(entry, steps=(*others, first)),))
    message = misfit(turned, picture(CAT))
    assert f"was prepared by '{others[0]}" in message
    assert f"and now by '{first}" in message


def test_gradients_of_another_loss_do_not_fit() -> None:
    network = chain(nn.Linear(5, 5))
    message = misfit(baseline_of(inspected(network, VALUES, "sum")), inspected(network, VALUES, "projection"))
    assert "its gradients are of the loss 'sum, no target, eval', and these are of 'projection" in message


def test_a_baseline_with_gradients_does_not_fit_a_run_that_takes_none() -> None:
    network = chain(nn.Linear(5, 5))
    baseline = baseline_of(inspected(network, VALUES, "sum"))
    plain = inspected(network, VALUES)
    assert "it has gradients, and this run takes none, because no rule about gradients is on" in misfit(baseline, plain)
    require_fit(baseline, replace(plain, seconds={"gradients": 0.1}))


def test_a_run_that_broke_off_is_not_taken_for_another_network() -> None:
    measured = inspected(chain(*SIX), VALUES)
    failure = Failure("y", "ReLU", ("1x5",), "ValueError: no")
    broken = replace(measured.forward, rows=measured.forward.rows[:1], inputs=(), failure=failure)
    for forward, reason in ((broken, "the forward pass raised"), (None, "the network was not run")):
        report = judge("x", replace(measured, forward=forward), CheckSettings(), {"drift"}, baseline_of(measured))
        assert [outcome.reason for outcome in report.outcomes if outcome.rule == "drift"] == [reason]
