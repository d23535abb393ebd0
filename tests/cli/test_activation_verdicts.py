"""What `hookscope activations` says first: NaN, Inf, constant outputs and dead channels, of modules and operations."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hookscope
from hookscope.commands.activations.describe import describe_activations
from hookscope.reporting.overviews.document import draw_document
from tests.cli.conftest import Run
from tests.networks import Written
from tests.reporting.test_overviews import writing

NETWORKS = """
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self, after):
        super().__init__()
        self.c1 = nn.Conv2d(3, 8, 3)
        self.c2 = nn.Conv2d(8, 8, 3)
        self.fc = nn.Linear(8, 4)
        self.after = after

    def forward(self, x):
        x = F.relu(self.c1(x))
        x = self.after(self, x)
        return self.fc(x.mean((2, 3)))


def dead(net, x):
    return F.relu(net.c2(x) - 100)


def clamped(net, x):
    return net.c2(x).flatten(1).clamp(max=-1e9).view(-1, 8, 12, 12)


def nan(net, x):
    return torch.log(net.c2(x) - 100)


def cleaned(net, x):
    return torch.nan_to_num(torch.log(net.c2(x) - 100))


def infinite(net, x):
    return 1 / (net.c2(x) * 0)


def masked(net, x):
    hidden = torch.ones(12, 12).triu(1).bool()
    return net.c2(x).masked_fill(hidden, -torch.inf).softmax(-1)


def maxed(net, x):
    return torch.maximum(net.c2(x) - 100 * (torch.arange(8) > 0).view(8, 1, 1), torch.zeros(()))


def sound(net, x):
    return F.relu(net.c2(x))


def build(case="sound"):
    torch.manual_seed(0)
    return Net(globals()[case])
