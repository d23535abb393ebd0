"""A pipe, a socket or a device in the place of any file is refused at once, and no more than a limit is read."""

import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

import hookscope
from hookscope.checkpoints.class_names import read_classes
from hookscope.checkpoints.fileformat import file_kind
from hookscope.checkpoints.folders import files_below
from hookscope.commands.check.configuration.reading import read_settings
from hookscope.errors import HookscopeError, InputError, UsageError
from hookscope.inputs.labelled_files import find_labelled
from hookscope.inputs.loading import read_tensor
from hookscope.inputs.pictures import looks_like_picture
from hookscope.models.trusted_files import read_trusted
from hookscope.models.user_code import load_function
from hookscope.regular_files import NotRegularError, open_regular, read_bounded
from hookscope.results.runs.reading import read_inside
from hookscope.rules.baseline import read_baseline

pytestmark = pytest.mark.timeout(30)  # waiting for a writer takes for ever


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)  # a path of a socket has 107 bytes at most


SPECIAL: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "a named pipe (FIFO), not a regular file"),
    "socket": (_socket, "a socket, not a regular file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "a device, not a regular file"),
    "link to a pipe": (
        lambda path: (os.mkfifo(path.with_name("pipe")), path.symlink_to("pipe")),
        "a named pipe (FIFO), not a regular file",
    ),
}


@pytest.fixture
def special(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / request.param[1]
    SPECIAL[request.param[0]][0](path)
    return path


@pytest.mark.parametrize(
    ("special", "reason"), [((name, "x"), reason) for name, (_, reason) in SPECIAL.items()], indirect=["special"]
)
def test_what_is_no_regular_file_is_named_and_not_opened(special: Path, reason: str) -> None:
    with pytest.raises(NotRegularError) as caught:
        open_regular(special)
    assert caught.value.strerror == reason


def test_a_folder_and_a_link_that_is_not_followed_are_refused(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    assert read_bounded(tmp_path / "link", 10) == b"abc"
    with pytest.raises(NotRegularError, match="a link"):
        read_bounded(tmp_path / "link", 10, follow_links=False)


def test_one_byte_more_than_the_limit_says_that_there_is_more(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abcdef")
    assert [read_bounded(tmp_path / "file", limit) for limit in (4, 5, 6)] == [b"abcde", b"abcdef", b"abcdef"]


READERS: dict[str, tuple[str, Callable[[Path], object], type[HookscopeError]]] = {
    "a configuration": ("hookscope.toml", lambda path: read_settings(path, path.parent), UsageError),
    "the configuration of the folder": ("hookscope.toml", lambda path: read_settings(None, path.parent), UsageError),
    "the project's": ("pyproject.toml", lambda path: read_settings(None, path.parent), UsageError),
    "a baseline": ("baseline.json", read_baseline, UsageError),
    "class names": ("classes.txt", read_classes, InputError),
    "labels": ("labels.csv", find_labelled, InputError),
    "a tensor": ("x.npy", read_tensor, InputError),
    "weights": ("w.pt", file_kind, InputError),
    "trusted weights": ("w.pt", lambda path: read_trusted(path, "torch"), InputError),
    "a Python file": ("net.py", lambda path: load_function(path, "build"), InputError),
    "a run": ("run.json", lambda path: read_inside(path.parent, path.name, 100), InputError),
}


@pytest.mark.parametrize(
    ("special", "reader"),
    [((kind, file), name) for kind in ("pipe",) for name, (file, *_) in READERS.items()],
    indirect=["special"],
)
def test_every_reader_refuses_it_in_one_line(special: Path, reader: str) -> None:
    _, read, error = READERS[reader]
    with pytest.raises(error) as caught:
        read(special)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("special", [("pipe", "run.json"), ("pipe", "a.jpg")], indirect=True)
def test_what_is_found_in_a_folder_is_passed_over(special: Path) -> None:
    assert not looks_like_picture(special)
    assert files_below(special.parent, [".txt"]) == []


# Files that hookscope has made itself, or that come with it or with the system.
OWN = {
    *("checkpoints/sandbox/worker.py", "models/array_values.py"),  # /proc, /sys
    *("models/names.py", "models/network_table.py", "reporting/html/document.py", "statistics/library.py"),
    *("reporting/tensorboard.py", "cli/exporters.py"),  # the pictures of the run that was just written
}
READING = re.compile(r'\.open\("rb?"\)|\bread_text\(|\bread_bytes\(|(?<![\w.])open\((?!\))')


def test_no_other_file_of_the_source_opens_files_for_reading() -> None:
    package = Path(hookscope.__file__).parent
    opening = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if any(READING.search(line) for line in path.read_text(encoding="utf-8").splitlines())
    }
    assert opening - OWN == {"regular_files.py"}
