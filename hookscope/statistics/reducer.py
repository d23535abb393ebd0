"""Reduce tensors as they arrive in hooks.

Here the cost of statistics is decided. Compiled code, if installed, reads a dense float32 tensor on the CPU once; NumPy
reduces other CPU tensors in float64. On a GPU a Triton kernel reduces; what it does not take, there and on other
accelerators, is copied and reduced on the CPU. `collect` moves results and copies together.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hookscope.errors import UsageError
from hookscope.hooks.memory import missing_memory
from hookscope.hooks.observed import physical, shape_of
from hookscope.results.distribution import EXACT_LIMIT, distribution_of, quantiles
from hookscope.results.statistics import QUANTILE_LEVELS, Quantiles, TensorStatistics
from hookscope.statistics.kept_values import joined, kept_values
from hookscope.statistics.native import FusedReducer
from hookscope.statistics.reduction import Reduction, reduce_array, with_zeros
from hookscope.statistics.storage import (
    as_real_floats,
    gathered,
    in_memory_order,
    plain_array,
    refuse_wrapper,
    stored_values,
)
from hookscope.statistics.tiles import Launched, TileReducer, moved_parts, reductions
from hookscope.text import exception_line, shape_text

# Elements of all copies that wait on an accelerator: 32 MiB as float32.
_MOST_COPIED = 2**23


class Copy(NamedTuple):
    """A copy of a tensor's values on an accelerator, (n,), and the function that reduces it on the CPU."""

    values: Tensor
    reduce: Callable[[Tensor], Reduction]


@dataclass(slots=True)
class Pending:
    """A reduction on an accelerator, for `collect` to finish.

    Attributes:
        header: The fields that do not depend on values.
        held: What is on the accelerator; None once it is fetched.
        reduction: The complete reduction; None until then.
    """

    header: Reduction
    held: Copy | Launched | None
    reduction: Reduction | None = None


Measured = Reduction | Pending
"""What `Reducer.reduce` returns in a hook, for `collect` to finish."""


class Reducer:
    """Reduces tensors as they arrive; holds the work space, so that hooks do not allocate memory."""

    def __init__(self, *, distributions: bool = False, keeps_values: bool = False) -> None:
        """Start without work space; it grows to the largest tensor seen, plus the copies that wait for `collect`.

        Args:
            distributions: Whether to count how values are distributed, for quantiles and histograms.
            keeps_values: Whether to keep values of each input, so that runs can be compared.
        """
        self.distributions = distributions
        self.keeps_values = keeps_values
        self._fused = FusedReducer(distributions=distributions)
        self.tiles = TileReducer(distributions=distributions)
        self._copies: list[Pending] = []
        self._copied_elements = 0

    def reduce(self, tensor: Tensor, channel_axis: int | None = None, inputs: int = 1) -> Measured:
        """Reduce a tensor of any layout, dtype and device to the numbers behind its statistics.

        The tensor is only read. Autocast must be off: it would round the reductions.

        Args:
            tensor: Any shape.
            channel_axis: The axis whose slices count as channels; None for no channel count.
            inputs: Number of inputs in the tensor, as for `kept_values`.

        Returns:
            The reduction, or a `Pending` for `collect`. If a tensor cannot be measured, the reduction has its shape,
            dtype and the reason; nothing is raised.
        """
        if missing := missing_memory(tensor):
            return _without_values(tensor, missing)
        if type(tensor) is not Tensor:
            tensor = gathered(tensor)
        inputs = max(inputs, 1) if self.keeps_values else 0
        fused = self._fused.reduce(tensor, channel_axis, inputs)
        return self._reduce_any(tensor, channel_axis, inputs) if fused is None else fused

    def _reduce_any(self, tensor: Tensor, channel_axis: int | None, inputs: int) -> Measured:
        dtype = str(tensor.dtype)[6:]  # without "torch."
        shape: tuple[int, ...] = ()
        element_count = 0
        try:
            shape = (tensor.size(0), -1) if tensor.is_nested else tuple(tensor.shape)
            values, shape, implicit_zeros = stored_values(tensor.detach(), shape)
            stored_count = values.numel()
            element_count = stored_count + implicit_zeros
            if values.is_meta:
                return Reduction(shape, dtype, element_count, unmeasured="a meta tensor holds no data")
            if values.dim() != len(shape):  # stored values of sparse and ragged tensors have no channel axis
                channel_axis = None
            if tensor.layout != torch.strided or tensor.is_nested:
                inputs = 0
            header = Reduction(shape, dtype, stored_count, channel_axis)
            reduce = self.reduce_near if values.is_cpu or not stored_count else self._reduce_far
            measured = reduce(values, header, inputs)
            if implicit_zeros:
                (stored,) = collect([measured])
                measured = with_zeros(stored, implicit_zeros, distributions=self.distributions)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, MemoryError) as error:
            return Reduction(shape, dtype, element_count, unmeasured=exception_line(error))
        return measured

    def reduce_near(self, values: Tensor, header: Reduction, inputs: int) -> Reduction:
        """Reduce values on the CPU by NumPy."""
        reduction = header
        if header.element_count:
            refuse_wrapper(values)
            ordered, channels_view = in_memory_order(values, header.channel_axis)
            flat = as_real_floats(ordered.reshape(-1).resolve_neg())
            array = plain_array(physical(flat)[0])
            reduction = reduce_array(array, header)
            nonzero = distribution = None
            if (axis := header.channel_axis) is not None:
                nonzero = np.count_nonzero(array.reshape(channels_view), axis=(0, 2)).astype(np.float64)
            if self.distributions:
                is_finite = reduction.finite_count == array.size
                distribution = distribution_of(array if is_finite else array[np.isfinite(array)])
            reduction = reduction._replace(channel_axis=axis, channel_nonzero=nonzero, distribution=distribution)
        kept = kept_values(values, header.channel_axis, inputs) if inputs else None
        return reduction if kept is None else reduction._replace(kept=(kept,))

    def _reduce_far(self, values: Tensor, header: Reduction, inputs: int) -> Pending:
        """Reduce values on an accelerator, one or more."""
        if values.is_cuda and header.element_count > EXACT_LIMIT and not torch.cuda.is_current_stream_capturing():
            is_right = agrees_with_cpu(values.device, values.dtype)
            launched = self.tiles.launch(values, header.channel_axis, inputs) if is_right else None
            if launched is not None:
                return Pending(header, launched)
        values, axes = physical(values)
        if axes:  # inside `torch.vmap`
            header, inputs = header._replace(element_count=values.numel(), channel_axis=None), 0
        copied = values.clone()
        reduce = partial(self._reduce_copy, header, inputs, copied.shape, copied.stride())
        pending = Pending(header, Copy(copied.as_strided((header.element_count,), (1,)), reduce))
        if self._copies and self._copies[-1].held is None:  # they have been fetched
            self._copies, self._copied_elements = [], 0
        self._copies.append(pending)
        self._copied_elements += header.element_count
        if self._copied_elements > _MOST_COPIED:
            collect(self._copies)
        return pending

    def _reduce_copy(
        self, header: Reduction, inputs: int, shape: torch.Size, strides: tuple[int, ...], moved: Tensor
    ) -> Reduction:
        values, axis = moved.as_strided(shape, strides), header.channel_axis
        reduction = self._fused.reduce(values, axis, inputs) or self._reduce_any(values, axis, inputs)
        return collect([reduction])[0]._replace(shape=header.shape, dtype=header.dtype)


