"""The one picture of a run: its maps pixel by pixel, its words, and that nothing lies over anything else."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import nn

import hookscope
from hookscope.commands.activations.describe import describe_activations
from hookscope.commands.check.describe import describe_check, wrong_pictures
from hookscope.commands.diff.describe import describe_differences, summarised
from hookscope.commands.grads.describe import describe_gradients
from hookscope.reporting.axes import tail_of, within_blocks
from hookscope.reporting.depth_charts import depth_charts
from hookscope.reporting.document import (
    DepthChart,
    DetailedRow,
    Document,
    FindingLine,
    Findings,
    HeatMaps,
    Maps,
    Part,
    Section,
    Series,
)
from hookscope.reporting.html.figures import over_depth
from hookscope.reporting.lettering import drawable
from hookscope.reporting.overlays import colour_scale
from hookscope.reporting.overviews import maps as maps_module
from hookscope.reporting.overviews.charts import BLUE, GREY, ORANGE, PALE_BLUE, VERMILION, Chart
from hookscope.reporting.overviews.document import draw_document
from hookscope.reporting.overviews.maps import chosen_maps, coloured
from hookscope.reporting.overviews.sheet import (
    AMBER,
    DIM,
    GREEN,
    INK,
    LINE,
    MARGIN,
    PAPER,
    RED,
    WIDTH,
    draw_sheet,
    in_font,
)
from hookscope.reporting.palettes import colour_levels
from hookscope.reporting.plots import depth_plot
from hookscope.reporting.steps import heat_map
from hookscope.results.activations import FeatureMaps, MapSummary
from hookscope.results.check import CheckReport, OverviewParts
from hookscope.results.differences import Differences
from hookscope.results.training import TrainingLog, WatchedParameter, WatchedStep
from tests.inspections import inspect
from tests.reporting.checked import CORRUPT, FAILED, HOSTILE, LABELLED
from tests.reporting.conftest import GRADIENTS, INSPECTION, ROWS
from tests.reporting.trained import START, draw_training, long_training, train

SIGNED = np.array([[-1.0, 0.0], [0.5, 2.0]], np.float32)
CAT = Path(__file__).parents[2] / "sample_images" / "cat.jpg"


class Written(NamedTuple):
    text: str
    left: float
    top: float
    right: float
    bottom: float


@contextmanager
def writing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Written]]:
    """Record every text that is drawn, with the box of its ink."""
    written: list[Written] = []
    drawn = ImageDraw.ImageDraw.text

    def text(pen: ImageDraw.ImageDraw, place: Any, words: str, fill: Any, font: Any, anchor: str = "la") -> None:
        left, top, right, bottom = pen.textbbox(place, words, font=font, anchor=anchor)
        written.append(Written(words, left, top, right, bottom))
        drawn(pen, place, words, fill, font, anchor=anchor)

    with monkeypatch.context() as patch:
        patch.setattr(ImageDraw.ImageDraw, "text", text)
        yield written


def summary(row: int, size: tuple[int, int], kind: str = "Conv2d", **values: Any) -> MapSummary:
    maps = np.full(size, row, np.float32)
    expected = {
        "label": f"layer{row}",
        "kind": kind,
        "input_index": 0,
        "combined": maps,
        "strongest": maps,
        "channel": 0,
    }
    return MapSummary(row, **{**expected, "channel_count": 4, "size": size, **values})


def holds(image: Image.Image, pixels: NDArray[np.uint8]) -> bool:
    """Tell whether a picture lies somewhere in a larger one, pixel for pixel."""
    sheet = np.asarray(image)
    first = pixels[0].tobytes()
    for top, line in enumerate(sheet[: len(sheet) - len(pixels) + 1]):
        at = line.tobytes().find(first)
        if at >= 0 and at % 3 == 0:
            left = at // 3
            if np.array_equal(sheet[top : top + len(pixels), left : left + pixels.shape[1]], pixels):
                return True
    return False


def enlarged(values: NDArray[np.float32], name: str, low: float, high: float, side: int) -> NDArray[np.uint8]:
    """Return a square map in a colour map of Matplotlib, each value a block, so many pixels a side."""
    levels = (values - low) / (high - low)
    colours = (mpl.colormaps[name](np.round(levels * 240) / 240, bytes=True))[..., :3]
    place = (np.arange(side) + 0.5) * len(values) // side
    return np.ascontiguousarray(colours[place.astype(int)][:, place.astype(int)])


# Maps


def labels_of(values: NDArray[np.float32]) -> tuple[str, ...]:
    return colour_scale(values, clips=False).labels


def test_colours_are_matplotlibs_zero_in_the_middle_where_a_value_is_negative() -> None:
    positive = np.array([[0.0, 1.0], [2.0, 4.0]], np.float32)
    np.testing.assert_array_equal(np.asarray(coloured(positive)), enlarged(positive, "viridis", 0, 4, 2))
    np.testing.assert_array_equal(np.asarray(coloured(SIGNED)), enlarged(SIGNED, "berlin", -2, 2, 2))
    assert labels_of(positive) == ("0", "4")
    assert labels_of(SIGNED) == ("-2", "0", "2")
    assert labels_of(np.zeros((2, 2), np.float32)) == ("0 everywhere",)


def test_values_that_are_not_finite_are_magenta_and_leave_the_scale_alone() -> None:
    values = np.array([[np.nan, 1.0], [np.inf, 4.0]], np.float32)
    drawn = np.asarray(coloured(values))
    assert drawn[0, 0].tolist() == drawn[1, 0].tolist() == [255, 0, 255]
    assert labels_of(values) == ("0", "4")
    assert labels_of(np.full((2, 2), np.nan, np.float32)) == ("no finite value",)


def test_the_sheet_shows_the_mean_and_the_strongest_channel_of_the_run() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.ReLU())
    run = inspect(model, torch.randn(1, 3, 14, 14), grids_for=1, summaries=True)
    sheet = draw_document(describe_activations(run))
    for kept, name in zip(run.feature_maps, ("berlin", "viridis"), strict=True):
        strengths = np.sqrt((kept.values.astype(np.float64) ** 2).mean(axis=(1, 2)))
        for values in (kept.values.mean(axis=0), kept.values[strengths.argmax()]):
            top = float(np.abs(values).max())
            low = -top if values.min() < 0 else 0.0
            assert (name == "berlin") == (low < 0)
            assert holds(sheet, enlarged(values, name, low, top, 209))  # five columns of a sheet
    assert not holds(sheet, enlarged(run.feature_maps[1].values[strengths.argmin()], "viridis", 0, 1, 209))


def test_a_channel_that_is_shown_for_its_nan_or_inf_is_not_called_the_strongest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = torch.ones(1, 3, 4, 4)
    for held, name in ((torch.nan, "NaN"), (torch.inf, "Inf")):
        values[0, 1, 2, 3] = held
        with writing(monkeypatch) as written:
            draw_document(describe_activations(inspect(nn.Identity(), values, summaries=True)))
        assert f"channel 1, holds {name}" in [each.text for each in written]
    values[0, 1, 2, 3] = 9
    with writing(monkeypatch) as written:
        draw_document(describe_activations(inspect(nn.Identity(), values, summaries=True)))
    assert "channel 1, strongest" in [each.text for each in written]


def test_the_input_stands_beside_the_answer_as_the_network_saw_it() -> None:
    run = hookscope.activations("demo", CAT, layer="name:_conv_stem", verify=False)
    assert run.provenance is not None
    seen = run.provenance.pictures[run.inputs[0]]
    small = np.asarray(Image.fromarray(seen).resize((200, 200), Image.Resampling.LANCZOS, reducing_gap=3.0))
    assert holds(draw_document(describe_activations(run)), np.ascontiguousarray(small[1:-1, 1:-1]))


def test_wrong_pictures_are_drawn_enlarged_pixel_for_pixel() -> None:
    wrong = WRONG[0]
    assert wrong is not None
    whole = wrong.repeat(38, axis=0).repeat(38, axis=1)
    sheet = draw_check(replace(LABELLED, overview_parts=OverviewParts(pictures=WRONG)))
    assert holds(sheet, np.ascontiguousarray(whole[1:-1, 1:-1]))
    assert draw_check(LABELLED).height < sheet.height - 190  # without evidence there are words alone


# Which layers


def test_the_last_layer_of_each_size_stands_for_it() -> None:
    sizes = [(56, 56), (56, 56), (28, 28), (28, 28), (14, 14), (7, 7), (7, 7), (112, 112)]
    layers = [summary(row, size) for row, size in enumerate(sizes)]
    assert [chosen_map.row for chosen_map in chosen_maps(layers)] == [1, 3, 4, 6, 7]


def test_of_many_sizes_the_largest_the_smallest_and_some_between_are_chosen() -> None:
    layers = [summary(row, (side, side)) for row, side in enumerate((256, 128, 64, 32, 16, 8, 4, 2))]
    assert [chosen_map.size[0] for chosen_map in chosen_maps(layers)] == [256, 128, 64, 32, 4]


def test_where_all_maps_are_of_one_size_layers_are_spread_over_the_depth() -> None:
    layers = [summary(row, (14, 14)) for row in range(41)]
    assert [chosen_map.row for chosen_map in chosen_maps(layers)] == [0, 10, 20, 30, 40]
    assert [chosen_map.row for chosen_map in chosen_maps(layers[:3])] == [0, 1, 2]
    assert chosen_maps([]) == []


def test_padding_stands_for_nothing_unless_there_is_nothing_else() -> None:
    padded = [summary(0, (9, 9), "ZeroPad2d"), summary(1, (8, 8))]
    assert [chosen_map.row for chosen_map in chosen_maps(padded)] == [1]
    assert [chosen_map.row for chosen_map in chosen_maps(padded[:1])] == [0]


# Charts


def drawn_chart(series: Series, **further: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    labels = further.pop("labels", [""] * len(series.values))
    plot = depth_plot(DepthChart(title="", labels=labels, series=[series], **further))
    assert plot is not None
    return np.asarray(draw_sheet([Chart(plot).block]))


def test_an_area_is_as_high_as_its_share() -> None:
    shares = (1.0, 0.5, 0.0, 0.25)
    sheet = drawn_chart(Series("", shares, shape="area"), axis="percent")
    inked = (sheet == PALE_BLUE).all(axis=2)
    inked[: MARGIN + 30] = False  # the key
    columns = np.flatnonzero(inked.any(axis=0))
    assert columns.max() == WIDTH - MARGIN - 1
    step = (columns.max() + 1 - columns.min()) / 4
    counts = [inked[:, round(columns.min() + (place + 0.5) * step)].sum() for place in range(4)]
    np.testing.assert_allclose(np.array(counts) / counts[0], shares, atol=0.03)


def test_a_logarithmic_line_is_straight_where_values_grow_by_a_factor() -> None:
    sheet = drawn_chart(Series("", [1e-3, 1e-1, 1e1, 1e3, None])).astype(int)
    near = np.abs(sheet - np.array(BLUE)).sum(axis=2) < 60
    near[: MARGIN + 30] = False
    rows, columns = np.nonzero(near)
    slope, start = np.polyfit(columns, rows, 1)
    assert slope < 0
    assert np.abs(rows - (start + slope * columns)).max() < 5  # a dot's radius
    assert columns.max() < WIDTH - MARGIN - 150  # there is no fifth value


def test_a_mark_and_a_ground_stand_at_their_layer() -> None:
    marked, pointed_at = ([place == wanted for place in range(10)] for wanted in (2, 7))
    sheet = drawn_chart(Series("", [1.0] * 10), marks=[("", "fail", marked)], ground=("", pointed_at)).astype(int)
    red = np.abs(sheet - VERMILION).sum(axis=2) < 30
    red[: MARGIN + 30] = False
    plot_left = 92
    step = (WIDTH - MARGIN - plot_left) / 10
    assert np.nonzero(red)[1].mean() == pytest.approx(plot_left + 2.5 * step, abs=1.5)
    tinted = (sheet == (92, 50, 38)).all(axis=2)
    tinted[: MARGIN + 30] = False
    columns = np.nonzero(tinted)[1]
    assert (columns.min(), columns.max() + 1) == (
        pytest.approx(plot_left + 7 * step, abs=2),
        pytest.approx(plot_left + 8 * step, abs=2),
    )


@pytest.mark.parametrize(("low", "high"), [(1e-9, 1.0), (0.9, 1.8), (1.2, 1.7), (3.0, 40.0), (1.61, 1.64)])
def test_a_logarithmic_axis_has_a_few_numbers_however_short_it_is(
    monkeypatch: pytest.MonkeyPatch, low: float, high: float
) -> None:
    with writing(monkeypatch) as written:
        drawn_chart(Series("", [low, high]))
    ticks = [float(each.text) for each in written if re.fullmatch(r"[0-9.e-]+", each.text)]
    assert 2 <= len(ticks) <= 6
    assert ticks == sorted(ticks)


def test_a_chart_of_zeros_and_dead_channels_is_left_out_without_any() -> None:
    def titles(zero_fraction: float) -> list[str]:
        rows = [
            replace(row, activation=replace(row.activation, zero_fraction=zero_fraction, dead_channel_count=0))
            for row in ROWS
            if row.activation.zero_fraction is not None
        ]
        return [chart.title for chart in depth_charts(rows)]

    assert "Exact zeros and dead channels" in titles(0.25)
    without = titles(0.0)
    assert "Exact zeros and dead channels" not in without
    assert "Size of the values, layer by layer" in without


# Words, and that they can be read


def test_an_arrow_is_spelled_in_letters_that_the_font_has() -> None:
    assert in_font("0.244 → 0.37") == "0.244 -> 0.37"


def test_words_have_the_contrast_that_wcag_asks_for_and_lines_that_of_graphics() -> None:
    def luminance(colour: tuple[int, int, int]) -> float:
        parts = [each / 255 for each in colour]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    def contrast(colour: tuple[int, int, int]) -> float:
        low, high = sorted([luminance(colour), luminance(PAPER)])
        return (high + 0.05) / (low + 0.05)

    assert min(map(contrast, (INK, DIM, RED, AMBER, GREEN))) >= 4.5
    assert min(map(contrast, (BLUE, ORANGE, VERMILION, GREY, LINE))) >= 3


CHECKED = OverviewParts(ROWS, ROWS[4:6], (summary(4, (56, 56)), summary(5, (5, 200))))
WRONG = (np.arange(75, dtype=np.uint8).reshape(5, 5, 3) * 3, None)  # of `LABELLED`


def draw_differences(result: Differences) -> Image.Image:
    return draw_document(describe_differences(result))


def draw_check(report: CheckReport) -> Image.Image:
    return draw_document(describe_check(report), wrong_pictures(report))


DRAWN: dict[str, Callable[[], Image.Image]] = {
    "activations": lambda: draw_document(describe_activations(INSPECTION)),
    "grads": lambda: draw_document(describe_gradients(GRADIENTS)),
    "check": lambda: draw_check(replace(FAILED, overview_parts=CHECKED)),
    "check without a network": lambda: draw_check(CORRUPT),
    "check of labelled pictures": lambda: draw_check(replace(LABELLED, overview_parts=OverviewParts(pictures=WRONG))),
}


@pytest.mark.parametrize("name", DRAWN)
def test_the_words_are_those_of_the_golden_file(
    name: str, monkeypatch: pytest.MonkeyPatch, assert_golden: Callable[[str, str], None]
) -> None:
    with writing(monkeypatch) as written:
        DRAWN[name]()
    assert all(drawable(each.text, 1000) == each.text for each in written)
    assert_golden(f"overview-{name.replace(' ', '-')}.txt", "".join(f"{each.text}\n" for each in written))


def networks() -> Iterator[Image.Image]:
    """Draw what real networks do: long names, wide and high maps, many layers, few, none, several inputs."""
    torch.manual_seed(0)
    long_names = nn.Sequential()
    for number in range(6):
        block = nn.Sequential()
        block.add_module(
            f"a_block_with_a_long_name_number_{number}", nn.Conv2d(3, 3, 3, stride=1 + number % 2, padding=1)
        )
        long_names.add_module(f"a_stage_with_a_long_name_{number}", block)
    yield draw_document(describe_activations(inspect(long_names, torch.randn(1, 3, 20, 90), summaries=True)))
    yield draw_document(describe_activations(inspect(long_names, torch.randn(2, 3, 90, 20), summaries=True)))
    many = nn.Sequential(*(nn.Conv2d(2, 2, 1) for _ in range(300)))
    yield draw_document(describe_activations(inspect(many, torch.randn(5, 2, 9, 9), summaries=True)))
    yield draw_document(
        describe_activations(inspect(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(1, 4), summaries=True))
    )
    yield draw_document(
        describe_activations(inspect(nn.Identity(), torch.full((1, 1, 2, 2), torch.nan), summaries=True))
    )
    yield draw_document(describe_activations(inspect(nn.Identity(), torch.full((1, 1, 2, 2), 1e38), summaries=True)))
    yield from (draw() for draw in DRAWN.values())
    yield from map(draw_check, HOSTILE)
    yield draw_document(describe_gradients(hookscope.grads(nn.Sequential(nn.Linear(4, 1)), torch.randn(2, 4))))
    yield draw_document(describe_gradients(replace(GRADIENTS, verdicts=GRADIENTS.verdicts * 9)))
    edited = hookscope.diff(long_names, "same", torch.randn(2, 3, 20, 90), edit_b="*number_2:output:scale(2)")
    yield draw_differences(edited)
    yield draw_differences(replace(edited, rows=(), maps=(), first_differences=(), outputs=()))
    yield draw_differences(hookscope.diff(many, "same", torch.full((1, 2, 3, 3), torch.nan), reference="float64"))
    yield draw_differences(hookscope.diff(nn.Linear(4, 4), nn.Linear(4, 4)))


@pytest.mark.exhaustive
def test_nothing_lies_over_anything_else_and_nothing_leaves_the_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    with writing(monkeypatch) as written:
        for sheet in networks():
            assert sheet.width == WIDTH
            assert sheet.height < 2000
            assert_apart(written, sheet)
            written.clear()


def assert_apart(written: Sequence[Written], sheet: Image.Image) -> None:
    for each in written:
        assert each.left >= MARGIN - 2, each
        assert each.right <= WIDTH - MARGIN + 6, each
        assert each.bottom <= sheet.height - MARGIN + 6, each
    for place, each in enumerate(written):
        for other in written[:place]:
            apart = each.left >= other.right - 1 or other.left >= each.right - 1  # boxes are of whole pixels
            assert apart or each.top >= other.bottom or other.top >= each.bottom, (each, other)


def test_maps_of_a_difference_are_the_mean_magnitude_and_the_channel_with_the_most_of_it() -> None:
    values = np.array([[[1.0, -1.0], [0.0, 0.0]], [[-3.0, 3.0], [0.0, 2.0]]], np.float32)
    maps = FeatureMaps(4, "conv", "Conv2d", 0, "maps", values, None, 2, (2, 2, 2))
    shown = summarised(maps, "Conv2d")
    assert shown.combined.tolist() == [[2.0, 2.0], [0.0, 1.0]]
    assert (shown.channel, shown.strongest.tolist()) == (1, values[1].tolist())
    holed = np.array([[[1.0, np.nan]], [[9.0, np.inf]]], np.float32)
    assert summarised(replace(maps, values=holed), "Conv2d").channel == 0
    large = replace(maps, values=np.arange(320 * 321, dtype=np.float32).reshape(1, 320, 321), channel_count=1)
    shown = summarised(large, "Conv2d")
    assert (shown.size, shown.combined.shape) == ((320, 321), (107, 107))
    assert shown.combined[0, 0] == 322.0  # the mean of 0, 1, 2, 321, 322, 323, 642, 643, 644


def test_a_run_without_rows_or_parameters_is_drawn() -> None:
    assert draw_document(describe_activations(replace(INSPECTION, rows=()))).width == WIDTH
    assert (
        draw_document(describe_gradients(replace(GRADIENTS, gradients=(), parameters=(), verdicts=()))).width == WIDTH
    )


def test_findings_beyond_the_first_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with writing(monkeypatch) as written:
        draw_document(describe_gradients(replace(GRADIENTS, verdicts=GRADIENTS.verdicts * 2)))
    assert [each.text for each in written if re.match(r"and \d", each.text)][:1] == ["and 2 more findings"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("broken_at", [None, 25])
def test_the_picture_of_a_training_has_the_answer_and_nothing_lies_over_anything(
    monkeypatch: pytest.MonkeyPatch, broken_at: int | None
) -> None:
    log = train(40, broken_at=broken_at)
    with writing(monkeypatch) as written:
        image = draw_training(log)
    assert image.width == WIDTH
    texts = [each.text for each in written]
    sentence = "No problems in 40 steps."
    assert (sentence if broken_at is None else "At step 25, 0.weight: its gradient holds NaN (limit 0).") in texts
    assert {"Loss", "Gradient norm", "0.weight", "before clipping"} <= {*texts}
    assert_apart(written, image)


@pytest.mark.exhaustive
def test_the_heat_map_of_a_training_is_coloured_by_its_logarithm() -> None:
    steps = tuple(
        WatchedStep(step, "every", (WatchedParameter("p", "gradient", 1.0, norm),))
        for step, norm in enumerate([1.0, 10.0, 100.0, 0.0, np.nan], 1)
    )
    image = draw_training(TrainingLog((START,), (), steps, (), ()))
    low, middle, high = (colour_levels("viridis", 255)[place] for place in (0, 127, 254))
    width = (WIDTH - 2 * MARGIN - 330) / 5  # a fifth of what is right of the names
    row = next(
        np.asarray(image)[top]
        for top in range(image.height)
        if tuple(np.asarray(image)[top, WIDTH - 40]) == (255, 0, 255)
    )
    shown = [row[round(MARGIN + 330 + (place + 0.5) * width)].tolist() for place in range(5)]
    assert shown == [low.tolist(), middle.tolist(), high.tolist(), [120, 124, 130], [255, 0, 255]]


@pytest.mark.exhaustive
def test_a_spike_of_one_step_in_100_000_is_seen() -> None:
    quiet, loud = (
        np.asarray(draw_training(long_training(20_000, parameters=1, every=10_000, spikes=spikes)))
        for spikes in ({}, {7_777: 500.0})
    )
    assert quiet.shape == loud.shape
    assert (quiet != loud).any()


@pytest.mark.exhaustive
def test_a_loss_below_zero_has_a_linear_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    log = train(20)
    steps = tuple(replace(step, loss=-float(step.step)) for step in log.steps)
    with writing(monkeypatch) as written:
        draw_training(replace(log, steps=steps))
    assert {"-20", "-15", "-10", "-5"} <= {each.text for each in written}


@pytest.mark.exhaustive
def test_a_training_without_loss_norms_or_steps_is_drawn() -> None:
    log = train(12)
    without_loss = tuple(replace(step, loss=None) for step in log.steps)
    nothing = tuple(replace(step, loss=None, gradient_norm=None, norm_before_clipping=None) for step in log.steps)
    only_nan = tuple(replace(step, loss=np.nan, gradient_norm=np.nan) for step in log.steps)
    for steps in ((), log.steps[:1], without_loss, nothing, only_nan):
        assert draw_training(replace(log, steps=steps)).width == WIDTH
        draw_training(replace(log, steps=steps, watched=()))


def test_operations_of_the_networks_own_code_stand_in_the_block_before_them() -> None:
    labels = ["tok", "(model):add", "blocks.0.ln", "(model):view", "blocks.0:gelu", "blocks.1.ln", ":add", "(model)"]
    expected = ["tok", "tok", "blocks.0.ln", "blocks.0.ln", "blocks.0", "blocks.1.ln", "blocks.1.ln", "(model)"]
    assert within_blocks(labels) == expected


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["a.0", "a.1", "b.0", "c", "d", "e"], ["a", "b", "c", "d", "e"]),
        # A block of 6 in 10 layers.
        (
            [*"abc", *(f"body.{n}.{part}" for n in range(3) for part in ("attn", "mlp")), "head"],
            ["a", "b", "c", "body.0", "body.1", "body.2", "head"],
        ),
        # Few blocks, none of them long.
        (["0.w", "0.b", "2.w", "2.b", "4.w"], ["0.w", "0.b", "2.w", "2.b", "4.w"]),
    ],
)
def test_a_picture_and_a_page_name_the_same_blocks_of_layers(
    monkeypatch: pytest.MonkeyPatch, labels: list[str], expected: list[str]
) -> None:
    values = [1.0] * len(labels)
    with writing(monkeypatch) as written:
        drawn_chart(Series("", values), labels=labels)
    drawn = [each.text for each in sorted(written, key=lambda each: each.left) if re.search("[a-z]", each.text)]
    page = over_depth(DepthChart(title="", labels=labels, series=[Series("", values)]))
    assert page is not None
    named = [name.text for name in page.names]
    assert drawn == named == expected


def test_a_place_on_an_axis_has_the_end_of_its_name_whole() -> None:
    names = ["encoder.layers.encoder_layer_11", "model.blocks.3", "fc"]
    assert [tail_of(name) for name in names] == ["encoder_layer_11", "blocks.3", "fc"]


def test_operations_of_a_network_without_modules_have_their_own_names() -> None:
    assert within_blocks(["(model):conv2d", "(model):relu#1", "(model)"]) == ["conv2d", "relu#1", "(model)"]


def test_what_differs_in_a_sequence_is_named_as_one_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    words: list[str] = []
    write = "hookscope.reporting.overviews.sheet.write"
    monkeypatch.setattr(write, lambda _, lines, *__: words.extend(line[0] for line in lines))
    sequence = FeatureMaps(
        0, "up", "Linear", 0, "maps", np.ones((1, 6, 5), np.float32), None, channel_count=6, shape=(5, 6)
    )
    assert sequence.is_sequence
    summaries = [summarised(sequence, "Linear")]
    part = Maps(maps=summaries, names=("mean of |A-B|", "A-B in channel {}"), sequences={0})
    draw_sheet(maps_module.map_columns(part))
    assert words == ["up", "Linear", "6 x 5", "|A-B|", "A-B"]


def test_every_name_in_a_picture_is_drawn_in_a_font_that_has_its_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    fonts: dict[str, str] = {}
    drawn = ImageDraw.ImageDraw.text

    def text(pen: ImageDraw.ImageDraw, place: Any, words: str, fill: Any, font: Any, anchor: str = "la") -> None:
        fonts[words] = font.getname()[0]
        drawn(pen, place, words, fill, font, anchor=anchor)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", text)
    heat = heat_map("norm", "Größe", {"é": [1.0, 2.0]}, [1, 2], (9, 9), set(), share=False)
    assert heat is not None
    heat = replace(heat, column_names=("première.pt", "dernière.pt"))
    finding = FindingLine(level="warn", rule="rule", message="", where="é", spans=[(0, 1000)])
    parts: list[Part] = [
        Findings(findings=[finding], ends=("début", "finí")),
        HeatMaps(
            maps=lambda *_: [heat], details=lambda name: DetailedRow(name=name, kind=""), legend="", empty="", all_in=""
        ),
        DepthChart(title="Profondeur é", labels=["ж"], series=[Series("série", [1.0])], letters=[("ñ", 0)]),
    ]
    section = Section("all", "All", parts)
    draw_document(Document(title="T", page_title="T", answer=["A"], level="", sections=[section], main="all"))
    foreign = {words: name for words, name in fonts.items() if not words.isascii()}
    expected = {"Größe", "première.pt", "dernière.pt", "début", "finí", "Profondeur é", "ж", "série", "ñ"}
    assert foreign.keys() >= expected
    assert set(foreign.values()) == {"DejaVu Sans"}


def test_a_layer_whose_name_is_a_number_is_called_a_layer_on_the_time_line(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [
        FindingLine(level="warn", rule="dead-filter", message="", where=where, spans=[(0, 1000)])
        for where in ("0", "layer1.0", "")
    ]
    section = Section("all", "All", [Findings(findings=findings, ends=("a", "b"))])
    with writing(monkeypatch) as written:
        draw_document(Document(title="T", answer=["A"], sections=[section]))
    names = [words.text.rstrip() for words in written if words.text.startswith("dead-filter")]
    assert names == ["dead-filter  layer 0", "dead-filter  layer1.0", "dead-filter"]
