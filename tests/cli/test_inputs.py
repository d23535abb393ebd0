"""What commands can be given, how inputs that cannot be used are told, and that the others are finished."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn import functional

from tests.cli.conftest import CAT, Run, built, names_below, record_of, rows_of

AS_THEY_ARE = ("--resize", "none", "--crop", "none", "--mean", "none", "--std", "none", "--out", "out")

NETWORKS = """
from collections import OrderedDict

import torch
from torch import nn


class Picky(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)
        self.fc = nn.Linear(2, 5)

    def forward(self, x):
        y = self.conv(x)
        if (x[:, 0] > 0.99).all(dim=(1, 2)).any():
            raise ValueError("too red")
        return self.fc(y.mean((2, 3)))


def normed():
    return nn.Sequential(OrderedDict(conv=nn.Conv2d(3, 2, 1), bn=nn.BatchNorm2d(2)))


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 4, 3), nn.Linear(2, 4)

    def forward(self, x, b, rate=1):
        return (self.left(x).mean((2, 3)) + self.right(b)) * rate
"""


@pytest.fixture
def cases(tmp_path: Path) -> Path:
    (tmp_path / "cases.py").write_text(NETWORKS, encoding="utf-8")
    return tmp_path


def picture(path: Path, seed: int, size: int = 8, colour: tuple[int, int, int] | None = None) -> torch.Tensor:
    """Write a picture; return it as an input, (1, 3, H, W)."""
    pixels = np.random.default_rng(seed).integers(0, 200, (size, size, 3), dtype=np.uint8)
    if colour:
        pixels[:] = colour
    Image.fromarray(pixels).save(path)
    return torch.from_numpy(pixels.astype(np.float32) / 255).permute(2, 0, 1)[None]


def save(path: Path, values: NDArray[np.generic] | torch.Tensor) -> torch.Tensor:
    array = np.asarray(values)
    np.save(path, array)
    return torch.from_numpy(array)


# --- Inputs that cannot be used --------------------------------------------------------------------------------------


def folder_with_bad_ones(folder: Path) -> torch.Tensor:
    """Write five files, of which the network takes the first and the last; return these two."""
    (folder / "in").mkdir()
    first = picture(folder / "in" / "1.png", 1)
    picture(folder / "in" / "2.png", 2, colour=(255, 0, 0))
    save(folder / "in" / "3.npy", np.zeros((5, 8, 8), np.float32))  # of five channels
    (folder / "in" / "4.png").write_bytes((folder / "in" / "1.png").read_bytes()[:90])
    (folder / "in" / "notes.txt").touch()
    return torch.cat([first, picture(folder / "in" / "5.png", 5)])


@pytest.mark.parametrize("batch_size", [1, 8])
def test_what_the_network_refuses_is_named_and_the_others_are_finished(run: Run, cases: Path, batch_size: int) -> None:
    good = folder_with_bad_ones(cases)
    ended = run("activations", "cases.py:Picky", "in", *AS_THEY_ARE, "--batch-size", batch_size, "--save-tensors")
    assert ended.code == 3  # a corrupt file is graver than a model that raises
    cut, red, channels = sorted(error.removeprefix("hookscope: error: ") for error in ended.errors)
    raised = "cases.py:Picky raised in its forward pass at"
    assert red == f"in/2.png: {raised} (model) (Picky), given an input of shape (1, 3, 8, 8): ValueError: too red"
    assert channels.startswith(
        f"in/3.npy: {raised} conv (Conv2d), given an input of shape (1, 5, 8, 8): RuntimeError: "
    )
    assert cut.startswith("Cannot read 'in/4.png': the picture is truncated or corrupt")
    record = record_of(cases / "out")
    assert [each["name"] for each in record["inputs"]] == ["in/1.png", "in/5.png"]
    assert len(record["unusable_inputs"]) == 3
    assert record["thumbnails"] == ["inputs/000.png", "inputs/001.png"]
    with Image.open(cases / "out" / "inputs" / "001.png") as kept, Image.open(cases / "in" / "5.png") as source:
        assert np.array_equal(np.asarray(kept), np.asarray(source))
    network = built(NETWORKS, "Picky")
    with torch.no_grad():
        expected = network.conv(good).numpy()
    saved = safetensors.numpy.load_file(cases / "out" / "activations.safetensors")
    np.testing.assert_allclose(saved["conv"], expected, rtol=1e-5, atol=1e-6)
    [row] = [row for row in rows_of(cases / "out") if row["layer"] == "conv"]
    assert row["activation"]["element_count"] == expected.size
    assert row["activation"]["mean"] == pytest.approx(expected.mean(), rel=1e-5)


def test_targets_stay_with_their_inputs_where_others_cannot_be_used(run: Run, cases: Path) -> None:
    good = folder_with_bad_ones(cases)
    options = ("--loss", "ce", "--target", "4,3,2,1,0", "--per-image", "--save-tensors")
    ended = run("grads", "cases.py:Picky", "in", *AS_THEY_ARE, *options)
    assert ended.code == 3
    assert len(ended.errors) == 3, "none is told again for --per-image"
    network = built(NETWORKS, "Picky")
    loss = sum(functional.cross_entropy(network(x[None]), torch.tensor([y])) for x, y in zip(good, (4, 0), strict=True))
    names, parameters = zip(*network.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters)
    saved = safetensors.numpy.load_file(cases / "out" / "gradients.safetensors")
    for name, gradient in zip(names, gradients, strict=True):
        np.testing.assert_allclose(saved[f"{name} grad"], gradient.numpy(), rtol=1e-4, atol=1e-6)
    assert saved["conv grad_output"].shape == (2, 2, 8, 8)
    lines = (cases / "out" / "inputs.csv").read_text(encoding="utf-8").splitlines()
    assert [line.split(",")[0] for line in lines[1:]] == ["in/1.png", "in/5.png"]


def test_inputs_that_are_refused_alike_share_a_line_and_are_all_in_the_record(run: Run, cases: Path) -> None:
    for number in range(6):
        picture(cases / f"{number}.png", number, colour=(255, number, 0) if number else None)
    ended = run("activations", "cases.py:Picky", *[cases / f"{number}.png" for number in range(6)], *AS_THEY_ARE)
    assert ended.code == 6
    [error] = ended.errors
    assert "3.png and 2 more: cases.py:Picky raised" in error
    assert len(record_of(cases / "out")["unusable_inputs"]) == 5
    assert "batch of 6 inputs" in " ".join(ended.stderr.split())


def test_in_train_mode_the_inputs_of_a_refused_batch_go_together(run: Run, cases: Path) -> None:
    for number in range(3):
        picture(cases / f"{number}.png", number, size=8 + number // 2)
    ended = run("grads", "cases.py:normed", "0.png", "1.png", "2.png", *AS_THEY_ARE, "--mode", "train")
    assert ended.code == 0
    picture(cases / "2.png", 2, size=1)  # one value per channel
    ended = run("grads", "cases.py:normed", "0.png", "1.png", "2.png", *AS_THEY_ARE, "--mode", "train")
    assert ended.code == 6
    assert "2.png: cases.py:normed raised in its forward pass at bn (BatchNorm2d)" in ended.errors[0]
    assert [each["name"] for each in record_of(cases / "out")["inputs"]] == ["0.png", "1.png"]


# --- Folders, formats, limits ----------------------------------------------------------------------------------------


def test_a_folder_says_in_a_note_what_it_skipped(run: Run, cases: Path) -> None:
    (cases / "in").mkdir()
    with Image.open(CAT) as cat:
        small = cat.resize((12, 8))
    for name in ("a.avif", "b.jp2", "c"):
        small.save(cases / "in" / name, {"c": "PNG"}.get(name))
    for name in ("readme.md", "labels.csv", "more.csv"):
        (cases / "in" / name).touch()
    ended = run("activations", "cases.py:normed", "in", *AS_THEY_ARE)
    assert (ended.code, ended.stderr) == (0, "")
    note = "in: 3 files skipped: 2 .csv, 1 .md."
    assert f"note: {note}" in ended.stdout.splitlines()[:7]  # below the verdict and what was looked at
    record = record_of(cases / "out")
    assert record["notes"][0] == note
    assert [each["name"] for each in record["inputs"]] == ["in/a.avif", "in/b.jp2", "in/c"]


def test_the_limit_of_pixels_is_an_option(run: Run, cases: Path) -> None:
    picture(cases / "a.png", 0, size=10)
    picture(cases / "b.png", 0, size=11)
    ended = run("grads", "cases.py:normed", "a.png", "b.png", *AS_THEY_ARE, "--max-pixels", 100)
    assert ended.code == 3
    assert "'b.png': 11x11 (height x width) is over the limit of 100 pixels" in ended.errors[0]
    assert record_of(cases / "out")["preprocessing"]["max_pixels"] == 100
    assert run("grads", "cases.py:normed", "a.png", "--max-pixels", 0).code == 2


# --- Several inputs in a file, by name, in pairs ----------------------------------------------------------------------


def test_a_batch_in_one_tensor_file_is_that_many_inputs(run: Run, cases: Path) -> None:
    values = save(cases / "batch.npy", np.random.default_rng(0).uniform(0, 0.9, (8, 3, 6, 6)).astype(np.float32))
    ended = run("activations", "cases.py:Picky", "batch.npy", *AS_THEY_ARE, "--batch-size", 3)
    assert ended.code == 0
    record = record_of(cases / "out")
    assert [each["name"] for each in record["inputs"]] == [f"batch.npy[{index}]" for index in range(8)]
    with torch.no_grad():
        expected = built(NETWORKS, "Picky").conv(values)
    [row] = [row for row in rows_of(cases / "out") if row["layer"] == "conv"]
    assert row["activation"]["mean"] == pytest.approx(expected.mean().item(), rel=1e-5)
    assert run("activations", "cases.py:Picky", "batch.npy", *AS_THEY_ARE, "--batch-axis", "none").code == 6
    assert run("activations", "cases.py:Picky", "batch.npy", *AS_THEY_ARE, "--batch-axis", "one").code == 2


@pytest.mark.parametrize("command", ["activations", "grads"])
def test_inputs_by_name_are_keyword_arguments(run: Run, cases: Path, command: str) -> None:
    x = torch.cat([picture(cases / "1.png", 1), picture(cases / "2.png", 2)])
    b = save(cases / "b.npy", np.array([[0.5, -1]]))  # float64: the network takes float32
    ended = run(command, "cases.py:Mixed", "1.png", "2.png", *AS_THEY_ARE, "--input", "b=b.npy", "--input", "rate=3",
                "--layer", "*")  # fmt: skip
    assert (ended.code, ended.stderr) == (0, "")
    with torch.no_grad():
        expected = built(NETWORKS, "Mixed")(x, b.float().expand(2, 2), rate=3)
    [row] = [row for row in rows_of(cases / "out") if row["layer"] == ""]
    assert row["activation"]["l2"] == pytest.approx(expected.norm().item(), rel=1e-5)
    named = record_of(cases / "out")["named_inputs"]
    assert (named["rate"], named["b"]["name"], len(named["b"]["sha256"])) == (3, "b.npy", 64)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--input", "b=missing.npy"), 3, ["'missing.npy'", "no such file"]),
        (("--input", "c=3"), 6, ["Mixed", "unexpected keyword argument 'c'"]),
        (("--input", "b=word.npy"), 3, ["word.npy"]),
    ],
    ids=str,
)
def test_an_input_by_name_that_cannot_be_is_one_line(
    run: Run, cases: Path, arguments: tuple[str, ...], code: int, words: list[str]
) -> None:
    picture(cases / "a.png", 0)
    (cases / "word.npy").write_bytes(b"\x93NUMPY and no more")
    before = names_below(cases)
    ended = run("activations", "cases.py:Mixed", "a.png", *AS_THEY_ARE, *arguments)
    assert (ended.code, len(ended.errors)) == (code, 1)
    assert all(word in ended.errors[0] for word in words)
    assert names_below(cases) == before


HELPLESS = """
import torch
from torch import nn


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 2, 1), nn.Linear(3, 2)

    def forward(self, x, meta, scale):
        return self.conv(x).mean((2, 3)) + self.fc(meta) * scale


