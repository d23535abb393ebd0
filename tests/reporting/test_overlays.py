"""Maps on the photograph: where each value lands, what colours say, and what is left alone."""

import io
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hookscope.reporting.overlays import (
    ColourScale,
    bar,
    colour_scale,
    outside_dimmed,
    overlay,
    resampled,
    seen_part,
    shrunk,
    tint,
)
from hookscope.results.attributions import AttributionMap, Target
from hookscope.results.inputs import Photograph, Region


def map_of(values: object, **options: object) -> AttributionMap:
    return AttributionMap(
        0, Target("cat", 2.5), **{"layer": "layer4", "values": np.asarray(values, np.float32), **options}
    )


def whole(height: int, width: int) -> Region:
    return Region(0, 0, height, width, height, width)


def on_photograph(each: AttributionMap, region: Region) -> np.ndarray:
    """Return the values at the photograph's pixels, NaN where the network saw nothing."""
    result = np.full((region.height, region.width), np.nan)
    for rows, values in resampled(each, region):
        result[rows, seen_part(region)[1]] = values
    return result


def ramp(count: int, begin: float, end: float) -> np.ndarray:
    """Return the centres of so many cells that fill a stretch."""
    return (begin + (np.arange(count) + 0.5) * (end - begin) / count).astype(np.float32)


@given(cells=st.tuples(st.integers(2, 14), st.integers(2, 14)), size=st.tuples(st.integers(2, 80), st.integers(2, 80)))
def test_between_centres_values_are_those_of_torchs_bilinear_resize(cells, size):
    values = np.random.default_rng(0).standard_normal(cells, np.float32)
    expected = torch.nn.functional.interpolate(
        torch.from_numpy(values)[None, None], size, mode="bilinear", align_corners=False, antialias=True
    )
    np.testing.assert_allclose(on_photograph(map_of(values), whole(*size)), expected[0, 0], rtol=1e-4, atol=1e-5)


@given(
    top=st.floats(-30, 60),
    left=st.floats(-30, 60),
    height=st.floats(40, 150),
    width=st.floats(40, 150),
    cells=st.integers(4, 14),
    padding=st.sampled_from([0.0, 0.125, 0.3]),
)
def test_a_value_lands_where_its_cell_lies(top, left, height, width, cells, padding):
    region = Region(top, left, top + height, left + width, 90, 120)
    # What a network adds below and at the right lies outside, and the map covers it.
    rows = ramp(cells, top, top + height / (1 - padding))
    columns = ramp(cells, left, left + width / (1 - padding))
    each = map_of(rows[:, None] + 1000 * columns, extent=(0, 0, 1 / (1 - padding), 1 / (1 - padding)))
    shown = on_photograph(each, region)
    y, x = np.mgrid[:90, :120] + 0.5
    inside = (y >= top) & (y < top + height) & (x >= left) & (x < left + width)
    assert np.array_equal(np.isnan(shown), ~inside)
    # Beyond the outermost centres there is nothing to interpolate between.
    between = inside & (y >= rows[0]) & (y <= rows[-1]) & (x >= columns[0]) & (x <= columns[-1])
    np.testing.assert_allclose(shown[between], (y + 1000 * x)[between], rtol=1e-4)


def test_beyond_the_outermost_places_their_values_go_on():
    # Cells of 8 pixels around 0.5 and 8.5: what three strided convolutions with padding see of 16 pixels.
    each = map_of([[1, 1], [3, 3]], extent=(-3.5 / 16, -3.5 / 16, 12.5 / 16, 12.5 / 16))
    shown = on_photograph(each, whole(16, 16))[:, 0]
    np.testing.assert_allclose(shown, np.clip(1 + 2 * np.arange(16) / 8, 1, 3), rtol=1e-6)


def photograph(region: Region, seed: int = 0) -> Photograph:
    pixels = np.random.default_rng(seed).integers(0, 256, (region.height, region.width, 3), np.uint8)
    return Photograph(pixels, region)


CROPPED = Region(10, -5, 50.4, 65.5, 60, 60)


def test_outside_the_crop_there_is_no_colour_and_no_map():
    shown = photograph(CROPPED)
    drawn = overlay(shown, map_of(np.ones((3, 3))))
    rows, columns = seen_part(CROPPED)
    assert (rows, columns) == (slice(10, 50), slice(0, 60))
    outside = np.ones((60, 60), bool)
    outside[rows, columns] = False
    assert (drawn[outside] == drawn[outside][:, :1]).all(), "grey"
    assert (drawn[outside] == outside_dimmed(shown)[outside]).all()
    assert drawn[outside].min() > 100, "pale"
    assert (tint(map_of(np.ones((3, 3))), CROPPED)[outside] == 0).all()


def test_an_input_without_map_keeps_what_the_network_saw():
    shown = photograph(CROPPED)
    rows, columns = seen_part(CROPPED)
    assert np.array_equal(outside_dimmed(shown)[rows, columns], shown.pixels[rows, columns])


def test_zero_is_transparent_and_the_top_is_not():
    colours = tint(map_of([[0, 0, 0.5, 1]]), whole(8, 4))
    assert (colours[:, :2, 3] == 0).all()
    assert colours[0, 3, 3] > 200 > colours[0, 2, 3] > 60


