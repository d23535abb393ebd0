"""`--edit` through the command line: case B2, what is shown, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.cli.conftest import Run, built, names_below, record_of, table

CASE = """
from collections import OrderedDict

import torch
from torch import nn


def textbook():
    torch.manual_seed(3)
    layers = [("conv", nn.Conv2d(3, 10, 2, stride=2)), ("relu", nn.ReLU()), ("flat", nn.Flatten())]
    return nn.Sequential(OrderedDict([*layers, ("fc1", nn.Linear(160, 5))]))
"""

COMMON = ("--loss", "mse", "--target", "zeros", "--save-tensors", "--quiet")


@pytest.fixture
def picture(tmp_path: Path) -> torch.Tensor:
    """The input, (1, 3, 8, 8), saved as `x.npy` beside the network."""
    (tmp_path / "case.py").write_text(CASE, "utf-8")
    values = np.random.default_rng(1).normal(size=(1, 3, 8, 8)).astype(np.float32)
    np.save(tmp_path / "x.npy", values)
    return torch.from_numpy(values)


@pytest.fixture
def network() -> nn.Sequential:
    network = built(CASE, "textbook")
    assert isinstance(network, nn.Sequential)
    return network


def test_clamped_gradients_of_a_relu_reach_the_convolution_without_negative_values(
    run: Run, tmp_path: Path, picture: torch.Tensor, network: nn.Sequential
) -> None:
    arguments = ("--edit", "relu:grad:clamp(min=0)", "--out", "out", *COMMON)
    assert run("grads", "case.py:textbook", "x.npy", *arguments).code == 0
    before = network.conv(picture)
    after = network.relu(before)
    loss = network.fc1(network.flat(after)).square().mean()
    [plain] = torch.autograd.grad(loss, after, retain_graph=True)
    clamped = plain.clamp(min=0)
    [below, weight, bias] = torch.autograd.grad(after, [before, *network.conv.parameters()], clamped)
    assert plain.min() < 0 <= below.min()
    loaded_file = load_file(tmp_path / "out" / "gradients.safetensors")
    torch.testing.assert_close(loaded_file["conv grad_output"], below)
    torch.testing.assert_close(loaded_file["conv.weight grad"], weight)
    torch.testing.assert_close(loaded_file["conv.bias grad"], bias)
    rows = {row["layer"]: row for row in table(tmp_path / "out" / "gradients.csv")}
    assert float(rows["conv"]["min"]) >= 0


@pytest.mark.usefixtures("picture")
def test_zeroed_gradients_of_biases_are_exactly_zero_and_all_others_unchanged(run: Run, tmp_path: Path) -> None:
    edited = ("--edit", "fc*bias:grad:zero", "--out", "edited")
    for arguments in (("--out", "plain"), edited):
        assert run("grads", "case.py:textbook", "x.npy", *arguments, *COMMON).code == 0
    plain, actual = (load_file(tmp_path / name / "gradients.safetensors") for name in ("plain", "edited"))
    assert actual.pop("fc1.bias grad").tolist() == [0.0] * 5
    assert plain.pop("fc1.bias grad").count_nonzero() == 5
    assert actual.keys() == plain.keys()
    assert all(torch.equal(actual[name], plain[name]) for name in plain)
    [change] = table(tmp_path / "edited" / "changes.csv")
    assert (change["label"], change["quantity"], change["l2_after"]) == ("fc1.bias", "gradient", "0.0")
    assert record_of(tmp_path / "edited")["settings"]["edits"] == ["fc*bias:grad:zero"]
    assert not (tmp_path / "plain" / "changes.csv").exists()


@pytest.mark.parametrize("verb", ["grads", "activations"])
def test_channels_of_an_output_are_zeroed_and_the_effect_is_shown(
    run: Run, tmp_path: Path, picture: torch.Tensor, network: nn.Sequential, verb: str
) -> None:
    loss = ("--loss", "sum") if verb == "grads" else ("--no-grids",)
    edit = "relu:output:zero(channels=3,7)"
    ended = run(verb, "case.py:textbook", "x.npy", "--edit", edit, "--out", "out", *loss)
    assert (ended.code, ended.stderr) == (0, "")
    with torch.no_grad():
        kept = network.relu(network.conv(picture))
        without = network.fc1(network.flat(kept))
        kept[:, [3, 7]] = 0
        output = network.fc1(network.flat(kept))
    changes = {(each["quantity"], each["label"]): each for each in table(tmp_path / "out" / "changes.csv")}
    fc1 = changes["activation", "fc1"]
    assert float(fc1["l2_before"]) == pytest.approx(without.norm().item(), rel=1e-5)
    assert float(fc1["l2_after"]) == pytest.approx(output.norm().item(), rel=1e-5)
    assert ("activation", "conv") not in changes
    assert f"Effect of {edit}" in ended.stdout
    assert ended.stdout.startswith("With 1 edit: ")
    if verb == "grads":
        assert f"loss {without.sum():#.4g} → {output.sum():#.4g}" in ended.stdout
    assert max(map(len, ended.stdout.splitlines()[:-1])) <= 80


@pytest.mark.usefixtures("picture")
@pytest.mark.parametrize("verb", ["grads", "activations"])
def test_a_bad_expression_has_a_caret_at_the_place(run: Run, tmp_path: Path, verb: str) -> None:
    before = names_below(tmp_path)
    ended = run(verb, "case.py:textbook", "x.npy", "--edit", "relu:grad:clmp(min=0)")
    message, shown, caret = ended.stderr.splitlines()
    assert (ended.code, ended.stdout) == (2, "")
    assert message.startswith("hookscope: error: Bad edit: ")
    assert "'clamp'" in message
    assert (shown, caret) == ("relu:grad:clmp(min=0)", " " * 10 + "^")
    assert names_below(tmp_path) == before
