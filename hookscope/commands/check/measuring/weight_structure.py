"""Find structure in a weight's values: outliers, repeated filters, runs of one value, pure chance, float8."""

import math

import numpy as np
import torch
from torch import Tensor

from hookscope.results.check import ConstantRun, Float8Values
from hookscope.statistics.storage import plain_array

_PIECE_ELEMENTS = 2**16  # they stay in a processor's cache, as in `stored`
_SAMPLE_ELEMENTS = 4096  # enough evenly spaced values to estimate where the greatest thousandth begins
_FEWEST_FOR_OUTLIERS = 16  # with fewer values, the second greatest does not show the usual size

# Filters of fewer values other than zero may be equal by chance, once they are rounded to eight bits.
_FEWEST_IN_FILTER = 8
_FEWEST_IN_ROUNDED_FILTER = 32
_ROUNDED_VALUES = range(4, 257)  # counts of different values in a weight of four times as many: up to eight bits
_PROBED_COLUMNS = 8  # different filters nearly always differ in one of them

_SHORTEST_RUN = 32
_DEAD_BELOW = 0.01  # share of the greatest magnitude that a dead filter stays below; one quantum of int8 does
SUBNORMAL_BELOW = 2.0**-126  # the least normal number of float32 (IEEE 754); smaller values count as zero in a run

# With fewer values, or smaller groups, spreads say little. With a greater kurtosis, a few values have all the
# energy; the normal distribution has 3.
_FEWEST_FOR_SPREAD = 2048
_FEWEST_IN_GROUP = 8
_HEAVIEST_TAILS = 100.0

# Float8 dtypes of weights; wider weights are compared with the first two. float8_e8m0fnu is for scales.
_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_LOOKED_UP = _DTYPES[:2]
_FEWEST_MAGNITUDES = 6  # binary and ternary weights and blurs have fewer, and fit float8 by accident
_FLOAT8_SAMPLE = 256  # enough evenly spaced values to show, nearly always, that a weight was not rounded


