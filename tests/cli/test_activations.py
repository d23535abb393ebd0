import hashlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
import torchvision
from matplotlib import colormaps
from PIL import Image
from torch import nn

from hookscope.results.runs.reading import read_run
from tests.cli.conftest import (
    CAT,
    SAMPLES,
    Ended,
    Run,
    assert_refused,
    names_below,
    record_of,
    rows_of,
    statistics_of,
    without_arrays,
)
from tests.models.hostile import PAYLOADS, torch_bytes
from tests.networks import outputs_of
from tests.reporting.stored import report_html

TABLES = {"run.json", "overview.png", "layers.csv", "result.json", "arrays.safetensors"}
OF_ONE_PICTURE = TABLES | {"inputs", "inputs/000.png"}


def assert_statistics(row: dict[str, Any], expected: dict[str, float], relative: float = 1e-5) -> None:
    measured = {name: row["activation"][name] for name in expected}
    assert measured == pytest.approx(expected, rel=relative, abs=1e-6)


def tiny_input(path: Path) -> torch.Tensor:
    """Prepare a picture of 64 x 64 without resizing: (1, 3, 64, 64)."""
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB"), dtype=np.float32) / 255
    return torch.from_numpy(pixels).permute(2, 0, 1)[None].contiguous()


AS_THEY_ARE = ("--resize", "none", "--crop", "none", "--mean", "none", "--std", "none")


# --- The main job ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def resnet18_run(command: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Ended, Path]:
    """The README's command for a network without trained weights at hand, and the run it has written."""
    folder = tmp_path_factory.mktemp("resnet18")
    ended = command("activations", "resnet18", CAT, "--layer", "conv", cwd=folder)
    return ended, folder / "hookscope-runs" / "activations-resnet18-cat"


def test_a_run_holds_a_grid_per_convolution_the_tables_and_the_record(resnet18_run: tuple[Ended, Path]) -> None:
    _, run_path = resnet18_run
    rows = rows_of(run_path)
    grids = {f"grids/{row['index']:03d}-{row['layer']}.png" for row in rows}
    assert len(grids) == 20
    assert names_below(run_path) == OF_ONE_PICTURE | grids | {"grids"}
    for name in grids:
        with Image.open(run_path / name) as picture:
            picture.load()
            assert min(picture.size) > 300
    assert names_below(run_path.parent.parent) == {
        "hookscope-runs",
        "hookscope-runs/latest",
        "hookscope-runs/activations-resnet18-cat",
        *(f"hookscope-runs/activations-resnet18-cat/{name}" for name in names_below(run_path)),
    }


def test_random_weights_are_told_on_stderr_in_the_record_and_in_the_title(resnet18_run: tuple[Ended, Path]) -> None:
    ended, run_path = resnet18_run
    record = record_of(run_path)
    assert "RANDOM (seed 0)" in ended.stderr
    assert "RANDOM WEIGHTS" in "".join(ended.stdout.splitlines()[:6])  # below the answer and the title
    assert any("RANDOM (seed 0)" in warning for warning in record["warnings"])
    assert record["model"]["weights"] == "random, seed 0"
    assert record["model"]["random"] is True


