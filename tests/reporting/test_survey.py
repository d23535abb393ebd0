"""Crops show what a position sees; a run is read back as it was; formats have the room that torch says."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import hookscope
from hookscope.commands.survey import draw_crops
from hookscope.commands.survey.columns import CHANNELS
from hookscope.commands.survey.describe import describe_survey
from hookscope.commands.survey.draw_crops import GAP, HALVES_GAP, SCALE, TILE, crop_box
from hookscope.errors import InputError, UsageError
from hookscope.reporting.document import Bars
from hookscope.reporting.html.document import document_html
from hookscope.results.distribution import distribution_of
from hookscope.results.headroom import FORMATS, headroom_of
from hookscope.results.json_form import to_document
from hookscope.results.runs.reading import StoredRun, read_run
from hookscope.results.runs.record import RunRecord
from hookscope.results.statistics import TensorStatistics
from hookscope.results.survey import Survey, TopInput
from hookscope.text import percent_text, share_in_words
from tests.reporting.chromium import needs_chromium, until
from tests.results.same import assert_same


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 5, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(5, 3),
    )


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    made = np.random.default_rng(0).integers(0, 256, (40, 32, 32, 3), np.uint8)
    for number, pixels in enumerate(made):
        path = folder / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return folder


@pytest.fixture
def survey(pictures: Path) -> Survey:
    model = network()
    model[3].weight.data[4] = model[3].bias.data[4] = -1  # dead behind the ReLU
    made = hookscope.survey(model, pictures, by_class=True, resize="none", crop="none", batch_size=8, chunk_size=16)
    assert made is not None
    return made


def test_nothing_outside_a_crop_changes_the_value(pictures: Path) -> None:
    model = network().eval()
    survey = hookscope.survey(model, pictures, resize="none", crop="none", mean="none", std="none", batch_size=8)
    assert survey is not None
    assert survey.pictures is not None
    for label in ("0", "3", "4"):
        row = survey[label]
        top = row.channels[0].top[0]
        [(_, pixels)] = survey.pictures([top.input])
        edges = crop_box(row, top.position, (32, 32))
        assert edges is not None
        above, left, below, right = edges
        values = torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255
        layers = model[: int(label) + 1]
        with torch.no_grad():
            assert layers(values)[0, 0][top.position] == pytest.approx(top.value, rel=1e-5)
            outside = torch.rand(values.shape)
            rows, columns = slice(max(0, above), below), slice(max(0, left), right)
            outside[:, :, rows, columns] = values[:, :, rows, columns]
            assert layers(outside)[0, 0][top.position] == pytest.approx(top.value, rel=1e-5)
            inside = values.clone()
            inside[:, :, rows, columns] = 0.5
            assert layers(inside)[0, 0][top.position] != pytest.approx(top.value, rel=1e-3)


@pytest.mark.exhaustive
def test_crops_lie_where_the_record_says(survey: Survey, tmp_path: Path) -> None:
    survey.save(tmp_path / "run", crops=2)
    run = read_run(tmp_path / "run")
    assert {sheet.row for sheet in run.record.crops} == set(range(len(survey.rows)))
    for sheet in run.record.crops:
        with Image.open(tmp_path / "run" / sheet.path) as picture:
            assert picture.height == len(sheet.channels) * (TILE + GAP) - GAP
            assert picture.width == 2 * (sheet.columns * (TILE + GAP) - GAP) + HALVES_GAP
        assert not {*sheet.channels} & {*survey.rows[sheet.row].dead_channels}
    is_whole = {survey.rows[sheet.row].label: sheet.is_whole for sheet in run.record.crops}
    assert is_whole["0"] is False
    assert is_whole["7"] is True


@pytest.mark.parametrize("crops", [-1, 2.5])
def test_a_number_of_crops_that_cannot_be_is_refused(survey: Survey, tmp_path: Path, crops: Any) -> None:
    with pytest.raises(UsageError, match="`crops`"):
        survey.save(tmp_path / "run", crops=crops)
    assert not (tmp_path / "run").exists()


def test_a_line_of_crops_is_as_long_as_a_file_can_be(survey: Survey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw_crops, "_MOST_COLUMNS", 3)  # 654: more inputs than a test has
    sheets = [*draw_crops.crop_sheets(survey, 1)]
    assert {sheet.columns for sheet, _ in sheets} == {3}
    assert {picture.width for _, picture in sheets} == {SCALE * (2 * (3 * (TILE + GAP) - GAP) + HALVES_GAP)}


def test_a_channel_that_is_the_same_on_every_input_has_no_crops() -> None:
    network = nn.Sequential(nn.Conv2d(3, 3, 1))
    with torch.no_grad():
        network[0].weight[1] = 0  # its bias remains
    result = hookscope.survey(network, torch.rand(4, 3, 8, 8))
    assert result is not None
    [(sheet, _)] = draw_crops.crop_sheets(result, None)
    assert sheet.channels == (0, 2)


class Brightness(nn.Module):
    """Returns one number for each input: there is no axis of channels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((1, 2, 3))


