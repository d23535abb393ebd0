"""What attention looks like as a document, from a result made by hand: numbers over blocks, every head, many maps."""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from PIL import Image

from hookscope.commands.attention.describe import describe_attention
from hookscope.reporting.document import PhotographMaps, SmallMaps, StepCharts
from hookscope.reporting.overviews import maps
from hookscope.reporting.overviews.document import draw_document
from hookscope.reporting.overviews.maps import small_maps, spread
from hookscope.reporting.overviews.sheet import RED
from hookscope.reporting.plots import step_plot
from hookscope.results.attention import Attention, AttentionBlock, AttentionMap, HeadMaps, HeadRow
from hookscope.results.inputs import Photograph
from hookscope.text import figure
from tests.reporting.attributed import CAT, DOG, MODEL, corner, photographs

ENTROPIES = ((1.0, 2.0, 6.0), (0.5, 0.5, 0.5))
TOP_SHARES = ((0.2, 0.3, 0.95), (0.4, 0.5, 0.6))

RESULT = Attention(
    model=MODEL,
    inputs=(CAT, DOG),
    blocks=tuple(
        AttentionBlock(f"blocks.{index}.attn", "Attention", "scaled dot product", 3, 17, 17, 1, (4, 4), (4, 4))
        for index in range(2)
    ),
    unseen=(),
    rows=tuple(
        HeadRow(f"blocks.{index}.attn", index, head, entropy, None, 0.25, None, TOP_SHARES[index][head], None)
        for index, entropies in enumerate(ENTROPIES)
        for head, entropy in enumerate(entropies)
    ),
    maps=(AttentionMap(0, "blocks.1.attn", 2, "class token", corner(), elsewhere=0.25),),
    head_maps=tuple(
        HeadMaps(0, index, "class token", np.stack([corner(), corner() * 1e-4, corner()])) for index in range(2)
    ),
)


def test_charts_have_the_least_the_mean_and_the_greatest_of_the_heads_of_each_block() -> None:
    [charts] = [part for part in describe_attention(RESULT).parts if isinstance(part, StepCharts)]
    titles = [chart.title for chart in charts.charts]
    assert titles == ["entropy of a query's weights, nats", "share of the weight on the class token"]
    entropy = charts.charts[0]
    assert {name: [*values] for name, values in entropy.lines} == {
        "least of the heads": [1.0, 0.5],
        "greatest of the heads": [6.0, 0.5],
        "mean of the heads": [3.0, 0.5],
    }
    plot = step_plot(charts, entropy)
    assert plot is not None
    assert {series.colour: series.name for series, _ in plot.lines} == {
        "grey": "least of the heads",
        "orange": "greatest of the heads",
        "blue": "mean of the heads",
    }
    assert [[*marked] for _, marked in entropy.marks] == [[True, False]]
    assert (charts.unit, charts.low, charts.high) == ("block", 0, 1)


def test_a_head_without_weight_on_the_picture_is_drawn_as_zero_and_one_on_a_token_is_marked() -> None:
    [heads] = [part for part in describe_attention(RESULT, 0).parts if isinstance(part, SmallMaps)]
    assert [[values.any() for values in row.maps] for row in heads.rows] == [[True, False, True]] * 2
    assert [row.marked for row in heads.rows] == [[False, False, True], [False, False, False]]
    assert "1 head with more than 90% of the weight on one token: blocks.0.attn head 2." in str(RESULT)
    drawn = np.asarray(draw_document(describe_attention(RESULT, 0, photographs(RESULT.inputs, 0))))
    assert (drawn == RED).all(axis=2).any()


def test_every_head_has_its_number_above_and_its_largest_weight_below() -> None:
    [heads] = [part for part in describe_attention(RESULT, 0).parts if isinstance(part, SmallMaps)]
    with patch.object(maps, "write_line") as written:
        small_maps(heads).draw(Image.new("RGB", (1200, 600)), 0)
    words = [call.args[1] for call in written.call_args_list]
    largest = figure(float(corner().max()))
    assert words == ["head 0", "1", "2", *(largest, "0", largest) * 2]


def test_an_input_without_a_map_says_so_in_its_place() -> None:
    [maps] = [part for part in describe_attention(RESULT).parts if isinstance(part, PhotographMaps)]
    assert [bool(mapped.remark) for mapped in maps.inputs] == [False, True]
    grey = Photograph(np.full((8, 8, 3), 99, np.uint8), photographs(RESULT.inputs, 0).region, "There is no picture.")
    with_photograph = draw_document(describe_attention(RESULT, 1, photographs(RESULT.inputs, 1)))
    without = draw_document(describe_attention(RESULT, 1, grey))
    assert without.height < with_photograph.height
    other = replace(grey, remark="Maps are drawn on grey.")
    assert draw_document(describe_attention(RESULT, 1, other)) == without, "there is no map that could be on grey"


@pytest.mark.parametrize(("count", "most"), [(1, 24), (24, 24), (25, 24), (100, 24), (2, 3)])
def test_rows_that_are_shown_are_spread_from_the_first_to_the_last(count: int, most: int) -> None:
    places = spread(count, most)
    assert (places[0], places[-1], len(places)) == (0, count - 1, min(count, most))
    assert all(0 < step <= -(-count // (most - 1)) for step in np.diff(places))
