"""Reduce tensors as they come, inside hooks.

The cost of statistics is decided here. A dense float32 tensor on the CPU is read once by compiled code, where this
installation has it; others by torch's reductions. On an accelerator nothing is looked at until `collect`, so that the
device is never made to wait.
"""

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookscope.statistics.binning import count_in_bins, distribution_of_counts
from hookscope.statistics.native import Fused, FusedReducer, plain
from hookscope.statistics.reduction import Reduction, with_zeros
from hookscope.statistics.storage import as_real_floats, in_memory_order, stored_values
from hookscope.statistics.torch_reductions import completed, reduce_on_device, reduce_rows
from hookscope.text import exception_line

# Up to this size a tensor is copied and reduced with others; measured.
_SMALL = 2**17
# So many elements are staged at most: about what stays in a processor's own cache. Our choice.
_STAGE_ELEMENTS = 2**18
# The same on an accelerator, where starting an operation costs as much as reading megabytes. Our choice, not measured.
_SMALL_THERE, _STAGE_ELEMENTS_THERE = 2**20, 2**23
# What can be staged as float32 without loss.
_STAGED_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})


@dataclass(slots=True)
class Staged:
    """A small tensor whose values wait in a `Reducer` for others of its shape.

    Attributes:
        known: What is known without reading the values.
        settled: The reduction; None until `Reducer.settle`.
    """

    known: Reduction
    settled: "Reduction | Pending | None" = None


class Pending(NamedTuple):
    """A reduction whose numbers are still on an accelerator, in one row of those that were reduced together.

    Attributes:
        known: What is known without asking the device.
        row: Which row it is.
        scalars: As `reduce_on_device` gives them, (R, 7).
        counts: Likewise, (R, 2 + C).
        binned: As `count_in_bins` gives them, (R, …); (R, 0) without distributions.
    """

    known: Reduction
    row: int
    scalars: Tensor
    counts: Tensor
    binned: Tensor


Measured = Reduction | Fused | Staged | Pending
"""What `Reducer.reduce` gives in a hook, for `collect` to finish."""


class Reducer:
    """Reduces tensors as they come; holds the work space for it, so that no hook asks for memory anew.

    Small tensors that compiled code does not read are copied and reduced a few at a time, when they are enough or
    another shape comes: calls cost more than a copy.
    """

    def __init__(self, *, distributions: bool = False) -> None:
        """Start without work space; it grows to the largest tensor seen, besides what is staged.

        Args:
            distributions: Whether to count how values are distributed, for quantiles and histograms.
        """
        self.distributions = distributions
        self._fused = FusedReducer(distributions=distributions)
        self._latest: tuple[weakref.ref[Tensor], int, int | None, Measured] | None = None
        self._stage = torch.empty(0)
        self._staged: list[Staged] = []
        self._staged_view = (0, 0, 0)
        self._scratch = torch.empty(0)

    def reduce(self, tensor: Tensor, channel_axis: int | None = None) -> Measured:
        """Reduce a tensor of any layout, dtype and device to what its statistics need.

        The tensor is only read. Autocast must be off: it would round the reductions. One that comes again at once is
        not read again: a container usually returns the very tensor that its last child has just returned.

        Args:
            tensor: Any shape.
            channel_axis: The axis whose slices count as channels; None for no channel count.

        Returns:
            The reduction, or what `settle` and `collect` make it from. A tensor that cannot be measured gives its
            shape, its dtype and the reason instead of raising.
        """
        version = -1 if tensor.is_inference() else tensor._version  # noqa: SLF001 - inference tensors have none
        if self._latest is not None:
            reference, latest_version, latest_axis, reduction = self._latest
            if reference() is tensor and latest_version == version >= 0 and latest_axis == channel_axis:
                return reduction
        reduction = self._fused.reduce(tensor, channel_axis) or self._by_torch(tensor, channel_axis)
        self._latest = (weakref.ref(tensor), version, channel_axis, reduction)
        return reduction

    def _by_torch(self, tensor: Tensor, channel_axis: int | None) -> Measured:
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
            if values.dim() != len(shape):  # sparse and ragged tensors have no channel slices in memory
                channel_axis = None
            known = Reduction(shape, dtype, stored_count, channel_axis)
            if implicit_zeros:
                (stored,) = collect([self._reduce_now(values, known)]) if stored_count else (known,)
                return with_zeros(plain(stored), implicit_zeros, distributions=self.distributions)
            if stored_count == 0:
                return known
            small = stored_count <= (_SMALL if values.is_cpu else _SMALL_THERE) and values.dtype in _STAGED_DTYPES
            return self._copy(values, known) if small else self._reduce_now(values, known)
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            return Reduction(shape, dtype, element_count, unmeasured=exception_line(error))

    def settle(self) -> None:
        """Reduce what is staged: after it, every `Staged` that `reduce` returned has its reduction."""
        self._latest = None
        staged, self._staged = self._staged, []
        if staged:
            for each, reduction in zip(staged, self._reduce_staged([each.known for each in staged]), strict=True):
                each.settled = reduction

    def _reduce_staged(self, known: Sequence[Reduction]) -> Sequence[Reduction | Pending]:
        rows = self._stage[: len(known) * known[0].element_count].view(len(known), -1)
        try:
            if rows.is_cpu:
                return reduce_rows(rows, self._staged_view, known, rows, distributions=self.distributions)
            return _pending(rows, self._staged_view, known, distributions=self.distributions)
        except RuntimeError as error:  # out of memory
            return [each._replace(unmeasured=exception_line(error)) for each in known]

    def _copy(self, values: Tensor, known: Reduction) -> Staged:
        """Copy the values behind those that are staged, in memory order and as float32."""
        ordered, channels_view = in_memory_order(values, known.channel_axis)
        count = known.element_count
        begin = len(self._staged) * count
        elsewhere = self._stage.device != values.device
        if self._staged and (channels_view != self._staged_view or elsewhere or begin + count > self._stage.numel()):
            self.settle()
            begin = 0
        if elsewhere or not self._stage.numel():
            room = _STAGE_ELEMENTS if values.is_cpu else _STAGE_ELEMENTS_THERE
            with torch.inference_mode(False):  # in a model's inference mode it would be of no use outside
                self._stage = torch.empty(room, dtype=torch.float32, device=values.device)
        self._stage[begin : begin + count].view(ordered.shape).copy_(ordered)
        self._staged_view = channels_view
        staged = Staged(known)
        self._staged.append(staged)
        return staged

    def _reduce_now(self, values: Tensor, known: Reduction) -> Reduction | Pending:
        ordered, channels_view = in_memory_order(values, known.channel_axis)
        flat = as_real_floats(ordered.reshape(-1).resolve_neg())
        if not flat.is_cpu:
            return _pending(flat.unsqueeze(0), channels_view, [known], distributions=self.distributions)[0]
        if self._scratch.numel() < flat.numel() or self._scratch.dtype != flat.dtype:
            with torch.inference_mode(False):
                self._scratch = torch.empty_like(flat)
        rows, space = flat.unsqueeze(0), self._scratch[: flat.numel()].unsqueeze(0)
        return reduce_rows(rows, channels_view, [known], space, distributions=self.distributions)[0]


