"""Rules about activations judge all inputs of a survey in place of a few; a survey of another network is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hookscope
from hookscope.errors import UsageError
from hookscope.results.check import CheckReport

FEW = (2, 3, 8, 8)


class Odd(nn.Module):
    """A ReLU whose channels fire for bright inputs only, and a scale that takes one input in forty beyond float16."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 10, 3)
        self.relu = nn.ReLU()
        self.scale = nn.Conv2d(10, 10, 1)
        with torch.no_grad():
            self.conv.weight.fill_(1 / 27)
            self.conv.bias.fill_(-1.0)
            self.scale.bias.zero_()
            self.scale.weight[:] = 30_000 * torch.eye(10).view(10, 10, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(self.relu(self.conv(x))).mean((2, 3))


def data(folder: Path) -> Path:
    """Forty inputs, the mean of the last of which is 4, that of others 0.5."""
    folder.mkdir()
    for number in range(40):
        values = np.full((3, 8, 8), 4.0 if number == 39 else 0.5, np.float32)
        np.save(folder / f"{number:02}.npy", values + np.float32(0.001) * np.arange(64, dtype=np.float32).reshape(8, 8))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    made = hookscope.survey(Odd(), data(tmp_path / "data"), batch_size=8)
    assert made is not None
    return made.save(tmp_path / "run", crops=0)


def found(report: CheckReport, rule: str) -> list[str]:
    return [finding.message for finding in report.findings if finding.rule == rule]


RULES = ("dead-channels", "fp16-headroom", "overflowing-activation")


def test_rules_see_the_one_input_that_a_few_do_not_have(run: Path, tmp_path: Path) -> None:
    few = [tmp_path / "data" / "00.npy", tmp_path / "data" / "01.npy"]
    without = hookscope.check(Odd(), images=few, select=RULES)
    assert "of its 10 channels are 0 over all 2 inputs" in found(without, "dead-channels")[0]
    assert found(without, "fp16-headroom") == []
    beyond = hookscope.check(Odd(), images=few, select=RULES, survey=run)
    assert found(beyond, "dead-channels") == []
    greatest = 30_000 * (4 + 0.001 * 54 - 1)  # the brightest patch has the mean of rows and columns 5 to 7
    [message] = found(beyond, "fp16-headroom")
    assert f"'scale' (Conv2d) reaches {round(greatest, -2):,.0f}," in message
    assert any("look at 3 of 5 outputs in the survey" in warning for warning in beyond.warnings)


def test_a_survey_of_other_weights_or_dtype_is_refused_in_one_line(run: Path) -> None:
    other = Odd()
    other.conv.bias.data[3] += 1e-3
    for network, reason in (
        (other, "it was made with a different network or different weights"),
        (Odd().double(), "ran in float32"),
    ):
        images = torch.rand(FEW, dtype=next(network.parameters()).dtype)
        report = hookscope.check(network, images=images, survey=run, select=RULES)
        assert report.error is not None
        assert reason in report.error
        assert "\n" not in report.error
        assert report.exit_code == UsageError.exit_code


def test_only_outputs_that_the_survey_has_are_judged_by_it(tmp_path: Path) -> None:
    made = hookscope.survey(Odd(), data(tmp_path / "data"), layer="relu", batch_size=8)
    assert made is not None
    report = hookscope.check(
        Odd(), images=tmp_path / "data" / "00.npy", survey=made.save(tmp_path / "run"), select=RULES
    )
    assert found(report, "dead-channels") == []
    assert found(report, "fp16-headroom") == []
    assert any("1 of 5 outputs" in warning for warning in report.warnings)


def test_nan_over_the_data_set_is_named(tmp_path: Path) -> None:
    folder = data(tmp_path / "data")
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Softplus())
    with torch.no_grad():
        network[0].weight.fill_(1e38)
    np.save(folder / "20.npy", np.full((3, 8, 8), 1e3, np.float32))
    made = hookscope.survey(network, folder, batch_size=8)
    assert made is not None
    report = hookscope.check(
        network, images=torch.zeros(FEW), survey=made.save(tmp_path / "run"), select="non-finite-activation"
    )
    [message] = found(report, "non-finite-activation")
    assert "Inf starts at '0' (Conv2d), the first output with any over 40 inputs of the survey" in message
    assert not report.passed


def test_a_survey_needs_a_network() -> None:
    with pytest.raises(UsageError, match="`survey` needs a network"):
        hookscope.check("model.pt", arch="none", survey="run")
