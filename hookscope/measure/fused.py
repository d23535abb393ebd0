"""Reduce dense float32 tensors on the CPU in one pass, by compiled code: see fused.c.

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

from hookscope.measure.reduction import SAMPLE_SIZE, Reduction, sample_stride
from hookscope.measure.storage import in_memory_order
from hookscope.measure.torch_reductions import CANCELLATION_LIMIT, LARGEST_SQUARABLE, SMALLEST_SQUARABLE, centred

LIBRARY = Path(__file__).with_name("fused.bin")  # not .so, which Python would take for a module

# The variant for what torch says the processor has; "default" runs on any.
_VARIANTS = {"AVX2": "avx2", "AVX512": "avx512"}
# From here on threads share a tensor: the grain size of torch's own reductions (at::internal::GRAIN_SIZE).
_PARALLEL_ELEMENTS = 32768
# What `reduce` in fused.c returns, and how many values it writes.
RARE, CANCELLED, _WITH_ZEROS = 1, 2, 4
_FOUND = 7
SQUARE_SUM = 5  # its place among these
# Room for results is made for so many tensors at a time, with so many channels in all: arrays of their own for each
# would cost more than filling them.
_BLOCK_TENSORS, _BLOCK_CHANNELS = 256, 32768

_READABLE = frozenset({Tensor, nn.Parameter})  # other subclasses may stand for more than their memory holds

_new = tuple.__new__  # for named tuples in hooks: to call their class is a Python call more


class _Runtime(ctypes.Structure):
    """Entry points of the OpenMP runtime that torch has loaded."""

    _fields_ = (
        ("run", ctypes.c_void_p),
        ("thread_number", ctypes.c_void_p),
        ("thread_count", ctypes.c_void_p),
    )


class _Layout(ctypes.Structure):
    """`Plan` of fused.c."""

    _fields_ = tuple(
        (name, ctypes.c_longlong) for name in ("before", "channels", "after", "stride", "by_channel", "threads")
    )


class Results(ctypes.Structure):
    """As in fused.c."""

    _fields_ = (
        ("found", ctypes.c_void_p),
        ("nonzero", ctypes.c_void_p),
        ("sample", ctypes.c_void_p),
        ("sample_size", ctypes.c_longlong),
        ("runtime", ctypes.c_void_p),
        ("smallest", ctypes.c_double),
        ("largest", ctypes.c_double),
        ("cancellation", ctypes.c_double),
    )


class Kernel(NamedTuple):
    """The compiled reduction.

    Attributes:
        reduce: As declared in fused.c.
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
        sample_size: Elements in the sample.
        channel_count: None without channels.
        layout: The same for compiled code.
        address: Of `layout`.
    """

    known: Reduction
    sample_size: int
    channel_count: int | None
    layout: _Layout
    address: int


class Block:
    """Room for the results of n tensors, as `Results` in fused.c says what they are.

    Attributes:
        found: (n, 7).
        nonzero: Counts per channel, one tensor's after another's.
        samples: (n, SAMPLE_SIZE).
    """

    def __init__(self, tensor_count: int, channel_count: int = 0) -> None:
        """Make room for so many tensors, with so many channels in all."""
        self.found = np.empty((tensor_count, _FOUND))
        self.nonzero = np.empty(channel_count)
        self.samples = np.empty((tensor_count, SAMPLE_SIZE), np.float32)

    def results(self, runtime: _Runtime | None) -> Results:
        """Describe it to compiled code."""
        return Results(
            self.found.ctypes.data,
            self.nonzero.ctypes.data,
            self.samples.ctypes.data,
            SAMPLE_SIZE,
            None if runtime is None else ctypes.addressof(runtime),
            SMALLEST_SQUARABLE,
            LARGEST_SQUARABLE,
            CANCELLATION_LIMIT,
        )


class Fused(NamedTuple):
    """A reduction whose numbers are still where compiled code has put them.

    Attributes:
        known: What is known without reading the values.
        plan: Of the reduction.
        block: Holds the numbers.
        row: Their row there.
        channel: Where the counts per channel begin there; -1 if no value is zero.
    """

    known: Reduction
    plan: Plan
    block: Block
    row: int
    channel: int

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
    def sample(self) -> NDArray[np.float32]:
        """As in `Reduction`."""
        return self.block.samples[self.row, : self.plan.sample_size]

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
            self.sample,
            known.stride,
        )


def plain(reduction: Reduction | Fused) -> Reduction:
    """Return a reduction as plain numbers."""
    return reduction.reduction() if isinstance(reduction, Fused) else reduction


class FusedReducer:
    """Reduces the tensors that compiled code can read; holds the room for the results."""

    def __init__(self) -> None:
        """Start without room for results."""
        self._kernel = load_kernel()
        self._threads = torch.get_num_threads()
        self._block = Block(0)
        # Compared in every hook, so the block's sizes stand here as numbers.
        self._row = self._row_count = self._channel = self._channel_count = 0
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
        if self._row == self._row_count or self._channel + channels > self._channel_count:
            self._row_count, self._channel_count = _BLOCK_TENSORS, max(channels, _BLOCK_CHANNELS)
            self._block = Block(self._row_count, self._channel_count)
            self._row = self._channel = 0
            self._results = self._block.results(self._kernel.runtime)
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
        return _new(Fused, (plan.known, plan, self._block, row, channel))


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
    stride = sample_stride(count)
    known = Reduction(tuple(shape), "float32", count, channel_axis, stride=stride)
    by_channel = channel_axis is not None
    layout = _Layout(before, channels, after, stride, by_channel, threads if count >= _PARALLEL_ELEMENTS else 1)
    return Plan(known, -(-count // stride), channels if by_channel else None, layout, ctypes.addressof(layout))
