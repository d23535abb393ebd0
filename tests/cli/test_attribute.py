"""`hookscope attribute` from the outside: what it finds, prints and leaves on the disk."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps

import hookscope
from hookscope.results.runs.reading import read_run
from tests.cli.conftest import CAT, Ended, Run, assert_refused, names_below, record_of

# The answer depends on what is not nearly black, and on nothing else: its weights are set by hand.
PAINTED = """
import torch
from torch import nn


def painted():
    network = nn.Sequential(
        nn.Conv2d(3, 1, 4, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1, 2)
    )
    with torch.no_grad():
        network[0].weight.fill_(1 / 48)
        network[0].bias.fill_(-0.1)
        network[4].weight.copy_(torch.tensor([[1.0], [0.5]]))
        network[4].bias.zero_()
    return network


def blind():
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 24 * 24, 2))
"""

# What puts an upright picture into the state from which EXIF's orientation puts it upright again.
STORED = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}

PIXELS = ("--mean", "none", "--std", "none")
AS_THEY_ARE = (*PIXELS, "--sanity", "none", "--layer", "1")


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("painted") / "net.py"
    path.write_text(PAINTED, encoding="utf-8")
    return path


def paint(path: Path, size: tuple[int, int], box: tuple[int, int, int, int], orientation: int = 1) -> NDArray[np.uint8]:
    """Write a dark picture with a white box (top, left, bottom, right), and return it upright; so are size and box."""
    grey = np.random.default_rng(0).integers(0, 20, size, np.uint8)
    upright = np.repeat(grey[:, :, None], 3, axis=2)
    upright[box[0] : box[2], box[1] : box[3]] = 255
    turn = STORED[orientation]
    stored = Image.fromarray(upright) if turn is None else Image.fromarray(upright).transpose(turn)
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(path, exif=exif)
    with Image.open(path) as picture:
        assert np.array_equal(np.asarray(ImageOps.exif_transpose(picture)), upright)
    return upright


def tinted(path: Path) -> NDArray[np.float64]:
    """Return how coloured each pixel of an overlay is, on a grey picture: 0 where no map lies."""
    pixels = np.asarray(Image.open(path)).astype(float)
    return np.ptp(pixels, axis=2)


@pytest.fixture
def overlay(command: Run, tmp_path: Path, network: Path) -> Callable[..., NDArray[np.float64]]:
    """Look at a.png with the painted network, into `out`; return the colours of the overlay."""

    def overlay_of(*options: str) -> NDArray[np.float64]:
        arguments = ("attribute", f"{network}:painted", "a.png", "--target", "0", *options, "--out", "out")
        ended = command(*arguments, cwd=tmp_path)
        assert (ended.code, ended.stderr) == (0, "")
        (path,) = (tmp_path / "out" / "overlays").iterdir()
        return tinted(path)

    return overlay_of


def middle_of(weights: NDArray[np.float64]) -> tuple[float, float]:
    """Return the centre of mass, in pixels from the upper left corner."""
    y, x = np.mgrid[: weights.shape[0], : weights.shape[1]] + 0.5
    return float((weights * y).sum() / weights.sum()), float((weights * x).sum() / weights.sum())


@pytest.mark.parametrize("orientation", [1, 6, 7])
@pytest.mark.sample("1", "6")
def test_a_painted_square_is_found_where_it_was_painted(
    overlay: Callable[..., NDArray[np.float64]], tmp_path: Path, orientation: int
) -> None:
    upright = paint(tmp_path / "a.png", (171, 233), (40, 90, 90, 130), orientation)
    colour = overlay("--resize", "96", "--crop", "80", *AS_THEY_ARE)
    assert colour.shape == upright.shape[:2]
    cell = 4 * 171 / 96  # pixels of the photograph
    assert middle_of(colour) == pytest.approx((65, 110), abs=0.3 * cell)
    rows, columns = np.nonzero(colour > colour.max() / 2)
    assert (rows.min(), columns.min()) == pytest.approx((40, 90), abs=cell)
    assert (rows.max() + 1, columns.max() + 1) == pytest.approx((90, 130), abs=cell)
    half = record_of(tmp_path / "out")["halves"][0]["region"]
    assert half["top"] > 40 - cell
    assert half["bottom"] < 90 + cell
    assert half["left"] > 90 - cell
    assert half["right"] < 130 + cell


def test_a_method_on_the_picture_itself_finds_it_too(
    overlay: Callable[..., NDArray[np.float64]], tmp_path: Path
) -> None:
    paint(tmp_path / "a.png", (171, 233), (40, 90, 90, 130), orientation=6)
    options = ("--resize", "96", "--crop", "80", *PIXELS, "--sanity", "none")
    colour = overlay("--method", "input-x-gradient", *options)
    rows, columns = np.nonzero(colour > colour.max() / 2)
    actual = (rows.min(), columns.min(), rows.max() + 1, columns.max() + 1)
    assert actual == pytest.approx((40, 90, 90, 130), abs=2 * 171 / 96)  # two pixels of the network's input
    assert read_run(tmp_path / "out").result.maps[0].pixels.shape[0] == 3, "the values of every channel too"


@pytest.mark.parametrize(
    ("size", "box", "options"),
    [
        ((61, 75), (20, 30, 44, 58), ("--resize", "none", "--crop", "100")),  # padded on all sides
        ((300, 61), (140, 20, 170, 44), ("--resize", "50x40", "--crop", "none")),  # squeezed along one axis
        ((103, 97), (40, 32, 64, 60), ("--resize", "none", "--crop", "none")),  # odd, as it is
    ],
)
@pytest.mark.sample("size0-box0-options0", "size2-box2-options2")
def test_padding_and_odd_sizes_move_nothing(
    overlay: Callable[..., NDArray[np.float64]],
    tmp_path: Path,
    size: tuple[int, int],
    box: tuple[int, int, int, int],
    options: tuple[str, ...],
) -> None:
    paint(tmp_path / "a.png", size, box)
    actual = middle_of(overlay(*options, *AS_THEY_ARE))
    seen = record_of(tmp_path / "out")["inputs"][0]
    region, (height, width) = seen["region"], seen["shape"][1:]
    cells = (4 * (region["bottom"] - region["top"]) / height, 4 * (region["right"] - region["left"]) / width)
    middle = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
    assert abs(actual[0] - middle[0]) < 0.5 * cells[0]
    assert abs(actual[1] - middle[1]) < 0.5 * cells[1]


@pytest.fixture(scope="module")
def demo(command: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Ended, Path]:
    folder = tmp_path_factory.mktemp("demo")
    ended = command("attribute", "demo", CAT, "--top", "2", "--sanity", "none", cwd=folder)
    return ended, folder / "hookscope-runs" / "attribute-demo-cat"


def test_the_terminal_has_a_finding_a_table_and_the_pictures_path(demo: tuple[Ended, Path]) -> None:
    ended, _ = demo
    assert (ended.code, ended.stderr) == (0, "")
    text = " ".join(ended.stdout.split())
    assert "cat.jpg, Egyptian cat (softmax 0.39): half of the grad-cam heat is in" in text
    assert "Egyptian cat 9.060 0.39 _swish#1 7x7" in text
    assert "_swish#1 (ReLU6, 7x7): last spatial output" in text
    assert ended.stdout.splitlines()[-2:] == [
        "Picture: hookscope-runs/attribute-demo-cat/overview.png",
        "Same folder: 2 overlays, result.json, arrays.safetensors, run.json",
    ]


def test_the_run_directory_holds_overview_overlays_and_raw_maps(demo: tuple[Ended, Path]) -> None:
    _, run = demo
    maps = {f"000-{name}-_swish-1" for name in ("Egyptian-cat", "tiger-cat")}
    files = {f"overlays/{name}.png" for name in maps}
    files |= {"overview.png", "result.json", "arrays.safetensors", "inputs/000.jpg"}
    assert names_below(run) == {*files, "run.json", "overlays", "inputs"}
    assert set(record_of(run)["files"]) == files
    with Image.open(run / "overview.png") as overview:
        assert overview.width == 1200
    with Image.open(run / "overlays/000-tiger-cat-_swish-1.png") as drawn:
        assert drawn.size == (451, 300)


def test_the_maps_on_the_disk_are_those_of_python(demo: tuple[Ended, Path]) -> None:
    stored = read_run(demo[1])
    result = hookscope.attribute("demo", CAT, top=2, sanity="none")
    assert [heat_map.target.label for heat_map in stored.result.maps] == ["Egyptian cat", "tiger cat"]
    for ours, theirs in zip(result.maps, stored.result.maps, strict=True):
        np.testing.assert_allclose(theirs.values, ours.values, rtol=1e-4, atol=1e-6)
        assert (theirs.layer, theirs.extent) == (ours.layer, ours.extent)
    assert stored.result.inputs == result.inputs
    assert stored.result.layers == result.layers
    assert stored.record.verb == "attribute"


@pytest.mark.exhaustive
def test_several_inputs_have_an_overview_each(command: Run, tmp_path: Path, network: Path) -> None:
    for number in range(3):
        paint(tmp_path / f"{number}.png", (40 + number, 40), (8, 8, 20, 20))
    np.save(tmp_path / "3.npy", torch.rand(3, 24, 24).numpy())
    (tmp_path / "4.png").write_bytes(b"no picture")
    ended = command(
        *("attribute", f"{network}:painted", ".", "--resize", "24", "--crop", "24", *AS_THEY_ARE),
        *("--target", "0", "--out", tmp_path.parent / "several"),
        cwd=tmp_path,
    )
    assert ended.code == 3
    assert "4.png" in ended.errors[0]
    record = record_of(tmp_path.parent / "several")
    overviews = [picture["overview"] for picture in record["pictures"]]
    assert overviews == ["overview.png", "overview-001.png", "overview-002.png", "overview-003.png"]
    assert record["pictures"][3]["region"] == {
        "top": 0,
        "left": 0,
        "bottom": 24,
        "right": 24,
        "height": 24,
        "width": 24,
    }
    assert [len(record["inputs"]), len(record["unusable_inputs"])] == [4, 1]


@pytest.mark.parametrize(("value", "code"), [(0.5, 0), (float("nan"), 1)])
def test_with_strict_a_map_of_nan_is_a_problem(
    command: Run, tmp_path: Path, network: Path, value: float, code: int
) -> None:
    np.save(tmp_path / "a.npy", np.full((1, 3, 64, 64), value, np.float32))
    ended = command("attribute", f"{network}:painted", "a.npy", *AS_THEY_ARE, "--strict", "--out", "out", cwd=tmp_path)
    assert ended.code == code, ended.stderr


def test_checks_have_a_row_and_a_failed_one_a_warning(command: Run, tmp_path: Path, network: Path) -> None:
    paint(tmp_path / "a.png", (64, 64), (8, 8, 30, 24))
    arguments = ("--target", "0", "--resize", "none", "--crop", "none", *PIXELS, "--layer", "1")
    ended = command("attribute", f"{network}:painted", "a.png", *arguments, "--out", "out", cwd=tmp_path, columns=200)
    assert ended.code == 0
    number = r"-?\d\.\d\d"
    text = " ".join(ended.stdout.split())
    assert re.search(
        rf" weights shuffled rank correlation {number} limit .* With .* class \S+ rank correlation 1.00 .* failed ",
        text,
    ), text
    number = r"\d\.\d+"
    deletion = rf"deletion probability {number} → {number} random places {number} .*lurr.* (ok|failed|inconclusive) "
    assert re.search(deletion, text), text
    # Both classes read the one map, so that it cannot tell them apart.
    assert ended.stderr.count("'class'") == 1
    assert [check["name"] for check in record_of(tmp_path / "out")["sanity"]] == ["weights", "class", "deletion"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("net.py:painted",), 2, "Missing IMAGE"),
        (("net.py:painted", "a.png", "--method", "grad-cam+"), 2, "There is no method 'grad-cam+'. Nearest: 'grad-cam"),
        (("net.py:painted", "a.png", "--target", "7", *AS_THEY_ARE), 2, "7"),
        (("net.py:painted", "a.png", "--layer", "nowhere", "--target", "0"), 5, "nowhere"),
        (("net.py:blind", "a.png", "--target", "0", "--resize", "24", "--crop", "24"), 2, "--method gradient"),
        (("net.py:painted", "a.png", "--show", "--json", "--out", "a.png"), 3, "it exists and is not a folder"),
    ],
)
@pytest.mark.sample(
    "arguments0-2-Missing IMAGE",
    "arguments2-2-7",
    "arguments4-2---method gradient",
    "arguments5-3-it exists and is not a folder",
)
def test_bad_input_gets_one_line_and_an_exit_code(
    command: Run, tmp_path: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    (tmp_path / "net.py").write_text(PAINTED, encoding="utf-8")
    paint(tmp_path / "a.png", (40, 40), (8, 8, 20, 20))
    assert_refused(command("attribute", *arguments, cwd=tmp_path), code, said)
    assert not (tmp_path / "hookscope-runs").exists()
