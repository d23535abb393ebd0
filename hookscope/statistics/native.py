"""Reduce dense float32 tensors on the CPU in one pass, by compiled code: see native.c.

Torch reads a tensor anew for each statistic. The library is compiled when hookscope is installed; where it is missing,
everything is left to torch.
"""

import ctypes
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hookscope.results.distribution import EXACT_LIMIT, Distribution, distribution_of
from hookscope.results.frozen import quick_constructor
from hookscope.statistics.reduction import Reduction
from hookscope.statistics.storage import in_memory_order
from hookscope.statistics.torch_reductions import CANCELLATION_LIMIT, LARGEST_SQUARABLE, SMALLEST_SQUARABLE, centred

LIBRARY = Path(__file__).with_name("native.bin")  # not .so, which Python would take for a module

# The variant for what torch says the processor has; "default" runs on any.
_VARIANTS = {"AVX2": "avx2", "AVX512": "avx512"}
# From here on threads share a tensor: the grain size of torch's own reductions (at::internal::GRAIN_SIZE).
_PARALLEL_ELEMENTS = 32768
# What `reduce` in native.c returns, and how many values it writes.
RARE, CANCELLED, _WITH_ZEROS = 1, 2, 4
BIN_COUNT_SHIFT = 3  # of that number, as in native.c
_FOUND = 7
_LOW, _HIGH, SQUARE_SUM = 2, 3, 5  # places among these
# As in native.c: bins that a tensor may fill, counters of each, threads at most.
BINS, _COUNTERS, _MAX_THREADS = 17856, 4, 16
# Room for results is made for so many tensors at a time, with so many channels and bins in all: arrays of their own for
# each would cost more than filling them. What is not filled takes no memory.
_BLOCK_TENSORS, _BLOCK_CHANNELS, _BLOCK_BINS = 256, 32768, 2**18

_READABLE = frozenset({Tensor, nn.Parameter})  # other subclasses may stand for more than their memory holds

_new = tuple.__new__  # for named tuples in hooks: to call their class is a Python call more
_new_distribution = quick_constructor(Distribution)  # one for every activation and every gradient


class _Runtime(ctypes.Structure):
    """Entry points of the OpenMP runtime that torch has loaded."""

    _fields_ = (
        ("run", ctypes.c_void_p),
        ("thread_number", ctypes.c_void_p),
        ("thread_count", ctypes.c_void_p),
    )


class _Layout(ctypes.Structure):
    """`Plan` of native.c."""

    _fields_ = tuple((name, ctypes.c_longlong) for name in ("before", "channels", "after", "by_channel", "threads"))


