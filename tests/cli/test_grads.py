import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from tests.cli.conftest import Run, assert_refused, built, names_below, record_of, statistics_of, table

CASES = """
import torch
from torch import nn

from tests.networks import TwoLayers as Textbook
from tests.networks import Written


def classifier():
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 5)
    )


def two():
    return Written(lambda net, x: {"aux": net.aux(x), "other": net.fc(x)}, fc=nn.Linear(3, 2), aux=nn.Linear(3, 2))


def cut():
    return Written(lambda net, x: (x * net.weight).detach(), weight=nn.Parameter(torch.ones(3)))


def batchnorm():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def chain(depth=12):
    layers = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(depth)))
    for number, layer in enumerate(layers):
        with torch.no_grad():
            layer.weight.copy_(torch.eye(2) * (1.0 if number else 0.125))
    return layers


class Raises(nn.Module):
    def forward(self, x):
        raise ValueError("no such luck")


def raises():
    return nn.Sequential(nn.Linear(3, 3), Raises())
"""

LOSSES = """
def squares(output):
    return output.square().sum()


def distance(output, target):
    return (output - target).abs().sum()


def vector(output):
    return output.square()


def constant(output):
    return output.detach().sum()


def raises(output):
    raise ValueError("no such luck\\nand more")


not_a_function = 3
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder that commands run in, with networks, losses and inputs."""
    (tmp_path / "case.py").write_text(CASES, "utf-8")
    (tmp_path / "loss.py").write_text(LOSSES, "utf-8")
    np.save(tmp_path / "ones.npy", np.ones((1, 3), np.float32))
    np.save(tmp_path / "picture.npy", np.random.default_rng(0).normal(size=(1, 3, 8, 8)).astype(np.float32))
    np.save(tmp_path / "five.npy", np.arange(5, dtype=np.float32))
    np.save(tmp_path / "seven.npy", np.arange(7, dtype=np.float32))
    return tmp_path


def assert_row(row: dict[str, str], gradient: torch.Tensor) -> None:
    expected = statistics_of(gradient.detach().numpy())
    measured = {name: float(row[name]) for name in expected}
    assert measured == pytest.approx(expected, rel=1e-5, abs=1e-7), row
    assert row["shape"] == "x".join(map(str, gradient.shape))


def picture(folder: Path) -> torch.Tensor:
    return torch.from_numpy(np.load(folder / "picture.npy"))