def outlier_ratio(values: Tensor) -> float | None:
    """Return the greatest magnitude over the 99.9% quantile of magnitudes, of values that are finite and not zero.

    A thousandth of all values are at or above the quantile, at least two. None for fewer than 16 values.
    """
    flat = values.reshape(-1)
    if flat.numel() < _FEWEST_FOR_OUTLIERS:
        return None
    count = int(torch.count_nonzero(flat.float() if flat.itemsize < 2 else flat))
    sample = _magnitudes(flat[:: max(1, flat.numel() // _SAMPLE_ELEMENTS)].contiguous())
    likely = float(sample.quantile(0.97)) if sample.numel() else 0.0
    for threshold in (likely, 0.0):
        pieces = map(_magnitudes, torch.split(flat, _PIECE_ELEMENTS))
        top = torch.cat([piece[piece >= threshold] for piece in pieces])
        wanted = max(2, math.ceil((count if threshold else len(top)) / 1000))
        if len(top) >= wanted:
            break
    if count < _FEWEST_FOR_OUTLIERS or len(top) < wanted:
        return None
    greatest = torch.topk(top, wanted).values
    return float(greatest[0]) / float(greatest[-1])


def _magnitudes(piece: Tensor) -> Tensor:
    magnitudes = (piece if piece.itemsize > 4 else piece.float()).abs()
    return magnitudes[(magnitudes > 0) & magnitudes.isfinite()]


def repeated_filters(filters: Tensor, *, rounded: bool) -> tuple[int, ...]:
    """Return the filters, of (filters, inputs, places), that equal one before them; `rounded` to eight bits or fewer.

    Left out are filters of few values other than zero, and a depthwise weight that repeats a single kernel, as a blur
    does.
    """
    is_depthwise = filters.shape[1] == 1
    filters = filters.flatten(1)
    if filters.shape[1] < _FEWEST_IN_FILTER or len(filters) < 2:
        return ()
    keys = _bytes_of(filters[:, :: filters.shape[1] // _PROBED_COLUMNS])
    whole = keys.view(np.dtype((np.void, keys.shape[1]))).reshape(-1)
    _, firsts, inverse, counts = np.unique(whole, return_index=True, return_inverse=True, return_counts=True)
    alike = np.flatnonzero(counts[inverse] > 1)
    if not len(alike):
        return ()
    if not rounded:
        once = filters[firsts]  # repeated ones have few values too
        different = len(once.unique())  # type: ignore[no-untyped-call]
        rounded = different in _ROUNDED_VALUES and 4 * different <= once.numel()
    least = _FEWEST_IN_ROUNDED_FILTER if rounded else _FEWEST_IN_FILTER
    dense = (filters[alike] != 0).sum(1) >= least
    alike = alike[dense.cpu().numpy()]
    first_with: dict[bytes, int] = {}
    repeats = []
    for index in alike.tolist():
        content = _bytes_of(filters[index : index + 1]).tobytes()
        if first_with.setdefault(content, index) != index:
            repeats.append(index)
    return () if is_depthwise and len(repeats) == len(filters) - 1 else tuple(repeats)


def _bytes_of(rows: Tensor) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return plain_array(rows.detach().cpu().contiguous().view(torch.uint8))


def longest_run(weight: Tensor) -> ConstantRun | None:
    """Return the longest run of one value in the memory of a weight without its dead channels; None below 32."""
    laid_out = weight.permute(sorted(range(weight.dim()), key=weight.stride, reverse=True))
    first = next((size for size in laid_out.shape if size > 1), 1)
    matrix = laid_out.reshape(first, -1)  # other axes show as columns, whichever of them comes first in memory
    flat = matrix.reshape(-1)
    # Every run of 32 contains at least one of these pairs of neighbours.
    step = _SHORTEST_RUN // 2
    pairs = torch.stack((flat[step::step], flat[step - 1 : -1 : step]))
    if not torch.any((pairs[0] == pairs[1]) | (pairs.abs() < SUBNORMAL_BELOW).all(0)):
        return None
    magnitudes = matrix.abs()
    matrix = matrix.where(magnitudes >= SUBNORMAL_BELOW, 0)
    live = magnitudes > _DEAD_BELOW * magnitudes.max()
    rows, columns = live.any(1).nonzero().flatten(), live.any(0).nonzero().flatten()
    kept = matrix[rows][:, columns]
    flat = kept.reshape(-1)
    differs = (flat[1:] != flat[:-1]).nonzero().flatten() + 1
    edges = torch.cat([differs.new_zeros(1), differs, differs.new_full((1,), len(flat))])
    lengths = edges.diff()
    if not len(lengths) or (length := int(lengths.max())) < _SHORTEST_RUN:
        return None
    begin = int(edges[int(lengths.argmax())])
    share = _share_elsewhere(kept == flat[begin], begin, begin + length)
    chance = math.log(len(flat)) / -math.log(share) if 0 < share < 1 else math.inf if share else 1.0
    return ConstantRun(length, float(flat[begin]), chance)


def _share_elsewhere(equal: Tensor, begin: int, end: int) -> float:
    """Return a value's share outside of a run of it: the greatest of all values, the run's rows, and its columns."""
    width = equal.shape[1]
    first, last = begin // width, (end - 1) // width + 1
    regions = [equal, equal[first:last]]
    if last - first == 1:
        regions.append(equal[:, begin % width : (end - 1) % width + 1])
    shares = []
    for region in regions:
        outside = region.numel() - (end - begin)
        if outside >= _SHORTEST_RUN:
            shares.append((int(region.sum()) - (end - begin)) / outside)
    return max(shares, default=1.0)


def spread_beyond_chance(values: Tensor) -> float | None:
    """Return how far a weight is from values drawn independently from one distribution, in standard errors.

    Energies and means of the rows (outputs), the columns (inputs) and the places in a kernel spread by what is
    expected of independent values, or more: for `g` groups of `d` values with second and fourth moments s and f, the
    mean square of their means is s/d, and the variance of their mean squares is (f - s²)/d, each give or take a share
    of sqrt(2/g). The greatest excess is returned. Training leaves each of them far outside; every usual
    initialisation draws values independently, whatever their distribution.

    None for fewer than 2,048 values other than zero, and where moments overflow, vanish, or come from a few
    outliers. `values` are (O, I, ...).
    """
    outputs, inputs = values.shape[:2]
    if values.numel() < _FEWEST_FOR_SPREAD:
        return None
    filters = values.reshape(outputs, -1)
    width = filters.shape[1]
    row_sums, row_squares = [], []
    column_sums = torch.zeros(width, dtype=torch.float64)
    column_squares, fourth, count = torch.zeros_like(column_sums), 0.0, 0
    for rows in torch.split(filters, max(1, _PIECE_ELEMENTS // width)):
        piece = rows.float()
        squares = piece * piece
        row_sums.append(piece.sum(1).cpu().double())
        row_squares.append(squares.sum(1).cpu().double())
        column_sums += piece.sum(0).cpu().double()
        column_squares += squares.sum(0).cpu().double()
        fourth += float(torch.linalg.vector_norm(squares) ** 2)
        count += int(torch.count_nonzero(piece))
    if count < _FEWEST_FOR_SPREAD:
        return None
    second = float(column_squares.sum()) / values.numel()
    fourth = fourth / values.numel() - second**2
    if not (math.isfinite(fourth) and second > 0 and 0 < fourth < _HEAVIEST_TAILS * second**2):
        return None
    excesses = []
    by_row = torch.cat(row_sums), torch.cat(row_squares)
    by_column = column_sums.view(inputs, -1), column_squares.view(inputs, -1)  # (inputs, places)
    for sums, squares in (by_row, *((by_column[0].sum(axis), by_column[1].sum(axis)) for axis in (1, 0))):
        groups, size = len(sums), values.numel() // len(sums)
        if groups < 2 or size < _FEWEST_IN_GROUP:
            continue
        spread_of_means = float((sums / size).square().mean()) / (second / size)
        spread_of_energies = float((squares / size).var()) / (fourth / size)
        excesses += [(spread - 1) * math.sqrt(groups / 2) for spread in (spread_of_means, spread_of_energies)]
    return max(excesses, default=None)


def float8_values(values: Tensor) -> Float8Values | None:
    """Measure a weight stored in float8, or one that float8 holds exactly, as after loading; None for all others."""
    if values.dtype in _DTYPES:
        return _counted(values.float(), values.dtype)
    if not values.is_floating_point() or values.itemsize < 2 or not values.numel():
        return None
    sample = values.flatten()[:: max(1, values.numel() // _FLOAT8_SAMPLE)]
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
