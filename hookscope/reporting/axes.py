"""Axes of charts, in pictures and on pages: where values lie, round numbers beside them, names of layers below them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

import numpy as np

from hookscope.text import figure

_MOST_TICKS = 5
_NEAREST = 0.087  # least share of the axis between two ticks: a line of text on a page
# Names go one level deeper while there are fewer blocks, or some block is longer than this share of the depth.
_FEWEST_BLOCKS, _LONGEST_BLOCK = 5, 0.45
_LONGEST_NAME = 18  # characters of a name's last two parts; if they are longer, the last part stands alone
_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # where an axis of shares may end before 100%
_LEAST, _GREATEST = -300, 300  # exponents of ticks

_WHOLE = ("", "(model)")  # names of the network itself


@dataclass(frozen=True, slots=True)
class Axis:
    """A vertical axis: values between its ends, and round numbers on it, with their words.

    Attributes:
        scaled: Maps values to the even scale of `low` and `high`.
    """

    scaled: Callable[[float], float]
    low: float
    high: float
    round: Sequence[tuple[float, str]]

    def share(self, value: float) -> float:
        """Return how far up the axis a value lies, 0-1."""
        return (self.scaled(value) - self.low) / ((self.high - self.low) or 1.0)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Round numbers: how far up they lie, and their words."""
        return [(self.share(value), words) for value, words in self.round]


def percent(largest: float) -> Axis:
    """Return an axis from 0 to a round share that is not below the largest."""
    top = next((end for end in _SHARES if end >= largest), 1.0)
    return Axis(float, 0.0, top, [(share, f"{share * 100:g}%") for share in (0.0, top / 2, top)])


def linear(values: Sequence[float]) -> Axis:
    """Return an axis around values."""
    low, high = min(values), max(values)
    room = max(0.12 * (high - low), 0.05 * abs(high) or 0.1)
    return Axis(float, low - room, high + room / 2, _in_words(_even_ticks(low - room, high + room / 2)))


def log(values: Sequence[float]) -> Axis:
    """Return an axis of powers of ten around values above 0."""
    low, high = math.log10(min(values)), math.log10(max(values))
    room = max(0.06 * (high - low), 0.075)
    return Axis(math.log10, low - 2 * room, high + room, _in_words(_log_ticks(low - 2 * room, high + room)))


def asinh(values: Sequence[float]) -> Axis:
    """Return an axis with 0 and all values on it, linear up to their median magnitude and logarithmic beyond it."""
    unit = median([abs(value) for value in values if value] or [1.0])

    def scaled(value: float) -> float:
        # where the quotient overflows, asinh is close to the logarithm
        quotient = abs(value) / unit
        far = math.asinh(quotient) if math.isfinite(quotient) else math.log(abs(value)) - math.log(unit)
        return math.copysign(far, value)

    low, high = min(0.0, *values), max(0.0, *values)
    ticks = [0.0]
    for end, sign in ((high, 1), (-low, -1)):
        greatest = math.floor(math.log10(end)) if end else 0
        powers = [10.0**power for power in range(greatest, greatest - 8, -1)] if end else []
        between = [digit * power for power in powers for digit in (5, 2) if digit * power <= end]
        far = [value for value in powers if value >= unit / 3]
        ticks += [sign * value for value in far]
        ticks += [sign * value for value in between if len(far) < 2 and value >= unit / 3]
    axis = Axis(scaled, scaled(low), scaled(high), [])
    apart: list[float] = []
    for tick in ticks:  # the most useful ones come first
        if all(abs(axis.share(tick) - axis.share(other)) >= _NEAREST for other in apart):
            apart.append(tick)
    return replace(axis, round=_in_words(apart))


