"""`hookscope check` with files made to harm, and broken ones.

Of those in `tests/cli/test_hostile_files.py` that get the same sentence there, one is enough; all with odd names. The
files go through one command, as they would from a folder that a CI job is pointed at.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from junitparser import JUnitXml

from hookscope.checkpoints.find_checkpoints import find_checkpoints
from hookscope.commands.check.checkpoint import check_checkpoint
from hookscope.errors import NothingMatchedError
from hookscope.rules import RULES
from hookscope.rules.judging import wanted_rules
from hookscope.rules.settings import CheckSettings
from tests.cli.conftest import Ended, names_below
from tests.cli.test_hostile_files import (
    CASES,
    FILE_NAMES,
    MISFIT,
    NAMES,
    NEVER_SAID,
    SLOW,
    Case,
    assert_harmless,
    canary_of,
    prepare,
)
from tests.fork_server import ForkServer

pytestmark = pytest.mark.exhaustive

# A folder stands for the weights files in it; no process can be given a name with a null byte; one takes 20 s to be
# given up.
APART = ("folder", "folder, trusted", "name with a null byte", SLOW)
SENTENCES = {(case.code, case.phrases, case.options): case for case in reversed(CASES) if case.name not in APART}
TOGETHER = [case for case in CASES if case in NAMES or case in FILE_NAMES or case in SENTENCES.values()]

OPTIONS = sorted({case.options for case in TOGETHER})


Checked = tuple[Mapping[tuple[str, ...], Ended], Mapping[str, dict[str, Any]]]
"""What `check` made of all cases: commands by their options, reports by the names of their cases."""


def file_of(case: Case) -> str:
    return f"{TOGETHER.index(case)}/{case.file}"


def cases_with(options: Sequence[str]) -> list[Case]:
    return [case for case in TOGETHER if case.options == options]


@pytest.fixture(scope="module")
def check_all(fork_server: ForkServer, folder: Path) -> Callable[..., Ended]:
    """Check files in one process, two at a time."""

    def run_check(cases: Sequence[Case], environment: Mapping[str, str], *options: str) -> Ended:
        arguments = ("check", *map(file_of, cases), "--arch", "net.py:tiny", "--jobs", "2", *options)
        done = fork_server.run("-m", "hookscope", *arguments, cwd=folder, environment=environment)
        return Ended(done.returncode, done.stdout, done.stderr)

    return run_check


@pytest.fixture(scope="module")
def folder(networks: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All files, and a configuration that says what noise the network takes."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "hookscope.toml").write_text("[input]\nshape = [2, 3, 16, 16]\n", encoding="utf-8")
    (folder / "net.py").write_bytes(networks.read_bytes())
    for number, case in enumerate(TOGETHER):
        below = folder / str(number)
        below.mkdir()
        (below / "net.py").write_bytes(networks.read_bytes())
        prepare(case, below)
    return folder


@pytest.fixture(scope="module")
def variables(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a command that would leave temporary files where they are found."""
    names = ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE")
    kept = {name: value for name, value in environment.items() if name not in names}
    return kept | {"TMPDIR": str(tmp_path_factory.mktemp("temporary")), "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}


@pytest.fixture(scope="module")
def junit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("junit") / "junit.xml"


@pytest.fixture(scope="module")
def checked(check_all: Callable[..., Ended], folder: Path, variables: dict[str, str], junit: Path) -> Checked:
    before = names_below(folder)
    ended, reports = {}, {}
    for options in OPTIONS:
        cases = cases_with(options)
        extra = () if options else ("--junit", str(junit))
        ended[options] = check_all(cases, variables, *options, *extra, "--format", "json")
        actual = json.loads(ended[options].stdout)["checkpoints"]
        reports.update({case.name: report for case, report in zip(cases, actual, strict=True)})
    assert names_below(folder) == before
    return ended, reports


def message_of(report: Mapping[str, Any]) -> str:
    """Return what a reader is told: why it could not be checked, or the only finding."""
    [finding] = [finding for rule in report["outcomes"] for finding in rule["findings"]]
    assert report["error"] == finding["message"]
    return str(finding["message"])


@pytest.mark.parametrize("case", TOGETHER, ids=lambda case: case.name)
def test_a_hostile_or_broken_checkpoint_never_passes_and_says_why(checked: Checked, folder: Path, case: Case) -> None:
    report = checked[1][case.name]
    assert not canary_of(folder / file_of(case)).exists()
    if case.code == 0:  # it holds good weights beside hostile names
        assert report["exit_code"] == 0
        return
    message = message_of(report)
    fails = [rule["rule"] for rule in report["outcomes"] if rule["status"] == "fail"]
    others = [rule for rule in report["outcomes"] if rule["rule"] not in ("integrity", "architecture")]
    judged = {rule["rule"] for rule in others if rule["status"] not in ("skipped", "off")}
    if MISFIT in message:  # weights that do not fit have been read, and fail the check; so what they hold is judged
        assert (report["exit_code"], fails, case.code) == (1, ["architecture"], 3)
        assert {RULES[name].needs for name in judged} == {"stored"}
    else:
        assert not judged
        assert (report["exit_code"], fails) == (case.code, ["integrity"])
    assert len(message.splitlines()) == 1
    assert len(message) < 1500
    assert not [phrase for phrase in case.phrases if not re.search(phrase, message, re.IGNORECASE)], message


@pytest.mark.usefixtures("checked")
def test_nothing_is_left_behind(variables: dict[str, str]) -> None:
    assert names_below(Path(variables["TMPDIR"])) == set()


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options) or "untrusted")
def test_the_report_is_harmless_and_the_most_severe_code_decides(checked: Checked, options: tuple[str, ...]) -> None:
    ended = checked[0][options]
    assert_harmless(ended)
    assert ended.stderr == ""
    assert ended.code == (3 if options else 4)


