"""Measure tensors: one reduction per tensor in the hook, merged over batches, summarised at the end.

The cost of statistics is decided here. On the CPU a tensor is read by a handful of vectorised reductions, whose results
are looked at once; rare tensors (values that are not finite, too large or too small to square, or of a dtype without
arithmetic) take a slower path in float64. On an accelerator nothing is looked at until `collect`, so that the device
is never made to wait.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookscope.results import QUANTILE_LEVELS, TensorStatistics

# Our choice: quartiles of 256 values are good to 3 % of rank. Reading scattered values costs more than it seems: every
# one is a cache line of its own, and a thousand of them took a tenth of the time of resnet34 itself.
SAMPLE_SIZE = 256
# A merged sample is thinned beyond this, so that memory stays flat in the number of images. Our choice.
_SAMPLE_LIMIT = 4096
# Sums of squares of float32 values outside this range lose digits at one end or overflow at the other, with up to 1e8
# of them (float32: 1e-38..3e38).
_SMALLEST_SQUARABLE = 1e-15
_LARGEST_SQUARABLE = 1e15
# var = E[x²] - mean² loses a digit for each factor of ten in mean²/var; from here on the centred form. Our choice.
_CANCELLATION_LIMIT = 10.0
# Length of the rows that sums of squares are taken over: a float32 accumulator stays good to 1e-6 over so many.
_ROW = 1024
# Up to this size a tensor is copied and reduced with others; measured.
_SMALL = 2**17
# So many elements are staged at most: about what stays in a processor's own cache. Our choice.
_STAGE_ELEMENTS = 2**18
# What can be staged as float32 without loss.
_STAGED_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})

# Exponents of the powers of two that float32 holds as normal numbers.
_SMALLEST_EXPONENT, _LARGEST_EXPONENT = -126, 126


class Reduction(NamedTuple):
    """A tensor's reduction as plain numbers, ready to be merged with that of the next batch.

    A tuple, because one is made in every hook.

    Attributes:
        shape: Shape of the tensor; -1 for a ragged axis.
        dtype: Name without "torch.".
        element_count: Elements of the tensor.
        channel_axis: Axis of `shape` counted as channels, or None.
        finite_count: Elements that are neither NaN nor Inf; the statistics up to `square_sum` are theirs.
        mean: Arithmetic mean.
        squared_deviations: Sum of squared deviations from the mean.
        min: Smallest value; +Inf for none.
        max: Largest value; -Inf for none.
        abs_sum: Sum of absolute values.
        square_sum: Sum of squares.
        nan_count: Elements that are NaN.
        nonzero_count: Elements that are not zero.
        channel_nonzero: The same per channel, (C,); None without channels.
        sample: Every `stride`-th element in memory order, the finite ones among them.
        stride: Elements per element of the sample.
        unmeasured: Why there is nothing else here.
    """

    shape: tuple[int, ...]
    dtype: str
    element_count: int
    channel_axis: int | None = None
    finite_count: int = 0
    mean: float = 0.0
    squared_deviations: float = 0.0
    min: float = math.inf
    max: float = -math.inf
    abs_sum: float = 0.0
    square_sum: float = 0.0
    nan_count: int = 0
    nonzero_count: int = 0
    channel_nonzero: NDArray[np.float64] | None = None
    sample: NDArray[np.floating] | None = None
    stride: int = 1
    unmeasured: str | None = None


@dataclass(slots=True)
class Staged:
    """A small tensor whose values wait in a `Reducer` for others of its shape.

    Attributes:
        known: What is known without reading the values.
        settled: The reduction; None until `Reducer.settle`.
    """

    known: Reduction
    settled: Reduction | None = None


class Pending(NamedTuple):
    """A reduction whose numbers are still on an accelerator.

    Attributes:
        known: What is known without asking the device.
        scalars: As `_reduce_without_looking` gives them, (7,).
        counts: Likewise, (2 + C,).
        sample: Every `known.stride`-th element in memory order, finite or not.
    """

    known: Reduction
    scalars: Tensor
    counts: Tensor
    sample: Tensor


class Reducer:
    """Reduces tensors as they come; holds the work space for it, so that no hook asks for memory anew.

    Small tensors are copied and reduced a few at a time, when they are enough or another shape comes: calls cost more
    than a copy.
    """

    def __init__(self) -> None:
        """Start without work space; it grows to the largest tensor seen, besides `_STAGE_ELEMENTS`."""
        self._stage = torch.empty(0)
        self._staged: list[Staged] = []
        self._staged_view = (0, 0, 0)
        self._scratch = torch.empty(0)

    def reduce(self, tensor: Tensor, channel_axis: int | None = None) -> Reduction | Staged | Pending:
        """Reduce a tensor of any layout, dtype and device to what its statistics need.

        The tensor is only read. Autocast must be off: it would round the reductions.

        Args:
            tensor: Any shape.
            channel_axis: The axis whose slices count as channels; None for no channel count.

        Returns:
            The reduction, or what `settle` and `collect` make it from. A tensor that cannot be measured gives its
            shape, its dtype and the reason instead of raising.
        """
        dtype = str(tensor.dtype)[6:]  # without "torch."
        shape: tuple[int, ...] = ()
        element_count = 0
        try:
            shape = (tensor.size(0), -1) if tensor.is_nested else tuple(tensor.shape)
            values, shape, implicit_zeros = _stored_values(tensor.detach(), shape)
            stored_count = values.numel()
            element_count = stored_count + implicit_zeros
            if values.is_meta:
                return Reduction(shape, dtype, element_count, unmeasured="a meta tensor holds no data")
            if values.dim() != len(shape):  # sparse and ragged tensors have no channel slices in memory
                channel_axis = None
            known = Reduction(shape, dtype, stored_count, channel_axis, stride=_sample_stride(max(1, stored_count)))
            if implicit_zeros:
                (stored,) = collect([self._reduce_now(values, known)]) if stored_count else (known,)
                return _with_zeros(stored, implicit_zeros)
            if stored_count == 0:
                return known
            if stored_count <= _SMALL and values.is_cpu and values.dtype in _STAGED_DTYPES:
                return self._copy(values, known)
            return self._reduce_now(values, known)
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            return Reduction(shape, dtype, element_count, unmeasured=_first_line(error))

    def settle(self) -> None:
        """Reduce what is staged: after it, every `Staged` that `reduce` returned has its reduction."""
        staged, self._staged = self._staged, []
        if staged:
            rows = self._stage[: len(staged) * staged[0].known.element_count].view(len(staged), -1)
            reductions = _reduce_rows(rows, self._staged_view, [each.known for each in staged], rows)
            for each, reduction in zip(staged, reductions, strict=True):
                each.settled = reduction

    def _copy(self, values: Tensor, known: Reduction) -> Staged:
        """Copy the values behind those that are staged, in memory order and as float32."""
        ordered, channels_view = _in_memory_order(values, known.channel_axis)
        count = known.element_count
        begin = len(self._staged) * count
        if self._staged and (channels_view != self._staged_view or begin + count > _STAGE_ELEMENTS):
            self.settle()
            begin = 0
        if not self._stage.numel():
            with torch.inference_mode(False):  # in a model's inference mode it would be of no use outside
                self._stage = torch.empty(_STAGE_ELEMENTS, dtype=torch.float32, device="cpu")
        self._stage[begin : begin + count].view(ordered.shape).copy_(ordered)
        self._staged_view = channels_view
        staged = Staged(known)
        self._staged.append(staged)
        return staged

    def _reduce_now(self, values: Tensor, known: Reduction) -> Reduction | Pending:
        ordered, channels_view = _in_memory_order(values, known.channel_axis)
        flat = _as_real_floats(ordered.reshape(-1).resolve_neg())
        if not flat.is_cpu:
            return Pending(known, *_reduce_without_looking(flat, channels_view), flat[:: known.stride].clone())
        if self._scratch.numel() < flat.numel() or self._scratch.dtype != flat.dtype:
            with torch.inference_mode(False):
                self._scratch = torch.empty_like(flat)
        rows, space = flat.unsqueeze(0), self._scratch[: flat.numel()].unsqueeze(0)
        return _reduce_rows(rows, channels_view, [known], space)[0]


def reduce_tensor(tensor: Tensor, channel_axis: int | None = None) -> Reduction | Pending:
    """Reduce one tensor by itself; see `Reducer.reduce`."""
    reducer = Reducer()
    reduction = reducer.reduce(tensor, channel_axis)
    reducer.settle()
    return collect([reduction])[0] if isinstance(reduction, Staged) else reduction


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"


def _stored_values(tensor: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...], int]:
    """Return the stored elements as a strided tensor, the logical shape, and how many zeros are not stored."""
    if tensor.layout == torch.strided and not tensor.is_nested:
        return (tensor.dequantize() if tensor.is_quantized else tensor), shape, 0
    if tensor.is_nested:
        parts = tensor.unbind()
        flat = torch.cat([part.reshape(-1) for part in parts]) if parts else torch.empty(0)
        return flat, (len(parts), *_ragged_shape([part.shape for part in parts])), 0
    if tensor.layout == torch.sparse_coo:
        stored = tensor.coalesce().values()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        stored = tensor.values()
    else:
        return tensor.to_dense(), shape, 0
    return stored, shape, math.prod(shape) - stored.numel()


def _ragged_shape(shapes: Sequence[torch.Size]) -> tuple[int, ...]:
    """Return the common shape of the parts, with -1 where they differ."""
    if not shapes:
        return ()
    return tuple(sizes[0] if len(set(sizes)) == 1 else -1 for sizes in zip(*shapes, strict=True))


def _as_real_floats(flat: Tensor) -> Tensor:
    """Return the elements in a real floating dtype that reductions can be accumulated in."""
    if flat.is_complex():  # measured by modulus, which may be larger than its parts' dtype can hold
        return flat.to(torch.complex128).abs()
    if not flat.is_floating_point():
        return flat.double()
    return flat.float() if flat.itemsize < 4 else flat  # half-precision accumulators overflow, float8 has none


def _in_memory_order(values: Tensor, channel_axis: int | None) -> tuple[Tensor, tuple[int, int, int]]:
    """Order the axes as they lie in memory, and say where the channels come.

    Returns:
        The values, permuted so that a dense tensor is contiguous, and (before, C, after): flat and then viewed so, they
        have channels on axis 1. C is 1 for none.
    """
    position = channel_axis
    if not values.is_contiguous():  # channels_last and transposed tensors are dense in another order
        order = sorted(range(values.dim()), key=values.stride, reverse=True)
        values = values.permute(order)
        position = None if channel_axis is None else order.index(channel_axis)
    if position is None:
        return values, (1, 1, values.numel())
    sizes = values.shape
    return values, (math.prod(sizes[:position]), sizes[position], math.prod(sizes[position + 1 :]))


def _sample_stride(count: int) -> int:
    """Return a stride that takes at most `SAMPLE_SIZE` elements and shares no factor with `count`.

    Sharing no factor, it falls on every row, column and channel alike.
    """
    stride = -(-count // SAMPLE_SIZE)
    while math.gcd(stride, count) > 1:
        stride += 1
    return stride


def _reduce_rows(
    rows: Tensor, channels_view: tuple[int, int, int], known: Sequence[Reduction], space: Tensor
) -> list[Reduction]:
    """Reduce real floating values on the CPU, looking at the results as they come.

    Args:
        rows: The values, one tensor per row, (R, n).
        channels_view: (before, C, after), see `_in_memory_order`.
        known: What is known of each row's tensor.
        space: Work space, (R, n), which may be `rows` if they are no longer needed.

    Returns:
        The reduction of each row.
    """
    count = rows.shape[1]
    lows, highs = rows.amin(1).tolist(), rows.amax(1).tolist()
    samples = rows.numpy()[:, :: known[0].stride].copy()
    rare: dict[int, Reduction] = {}
    plain = []
    for at, (low, high) in enumerate(zip(lows, highs, strict=True)):
        # Summing equal values would only add rounding; NaN, Inf and what float32 cannot square go another way.
        plain.append(low < high and _SMALLEST_SQUARABLE < max(high, -low) < _LARGEST_SQUARABLE)
        if not plain[at] and (low != high or not math.isfinite(low)):
            rare[at] = _reduce_rare(rows[at], channels_view, known[at], samples[at])
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
            reductions.append(rare[at])
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
                samples[at],
                row.stride,
            )
        )
    return reductions


def _reduce_rare(
    flat: Tensor, channels_view: tuple[int, int, int], known: Reduction, sample: NDArray[np.floating]
) -> Reduction:
    """Reduce values that are not finite, or too large or too small to square in float32."""
    scalars, counts = _reduce_without_looking(flat.double(), channels_view)
    return _completed(known, scalars.tolist(), counts.numpy(), sample)


def _moments(rows: Tensor, plain: Sequence[bool]) -> list[tuple[float, float, float]]:
    """Return mean, sum of squares and of squared deviations of each row, (R, n); right for the plain ones."""
    count = rows.shape[1]
    moments = []
    for at, (total, square_sum) in enumerate(zip(rows.sum(1).tolist(), _square_sums(rows), strict=True)):
        mean = total / count
        squared_deviations = square_sum - mean * total
        if plain[at] and mean * total > _CANCELLATION_LIMIT * squared_deviations:
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
        if count * shift * shift <= _CANCELLATION_LIMIT * squared_deviations:
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


def _reduce_without_looking(flat: Tensor, channels_view: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Reduce any floating values with no branch on data, so that nobody waits for the device.

    Returns:
        (7,) of the same dtype: an exponent e, mean, squared deviations, min, max, sum of absolute values and sum of
        squares of the finite values; all but the extremes are those of the values divided by 2^e, so that no square
        overflows or vanishes. And (2 + C,) integers: finite count, NaN count, non-zero elements per channel.
    """
    finite = flat.isfinite()
    low, high = flat.where(finite, math.inf).amin(), flat.where(finite, -math.inf).amax()
    exponent = torch.maximum(high, -low).log2().floor().nan_to_num(0.0).clamp(_SMALLEST_EXPONENT, _LARGEST_EXPONENT)
    kept = flat.where(finite, 0) * torch.exp2(-exponent)
    finite_count = finite.sum()
    divisor = finite_count.clamp(min=1)
    mean = kept.sum() / divisor
    deviations = (kept - mean).where(finite, 0)
    shift = deviations.sum() / divisor  # what rounding left in the mean
    squared_deviations = (deviations - shift).where(finite, 0).square().sum() * (low < high)
    scalars = [exponent, mean + shift, squared_deviations, low, high, kept.abs().sum(), kept.square().sum()]
    counts = [finite_count, flat.isnan().sum()]
    return torch.stack(scalars), torch.cat([torch.stack(counts), (flat != 0).view(channels_view).sum((0, 2))])


