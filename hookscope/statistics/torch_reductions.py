"""Reductions made of torch's own: for any floating dtype and device.

On the CPU values are read by a handful of vectorised reductions, whose results are looked at once; rare ones (not
finite, too large or too small to square) take a slower path in float64. On an accelerator nothing is looked at.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookscope.results.distribution import PARTS, Distribution, distribution_of, key_of
from hookscope.statistics.library import CANCELLATION_LIMIT, LARGEST_SQUARABLE, SMALLEST_SQUARABLE
from hookscope.statistics.reduction import Reduction

# Length of the rows that sums of squares are taken over: a float32 accumulator stays good to 1e-6 over so many.
_ROW = 1024

# The largest exponent whose power of two, and that of the exponent's negative, a dtype holds as a normal number.
_LARGEST_EXPONENT = {torch.float32: 126, torch.float64: 1022}
# Up to this exponent float64 holds sums of squares of as many values as memory does, with all their digits.
_SQUARABLE_EXPONENT = 400
_LARGEST_SQUARED, _SMALLEST_SQUARED = 2.0**_SQUARABLE_EXPONENT, 2.0**-_SQUARABLE_EXPONENT


def reduce_rows(
    rows: Tensor, channels_view: tuple[int, int, int], known: Sequence[Reduction], space: Tensor, *, distributions: bool
) -> list[Reduction]:
    """Reduce real floating values on the CPU, looking at the results as they come.

    Args:
        rows: The values, one tensor per row, (R, n).
        channels_view: (before, C, after), see `in_memory_order`.
        known: What is known of each row's tensor.
        space: Work space, (R, n), which may be `rows` if they are no longer needed.
        distributions: Whether to count how values are distributed.

    Returns:
        The reduction of each row.
    """
    count = rows.shape[1]
    lows, highs = rows.amin(1).tolist(), rows.amax(1).tolist()
    binned: list[Distribution | None] = [None] * len(rows)
    if distributions:
        # `.numpy()` would keep the network from ever resizing the storage of its tensor.
        binned = [*map(distribution_on_cpu, np.from_dlpack(rows), lows, highs)]
    rare: dict[int, Reduction] = {}
    plain = []
    for at, (low, high) in enumerate(zip(lows, highs, strict=True)):
        # Summing equal values would only add rounding; NaN, Inf and what float32 cannot square go another way.
        plain.append(low < high and SMALLEST_SQUARABLE < max(high, -low) < LARGEST_SQUARABLE)
        squares_fit = low == 0 or _SMALLEST_SQUARED < abs(low) < _LARGEST_SQUARED
        if not plain[at] and (low != high or not squares_fit):
            rare[at] = _reduce_rare(rows[at], channels_view, known[at])
    moments = _moments(rows, plain)
    signed = any(low < 0 for low in lows)
    magnitudes = torch.abs(rows, out=space) if signed else rows
    abs_sums = magnitudes.sum(1).tolist()
    smallest = magnitudes.amin(1).tolist() if signed else lows
    before, channels, after = channels_view
    full = np.full(channels, float(before * after))
    nonzero = _nonzero_per_channel(magnitudes, channels_view, space) if 0 in smallest else [full] * len(rows)
    reductions = []
    for at, row in enumerate(known):
        if at in rare:
            reductions.append(rare[at]._replace(distribution=binned[at]))
            continue
        low, high = lows[at], highs[at]
        mean, square_sum, squared_deviations = moments[at] if plain[at] else (low, low * low * count, 0.0)
        reductions.append(
            Reduction(
                row.shape,
                row.dtype,
                row.element_count,
                row.channel_axis,
                count,
                mean,
                squared_deviations,
                low,
                high,
                abs_sums[at] if plain[at] else abs(low) * count,
                square_sum,
                0,
                int(nonzero[at].sum()) if smallest[at] == 0 else count,
                None if row.channel_axis is None else nonzero[at],
                binned[at],
            )
        )
    return reductions


def _reduce_rare(flat: Tensor, channels_view: tuple[int, int, int], known: Reduction) -> Reduction:
    """Reduce values that are not finite, or too large or too small to square in float32."""
    scalars, counts = reduce_on_device(flat.double().unsqueeze(0), channels_view)
    return completed(known, scalars[0].tolist(), counts[0].numpy())


def _moments(rows: Tensor, plain: Sequence[bool]) -> list[tuple[float, float, float]]:
    """Return mean, sum of squares and of squared deviations of each row, (R, n); right for the plain ones."""
    count = rows.shape[1]
    moments = []
    for at, (total, square_sum) in enumerate(zip(rows.sum(1).tolist(), _square_sums(rows), strict=True)):
        mean = total / count
        squared_deviations = square_sum - mean * total
        if plain[at] and mean * total > CANCELLATION_LIMIT * squared_deviations:
            mean, squared_deviations = _centred(rows[at], mean)
        moments.append((mean, square_sum, max(0.0, squared_deviations)))
    return moments


def _centred(flat: Tensor, mean: float) -> tuple[float, float]:
    """Return the mean and the sum of squared deviations of values that vary little about a large mean.

    A rough mean leaves each deviation off by a constant, which their own mean shows; only if it dwarfs the deviations,
    as when those are a few roundings wide, does it take a second look.
    """
    count = flat.numel()
    squared_deviations = 0.0
    for _ in range(2):
        centre = flat.new_tensor(mean)
        deviations = flat - centre
        shift = deviations.sum().item() / count
        squared_deviations = _square_sums(deviations.unsqueeze(0))[0] - count * shift * shift
        mean = centre.item() + shift
        if count * shift * shift <= CANCELLATION_LIMIT * squared_deviations:
            break
    return mean, squared_deviations


def _nonzero_per_channel(
    magnitudes: Tensor, channels_view: tuple[int, int, int], space: Tensor
) -> list[NDArray[np.float64]]:
    """Count non-zero elements per channel, (C,), in each row of non-negative values, (R, n)."""
    before, channels, after = channels_view
    if before * after >= 2**24:  # up to here a float32 sum of ones is exact
        counts = (magnitudes != 0).view(-1, before, channels, after).sum((1, 3))
    elif after == 1:
        signs = torch.sign(magnitudes, out=space).view(-1, before, channels)
        counts = signs.new_ones(before) @ signs
    else:
        counts = torch.sign(magnitudes, out=space).view(-1, before, channels, after).sum(3).sum(1)
    return list(counts.numpy().astype(np.float64))


def _square_sums(rows: Tensor) -> list[float]:
    """Return each row's sum of squares, over short stretches: one long float32 sum of them is off by up to 1e-3."""
    count = rows.shape[1]
    stretch = min(count & -count, _ROW)
    if stretch < 64 < count:  # few factors of two: cut the tail off instead
        stretch = min(_ROW, count)
    body = count - count % stretch
    norms = torch.linalg.vector_norm(rows[:, :body].reshape(len(rows), -1, stretch), dim=2)  # (R, n / stretch)
    if norms.shape[1] > _ROW:
        sums = norms.double().square().sum(1)
    else:
        sums = torch.linalg.vector_norm(norms, dim=1).double().square()
    if body < count:
        sums += torch.linalg.vector_norm(rows[:, body:], dim=1).double().square()
    return [float(total) for total in sums.tolist()]