@cache
def agrees_with_cpu(device: torch.device, dtype: torch.dtype) -> bool:
    """Reduce a few small tensors by the kernel on a device, and compare the results with the CPU's.

    A compiler or driver that is broken must not stop a run, and never give a wrong number.
    """
    reducer = Reducer(distributions=True, keeps_values=True)
    try:
        waves = torch.arange(9000, dtype=torch.float64, device="cpu").mul(0.7).sin().add(0.3).view(2, 3, 1500)
        odd = waves.clamp(min=0).masked_fill(waves > 1.2, math.nan)
        limits = torch.finfo(dtype)
        odd[0, 0, :4] = torch.tensor([math.inf, -math.inf, limits.max, limits.smallest_normal / 8], device="cpu")
        for sample in (odd, waves + 1e4, waves.transpose(0, 2), waves[..., 1::2], odd * 0):
            values = sample.to(dtype)
            header = Reduction(tuple(values.shape), str(dtype)[6:], values.numel(), 1)
            (actual,) = collect([Pending(header, reducer.tiles.launch(values.to(device), 1, 2))])
            exact, sums = _figures(reducer.reduce_near(values, header, 2))
            actual_exact, actual_sums = _figures(actual)
            if not (np.array_equal(exact, actual_exact, equal_nan=True) and np.allclose(sums, actual_sums, 1e-5, 0)):
                return False
    except Exception:  # noqa: BLE001 - whatever a compiler or driver may raise
        return False
    return True