def test_a_network_without_channels_is_drawn_by_its_outputs() -> None:
    result = hookscope.survey(Brightness(), torch.full((4, 3, 8, 8), 655.04))
    assert result is not None
    document = describe_survey(result)
    bars = next(part for section in document.sections for part in section.parts if isinstance(part, Bars))
    assert [(name, words) for name, _, _, words in bars.bars] == [("(model)", "655, 100× below it")]
    assert document.answer[0] == "No output has channels."
    assert document.level == ""
    assert "×100" in str(result)


def test_a_run_is_read_back_as_it_was(survey: Survey, tmp_path: Path) -> None:
    survey.save(tmp_path / "run", crops=1)
    actual = read_run(tmp_path / "run").result
    assert_same(actual, survey)
    assert to_document(actual) == to_document(survey)
    assert actual["4"].dead_channels == (4,)
    assert [*actual["4"].channels] == [*survey["4"].channels]


def test_the_page_has_every_channel_and_its_crops(survey: Survey, tmp_path: Path) -> None:
    page = hookscope.report(survey, tmp_path / "page.html").read_text(encoding="utf-8")
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert [column["key"] for column in data["columns"]][:3] == ["layer", "channel", "firing_inputs"]
    assert {len(channel) for channel in data["channels"]} == {len(data["columns"]) + 1}
    assert len(data["channels"]) == sum(len(row.channels) for row in survey)
    assert all(uri.startswith("data:image/jpeg;base64,") for uri in data["strips"])
    assert len(data["strips"]) == sum(len(row.channels) - len(row.dead_channels) for row in survey)


def test_files_of_the_same_name_in_two_folders_are_told_apart(survey: Survey) -> None:
    [most] = [column for column in CHANNELS if column.title == "most excited by"]
    top = (TopInput("data/a/0.png", 2.0, ()), TopInput("data/b/0.png", 1.0, ()))
    channel = replace(survey["0"].channels[0], best_class="", top=top)
    assert most.cell((survey["0"], channel)) == "a/0.png 2.00; b/0.png 1.00"


def test_the_page_rounds_as_the_terminal_does_and_has_each_term_once(survey: Survey, tmp_path: Path) -> None:
    row = survey["0"]
    arrays = row.channels.arrays
    assert arrays is not None
    shares = np.array([1, 1 - 2e-7, 2e-7, 0, 0.75, 0.5])  # only 1 is 100%, only 0 is 0%
    means = np.array([-0.3642469769816864, 0.7127523422241211, 1.00149999, 0, 1e-45, np.nan])
    channels = replace(row.channels, arrays=replace(arrays, firing_positions=shares, firing_inputs=shares, mean=means))
    made = replace(survey, rows=(replace(row, channels=channels),))
    record = RunRecord(verb="survey", patterns=("0",), threads=3)
    page = document_html(describe_survey(made, record), StoredRun(tmp_path, record, made))
    assert (page.count("<dt>Layers</dt><dd>0</dd>"), page.count("<dt>Threads</dt><dd>3</dd>")) == (1, 1)
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    at = [column["key"] for column in data["columns"]]
    texts = {key: [channel[at.index(key)] for channel in data["channels"]] for key in ("firing_positions", "mean")}
    assert texts["firing_positions"] == ["100%", ">99.9%", "<0.1%", "0%", "75.0%", "50.0%"]
    assert texts["mean"] == ["-0.3642", "0.7128", "1.001", "0", "1.000e-45", "-"]
    assert data["orders"]["dead"] == [3, 2, 5, 4, 1, 0]


