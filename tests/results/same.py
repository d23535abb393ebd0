"""Compare results with those that are read back."""

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from hookscope.results.json_form import is_stored


def assert_same(one: Any, other: Any, at: str = "") -> None:
    """Compare all that files hold: NaN is equal to NaN, arrays bit for bit, 1 is not 1.0 where it is an array."""
    if is_dataclass(one):
        assert type(one) is type(other), at
        for field in filter(is_stored, fields(one)):
            assert_same(getattr(one, field.name), getattr(other, field.name), f"{at}.{field.name}")
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes()), at
    elif isinstance(one, tuple):
        assert len(one) == len(other), at
        for place, entries in enumerate(zip(one, other, strict=True)):
            assert_same(*entries, f"{at}.{place}")
    elif isinstance(one, Mapping):
        assert one.keys() == other.keys(), at
        for name in one:
            assert_same(one[name], other[name], f"{at}.{name}")
    elif isinstance(one, float) and math.isnan(one):
        assert math.isnan(other), at
    else:
        assert one == other, at
