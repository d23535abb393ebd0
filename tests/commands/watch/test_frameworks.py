"""Lightning and transformers' Trainer: scripts that run unchanged, and the callbacks on the page."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hookscope.commands.watch.training_log import read_training
from tests.commands.watch.conftest import Forked
from tests.commands.watch.test_script import ENVIRONMENT, said
from tests.commands.watch.training_scripts import FRAMEWORK_SCRIPTS
from tests.docs.pages import DOCS, blocks
from tests.fork_server import ForkServer

pytestmark = pytest.mark.exhaustive

# What a script does to be given a callback.
WITH_CALLBACK = {
    "lightning": ("gradient_clip_val=1.0,", "gradient_clip_val=1.0, callbacks=Watching(),"),
    "transformers": ("train_dataset=Data())", "train_dataset=Data(), callbacks=[Watching()])"),
}


@pytest.fixture(scope="module", params=FRAMEWORK_SCRIPTS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def plain(name: str, tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> list[Tensor]:
    """What a script trains without hookscope."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "train.py").write_text(FRAMEWORK_SCRIPTS[name])
    fork_server.run("train.py", "plain.pt", 0, cwd=folder, environment=ENVIRONMENT)
    saved: list[Tensor] = torch.load(folder / "plain.pt")
    return saved


def test_a_script_of_a_framework_runs_unchanged(name: str, plain: list[Tensor], tmp_path: Path, forked: Forked) -> None:
    (tmp_path / "train.py").write_text(FRAMEWORK_SCRIPTS[name])
    arguments = ["-m", "hookscope", "watch", "train.py", "--every", 4, "--out", "run", "--"]
    watched = forked(*arguments, "watched.pt", 0)
    assert watched.returncode == 0, watched.stderr
    assert all(map(torch.equal, plain, torch.load(tmp_path / "watched.pt")))
    network = "Lit" if name == "lightning" else "Counting"
    line = FRAMEWORK_SCRIPTS[name][
        : FRAMEWORK_SCRIPTS[name].index("rainer.fit(" if name == "lightning" else ".train()")
    ]
    actual, end = said(watched)
    assert end.startswith("No problems in 12 steps (3 measured in full).")
    assert actual == (
        f"watching {network} (AdamW, lr 0.01), from step 1 on, loss at train.py:{line.count(chr(10)) + 1}"
    )
    log = read_training(tmp_path / "run")
    assert [step.step for step in log.steps] == [*range(1, 13)]
    assert all(step.loss is not None and step.norm_before_clipping is not None for step in log.steps)
    assert log.watched[-1].layers


def test_the_callback_on_the_page_watches(name: str, plain: list[Tensor], tmp_path: Path, forked: Forked) -> None:
    page = blocks((DOCS / "commands" / "watch.md").read_text("utf-8"))
    (callback,) = [each.text for each in page if each.title == f"{name}_callback.py"]
    (tmp_path / f"{name}_callback.py").write_text(callback)
    before, after = WITH_CALLBACK[name]
    source = FRAMEWORK_SCRIPTS[name]
    assert before in source
    (tmp_path / "train.py").write_text(f"from {name}_callback import Watching\n" + source.replace(before, after))
    done = forked("train.py", "watched.pt", 0)
    assert done.returncode == 0, done.stderr
    assert all(map(torch.equal, plain, torch.load(tmp_path / "watched.pt")))
    log = read_training(tmp_path / "runs" / "a")
    assert [step.step for step in log.steps] == [*range(1, 13)]
    assert all((step.loss is not None) == (name == "lightning") for step in log.steps)
    assert [end.reason for end in log.ends] == ["closed"]
