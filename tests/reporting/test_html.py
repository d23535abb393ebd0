import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from PIL import Image

from hookscope.commands.grads.describe import describe_gradients
from hookscope.errors import InputError
from hookscope.inputs.preprocessing import thumbnails
from hookscope.reporting.document import DepthChart, DetailedTable, Series
from hookscope.reporting.html.figures import HEIGHT, Figure, over_depth
from hookscope.reporting.html.pictures import LADDER, Fidelity, Picture, shrink, shrink_all
from hookscope.results.activations import Activations
from hookscope.results.distribution import BIN_COUNT, distribution_of, histogram
from hookscope.results.grids import Grid, Tiles
from hookscope.results.inputs import Preprocessing
from hookscope.results.runs.reading import read_run
from hookscope.results.runs.store import checked
from hookscope.results.statistics import TensorStatistics
from tests.reporting.html_page import Page
from tests.reporting.stored import (
    MODEL,
    PALETTE,
    drawn,
    given,
    gradient,
    maps,
    parameter,
    picture_png,
    report_html,
    row,
    statistics,
    write_run,
)


def indices(png: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    import io

    with Image.open(io.BytesIO(png)) as picture:
        assert picture.mode == "P"
        assert picture.getpalette() == PALETTE
        return np.asarray(picture)


def stored(**values: Any) -> TensorStatistics:
    rows = [row(0, "a", activation=statistics(**values))]
    result: Activations = checked(Activations, {"model": MODEL, "inputs": [], "rows": rows})
    return result.rows[0].activation


def shrunk(made: tuple[bytes, Grid], fidelity: Fidelity = LADDER[0]) -> Picture:
    picture = shrink(*made, fidelity)
    assert picture is not None
    return picture


# --- thumbnails


def test_a_thumbnail_is_the_picture_before_normalisation() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 3, 5, 7), np.uint8)
    how = Preprocessing(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    mean, std = (np.array(case, np.float32)[:, None, None] for case in (how.mean, how.std))
    values = (pixels.astype(np.float32) / 255 - mean) / std
    drawn = thumbnails(values, how)
    assert np.array_equal(np.stack(drawn), pixels.transpose(0, 2, 3, 1))


def test_a_thumbnail_cuts_off_what_no_colour_is_and_shows_the_first_frame() -> None:
    values = np.array([-5.0, 0.5, 7.0, np.nan, np.inf], np.float32).reshape(1, 1, 1, 1, 5)
    clip = np.concatenate([values, np.zeros_like(values)], axis=2)  # (N, C, T, H, W)
    (drawn,) = thumbnails(clip, Preprocessing(mean=(), std=()))
    assert drawn.tolist() == [[0, 128, 255, 0, 0]]


@pytest.mark.parametrize("shape", [(2, 4, 8, 8), (2, 10), (1, 3, 0, 4), (3, 8, 8)])
def test_what_is_no_picture_has_no_thumbnail(shape: tuple[int, ...]) -> None:
    assert thumbnails(np.zeros(shape, np.float32), Preprocessing()) == []


# --- histograms


def test_a_histogram_counts_each_value_once() -> None:
    counted = histogram(distribution_of(np.arange(1001.0)))  # percentiles 10 and 990
    assert counted is not None
    assert (counted.low, counted.high, counted.below, counted.above) == (10.0, 990.0, 10, 10)
    assert len(counted.counts) == BIN_COUNT
    assert sum(counted.counts) == 981
    assert max(counted.counts) - min(counted.counts) <= 1


def test_a_histogram_of_values_in_bins_counts_each_once_too() -> None:
    values = np.random.default_rng(0).normal(size=50_000)
    counted = histogram(distribution_of(values))
    assert counted is not None
    assert counted.below + sum(counted.counts) + counted.above == values.size
    expected, _ = np.histogram(values, np.linspace(counted.low, counted.high, BIN_COUNT + 1))
    assert np.abs(np.array(counted.counts) - expected).max() < 0.002 * values.size


@pytest.mark.parametrize("value", [0.0, -3.5, 1e-320, 3e38])
def test_a_histogram_of_one_value_is_one_bar(value: float) -> None:
    for count in (9, 9000):
        counted = histogram(distribution_of(np.full(count, value)))
        assert counted is not None
        assert (counted.low, counted.high, counted.counts) == (value, value, (count,))
        assert (counted.below, counted.above) == (0, 0)


def test_a_histogram_bears_the_widest_range_there_is() -> None:
    largest = float(np.finfo(np.float64).max)
    for times in (1, 1000):
        counted = histogram(distribution_of(np.repeat([-largest, 0.0, largest], times)))
        assert counted is not None
        assert sum(counted.counts) + counted.below + counted.above == 3 * times


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"element_count": 60}, "<dt>values</dt><dd>60</dd>"),
        ({"element_count": 5000}, "<dd>5,000; quantiles within 3% of the value or 0.5% of its rank</dd>"),
        ({"element_count": 5000, "quantiles": None}, "<dt>values</dt><dd>5,000</dd>"),
    ],
)
def test_the_page_says_how_good_quantiles_are(values: dict[str, Any], says: str, tmp_path: Path) -> None:
    assert says in report_html(read_run(write_run(tmp_path / "run", [row(0, "conv", activation=statistics(**values))])))