def _completed(
    known: Reduction, scalars: Sequence[float], counts: NDArray[np.int64], sample: NDArray[np.floating]
) -> Reduction:
    """Complete a reduction with what `_reduce_without_looking` gave."""
    exponent, mean, squared_deviations, low, high, abs_sum, square_sum = scalars
    finite_count, nan_count = counts[:2].tolist()
    scale = 2.0**exponent
    square_scale = scale * scale
    return known._replace(
        finite_count=finite_count,
        mean=mean * scale,
        squared_deviations=squared_deviations * square_scale,
        min=low,
        max=high,
        abs_sum=abs_sum * scale,
        square_sum=square_sum * square_scale,
        nan_count=nan_count,
        nonzero_count=int(counts[2:].sum()),
        channel_nonzero=None if known.channel_axis is None else counts[2:].astype(np.float64),
        sample=sample[np.isfinite(sample)],
    )


def collect(reductions: Sequence[Reduction | Staged | Pending]) -> list[Reduction]:
    """Bring reductions to plain numbers, moving together what is on a device.

    Args:
        reductions: What `Reducer.reduce` returned, settled.

    Returns:
        One reduction for each, in order.
    """
    pending = [each for each in reductions if isinstance(each, Pending)]
    fetched = zip(
        pending,
        _fetch([each.scalars for each in pending]),
        _fetch([each.counts for each in pending]),
        _fetch([each.sample for each in pending]),
        strict=True,
    )
    completed = (_completed(each.known, scalars.tolist(), counts, sample) for each, scalars, counts, sample in fetched)
    plain = []
    for each in reductions:
        if isinstance(each, Pending):
            plain.append(next(completed))
        elif isinstance(each, Staged):
            plain.append(each.settled or each.known._replace(unmeasured="its values were not read"))
        else:
            plain.append(each)
    return plain