def prepare_kernel(network: nn.Module) -> None:
    """Compile and check the kernel before a network runs on a GPU, so that no pass includes this time."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for device, dtype in {(param.device, param.dtype) for param in network.parameters() if param.is_cuda}:
            agrees_with_cpu(device, dtype)


def _figures(reduction: Reduction) -> tuple[NDArray[np.float64], list[float]]:  # what is exact; sums
    finite_count, mean, deviations, low, high, *sums, nan_count, nonzero_count, nonzero, distribution = reduction[4:15]
    bins = () if distribution is None else distribution.binned()
    arrays = [nonzero, *map(np.ravel, reduction.kept or ()), *bins]
    return np.concatenate([[finite_count, low, high, nan_count, nonzero_count], *arrays]), [mean, deviations, *sums]


def _without_values(tensor: Tensor, reason: str) -> Reduction:
    shape = shape_of(tensor)
    count = 0 if -1 in shape else math.prod(shape)
    return Reduction(shape, str(tensor.dtype).removeprefix("torch."), count, unmeasured=reason)


def collect(measured: Sequence[Measured]) -> list[Reduction]:
    """Return finished reductions in order; all results on a device are moved together.

    Args:
        measured: Results of `Reducer.reduce`. An object that comes twice is returned twice.
    """
    by_device: dict[torch.device, dict[int, Pending]] = {}
    for entry in measured:
        if isinstance(entry, Pending) and entry.held is not None:
            by_device.setdefault(entry.held[0].device, {})[id(entry)] = entry
    for pending in by_device.values():
        _finish([*pending.values()])
    return [entry.reduction or entry.header if isinstance(entry, Pending) else entry for entry in measured]


def _finish(pending: Sequence[Pending]) -> None:  # all on one device
    copies = [(entry, entry.held) for entry in pending if isinstance(entry.held, Copy)]
    tiled = [(entry, entry.held) for entry in pending if isinstance(entry.held, Launched)]
    launched = [(entry.header, held) for entry, held in tiled]
    moved = _fetch([*(held.values for _, held in copies), *(moved_parts(launched) if launched else ())])
    parts = [part.numpy() for part in moved[len(copies) :]]
    reduced = [held.reduce(values) for (_, held), values in zip(copies, moved, strict=False)]
    reduced += reductions(launched, parts) if launched else ()
    for (entry, _), reduction in zip([*copies, *tiled], reduced, strict=True):
        entry.reduction, entry.held = reduction, None


def _fetch(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return contiguous tensors of one device on the CPU; they are moved in one piece, as bytes."""
    order = sorted(range(len(tensors)), key=lambda index: -tensors[index].itemsize)  # no tensor begins within a word
    together = torch.cat([tensors[index].view(-1).view(torch.uint8) for index in order]).cpu()
    pieces = together.split_with_sizes([tensors[index].nbytes for index in order])
    moved = dict(zip(order, pieces, strict=True))
    return [moved[index].view(tensor.dtype).view(tensor.shape) for index, tensor in enumerate(tensors)]


def summarise(reductions: Sequence[Reduction]) -> list[TensorStatistics]:
    """Turn reductions over the whole input, one per activation, into statistics, in order."""
    distributions = [reduction.distribution for reduction in reductions if reduction.distribution is not None]
    at_levels = iter(quantiles(distributions, QUANTILE_LEVELS))
    return [
        _statistics(reduction, None if reduction.distribution is None else next(at_levels)) for reduction in reductions
    ]


def tensor_statistics(tensor: Tensor, channel_axis: int | None = None) -> TensorStatistics:
    """Return the statistics of one tensor, with its distribution; UsageError if it lacks `channel_axis`.

    Args:
        tensor: Any shape, dtype, layout and device; only read.
        channel_axis: The axis whose slices count as channels, -1 for the last; None for no channel count.

    Returns:
        The statistics; if they are missing, `unmeasured` is the reason.
    """
    if channel_axis is not None:
        if not -tensor.dim() <= channel_axis < tensor.dim():
            raise UsageError(f"The tensor of shape {shape_text(shape_of(tensor))} has no axis {channel_axis}.")
        channel_axis %= tensor.dim()
    return summarise(collect([Reducer(distributions=True).reduce(tensor, channel_axis)]))[0]


def _statistics(reduction: Reduction, at_levels: tuple[float, ...] | None) -> TensorStatistics:
    shape, dtype, elements, count = reduction.shape, reduction.dtype, reduction.element_count, reduction.finite_count
    if reduction.unmeasured or not elements:
        return TensorStatistics(shape, dtype, elements, unmeasured=reduction.unmeasured, reduction=reduction)
    channels = dead = None
    if reduction.channel_nonzero is not None:
        channels = reduction.channel_nonzero.size
        has_dead = reduction.nonzero_count < elements
        dead = channels - int(np.count_nonzero(reduction.channel_nonzero)) if has_dead else 0
    unscaled = reduction.unscaled if reduction.exponent else float  # nearly always
    return TensorStatistics(  # by position: keywords take half as long again
        shape,
        dtype,
        elements,
        reduction.mean if count else None,
        unscaled(math.sqrt(reduction.squared_deviations / count)) if count else None,
        reduction.min if count else None,
        reduction.max if count else None,
        unscaled(reduction.abs_sum / count) if count else None,
        unscaled(math.sqrt(reduction.square_sum)) if count else None,
        (elements - reduction.nonzero_count) / elements,
        reduction.nan_count,
        elements - count - reduction.nan_count,
        reduction.channel_axis,
        channels,
        dead,
        None if at_levels is None else Quantiles(*at_levels),
        None,
        reduction.distribution,
        None if reduction.kept is None else joined(reduction.kept),
        reduction if reduction.kept is None else None,
    )