def test_the_record_says_what_ran_on_what_and_how(resnet18_run: tuple[Ended, Path]) -> None:
    record = record_of(resnet18_run[1])
    assert record["schema_version"] == 3
    assert record["verb"] == "activations"
    assert record["command"] == f"hookscope activations resnet18 {CAT} --layer conv"
    assert record["versions"]["torch"] == torch.__version__.split("+")[0]
    assert record["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert (record["seed"], record["device"], record["dtype"]) == (0, "cpu", "float32")
    assert record["patterns"] == ["conv"]
    assert set(record["timings"]) == {"load", "forward"}
    assert min(record["timings"].values()) > 0
    [picture] = record["inputs"]
    assert picture["sha256"] == hashlib.sha256(CAT.read_bytes()).hexdigest()
    assert picture["shape"] == [3, 224, 224]
    assert picture["size"] == [451, 300]
    assert any("resized from 300x451 to 256x384" in step for step in picture["steps"])
    assert any("centre crop 224x224" in step for step in picture["steps"])
    assert sorted(record["files"]) == sorted(
        [
            *(grid["path"] for grid in record["grids"]),
            *record["thumbnails"],
            "overview.png",
            "layers.csv",
            "result.json",
            "arrays.safetensors",
        ]
    )


def test_named_weights_without_a_network_fail_in_time_and_leave_nothing(command: Run, tmp_path: Path) -> None:
    began = time.monotonic()
    ended = command("activations", "resnet34", CAT, "--weights", "IMAGENET1K_V1", cwd=tmp_path)
    assert time.monotonic() - began < 60  # a slow machine imports for long; waiting for a server takes 11 s at most
    assert_refused(ended, 3, "resnet34-b627a593.pth cannot be downloaded")
    assert names_below(tmp_path) == set()


# --- Which network ---------------------------------------------------------------------------------------------------


def tiny_network(width: int = 4) -> nn.Sequential:
    """Build the small network of `net.py`, without its in-place layer, and with weights that no seed gives."""
    network = nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU(), nn.Conv2d(width, 2 * width, 3, stride=2), nn.ReLU())
    generator = torch.Generator().manual_seed(77)
    for parameter in network.parameters():
        parameter.data.uniform_(-0.3, 0.4, generator=generator)
    return network


