"""The smallest box that holds half of a map."""

import itertools
from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hookscope.results.attributions import AttributionMap, Target
from hookscope.results.concentration import Extent, concentration
from hookscope.results.inputs import InputRecord, Region

CROPPED = InputRecord("a.png", "ab", (451, 300), (3, 224, 224), (), Region(0, 75, 300, 375, 300, 450))


def map_of(values: object, extent: Extent = (0.0, 0.0, 1.0, 1.0)) -> AttributionMap:
    return AttributionMap(0, Target("cat", 2.5), "layer4", np.asarray(values, np.float32), extent)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 1000))
def test_it_is_the_smallest_of_all_boxes(height, width, seed):
    values = np.random.default_rng(seed).random((height, width)) ** 3 + 0.01
    record = InputRecord("tensor", None, None, (3, height, width), ())
    share = concentration(map_of(values), record)
    ranges = itertools.product(range(height), range(height), range(width), range(width))
    areas = [
        (bottom + 1 - top) * (right + 1 - left)
        for top, bottom, left, right in ranges
        if values[top : bottom + 1, left : right + 1].sum() >= values.sum() / 2 - 1e-6
    ]
    assert share.share == pytest.approx(min(areas) / (height * width))


def test_it_is_told_in_pixels_of_the_photograph():
    values = np.zeros((6, 6))
    values[4, 0] = 1
    share = concentration(map_of(values), CROPPED)
    assert astuple(share.region) == pytest.approx((200, 75, 250, 125, 300, 450))
    assert (share.share, share.words) == (pytest.approx(1 / 36), "lower left")


def test_what_the_network_added_to_its_input_is_no_place_of_it():
    values = np.zeros((8, 8))
    values[3, 7] = 1  # with a quarter added at the right, six columns cover the picture
    assert concentration(map_of(values, (0.0, 0.0, 1.0, 4 / 3)), CROPPED) is None
    values[3, 3] = 2
    assert concentration(map_of(values, (0.0, 0.0, 1.0, 4 / 3)), CROPPED).region.left == 75 + 3 * 50


def test_cells_lie_around_what_they_see_and_half_of_an_outer_one_may_lie_outside():
    values = np.zeros((2, 2))
    values[0, 0], values[1, 1] = 1.0, 0.9
    # Cells of half the input, around 0 and 0.5: a quarter of the first is inside, half a side each.
    record = InputRecord("tensor", None, None, (3, 80, 80), ())
    share = concentration(map_of(values, (-0.25, -0.25, 0.75, 0.75)), record)
    assert astuple(share.region) == pytest.approx((20, 20, 80, 80, 80, 80))
    assert share.words == "spread out"
    assert concentration(map_of(values), record).region == Region(0, 0, 40, 40, 80, 80)


@pytest.mark.parametrize(
    ("row", "column", "words"),
    [(0, 0, "upper left"), (0, 2, "top"), (2, 2, "centre"), (2, 4, "right")],
)
def test_words_are_by_thirds(row, column, words):
    values = np.zeros((5, 5))
    values[row, column] = 1
    record = InputRecord("tensor", None, None, (3, 50, 50), ())
    assert concentration(map_of(values), record).words == words


def test_an_even_map_is_spread_out_and_one_nowhere_above_zero_has_no_place():
    assert concentration(map_of(np.ones((6, 6))), CROPPED).words == "spread out"
    assert concentration(map_of(-np.ones((6, 6))), CROPPED) is None
    assert concentration(map_of(np.full((6, 6), np.nan)), CROPPED) is None
