"""What the benchmarks must get right besides time: that compared ways did the same work, and what is said of it."""

import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
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
from benchmarks.__main__ import RESULTS, file_name
from benchmarks.attention import _measured as attention_rows
from benchmarks.capture_ways import WAYS, four, hand_written
from benchmarks.comparing import Ready, over_first
from benchmarks.findings import Machine, Measurement, Report, Section, Spread, Work, from_json, to_json
from benchmarks.gradients import gradient_rows, tensor_hooks
from benchmarks.gradients import statistics_of as gradient_statistics
from benchmarks.networks import layer_rows, shapes_of, statistics_of
from benchmarks.plot import draw
from benchmarks.same_work import Rows, failed, judge
from benchmarks.survey import ChannelMoments, judge_channels
from benchmarks.timing import fitted, interleaved, spread
from hookscope.results.activations import LayerRow

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


def keeps_the_tensor(model: nn.Module, batch: Tensor, _rows: Sequence[LayerRow]) -> Callable[[], Rows]:
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


def test_hand_written_hooks_find_what_hookscope_finds(network: tuple[nn.Module, Tensor]) -> None:
    rows = layer_rows(*network)
    found = hand_written(*network, rows)()
    assert judge(found, statistics_of(rows)) == Work("same", 4)
    assert set(found) == {"conv", "relu", "relu#1", "(model)"}


def test_tensor_hooks_find_the_gradients_that_hookscope_finds(network: tuple[nn.Module, Tensor]) -> None:
    weights = torch.randn(1, 4, 6, 6)
    rows = gradient_rows(*network, weights)
    assert judge(tensor_hooks(*network, weights, rows)(), gradient_statistics(rows)) == Work("same", 4)


def test_a_way_that_keeps_overwritten_tensors_is_found_out(network: tuple[nn.Module, Tensor]) -> None:
    rows = layer_rows(*network)
    work = judge(keeps_the_tensor(*network, rows)(), statistics_of(rows))
    assert work == Work("differs", 4, wrong=2, missing=1)  # conv, relu; relu#1
    assert work.text == "2 of 4 rows wrong, 1 of 4 missing"


@pytest.mark.parametrize("statistic", range(4))
def test_one_statistic_beyond_the_tolerance_makes_a_row_wrong(statistic: int) -> None:
    expected = {"conv": (0.1, 1.0, -2.0, 3.0)}
    for change, verdict in ((2.9e-4, "same"), (3.1e-4, "differs"), (math.nan, "differs")):
        row = list(expected["conv"])
        row[statistic] += change
        assert judge({"conv": row, "more": (0, 0, 0, 0)}, expected).verdict == verdict


def test_shapes_are_held_against_shapes(network: tuple[nn.Module, Tensor]) -> None:
    shapes = shapes_of(layer_rows(*network))
    assert shapes["conv"] == (1, 4, 6, 6)
    assert judge(shapes, shapes, shapes_only=True) == Work("shapes only", 4)
    assert judge({**shapes, "conv": (1, 4, 8, 8)}, shapes, shapes_only=True) == Work("differs", 4, wrong=1)


def test_a_way_that_raises_does_not_run_and_says_why() -> None:
    work = failed(RuntimeError("views are modified. Clone them.\nMore lines"))
    assert work.text == "does not run: RuntimeError: views are modified"


@pytest.mark.parametrize("name", ["torchinfo", "torchextractor", "nnsight", "torchlens"])
def test_a_peer_is_imported_only_when_it_is_prepared(name: str) -> None:
    assert name in WAYS  # and this file was imported without the peers


@pytest.mark.parametrize(
    ("points", "line"),
    [
        ({x: 0.25 * x + 3 for x in (1.0, 4.0, 9.0, 30.0)}, (0.25, 3, 1)),
        # By hand: means 1 and 4/3, Σ(x-x̄)(y-ȳ) = 2, Σ(x-x̄)² = 2, residuals -1/3, 2/3, -1/3, total 8/3.
        ({0.0: 0.0, 1.0: 2.0, 2.0: 2.0}, (1, 1 / 3, 1 - (6 / 9) / (24 / 9))),
        ({1.0: 7.0, 500.0: 7.0}, (0, 7, 1)),  # what does not grow
    ],
)
def test_the_fit_is_the_least_squares_line_and_its_r_squared(
    points: dict[float, float], line: tuple[float, float, float]
) -> None:
    fit = fitted("resnets", "layer", "ms", points)
    assert (fit.slope, fit.intercept, fit.r_squared) == pytest.approx(line, abs=1e-12)


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
    ours = replace(plain, way="hookscope", figure=1.25, work=Work("same", 132), at_most=1.3, aim=1.2)
    wrong = replace(plain, way="timm FeatureHooks", figure=1.5, work=Work("differs", 132, 49, 16))
    none = Measurement("resnet34", "full backward hooks", None, "×", work=Work("does not run", reason="views"))
    line = fitted("resnets", "layer", "ms", {1.0: 2.0, 3.0: 4.0})
    sections = {
        "capture": Section("Statistics", "How.", (plain, ours, wrong, none)),
        "growth": Section("Growth", "Of what.", (), (line,)),
    }
    return Report("2026-11-21", "python -m benchmarks", MACHINE, sections)