@pytest.mark.parametrize(
    ("suffix", "as_weights"), [(".safetensors", False), (".pt", True)], ids=["with --arch", "with --weights"]
)
def test_a_state_dict_runs_in_its_architecture(
    run: Run, tmp_path: Path, pictures: list[Path], suffix: str, as_weights: bool
) -> None:
    network = tiny_network()
    path = tmp_path / f"weights{suffix}"
    if suffix == ".safetensors":
        safetensors.torch.save_file(network.state_dict(), path)
    else:
        torch.save(network.state_dict(), path)
    model = ("net.py:tiny", "--weights", path) if as_weights else (path, "--arch", "net.py:tiny")
    ended = run("activations", model[0], pictures[0], *model[1:], *AS_THEY_ARE, "--out", "out", "--no-grids")
    outputs = outputs_of(network, tiny_input(pictures[0]))
    assert ended.code == 0
    for row in rows_of(tmp_path / "out"):
        assert_statistics(row, statistics_of(outputs[row["layer"]].numpy(), 1))
    assert record_of(tmp_path / "out")["model"]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_recognised_checkpoint_is_good_news_and_no_warning(run: Run, tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        state = torchvision.models.mnasnet0_5().state_dict()
    torch.save(
        {"state_dict": {f"module.{name}": tensor for name, tensor in state.items()}, "epoch": 3}, tmp_path / "m.pt"
    )
    options = ("--layer", "@0", "--resize", "64", "--crop", "64", "--out", "out")
    ended = run("activations", "m.pt", CAT, *options)
    assert ended.code == 0
    assert ended.stderr == ""
    notes = record_of(tmp_path / "out")["notes"]
    assert [note.split(":")[0] for note in notes] == ["m.pt"] * 4
    shown = " ".join(ended.stdout.split())
    message = ("recognised as mnasnet0_5", "its key 'state_dict'", "'module.'", "takes ImageNet's class names")
    for note, about in zip(notes, message, strict=True):
        assert about in note
        assert shown.count(f"note: {note}") == 1
    assert record_of(tmp_path / "out")["warnings"] == []
    assert run("activations", "m.pt", CAT, *options, "--quiet").stdout == ""
    assert "recognised as mnasnet0_5" in report_html(read_run(tmp_path / "out"))


# --- Which inputs ----------------------------------------------------------------------------------------------------


def test_grids_are_drawn_for_the_first_pictures_only(run: Run, tmp_path: Path, pictures: list[Path]) -> None:
    options = ("--batch-size", 2, "--grids-for", 3, "--out", "out", "--layer", "type:conv")
    ended = run("activations", "net.py:tiny", pictures[0].parent, *AS_THEY_ARE, *options)
    expected = {f"grids/00{row}-{layer}-input{number}.png" for row, layer in ((0, 0), (1, 2)) for number in range(3)}
    inputs = {"inputs", *(f"inputs/{number:03d}.png" for number in range(5))}
    assert names_below(tmp_path / "out") == TABLES | inputs | {"grids"} | expected
    message = "Same folder: 6 grids for the first 3 of 5 inputs (--grids-for), layers.csv"
    assert ended.stdout.splitlines()[-1].startswith(message)
    assert len({(tmp_path / "out" / name).read_bytes() for name in expected}) == 6


# --- What is shown ---------------------------------------------------------------------------------------------------


def test_with_json_stdout_is_one_document_and_tables_go_to_stderr(run: Run, tmp_path: Path) -> None:
    ended = run("activations", "net.py:Talks", CAT, "--json", "--out", "out")
    document = json.loads(ended.stdout)
    assert ended.code == 0
    assert document["run"] == "out"
    assert document["rows"] == without_arrays(rows_of(tmp_path / "out"))
    assert "Conv2d" in ended.stderr
    assert "Picture: out/overview.png\n" in ended.stderr


def test_quiet_prints_warnings_only(run: Run, tmp_path: Path) -> None:
    silent = run("activations", "net.py:tiny", CAT, "--quiet", "--out", "out")
    warned = run("activations", "mnasnet0_5", CAT, "--layer", "@0", "--quiet", "--out", "out")
    both = run("activations", "net.py:tiny", CAT, "--quiet", "--json", "--out", "out")
    assert (silent.code, silent.stdout, silent.stderr) == (0, "", "")
    assert (warned.code, warned.stdout) == (0, "")
    assert "RANDOM" in warned.stderr
    assert "Conv2d" not in warned.stderr
    assert json.loads(both.stdout)["rows"]
    assert both.stderr == ""
    assert (tmp_path / "out" / "run.json").exists()


def test_a_long_table_is_folded_unless_full(run: Run) -> None:
    options = ("activations", "net.py:long", CAT, "--resize", "16", "--crop", "16", "--no-grids")
    folded, full = run(*options), run(*options, "--full")

    def shown(ended: Ended) -> list[str]:
        return [line.split()[0] for line in ended.stdout.splitlines() if re.match(r" *\d+ +\d+ +Conv2d", line)]

    assert shown(full) == [str(number) for number in range(70)]
    assert shown(folded) == [str(number) for number in [*range(20), *range(50, 70)]]
    assert "30 rows not shown" in " ".join(folded.stdout.split())
    assert "not shown" not in full.stdout


# --- What is drawn and written ---------------------------------------------------------------------------------------


def first_grid(run: Run, folder: Path, *options: object) -> Image.Image:
    """Draw the first convolution of the small network over the cat; return its grid."""
    ended = run("activations", "net.py:tiny", CAT, "--model-arg", "width=40", "--layer", "@0", "--out", "out", *options)
    assert ended.code == 0
    [grid] = (folder / "out" / "grids").iterdir()
    with Image.open(grid) as picture:
        return picture.convert("RGB")


def colours(picture: Image.Image) -> set[tuple[int, ...]]:
    counted = picture.getcolors(picture.width * picture.height) or []
    return {colour for _, colour in counted if isinstance(colour, tuple)}


def test_max_channels_makes_a_smaller_picture_of_the_same_statistics(run: Run, tmp_path: Path) -> None:
    whole = first_grid(run, tmp_path)
    rows = rows_of(tmp_path / "out")
    part = first_grid(run, tmp_path, "--max-channels", 4)
    assert part.size[0] < whole.size[0]
    assert part.size[1] < whole.size[1]
    assert rows_of(tmp_path / "out") == rows


def test_the_colour_map_is_the_one_asked_for(run: Run, tmp_path: Path) -> None:
    viridis = set(map(tuple, colormaps["viridis"](np.arange(256), bytes=True)[:, :3].tolist()))
    assert len(colours(first_grid(run, tmp_path, "--cmap", "viridis")) & viridis) > 200
    assert len(colours(first_grid(run, tmp_path)) & viridis) < 20


def test_saved_tensors_equal_a_plain_capture_bit_for_bit(run: Run, tmp_path: Path, pictures: list[Path]) -> None:
    network = tiny_network()
    torch.save(network.state_dict(), tmp_path / "weights.pt")
    options = (*AS_THEY_ARE, "--arch", "net.py:tiny", "--save-tensors", "--out", "out", "--batch-size", 1)
    ended = run("activations", "weights.pt", *pictures, *options)
    saved = safetensors.torch.load_file(tmp_path / "out" / "activations.safetensors")
    single = [outputs_of(network, tiny_input(path)) for path in pictures]
    assert ended.code == 0
    assert set(saved) == {"0", "1", "2", "3"}
    for layer, tensor in saved.items():
        assert torch.equal(tensor, torch.cat([outputs[layer] for outputs in single]))
    assert saved["0"].min() < 0  # as the convolution gave it, before the ReLU that follows works in place


def test_names_are_never_read_as_markup(run: Run, tmp_path: Path, pictures: list[Path]) -> None:
    odd = pictures[0].rename(tmp_path / "[bold]a :cat:.png")
    ended = run("activations", "net.py:tiny", odd, "--out", "[red]b :dog:", "--no-grids")
    assert "[bold]a :cat:.png" in ended.stdout
    assert ended.stdout.splitlines()[-2] == "Picture: [red]b :dog:/overview.png"


def test_equal_seeds_give_equal_files_and_other_seeds_other_weights(run: Run, tmp_path: Path) -> None:
    layers = {}
    for name, seed in (("first", 5), ("again", 5), ("other", 6)):
        run("activations", "net.py:tiny", CAT, "--seed", seed, "--out", name)
        layers[name] = rows_of(tmp_path / name), (tmp_path / name / "arrays.safetensors").read_bytes()
    assert layers["first"] == layers["again"]
    assert layers["first"] != layers["other"]
    assert record_of(tmp_path / "first")["seed"] == 5


def test_the_network_runs_in_the_dtype_asked_for(run: Run, tmp_path: Path) -> None:
    run("activations", "net.py:tiny", CAT, "--out", "float32", "--no-grids", "--device", "cpu")
    assert run("activations", "net.py:tiny", CAT, "--dtype", "bfloat16", "--out", "halves").code == 0
    assert record_of(tmp_path / "halves")["dtype"] == "bfloat16"
    for row, reference in zip(rows_of(tmp_path / "halves"), rows_of(tmp_path / "float32"), strict=True):
        assert row["activation"]["dtype"] == "bfloat16"
        assert row["activation"]["std"] == pytest.approx(reference["activation"]["std"], rel=0.05)


# --- What cannot be --------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, networks: Path) -> Path:
    """A folder with the networks in it, for a process to run in."""
    (tmp_path / "net.py").write_bytes(networks.read_bytes())
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("demo", CAT, "--layer", "_conv_stm"), 5, ["'_conv_stm'", "Nearest", "'_conv_stem'"]),
        (("net.py:tiny", CAT, "--layer", "@4"), 5, ["'@4'", "positions go from -4 to 3"]),
        (("net.py:tiny", CAT, "--device", "cuda:9"), 2, ["'cuda:9'", "CUDA devices"]),
        (("net.py:tiny", CAT, "--device", "toaster"), 2, ["'toaster'"]),
        (("net.py:tiny", CAT, "--device", "meta"), 2, ["'meta'"]),
        (("net.py:tiny", CAT, "--out", "mine"), 3, ["mine", "not a hookscope run"]),
        (("net.py:tiny", CAT, "--batch-size", "many"), 2, ["--batch-size"]),
        (("net.py:tiny", CAT, "--seed", "-1"), 2, ["--seed"]),
        (("net.py:tiny", CAT, "--scale", "huge"), 2, ["--scale", "'layer'"]),
        (("net.py:tiny", CAT, "--dtype", "int8"), 2, ["--dtype", "'bfloat16'"]),
        (("net.py:tiny", CAT, "--cmap", "virids"), 2, ["'virids'", "'viridis'"]),
        (("net.py:tiny", CAT, "--resize", "huge"), 2, ["--resize", "'huge'"]),
        (("net.py:tiny",), 2, ["IMAGE"]),
    ],
    ids=lambda value: " ".join(map(str, value)).replace(f"{SAMPLES}/", "") if isinstance(value, tuple) else None,
)
def test_what_cannot_be_is_one_line_and_leaves_nothing(
    run: Run, tmp_path: Path, arguments: tuple[object, ...], code: int, words: list[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work", encoding="utf-8")
    before = names_below(tmp_path)
    ended = run("activations", *arguments)
    assert_refused(ended, code, *words)
    assert len(ended.stderr) < 600
    assert names_below(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("net.py:tiny", CAT, "--max-channels", "0"), 2),
        (("net.py:tiny", "missing.jpg"), 3),
        (("module.pt", CAT, "--arch", "net.py:tiny"), 4),
        (("net.py:tiny", "nothing/*.jpg"), 5),
        (("net.py:raises_when_built", CAT), 6),
    ],
    ids=["2", "3", "4", "5", "6"],
)
def test_the_exit_code_reaches_the_shell(command: Run, folder: Path, arguments: tuple[object, ...], code: int) -> None:
    (folder / "module.pt").write_bytes(torch_bytes({"w": PAYLOADS["os.system"](folder / "canary")}))
    before = names_below(folder)
    assert_refused(command("activations", *arguments, cwd=folder), code)
    assert names_below(folder) == before


