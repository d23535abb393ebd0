import json
import os
import re
import select
import struct
import subprocess
import sys
import termios
from fcntl import ioctl
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hookscope.reporting.grids import draw_grid
from hookscope.results.activations import FeatureMaps
from tests.cli.conftest import CAT, Run, assert_refused, record_of, rows_of
from tests.fork_server import ForkServer
from tests.reporting.test_tensorboard import read

LARGEST_FILE = 600_000
SCORES = "return nn.Sequential(*tiny(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))"

NOTHING_SHOWN = "--show shows nothing here: it needs a terminal with colours on stdin and stdout, and no --json."

# In the terminal

SHOW = """
import sys
from pathlib import Path
from hookscope.cli.console import consoles
from hookscope.cli.exporters import show_picture

show_picture(Path(sys.argv[1]), *consoles(json=False), json=False)
"""


def on_a_terminal(
    arguments: list[str],
    *,
    answers: str,
    size: tuple[int, int] = (50, 120),
    pixels: int = 8,
    own: bool = True,
    **variables: str,
) -> str:
    """Run Python on a terminal of our own; return everything that was written to it.

    Args:
        arguments: For Python.
        answers: What the terminal says it can draw: "sixel", "kitty", "nothing"; "" for one that does not answer.
        size: Rows and columns.
        pixels: Width of a cell; a cell is twice as high. 0 for a terminal that does not tell.
        own: Whether the terminal is the one that the process is controlled from.
        variables: Of the environment, besides those of a usual terminal.
    """
    ours, theirs = os.openpty()
    rows, columns = size
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, columns * pixels, 2 * rows * pixels))
    kept = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES", "NO_COLOR"}}
    running = subprocess.Popen(
        [sys.executable, *arguments],
        env=kept | {"TERM": "xterm-256color", "COLORTERM": "truecolor"} | variables,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        # The first terminal that a new session opens becomes the one that controls it.
        preexec_fn=(lambda: os.close(os.open(os.ttyname(theirs), os.O_RDWR))) if own else None,  # noqa: PLW1509
    )
    os.close(theirs)
    written, answered = b"", 0
    while True:
        if not select.select([ours], [], [], 60)[0]:
            running.kill()
        try:
            part = os.read(ours, 65536)
        except OSError:  # how Linux says that the other side is closed
            break
        if not part:
            break
        written += part
        for asked in re.finditer(rb"\x1b\[c|\x1b_G[^\x1b]*i=(\d+)[^\x1b]*a=q[^\x1b]*\x1b\\", written):
            if asked.end() > answered and answers:
                answered = asked.end()
                if asked.group() == b"\x1b[c":
                    os.write(ours, b"\x1b[?62;4;22c" if answers == "sixel" else b"\x1b[?62;22c")
                elif answers == "kitty":
                    os.write(ours, b"\x1b_Gi=" + asked.group(1) + b";OK\x1b\\")
    os.close(ours)
    text = written.decode()
    assert running.wait() == 0, text
    return text


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    values = np.random.default_rng(4).normal(size=(4, 8, 8)).astype(np.float32)
    draw_grid(FeatureMaps(0, "conv", "Conv2d", 0, "maps", values, None, 4, (4, 8, 8))).save(tmp_path / "grid.png")
    return tmp_path / "grid.png"


def half_blocks(text: str) -> list[np.ndarray]:
    """Return the pictures that half blocks in 24-bit colours draw, (H, W, 3)."""
    cell = re.compile(r"\x1b\[38;2;(\d+);(\d+);(\d+);48;2;(\d+);(\d+);(\d+)m(▀+)")
    pictures: list[list[list[int]]] = [[]]
    for line in text.split("\n"):
        actual = cell.findall(line)
        if not actual and pictures[-1]:
            pictures.append([])
        for start in (0, 3) if actual else ():
            pictures[-1].append([int(each) for run in actual for each in run[start : start + 3] * len(run[6])])
    return [np.array(rows).reshape(len(rows), -1, 3) for rows in pictures if rows]