# --- tiles and pictures


def test_fewer_colours_keep_zero_and_the_ends_and_what_is_no_level() -> None:
    levels = np.array([[[0, 1, 2, 119, 120, 121, 239, 240, 241, 242, 243, 255]]], np.uint8)
    kept = indices(shrunk(drawn(levels, 1), Fidelity(4)).png)
    assert kept.tolist() == [[0, 0, 4, 120, 120, 120, 240, 240, 241, 242, 243, 255]]
    kept = indices(shrunk(drawn(levels, 1), Fidelity(8)).png)
    assert kept.tolist() == [[0, 0, 0, 120, 120, 120, 240, 240, 241, 242, 243, 255]]


def test_a_shorter_side_averages_squares_and_fewer_channels_are_the_first() -> None:
    levels = maps(4, 6, 5)
    picture = shrunk(drawn(levels, 2), Fidelity(1, 3, 2))
    assert (picture.count, picture.height, picture.width) == (2, 3, 3)
    squares = [[level[y : y + 2, x : x + 2].mean() for x in (0, 2, 4)] for level in levels[:2] for y in (0, 2, 4)]
    expected = np.concatenate(np.array(squares).reshape(2, 3, 3), axis=1)
    assert np.abs(indices(picture.png) - expected).max() <= 0.5  # rounded
    assert picture.caption[1:] == ("here averages of 2 × 2 pixels", "here the first 2 channels")
    assert len(shrunk(drawn(levels, 2), Fidelity()).caption) == 1


def test_a_texture_of_one_pixel_is_grey_when_averaged_and_nan_and_zero_stay_what_they_are() -> None:
    checkered, zero, nothing = (
        np.indices((3, 4, 4)).sum(0)[:1] % 2 * 240,
        np.full((1, 4, 4), 120),
        np.full((1, 4, 4), 242),
    )
    broken = np.full((1, 4, 4), 60)
    broken[0, 1, 2] = 241
    levels = np.concatenate([checkered, zero, nothing, broken]).astype(np.uint8)
    actual = indices(shrunk(drawn(levels, 4), Fidelity(1, 2)).png)
    assert actual.tolist() == [[120, 120, 120, 120, 242, 242, 60, 241], [120, 120, 120, 120, 242, 242, 60, 60]]