def test_a_network_that_raises_shows_the_rows_up_to_there_and_where(command: Run, folder: Path) -> None:
    ended = command("activations", "net.py:raises_in_20th_layer", CAT, "--resize", "32", "--crop", "32", cwd=folder)
    shown = [line.split()[0] for line in ended.stdout.splitlines() if re.match(r" *\d+ +\d+ +Conv2d", line)]
    assert ended.code == 6
    assert shown == [str(number) for number in range(19)]
    assert "Without a row: 1 selected layer" in ended.stdout
    assert "run.json" not in ended.stdout
    [error] = ended.errors
    assert "at 19 (Raises), given an input of shape (1, 3, 32, 32): ValueError: no such luck" in error
    assert "Traceback" not in ended.stderr
    assert names_below(folder) == {"net.py"}


def test_a_network_that_raises_is_told_in_the_json_too(run: Run, tmp_path: Path) -> None:
    ended = run("activations", "net.py:raises_in_20th_layer", CAT, "--json", "--save-tensors")
    document = json.loads(ended.stdout)
    assert ended.code == 6
    assert document["run"] is None
    assert document["failure"]["layer"] == "19"
    assert document["failure"]["error"] == "ValueError: no such luck"
    assert len(document["rows"]) == 19
    assert names_below(tmp_path) == {"net.py"}