def assert_drawn(text: str, path: Path) -> None:
    """Assert that half blocks draw the picture of a file, in its proportions, within 100 columns and 40 lines."""
    [drawn] = half_blocks(text)
    height, width, _ = drawn.shape
    assert width <= 100
    assert height <= 2 * 40
    with Image.open(path) as picture:
        assert width / height == pytest.approx(picture.width / picture.height, rel=0.05)
        wanted = np.asarray(picture.convert("RGB").resize((width, height)), float)
    assert np.abs(drawn - wanted).mean() < 1


@pytest.mark.parametrize(("answers", "pixels"), [("nothing", 8), ("", 0)])
@pytest.mark.sample("nothing-8")
def test_a_terminal_without_an_image_protocol_gets_half_blocks(picture: Path, answers: str, pixels: int) -> None:
    text = on_a_terminal(["-c", SHOW, str(picture)], answers=answers, pixels=pixels)
    assert_drawn(text, picture)
    assert "Traceback" not in text
    assert "Failed" not in text


@pytest.mark.exhaustive
def test_sixel_and_kitty_are_used_where_the_terminal_knows_them(picture: Path) -> None:
    sixel = on_a_terminal(["-c", SHOW, str(picture)], answers="sixel")
    assert len(re.findall(r"\x1bP[\d;]*q", sixel)) == 1
    kitty = on_a_terminal(["-c", SHOW, str(picture)], answers="kitty")
    assert "\U0010eeee" in kitty  # kitty's place holder for a piece of a picture
    assert "▀" not in sixel + kitty


@pytest.mark.parametrize(
    ("size", "variables"), [((50, 120), {"NO_COLOR": "1"}), ((50, 120), {"TERM": "dumb"}), ((0, 0), {})]
)
def test_a_terminal_that_cannot_draw_is_asked_nothing(
    picture: Path, size: tuple[int, int], variables: dict[str, str]
) -> None:
    text = on_a_terminal(["-c", SHOW, str(picture)], answers="", size=size, **variables)
    assert text == f"{NOTHING_SHOWN}\r\n"


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("activations", ["--no-grids"]),
        ("attribute", ["--target", "0", "--layer", "3", "--sanity", "none", "--resize", "32", "--crop", "32"]),
    ],
)
@pytest.mark.sample("activations")
def test_the_command_shows_its_overview_after_its_tables(
    networks: Path, tmp_path: Path, command: str, options: list[str]
) -> None:
    (tmp_path / "net.py").write_text(f"{networks.read_text()}\n\ndef scores():\n    {SCORES}\n", encoding="utf-8")
    arguments = ["-m", "hookscope", command, f"{tmp_path / 'net.py'}:scores", str(CAT), *options, "--show"]
    text = on_a_terminal([*arguments, "--out", str(tmp_path / "out")], answers="nothing")
    assert text.index("overview.png") < text.index("▀")
    assert_drawn(text, tmp_path / "out/overview.png")


@pytest.mark.exhaustive
def test_a_pipe_gets_no_pictures_and_stderr_says_so(run: Run) -> None:
    for extra in ((), ("--json",), ("--quiet",)):
        plain = run("activations", "net.py:tiny", CAT, "--out", "out", *extra)
        ended = run("activations", "net.py:tiny", CAT, "--out", "out", "--show", *extra)
        assert ended.code == 0
        assert ended.stderr.splitlines()[-1] == NOTHING_SHOWN
        if "--json" not in extra:  # which holds timings
            assert ended.stdout == plain.stdout
        assert "\x1b" not in ended.stdout + ended.stderr


# For TensorBoard