@pytest.mark.usefixtures("checked")
def test_the_junit_report_is_read_by_a_parser_and_counts_every_checkpoint(junit: Path) -> None:
    suites = list(JUnitXml.fromfile(str(junit)))
    cases = cases_with(())
    assert len(suites) == len(cases)
    broken = [bool(suite.failures or suite.errors) for suite in suites]
    assert broken == [case.code != 0 for case in cases]
    text = junit.read_text(encoding="utf-8")
    assert not [word for word in NEVER_SAID if word in text]


def refused(case: Case, path: str, networks: Path) -> None:
    """Check a file in this process, and assert that the error says what it should."""
    settings = CheckSettings(arch=f"{networks}:tiny", input_shape=(2, 3, 16, 16))
    report = check_checkpoint(path, settings, wanted_rules(settings), trust=bool(case.options))
    assert report.exit_code == case.code
    assert not [phrase for phrase in case.phrases if not re.search(phrase, report.error, re.IGNORECASE)]


def test_a_folder_without_weights_matches_nothing(tmp_path: Path) -> None:
    path = prepare(next(case for case in CASES if case.name == APART[0]), tmp_path)
    with pytest.raises(NothingMatchedError, match=r"No weights file in folder '.*model\.pt'\. Looked for"):
        find_checkpoints([str(path)])
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "cat.jpg").touch()
    with pytest.raises(NothingMatchedError, match=r"Pictures are given with --images .*photos"):
        find_checkpoints([str(photos)])


def test_a_name_that_cannot_be_is_an_error(networks: Path) -> None:
    case = next(case for case in CASES if case.name == APART[2])
    refused(case, case.file, networks)


def test_a_key_that_takes_years_to_hash_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, networks: Path
) -> None:
    monkeypatch.setattr("hookscope.checkpoints.isolation._SPARE_SECONDS", 1)
    case = next(case for case in CASES if case.name == SLOW)
    refused(case, str(prepare(case, tmp_path)), networks)
