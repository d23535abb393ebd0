"""Pictures of maps of signals and volumes: colours where the map is, over what the network was given."""

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

import hookscope
from hookscope.commands.attribute.describe import describe_attributions
from hookscope.commands.attribute.draw_maps import draw_given
from hookscope.errors import InputError
from hookscope.reporting.html.document import document_html
from hookscope.results.attributions import AttributionMap, Attributions, Target
from hookscope.results.runs.reading import read_run
from tests.commands.attribute.test_signals_and_volumes import CASES, Looking

WIDTH = 1144
LEFT, RIGHT = 76, 12  # of the plot in a drawing of a signal


def one_map(values: NDArray[np.float32], size: tuple[int, ...]) -> AttributionMap:
    extent = (*[0.0] * values.ndim, *[1.0] * values.ndim)
    return AttributionMap(0, Target("a", 1.0), "", values.astype(np.float32), extent, None, size)


def saturation(picture: Image.Image) -> NDArray[np.int_]:
    pixels = np.asarray(picture).astype(int)
    return pixels.max(2) - pixels.min(2)


def test_a_signal_is_coloured_where_its_map_is() -> None:
    values = np.zeros(100, np.float32)
    values[40:60] = 1
    signal = np.sin(np.linspace(0, 20, 100, dtype=np.float32))[None]
    drawn = draw_given(signal, one_map(values, (100,)), WIDTH)
    coloured = saturation(drawn)[60] > 60  # a row through the first plot
    inner = WIDTH - LEFT - RIGHT
    inside = slice(LEFT + round(0.42 * inner), LEFT + round(0.58 * inner))
    outside = np.r_[coloured[LEFT : LEFT + round(0.38 * inner)], coloured[LEFT + round(0.62 * inner) :]]
    assert coloured[inside].mean() > 0.9  # the curve itself is dark
    assert not outside.any()


def test_a_long_recording_takes_little_memory_and_has_the_colours_of_a_short_one() -> None:
    steps = np.repeat(np.float32([0, 1, np.nan, 0.5]), 25)
    samples = np.zeros((1, 100), np.float32)
    short = draw_given(samples, one_map(steps, (100,)), WIDTH)
    long_map = one_map(np.repeat(steps, 1000), (100_000,))
    tracemalloc.start()
    drawn = draw_given(np.repeat(samples, 1000, 1), long_map, WIDTH)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100e6
    inner = WIDTH - LEFT - RIGHT
    for share in (0.1, 0.4, 0.6, 0.9):  # in the middle of each step
        column = LEFT + round(share * inner)
        assert drawn.getpixel((column, 40)) == short.getpixel((column, 40))


def test_the_curve_of_a_map_is_high_where_the_map_is() -> None:
    values = np.array([0, 0, 1, 0], np.float32)
    drawn = np.asarray(draw_given(None, one_map(values, (40,)), WIDTH)).astype(int)
    red = (drawn[..., 0] - drawn[..., 2]) > 100
    inner = WIDTH - LEFT - RIGHT
    middle = LEFT + round((2.5 / 4) * inner)
    assert np.flatnonzero(red[:, middle]).min() < 12
    assert np.flatnonzero(red[:, LEFT + round(0.1 * inner)]).min() > 95


def test_a_long_map_lies_under_the_part_of_the_signal_that_it_covers() -> None:
    values = np.zeros(6000, np.float32)
    values[3000] = 1
    part = replace(one_map(values, (10_000,)), extent=(0.2, 0.6))  # a kernel reaches far, and the map is cut there
    drawn = np.asarray(draw_given(None, part, WIDTH)).astype(int)
    columns = np.flatnonzero(((drawn[..., 0] - drawn[..., 2]) > 100).any(0)) - LEFT
    inner = WIDTH - LEFT - RIGHT
    assert columns.min() == pytest.approx(0.2 * inner, abs=2)
    assert columns.max() == pytest.approx(0.6 * inner, abs=2)
    peak = np.flatnonzero(((drawn[:20, :, 0] - drawn[:20, :, 2]) > 100).any(0)) - LEFT
    assert np.allclose(peak, 0.4 * inner, atol=2)