@pytest.mark.parametrize(("command", "options"), [("activations", ()), ("grads", ("--loss", "sum", "--grids"))])
def test_a_run_goes_to_tensorboard_with_its_own_numbers_and_grids(
    run: Run, command: str, options: tuple[str, ...]
) -> None:
    ended = run(command, "net.py:tiny", CAT, *options, "--out", "out", "--tensorboard", "logs/one")
    assert (ended.code, ended.stderr.count("error")) == (0, 0)
    actual = read(Path("logs/one"))
    for row in rows_of(Path("out")):
        for metric in ("mean", "zero_fraction"):
            [event] = actual.Scalars(f"activation {metric}/{row['layer']}")
            assert event.value == np.float32(row["activation"][metric])
    if command == "grads":
        for row in json.loads(Path("out/result.json").read_bytes())["gradients"]:
            assert actual.Scalars(f"gradient l2/{row['layer']}")[0].value == np.float32(row["gradient"]["l2"])
    assert len(actual.Tags()["images"]) == len(record_of(Path("out"))["grids"]) == 4


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a folder that grants every permission and takes no file")
def test_a_place_that_takes_nothing_is_one_line_before_anything_runs(run: Run, tmp_path: Path) -> None:
    Path("new.pt").write_bytes(b"no weights: reading them would be another error")
    runs = [[command, "net.py:tiny", CAT] for command in ("activations", "grads", "attribute", "attention", "survey")]
    runs += [["diff", "net.py:tiny", "net.py:tiny", CAT], ["history", "new.pt", "new.pt"]]
    cases = [([*arguments, "--out", folder], folder) for arguments in runs for folder in ("/proc/x", "/proc/x/y")]
    cases += [([*runs[0], option, "/proc/x"], "/proc/x") for option in ("--report", "--tensorboard")]
    cases += [(["layers", "net.py:tiny", "--csv", "/proc/x"], "/proc/x"), ([*runs[5], "--junit", "/proc/x"], "/proc/x")]
    cases += [(["check", "new.pt", option, "/proc/x"], "/proc/x") for option in ("--evidence", "--report", "--sarif")]
    cases += [(["layers", "net.py:tiny", "--csv", "/proc/self/comm"], "/proc/self/comm")]  # a file that exists
    before = sorted(tmp_path.rglob("*"))
    for arguments, place in cases:
        message = (f"Cannot write to '{place}", ": no such file or directory. Name another ")
        assert_refused(run(*arguments), 3, *message)
    assert sorted(tmp_path.rglob("*")) == before


def test_missing_folders_of_every_file_are_made(run: Run) -> None:
    assert run("layers", "net.py:tiny", "--csv", "a/b/layers.csv").code == 0
    assert run("diff", "net.py:tiny", "net.py:tiny", CAT, "--junit", "c/d/j.xml", "--report", "e/f/diff.html").code == 0
    [stored] = Path("hookscope-runs").glob("diff-*")
    assert run("report", stored, "--out", "g/h/diff.html").code == 0
    assert all(map(os.path.getsize, ("a/b/layers.csv", "c/d/j.xml", "e/f/diff.html", "g/h/diff.html")))


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("file", "'{here}/file' is not a folder"),
        ("link", "'{here}/file' is not a folder"),
        ("x" * 300, "file name too long"),
        ("out/logs", "it is inside the run directory, which may hold only its own files"),
        ("elsewhere/../out", "it is inside the run directory, which may hold only its own files"),
    ],
)
def test_a_folder_for_tensorboard_that_cannot_be_is_one_line_before_anything_runs(
    run: Run, tmp_path: Path, folder: str, reason: str
) -> None:
    Path("file").write_text("mine")
    Path("link").symlink_to("file")
    for command in ("activations", "grads"):
        ended = run(command, "net.py:tiny", CAT, "--out", "out", "--tensorboard", folder)
        assert ended.code == 3
        assert ended.stderr == (
            f"hookscope: error: Cannot write to '{folder}': {reason.format(here=tmp_path)}. "
            "Name another folder with --tensorboard.\n"
        )
        assert not Path("out").exists()


def test_a_full_disk_is_one_line_and_leaves_the_run(command: Run, networks: Path, tmp_path: Path) -> None:
    # The event file holds all grids, so it alone is larger than any file may be.
    ended = command(
        *("activations", f"{networks}:tiny", CAT, "--model-arg", "width=12", "--out", "out"),
        *("--tensorboard", "logs", "--quiet"),
        cwd=tmp_path,
        largest_file=LARGEST_FILE,
    )
    assert (ended.code, ended.stderr) == (
        3,
        "hookscope: error: Cannot write to 'logs': file too large. Name another folder with --tensorboard.\n",
    )
    sizes = [path.stat().st_size for path in (tmp_path / "out" / "grids").iterdir()]
    assert max(sizes) < LARGEST_FILE < sum(sizes)
    assert list((tmp_path / "logs").iterdir()) == []