@needs_chromium
@pytest.mark.exhaustive
def test_channels_are_found_ordered_and_linked_to(open_html, survey: Survey, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    text = hookscope.report(survey, tmp_path / "page.html").read_text(encoding="utf-8")
    page = open_html(text).page

    def found() -> list[str]:
        channels: list[str] = page.eval_on_selector_all(
            "#found tbody tr:has(td:nth-child(2))", "rows => rows.map(row => row.innerText.split('\\t', 2).join(' '))"
        )
        return channels

    assert len(found()) == 41
    page.fill("#q", "4 3")
    assert found() == ["3 4", "4 3"]  # numbers are those of a channel, or in the name of a layer
    until(page, "location.hash === '#q=4%203'")
    page.fill("#q", "")
    page.select_option("#order", "dead")
    assert found()[0] == "4 4"
    page.check("#pictured")
    assert len(found()) == 41 - sum(len(row.dead_channels) for row in survey)
    until(page, "location.hash === '#order=dead&pictured=1'")
    page = open_html(text, "#order=dead&q=4").page
    assert (found()[0], page.input_value("#order")) == ("4 4", "dead")


def test_the_answer_names_dead_channels_with_their_bound(survey: Survey) -> None:
    text = " ".join(str(survey).split())
    assert (
        "3 of 41 channels in 8 outputs are dead on 40 inputs, most in layer 4 (1 of 5), layer 5 (1 of 5) and 1" in text
    )
    assert "Each fires on fewer than 7.5% of such inputs (95% confidence)." in text
    model = nn.Sequential(nn.Linear(3, 2))
    model[0].weight.data[0] = model[0].bias.data[0] = 0
    lone = describe_survey(hookscope.survey(model, torch.randn(40, 3)))
    assert lone.answer[0] == (
        "1 of 2 channels in 1 output is dead on 40 inputs, in layer 0 (1 of 2). "
        "It fires on fewer than 7.5% of such inputs (95% confidence)."
    )


def test_few_inputs_call_no_channel_dead(survey: Survey) -> None:
    document = describe_survey(replace(survey, input_count=29))
    count = sum(len(row.dead_channels) for row in survey)
    assert document.answer[0] == f"{count} of 41 channels are 0 on 29 inputs, too few inputs to call a channel dead."
    assert not any(" dead on " in sentence for sentence in document.answer)
    assert document.level == ""
    assert describe_survey(replace(survey, input_count=30)).level == "warn"


def test_a_bound_below_a_tenth_of_a_percent_is_written_as_people_write_it(survey: Survey) -> None:
    many = replace(survey, input_count=60_000)
    text = " ".join(str(many).split())
    assert "Each fires on fewer than 0.1% of such inputs (95% confidence)." in text
    assert share_in_words(percent_text(1e-5)) == "less than 0.1%"


@pytest.mark.sample("cut short", "outside")
@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("arrays.safetensors", lambda content: content[:-8]),
        ("result.json", lambda content: content.replace(b'"input_count": 40', b'"input_count": -1')),
        ("run.json", lambda content: content.replace(b"crops/0000", b"../../0000")),
        ("run.json", lambda content: content.replace(b'"row": 0', b'"row": 99')),
    ],
    ids=["cut short", "a wrong number", "outside", "of no row"],
)
def test_a_run_that_was_tampered_with_is_refused(survey: Survey, tmp_path: Path, file: str, change) -> None:  # type: ignore[no-untyped-def]
    survey.save(tmp_path / "run", crops=1)
    path = tmp_path / "run" / file
    changed = change(path.read_bytes())
    assert changed != path.read_bytes()
    path.write_bytes(changed)
    with pytest.raises(InputError, match="Cannot read"):
        hookscope.report(tmp_path / "run", tmp_path / "page.html")


@pytest.mark.parametrize("name", FORMATS)
def test_formats_reach_as_far_as_torch_says(name: str) -> None:
    dtype: torch.dtype = getattr(torch, name)
    greatest, smallest = FORMATS[name]
    assert greatest == torch.finfo(dtype).max
    assert torch.tensor(smallest, dtype=torch.float64).to(dtype).double().item() == smallest
    assert torch.tensor(smallest / 2, dtype=torch.float64).to(dtype).item() == 0


def test_headroom_counts_what_overflows_and_what_vanishes() -> None:
    values = np.concatenate([np.full(10, 1e5), np.full(20, 1e-9), np.full(30, 1.0), np.full(40, 0.0)]).repeat(20)
    spread = distribution_of(values)
    statistics = TensorStatistics((2000,), "float32", 2000, min=0.0, max=1e5, distribution=spread)
    actual = {text.format: text for text in headroom_of(statistics)}
    assert actual["float16"].factor == pytest.approx(0.65504)
    assert actual["float16"].overflowing == pytest.approx(0.1)
    assert actual["float16"].vanishing == pytest.approx(20 / 60)
    assert (actual["bfloat16"].overflowing, actual["bfloat16"].vanishing) == (0, 0)
    assert actual["float8_e4m3fn"].overflowing == pytest.approx(0.1)
    assert actual["int8"].vanishing == pytest.approx(50 / 60)  # a step is 787: 1 is rounded to zero
    clamped = distribution_of(np.array([65504.0, -65504.0, 65504.0, 65505.0]))  # the greatest number itself fits
    statistics = TensorStatistics((4,), "float32", 4, min=-65504.0, max=65505.0, distribution=clamped)
    assert headroom_of(statistics)[0].overflowing == 0.25


@pytest.mark.parametrize("count", [1, 10, 50, 1000, 10**6])
def test_the_bound_on_dead_channels_holds_the_exact_one(count: int, survey: Survey) -> None:
    exact, bound = 1 - 0.05 ** (1 / count), replace(survey, input_count=count).dead_bound
    assert exact <= bound
    assert bound <= 1.06 * exact or count < 50
    assert math.isclose(replace(survey, input_count=1000).dead_bound, 0.003)
