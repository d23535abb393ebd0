"""Reduce dense tensors on a GPU by the Triton kernel of tile_kernel.py, in one launch each.

Triton comes with torch's CUDA build for Linux. The kernel adds no floats by atomic additions, and what it finds in
tiles is merged here in order, so a run repeats bit for bit.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookscope.results.distribution import PARTS, Distribution, key_of
from hookscope.statistics.native import Layout, address_of, layout_of
from hookscope.statistics.reduction import SQUARABLE_EXPONENT, Reduction

_TILE = 4096
_WARPS = 16
_WORDS = 9  # words in a tile
_MOST_VALUES = 2**30  # the kernel indexes with int32
# Counters that are zeroed in one launch, in 4 MiB: for about 60 tensors with distributions.
_COUNTERS = 2**20

FRACTIONS = {torch.float16: 23, torch.bfloat16: 23, torch.float32: 23, torch.float64: 52}
"""The dtypes that the kernel takes, and the bits of the fraction of the floats in which it sums their values."""

# For these bits, the exponents of the smallest subnormal number and of the largest.
_EXPONENTS = {23: (-149, 127), 52: (-1074, 1023)}


class Launched(NamedTuple):
    """What the kernel writes for one tensor.

    Attributes:
        words: Of each tile, and the kept values: see tile_kernel.py.
        nonzero: Values that are not zero by channel, (C,).
        bins: Values in each bin, (B,); B is 0 if they are not counted.
    """

    words: Tensor
    nonzero: Tensor
    bins: Tensor
    layout: Layout
    fraction: int


class TileReducer:
    """Launches the kernel; holds counters that are zero and not used yet, for each stream of a device."""

    def __init__(self, *, distributions: bool) -> None:
        """Start without counters."""
        self.distributions = distributions
        self._zeros: dict[tuple[torch.device, int], Tensor] = {}

    def launch(self, values: Tensor, channel_axis: int | None, inputs: int) -> Launched | None:
        """Reduce a tensor on any device that Triton compiles for, without waiting. Arguments: `FusedReducer.reduce`.

        Returns:
            None for tensors that the kernel does not take. Where Triton is missing or broken, anything may be raised.
        """
        from hookscope.statistics.tile_kernel import reduce_tile  # noqa: PLC0415

        fraction, device = FRACTIONS.get(values.dtype), values.device
        if fraction is None or not 0 < values.numel() < _MOST_VALUES or not address_of(values):
            return None
        layout = layout_of(values.shape, values.stride(), channel_axis, 1, inputs)
        if layout is None:  # it has gaps
            return self.launch(values.contiguous(), channel_axis, inputs)
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        low, high = _EXPONENTS[fraction]
        bin_count = 2 * PARTS * (high - low + 1) + 1 if self.distributions else 0
        tiles = -(-layout.count // _TILE)
        words = torch.empty(_WORDS * tiles + layout.kept_count, dtype=torch.float64, device=device)
        if not address_of(words):  # inside `torch.func.grad`
            return None
        counters = self._counters(bin_count + layout.channels, device, stream)
        kept_at = _sent(layout, device, stream) if layout.kept_count else counters
        sizes = layout.count, layout.channels, layout.after, layout.kept_count, bin_count
        constants = {"TILE": _TILE, "FRACTION": fraction, "num_warps": _WARPS, "enable_fp_fusion": False}
        with torch.cuda.device(device if device.type == "cuda" else -1):
            reduce_tile[(tiles,)](values, words, counters, kept_at, *sizes, **constants)
        return Launched(words, counters[bin_count:], counters[:bin_count], layout, fraction)

    def _counters(self, count: int, device: torch.device, stream: int) -> Tensor:
        zeros = self._zeros.get((device, stream))
        if zeros is None or zeros.numel() < count:
            zeros = torch.zeros(max(count, _COUNTERS), dtype=torch.int32, device=device)
        self._zeros[device, stream] = zeros[count:]
        return zeros[:count]


def _sent(layout: Layout, device: torch.device, stream: int) -> Tensor:
    """Return the places of kept values on a device; sent once, without waiting."""
    if (device, stream) not in layout.kept_on:
        with torch.inference_mode(False):
            places = torch.from_numpy(layout.kept_at.astype(np.int32).reshape(-1))
            places = places.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else places
        layout.kept_on[device, stream] = places
    return layout.kept_on[device, stream]


def moved_parts(launched: Sequence[tuple[Reduction, Launched]]) -> list[Tensor]:
    """Return what `reductions` needs on the CPU: only the bins that hold a value, so this waits for the device."""
    bins = torch.cat([result.bins for _, result in launched])
    (places,) = bins.nonzero(as_tuple=True)
    return [*(part for _, result in launched for part in result[:2]), places, bins[places]]


def reductions(launched: Sequence[tuple[Reduction, Launched]], parts: Sequence[NDArray[Any]]) -> Iterator[Reduction]:
    """Yield the reductions of tensors, whose headers have what does not depend on values; `parts` are `moved_parts`."""
    *numbers, places, counts = parts  # first the words of each tensor, and its counts by channel, in turn
    ends = [len(result.words) - result.layout.kept_count for _, result in launched]
    words = [np.split(array, [end]) for array, end in zip(numbers[::2], ends, strict=True)]
    starts = np.cumsum([0, *(len(result.bins) for _, result in launched)])
    cuts = np.searchsorted(places, starts).tolist()
    figures = merged([of_tiles.reshape(_WORDS, -1) for of_tiles, _ in words]).T.tolist()
    for index, (header, result) in enumerate(launched):
        finite_count, *moments, nan_count, exponent = figures[index]
        begin, end = cuts[index : index + 2]
        distribution = None
        if begin < end:
            signed = places[begin:end] - starts[index] - len(result.bins) // 2
            keys = np.sign(signed) * (abs(signed) + key_of(_EXPONENTS[result.fraction][0]) - 1)
            in_bins = keys.astype(np.int32), counts[begin:end].astype(np.int64)
            distribution = Distribution(moments[2], moments[3], int(finite_count), None, *in_bins)
        kept = words[index][1].reshape(result.layout.kept_shape).astype(f"f{8 if result.fraction == 52 else 4}")
        nonzero = numbers[2 * index + 1].astype(np.float64)
        measured = (int(finite_count), *moments, int(nan_count), int(nonzero.sum()))
        by_channel, kept_arrays = None if header.channel_axis is None else nonzero, (kept,) if kept.size else None
        yield Reduction._make((*header[:4], *measured, by_channel, distribution, None, kept_arrays, int(exponent)))


def merged(words: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Merge the words of the tiles of each tensor, (9, tiles).

    A tile's words are counts of finite values and of NaN, min and max, an exponent e, and, of finite values over 2^e, a
    centre, the sum of deviations from it, of their squares, and of magnitudes. e is that of the largest magnitude.

    Returns:
        (9, R), as the fields of a `Reduction`: count of finite values, mean, sum of squared deviations, min, max, sum
        of magnitudes, of squares, count of NaN, exponent.
    """
    sizes = [array.shape[1] for array in words]
    starts = np.cumsum([0, *sizes[:-1]])
    counts, nans, lows, highs, exponents, centres, deviations, squares, magnitudes = np.concatenate(words, axis=1)
    finite_count = np.add.reduceat(counts, starts)
    low, high = np.minimum.reduceat(lows, starts) + 0.0, np.maximum.reduceat(highs, starts) + 0.0  # no -0.0
    exponent = np.maximum.reduceat(exponents, starts).astype(np.int32)
    down = exponents.astype(np.int32) - exponent.repeat(sizes)
    share = deviations / np.maximum(counts, 1)
    means = np.ldexp(centres + share, down)
    is_constant = low == high  # sums of equal values would add rounding errors
    constant = np.ldexp(np.where(is_constant, low, 0.0), -exponent)
    divisor = np.maximum(finite_count, 1)
    mean = np.where(is_constant, constant, np.add.reduceat(means * counts, starts) / divisor)
    apart = means - mean.repeat(sizes)
    within = np.ldexp(np.maximum(squares - deviations * share, 0.0), 2 * down)
    squared_deviations = np.add.reduceat(within + counts * apart * apart, starts) * (low < high)
    sums = np.where(is_constant, abs(constant) * finite_count, np.add.reduceat(np.ldexp(magnitudes, down), starts))
    square_sum = squared_deviations + finite_count * mean * mean
    up = np.where(abs(exponent) <= SQUARABLE_EXPONENT, exponent, 0)
    deviations, square_sum = np.ldexp([squared_deviations, square_sum], 2 * up)
    fields = [finite_count, np.ldexp(mean, exponent), deviations, low, high, np.ldexp(sums, up), square_sum]
    return np.stack([*fields, np.add.reduceat(nans, starts), exponent - up])
