"""What the benchmarks must get right besides time: that compared ways did the same work, and what is said of it."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hookscope
from benchmarks import documentation
from benchmarks.activations import ACTIVATIONS, four
from benchmarks.comparing import Layerwise, Way
from benchmarks.findings import Machine, Measurement, Report, Section, Work, from_json, to_json
from benchmarks.gradients import GRADIENTS
from benchmarks.networks import Row
from benchmarks.same_work import Rows, judge
from benchmarks.survey import ChannelMoments, judge_channels
from benchmarks.timing import spread

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


def test_one_statistic_beyond_the_tolerance_makes_a_row_wrong() -> None:
    statistic = 2
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


@pytest.mark.parametrize(("figure", "missed"), [(1.3, False), (1.31, True), (None, True)])
def test_a_limit_holds_up_to_its_value(figure: float | None, missed: bool) -> None:
    measurement = Measurement("resnet34", "hookscope", figure, "×", at_most=1.3)
    assert measurement.missed == missed
    assert Report(MACHINE, {"activations": Section("", "", (measurement,))}).missed == missed


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


def test_the_documentation_has_what_the_results_have() -> None:
    text = documentation.PAGE.read_text(encoding="utf-8")
    assert documentation.rewritten(text, documentation.measured()) == text, "run `python -m benchmarks.documentation`"


def test_every_figure_of_the_readme_is_measured() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## What it costs")[2].partition("\n## ")[0]
    figures = re.findall(r"×[\d.]+\d|\d[\d.]* s\b", text)
    assert len(figures) >= 5
    assert [figure for figure in figures if figure not in documentation.PAGE.read_text(encoding="utf-8")] == []


def test_channel_moments_are_numpys_over_all_batches_and_a_wrong_one_is_counted() -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(count, 3, 5, 4, generator=generator) * 3 + 7 for count in (4, 1, 2)]
    moments = ChannelMoments()
    for batch in batches:
        moments.update(batch)
    mean, std = moments.result()
    together = np.concatenate([batch.double().numpy() for batch in batches])
    np.testing.assert_allclose(mean, together.mean((0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(std, together.std((0, 2, 3)), rtol=1e-6)

    survey = hookscope.survey(nn.Sequential(nn.Identity()).eval(), torch.cat(batches), verify=False)
    assert judge_channels({"0": (mean, std)}, survey) == Work("same", 1)
    assert judge_channels({"0": (mean, std * 1.001)}, survey) == Work("differs", 1, wrong=1)
