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

from hookscope.measure.fused import Fused, FusedReducer, plain
from hookscope.measure.reduction import Reduction, sample_stride, with_zeros
from hookscope.measure.storage import as_real_floats, in_memory_order, stored_values
from hookscope.measure.torch_reductions import completed, reduce_rows, reduce_without_looking

# Up to this size a tensor is copied and reduced with others; measured.
_SMALL = 2**17
# So many elements are staged at most: about what stays in a processor's own cache. Our choice.
_STAGE_ELEMENTS = 2**18
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
    settled: Reduction | None = None


class Pending(NamedTuple):
    """A reduction whose numbers are still on an accelerator.

    Attributes:
        known: What is known without asking the device.
        scalars: As `reduce_without_looking` gives them, (7,).
        counts: Likewise, (2 + C,).
        sample: Every `known.stride`-th element in memory order, finite or not.
    """

    known: Reduction
    scalars: Tensor
    counts: Tensor
    sample: Tensor


Measured = Reduction | Fused | Staged | Pending
"""What `Reducer.reduce` gives in a hook, for `collect` to finish."""


class Reducer:
    """Reduces tensors as they come; holds the work space for it, so that no hook asks for memory anew.

    Small tensors that compiled code does not read are copied and reduced a few at a time, when they are enough or
    another shape comes: calls cost more than a copy.
    """

    def __init__(self) -> None:
        """Start without work space; it grows to the largest tensor seen, besides `_STAGE_ELEMENTS`."""
        self._fused = FusedReducer()
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
            known = Reduction(shape, dtype, stored_count, channel_axis, stride=sample_stride(max(1, stored_count)))
            if implicit_zeros:
                (stored,) = collect([self._reduce_now(values, known)]) if stored_count else (known,)
                return with_zeros(plain(stored), implicit_zeros)
            if stored_count == 0:
                return known
            small = stored_count <= _SMALL and values.is_cpu and values.dtype in _STAGED_DTYPES
            return self._copy(values, known) if small else self._reduce_now(values, known)
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            return Reduction(shape, dtype, element_count, unmeasured=_first_line(error))

    def settle(self) -> None:
        """Reduce what is staged: after it, every `Staged` that `reduce` returned has its reduction."""
        self._latest = None
        staged, self._staged = self._staged, []
        if staged:
            rows = self._stage[: len(staged) * staged[0].known.element_count].view(len(staged), -1)
            reductions = reduce_rows(rows, self._staged_view, [each.known for each in staged], rows)
            for each, reduction in zip(staged, reductions, strict=True):
                each.settled = reduction

    def _copy(self, values: Tensor, known: Reduction) -> Staged:
        """Copy the values behind those that are staged, in memory order and as float32."""
        ordered, channels_view = in_memory_order(values, known.channel_axis)
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
        ordered, channels_view = in_memory_order(values, known.channel_axis)
        flat = as_real_floats(ordered.reshape(-1).resolve_neg())
        if not flat.is_cpu:
            return Pending(known, *reduce_without_looking(flat, channels_view), flat[:: known.stride].clone())
        if self._scratch.numel() < flat.numel() or self._scratch.dtype != flat.dtype:
            with torch.inference_mode(False):
                self._scratch = torch.empty_like(flat)
        rows, space = flat.unsqueeze(0), self._scratch[: flat.numel()].unsqueeze(0)
        return reduce_rows(rows, channels_view, [known], space)[0]


def reduce_tensor(tensor: Tensor, channel_axis: int | None = None) -> Reduction | Fused | Pending:
    """Reduce one tensor by itself; see `Reducer.reduce`."""
    reducer = Reducer()
    reduction = reducer.reduce(tensor, channel_axis)
    reducer.settle()
    return reduction if isinstance(reduction, Pending) else collect([reduction])[0]


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"


def collect(reductions: Sequence[Measured]) -> list[Reduction | Fused]:
    """Finish reductions, moving together what is on a device.

    Args:
        reductions: What `Reducer.reduce` returned, settled.

    Returns:
        One reduction for each, in order.
    """
    pending = [each for each in reductions if isinstance(each, Pending)]
    finished = _finished(pending)
    result: list[Reduction | Fused] = []
    for each in reductions:
        if isinstance(each, Pending):
            result.append(next(finished))
        elif isinstance(each, Staged):
            result.append(each.settled or each.known._replace(unmeasured="its values were not read"))
        else:
            result.append(each)
    return result


def _finished(pending: Sequence[Pending]) -> Iterator[Reduction]:
    """Yield reductions complete with their numbers, which the first of them fetches from the device together."""
    fetched = iter(_fetch([part for each in pending for part in (each.scalars, each.counts, each.sample)]))
    for each in pending:
        scalars, counts, sample = next(fetched), next(fetched), next(fetched)
        yield completed(each.known, scalars.tolist(), counts, sample)


def _fetch(tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
    """Return 1-D tensors as arrays; those of one device are moved in one piece, as bytes."""
    groups: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault(tensor.device, []).append(index)
    arrays: dict[int, NDArray[Any]] = {}
    for indices in groups.values():
        together = torch.cat([tensors[index].view(torch.uint8) for index in indices]).cpu().numpy()
        ends = np.cumsum([tensors[index].nbytes for index in indices])
        for index, piece in zip(indices, np.split(together, ends[:-1]), strict=True):
            arrays[index] = piece.view(str(tensors[index].dtype).removeprefix("torch."))
    return [arrays[index] for index in range(len(tensors))]
