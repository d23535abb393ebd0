"""What people see is what was written down. `python -m tests.frozen.freeze` writes it anew: read the difference."""

import shutil
from pathlib import Path

import pytest

from tests.fork_server import ForkServer
from tests.frozen.cases import CASES, COMMANDS, SAMPLE, Case
from tests.frozen.files import write_files
from tests.frozen.freeze import HERE, differences, read, seen


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    write_files(folder)
    return folder


@pytest.mark.sample(*SAMPLE)
@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_people_see_what_was_written_down(case: Case, files: Path, tmp_path: Path, fork_server: ForkServer) -> None:
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    was, now = read(case.command)[case.name], seen(case, tmp_path, fork_server)
    changed = {form: differences(was.get(form, ""), now.get(form, "")) for form in sorted({*was, *now})}
    changes = [
        f"{case.command}, {case.name}, {form}:\n  " + "\n  ".join(lines[:20])
        for form, lines in changed.items()
        if lines
    ]
    assert not changes, "\n".join(["what people see has changed", *changes])


def test_every_frozen_text_is_of_a_case() -> None:
    assert {path.stem for path in HERE.glob("*.txt")} == set(COMMANDS)
    for command in COMMANDS:
        assert list(read(command)) == [case.name for case in CASES if case.command == command]