# On a page


@pytest.mark.exhaustive
def test_the_page_is_the_one_that_the_report_of_the_run_would_be(run: Run) -> None:
    ended = run("activations", "net.py:tiny", CAT, "--out", "out", "--report", "page.html")
    assert (ended.code, ended.stderr) == (0, "")
    assert ended.stdout.splitlines()[-1].startswith("Report: page.html (")
    assert run("report", "out").code == 0
    assert Path("page.html").read_bytes() == Path("out.html").read_bytes()


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        ("thesis.html", "it exists and is not a hookscope report"),
        ("elsewhere/../out", "it is inside the run directory, which may hold only its own files"),
    ],
)
def test_a_page_that_cannot_be_is_one_line_before_anything_runs(run: Run, page: str, reason: str) -> None:
    Path("thesis.html").write_text("mine")
    Path("elsewhere").mkdir()
    for command in ("activations", "grads"):
        ended = run(command, "net.py:tiny", CAT, "--out", "out", "--report", page)
        assert ended.code == 3
        assert ended.stderr == f"hookscope: error: Cannot write to '{page}': {reason}. Name another file.\n"
        assert not Path("out").exists()
    assert Path("thesis.html").read_text() == "mine"


@pytest.mark.parametrize("report", [(), ("--report", "page.html")])
def test_open_opens_the_page_or_else_the_picture_in_the_browser(
    report: tuple[str, ...], fork_server: ForkServer, networks: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" >> {tmp_path}/opened\n', "utf-8")
    browser.chmod(0o755)
    arguments = ("activations", f"{networks}:tiny", CAT, "--resize", "16", "--crop", "16", "--open", *report)
    with_browser = environment | {"BROWSER": str(browser)}
    assert not fork_server.run("-m", "hookscope", *arguments, cwd=tmp_path, environment=with_browser).returncode
    name = "page.html" if report else "hookscope-runs/activations-net.py-tiny-cat/overview.png"
    assert (tmp_path / "opened").read_text("utf-8") == f"{(tmp_path / name).as_uri()}\n"


def test_latest_leads_to_the_newest_run_and_leaves_what_is_the_users(run: Run, tmp_path: Path) -> None:
    small = ("--resize", "16", "--crop", "16", "--no-grids")
    latest = tmp_path / "hookscope-runs" / "latest"
    assert run("activations", "net.py:tiny", CAT, *small).code == 0
    assert latest.readlink() == Path("activations-net.py-tiny-cat")
    assert run("grads", "net.py:tiny", "--input-shape", "1,3,16,16").code == 0
    assert latest.readlink() == Path("grads-net.py-tiny-noise")
    assert run("report", "hookscope-runs/latest").stdout.startswith(
        "Report: hookscope-runs/grads-net.py-tiny-noise.html"
    )
    assert run("activations", "net.py:tiny", CAT, *small, "--out", "elsewhere").code == 0
    assert latest.readlink() == Path("grads-net.py-tiny-noise")
    latest.unlink()
    latest.mkdir()
    assert run("activations", "net.py:tiny", CAT, *small).code == 0
    assert latest.is_dir()
    assert not latest.is_symlink()
    assert sorted(path.name for path in latest.parent.iterdir() if path.name.startswith(".")) == []


def test_latest_is_a_text_file_where_there_are_no_links(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_args: object, **_options: object) -> None:
        raise OSError("no links")

    monkeypatch.setattr(Path, "symlink_to", refuses)
    assert run("activations", "net.py:tiny", CAT, "--resize", "16", "--crop", "16", "--no-grids").code == 0
    latest = tmp_path / "hookscope-runs" / "latest"
    assert latest.read_text("utf-8") == "activations-net.py-tiny-cat\n"
    ended = run("report", "hookscope-runs/latest")
    assert (ended.code, ended.stdout.partition(" (")[0]) == (
        0,
        "Report: hookscope-runs/activations-net.py-tiny-cat.html",
    )
    latest.write_text("not-there\n", "utf-8")
    assert "there is no such folder" in run("report", "hookscope-runs/latest").stderr
