"""Intervals and tests of the binomial distribution, against sums of fractions and published numbers."""

import math
from fractions import Fraction

import pytest

from hookscope.results.binomial import at_least, interval, mcnemar, pairs_needed, pictures_needed


def tail(right: int, count: int, share: Fraction) -> Fraction:
    """Return the probability of `right` or more, term by term."""
    terms = (
        math.comb(count, number) * share**number * (1 - share) ** (count - number) for number in range(right, count + 1)
    )
    return sum(terms, Fraction(0))


@pytest.mark.parametrize("count", [3, 60])
@pytest.mark.parametrize("share", [Fraction(1, 1000), Fraction(1, 3), Fraction(1, 2), Fraction(9, 10)])
def test_a_tail_is_the_sum_of_its_terms(count: int, share: Fraction) -> None:
    for right in range(count + 2):
        assert at_least(right, count, float(share)) == pytest.approx(float(tail(right, count, share)), rel=1e-11)


def test_a_tail_ends_where_shares_end() -> None:
    assert [at_least(2, 5, share) for share in (0.0, 1.0)] == [0.0, 1.0]
    assert at_least(0, 5, 0.0) == 1.0


@pytest.mark.parametrize("confidence", [0.95, 0.99995])
def test_at_the_ends_of_an_interval_both_tails_are_half_of_what_is_left(confidence: float) -> None:
    half = (1 - confidence) / 2
    for right, count in ((1, 3), (5, 10), (29, 30), (3, 200)):
        low, high = interval(right, count, confidence)
        assert float(tail(right, count, Fraction(low))) == pytest.approx(half, rel=1e-9)
        assert 1 - float(tail(right + 1, count, Fraction(high))) == pytest.approx(half, rel=1e-6)


def test_none_or_all_right_have_closed_forms() -> None:
    for count in (1, 10, 1000, 10**6):
        low, high = interval(count, count)
        assert (low, high) == (pytest.approx(0.025 ** (1 / count), rel=1e-12), 1.0)
        none = interval(0, count)
        assert none == (0.0, pytest.approx(1 - 0.025 ** (1 / count), rel=1e-9))
    assert interval(0, 0) == (0.0, 1.0)


def test_published_intervals() -> None:
    # Clopper and Pearson's for 81 of 263 in table I of Newcombe, Statistics in Medicine 17 (1998), 857-872.
    assert interval(81, 263) == (pytest.approx(0.2527, abs=5e-5), pytest.approx(0.3676, abs=5e-5))
    assert interval(15, 148) == (pytest.approx(0.0578, abs=5e-5), pytest.approx(0.1617, abs=5e-5))
    assert interval(0, 20)[1] == pytest.approx(0.1684, abs=5e-5)
    assert interval(1, 29) == (pytest.approx(0.0009, abs=5e-5), pytest.approx(0.1776, abs=5e-5))


def test_mcnemars_exact_test_is_twice_the_smaller_tail() -> None:
    assert mcnemar(10, 2) == pytest.approx(2 * (1 + 12 + 66) / 2**12, rel=1e-12)
    assert mcnemar(2, 10) == mcnemar(10, 2)
    assert mcnemar(6, 0) == pytest.approx(2 / 64, rel=1e-12)
    assert [mcnemar(0, 0), mcnemar(1, 0), mcnemar(3, 3)] == [1.0, 1.0, 1.0]
    assert mcnemar(2000, 1500) == pytest.approx(float(2 * tail(2000, 3500, Fraction(1, 2))), rel=1e-9)


@pytest.mark.parametrize(("share", "limit"), [(1.0, 0.9), (0.8, 0.75), (0.5, 0.9), (0.0, 0.3)])
def test_as_many_pictures_as_are_needed_leave_the_limit_out_of_the_interval(share: float, limit: float) -> None:
    needed = pictures_needed(share, limit)
    assert needed is not None

    def tells(count: int) -> bool:
        low, high = interval(round(share * count), count)
        return not low <= limit <= high

    assert tells(math.ceil(1.05 * needed) + 5)
    assert not tells(math.floor(0.9 * needed) - 1)


def test_how_many_are_needed_has_a_closed_form_where_all_are_right() -> None:
    assert pictures_needed(1.0, 0.9) == math.ceil(math.log(0.025) / math.log(0.9))
    assert pictures_needed(0.7, 0.7) is None
    assert pictures_needed(0.7, 0.7 + 1e-9) is None


def test_so_many_pairs_would_show_a_loss() -> None:
    assert pairs_needed(1, 0, 50) == math.ceil(50 * math.log2(2 / 0.05))  # p is 2 / 2**lost
    assert pairs_needed(3, 3, 50) is None
    assert pairs_needed(1, 2, 50) is None