def gradients_of(network: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Differentiate with respect to the parameters, with nothing but autograd."""
    names, parameters = zip(*network.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


# --- The textbook case -----------------------------------------------------------------------------------------------

GRADIENTS = {
    ("fc1", "input"): [[22.0, 26, 30]],
    ("fc1", "output"): [[1.0, 0, 3, 0]],
    ("relu1", "input"): [[1.0, 0, 3, 0]],
    ("relu1", "output"): [[1.0, 2, 3, 4]],
    ("fc2", "input"): [[1.0, 2, 3, 4]],
    ("fc2", "output"): [[1.0]],
}
PARAMETERS = {
    "fc1.weight": [[1.0, 1, 1], [0, 0, 0], [3, 3, 3], [0, 0, 0]],
    "fc1.bias": [1.0, 0, 3, 0],
    "fc2.weight": [[7.0, 0, 27, 0]],
    "fc2.bias": [1.0],
}


def test_the_textbook_network_has_the_textbook_gradients(run: Run, folder: Path) -> None:
    ended = run("grads", "case.py:Textbook", "ones.npy", "--loss", "sum", "--inputs", "--save-tensors", "--out", "out")
    assert (ended.code, ended.stderr) == (0, "")
    rows = {(row["layer"], row["role"]): row for row in table(folder / "out" / "gradients.csv")}
    assert list(rows) == list(GRADIENTS)
    for place, values in GRADIENTS.items():
        assert_row(rows[place], torch.tensor(values))
    backward = sorted(rows, key=lambda place: int(rows[place]["backward_index"]))
    assert backward == [(layer, role) for layer in ("fc2", "relu1", "fc1") for role in ("output", "input")]
    parameters = {row["name"]: row for row in table(folder / "out" / "parameters.csv")}
    assert list(parameters) == list(PARAMETERS)
    for name, values in PARAMETERS.items():
        assert_row(parameters[name], torch.tensor(values))
    norms = {"fc1.weight": math.sqrt(650), "fc1.bias": math.sqrt(30), "fc2.weight": math.sqrt(30), "fc2.bias": 1.0}
    for name, norm in norms.items():
        assert float(parameters[name]["weight_l2"]) == pytest.approx(norm)
        assert float(parameters[name]["ratio"]) == pytest.approx(float(parameters[name]["l2"]) / norm)
    record = record_of(folder / "out")
    assert (record["verb"], record["loss"]["value"], record["mode"]) == ("grads", 89.0, "eval")
    tensors = load_file(folder / "out" / "gradients.safetensors")
    expected: dict[str, object] = {f"{name} grad": values for name, values in PARAMETERS.items()}
    for (layer, role), values in GRADIENTS.items():
        expected[f"{layer}{'[0]' if role == 'input' else ''} grad_{role}"] = values
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == expected


# --- Losses, targets, modes ------------------------------------------------------------------------------------------

CE_OF_3 = ("--loss", "ce", "--target", "3")
LOSS_CASES: dict[tuple[str, ...], Callable[[torch.Tensor], torch.Tensor]] = {
    CE_OF_3: lambda output: functional.cross_entropy(output, torch.tensor([3])),
    ("--loss", "mse", "--target", "five.npy"): lambda output: functional.mse_loss(output, torch.arange(5.0)[None]),
    ("--loss", "l1", "--target", "zeros"): lambda output: output.abs().mean(),
    ("--loss", "logit", "--target", "2"): lambda output: output[:, 2].sum(),
    ("--loss", "loss.py:squares"): lambda output: output.square().sum(),
    ("--loss", "loss.py:distance", "--target", "five.npy"): lambda output: (output - torch.arange(5.0)).abs().sum(),
}


@pytest.mark.parametrize(("options", "mode"), [(options, "eval") for options in LOSS_CASES] + [(CE_OF_3, "train")])
def test_gradients_of_parameters_are_autograds(run: Run, folder: Path, options: tuple[str, ...], mode: str) -> None:
    arguments = ("--mode", mode, "--save-tensors", "--out", "out", "--quiet")
    ended = run("grads", "case.py:classifier", "picture.npy", *options, *arguments)
    assert (ended.code, ended.stderr) == (0, "")
    network = built(CASES, "classifier").train(mode == "train")
    loss = LOSS_CASES[options](network(picture(folder)))
    expected = gradients_of(network, loss)
    record = record_of(folder / "out")
    assert record["loss"]["value"] == pytest.approx(loss.item(), rel=1e-6)
    assert record["mode"] == mode
    tensors = load_file(folder / "out" / "gradients.safetensors")
    for row in table(folder / "out" / "parameters.csv"):
        name = row["name"]
        torch.testing.assert_close(tensors[f"{name} grad"], expected[name], rtol=1e-5, atol=1e-7)
        assert_row(row, tensors[f"{name} grad"])


def test_autocast_runs_layers_in_the_lower_precision(run: Run, folder: Path) -> None:
    ended = run("grads", "case.py:classifier", "picture.npy", "--autocast", "bfloat16", "--out", "out", "-q")
    assert ended.code == 0
    rows = {row["kind"]: row["dtype"] for row in table(folder / "out" / "gradients.csv")}
    assert (rows["Conv2d"], rows["Linear"]) == ("bfloat16", "bfloat16")
    assert {row["dtype"] for row in table(folder / "out" / "parameters.csv")} == {"float32"}
    assert record_of(folder / "out")["settings"]["autocast"] == "bfloat16"


def test_without_a_picture_the_input_is_noise_of_the_networks_own_or_the_given_shape(run: Run, folder: Path) -> None:
    assert run("grads", "case.py:classifier", "--input-shape", "2,3,9,10", "--out", "given", "-q").code == 0
    shapes = [row["shape"] for row in table(folder / "given" / "gradients.csv")]
    assert shapes[0] == "2x4x7x8"
    assert [each["name"] for each in record_of(folder / "given")["inputs"]] == ["noise"] * 2
    ended = run("grads", "case.py:classifier", "--out", "own")
    assert ended.code == 0
    assert "· noise" in " ".join(ended.stdout.split())
    assert table(folder / "own" / "gradients.csv")[0]["shape"].startswith("1x4x")


# --- Each picture alone ----------------------------------------------------------------------------------------------


def test_a_picture_that_cannot_be_run_alone_is_told_and_the_run_is_kept(run: Run, folder: Path) -> None:
    np.save(folder / "more.npy", np.zeros((1, 3), np.float32))
    arguments = ("ones.npy", "more.npy", "--mode", "train", "--per-image", "--out", "out", "--quiet")
    ended = run("grads", "case.py:batchnorm", *arguments)
    assert ended.code == 6
    [error] = ended.errors
    assert "ones.npy, more.npy: alone, for --per-image: case.py:batchnorm raised in its forward pass" in error
    assert (folder / "out" / "run.json").exists()
    assert not (folder / "out" / "inputs.csv").exists()
    assert [unusable_input.split(":")[0] for unusable_input in record_of(folder / "out")["unusable_inputs"]] == [
        "ones.npy",
        "more.npy",
    ]


# --- Pictures, verdicts ----------------------------------------------------------------------------------------------


def test_a_limit_decides_where_a_verdict_begins(run: Run, folder: Path) -> None:
    np.save(folder / "one.npy", np.ones((1, 2), np.float32))

    def rules(name: str, *options: str) -> list[str]:
        assert run("grads", "case.py:chain", "one.npy", "--loss", "sum", "--out", name, "-q", *options).code == 0
        return [verdict["rule"] for verdict in record_of(folder / name)["verdicts"]]

    # The weights are c·1, the output is the product P of all c, so each ‖g‖/‖w‖ is √2·P/c²: 64 times that for c = 1/8.
    assert "gradient-imbalance" not in rules("usual")
    assert "gradient-imbalance" not in rules("above", "--limit", "imbalance=64.1")
    assert "gradient-imbalance" in rules("below", "--limit", "imbalance=63.9")
    assert record_of(folder / "below")["settings"]["limits"]["imbalance"] == 63.9


BLOCKED = """
import torch
from torch import nn

from tests.networks import Written


def net(forward):
    return Written(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 4))