def _pending(
    rows: Tensor, channels_view: tuple[int, int, int], known: Sequence[Reduction], *, distributions: bool
) -> list[Pending]:
    """Reduce tensors of one shape on an accelerator, one per row, (R, n)."""
    scalars, counts = reduce_on_device(rows, channels_view)
    binned = count_in_bins(rows) if distributions else rows[:, :0]
    return [Pending(each, row, scalars, counts, binned) for row, each in enumerate(known)]


def reduce_tensor(tensor: Tensor, channel_axis: int | None = None) -> Reduction | Fused | Pending:
    """Reduce one tensor by itself, with its distribution; see `Reducer.reduce`."""
    reducer = Reducer(distributions=True)
    reduction = reducer.reduce(tensor, channel_axis)
    reducer.settle()
    return reduction if isinstance(reduction, Pending) else collect([reduction])[0]


def collect(reductions: Sequence[Measured]) -> list[Reduction | Fused]:
    """Finish reductions, moving together what is on a device.

    Args:
        reductions: What `Reducer.reduce` returned, settled.

    Returns:
        One reduction for each, in order.
    """
    finished = _finished(reductions)
    result: list[Reduction | Fused] = []
    for each in reductions:
        settled = (each.settled or _unread(each.known)) if isinstance(each, Staged) else each
        result.append(next(finished) if isinstance(settled, Pending) else settled)
    return result


def _unread(known: Reduction) -> Reduction:
    return known._replace(unmeasured="its values were not read")


def _finished(reductions: Sequence[Measured]) -> Iterator[Reduction]:
    """Yield those that are pending complete with their numbers, which the first fetches from the device together."""
    settled = [each.settled if isinstance(each, Staged) else each for each in reductions]
    pending = [each for each in settled if isinstance(each, Pending)]
    groups = {id(each.scalars): each for each in pending}
    arrays = iter(_fetch([part for each in groups.values() for part in (each.scalars, each.counts, each.binned)]))
    fetched = {key: (next(arrays), next(arrays), next(arrays)) for key in groups}
    for each in pending:
        scalars, counts, binned = fetched[id(each.scalars)]
        reduction = completed(each.known, scalars[each.row].tolist(), counts[each.row])
        if binned.size:
            found = distribution_of_counts(binned[each.row], each.scalars.dtype, reduction.min, reduction.max)
            reduction = reduction._replace(distribution=found)
        yield reduction


def _fetch(tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
    """Return contiguous tensors as arrays; those of one device are moved in one piece, as bytes."""
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
