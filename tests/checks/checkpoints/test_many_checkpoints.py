"""`hookscope check` over a folder in which every checkpoint ends in another way."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.checks.checkpoints import networks
from tests.cli.conftest import Ended, Run

ARCH = f"{networks.__file__}:fragile"

# By file, in natural order, which is not alphabetical: how it has to end.
CODES = {
    "epoch-1.pt": 0,
    "epoch-2.pt": 1,  # NaN in a weight
    "epoch-3.pt": 3,  # cut
    "epoch-4.pt": 4,  # a pickled module
    "epoch-5.pt": 6,  # raises
    "epoch-6.pt": 3,  # kills its worker
    "epoch-7.pt": 3,  # takes too much memory
    "epoch-8.pt": 3,  # never ends
    "epoch-10.pt": 0,
    "epoch-11.pt": 1,  # of another network
}

DEMANDS = {"epoch-5.pt": 1, "epoch-6.pt": 2, "epoch-7.pt": 3, "epoch-8.pt": 4}

ERRORS = {
    "epoch-3.pt": "damaged or truncated",
    "epoch-4.pt": "--trust",
    "epoch-5.pt": "'middle' (Fragile)",
    "epoch-6.pt": "SIGSEGV",
    "epoch-7.pt": "more memory than",
    "epoch-8.pt": "did not finish within 10 s",
    "epoch-11.pt": "does not fit",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints in `runs`, and the configuration beside it."""
    folder = tmp_path_factory.mktemp("many")
    (folder / "hookscope.toml").write_text("[input]\nshape = [2, 3, 16, 16]\n", encoding="utf-8")
    runs = folder / "runs"
    runs.mkdir()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        good = networks.fragile().state_dict()
    broken = {"first.weight": good["first.weight"].clone()}
    broken["first.weight"][3, 1, 2, 0] = torch.nan
    for name in CODES:
        torch.save(good | {"middle.value": torch.tensor(float(DEMANDS.get(name, 0)))}, runs / name)
    torch.save(good | broken, runs / "epoch-2.pt")
    torch.save(nn.Linear(2, 2), runs / "epoch-4.pt")
    torch.save(nn.Linear(2, 2).state_dict(), runs / "epoch-11.pt")
    content = (runs / "epoch-3.pt").read_bytes()
    (runs / "epoch-3.pt").write_bytes(content[: len(content) // 2])
    (runs / "notes.txt").write_text("not a checkpoint", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def check(command: Run, folder: Path) -> Run:
    def run_check(*arguments: object) -> Ended:
        return command("check", *arguments, "--arch", ARCH, "--jobs", 2, "--format", "json", cwd=folder)

    return run_check


def reports_of(ended: Ended) -> list[dict[str, Any]]:
    reports: list[dict[str, Any]] = json.loads(ended.stdout)["checkpoints"]
    return reports


def test_every_checkpoint_of_a_folder_has_its_verdict_in_natural_order(check: Run) -> None:
    ended = check("runs", "--timeout", 10, "--memory", 0.5)
    reports = {report["checkpoint"].removeprefix("runs/"): report for report in reports_of(ended)}
    assert [*reports] == [*CODES]
    assert {name: report["exit_code"] for name, report in reports.items()} == CODES
    assert {name for name, report in reports.items() if report["error"]} == ERRORS.keys()
    assert not [name for name, text in ERRORS.items() if text not in reports[name]["error"]]
    assert ended.code == 4
    assert "Traceback" not in ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("names", "code"),
    [
        (["epoch-[125].pt", "epoch-6.pt"], 3),
        (["epoch-[125].pt"], 6),
        (["epoch-1.pt", "epoch-9.pt"], 3),  # there is no ninth
    ],
)
def test_the_gravest_of_the_exit_codes_is_that_of_the_command(check: Run, names: list[str], code: int) -> None:
    ended = check(*(f"runs/{name}" for name in names))
    assert ended.code == code
    codes = {Path(report["checkpoint"]).name: report["exit_code"] for report in reports_of(ended)}
    assert codes == {name: CODES.get(name, 3) for name in codes}
    assert len(codes) == len(names) + 2 * ("epoch-[125].pt" in names)