def test_pictures_give_up_no_more_than_their_budget_asks_for() -> None:
    made = [drawn(np.random.default_rng(n).integers(0, 241, (16, 30, 30), np.uint8), 4) for n in range(3)]
    grids = [replace(grid, path=f"{number}.png") for number, (_, grid) in enumerate(made)]
    read = {grid.path: png for grid, (png, _) in zip(grids, made, strict=True)}.__getitem__
    sizes = {}
    for fidelity in LADDER:
        sizes[fidelity] = sum(len(shrunk(each, fidelity).png) for each in made)
    assert sorted(sizes.values(), reverse=True) == list(sizes.values())  # the ladder leads down
    for budget in (sizes[LADDER[0]], sizes[LADDER[0]] - 1, sizes[LADDER[3]]):
        pictures, fidelity = shrink_all(grids, read, budget)
        assert fidelity == next(each for each in LADDER if sizes[each] <= budget)
        assert [picture is not None for picture in pictures] == [True] * 3
    pictures, fidelity = shrink_all(grids, read, sizes[LADDER[-1]] - 1)
    assert [picture is not None for picture in pictures] == [True, True, False]
    assert fidelity == LADDER[-1]
    assert "61 of 241 colours" in Fidelity(4).sentence


@pytest.mark.parametrize("wrong", [b"", b"\x89PNG\r\n\x1a\n", b"<svg/>", picture_png(), drawn(maps())[0][:200]])
def test_what_is_no_grid_is_refused_in_one_line(wrong: bytes) -> None:
    with pytest.raises(InputError, match=r"^Cannot read 'a\\n\.png': .*Run the command that made it again\.$"):
        shrink(wrong, replace(drawn(maps())[1], path="a\n.png"), Fidelity())


def test_tiles_outside_the_picture_are_refused() -> None:
    tiles = Tiles(7, 5, 2, 4, 1, 3, 5, 2, 3, 1)
    assert tiles.fits(5 + 13, 7 + 31)
    assert not tiles.fits(5 + 12, 7 + 31)
    assert not tiles.fits(5 + 13, 7 + 30)
    assert not Tiles(7, 5, 2, 4, 1, 3, 5, 0, 3, 1).fits(99, 99)


# --- plots


def plot(values: Sequence[float | None], axis: Literal["log", "percent"] = "log") -> Figure | None:
    shape: Literal["line", "area"] = "line" if axis == "log" else "area"
    labels = [*"abcdef"][: len(values)]
    return over_depth(DepthChart(title="g", labels=labels, series=[Series("m", values, shape=shape)], axis=axis))


def test_a_logarithmic_plot_puts_equal_ratios_at_equal_distances() -> None:
    figure = plot([1.0, 100.0, 10000.0])
    assert figure is not None
    heights = [float(word.split()[1]) for word in re.split("[ML]", figure.shapes[0][1])[1:]]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.11)
    assert all(0 < height < HEIGHT for height in heights)


def test_a_gap_breaks_the_line_and_a_lone_point_is_a_plus_sign() -> None:
    figure = plot([1.0, 2.0, None, 3.0])
    assert figure is not None
    assert re.fullmatch(r"M[\d.]+ [\d.]+L[\d.]+ [\d.]+M[\d.]+ [\d.]+m-3 0h6m-3 -3v6", figure.shapes[0][1])
    assert plot([0.0]) is None


def test_shares_are_bars_from_zero_whatever_their_neighbours() -> None:
    figure = plot([0.0, 0.1, None, 0.2, 0.0], "percent")
    assert figure is not None
    assert [text for _, text in figure.ticks] == ["0%", "10%", "20%"]
    [(_, path)] = figure.shapes
    tops = [float(each) for each in re.findall(r"V([\d.]+)", path)]
    assert tops == [height for height, text in figure.ticks if text != "0%"]
    assert plot([0.0, None], "percent") is None


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.4, 7.5, ["0.5", "1", "2", "5"]),
        (1.36, 1.52, ["1", "1.2", "1.4", "1.6", "1.8"]),
        (2e-7, 8e-7, ["2e-7", "5e-7"]),
        (1200.0, 7000.0, ["1,000", "2,000", "5,000"]),
    ],
)
def test_a_logarithmic_axis_has_round_numbers(low: float, high: float, expected: list[str]) -> None:
    figure = plot([low, high])
    assert figure is not None
    words = [text for _, text in figure.ticks]
    assert [word for word in words if word in expected] == expected
    assert len(words) <= 6