def reduce_on_device(rows: Tensor, channels_view: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Reduce any floating values without branching on values, so that Python never waits for the device.

    Args:
        rows: The values, one tensor per row, (R, n).
        channels_view: (before, C, after), see `in_memory_order`.

    Returns:
        (R, 7) of the same dtype: an exponent e, mean, squared deviations, min, max, sum of absolute values and sum of
        squares of the finite values; all but the extremes are those of the values divided by 2^e, so that no square
        overflows or vanishes. And (R, 2 + C) integers: finite count, NaN count, non-zero elements per channel.
    """
    finite = rows.isfinite()
    low, high = rows.where(finite, math.inf).amin(1), rows.where(finite, -math.inf).amax(1)
    largest = _LARGEST_EXPONENT[rows.dtype]
    exponent = torch.maximum(high, -low).log2().floor().nan_to_num(0.0).clamp(-largest, largest)
    kept = rows.where(finite, 0) * torch.exp2(-exponent).unsqueeze(1)
    finite_count = finite.sum(1)
    divisor = finite_count.clamp(min=1)
    mean = kept.sum(1) / divisor
    deviations = (kept - mean.unsqueeze(1)).where(finite, 0)
    shift = deviations.sum(1) / divisor  # what rounding left in the mean
    squared_deviations = (deviations - shift.unsqueeze(1)).where(finite, 0).square().sum(1) * (low < high)
    scalars = [exponent, mean + shift, squared_deviations, low, high, kept.abs().sum(1), kept.square().sum(1)]
    counts = torch.stack([finite_count, rows.isnan().sum(1)], 1)
    nonzero = (rows != 0).view(-1, *channels_view).sum((1, 3))
    return torch.stack(scalars, 1), torch.cat([counts, nonzero], 1)


def completed(known: Reduction, scalars: Sequence[float], counts: NDArray[np.int64]) -> Reduction:
    """Complete a reduction with a row of what `reduce_on_device` gave; it has no distribution."""
    exponent, mean, squared_deviations, low, high, abs_sum, square_sum = scalars
    finite_count, nan_count = counts[:2].tolist()
    scaled = Reduction(
        known.shape,
        known.dtype,
        known.element_count,
        known.channel_axis,
        finite_count,
        math.ldexp(mean, int(exponent)),
        squared_deviations,
        low,
        high,
        abs_sum,
        square_sum,
        nan_count,
        int(counts[2:].sum()),
        None if known.channel_axis is None else counts[2:].astype(np.float64),
        exponent=int(exponent),
    )
    return scaled.with_exponent(0) if abs(exponent) <= _SQUARABLE_EXPONENT else scaled


def distribution_on_cpu(values: NDArray[np.floating], low: float, high: float) -> Distribution | None:
    """Return the distribution of the finite values, (n,); None without any. Extremes are not finite if one is not."""
    return distribution_of(values if math.isfinite(low) and math.isfinite(high) else values[np.isfinite(values)])


def count_in_bins(rows: Tensor) -> Tensor:
    """Count on an accelerator, without looking at the values or at how many bins hold any.

    Args:
        rows: float32 or float64, one tensor per row, (R, n).

    Returns:
        A copy of the rows where that is no larger than counts would be. Otherwise integers, (R, B): counts in all bins
        of the dtype, ascending. `distribution_of_counts` takes a row of either.
    """
    keys, boundaries = _bins_there(rows.dtype, rows.device)
    if rows.shape[1] * rows.itemsize <= len(keys) * 4:
        return rows.clone()
    ordered = rows.sort(dim=1).values
    together = boundaries.expand(len(rows), -1).contiguous()
    return torch.searchsorted(ordered, together, out_int32=rows.shape[1] < 2**31).diff(dim=1)


def distribution_of_counts(counted: NDArray[Any], dtype: torch.dtype, low: float, high: float) -> Distribution | None:
    """Return the distribution of finite values from a row of `count_in_bins`; None without any."""
    if counted.dtype.kind == "f":
        return distribution_on_cpu(counted, math.nan, math.nan)
    (found,) = np.nonzero(counted)
    if not found.size:
        return None
    counts = counted[found].astype(np.int64)
    return Distribution(low, high, int(counts.sum()), None, _bins(dtype)[0][found], counts)


@cache
def _bins(dtype: torch.dtype) -> tuple[NDArray[np.int32], NDArray[np.floating]]:
    """Return all bins of a dtype, ascending, (B,), and the smallest value of each, with Inf behind them, (B + 1,)."""
    limits = np.finfo(np.float32 if dtype == torch.float32 else np.float64)
    lowest = int(limits.minexp) - limits.nmant  # exponent of the smallest subnormal number
    exponents = np.arange(lowest, limits.maxexp).repeat(PARTS)
    parts = np.tile(np.arange(PARTS), limits.maxexp - lowest)
    # Below 2^(lowest + 5) not all edges are numbers of the dtype: the next one above is the smallest value.
    scale = np.minimum(exponents - lowest, 5)
    near = np.ldexp(np.ceil(np.ldexp(1 + parts / PARTS, scale)), exponents - scale).astype(limits.dtype)
    far = np.append(near[1:], limits.dtype.type(np.inf))
    keys = key_of(lowest) + np.arange(near.size)
    smallest_negative = -np.nextafter(np.insert(far, 0, near[0]), limits.dtype.type(0))[::-1]  # and zero's own
    return np.concatenate([-keys[::-1], [0], keys]).astype(np.int32), np.concatenate(
        [smallest_negative, near, far[-1:]]
    )


@cache
def _bins_there(dtype: torch.dtype, device: torch.device) -> tuple[NDArray[np.int32], Tensor]:
    """Return the same with the values on a device."""
    keys, smallest = _bins(dtype)
    with torch.inference_mode(False):
        return keys, torch.from_numpy(smallest).to(device)
