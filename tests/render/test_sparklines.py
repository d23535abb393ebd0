import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hookscope.render.columns import sparkline
from hookscope.results.distribution import distribution_of

# More than a hundredth of the values at either end, so that the percentiles are 0 and 8, and every bar is one wide.
COUNTS = {0.0: 64, 1.5: 16, 2.5: 4, 3.5: 1, 8.0: 4}
VALUES = np.repeat(list(COUNTS), list(COUNTS.values()))


def drawn(values: np.ndarray) -> str:
    return sparkline(distribution_of(values))


def test_heights_are_the_square_roots_of_the_shares_in_eighths() -> None:
    # 64, 16, 4, 1, 0, 0, 0 and 4 of the highest bar's 64: roots 1, 1/2, 1/4, 1/8, none, none, none, 1/4
    assert drawn(VALUES) == "█▄▂▁   ▂"


def test_so_many_values_that_they_are_counted_in_bins_look_the_same() -> None:
    assert drawn(np.repeat(VALUES, 100)) == drawn(VALUES)


def test_what_lies_beyond_the_percentiles_stands_in_the_bars_at_the_ends() -> None:
    far = np.concatenate([np.full(500, 0.0), np.full(500, 8.0), [1e6]])
    assert drawn(far) == "█      █"
    assert drawn(np.array([0.0, 1.0])) == "█      █"


def test_uniform_values_are_flat() -> None:
    assert drawn(np.linspace(-3, 5, 8001)) == "█" * 8


@pytest.mark.parametrize("value", [0.0, -2.5, 1e30, 5e-324])
def test_one_value_is_one_bar_in_the_middle(value: float) -> None:
    for count in (9, 9000):
        assert drawn(np.full(count, value)).strip() == "█"
        assert len(drawn(np.full(count, value))) == 8


def test_without_a_distribution_there_is_nothing_to_draw() -> None:
    assert sparkline(None) == "-"


@given(
    arrays(np.float64, st.integers(1, 40), elements=st.floats(allow_nan=False, allow_infinity=False)),
    st.sampled_from([1, 1000]),
)
def test_any_values_at_all_are_eight_blocks(values: np.ndarray, times: int) -> None:
    found = drawn(np.repeat(values, times))
    assert len(found) == 8
    assert set(found) <= set(" ▁▂▃▄▅▆▇█")
    assert found.strip()
