"""Whether a weight is, or once was, float8: how coarsely eight bits hold it, and what they cut off."""

import torch
from torch import Tensor

from hookscope.results.check import Float8Values

# What weights are stored in, the usual one first. float8_e8m0fnu holds powers of two: it is for scales.
_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)

# Those that the values of a wider weight are compared with: the other two are used by single accelerators.
_LOOKED_UP = _DTYPES[:2]

# Weights of fewer magnitudes are binary, ternary or blurs, whose values float8 also holds by accident.
_FEWEST_MAGNITUDES = 6

# This many values, evenly spaced, nearly always show that a weight was not rounded.
_SAMPLE_ELEMENTS = 256


def float8_values(values: Tensor) -> Float8Values | None:
    """Measure a weight stored in float8, or one whose every value float8 holds exactly; None for all others.

    The second is float8 after loading into a float32 network.
    """
    if values.dtype in _DTYPES:
        return _counted(values.float(), values.dtype)
    if not values.is_floating_point() or values.itemsize < 2 or not values.numel():
        return None
    sample = values.flatten()[:: max(1, values.numel() // _SAMPLE_ELEMENTS)]
    for dtype in _LOOKED_UP:
        if _holds(dtype, sample) and _holds(dtype, values):
            few = len(values.abs().unique()) < _FEWEST_MAGNITUDES  # type: ignore[no-untyped-call]
            return None if few else _counted(values.float(), dtype)
    return None


def _holds(dtype: torch.dtype, values: Tensor) -> bool:
    return torch.equal(values, values.to(dtype).to(values.dtype))


def _counted(values: Tensor, dtype: torch.dtype) -> Float8Values | None:
    finite = values[values.isfinite()]
    if not finite.numel():
        return None
    saturated = int((finite.abs() == torch.finfo(dtype).max).sum())
    rms = float(finite.double().square().mean().sqrt())
    return Float8Values(str(dtype).removeprefix("torch."), saturated, rms)