def test_names_of_wide_letters_stand_clear_of_each_other() -> None:
    labels = [letter * 9 for letter in "层卷积块头尾前后左右上下"]
    figure = over_depth(DepthChart(title="g", labels=labels, series=[Series("m", [1.0] * len(labels))]))
    assert figure is not None
    places = [name.place for name in figure.names]
    assert len(places) > 4
    assert min(np.diff(places)) > 9 * 12  # a letter is as wide as the font is high, 12 pixels


def test_no_name_that_a_phone_shows_ends_outside_of_the_plot() -> None:
    labels = ["stem"] * 144 + ["_bn1"] * 4
    figure = over_depth(DepthChart(title="g", labels=labels, series=[Series("m", [1.0] * len(labels))]))
    assert figure is not None
    ends = {name.text: 3 * name.share + 6.2 * len(name.text) * (not name.is_at_end) for name in figure.names}
    assert ends["_bn1"] > 310
    assert [name.text for name in figure.names if name.fits_phone] == ["stem"]


def test_layers_of_one_flat_network_are_named_from_the_first_to_the_last() -> None:
    labels = [*map(str, range(1200))]
    figure = over_depth(DepthChart(title="g", labels=labels, series=[Series("m", [1.0] * len(labels))]))
    assert figure is not None
    assert max(np.diff([int(name.text) for name in figure.names])) < 60
    assert int(figure.names[-1].text) > 1100


def test_of_many_inputs_a_few_are_open(tmp_path: Path) -> None:
    names = [f"{number}.jpg" for number in range(7)]
    pictures = [picture_png()] * 7
    run = write_run(tmp_path / "run", [row(0, "conv")], inputs=[given(name) for name in names], thumbnails=pictures)
    page = Page(report_html(read_run(run)))
    pictured = [each for each in page.all("details", **{"class": "more"}) if ".jpg" in each.text]
    assert [each.text.split()[0] for each in pictured] == names
    assert ["open" in element.attributes for element in pictured] == [True] * 4 + [False] * 3


def test_inputs_that_would_read_the_same_are_listed_once(tmp_path: Path) -> None:
    noise = {"name": "noise", "sha256": None, "size": None, "shape": [20], "steps": ["normal noise, seed 0"]}
    run = write_run(tmp_path / "run", [row(0, "conv")], inputs=[noise] * 3)
    words = Page(report_html(read_run(run))).said("p")
    assert "noise (3 inputs): to the network as 20 values." in words
    assert "noise: normal noise, seed 0." in words


# --- layers


def test_a_layer_has_its_calls_parameters_gradient_findings_and_grids_beside_it(tmp_path: Path) -> None:
    rows = [row(0, "conv"), row(1, "relu"), row(2, "relu", call=1)]
    verdict = {"rule": "dead-gradient", "level": "fail", "where": "conv.weight", "message": "It is 0."}
    verdict["followed_by"] = ["conv.bias"]
    gradients = [gradient(0, "conv"), gradient(1, "conv", role="input", slot="[0]"), gradient(2, "relu", call=1)]
    run = read_run(
        write_run(
            tmp_path / "run",
            rows,
            gradients=gradients,
            parameters=[parameter(at, name) for at, name in enumerate(("conv.weight", "conv.bias", "other.bias"))],
            grids={"002-relu-1.png": drawn(maps(), row=2)},
            verdicts=[verdict],
        )
    )
    [table] = [part for part in describe_gradients(run.result, run.record).parts if isinstance(part, DetailedTable)]
    conv, relu, again = table.rows()
    titles = [{table.title: table.rows for table in row.tables} for row in (conv, relu, again)]
    assert [weight.name for weight in titles[0]["Parameters"]] == ["conv.weight", "conv.bias"]
    assert [finding.rule for finding in conv.findings] == ["dead-gradient"]
    assert conv.flags == [("dead-gradient", True)]
    assert relu.flags == []
    assert [each.slot for each in titles[0]["Gradients of inputs"]] == ["[0]"]
    assert [len(title["Statistics"][0]) for title in titles] == [2, 2, 2]
    assert [(how, name) for how, name, _ in titles[1]["Connected rows"]] == [("another call", "relu#1")]
    assert ([*relu.grids], [*again.grids]) == ([], [run.record.grids[0]])


