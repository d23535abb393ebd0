"""Reduce tensors as they arrive in hooks.

Here the cost of statistics is decided. Compiled code, if installed, reads a dense float32 tensor on the CPU once; NumPy
reduces other CPU tensors in float64. On an accelerator torch reduces, and no result is read before `collect`, so that
Python never waits for the device.
"""

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookscope.hooks.memory import missing_memory
from hookscope.hooks.observed import physical, shape_of, version_of
from hookscope.results.distribution import distribution_of, quantiles
from hookscope.results.statistics import QUANTILE_LEVELS, Quantiles, TensorStatistics
from hookscope.statistics.kept_values import as_array, joined, kept_values
from hookscope.statistics.native import FusedReducer
from hookscope.statistics.reduction import Reduction, reduce_array, with_zeros
from hookscope.statistics.storage import as_real_floats, gathered, in_memory_order, plain_array, stored_values
from hookscope.statistics.torch_reductions import completed, count_in_bins, distribution_of_counts, reduce_on_device
from hookscope.text import exception_line

# Elements of a tensor on an accelerator up to which it is copied and waits for others of its shape, and of all waiting
# tensors: starting an operation costs as much as reading megabytes. Not measured.
_SMALL, _MOST_WAITING = 2**20, 2**23
# Dtypes that can be copied to float32 without loss.
_COPIED_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})


@dataclass(slots=True)
class Pending:
    """A reduction on an accelerator, for `collect` to fetch; its tensor may still wait for others of its shape.

    Attributes:
        header: The fields that do not depend on values.
        reduction: The complete reduction; None until it is fetched.
        on_device: The results of `reduce_on_device` and `count_in_bins` for several tensors, one per row: (R, 7),
            (R, 2 + C) and (R, ...), or (R, 0) without distributions; None if they have not been reduced.
        row: The row of this tensor.
        kept: The result of `kept_values`; None if no values are kept.
    """

    header: Reduction
    reduction: Reduction | None = None
    on_device: tuple[Tensor, Tensor, Tensor] | None = None
    row: int = 0
    kept: NDArray[Any] | Tensor | None = None


Measured = Reduction | Pending
"""What `Reducer.reduce` returns in a hook, for `collect` to finish."""

_Group = tuple[torch.device, tuple[int, int, int]]
"""The device and (before, C, after), see `in_memory_order`, of tensors that are reduced together."""


