"""Reduce dense float32 tensors on the CPU in one pass, by compiled code: see native.c.

NumPy would read a tensor once per statistic. The library is compiled when hookscope is installed; without it, NumPy
reduces all tensors.
"""

import ctypes
from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookscope.hooks.memory import PLAIN_TENSORS, missing_memory
from hookscope.results.distribution import EXACT_LIMIT, Distribution
from hookscope.statistics import library
from hookscope.statistics.kept_values import by_input, kept_places
from hookscope.statistics.library import Kernel, kernel_of
from hookscope.statistics.reduction import Reduction
from hookscope.statistics.storage import in_memory_order

# The variant for the processor's capability, as torch reports it; "default" runs on any.
_VARIANTS = {"AVX2": "avx2", "AVX512": "avx512"}
# Threads share a tensor of at least this size, the grain size of torch's reductions (at::internal::GRAIN_SIZE).
_PARALLEL_ELEMENTS = 32768
# The first allocation has room for this many channels: few networks have more.
_FEWEST_CHANNELS = 4096

# Cached layouts: a network has some dozens.
_MOST_LAYOUTS = 1024


class Layout(library.Layout):
    """A layout, with further facts about tensors of one shape, strides and channel axis."""

    shape: tuple[int, ...]
    channel_axis: int | None
    count: int  # number of elements
    all_nonzero: NDArray[np.float64] | None  # count per channel if no value is zero, (C,)
    kept_shape: tuple[int, ...]  # (N, K)
    kept_at: NDArray[np.int64]  # the array at address `kept`
    kept_on: dict[tuple[torch.device, int], Tensor]  # the same on accelerators, see tiles.py
    address: int  # address of this structure


@cache
def load_kernel() -> Kernel | None:
    """Load the compiled library in the variant for this processor; None if this installation has none."""
    variant = _VARIANTS.get(torch.backends.cpu.get_cpu_capability(), "default")
    return kernel_of(variant, torch._C.__file__)  # noqa: SLF001 - OpenMP is found through this file


class FusedReducer:
    """Reduces tensors by compiled code; holds the arrays that the code writes to."""

    def __init__(self, *, distributions: bool) -> None:
        """Make room for the results of one tensor.

        Args:
            distributions: Whether to count how values are distributed.
        """
        self._kernel = load_kernel()
        self._threads = torch.get_num_threads()
        self._numbers = np.empty(library.NUMBERS)
        self._nonzero, self._kept = np.empty(0), np.empty(0, np.float32)
        # The system does not allocate memory that is never written to.
        shape = (min(self._threads, library.MAX_THREADS), library.BINS, library.COUNTERS)
        self._tables = np.zeros(shape, np.uint32) if distributions else None
        self._values = np.empty(EXACT_LIMIT, np.float32)
        bins = library.BINS if distributions else 0
        self._keys, self._counts = np.empty(bins, np.int32), np.empty(bins, np.int64)
        self._results = library.Results()
        self._results_address = ctypes.addressof(self._results)

    def reduce(self, tensor: Tensor, channel_axis: int | None, inputs: int = 0) -> Reduction | None:
        """Reduce a tensor in one pass.

        Args:
            tensor: Anything that lacks no memory, see `missing_memory`; only read.
            channel_axis: The axis whose slices count as channels; None for no channel count.
            inputs: Number of inputs in the tensor, to keep values of each, see `kept_values`; 0 to keep none.

        Returns:
            The reduction; None, to be reduced otherwise, for tensors that are not dense float32 on the CPU and for
            values that are not finite.
        """
        if self._kernel is None or not (address := address_of_float32(tensor)):
            return None
        layout = layout_of(tensor.shape, tensor.stride(), channel_axis, self._threads, inputs)
        if layout is None:
            return None
        nonzero = layout.all_nonzero
        if not self._nonzero.size or layout.channels > self._nonzero.size or layout.kept_count > self._kept.size:
            self._make_room(layout)
        outcome = self._kernel.reduce(address, layout.address, self._results_address)
        if outcome == library.RARE:
            return None
        mean, squared_deviations, low, high, abs_sum, square_sum, nonzero_count = self._numbers.tolist()
        if nonzero is not None and outcome & library.WITH_ZEROS:
            nonzero = self._nonzero[: nonzero.size].copy()
        count, distribution = layout.count, None
        if self._tables is not None and (bins := outcome >> library.BIN_COUNT_SHIFT):
            distribution = Distribution(low, high, count, None, self._keys[:bins].copy(), self._counts[:bins].copy())
        elif self._tables is not None:
            values = self._values[:count].astype(np.float64)
            values.sort()
            distribution = Distribution(low, high, count, values)
        return Reduction(  # positional arguments are faster: this runs at every call of every module
            layout.shape,
            "float32",
            count,
            layout.channel_axis,
            count,
            mean,
            squared_deviations,
            low,
            high,
            abs_sum,
            square_sum,
            0,
            int(nonzero_count),
            nonzero,
            distribution,
            None,
            (self._kept[: layout.kept_count].copy().reshape(layout.kept_shape),) if inputs else None,
        )

    def _make_room(self, layout: Layout) -> None:
        self._nonzero = np.empty(max(layout.channels, self._nonzero.size, _FEWEST_CHANNELS))
        self._kept = np.empty(max(layout.kept_count, self._kept.size), np.float32)
        self._results.__init__(  # type: ignore[misc]  # in place: compiled code knows its address
            self._numbers.ctypes.data,
            self._nonzero.ctypes.data,
            None if self._tables is None else self._tables.ctypes.data,
            self._values.ctypes.data,
            EXACT_LIMIT,
            self._keys.ctypes.data,
            self._counts.ctypes.data,
            None if self._kernel is None else self._kernel.runtime_address,
            self._kept.ctypes.data,
        )