def test_a_signal_without_a_map_has_all_of_its_labels() -> None:
    foot = np.asarray(draw_given(np.ones((1, 40), np.float32), None, WIDTH).convert("L"))[-24:]
    assert (foot[9:20] > 100).any()
    assert not (foot[-3:] > 100).any()


def test_a_long_signal_shows_a_single_sample_that_stands_out() -> None:
    signal = np.zeros((1, 100_000), np.float32)
    signal[0, 50_000] = 1
    drawn = np.asarray(draw_given(signal, one_map(np.zeros(10), (100_000,)), WIDTH).convert("L"))
    inner = WIDTH - LEFT - RIGHT
    columns = np.flatnonzero((drawn[8:60, LEFT + 5 : -RIGHT - 5] < 100).any(0)) + LEFT + 5
    assert np.allclose(columns, LEFT + inner / 2, atol=2)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_marked_and_do_not_hide_the_others(bad: float) -> None:
    signal = np.sin(np.linspace(0, 20, 60, dtype=np.float32))[None].copy()
    signal[0, 30] = bad
    drawn = np.asarray(draw_given(signal, one_map(np.ones(60), (60,)), WIDTH))
    assert (drawn == (255, 0, 255)).all(2).any()


def test_slices_are_coloured_where_the_map_is() -> None:
    values = np.zeros((8, 16, 20), np.float32)
    values[1, 12, 3] = 1
    drawn = draw_given(np.random.default_rng(0).random((1, 8, 16, 20), np.float32), one_map(values, (8, 16, 20)), WIDTH)
    coloured = saturation(drawn) > 60
    half = drawn.height // 2
    assert not coloured[:half].any()  # the middle slices hold nothing of it
    below, right = np.nonzero(coloured[half:])
    assert len(below)
    # Of three slices the first is 20 wide and 16 high; the place is at 12.5 of 16, 3.5 of 20.
    first = np.asarray(right) < (WIDTH - 32) * 20 / (20 + 20 + 16)
    scale = (WIDTH - 32) / (20 + 20 + 16)
    assert np.median(below[first]) == pytest.approx(12.5 * scale, abs=1.5 * scale)
    assert np.median(right[first]) == pytest.approx(3.5 * scale, abs=1.5 * scale)


def width_of(path: Path) -> int:
    with Image.open(path) as picture:
        return picture.width


def looks(case: str, method: str) -> Attributions:
    window, size = CASES[case]
    inputs = torch.randn(2, 2, *size, generator=torch.Generator().manual_seed(8))
    return hookscope.attribute(Looking(window, size), inputs, method=method, sanity="none", target="0,1")


@pytest.mark.parametrize("method", ["layer-cam", pytest.param("integrated-gradients", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("case", ["signal", "volume"])
@pytest.mark.sample("signal-layer-cam")
def test_a_run_is_written_read_and_shown(case: str, method: str, tmp_path: Path) -> None:
    result = looks(case, method)
    folder = result.save(tmp_path / "run")
    stored = read_run(folder)
    for one, other, drawn in zip(stored.result.maps, result.maps, stored.record.overlays, strict=True):
        assert np.array_equal(one.values, other.values)
        assert (one.extent, one.size, one.target.label) == (other.extent, other.size, other.target.label)
        assert width_of(folder / drawn) == WIDTH
        assert (one.pixels is None) == (other.pixels is None)
        assert other.pixels is None or np.array_equal(one.pixels, other.pixels)
    page = document_html(describe_attributions(stored.result), stored)
    assert page.count('<article class="drawn"') == 2
    assert "Over the input" in page
    assert width_of(folder / "overview.png") == 1200
    assert result._repr_html_().count("<img") == 2


@pytest.mark.parametrize(
    ("entry", "value"), [("extent", [0.0, 1.0]), ("extent", [0.0, 0.0, 1.0, 1.0]), ("size", [1, 2])]
)
@pytest.mark.sample("extent-value0")
def test_a_run_whose_maps_do_not_fit_their_record_is_refused(entry: str, value: object, tmp_path: Path) -> None:
    folder = looks("volume", "layer-cam").save(tmp_path / "run")
    document = json.loads((folder / "result.json").read_text())
    document["maps"][0][entry] = value
    (folder / "result.json").write_text(json.dumps(document))
    with pytest.raises(InputError):
        read_run(folder)
