"""The command line with layouts of checkpoints that are more than one file of weights."""

from pathlib import Path

import numpy as np
import pytest

from hookscope.checkpoints.find_checkpoints import find_checkpoints
from tests.cli.conftest import Run
from tests.models.distributed import save
from tests.models.hostile import GOOD

COMMANDS = [
    ("layers", "step-3", "--arch", "net.py:tiny"),
    ("checkpoint", "step-3"),
    ("check", "step-3", "--arch", "net.py:tiny", "--select", "non-finite-parameter"),
    ("activations", "net.py:tiny", "--weights", "step-3", "noise.npy", "--quiet"),
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: arguments[0])
@pytest.mark.sample("layers")
def test_a_distributed_folder_is_weights_for_a_network(run: Run, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    save({"model": GOOD, "epoch": 3}, tmp_path / "step-3")
    np.save(tmp_path / "noise.npy", np.ones((3, 16, 16), np.float32))
    ended = run(*arguments)
    assert ended.code == 0, ended


def test_a_folder_of_checkpoints_counts_each_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for step in (2, 10):
        save({"model": GOOD}, tmp_path / "runs" / f"step-{step}")
    for source in ("runs", "runs/*", "runs/**"):
        assert find_checkpoints([source]) == ["runs/step-2", "runs/step-10"], source