def words():
    return nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2))


def flat():
    return nn.Sequential(nn.Linear(4, 2), nn.ReLU())
"""


@pytest.mark.parametrize(
    ("network", "arguments", "remedy"),
    [
        ("Two", [str(CAT)], "or --input-shape meta=SHAPE --input-shape scale=SHAPE for noise"),
        (
            "words",
            [str(CAT)],
            "a tensor file of an integer dtype, --input NAME=1,2,3:int64, or --input-shape SHAPE:int64 for noise",
        ),
        ("flat", ["--input-shape", "1,4:int64"], "float32, or leave out the dtype in --input and --input-shape"),
        ("Two", ["--input-shape", "1,8,8,3", "--input", "meta=1,2,3", "--input", "scale=2"], "as in (3, 224, 224)"),
        ("words", ["--input", "input=8"], "--input NAME=1,2,3, or NAME=1,2,3:int64 for whole numbers"),
        ("flat", [str(CAT)], "--batch-axis for a tensor file (0: several inputs, none: one), --input-shape for noise"),
    ],
)
def test_an_error_of_the_network_is_printed_once_with_the_option_that_helps(
    network: str, arguments: list[str], remedy: str, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "helpless.py").write_text(HELPLESS)
    ended = run("activations", f"helpless.py:{network}", *arguments, "--out", "out")
    assert ended.code == 6
    assert ended.stderr.strip().endswith(remedy)
    error = ended.stderr.partition("Error: ")[2][:40]
    assert error
    assert (ended.stdout + ended.stderr).count(error) == 1
