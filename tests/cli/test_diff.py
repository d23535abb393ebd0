"""`hookscope diff` from the outside: what it says, writes and exits with."""

import json
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import fromstring

import numpy as np
import pytest
import torch
from PIL import Image

from tests.cli.conftest import Run, assert_refused, names_below, record_of, table

NETWORKS = """
from collections import OrderedDict
import torch
from torch import nn


def net(scale=1.0, classes=5, channels=3):
    torch.manual_seed(0)
    parts = OrderedDict(
        conv=nn.Conv2d(channels, 4, 3), relu=nn.ReLU(inplace=True), flat=nn.Flatten(), fc=nn.Linear(144, classes)
    )
    network = nn.Sequential(parts)
    with torch.no_grad():
        network.relu.inplace, network.conv.weight[2] = True, network.conv.weight[2] * scale
    return network


def renamed():
    return nn.Sequential(OrderedDict(zip(["a", "b", "c", "d"], net().children())))


def deep():
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict((f"a{place}", nn.Conv2d(3, 3, 1)) for place in range(15)))


def strange():
    return nn.Sequential(OrderedDict(only=nn.Flatten(), last=nn.Linear(192, 5, bias=False)))
"""

INPUT = ("picture.npy",)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path) -> None:
    (tmp_path / "pair.py").write_text(NETWORKS, "utf-8")
    values = np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(np.float32)
    np.save(tmp_path / "picture.npy", values)


def test_the_answer_comes_first_and_files_are_written(run: Run, tmp_path: Path) -> None:
    edit = ("--edit-b", "conv:output:scale(2, channels=2)")
    ended = run("diff", "pair.py:net", "pair.py:net", "picture.npy", *edit, "--out", "o")
    assert ended.code == 0
    text = " ".join(ended.stdout.split())
    assert "First difference in conv (Conv2d): relative L2" in text
    assert "its inputs are equal, mostly in channel 2 of 4" in text
    assert text.index("First difference") < text.index("Output: top-1 unchanged on") < text.index("rel. L2")
    assert "Picture: o/overview.png Same folder: 4 grids of A-B, diff.csv, result.json" in text
    grids = {f"grids/00{at}-{name}.png" for at, name in enumerate(["conv", "relu", "flat", "fc"])}
    plain = {"diff.csv", "result.json", "overview.png", "run.json"}
    assert names_below(tmp_path / "o") == {*plain, "grids", *grids}
    rows = table(tmp_path / "o" / "diff.csv")
    assert [(row["label"], row["matched"]) for row in rows] == [
        (name, "name") for name in ("conv", "relu", "flat", "fc")
    ]
    record = record_of(tmp_path / "o")
    assert float(rows[0]["relative_l2"]) == record["rows"][0]["measures"]["relative_l2"]
    assert record["first_differences"][0]["layer"] == "conv"
    assert (record["verb"], record["way"]) == ("diff", "networks")
    assert (record["overview"], [grid["path"] for grid in record["grids"]]) == ("overview.png", sorted(grids))
    assert all("one scale for all" in grid["caption"] for grid in record["grids"])
    with Image.open(tmp_path / "o" / "overview.png") as picture:
        assert picture.size[0] == 1200


def test_equal_networks_are_said_to_be_equal(run: Run) -> None:
    ended = run("diff", "pair.py:net", "same", "picture.npy", "--fail-over", "rel>0")
    assert ended.code == 0
    assert "A and B are equal in 4 rows." in ended.stdout


