"""Inputs that are classified wrong, and why."""

from dataclasses import dataclass
from typing import Literal

from hookscope.results.accuracy import WrongPicture

OutsideKind = Literal["dark", "bright", "flat", "harsh", "narrow", "wide", "other layout", "inverted"]

DEPARTURE_RATE = 0.05
"""Of inputs like the others of their class, this share at most is said to leave it; the usual level."""


@dataclass(frozen=True, slots=True)
class OutsideRange:
    """What of a picture lies outside the range of all inputs that are classified right.

    Attributes:
        kind: "dark" and "bright": its mean; "flat" and "harsh": its standard deviation, both over the grey picture,
            0-1; "narrow" and "wide": width over height of the file's picture; "other layout": the correlation of its
            8x8 means with those of the mean picture; "inverted": the same, where that of its negative lies in the
            range.
        low: The least value of the others.
        high: Their greatest value.
    """

    kind: OutsideKind
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class NearInput:
    """An input whose features come near those of another one: the Euclidean distance of means over positions."""

    input: str
    label: str
    distance: float


@dataclass(frozen=True, slots=True)
class FailedInput(WrongPicture):
    """An input that is taken for another class, and what may be the reason.

    Attributes:
        outside: Where its picture lies outside the range of those that are right.
        leaves_at: Label of the first row where its distance to the mean of its class is more than chance; "" for none.
        p_value: Of that row, for all rows together; None without one.
        is_like_other: Whether it leaves its class no later than most inputs of the class that it is taken for do, and
            leaves that class in no row: its label may be wrong, or it shows both.
        neighbours: The inputs, of those that were compared, with the nearest features in `Failures.neighbour_row`.
    """

    outside: tuple[OutsideRange, ...] = ()
    leaves_at: str = ""
    p_value: float | None = None
    is_like_other: bool = False
    neighbours: tuple[NearInput, ...] = ()


@dataclass(frozen=True, slots=True)
class Failures:
    """The surest of the inputs that are classified wrong, and what they were compared with.

    Attributes:
        inputs: The surest first.
        compared_count: Inputs that are right, whose ranges are known.
        range_rate: The probability, at most, that something of an input like these lies outside their ranges: 7 in
            their number plus 1. Above 0.05 nothing is said about ranges.
        sampled_count: Inputs that are right and went through the network again, to know the spread of their classes.
        departure_rate: The probability, at most, that an input like the others of its class is said to leave it.
        neighbour_row: Label of the row whose features are compared for `neighbours`; "" for none.
        remarks: What could not be found out, and why, in sentences.
    """

    inputs: tuple[FailedInput, ...]
    compared_count: int = 0
    range_rate: float = 1.0
    sampled_count: int = 0
    departure_rate: float = DEPARTURE_RATE
    neighbour_row: str = ""
    remarks: tuple[str, ...] = ()