def test_of_several_failures_the_most_severe_decides(run: Run) -> None:
    ended = run("activations", "net.py:raises_in_20th_layer", CAT, "missing.jpg", "--batch-size", 1)
    assert ended.code == 3
    assert len(ended.errors) == 2
    assert "cat.jpg: net.py:raises_in_20th_layer raised in its forward pass" in ended.errors[0]
    ended = run("activations", "net.py:raises_in_20th_layer", "missing.jpg", CAT)
    assert ended.code == 3
    assert len(ended.errors) == 2
    assert run("activations", "net.py:raises_in_20th_layer", CAT).code == 6


# --- Streams, signals, full disks ------------------------------------------------------------------------------------


def test_a_full_disk_under_the_run_leaves_nothing(command: Run, folder: Path) -> None:
    options = ("--no-grids", "--save-tensors")
    largest = 40_000  # each tensor has more
    ended = command("activations", "net.py:tiny", CAT, *options, "--out", "out", cwd=folder, largest_file=largest)
    assert (ended.code, len(ended.errors), len(ended.stderr.splitlines())) == (3, 1, 1)  # the table stays
    assert names_below(folder) == {"net.py"}


@contextmanager
def asleep(factory: str, folder: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Start a command whose network goes to sleep, and wait until it has."""
    arguments = [sys.executable, "-m", "hookscope", "activations", f"net.py:{factory}", str(CAT), "--out", "out"]
    with subprocess.Popen(arguments, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr.readline() == "asleep\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("factory", "number", "code"),
    [("sleeps_in_forward", signal.SIGINT, 130), ("sleeps_when_built", signal.SIGTERM, 143)],
)
@pytest.mark.exhaustive
def test_a_signal_ends_it_at_once_and_leaves_nothing(
    folder: Path, environment: dict[str, str], factory: str, number: signal.Signals, code: int
) -> None:
    with asleep(factory, folder, environment) as process:
        process.send_signal(number)
        _, rest = process.communicate(timeout=20)
    assert process.returncode == code
    assert rest == ""
    assert names_below(folder) == {"net.py"}