def test_the_page_opens_with_the_answer_and_shows_the_grids(run: Run, tmp_path: Path) -> None:
    edit = ("--edit-b", "relu:output:scale(2)")
    assert run("diff", "pair.py:net", "same", "picture.npy", *edit, "--out", "o", "--report", "p.html").code == 0
    page = (tmp_path / "p.html").read_text("utf-8")
    main = page[page.index("<main>") :]
    places = [main.index(text) for text in ('<section id="answer"', '<section id="depth"', '<section id="maps"')]
    assert places == sorted(places)
    assert main.count("<summary><span") == 3
    assert '<span class="name">relu</span> begins here' in main
    record = record_of(tmp_path / "o")
    record["grids"][0]["row"] = 9
    (tmp_path / "o" / "run.json").write_text(json.dumps(record), "utf-8")
    ended = run("report", "o")
    assert ended.code == 3
    assert "is of no row" in ended.stderr


def test_gradients_are_compared_too(run: Run, tmp_path: Path) -> None:
    options = ("--grads", "--loss", "ce", "--target", "2", "--out", "o", "--fail-over", "conv.weight:rel>1e-3")
    ended = run("diff", "pair.py:net", "same", "picture.npy", "--edit-b", "relu:output:scale(2)", *options)
    assert ended.code == 1
    assert "8 of 8 gradients differ" in ended.stdout
    assert "FAIL conv.weight:rel>1e-3: conv.weight grad is beyond" in ended.stdout
    rows = table(tmp_path / "o" / "gradients.csv")
    assert [row["label"] for row in rows][:2] == ["conv grad_output", "relu grad_output"]
    assert len(rows) == 8
    assert_refused(run("diff", "pair.py:net", "same", "picture.npy", "--loss", "ce"), 2, "need --grads")


def test_a_condition_that_holds_fails_the_command_and_is_written_for_ci(run: Run, tmp_path: Path) -> None:
    arguments = ("--model-arg", "scale=1", "--dtype-b", "bfloat16", "--fail-over", "rel>1e-4", "--fail-over", "top1<1")
    ended = run("diff", "pair.py:net", "same", "picture.npy", *arguments, "--junit", "j.xml", "--format", "github")
    assert ended.code == 1
    assert "FAIL rel>1e-4: fc is beyond" in ended.stdout
    assert "::error" in ended.stdout
    tests = {each.get("name"): each for each in fromstring((tmp_path / "j.xml").read_text("utf-8")).iter("testcase")}
    assert tests["rel>1e-4"].find("failure") is not None
    assert tests["top1<1"].find("failure") is None
    ended = run("diff", "pair.py:net", "same", "picture.npy", *arguments, "--format", "markdown", "--quiet")
    assert ended.code == 1
    assert "rel&gt;1e-4" in ended.stdout or "rel>1e-4" in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (("pair.py:net", "pair.py:strange", *INPUT), 5, "no layer of A (pair.py:net, "),
        (("pair.py:net", "same", *INPUT, "--map", "conv"), 2, "as many stars on both sides"),
        (("pair.py:net", "same", *INPUT, "--map", "convv=conv"), 5, "matches no layer of A. Nearest: 'conv'"),
        (("pair.py:net", "same", *INPUT, "--fail-over", "rel=3"), 2, "is no condition"),
        (("pair.py:net", "same", *INPUT, "--shadow", "--mode-b", "train"), 2, "only possible in eval mode"),
        (("pair.py:net", "same", *INPUT, "--device-b", "cuda:77"), 2, "--device-b 'cuda:77'"),
    ],
)
def test_what_cannot_be_is_one_line_and_an_exit_code(
    run: Run, arguments: tuple[str, ...], code: int, line: str
) -> None:
    assert_refused(run("diff", *arguments), code, line)


@pytest.mark.parametrize(
    "sides",
    [
        ("pair.py:net", "kept.pt", "--arch", "pair.py:net", "--weights", "none", "--key", "ema"),
        ("kept.pt", "pair.py:net", "--arch", "pair.py:net", "--weights-b", "none", "--key", "ema"),
        ("pair.py:net", "same", "--weights-b", "kept.pt", "--key", "ema"),
    ],
)
def test_a_network_and_a_weights_file_each_get_the_options_that_fit(
    run: Run, tmp_path: Path, sides: tuple[str, ...]
) -> None:
    networks: dict[str, Any] = {}
    exec(compile(NETWORKS, "pair.py", "exec"), networks)
    weights = networks["net"]().state_dict()
    torch.save({"ema": weights, "last": {name: 2 * value for name, value in weights.items()}}, tmp_path / "kept.pt")
    ended = run("diff", *sides[:2], *INPUT, *sides[2:])
    assert (ended.code, ended.errors) == (0, [])
    assert "A and B are equal in 4 rows." in ended.stdout


