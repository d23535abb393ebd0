"""What a person reads first: the greeting of `hookscope` alone, and what `hookscope doctor` says."""

import json
import os
import pty
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from hookscope.cli import greeting as greeting_module
from hookscope.cli.greeting import greeting
from tests.cli.conftest import CAT, Run


def facts_of(run: Run, code: int = 0) -> dict[str, dict[str, object]]:
    ended = run("doctor", "--json")
    assert ended.code == code
    document = json.loads(ended.stdout)
    assert document["schema_version"] == 3
    return {fact["subject"]: fact for fact in document["facts"]}


def test_the_doctor_says_what_is_here(run: Run) -> None:
    facts = facts_of(run)
    assert str(facts["torch"]["state"]).startswith(f"{torch.__version__} · {torch.get_num_threads()} thread")
    assert facts["timm"]["state"] == f"{version('timm')} · timm:NAME as MODEL"
    assert str(facts["kernel"]["state"]).startswith("compiled, ")
    assert str(facts["weights"]["state"]).startswith("none cached in ")
    assert facts["pictures"]["state"] == "not known: this is no terminal"
    assert not any(fact["broken"] for fact in facts.values())
    assert "trained weights on this machine" in run("doctor").stdout


def test_the_doctor_says_what_is_missing_and_what_that_costs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hookscope.statistics.native.load_kernel", lambda: None)
    monkeypatch.setattr("hookscope.cli.doctor.find_spec", lambda _name: None)
    facts = facts_of(run)
    assert "about four times as long" in str(facts["kernel"]["state"])
    for extra in ("timm", "transformers", "attribute", "show", "tensorboard", "parquet"):
        assert facts[extra]["state"] == "not installed"
        assert f"pip install 'hookscope[{extra}]'" in str(facts[extra]["remedy"])


def test_a_torch_that_cannot_be_imported_is_what_the_doctor_is_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    facts = facts_of(run, code=1)
    assert facts["torch"]["broken"]
    assert "cannot be imported" in str(facts["torch"]["state"])
    assert "kernel" not in facts


def test_weights_in_the_cache_are_named(run: Run, environment: dict[str, str]) -> None:
    folder = Path(environment["TORCH_HOME"], "hub", "checkpoints")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "resnet18-f37072fd.pth").write_bytes(bytes(2**20))
    try:
        state = str(facts_of(run)["weights"]["state"])
    finally:
        (folder / "resnet18-f37072fd.pth").unlink()
    assert state == f"resnet18-f37072fd · 1.05 MB in {folder}"


# --- The greeting ----------------------------------------------------------------------------------------------------


def commands_in(text: str) -> list[list[str]]:
    return [shlex.split(line)[1:] for line in text.splitlines() if line.startswith("  hookscope ")]


def test_the_greeting_has_three_commands_for_what_is_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [each[0] for each in commands_in(greeting(tmp_path))] == ["grads", "layers", "models"]
    (tmp_path / "b c.jpg").symlink_to(CAT)
    (tmp_path / "d.jpg").symlink_to(CAT)
    (tmp_path / "a\x1b.jpg").symlink_to(CAT)  # a name that no terminal should see
    assert commands_in(greeting(tmp_path)) == [
        ["activations", "demo", "b c.jpg", "--layer", "conv"],
        ["attribute", "demo", "b c.jpg"],
        ["grads", "demo", "b c.jpg", "--loss", "ce"],
    ]
    (tmp_path / "model.pt").write_bytes(b"")
    torch.save(torch.ones(2, 3), tmp_path / "input.pt")  # which comes first
    assert commands_in(greeting(tmp_path))[2] == ["checkpoint", "model.pt"]
    torch.save({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, tmp_path / "best.pt")
    assert commands_in(greeting(tmp_path))[2] == ["checkpoint", "best.pt"]
    monkeypatch.setattr(greeting_module, "find_spec", lambda _name: None)
    without = greeting(tmp_path)
    assert commands_in(without)[1] == ["attribute", "resnet18", "b c.jpg"]
    assert "pip install 'hookscope[demo]'" in without


def test_the_greeting_finds_pictures_in_a_folder_for_each_class_and_none_of_a_run(tmp_path: Path) -> None:
    for place in ("hookscope-runs/a", ".hidden", "photos/dog", "photos/cat"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "0.jpg").symlink_to(CAT)
    assert commands_in(greeting(tmp_path))[1] == ["attribute", "demo", "photos/cat/0.jpg"]


def test_hookscope_alone_greets_in_a_terminal_without_loading_torch(
    environment: dict[str, str], tmp_path: Path
) -> None:
    ours, theirs = pty.openpty()
    script = (
        "import sys; from hookscope.cli.app import run; code = run([]); sys.exit(code + 10 * ('torch' in sys.modules))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env=environment | {"PYTHONPATH": str(Path(__file__).parents[2])},
        cwd=tmp_path,
        stdin=theirs,
        stdout=theirs,
    )
    os.close(theirs)
    printed = b""
    try:
        while part := os.read(ours, 4096):
            printed += part
    except OSError:  # how a terminal ends on Linux
        pass
    os.close(ours)
    assert process.wait() == 0
    assert b"hookscope doctor" in printed