# --- the page


def page_of(folder: Path, rows: list[dict[str, Any]], **values: Any) -> str:
    return report_html(read_run(write_run(folder / "run", rows, **values)))


def test_a_page_holds_the_numbers_of_the_run(tmp_path: Path) -> None:
    page = page_of(tmp_path, [row(0, "conv", activation=statistics(mean=0.123456, max=98770.0))])
    assert '<td role="cell" class="c-mean number" data-v="0.123456">0.1235</td>' in page
    assert '<td role="cell" class="c-max number" data-v="98770.0">9.877e4</td>' in page
    assert "451 × 300 pixels, to the network as 3x224x224" in page
    assert "0.50 s (forward 0.50)" in page


def test_a_page_allows_its_own_style_and_script_and_nothing_else(tmp_path: Path) -> None:
    rows = [row(0, "conv"), row(1, "relu")]
    page = page_of(tmp_path, rows, grids={"000-conv.png": drawn(maps())}, thumbnails=[picture_png()])
    Page(page).assert_self_contained()
    assert "<script" in page
    assert not re.findall(r"https?://|url\((?!#)|@import", page)


def test_values_beyond_measure_are_shown_as_they_are(tmp_path: Path) -> None:
    huge = statistics(mean=1.7e308, std=5e-324, min=-1.7e308, max=None, element_count=10**30, l2=None, quantiles=None)
    page = page_of(tmp_path, [row(0, "a", activation=huge, parameter_count=10**40), row(1, "b")])
    assert "1.700e308" in page
    assert f"{10**40:,}" in page


def test_a_layer_without_a_grid_leaves_no_room_for_one(tmp_path: Path) -> None:
    page = page_of(tmp_path, [row(0, "a"), row(1, "b")], grids={"001-b.png": drawn(maps(), row=1)})
    without, within = (
        page[page.index(f'<template class="part" data-name="{name}"') :].partition("</template>")[0] for name in "ab"
    )
    assert ('<div class="split">' in without, '<div class="split">' in within) == (False, True)


def test_a_page_says_what_it_gave_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "hookscope.reporting.html.tables.shrink_all", lambda names, read, _room: shrink_all(names, read, 1)
    )
    page = page_of(tmp_path, [row(0, "conv")], grids={"000-conv.png": drawn(maps())})
    assert "1 grid did not fit" in page
    assert "see <code>grids/000-conv.png</code>" in page


def test_findings_come_before_the_table_and_lead_to_their_layer(tmp_path: Path) -> None:
    verdict = {"rule": "dead-gradient", "level": "fail", "where": "conv.weight", "message": "It is 0."}
    page = page_of(
        tmp_path,
        [row(0, "conv")],
        gradients=[gradient(0, "conv")],
        parameters=[parameter(0, "conv.weight")],
        verdicts=[verdict],
    )
    actual = page.index('<a class="name" href="#layer=conv">conv.weight</a>')
    assert page.index("<h1>") < actual < page.index("<table id=")


@pytest.mark.exhaustive
def test_a_layer_that_is_called_a_thousand_times_lists_the_calls_beside_it(tmp_path: Path) -> None:
    page = page_of(tmp_path, [row(at, "cell", call=at) for at in range(1000)])
    lists = re.findall(r"<h3>Connected rows, ([^<]*)</h3>(.*?)</table>", page, re.DOTALL)
    assert {title for title, _ in lists} == {"32 of 1,000 calls"}
    listed = [[int(call or 0) for call in re.findall(r">cell(?:#(\d+))?<", each)] for _, each in lists]
    expected = [[*range(1, 32)], [*range(484, 500), *range(501, 516)], [*range(968, 999)]]
    assert [listed[0], listed[500], listed[999]] == expected