class Reducer:
    """Reduces tensors as they arrive; holds the work space, so that hooks do not allocate memory.

    Small tensors on an accelerator are copied and wait for others of their shape: a copy costs less than an operation.
    """

    def __init__(self, *, distributions: bool = False, keeps_values: bool = False) -> None:
        """Start without work space; it grows to the largest tensor seen, plus the copies that wait.

        Args:
            distributions: Whether to count how values are distributed, for quantiles and histograms.
            keeps_values: Whether to keep values of each input, so that runs can be compared.
        """
        self.distributions = distributions
        self.keeps_values = keeps_values
        self._fused = FusedReducer(distributions=distributions)
        self._latest: tuple[weakref.ref[Tensor], int, int | None, Measured] | None = None
        self._waiting: dict[_Group, list[tuple[Pending, Tensor]]] = {}
        self._waiting_elements = 0

    def reduce(self, tensor: Tensor, channel_axis: int | None = None, inputs: int = 1) -> Measured:
        """Reduce a tensor of any layout, dtype and device to the numbers behind its statistics.

        The tensor is only read. Autocast must be off: it would round the reductions. The same tensor is not read twice
        in a row: a container usually returns the tensor that its last child has just returned.

        Args:
            tensor: Any shape.
            channel_axis: The axis whose slices count as channels; None for no channel count.
            inputs: Number of inputs in the tensor, as for `kept_values`.

        Returns:
            The reduction, or a `Pending` for `settle` and `collect`. If a tensor cannot be measured, the reduction has
            the shape, the dtype and the reason; nothing is raised.
        """
        version = version_of(tensor)
        if missing := missing_memory(tensor):
            return _without_values(tensor, missing)
        original = tensor
        if self._latest is not None:
            reference, latest_version, latest_axis, reduction = self._latest
            if reference() is tensor and latest_version == version >= 0 and latest_axis == channel_axis:
                return reduction
        if type(tensor) is not Tensor:
            tensor = gathered(tensor)
        inputs = max(inputs, 1) if self.keeps_values else 0
        reduction = self._fused.reduce(tensor, channel_axis, inputs) or self._without_kernel(tensor, channel_axis)
        if inputs and (isinstance(reduction, Pending) or reduction.kept is None):
            reduction = _with_values(reduction, tensor, channel_axis, inputs)
        self._latest = (weakref.ref(original), version, channel_axis, reduction)
        return reduction

    def _without_kernel(self, tensor: Tensor, channel_axis: int | None) -> Measured:
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
            header = Reduction(shape, dtype, stored_count, channel_axis)
            if implicit_zeros:
                (stored,) = collect([self._reduce_now(values, header)]) if stored_count else (header,)
                return with_zeros(stored, implicit_zeros, distributions=self.distributions)
            if stored_count == 0:
                return header
            small = not values.is_cpu and stored_count <= _SMALL and values.dtype in _COPIED_DTYPES
            return self._copy(values, header) if small else self._reduce_now(values, header)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, MemoryError) as error:
            return Reduction(shape, dtype, element_count, unmeasured=exception_line(error))

    def settle(self) -> None:
        """Reduce waiting tensors, so that `collect` can finish all results of `reduce`."""
        self._latest = None
        while self._waiting:
            self._reduce_largest_group()

    def _copy(self, values: Tensor, header: Reduction) -> Pending:
        """Copy the values, in memory order and as float32, to wait for others of their shape."""
        ordered, channels_view = in_memory_order(values, header.channel_axis)
        copied = torch.empty(ordered.shape, dtype=torch.float32, device=values.device).copy_(ordered)
        pending = Pending(header)
        self._waiting.setdefault((values.device, channels_view), []).append((pending, copied.view(-1)))
        self._waiting_elements += header.element_count
        if self._waiting_elements > _MOST_WAITING:
            self._reduce_largest_group()
        return pending

    def _reduce_largest_group(self) -> None:
        group = max(self._waiting, key=lambda group: len(self._waiting[group]) * math.prod(group[1]))
        pending, copies = zip(*self._waiting.pop(group), strict=True)
        self._waiting_elements -= len(copies) * math.prod(group[1])
        try:
            self._reduce_on_device(torch.stack(copies), group[1], pending)
        except RuntimeError as error:  # out of memory
            for entry in pending:
                entry.reduction = entry.header._replace(unmeasured=exception_line(error))

    def _reduce_now(self, values: Tensor, header: Reduction) -> Reduction | Pending:
        ordered, channels_view = in_memory_order(values, header.channel_axis)
        flat = as_real_floats(ordered.reshape(-1).resolve_neg())
        if flat.is_cpu:
            return self._reduce_by_numpy(plain_array(physical(flat)[0]), channels_view, header)
        pending = Pending(header)
        self._reduce_on_device(flat.unsqueeze(0), channels_view, [pending])
        return pending

    def _reduce_by_numpy(
        self, values: NDArray[np.floating], channels_view: tuple[int, int, int], header: Reduction
    ) -> Reduction:
        reduction = reduce_array(values, header)
        nonzero = distribution = None
        if header.channel_axis is not None:
            nonzero = np.count_nonzero(values.reshape(channels_view), axis=(0, 2)).astype(np.float64)
        if self.distributions:
            is_finite = reduction.finite_count == values.size
            distribution = distribution_of(values if is_finite else values[np.isfinite(values)])
        return reduction._replace(channel_axis=header.channel_axis, channel_nonzero=nonzero, distribution=distribution)

    def _reduce_on_device(self, rows: Tensor, channels_view: tuple[int, int, int], pending: Sequence[Pending]) -> None:
        """Reduce tensors of one shape on an accelerator, one per row, (R, n)."""
        scalars, counts = reduce_on_device(rows, channels_view)
        results = scalars, counts, count_in_bins(rows) if self.distributions else rows[:, :0]
        for row, entry in enumerate(pending):
            entry.on_device, entry.row = results, row


def _with_values(reduction: Measured, tensor: Tensor, channel_axis: int | None, inputs: int) -> Measured:
    """Add the tensor's kept values, if it has any, without waiting for an accelerator."""
    try:
        kept = kept_values(tensor, channel_axis, inputs)
    except (RuntimeError, NotImplementedError, TypeError, ValueError):  # the reduction has the reason
        return reduction
    if isinstance(reduction, Pending):
        reduction.kept = kept
        return reduction
    return reduction if kept is None else reduction._replace(kept=(as_array(kept),))


def _without_values(tensor: Tensor, reason: str) -> Reduction:
    shape = shape_of(tensor)
    count = 0 if -1 in shape else math.prod(shape)
    return Reduction(shape, str(tensor.dtype).removeprefix("torch."), count, unmeasured=reason)


