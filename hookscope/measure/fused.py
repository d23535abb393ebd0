"""Reduce dense float32 tensors on the CPU in one pass, by compiled code: see fused.c.

Torch reads a tensor anew for each statistic. The library is compiled when hookscope is installed; where it is missing,
everything is left to torch.
"""

import ctypes
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookscope.measure.reduction import SAMPLE_SIZE, Reduction, sample_stride
from hookscope.measure.storage import in_memory_order
from hookscope.measure.torch_reductions import CANCELLATION_LIMIT, LARGEST_SQUARABLE, SMALLEST_SQUARABLE, centred

LIBRARY = Path(__file__).with_name("fused.bin")  # not .so, which Python would take for a module

# The variant for what torch says the processor has; "reduce_default" runs on any.
_VARIANTS = {"AVX2": "reduce_avx2", "AVX512": "reduce_avx512"}
# From here on threads share a tensor: the grain size of torch's own reductions (at::internal::GRAIN_SIZE).
_PARALLEL_ELEMENTS = 32768
# Samples are cut from blocks of so many, since each array would cost more than filling it.
_SAMPLES_PER_BLOCK = 64


class _Runtime(ctypes.Structure):
    """Entry points of the OpenMP runtime that torch has loaded."""

    _fields_ = (
        ("run", ctypes.c_void_p),
        ("thread_number", ctypes.c_void_p),
        ("thread_count", ctypes.c_void_p),
    )


class Kernel(NamedTuple):
    """The compiled reduction.

    Attributes:
        reduce: As declared in fused.c.
        runtime: Passed to it; None if torch's threads cannot be used.
    """

    reduce: Callable[..., None]
    runtime: _Runtime | None


@cache
def load_kernel() -> Kernel | None:
    """Load the compiled library in the variant for this processor; None if this installation has none."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError:
        return None
    reduce = getattr(library, _VARIANTS.get(torch.backends.cpu.get_cpu_capability(), "reduce_default"))
    reduce.restype = None
    reduce.argtypes = [ctypes.c_void_p] + [ctypes.c_longlong] * 4 + [ctypes.c_void_p] * 4 + [ctypes.c_int]
    try:
        torch_library = ctypes.CDLL(torch._C.__file__)  # noqa: SLF001 - through it all that torch has loaded is found
        names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
        runtime = _Runtime(*(ctypes.cast(getattr(torch_library, name), ctypes.c_void_p) for name in names))
    except (OSError, AttributeError):  # torch was built with other threads
        return Kernel(reduce, None)
    return Kernel(reduce, runtime)


class _Plan(NamedTuple):
    """What tensors of one shape, memory order and channel axis have in common.

    Attributes:
        known: What is known without reading the values.
        channels_view: (before, C, after), see `in_memory_order`.
        sample_size: Elements in the sample.
        parallel: Large enough for more than one thread.
        full: Elements per channel, for each channel, (C,).
    """

    known: Reduction
    channels_view: tuple[int, int, int]
    sample_size: int
    parallel: bool
    full: NDArray[np.float64]


class FusedReducer:
    """Reduces the tensors that compiled code can read; holds the buffers for it."""

    def __init__(self) -> None:
        """Start without buffers."""
        self._kernel = load_kernel()
        self._plans: dict[Any, _Plan | None] = {}
        self._found = (ctypes.c_double * 6)()
        self._zeros = np.empty(0, np.int64)
        self._zeros_address = 0
        self._samples = np.empty((0, SAMPLE_SIZE), np.float32)
        self._samples_address = 0
        self._sample_count = 0

    def reduce(self, tensor: Tensor, channel_axis: int | None) -> Reduction | None:
        """Reduce a tensor in one pass.

        Args:
            tensor: Anything; only read.
            channel_axis: The axis whose slices count as channels; None for no channel count.

        Returns:
            Its reduction; None for tensors that are not dense float32 on the CPU, and for rare values (constant, not
            finite, too large or too small to square): these are torch's to reduce.
        """
        if self._kernel is None or not _readable(tensor):
            return None
        address = _address(tensor)
        if not address:
            return None
        key = (tensor.shape, tensor.stride(), channel_axis)
        if key in self._plans:
            plan = self._plans[key]
        else:
            plan = self._plans[key] = _plan(tensor, channel_axis)
        if plan is None:
            return None
        known, (before, channels, after), sample_size, parallel, full = plan
        if channels > self._zeros.size:
            self._zeros = np.empty(channels, np.int64)
            self._zeros_address = self._zeros.ctypes.data
        if self._sample_count == len(self._samples):
            self._samples = np.empty((_SAMPLES_PER_BLOCK, SAMPLE_SIZE), np.float32)
            self._samples_address = self._samples.ctypes.data
            self._sample_count = 0
        kernel, runtime = self._kernel
        kernel(
            address,
            before,
            channels,
            after,
            known.stride,
            self._found,
            None if channel_axis is None else self._zeros_address,
            self._samples_address + self._sample_count * SAMPLE_SIZE * 4,
            runtime and ctypes.addressof(runtime),
            torch.get_num_threads() if parallel and runtime else 1,
        )
        total, square_sum, abs_sum, low, high, zero_count = self._found[:]
        if not (low < high and SMALLEST_SQUARABLE < max(high, -low) < LARGEST_SQUARABLE and math.isfinite(abs_sum)):
            return None
        sample = self._samples[self._sample_count, :sample_size]
        self._sample_count += 1
        count = known.element_count
        mean = total / count
        squared_deviations = square_sum - mean * total
        if mean * total > CANCELLATION_LIMIT * squared_deviations:
            mean, squared_deviations = centred(in_memory_order(tensor.detach(), None)[0].reshape(-1), mean)
        nonzero = None
        if channel_axis is not None:
            nonzero = full - self._zeros[:channels] if zero_count else full
        return Reduction(
            known.shape,
            known.dtype,
            count,
            channel_axis,
            count,
            mean,
            max(0.0, squared_deviations),
            low,
            high,
            abs_sum,
            square_sum,
            0,
            count - int(zero_count),
            nonzero,
            sample,
            known.stride,
        )


def _readable(tensor: Tensor) -> bool:
    """Tell whether the tensor's memory holds plain float32 values. Subclasses may stand for something else."""
    return (
        type(tensor) is Tensor
        and tensor.dtype is torch.float32
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_neg()
    )


def _address(tensor: Tensor) -> int:
    """Return where the values lie; 0 for tensors without memory of their own, as inside `torch.func`."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def _plan(tensor: Tensor, channel_axis: int | None) -> _Plan | None:
    """Plan the reduction of tensors like this one; None for those that are empty or have gaps in memory."""
    ordered, channels_view = in_memory_order(tensor, channel_axis)
    count = tensor.numel()
    if not count or not ordered.is_contiguous():
        return None
    stride = sample_stride(count)
    before, channels, after = channels_view
    full = np.full(channels, float(before * after))
    full.flags.writeable = False  # many reductions hold it
    known = Reduction(tuple(tensor.shape), "float32", count, channel_axis, stride=stride)
    return _Plan(known, channels_view, -(-count // stride), count >= _PARALLEL_ELEMENTS, full)