def detached():
    return net(lambda net, x: net.c(net.b(net.a(x)).detach()))


def without():
    def forward(net, x):
        with torch.no_grad():
            x = net.b(net.a(x))
        return net.c(x)

    return net(forward)


def without_any():
    return net(torch.no_grad()(lambda net, x: net.c(net.b(net.a(x)))))


def never_called():
    return net(lambda net, x: net.c(x))


def root_of_zero():
    return net(lambda net, x: torch.sqrt(net.c(net.b(net.a(x))) * 0))


def raises():
    return net(lambda net, x: net.b(net.a(x)[:, :3]))
"""


@pytest.fixture
def blocked(folder: Path) -> None:
    (folder / "blocked.py").write_text(BLOCKED, encoding="utf-8")


@pytest.mark.usefixtures("blocked")
@pytest.mark.parametrize(
    ("network", "reason"),
    [
        ("detached", "no path leads from the loss to them: it does not depend on them, or the path is cut (detach"),
        ("without", "what their layers return was computed without gradients (no_grad"),
        ("never_called", "their layers were never called"),
    ],
)
@pytest.mark.sample("detached")
def test_why_parameters_get_no_gradient_is_what_is_known(run: Run, network: str, reason: str) -> None:
    document = json.loads(run("grads", f"blocked.py:{network}", "--input-shape", "2,4", "--json").stdout)
    (verdict,) = document["verdicts"]
    assert f"4 of 6 trainable parameters never get a gradient (limit 0): {reason}" in verdict["message"]


@pytest.mark.usefixtures("blocked")
def test_gradients_that_no_loss_sends_are_not_called_free_of_problems(run: Run) -> None:
    ended = run("grads", "blocked.py:without_any", "--input-shape", "2,4")
    assert ended.code == 6
    assert "Gradients were not checked: none arrived." in ended.stdout
    assert "No problems found" not in ended.stdout


@pytest.mark.usefixtures("blocked")
def test_where_the_forward_pass_raises_the_error_is_said_once_and_there_is_no_table(run: Run) -> None:
    ended = run("grads", "blocked.py:raises", "--input-shape", "2,4", "--json")
    assert ended.code == 6
    assert len(ended.errors) == 1
    document = json.loads(ended.stdout)
    assert {row["status"] for row in [*document["gradients"], *document["parameters"]]} == {"unknown"}
    assert "No loss and no gradients: the forward pass raised." in ended.stderr
    assert "L2" not in ended.stderr


@pytest.mark.usefixtures("blocked")
@pytest.mark.parametrize(
    ("network", "options", "code"),
    [
        ("root_of_zero", ("--fail-on", "fail"), 1),
        ("root_of_zero", (), 0),
        ("detached", ("--fail-on", "fail"), 0),
        ("detached", ("--fail-on", "warn"), 1),
        ("raises", ("--fail-on", "warn"), 6),
    ],
)
def test_a_verdict_fails_the_command_where_that_is_asked_for(
    run: Run, folder: Path, network: str, options: tuple[str, ...], code: int
) -> None:
    ended = run("grads", f"blocked.py:{network}", "--input-shape", "2,4", "--quiet", "--out", "kept", *options)
    assert ended.code == code
    assert (folder / "kept" / "run.json").exists() == (code < 2)


def test_of_two_values_none_is_dropped_without_a_word(run: Run, folder: Path) -> None:
    ended = run("grads", "case.py:batchnorm", "--seed", "2,4", "--seed", "3,4")
    assert_refused(ended, 2, "--seed is given 2 times, and takes one value.")
    assert not (folder / "hookscope-runs").exists()


# --- What cannot be --------------------------------------------------------------------------------------------------

ONES, PICTURE = ("case.py:Textbook", "ones.npy"), ("case.py:classifier", "picture.npy")
REFUSED: list[tuple[tuple[str, ...], int, list[str]]] = [
    ((*PICTURE, "--loss", "cee"), 2, ["'cee'", "'ce'"]),
    ((*PICTURE, "--loss", "ce", "--target", "five.npy"), 2, ["five.npy", "class indices"]),
    ((*PICTURE, "--loss", "mse", "--target", "seven.npy"), 2, ["seven.npy", "1x5"]),
    ((*PICTURE, "--loss", "mse", "--target", "self"), 2, ["1x3x8x8", "1x5"]),
    ((*PICTURE, "--loss", "mse", "--target", "missing.npy"), 3, ["missing.npy"]),
    ((*PICTURE, "--loss", "loss.py:vector"), 2, ["loss.py:vector", "1x5", "0-d"]),
    ((*PICTURE, "--loss", "loss.py:constant"), 2, ["loss.py:constant", "gradient"]),
    ((*PICTURE, "--loss", "loss.py:distance"), 2, ["loss.py:distance", "needs a target: give --target"]),
    ((*PICTURE, "--loss", "loss.py:not_a_function"), 2, ["not a function"]),
    ((*PICTURE, "--loss", "loss.py:nothing"), 5, ["nothing"]),
    (("case.py:two", "ones.npy", "--output-key", "logits"), 2, ["'logits'", "['aux']", "['other']"]),
    ((*ONES, "--limit", "vanish=1"), 2, ["'vanish=1'", "'vanishing'"]),
    ((*ONES, "--limit", "vanishing=x"), 2, ["no number"]),
    ((*ONES, "--limit", "saturated_fraction=80"), 2, ["not between 0 and 1"]),
    ((*ONES, "--limit", "vanishing=0"), 2, ["not a positive, finite number"]),
    ((*ONES, "--input-shape", "1,3"), 2, ["--input-shape"]),
    (("case.py:classifier", "--per-image"), 2, ["--per-image", "IMAGE"]),
    (("case.py:cut",), 2, ["give pictures", "--input-shape"]),
    ((*ONES, "--mode", "tain"), 2, ["'tain'"]),
]


@pytest.mark.parametrize(
    ("arguments", "code", "words"), REFUSED, ids=lambda it: " ".join(it) if isinstance(it, tuple) else None
)
def test_what_cannot_be_is_one_line_and_leaves_nothing(
    run: Run, folder: Path, arguments: tuple[str, ...], code: int, words: list[str]
) -> None:
    before = names_below(folder)
    assert_refused(run("grads", *arguments), code, *words)
    assert names_below(folder) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("case.py:cut", "ones.npy"), ["has no gradient", "no_grad"]),
        ((*PICTURE, "--loss", "loss.py:raises"), ["loss.py:raises", "ValueError: no such luck"]),
        (("case.py:raises", "ones.npy"), ["at 1 (Raises)", "ValueError: no such luck"]),
        (("case.py:classifier", "--input-shape", "1,4,8,8"), ["at 0 (Conv2d)"]),
    ],
    ids=["no gradient path", "loss raises", "model raises", "wrong shape"],
)
def test_a_pass_that_breaks_off_is_one_error_and_leaves_nothing(
    run: Run, folder: Path, arguments: tuple[str, ...], words: list[str]
) -> None:
    before = names_below(folder)
    ended = run("grads", *arguments)
    assert ended.code == 6
    [error] = ended.errors
    for word in words:
        assert word in error
    assert "Traceback" not in ended.stderr
    assert "run.json" not in ended.stdout
    assert names_below(folder) == before


@pytest.mark.usefixtures("folder")
def test_a_pass_that_breaks_off_says_so_in_the_json(run: Run) -> None:
    ended = run("grads", "case.py:raises", "ones.npy", "--json")
    document = json.loads(ended.stdout)
    assert (ended.code, document["run"], document["loss"]) == (6, None, None)
    assert document["failure"]["layer"] == "1"
    assert [row["layer"] for row in document["rows"]] == ["0"]