@pytest.mark.parametrize(
    ("sides", "line"),
    [
        (("pair.py:net", "kept.pt", "--weights-b", "none"), "--weights-b cannot be used here: B, 'kept.pt'"),
        (("kept.pt", "kept.pt", "--weights", "none"), "--weights cannot be used here: MODEL 'kept.pt'"),
        (("pair.py:net", "pair.py:deep", "--key", "ema"), "MODEL 'pair.py:net' is loaded without one"),
        (("pair.py:net", "pair.py:deep", "--arch", "pair.py:net"), "'pair.py:net' is already a network"),
    ],
)
def test_options_of_weights_that_fit_neither_side_are_refused(
    run: Run, tmp_path: Path, sides: tuple[str, ...], line: str
) -> None:
    torch.save({}, tmp_path / "kept.pt")
    assert_refused(run("diff", *sides[:2], *INPUT, *sides[2:]), 2, line)


def test_inputs_that_cannot_be_read_are_each_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "cut.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (tmp_path / "cut.npy").write_bytes((tmp_path / "picture.npy").read_bytes()[:200])
    ended = run("diff", "pair.py:net", "same", "cut.npy", "cut.png")
    assert ended.code == 3
    first, second = ended.stderr.splitlines()
    assert ("cut.npy" in first, "cut.png" in second) == (True, True)
    assert not (tmp_path / "hookscope-runs").exists()


def test_networks_that_take_other_inputs_or_return_other_outputs_are_told(run: Run, tmp_path: Path) -> None:
    text = NETWORKS.replace("classes=5", "classes=7")
    (tmp_path / "seven.py").write_text(text, "utf-8")
    message = "A (pair.py:net) returns (2, 5); B (seven.py:net) returns (2, 7)"
    assert_refused(run("diff", "pair.py:net", "seven.py:net", "picture.npy"), 2, message)
    (tmp_path / "grey.py").write_text(NETWORKS.replace("channels=3", "channels=1"), "utf-8")
    message = "picture.npy[0], picture.npy[1]: B (grey.py:net) raised in its forward pass at conv"
    assert_refused(run("diff", "pair.py:net", "grey.py:net", "picture.npy"), 6, message)


def test_both_networks_are_in_the_name_and_no_run_of_another_command_is_replaced(command: Run, tmp_path: Path) -> None:
    (tmp_path / "pics.v2").mkdir()
    np.save(tmp_path / "pics.v2" / "one.npy", np.ones((3, 8, 8), np.float32))
    scaled = ("--model-arg", "scale=2.0")
    for arguments in (
        ("pair.py:net", "pair.py:net", "pics.v2"),
        ("pair.py:net", "pair.py:renamed", "pics.v2"),
        ("pair.py:net", "pair.py:net", "pics.v2", "--full"),
        ("pair.py:net", "pair.py:net", "pics.v2"),
        ("pair.py:net", "same", "picture.npy"),
        ("pair.py:net", "same", "picture.npy", *scaled),
    ):
        assert command("diff", *arguments, cwd=tmp_path).code == 0
    assert sorted(path.name for path in (tmp_path / "hookscope-runs").iterdir()) == [
        "diff-pair.py-net-pair.py-net-pics.v2",
        "diff-pair.py-net-pair.py-net-pics.v2-2",
        "diff-pair.py-net-pair.py-renamed-pics.v2",
        "diff-pair.py-net-same-picture",
        "diff-pair.py-net-same-picture-2",
        "latest",
    ]
