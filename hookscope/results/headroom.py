"""Floating-point formats, and how well the values of an output fit narrower ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # these load NumPy, which `hookscope grads --help` must not
    from hookscope.results.distribution import Distribution
    from hookscope.results.statistics import TensorStatistics


@dataclass(frozen=True, slots=True)
class Headroom:
    """How well the values of an output fit a number format.

    Attributes:
        format: "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2" or "int8".
        factor: The format's greatest number over the output's greatest magnitude; None for an output of zeros, and for
            int8, whose scale makes it 1.
        overflowing: Share of values whose magnitude is above the format's greatest number, 0-1.
        vanishing: Share of the values other than zero that the format rounds to zero, 0-1; for int8, with one scale
            from the output's greatest magnitude.
    """

    format: str
    factor: float | None
    overflowing: float
    vanishing: float


class NumberFormat(NamedTuple):
    """The greatest number of a format and its smallest one above zero."""

    greatest: float
    smallest: float


FLOAT16 = "float16"
FORMATS: Mapping[str, NumberFormat] = {
    FLOAT16: NumberFormat(65504.0, 2.0**-24),
    "bfloat16": NumberFormat((2 - 2.0**-7) * 2.0**127, 2.0**-133),
    "float32": NumberFormat((2 - 2.0**-23) * 2.0**127, 2.0**-149),
    "float64": NumberFormat((2 - 2.0**-52) * 2.0**1023, 2.0**-1074),
    "float8_e4m3fn": NumberFormat(448.0, 2.0**-9),
    "float8_e5m2": NumberFormat(57344.0, 2.0**-16),
    "float8_e4m3fnuz": NumberFormat(240.0, 2.0**-10),
    "float8_e5m2fnuz": NumberFormat(57344.0, 2.0**-17),
}
"""IEEE 754 binary16 to 64; bfloat16 is binary32 with 8 significant bits; Micikevicius et al., "FP8 Formats for Deep
Learning", arXiv 2209.05433, table 1; "fnuz": Noune et al., arXiv 2206.02915."""

_NARROWER = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_INT8_STEPS = 127


def headroom_of(statistics: TensorStatistics) -> tuple[Headroom, ...]:
    """Return the headroom in each format; () without a finite value."""
    spread, greatest = statistics.distribution, statistics.max_abs
    if spread is None or greatest is None:
        return ()
    nonzero = spread.nonzero()
    headrooms = []
    for name in _NARROWER:
        most, least = FORMATS[name]
        factor = most / greatest if greatest else None
        vanishing = 1.0 - _share_above(nonzero, least / 2) if nonzero else 0.0
        headrooms.append(Headroom(name, factor, _share_above(spread, most), vanishing))
    step = greatest / _INT8_STEPS
    vanishing = 1.0 - _share_above(nonzero, step / 2) if nonzero else 0.0
    return (*headrooms, Headroom("int8", None, 0.0, vanishing))


def _share_above(spread: Distribution, limit: float) -> float:
    return spread.share_outside(math.nextafter(-limit, -math.inf), math.nextafter(limit, math.inf))