def _fetch(tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
    """Return 1-D tensors as arrays; those of one device and dtype are moved in one piece."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(index)
    arrays: dict[int, NDArray[Any]] = {}
    for indices in groups.values():
        group = [tensors[index] for index in indices]
        together = torch.cat(group).cpu().numpy()
        arrays |= zip(indices, np.split(together, np.cumsum([len(part) for part in group])[:-1]), strict=True)
    return [arrays[index] for index in range(len(tensors))]


def _with_zeros(reduction: Reduction, count: int) -> Reduction:
    """Add `count` zeros that a sparse tensor implies but does not store."""
    stride = max(reduction.stride, _sample_stride(count))
    zeros = Reduction(
        reduction.shape,
        reduction.dtype,
        count,
        None,
        finite_count=count,
        min=0.0,
        max=0.0,
        sample=np.zeros(-(-count // stride)),
        stride=stride,
    )
    return merge(reduction, zeros)


def merge(first: Reduction, second: Reduction) -> Reduction:
    """Return the reduction of both tensors' elements together.

    Args:
        first: Its shape, dtype and channel axis are kept.
        second: Usually the same activation for the next batch.

    Returns:
        The reduction of the concatenation. Channels are dropped if their number differs.

    Source:
        Chan, Golub, LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
    """
    if not second.element_count and second.unmeasured is None:
        return first
    if not first.element_count and first.unmeasured is None:
        return second._replace(shape=first.shape, dtype=first.dtype)
    count = first.finite_count + second.finite_count
    delta = second.mean - first.mean
    share = second.finite_count / count if count else 0.0
    same_channels = (
        first.channel_nonzero is not None
        and second.channel_nonzero is not None
        and first.channel_nonzero.size == second.channel_nonzero.size
    )
    sample, stride = _merge_samples(first, second)
    return Reduction(
        first.shape,
        first.dtype,
        first.element_count + second.element_count,
        first.channel_axis if same_channels else None,
        count,
        first.mean + delta * share,
        first.squared_deviations + second.squared_deviations + delta * delta * first.finite_count * share,
        min(first.min, second.min),
        max(first.max, second.max),
        first.abs_sum + second.abs_sum,
        first.square_sum + second.square_sum,
        first.nan_count + second.nan_count,
        first.nonzero_count + second.nonzero_count,
        first.channel_nonzero + second.channel_nonzero if same_channels else None,  # type: ignore[operator]
        sample,
        stride,
        first.unmeasured or second.unmeasured,
    )


def _merge_samples(first: Reduction, second: Reduction) -> tuple[NDArray[np.floating] | None, int]:
    """Join two samples at the coarser stride, thinned to the limit: each element keeps about the same weight."""
    if first.sample is None or second.sample is None:
        return (first.sample, first.stride) if second.sample is None else (second.sample, second.stride)
    stride = max(first.stride, second.stride)
    joined = np.concatenate(
        [reduction.sample[:: max(1, round(stride / reduction.stride))] for reduction in (first, second)]  # type: ignore[index]
    )
    while joined.size > _SAMPLE_LIMIT:
        joined = joined[::2]
        stride *= 2
    return joined, stride


def summarise(reductions: Sequence[Reduction]) -> list[TensorStatistics]:
    """Turn finished reductions into statistics.

    Args:
        reductions: One per activation, over the whole input.

    Returns:
        One set of statistics for each, in order.
    """
    quantiles = _quantiles([reduction.sample for reduction in reductions])
    return [_statistics(reduction, values) for reduction, values in zip(reductions, quantiles, strict=True)]


def tensor_statistics(tensor: Tensor, channel_axis: int | None = None) -> TensorStatistics:
    """Return the statistics of one tensor.

    Args:
        tensor: Any shape, dtype, layout and device; only read.
        channel_axis: The axis whose slices count as channels; None for no channel count.

    Returns:
        Its statistics; `unmeasured` says why if there are none.
    """
    return summarise(collect([reduce_tensor(tensor, channel_axis)]))[0]


def _statistics(reduction: Reduction, quantiles: tuple[float, ...] | None) -> TensorStatistics:
    elements = reduction.element_count
    if reduction.unmeasured or not elements:
        return TensorStatistics(reduction.shape, reduction.dtype, elements, unmeasured=reduction.unmeasured)
    count = reduction.finite_count
    counts = reduction.channel_nonzero
    return TensorStatistics(
        reduction.shape,
        reduction.dtype,
        elements,
        mean=reduction.mean if count else None,
        std=math.sqrt(reduction.squared_deviations / count) if count else None,
        min=reduction.min if count else None,
        max=reduction.max if count else None,
        mean_abs=reduction.abs_sum / count if count else None,
        l2=math.sqrt(reduction.square_sum) if count else None,
        zero_fraction=(elements - reduction.nonzero_count) / elements,
        nan_count=reduction.nan_count,
        inf_count=elements - count - reduction.nan_count,
        channel_axis=reduction.channel_axis,
        channel_count=None if counts is None else counts.size,
        dead_channel_count=None if counts is None else counts.size - int(np.count_nonzero(counts)),
        quantiles=quantiles,
        sample_count=0 if reduction.sample is None else reduction.sample.size,
        sample=reduction.sample,
    )


def _quantiles(samples: Sequence[NDArray[np.floating] | None]) -> list[tuple[float, ...] | None]:
    """Return each sample's values at `QUANTILE_LEVELS`, linearly interpolated; samples of one length share a sort."""
    by_size: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        if sample is not None and sample.size:
            by_size.setdefault(sample.size, []).append(index)
    results: list[tuple[float, ...] | None] = [None] * len(samples)
    for size, indices in by_size.items():
        table = np.stack([sample for index in indices if (sample := samples[index]) is not None])
        table.sort(axis=1)
        position = np.array(QUANTILE_LEVELS) * (size - 1)
        below = position.astype(np.intp)
        low, high = (table[:, at].astype(np.float64) for at in (below, np.minimum(below + 1, size - 1)))
        values = low + (high - low) * (position - below)
        for index, row in zip(indices, values.tolist(), strict=True):
            results[index] = tuple(row)
    return results