def square_sums(tensors: Sequence[Tensor]) -> list[float | None]:
    """Return the sum of squares of each tensor, in float64; not finite where a value is not.

    Args:
        tensors: Any. The sum is None for tensors that compiled code cannot read, see `FusedReducer.reduce`, and for all
            tensors if this installation has no compiled code.
    """
    kernel = load_kernel()
    if kernel is None:
        return [None] * len(tensors)
    readable = {at: address for at, tensor in enumerate(tensors) if (address := dense_address_of(tensor))}
    sizes = [tensors[at].numel() for at in readable]
    sums = kernel.sum_squares(readable.values(), sizes, useful_threads(sum(sizes), torch.get_num_threads()))
    by_index = dict(zip(readable, sums, strict=True))
    return [by_index.get(at) for at in range(len(tensors))]


def dense_address_of(tensor: Tensor) -> int:
    """Return the address of a tensor's values if they are float32, all in memory and without gaps; else 0."""
    address = address_of_float32(tensor)
    if not address or missing_memory(tensor):
        return 0
    is_dense = tensor.is_contiguous() or layout_of(tensor.shape, tensor.stride(), None, 1) is not None
    return address if is_dense else 0


def address_of_float32(tensor: Tensor) -> int:
    """Return the address of a float32 tensor's values on the CPU, which may have any order and gaps; else 0."""
    return address_of(tensor) if tensor.dtype is torch.float32 and tensor.is_cpu else 0


def address_of(tensor: Tensor) -> int:
    """Return the address of a tensor's values on any device; 0 if they are not as they lie in memory."""
    if type(tensor) not in PLAIN_TENSORS or tensor.is_nested or tensor.is_neg() or tensor.is_conj():
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:  # without memory, such as sparse tensors, or inside `torch.func`
        return 0


def useful_threads(element_count: int, threads: int) -> int:
    """Return how many of `threads` should share a tensor."""
    return threads if element_count >= _PARALLEL_ELEMENTS else 1


@lru_cache(_MOST_LAYOUTS)
def layout_of(
    shape: torch.Size, strides: tuple[int, ...], channel_axis: int | None, threads: int, inputs: int = 0
) -> Layout | None:
    """Return the layout in memory of such tensors; None if they are empty or have gaps. `inputs`: see `reduce`."""
    like = torch.empty_strided(shape, strides, device="meta")
    ordered, (before, channels, after) = in_memory_order(like, channel_axis)
    count = like.numel()
    if not count or not ordered.is_contiguous():
        return None
    by_channel = channel_axis is not None
    kept_at = _kept_at(like, channel_axis, inputs) if inputs else np.zeros(0, np.int64)
    threads = useful_threads(count, threads)
    layout = Layout(before, channels, after, by_channel, threads, kept_at.size, kept_at.ctypes.data)
    layout.kept_shape, layout.kept_at, layout.kept_on = kept_at.shape, kept_at, {}
    layout.shape, layout.channel_axis, layout.count = tuple(shape), channel_axis, count
    layout.all_nonzero = np.full(channels, float(before * after)) if by_channel else None
    layout.address = ctypes.addressof(layout)
    return layout


def _kept_at(like: Tensor, channel_axis: int | None, inputs: int) -> NDArray[np.int64]:
    """Return the offsets in memory of the `kept_values` of such a tensor, (N, K)."""
    values, channel_axis = by_input(like, channel_axis, inputs)
    places = kept_places(values.shape, channel_axis, torch.device("cpu")).numpy()
    along = np.unravel_index(places, values.shape)
    return np.array(sum(index * stride for index, stride in zip(along, values.stride(), strict=True)), np.int64)