def test_a_signed_map_has_two_colours_around_zero():
    red, none, blue = tint(map_of([[1, 0, -1]]), whole(2, 3))[0].astype(int)
    assert none[3] == 0
    assert red[3] == blue[3] > 200
    assert red[0] > red[2] + 100
    assert blue[2] > blue[0] + 100
    assert colour_scale(map_of([[0.5, -2]]).values) == ColourScale(2.0, signed=True)
    assert colour_scale(map_of([[0.5, -2]]).values).labels == ("-2", "0", "2")


def test_the_scale_begins_at_zero_so_that_a_constant_map_has_one_colour():
    nearly = np.full((7, 7), 0.3) + np.random.default_rng(0).normal(0, 1e-4, (7, 7))
    colours = tint(map_of(nearly), whole(70, 70)).astype(int)
    assert np.ptp(colours.reshape(-1, 4), axis=0).max() <= 2
    assert colour_scale(map_of(np.full((7, 7), 0.25)).values) == ColourScale(0.25, signed=False)


@pytest.mark.parametrize("power", [-149, -140, -120, 100])
def test_a_map_of_tiny_values_has_the_colours_of_any_other(power):
    values = np.array([[0, 1], [2, 4]], np.float32)
    scaled = np.ldexp(values, power).astype(np.float32)  # exact down to the smallest subnormal number
    np.testing.assert_array_equal(tint(map_of(scaled), whole(2, 2)), tint(map_of(values), whole(2, 2)))


def test_a_map_of_zeros_draws_nothing():
    each = map_of(np.zeros((7, 7)))
    assert colour_scale(each.values) == ColourScale(0.0, signed=False)
    assert (tint(each, whole(9, 9))[..., 3] == 0).all()
    grey = replace(photograph(whole(9, 9)), pixels=np.full((9, 9, 3), 77, np.uint8))
    assert np.abs(overlay(grey, each).astype(int) - 77).max() <= 1


def test_the_box_that_a_map_explains_is_framed_where_it_lies():
    region = Region(10, 20, 50, 100, 60, 120)  # the input covers 40 x 80 pixels
    each = map_of(np.zeros((2, 2)))
    framed = replace(each, target=replace(each.target, box=(0.25, 0.5, 0.75, 1.0)))
    plain, drawn = overlay(photograph(region), each), overlay(photograph(region), framed)
    changed = (plain != drawn).any(-1)
    expected = np.zeros_like(changed)
    expected[30:50, 40:80] = True
    expected[33:47, 43:77] = False
    assert (changed == expected).all()
    assert (drawn[31, 41:79] == 255).all()
    assert (tint(framed, region)[..., 3] > 0).sum() == expected.sum()


def test_a_box_beyond_the_picture_is_cut_off():
    region = Region(0, 0, 40, 40, 40, 40)
    each = map_of(np.zeros((2, 2)))
    drawn = overlay(photograph(region), replace(each, target=replace(each.target, box=(-0.5, -0.5, 0.5, 0.5))))
    changed = (drawn != overlay(photograph(region), each)).any(-1)
    assert changed[:20, 17:20].all()
    assert changed[17:20, :20].all()
    assert changed.sum() == 20 * 20 - 17 * 17


def test_what_is_not_finite_is_magenta_and_spoils_no_scale():
    each = map_of([[1, np.nan], [np.inf, 2]])
    drawn = overlay(photograph(whole(20, 20)), each)
    assert colour_scale(each.values).top == 2
    assert (drawn[2, 17] == (255, 0, 255)).all()
    assert (drawn[17, 2] == (255, 0, 255)).all()
    assert not (drawn[2, 2] == (255, 0, 255)).all()


def test_single_pixels_far_above_all_others_are_beyond_the_scale():
    values = np.ones((100, 100))
    values[3, 3] = 1000
    assert colour_scale(map_of(values).values) == ColourScale(1.0, signed=False, clipped=True)
    assert colour_scale(map_of(values).values).labels == ("0", ">= 1")
    assert colour_scale(map_of(values[:14, :14]).values).top == 1000


def test_the_bar_has_the_colours_of_an_overlay():
    middle_grey = Photograph(np.full((1, 3, 3), 150, np.uint8), whole(1, 3))
    drawn = overlay(middle_grey, map_of([[-1, 0, 1]]))[0].astype(int)
    ends = bar(ColourScale(1.0, signed=True), 101, 4)[0].astype(int)
    assert np.abs(drawn - ends[[0, 50, 100]]).max() <= 1


@given(side=st.integers(5, 40))
def test_a_smaller_photograph_shows_a_map_in_the_same_place(side):
    large = photograph(Region(7, 3, 93, 77, 100, 80))
    small = shrunk(large, side, 2 * side)
    assert small.pixels.shape == (side, 2 * side, 3)
    shares = [case / size for case, size in ((large.region.top, 100), (large.region.right, 80))]
    assert [small.region.top / side, small.region.right / (2 * side)] == pytest.approx(shares)


def test_a_large_photograph_takes_little_more_memory_than_its_copy():
    large = Photograph(np.zeros((3000, 4000, 3), np.uint8), Region(0, 500, 3000, 3500, 3000, 4000))
    tracemalloc.start()
    overlay(large, map_of(np.random.default_rng(0).random((7, 7))))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * large.pixels.nbytes


def test_a_tint_is_a_small_file():
    file = io.BytesIO()
    Image.fromarray(tint(map_of(np.random.default_rng(0).random((7, 7))), whole(480, 480))).save(file, "PNG")
    assert len(file.getvalue()) < 400_000
