"""Inputs that are classified wrong, and why."""

from dataclasses import dataclass
from typing import Literal

from hookscope.results.accuracy import WrongPicture

OutsideKind = Literal["dark", "bright", "flat", "harsh", "narrow", "wide", "other layout", "inverted"]

DEPARTURE_RATE = 0.05
"""At most this share of ordinary inputs is reported to leave its class; the usual level."""


@dataclass(frozen=True, slots=True)
class OutsideRange:
    """A property of a picture that lies outside the range of all inputs that are classified right.

    Attributes:
        kind: "dark" and "bright": its mean; "flat" and "harsh": its standard deviation, both over the grey picture,
            0-1; "narrow" and "wide": width over height of the file's picture; "other layout": the correlation of its
            8x8 means with the mean picture's; "inverted": the same, if the negative's correlation is in the range.
        low: The least value of inputs that are right.
        high: Their greatest value.
    """

    kind: OutsideKind
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class NearInput:
    """A neighbour of a wrong input, with the Euclidean distance of their features, averaged over positions."""

    input: str
    label: str
    distance: float


@dataclass(frozen=True, slots=True)
class FailedInput(WrongPicture):
    """An input that is taken for another class, and possible reasons.

    Attributes:
        outside: Properties of its picture outside the range of inputs that are right.
        leaves_at: Label of the first row where it is farther from the mean of its class than by chance; "" for none.
        p_value: The p-value at that row, for all rows together; None without such a row.
        is_like_other: Whether it never leaves the class that it is taken for, and leaves its label's class no later
            than most inputs of the other class would: its label may be wrong, or it shows both.
        neighbours: The compared inputs with the nearest features in `Failures.neighbour_row`.
    """

    outside: tuple[OutsideRange, ...] = ()
    leaves_at: str = ""
    p_value: float | None = None
    is_like_other: bool = False
    neighbours: tuple[NearInput, ...] = ()


@dataclass(frozen=True, slots=True)
class Failures:
    """The inputs that are classified wrong with the most confidence, and the inputs they were compared with.

    Attributes:
        inputs: The most confident first.
        compared_count: Pictures that are right; `outside` uses their ranges.
        range_rate: Upper limit of the probability that an ordinary input is outside a range: 7 / (compared_count + 1).
            Above 0.05 no ranges are reported.
        sampled_count: Inputs that are right and ran again, to measure the spread of their classes.
        departure_rate: Upper limit of the probability that an ordinary input is reported to leave its class.
        neighbour_row: Label of the row whose features are compared for `neighbours`; "" for none.
        remarks: Sentences about questions that could not be answered, with the reasons.
    """

    inputs: tuple[FailedInput, ...]
    compared_count: int = 0
    range_rate: float = 1.0
    sampled_count: int = 0
    departure_rate: float = DEPARTURE_RATE
    neighbour_row: str = ""
    remarks: tuple[str, ...] = ()