def _in_words(ticks: Sequence[float]) -> list[tuple[float, str]]:
    return [(tick, figure(tick, 3)) for tick in ticks]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers or fewer, from 10 to the power of `low` to 10 to the power of `high`."""
    low, high = max(low, _LEAST), min(high, _GREATEST)
    if low >= high:
        return []
    exponents = range(math.ceil(low), math.floor(high) + 1)
    if len(exponents) >= 2:
        step = math.ceil(len(exponents) / _MOST_TICKS)
        return [10.0**exponent for exponent in exponents if exponent % step == 0]
    around = range(math.floor(low), math.ceil(high) + 1)
    ticks = [digit * 10.0**exponent for exponent in around for digit in (1, 2, 5)]
    ticks = [tick for tick in ticks if low <= math.log10(tick) <= high]
    return ticks if len(ticks) >= 2 else _even_ticks(10.0**low, 10.0**high)


def _even_ticks(low: float, high: float) -> list[float]:
    wanted = (high - low) / _MOST_TICKS
    power = 10.0 ** math.floor(math.log10(wanted))
    by = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= wanted)
    return [number * by for number in range(math.ceil(low / by), math.floor(high / by) + 1)]


Run = list[tuple[int, float]]


def runs_of(values: Sequence[float | None], above: float) -> list[Run]:
    """Return the places and values that are finite and above a limit, in runs without gaps."""
    runs: list[Run] = [[]]
    for place, value in enumerate(values):
        if value is not None and above < value < math.inf:
            runs[-1].append((place, value))
        else:
            runs.append([])
    return [run for run in runs if run]


def placed_names(
    names: Sequence[tuple[float, str]], width: Callable[[str], float], left: float, right: float, gap: float
) -> list[tuple[float, float, str]]:
    """Return the names that do not overlap earlier names: place, left edge and name.

    A name begins at its place, or ends there if it would leave the chart, which is between `left` and `right`.
    """
    kept: list[tuple[float, float]] = []
    placed = []
    for place, name in names:
        wide = width(name)
        begin = place if place + wide <= right else place - wide
        if begin >= left and all(begin + wide + gap <= other or begin >= end + gap for other, end in kept):
            kept.append((begin, begin + wide))
            placed.append((place, begin, name))
    return placed


def block_names(labels: Sequence[str]) -> list[tuple[int, str]]:
    """Return where blocks of layers begin, with their names: the outermost blocks first, longer ones before shorter.

    A long block, or one of few, is split: the name of its first part replaces its own. So is a block with all layers.
    """
    result: dict[int, str] = {}
    split: set[int] = set()
    names = within_blocks(labels)
    longest = _LONGEST_BLOCK * len(names)
    for depth in range(1, 2 + max((name.count(".") for name in names), default=0)):
        blocks = [".".join(name.split(".")[:depth]) for name in names]
        if len(names) > 1 and len({*blocks}) == 1:
            continue
        starts = [place for place, block in enumerate(blocks) if not place or blocks[place - 1] != block]
        lengths = {start: end - start for start, end in pairwise([*starts, len(names)])}
        for start in sorted(starts, key=lambda place: (-lengths[place], place)):
            if start in split or start not in result:
                result[start] = tail_of(blocks[start])
        split = {start for start, length in lengths.items() if length > longest or len(starts) < _FEWEST_BLOCKS}
        if not split:
            break
    return list(result.items())


def within_blocks(labels: Sequence[str]) -> list[str]:
    """Return the layer of each label: for an operation its module or, in the network's own code, the layer before.

    If all rows are in the network's own code, operations keep their names.
    """
    names: list[str] = []
    parts = [label.partition(":") for label in labels]
    if len(parts) > 1 and all(layer in _WHOLE for layer, _, _ in parts):
        return [operation or layer for layer, _, operation in parts]
    for label, (layer, _, operation) in zip(labels, parts, strict=True):
        names.append(names[-1] if operation and layer in _WHOLE and names else layer or label)
    return names


def tail_of(block: str) -> str:
    """Return the last two parts of a name, or one if two are long."""
    parts = block.split(".")
    two = ".".join(parts[-2:])
    return two if len(two) <= _LONGEST_NAME else parts[-1]


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` positions spread evenly over `count`, with the first and the last."""
    return [*dict.fromkeys(np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist())]