def reduce_tensor(tensor: Tensor, channel_axis: int | None = None) -> Reduction:
    """Reduce one tensor by itself, with its distribution; see `Reducer.reduce`."""
    reducer = Reducer(distributions=True)
    reduction = reducer.reduce(tensor, channel_axis)
    reducer.settle()
    return collect([reduction])[0]


def collect(measured: Sequence[Measured]) -> list[Reduction]:
    """Return finished reductions in order; all results on a device are moved together.

    Args:
        measured: Results of `Reducer.reduce`, after `settle`. An object that comes twice is returned twice.
    """
    pending = [entry for entry in measured if isinstance(entry, Pending) and entry.reduction is None]
    groups = {id(entry.on_device): entry.on_device for entry in pending if entry.on_device is not None}
    keeping = {id(entry): entry for entry in measured if isinstance(entry, Pending) and entry.kept is not None}
    kept = [entry.kept for entry in keeping.values() if isinstance(entry.kept, Tensor)]
    arrays = iter(_fetch([*(part for group in groups.values() for part in group), *kept]))
    fetched = {key: (next(arrays), next(arrays), next(arrays)) for key in groups}
    for entry in pending:
        if entry.on_device is None:
            entry.reduction = entry.header._replace(unmeasured="its values were not read")
        elif entry.reduction is None:  # not yet completed by its first occurrence
            scalars, counts, binned = (array[entry.row] for array in fetched[id(entry.on_device)])
            entry.reduction = completed(entry.header, scalars.tolist(), counts)
            if binned.size:
                dtype, low, high = entry.on_device[0].dtype, entry.reduction.min, entry.reduction.max
                distribution = distribution_of_counts(binned, dtype, low, high)
                entry.reduction = entry.reduction._replace(distribution=distribution)
    for entry in keeping.values():
        values = next(arrays) if isinstance(entry.kept, Tensor) else entry.kept
        if values is not None:
            entry.reduction = (entry.reduction or entry.header)._replace(kept=(as_array(values),))
        entry.kept = None
    return [entry.reduction or entry.header if isinstance(entry, Pending) else entry for entry in measured]


def _fetch(tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
    """Return contiguous tensors as arrays; all tensors of a device are moved in one piece, as bytes."""
    groups: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault(tensor.device, []).append(index)
    arrays: dict[int, NDArray[Any]] = {}
    for indices in groups.values():
        together = torch.cat([tensors[index].view(-1).view(torch.uint8) for index in indices]).cpu().numpy()
        ends = np.cumsum([tensors[index].nbytes for index in indices])
        for index, piece in zip(indices, np.split(together, ends[:-1]), strict=True):
            values = piece.view(str(tensors[index].dtype).removeprefix("torch."))
            arrays[index] = values.reshape(tensors[index].shape)
    return [arrays[index] for index in range(len(tensors))]


def summarise(reductions: Sequence[Reduction]) -> list[TensorStatistics]:
    """Turn reductions over the whole input, one per activation, into statistics, in order."""
    distributions = [reduction.distribution for reduction in reductions if reduction.distribution is not None]
    at_levels = iter(quantiles(distributions, QUANTILE_LEVELS))
    return [
        _statistics(reduction, None if reduction.distribution is None else next(at_levels)) for reduction in reductions
    ]


def tensor_statistics(tensor: Tensor, channel_axis: int | None = None) -> TensorStatistics:
    """Return the statistics of one tensor, with its distribution.

    Args:
        tensor: Any shape, dtype, layout and device; only read.
        channel_axis: The axis whose slices count as channels; None for no channel count.

    Returns:
        The statistics; if they are missing, `unmeasured` is the reason.
    """
    return summarise([reduce_tensor(tensor, channel_axis)])[0]


def _statistics(reduction: Reduction, at_levels: tuple[float, ...] | None) -> TensorStatistics:
    shape, dtype, elements, count = reduction.shape, reduction.dtype, reduction.element_count, reduction.finite_count
    if reduction.unmeasured or not elements:
        return TensorStatistics(shape, dtype, elements, unmeasured=reduction.unmeasured, reduction=reduction)
    channels = dead = None
    if reduction.channel_nonzero is not None:
        channels = reduction.channel_nonzero.size
        has_dead = reduction.nonzero_count < elements
        dead = channels - int(np.count_nonzero(reduction.channel_nonzero)) if has_dead else 0
    unscaled = reduction.unscaled
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
