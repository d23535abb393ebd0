"""`hookscope watch train.py --edit`: scripts train as with hooks by hand, to the bit, or do not train at all."""

import textwrap
from pathlib import Path

import pytest
import torch

from hookscope.commands.watch.training_log import read_training
from tests.commands.watch.conftest import Forked
from tests.commands.watch.test_script import python, said
from tests.commands.watch.training_scripts import DISTRIBUTED_SCRIPTS, EDITS, edited_script

SAMPLE = ("frozen",)
FROM_THE_START = "Edits are made from step 1 on, beginning with its forward pass."
REFUSED = "The training ends, because its edits cannot be made: "


@pytest.mark.parametrize("case", EDITS)
@pytest.mark.sample(*SAMPLE)
def test_an_edited_script_trains_as_with_hooks_by_hand(case: str, tmp_path: Path, forked: Forked) -> None:
    script, by_hand = edited_script(case, distributed=False)
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "hand.py").write_text(by_hand)
    watch = ["-m", "hookscope", "watch"]
    runs = [
        [*watch, "train.py", "--edit", EDITS[case][0], "--every", "4", "--out", "run", "--", "edited.pt", "0"],
        [*watch, "hand.py", "--", "hand.pt", "0"],
        [*watch, "train.py", "--", "plain.pt", "0"],
    ]
    done = [forked(*run) for run in runs]
    assert [each.returncode for each in done] == [0, 0, 0], done
    edited, expected, plain = (torch.load(tmp_path / f"{name}.pt") for name in ("edited", "hand", "plain"))
    assert all(map(torch.equal, edited, expected))
    assert not all(map(torch.equal, edited, plain))
    assert FROM_THE_START in said(done[0])
    steps = read_training(tmp_path / "run").steps
    assert [step.step for step in steps] == [*range(1, 9)]
    assert all([text for text, count in step.edits if count] == [EDITS[case][0]] for step in steps)


@pytest.mark.exhaustive
def test_every_process_is_edited_alike(tmp_path: Path, torchrun: Forked) -> None:
    case = "gradients"
    script, by_hand = edited_script(case, distributed=True)
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "hand.py").write_text(by_hand)
    arguments = ["watch", "train.py", "--edit", EDITS[case][0], "--out", "run", "--", "edited.pt", 0]
    done = torchrun("-m", "hookscope", *arguments)
    torchrun("hand.py", "hand.pt", 0)
    assert all(map(torch.equal, torch.load(tmp_path / "edited.pt"), torch.load(tmp_path / "hand.pt")))
    assert said(done).count(FROM_THE_START) == 1
    assert all(dict(step.edits)[EDITS[case][0]] for step in read_training(tmp_path / "run").steps)


@pytest.mark.exhaustive
def test_a_process_that_cannot_be_edited_ends_all(tmp_path: Path, torchrun: Forked) -> None:
    script, _ = edited_script("frozen", distributed=True)
    (tmp_path / "train.py").write_text(
        script.replace("network = Net()\n", "network = Net()\nif rank: network.more = network.first\n")
    )
    arguments = ["--edit", "/^more.0$/:output:zero", "--", "edited.pt", 0]
    done = torchrun("-m", "hookscope", "watch", "train.py", *arguments, code=1)
    assert any(line.startswith(REFUSED) for line in said(done))
    assert not (tmp_path / "edited.pt").exists()


@pytest.mark.exhaustive
def test_no_process_trains_a_sharded_network_without_its_edits(tmp_path: Path, torchrun: Forked) -> None:
    (tmp_path / "train.py").write_text(DISTRIBUTED_SCRIPTS["fsdp"])
    arguments = ["--edit", "param:0.*:freeze", "--", "edited.pt", 0]
    done = torchrun("-m", "hookscope", "watch", "train.py", *arguments, code=1)
    assert any(line.startswith(f"{REFUSED}the network is sharded") for line in said(done))
    assert not (tmp_path / "edited.pt").exists()


TRAINED = """
    import torch
    from torch import nn
    from torch.nn import functional as F
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    BEFORE
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    def turn():
        network(torch.ones(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    AFTER
    for step in range(3):
        turn()
    print("trained")
"""

REFUSALS = {
    "no such layer": ("nosuch:output:zero", "", "", "No layer matches"),
    "no such channel": ("param:2.weight:value:zero(channels=9)", "", "", "names channel 9"),
    "compiled network": ("/^0$/:output:zero", "network = torch.compile(network, backend='eager')", "", "is compiled"),
    "compiled in place": ("/^0$/:output:zero", "network.compile(backend='eager')", "", "is compiled"),
    "compiled step": (
        "/^0$/:output:zero",
        "",
        "turn = torch.compile(turn, backend='aot_eager')",
        "out of compiled code",
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", REFUSALS)
def test_a_training_that_cannot_be_edited_ends(case: str, tmp_path: Path, forked: Forked) -> None:
    edit, before, after, message = REFUSALS[case]
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAINED.replace("BEFORE", before).replace("AFTER", after)))
    done = forked("-m", "hookscope", "watch", "train.py", "--edit", edit, "--out", "run")
    assert (done.returncode, done.stdout) == (5 if case == "no such layer" else 2, ""), done
    (line,) = [text for text in said(done) if text.startswith(REFUSED)]
    assert message in line
    assert "Traceback" not in done.stderr


@pytest.mark.exhaustive
def test_parameters_of_a_compiled_network_are_edited(tmp_path: Path, forked: Forked) -> None:
    compiling = "network = torch.compile(network, backend='aot_eager')"
    before = f"weight = network[0].weight\n    {compiling}\n    print(weight.detach().sum())"
    source = TRAINED.replace("BEFORE", before).replace("AFTER", "").replace('"trained"', "weight.detach().sum()")
    (tmp_path / "train.py").write_text(textwrap.dedent(source))
    done = forked("-m", "hookscope", "watch", "train.py", "--edit", "param:0.*:freeze")
    assert done.returncode == 0, done.stderr
    before, after = done.stdout.splitlines()
    assert before == after
    assert "Warning" not in done.stderr


@pytest.mark.exhaustive
def test_an_expression_that_is_malformed_ends_the_script_as_it_imports_torch(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)\nimport torch\nprint(2)")
    done = python("-m", "hookscope", "watch", "train.py", "--edit", "conv1:output:nothing", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "1\n")
    assert "an edit cannot be made" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.exhaustive
def test_a_second_training_is_edited_from_its_first_forward_pass(tmp_path: Path, forked: Forked) -> None:
    source = """
        import torch
        for fold in range(2):
            network = torch.nn.Sequential(torch.nn.Linear(4, 2))
            optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
            for step in range(3):
                print(float(network(torch.ones(1, 4)).sum()))
                network(torch.ones(1, 4)).sum().backward()
                optimizer.step()
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(source))
    done = forked("-m", "hookscope", "watch", "train.py", "--edit", "/^0$/:output:zero", "--out", "run")
    assert done.stdout == "0.0\n" * 6
    assert [step.edits for step in read_training(tmp_path / "run").steps] == [(("/^0$/:output:zero", 2),)] * 6
