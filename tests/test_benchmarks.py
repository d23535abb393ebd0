"""What the benchmarks must get right besides time: that compared ways did the same work, and what is said of it."""

import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from subprocess import CalledProcessError

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn
from torchvision.models import VisionTransformer

import hookscope
from benchmarks import __main__ as command
from benchmarks import documentation
from benchmarks.__main__ import file_name
from benchmarks.activations import ACTIVATIONS, four
from benchmarks.attention import _measured as attention_rows
from benchmarks.comparing import UNCHECKED, Layerwise, Ready, Way, over_first
from benchmarks.findings import Machine, Measurement, Report, Section, Spread, Work, from_json, to_json
from benchmarks.gradients import GRADIENTS
from benchmarks.networks import Row
from benchmarks.same_work import Rows, failed, judge
from benchmarks.survey import ChannelMoments, judge_channels
from benchmarks.timing import interleaved, spread

ROOT = Path(__file__).parents[1]
MACHINE = Machine("AMD EPYC", 2, 2, "cpu", "", "Linux x86_64", "3.11.7", {"hookscope": "0.1.0", "torch": "2.15.0"})


class Twice(nn.Module):
    """A convolution that a ReLU in place overwrites, then the ReLU again."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, images: Tensor) -> Tensor:
        return self.relu(self.relu(self.conv(images)) - 0.5)


@pytest.fixture
def network() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Twice().eval(), torch.randn(1, 3, 8, 8)


def keeps_the_tensor(model: nn.Module, batch: Tensor, _rows: Sequence[Row]) -> Callable[[], Rows]:
    """A way that is wrong twice: it keeps outputs that are overwritten, and of a repeated module the last call only."""

    def run() -> Rows:
        kept: dict[str, Tensor] = {}
        handles = [
            module.register_forward_hook(lambda _module, _inputs, output, name=name: kept.__setitem__(name, output))
            for name, module in model.named_modules()
        ]
        with torch.no_grad():
            model(batch)
        for handle in handles:
            handle.remove()
        return {name or "(model)": four(tensor).tolist() for name, tensor in kept.items()}

    return run


def works(layerwise: Layerwise, network: nn.Module, batch: Tensor, ways: Mapping[str, Way]) -> list[Work]:
    """Judge ways of `layerwise` and others on a network."""
    together = replace(layerwise, ways={**layerwise.ways, **ways})
    rows = together.rows(network, batch)
    return [
        together.ways[name].judged(network, batch, rows, together.expected(name, network, batch, rows), 1e-4)[1]
        for name in ways
    ]


@pytest.mark.parametrize("layerwise", [ACTIVATIONS, GRADIENTS], ids=["activations", "grads"])
def test_hooks_by_hand_and_hookscope_find_the_same(layerwise: Layerwise, network: tuple[nn.Module, Tensor]) -> None:
    ours = {name: way for name, way in layerwise.ways.items() if name.startswith("hookscope")}
    ways = {**ours, layerwise.by_hand: layerwise.ways[layerwise.by_hand]}
    assert works(layerwise, *network, ways) == [Work("same", 3)] * len(ways)  # conv, relu, relu#1


def test_a_way_that_keeps_overwritten_tensors_is_found_out(network: tuple[nn.Module, Tensor]) -> None:
    (work,) = works(ACTIVATIONS, *network, {"kept": Way(keeps_the_tensor)})
    assert work == Work("differs", 3, wrong=2, missing=1)  # conv, relu; relu#1
    assert work.text == "2 of 3 rows wrong, 1 of 3 missing"


@pytest.mark.parametrize("statistic", range(4))
def test_one_statistic_beyond_the_tolerance_makes_a_row_wrong(statistic: int) -> None:
    expected = {"conv": (0.1, 1.0, -2.0, 3.0)}
    for change, verdict in ((2.9e-4, "same"), (3.1e-4, "differs"), (math.nan, "differs")):
        row = list(expected["conv"])
        row[statistic] += change
        assert judge({"conv": row, "more": (0, 0, 0, 0)}, expected).verdict == verdict


def test_shapes_are_compared_with_shapes(network: tuple[nn.Module, Tensor]) -> None:
    shapes = {"conv": (1, 4, 6, 6), "relu": (1, 4, 6, 6), "relu#1": (1, 4, 6, 6)}
    ways = {
        "right": Way(lambda *_: lambda: shapes, shapes_only=True),
        "wrong": Way(lambda *_: lambda: {**shapes, "conv": (1, 4, 8, 8)}, shapes_only=True),
    }
    assert works(ACTIVATIONS, *network, ways) == [Work("shapes only", 3), Work("differs", 3, wrong=1)]


def test_a_way_that_raises_does_not_run_and_says_why() -> None:
    work = failed(RuntimeError("views are modified. Clone them.\nMore lines"))
    assert work.text == "does not run: RuntimeError: views are modified"


@pytest.mark.parametrize("name", ["torchinfo", "torchextractor", "nnsight", "torchlens"])
def test_a_peer_is_imported_only_when_it_is_prepared(name: str) -> None:
    assert name in ACTIVATIONS.ways  # and this file was imported without the peers


@pytest.mark.exhaustive
def test_ways_take_turns_and_those_of_fewer_rounds_sit_out_evenly() -> None:
    ran: list[str] = []
    ways = {name: lambda name=name: ran.append(name) for name in "ab"}
    seconds = interleaved(ways, {"a": 4, "b": 2}, clock=lambda run: run() or 2.0, settle=lambda: ran.append("-"))
    assert "".join(ran) == "ab" + "-a" + "-ab" + "-a" + "-ab"
    assert seconds == {"a": [2.0] * 4, "b": [2.0] * 2}


def test_what_surrounds_a_way_is_entered_for_it_alone_and_not_timed() -> None:
    happened: list[str] = []

    @contextmanager
    def around() -> Iterator[None]:
        happened.append("(")
        yield
        happened.append(")")

    def clock(run: Callable[[], object]) -> float:
        happened.append("[")
        run()
        happened.append("]")
        return 1.0

    ways = {name: lambda name=name: happened.append(name) for name in "ab"}
    interleaved(ways, 1, clock, warm=True, around={"b": around})
    assert "".join(happened) == "[a]([b])"


def report() -> Report:
    plain = Measurement("resnet34", "plain forward", 1.0, "×", spread([0.04, 0.05, 0.06], "ms", 1e3))
    ours = replace(plain, way="hookscope", figure=1.25, work=Work("same", 132), at_most=1.3)
    wrong = replace(plain, way="timm FeatureHooks", figure=1.5, work=Work("differs", 132, 49, 16))
    none = Measurement("resnet34", "full backward hooks", None, "×", work=Work("does not run", reason="views"))
    counted = Measurement("faults", "hookscope", None, "×", work=Work("same", 37))
    slow = Measurement("faults", "timm FeatureHooks", 3.0, "s", work=Work("shapes only", 1), at_most=2.0)
    section = Section("Statistics", "How.", (plain, ours, wrong, none, counted, slow), "2026-11-21")
    return Report(MACHINE, {"training, start": section})


def test_results_come_back_from_json_as_they_were() -> None:
    text = to_json(report())
    assert json.loads(text)["schema_version"] == 2
    assert from_json(text) == report()
    with pytest.raises(ValueError, match="schema_version"):
        from_json(text.replace('"schema_version": 2', '"schema_version": 3'))


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str, figure: float = 0.1) -> int:
    """Run `python -m benchmarks`; every section has one measurement, and "page" cannot be measured."""

    def measure(_device: str, name: str) -> Section:
        if name == "page":
            raise CalledProcessError(1, "page")
        return Section(name, "A note.", (Measurement("a process", "hookscope", figure, "s"),))

    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    monkeypatch.setattr(command, "measure_apart", measure)
    monkeypatch.setattr(torch, "set_num_threads", lambda _count: None)
    return command.main()


def test_a_section_that_fails_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "results.json"
    assert run_command(monkeypatch, "--only", "page", "--only", "start-up", "--output", str(output)) == 2
    assert list(from_json(output.read_text()).sections) == ["start-up"]
    assert "Not measured: page." in capsys.readouterr().out


def test_sections_that_are_measured_again_replace_theirs_and_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "results.json"
    assert run_command(monkeypatch, "--only", "check", "--only", "cost", "--output", str(output)) == 0
    assert run_command(monkeypatch, "--only", "cost", "--only", "grads", "--output", str(output), figure=0.2) == 0
    sections = from_json(output.read_text()).sections
    assert {name: each.measurements[0].figure for name, each in sections.items()} == {
        "grads": 0.2,
        "check": 0.1,
        "cost": 0.2,
    }
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", each.date) for each in sections.values())

    elsewhere = replace(from_json(output.read_text()), machine=MACHINE)
    output.write_text(to_json(elsewhere))
    with pytest.raises(SystemExit, match="2"):
        run_command(monkeypatch, "--only", "cost", "--output", str(output))
    assert "measured on a different machine or with other versions" in capsys.readouterr().err


@pytest.mark.parametrize(("figure", "missed"), [(1.3, False), (1.31, True), (None, True)])
def test_a_limit_holds_up_to_its_value(figure: float | None, missed: bool) -> None:
    measurement = Measurement("resnet34", "hookscope", figure, "×", at_most=1.3)
    assert measurement.missed == missed
    assert Report(MACHINE, {"activations": Section("", "", (measurement,))}).missed == missed


def test_limits_are_those_of_the_ways_that_have_one() -> None:
    ways = {name: Ready(None, None, 1) for name in ("plain", "ours", "ours, slower", "a peer")}
    seconds = {"plain": [1.0], "ours": [1.2], "ours, slower": [1.5], "a peer": [9.0]}
    found = over_first("resnet34", ways, seconds, {"ours": 1.3, "ours, slower": 1.45})
    assert [(each.figure, each.at_most, each.missed) for each in found] == [
        (1.0, None, False),
        (pytest.approx(1.2), 1.3, False),
        (1.5, 1.45, True),
        (9.0, None, False),
    ]


def test_the_spread_is_median_and_extremes() -> None:
    assert spread([0.3, 0.1, 0.2, 0.9], "ms", 1e3) == Spread(pytest.approx(250), 100, 900, "ms", 4)


def test_results_are_named_by_date_device_and_machine() -> None:
    assert file_name("2026-11-21", MACHINE) == "2026-11-21-cpu-amd-epyc-2-threads"
    assert file_name("2026-11-21", replace(MACHINE, device="cuda", accelerator="H200")) == "2026-11-21-cuda-h200"


def test_the_results_say_what_when_and_where() -> None:
    text = documentation.performance([report()])
    assert "AMD EPYC, 2 cores, 2 threads, Linux x86_64, Python 3.11.7, hookscope 0.1.0, torch 2.15.0" in text
    assert "#### Statistics\n\n`python -m benchmarks --only 'training, start'`, 2026-11-21.\n\nHow.\n\n" in text
    assert text.partition("How.\n\n")[2].splitlines() == [
        "| with | resnet34 | faults |",
        "| --- | --- | --- |",
        "| plain forward | ×1.00 |  |",
        "| hookscope | ×1.25 (limit ×1.30) | all 37 right |",
        "| timm FeatureHooks | ×1.50 (49 wrong, 16 missing of 132) | 3.00 s (**limit 2.00 s, missed**, shapes only) |",
        "| full backward hooks | does not run |  |",
    ]


def test_only_the_text_between_the_markers_is_rewritten() -> None:
    begun = f"# Title\n{documentation.BEGIN}\nold\n{documentation.END}\n## Next\n"
    assert (
        documentation.rewritten(begun, [report()])
        == f"# Title\n{documentation.BEGIN}\n{documentation.performance([report()])}\n{documentation.END}\n## Next\n"
    )
    for broken in (
        "# Title\n",
        begun + documentation.END,
        begun.replace(documentation.END, ""),
        f"{documentation.END}\n{documentation.BEGIN}\n",
    ):
        with pytest.raises(ValueError, match="performance: begin"):
            documentation.rewritten(broken, [report()])


def test_the_documentation_has_what_the_results_have() -> None:
    text = documentation.PAGE.read_text(encoding="utf-8")
    assert documentation.rewritten(text, documentation.measured()) == text, "run `python -m benchmarks.documentation`"


def test_every_figure_of_the_readme_is_measured() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## What it costs")[2].partition("\n## ")[0]
    figures = re.findall(r"×[\d.]+\d|\d[\d.]* s\b", text)
    assert len(figures) >= 5
    assert [each for each in figures if each not in documentation.PAGE.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize("family", ["torchvision", "timm"])
@pytest.mark.exhaustive
def test_attention_by_hand_is_what_hookscope_sees(family: str) -> None:
    torch.manual_seed(0)
    if family == "timm":
        network: nn.Module = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
    else:
        network = VisionTransformer(32, 8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=16)
    found = attention_rows(network.eval(), torch.randn(1, 3, 32, 32), family, rounds=1)
    ways = ["plain", "hookscope", UNCHECKED, f"{UNCHECKED}, numbers=False", "unfused, by hand"]
    assert [each.way for each in found] == ways
    assert [each.work for each in found[1:4]] == [Work("same", 1)] * 3


def test_channel_moments_are_numpys_over_all_batches_and_a_wrong_one_is_counted() -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(count, 3, 5, 4, generator=generator) * 3 + 7 for count in (4, 1, 2)]
    moments = ChannelMoments()
    for batch in batches:
        moments.update(batch)
    mean, std = moments.result()
    together = np.concatenate([each.double().numpy() for each in batches])
    np.testing.assert_allclose(mean, together.mean((0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(std, together.std((0, 2, 3)), rtol=1e-6)

    survey = hookscope.survey(nn.Sequential(nn.Identity()).eval(), torch.cat(batches), verify=False)
    assert survey is not None
    assert judge_channels({"0": (mean, std)}, survey) == Work("same", 1)
    assert judge_channels({"0": (mean, std * 1.001)}, survey) == Work("differs", 1, wrong=1)