def test_results_come_back_from_json_as_they_were() -> None:
    text = to_json(report())
    assert json.loads(text)["schema_version"] == 1
    assert from_json(text) == report()
    with pytest.raises(ValueError, match="schema_version"):
        from_json(text.replace('"schema_version": 1', '"schema_version": 2'))


def test_a_section_that_fails_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    section = Section("Start-up", "A note.", (Measurement("a process", "hookscope", 0.1, "s"),))

    def measure(_device: str, name: str) -> Section:
        if name == "page":
            raise CalledProcessError(1, "page")
        return section

    output = tmp_path / "results.json"
    arguments = ["--only", "page", "--only", "start-up", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    monkeypatch.setattr(command, "measure_apart", measure)
    monkeypatch.setattr(torch, "set_num_threads", lambda _count: None)
    assert command.main() == 2
    assert from_json(output.read_text()).sections == {"start-up": section}
    assert "Not measured: page." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("figure", "verdict", "missed"),
    [(1.2, "holds", False), (1.3, "holds, aim missed", False), (1.31, "MISSED", True), (None, "MISSED", True)],
)
def test_a_budget_holds_up_to_its_limit(figure: float | None, verdict: str, missed: bool) -> None:
    measurement = Measurement("resnet34", "hookscope", figure, "×", at_most=1.3, aim=1.2)
    assert (measurement.verdict, measurement.missed) == (verdict, missed)
    assert Report("", "", MACHINE, {"capture": Section("", "", (measurement,))}).missed == missed


def test_budgets_are_those_of_the_ways_that_have_one() -> None:
    ways = {name: Ready(None, None, 1) for name in ("plain", "ours", "ours, slower", "a peer")}
    seconds = {"plain": [1.0], "ours": [1.2], "ours, slower": [1.5], "a peer": [9.0]}
    found = over_first("resnet34", ways, seconds, {"ours": (1.3, 1.2), "ours, slower": (1.45, None)})
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


def test_the_plot_is_a_picture_of_every_section(tmp_path: Path) -> None:
    draw(report(), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_performance_section_says_what_when_and_where() -> None:
    text = documentation.performance(report())
    assert "Measured on 2026-11-21 by `python -m benchmarks`" in text
    assert "AMD EPYC, 2 cores, 2 threads, Linux x86_64, Python 3.11.7, hookscope 0.1.0, torch 2.15.0" in " ".join(
        text.split()
    )
    assert "| Statistics: resnet34 | ×1.25 | ×1.30 | ×1.20 | holds, aim missed |" in text
    assert "| timm FeatureHooks | ×1.50 (49 wrong, 16 missing of 132) |" in text
    assert "| full backward hooks | does not run |" in text
    assert "- resnets: 1 ms per layer, R² 1.000, over 1 to 3" in text


def test_only_the_text_between_the_markers_is_rewritten() -> None:
    begun = f"# Title\n{documentation.BEGIN}\nold\n{documentation.END}\n## Next\n"
    assert (
        documentation.rewritten(begun, report())
        == f"# Title\n{documentation.BEGIN}\n{documentation.performance(report())}\n{documentation.END}\n## Next\n"
    )
    for broken in (
        "# Title\n",
        begun + documentation.END,
        begun.replace(documentation.END, ""),
        f"{documentation.END}\n{documentation.BEGIN}\n",
    ):
        with pytest.raises(ValueError, match="performance: begin"):
            documentation.rewritten(broken, report())


def test_the_newest_results_are_those_of_the_latest_date_on_the_cpu(tmp_path: Path) -> None:
    assert documentation.newest(tmp_path) is None
    for name in ("2026-11-09-cpu-a.json", "2026-11-21-cpu-a.json", "2026-12-01-cuda-a.json"):
        (tmp_path / name).touch()
    assert documentation.newest(tmp_path) == tmp_path / "2026-11-21-cpu-a.json"


def test_the_documentation_says_what_the_newest_results_say() -> None:
    newest = documentation.newest(RESULTS)
    assert newest is not None, f"no results in {RESULTS}; `python -m benchmarks` makes them"
    found = from_json(newest.read_text(encoding="utf-8"))
    text = documentation.PAGE.read_text(encoding="utf-8")
    assert documentation.rewritten(text, found) == text, (
        f"run `python -m benchmarks.documentation {newest.relative_to(ROOT)}`"
    )


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
    unchecked = "hookscope, without the self-check"
    ways = ["plain", "hookscope", unchecked, f"{unchecked}, numbers=False", "unfused, by hand"]
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
