"""Exact intervals and tests for shares of pictures, from the binomial distribution alone."""

import math
from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

from hookscope.text import percent_text

CONFIDENCE = 0.95
"""Confidence of every interval, the usual one; a test rules out chance at p of 1 minus this."""

# More pictures than any data set has.
_MOST_PICTURES = 10**9


class Interval(NamedTuple):
    """The shares, 0-1, between which the true share lies with a confidence."""

    low: float
    high: float

    def __str__(self) -> str:
        return " to ".join(map(percent_text, self))


def interval(right: int, count: int, confidence: float = CONFIDENCE) -> Interval:
    """Return the interval of Clopper and Pearson for a share, given `right` of `count`.

    At the low end, `right` or more have the probability (1 - confidence) / 2; at the high end, `right` or fewer do. It
    is exact: it holds any true share with at least this confidence. Source: Clopper and Pearson, Biometrika 26
    (1934), 404-413.
    """
    if not count:
        return Interval(0.0, 1.0)
    tail = (1 - confidence) / 2
    return Interval(_lower_end(right, count, tail), 1 - _lower_end(count - right, count, tail))


def _lower_end(right: int, count: int, tail: float) -> float:
    """Return the share at which `right` or more of `count` have the probability `tail`."""
    low, high = 0.0, right / count
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if at_least(right, count, middle) < tail else (low, middle)
    return low


def at_least(right: float, count: float, share: float) -> float:
    """Return the probability of `right` or more of `count` at a share: the binomial tail, for whole numbers.

    It is the regularised incomplete beta function I_share(right, count - right + 1) (Abramowitz and Stegun 26.5.24),
    which is also defined between whole numbers.
    """
    if right <= 0 or share >= 1:
        return 1.0
    if share <= 0 or right > count:
        return 0.0
    return _incomplete_beta(right, count - right + 1, share)


def mcnemar(lost: int, gained: int) -> float:
    """Return the p-value of McNemar's exact test, two-sided.

    It is twice the probability of the greater count, or a greater one, if pictures are lost and gained equally often.
    Source: McNemar, Psychometrika 12 (1947), 153-157, with the binomial distribution instead of its approximation.
    """
    return min(1.0, 2 * at_least(max(lost, gained), lost + gained, 0.5)) if lost + gained else 1.0


def pictures_needed(share: float, limit: float, confidence: float = CONFIDENCE) -> int | None:
    """Estimate how many pictures the interval needs to exclude a limit if the share stays the same; None if equal."""
    if share == limit:
        return None
    seen, other = (share, limit) if share > limit else (1 - share, 1 - limit)
    return _fewest(lambda count: at_least(seen * count, count, other) <= (1 - confidence) / 2)


def pairs_needed(lost: int, gained: int, count: int) -> int | None:
    """Estimate how many pictures McNemar's exact test needs to show a loss, if lost and gained keep their shares."""
    if lost <= gained:
        return None

    def shows(pictures: int) -> bool:
        scale = pictures / count
        return 2 * at_least(lost * scale, (lost + gained) * scale, 0.5) <= 1 - CONFIDENCE

    return _fewest(shows)


def _fewest(shows: Callable[[int], bool]) -> int | None:
    """Return the smallest count that `shows` accepts; it accepts all larger ones. None if it accepts none."""
    high = 1
    while not shows(high):
        high *= 2
        if high > _MOST_PICTURES:
            return None
    return bisect_left(range(high), True, lo=high // 2 + 1, key=shows)


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Return I_x(a, b) by Lentz's method: the continued fraction, on the side where it converges fast.

    Source: Abramowitz and Stegun 26.5.8; Press et al., Numerical Recipes, 6.4.
    """
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    before = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(before) * _continued_fraction(a, b, x) / a


def _continued_fraction(a: float, b: float, x: float) -> float:
    tiny = 1e-300
    upper, lower = 1.0, 1 - (a + b) * x / (a + 1)
    lower = 1 / (lower or tiny)
    value = lower
    for step in range(1, 100_000):  # needs about the square root of max(a, b) steps
        even = step * (b - step) * x / ((a + 2 * step - 1) * (a + 2 * step))
        odd = -(a + step) * (a + b + step) * x / ((a + 2 * step) * (a + 2 * step + 1))
        for factor in (even, odd):
            lower = 1 / ((1 + factor * lower) or tiny)
            upper = (1 + factor / upper) or tiny
            value *= upper * lower
        if abs(upper * lower - 1) < 1e-15:
            break
    return value
