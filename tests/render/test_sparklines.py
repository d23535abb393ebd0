import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hookscope.render.sparklines import BLOCKS, WIDTH, sparkline

# More than a hundredth of the values at either end, so that the percentiles are 0 and 8, and every bar is one wide.
COUNTS = {0.0: 64, 1.5: 16, 2.5: 4, 3.5: 1, 8.0: 4}
VALUES = np.repeat(list(COUNTS), list(COUNTS.values()))


def test_heights_are_the_square_roots_of_the_shares_in_eighths() -> None:
    # 64, 16, 4, 1, 0, 0, 0 and 4 of the highest bar's 64: roots 1, 1/2, 1/4, 1/8, none, none, none, 1/4
    assert sparkline(VALUES) == "█▄▂▁   ▂"


def test_the_order_of_the_values_and_what_is_not_finite_make_no_difference() -> None:
    odd = np.concatenate([VALUES[::-1], [np.nan, np.inf, -np.inf]])
    assert sparkline(odd) == sparkline(VALUES)


def test_what_lies_beyond_the_percentiles_stands_in_the_bars_at_the_ends() -> None:
    far = np.concatenate([np.full(500, 0.0), np.full(500, 8.0), [1e6]])
    assert sparkline(far) == "█      █"
    assert sparkline(np.array([0.0, 1.0])) == "█      █"


def test_a_uniform_sample_is_flat() -> None:
    assert sparkline(np.linspace(-3, 5, 8001)) == "█" * WIDTH


@pytest.mark.parametrize("value", [0.0, -2.5, 1e30, 5e-324])
def test_one_value_is_one_bar_in_the_middle(value: float) -> None:
    assert sparkline(np.full(9, value)).strip() == "█"
    assert len(sparkline(np.full(9, value))) == WIDTH


@pytest.mark.parametrize("sample", [None, np.zeros(0, np.float32), np.array([np.nan, np.inf])])
def test_without_a_finite_value_there_is_nothing_to_draw(sample: np.ndarray | None) -> None:
    assert sparkline(sample) == "-"


@given(
    arrays(np.float64, st.integers(1, 40), elements=st.floats() | st.sampled_from([np.nan, np.inf]))
    | arrays(st.sampled_from([np.float16, np.float32]), st.integers(1, 40))
)
def test_any_sample_at_all_is_eight_blocks_or_a_dash(sample: np.ndarray) -> None:
    drawn = sparkline(sample)
    assert drawn == "-" or (len(drawn) == WIDTH and set(drawn) <= {" ", *BLOCKS})
    assert (drawn == "-") == (not np.isfinite(sample).any())