"""


def line_of(text: str) -> str:
    return (
        f"faulty.py:{next(number for number, line in enumerate(NETWORKS.splitlines(keepends=True), 1) if text in line)}"
    )


# Behind the second convolution a picture of 16 pixels a side has 8 x 12 x 12 = 1,152 values.
CASES = {
    "dead": ("WARN constant-activation at (model):relu#1", "net.c2(x) - 100)", "all 1,152 outputs are 0 "),
    "clamped": ("WARN constant-activation at (model):clamp", "clamp(max", "all 1,152 outputs are -1e9 "),
    "nan": ("FAIL non-finite-activation at (model):log", "torch.log(", "1,152 NaN and 0 Inf in 1,152 values"),
    "cleaned": ("WARN non-finite-activation at (model):log", "nan_to_num", "1,152 NaN and 0 Inf in 1,152"),
    "maxed": ("WARN dead-channels at (model):maximum", "torch.maximum(", "87.5% of its 8 channels are 0 "),
    "infinite": ("FAIL non-finite-activation at (model):", "1 / (", "0 NaN and 1,152 Inf in 1,152 values"),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "faulty.py").write_text(NETWORKS, encoding="utf-8")
    torch.save(torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0)), tmp_path / "x.pt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample("dead", "nan")
def test_a_fault_in_an_operation_comes_first_in_the_terminal_and_on_the_picture(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    heading, code, counts = CASES[case]
    ended = run("activations", "faulty.py:build", "x.pt", "--model-arg", f"case={case}", "--no-grids", "--out", "run")
    said = " ".join(ended.stdout.split())
    assert ended.code == 0
    assert said.startswith(("NaN starts at", "Inf starts at", "1 failure", "1 warning", "2 warnings"))
    level, rule, _, place = heading.split()
    document = json.loads((folder / "run" / "result.json").read_text(encoding="utf-8"))
    first = document["verdicts"][0]
    sentence = " ".join(first["message"].split())
    assert f"{level} {rule}: {sentence}" in said
    assert first["where"].startswith(place)
    assert counts in sentence
    assert line_of(code) in sentence
    if "non-finite" in heading:
        kind = "Inf" if case == "infinite" else "NaN"
        assert sentence.startswith(f"{kind} starts at '(model):")
    assert said.index("faulty.py:build (Net)") < said.index(sentence) < said.index(" c1 ")
    assert [row["layer"] for row in document["rows"]] == ["c1", "c2", "fc"]  # rows stay those of modules

    result = hookscope.activations("faulty.py:build", "x.pt", model_arg={"case": case})
    with writing(monkeypatch) as written:
        draw_document(describe_activations(result))
    words = [each.text for each in sorted(written, key=lambda each: each.top)]
    first = next(at for at, text in enumerate(words) if result.verdicts[0].rule in text)
    assert first < next(at for at, text in enumerate(words) if text.startswith("Size of the values"))
    assert not any(text.startswith("No problems") for text in words)


@pytest.mark.parametrize("case", ["sound", "masked"])
def test_a_sound_network_and_an_attention_mask_are_no_finding(
    run: Run, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    ended = run("activations", "faulty.py:build", "x.pt", "--model-arg", f"case={case}", "--no-grids", "--quiet")
    assert (ended.code, ended.stdout) == (0, "")
    result = hookscope.activations("faulty.py:build", "x.pt", model_arg={"case": case})
    assert result.verdicts == ()
    with writing(monkeypatch) as written:
        draw_document(describe_activations(result))
    assert any(each.text.startswith("No problems found: no NaN, no Inf that spreads") for each in written)


def test_a_mask_and_constants_of_the_code_are_not_in_the_answer_even_with_rows_of_their_own(run: Run) -> None:
    ended = run("activations", "faulty.py:build", "x.pt", "--model-arg", "case=masked", "--ops", "--no-grids")
    assert "(model):masked_fill" in ended.stdout
    answer = ended.stdout.partition("faulty.py:build")[0]
    assert " ".join(answer.split()).endswith("a ReLU is dead if 80% of its channels are 0.")


@pytest.mark.parametrize("run_of", [hookscope.activations, hookscope.grads])
def test_inf_that_an_operation_returns_starts_at_that_operation(run_of: Any) -> None:
    network = Written(lambda net, x: net.linear(x) / (x - x).norm(), linear=nn.Linear(4, 4))
    causes = [verdict for verdict in run_of(network, torch.ones(3, 4)).verdicts if verdict.rule.endswith("activation")]
    assert causes[0].message.startswith("Inf starts at '(model):div' (")
    assert causes[0].level == "fail"


def test_quiet_still_prints_the_verdicts(run: Run) -> None:
    ended = run("activations", "faulty.py:build", "x.pt", "--model-arg", "case=nan", "--no-grids", "--quiet")
    assert ended.stdout.startswith("FAIL non-finite-activation: NaN starts at '(model):log' (faulty.py:")


def test_every_constant_output_after_the_first_follows_it() -> None:
    (verdict,) = hookscope.activations("faulty.py:build", "x.pt", model_arg={"case": "dead"}).verdicts
    assert verdict.places == ("(model):relu#1", "(model):mean")


class Tiny(nn.Module):
    """A ReLU of few values, a mask of zeros and a table of zeros: all are 0, and none of them is a fault."""

    def __init__(self) -> None:
        super().__init__()
        self.squeeze = nn.Linear(8, 4)
        self.table = nn.Parameter(torch.zeros(8))
        nn.init.constant_(self.squeeze.bias, -100.0)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(8)
        mask[0] = 0.0
        gate = F.relu(self.squeeze(x.mean((2, 3)))).sum(1)
        return x + (self.table * 2 + mask * 3)[:, None, None] + gate[:, None, None, None]


def test_what_may_be_zero_by_chance_or_is_computed_from_parameters_is_no_finding() -> None:
    run = hookscope.activations(Tiny(), torch.rand(2, 8, 4, 4))
    # The sum of two gates is 0 whatever comes in, and says so.
    assert [verdict.where for verdict in run.verdicts] == ["(model):sum"]


def test_operations_that_are_judged_alone_are_no_rows_and_no_tensors() -> None:
    run = hookscope.activations(Tiny(), torch.rand(2, 8, 4, 4), save_tensors=True, grids_for=1)
    assert [row.label for row in run.rows] == ["squeeze", "(model)"]
    assert {*run.tensors} == {"squeeze", "(model)"}
    assert {maps.label for maps in run.feature_maps} == {"squeeze", "(model)"}
    assert run.hidden == ()