class Results(ctypes.Structure):
    """As in native.c."""

    _fields_ = (
        ("found", ctypes.c_void_p),
        ("nonzero", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("exact_limit", ctypes.c_longlong),
        ("keys", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("runtime", ctypes.c_void_p),
        ("smallest", ctypes.c_double),
        ("largest", ctypes.c_double),
        ("cancellation", ctypes.c_double),
    )


class Kernel(NamedTuple):
    """The compiled reduction.

    Attributes:
        reduce: As declared in native.c.
        read_list: Likewise.
        add_to_list: Likewise.
        runtime: Passed to it; None if torch's threads cannot be used.
    """

    reduce: Callable[[int, int, int], int]
    read_list: Callable[[int], None]
    add_to_list: Callable[[int, int, int], None]
    runtime: _Runtime | None


@cache
def load_kernel() -> Kernel | None:
    """Load the compiled library in the variant for this processor; None if this installation has none."""
    return kernel_of(_VARIANTS.get(torch.backends.cpu.get_cpu_capability(), "default"))


def kernel_of(variant: str) -> Kernel | None:
    """Load a variant of the compiled library."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError:
        return None
    reduce = getattr(library, f"reduce_{variant}")
    reduce.argtypes = [ctypes.c_void_p] * 3
    read_list = getattr(library, f"read_list_{variant}")
    read_list.argtypes, read_list.restype = [ctypes.c_void_p], None
    add_to_list = library.add_to_list
    add_to_list.argtypes, add_to_list.restype = [ctypes.c_void_p] * 3, None
    try:
        torch_library = ctypes.CDLL(torch._C.__file__)  # noqa: SLF001 - through it all that torch has loaded is found
        names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
        runtime = _Runtime(*(ctypes.cast(getattr(torch_library, name), ctypes.c_void_p) for name in names))
    except (OSError, AttributeError):  # torch was built with other threads
        return Kernel(reduce, read_list, add_to_list, None)
    return Kernel(reduce, read_list, add_to_list, runtime)


class Plan(NamedTuple):
    """What tensors of one shape, memory order and channel axis have in common.

    Attributes:
        known: What is known without reading the values.
        channel_count: None without channels.
        layout: The same for compiled code.
        address: Of `layout`.
    """

    known: Reduction
    channel_count: int | None
    layout: _Layout
    address: int


class Block:
    """Room for the results of n tensors, as `Results` in native.c says what they are.

    Attributes:
        found: (n, 7).
        nonzero: Counts per channel, one tensor's after another's.
        values: Those of small tensors, (n, EXACT_LIMIT); none without distributions, as for the rest.
        keys: Bins of the others, one tensor's after another's.
        counts: Likewise.
    """

    def __init__(self, tensor_count: int, channel_count: int = 0, bin_count: int = 0) -> None:
        """Make room for so many tensors, with so many channels and bins in all; no bins mean no distributions."""
        self.found = np.empty((tensor_count, _FOUND))
        self.nonzero = np.empty(channel_count)
        self.values = np.empty((tensor_count if bin_count else 0, EXACT_LIMIT), np.float32)
        self.keys = np.empty(bin_count, np.int32)
        self.counts = np.empty(bin_count, np.int64)

    def results(self, runtime: _Runtime | None, tables: NDArray[np.uint32] | None) -> Results:
        """Describe it to compiled code, with the tables that `make_tables` made; None without distributions."""
        return Results(
            self.found.ctypes.data,
            self.nonzero.ctypes.data,
            None if tables is None else tables.ctypes.data,
            self.values.ctypes.data,
            EXACT_LIMIT,
            self.keys.ctypes.data,
            self.counts.ctypes.data,
            None if runtime is None else ctypes.addressof(runtime),
            SMALLEST_SQUARABLE,
            LARGEST_SQUARABLE,
            CANCELLATION_LIMIT,
        )


def make_tables(threads: int) -> NDArray[np.uint32]:
    """Make what so many threads count values in; what is not used takes no memory."""
    return np.zeros((threads, BINS, _COUNTERS), np.uint32)


class Fused(NamedTuple):
    """A reduction whose numbers are still where compiled code has put them.

    Attributes:
        known: What is known without reading the values.
        plan: Of the reduction.
        block: Holds the numbers.
        row: Their row there.
        channel: Where the counts per channel begin there; -1 if no value is zero.
        bin: Where its bins begin there; -1 without a distribution.
        bin_count: How many there are; 0 if its values are kept.
    """

    known: Reduction
    plan: Plan
    block: Block
    row: int
    channel: int
    bin: int
    bin_count: int

    @property
    def channel_nonzero(self) -> NDArray[np.float64] | None:
        """As in `Reduction`."""
        count = self.plan.channel_count
        if count is None:
            return None
        if self.channel < 0:
            return np.full(count, self.known.element_count / count)
        return self.block.nonzero[self.channel : self.channel + count]

    @property
    def distribution(self) -> Distribution | None:
        """As in `Reduction`."""
        if self.bin < 0:
            return None
        block, row = self.block, self.row
        if not self.bin_count:
            return distribution_of(block.values[row, : self.known.element_count])
        bins = slice(self.bin, self.bin + self.bin_count)
        low, high = block.found[row, _LOW], block.found[row, _HIGH]
        count = self.known.element_count
        return _new_distribution(float(low), float(high), count, None, block.keys[bins], block.counts[bins])

    def reduction(self) -> Reduction:
        """Return it as plain numbers."""
        known, count = self.known, self.known.element_count
        mean, squared_deviations, low, high, abs_sum, square_sum, nonzero = self.block.found[self.row].tolist()
        return Reduction(
            known.shape,
            known.dtype,
            count,
            known.channel_axis,
            count,
            mean,
            squared_deviations,
            low,
            high,
            abs_sum,
            square_sum,
            0,
            int(nonzero),
            self.channel_nonzero,
            self.distribution,
        )


def plain(reduction: Reduction | Fused) -> Reduction:
    """Return a reduction as plain numbers."""
    return reduction.reduction() if isinstance(reduction, Fused) else reduction


class FusedReducer:
    """Reduces the tensors that compiled code can read; holds the room for the results."""

    def __init__(self, *, distributions: bool) -> None:
        """Start without room for results.

        Args:
            distributions: Whether to count how values are distributed.
        """
        self._kernel = load_kernel()
        self._threads = torch.get_num_threads()
        self._tables = make_tables(min(self._threads, _MAX_THREADS)) if distributions else None
        self._block = Block(0)
        # Compared in every hook, so the block's sizes stand here as numbers.
        self._row = self._row_count = self._channel = self._channel_count = self._bin = 0
        self._last_bin = 0 if distributions else -1  # where there is still room for the bins of a tensor
        self._results: Results | None = None
        self._results_address = 0

    def reduce(self, tensor: Tensor, channel_axis: int | None) -> Fused | None:
        """Reduce a tensor in one pass.

        Args:
            tensor: Anything; only read.
            channel_axis: The axis whose slices count as channels; None for no channel count.

        Returns:
            Its reduction; None for tensors that are not dense float32 on the CPU, and for rare values (not finite, or
            varied little about a magnitude that float32 cannot square): these are torch's to reduce.
        """
        if self._kernel is None:
            return None
        address = address_of(tensor)
        plan = plan_of(tensor.shape, tensor.stride(), channel_axis, self._threads) if address else None
        if plan is None:
            return None
        channels = plan.channel_count or 0
        if (
            self._row == self._row_count
            or self._channel + channels > self._channel_count
            or self._bin > self._last_bin >= 0
        ):
            self._row_count, self._channel_count = _BLOCK_TENSORS, max(channels, _BLOCK_CHANNELS)
            bin_count = 0 if self._tables is None else _BLOCK_BINS
            self._block = Block(self._row_count, self._channel_count, bin_count)
            self._row = self._channel = self._bin = 0
            self._last_bin = bin_count and bin_count - BINS
            self._results = self._block.results(self._kernel.runtime, self._tables)
            self._results_address = ctypes.addressof(self._results)
        outcome = self._kernel.reduce(address, plan.address, self._results_address)
        if outcome == RARE:
            return None
        row = self._row
        self._row += 1
        channel = -1
        if outcome & _WITH_ZEROS:
            channel = self._channel
            self._channel += channels
        if outcome & CANCELLED:
            recentre(self._block.found[row], tensor)
        if self._tables is None:
            return _new(Fused, (plan.known, plan, self._block, row, channel, -1, 0))
        begin, bin_count = self._bin, outcome >> BIN_COUNT_SHIFT
        self._bin += bin_count
        return _new(Fused, (plan.known, plan, self._block, row, channel, begin, bin_count))


def recentre(found: NDArray[np.float64], tensor: Tensor) -> None:
    """Put right the mean and the squared deviations of values that vary little about a large mean."""
    found[:2] = centred(in_memory_order(tensor.detach(), None)[0].reshape(-1), float(found[0]))


def address_of(tensor: Tensor) -> int:
    """Return where the values lie if memory holds them plainly, as float32; else 0."""
    if not (
        type(tensor) in _READABLE
        and tensor.dtype is torch.float32
        and tensor.is_cpu
        and not tensor.is_nested
        and not tensor.is_neg()
    ):
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:  # without memory of its own: sparse, for one, or inside `torch.func`
        return 0


@lru_cache(maxsize=1024)
def plan_of(shape: torch.Size, strides: tuple[int, ...], channel_axis: int | None, threads: int) -> Plan | None:
    """Plan the reduction of such tensors; None for those that are empty or have gaps in memory."""
    like = torch.empty_strided(shape, strides, device="meta")
    ordered, (before, channels, after) = in_memory_order(like, channel_axis)
    count = like.numel()
    if not count or not ordered.is_contiguous():
        return None
    known = Reduction(tuple(shape), "float32", count, channel_axis)
    by_channel = channel_axis is not None
    layout = _Layout(before, channels, after, by_channel, threads if count >= _PARALLEL_ELEMENTS else 1)
    return Plan(known, channels if by_channel else None, layout, ctypes.addressof(layout))
