"""Reduce dense float32 tensors on the CPU in one pass, by compiled code: see native.c.

Torch reads a tensor anew for each statistic. The library is compiled when hookscope is installed; where it is missing,
everything is left to torch.
"""

import ctypes
from collections import defaultdict
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hookscope.hooks.compiled import LIBRARY
from hookscope.results.distribution import EXACT_LIMIT, Distribution, distribution_of
from hookscope.statistics.kernel import (
    BIN_COUNT_SHIFT,
    CANCELLATION_LIMIT,
    FOUND,
    LARGEST_SQUARABLE,
    RARE,
    SMALLEST_SQUARABLE,
    WITH_ZEROS,
    BareLayout,
    Results,
    Runtime,
)
from hookscope.statistics.reduction import Reduction
from hookscope.statistics.storage import in_memory_order

# The variant for what torch says the processor has; "default" runs on any.
_VARIANTS = {"AVX2": "avx2", "AVX512": "avx512"}
# From here on threads share a tensor: the grain size of torch's own reductions (at::internal::GRAIN_SIZE).
_PARALLEL_ELEMENTS = 32768
# As in native.c: bins that a tensor may fill, counters of each, threads at most.
_BINS, _COUNTERS, MAX_THREADS = 17856, 4, 16
# Room for counts of so many channels is made at once. Our choice: few networks have more.
_FEWEST_CHANNELS = 4096

# So many layouts are remembered. Our choice: a network has some dozens.
_MOST_LAYOUTS = 1024

_READABLE = frozenset({Tensor, nn.Parameter})  # other subclasses may stand for more than their memory holds


class Layout(BareLayout):
    """A layout, and other facts shared by tensors of one shape, strides and channel axis."""

    known: Reduction  # without reading the values
    all_nonzero: NDArray[np.float64] | None  # values per channel that are not zero if none is, (C,)
    address: int  # of this structure


class Kernel(NamedTuple):
    """The compiled reduction."""

    reduce: Callable[[int, int, int], int]  # as declared in native.c
    sketch: Callable[[Any], int]  # as declared in sketch.c
    compare: Callable[[Any], None]  # as declared in difference.c
    sum_squares: Callable[[Any], None]  # as declared in squares.c
    runtime: Runtime | None  # passed to these; None if torch's threads cannot be used
    address: int = 0  # of `reduce`; 0 if compiled code cannot call it


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
    try:
        names = ("reduce_tensor", "sketch_tensor", "sum_differences", "sum_squares")
        reduce, *others = (getattr(library, f"{name}_{variant}") for name in names)
    except AttributeError:  # the library is that of an earlier version
        return None
    reduce.argtypes = [ctypes.c_void_p] * 3
    for function in others:
        function.argtypes, function.restype = [ctypes.c_void_p], None
    sketch, compare, sum_squares = others
    sketch.restype = ctypes.c_int
    address = ctypes.cast(reduce, ctypes.c_void_p).value or 0
    try:
        torch_library = ctypes.CDLL(torch._C.__file__)  # noqa: SLF001 - through it all that torch has loaded is found
        entries = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
        runtime = Runtime(*(ctypes.cast(getattr(torch_library, name), ctypes.c_void_p) for name in entries))
    except (OSError, AttributeError):  # torch was built with other threads
        return Kernel(reduce, sketch, compare, sum_squares, None, address)
    return Kernel(reduce, sketch, compare, sum_squares, runtime, address)


class FusedReducer:
    """Reduces the tensors that compiled code can read; holds the arrays that it writes to."""

    def __init__(self, *, distributions: bool) -> None:
        """Make room for the results of one tensor.

        Args:
            distributions: Whether to count how values are distributed.
        """
        self._kernel = load_kernel()
        self._threads = torch.get_num_threads()
        self._found = np.empty(FOUND)
        self._nonzero = np.empty(0)
        # Memory that is never written to is not taken.
        shape = (min(self._threads, MAX_THREADS), _BINS, _COUNTERS)
        self._tables = np.zeros(shape, np.uint32) if distributions else None
        self._values = np.empty(EXACT_LIMIT, np.float32)
        bins = _BINS if distributions else 0
        self._keys, self._counts = np.empty(bins, np.int32), np.empty(bins, np.int64)
        self._results = Results()
        self._results_address = ctypes.addressof(self._results)
        self._has_room = False

    def reduce(self, tensor: Tensor, channel_axis: int | None) -> Reduction | None:
        """Reduce a tensor in one pass.

        Args:
            tensor: Anything; only read.
            channel_axis: The axis whose slices count as channels; None for no channel count.

        Returns:
            Its reduction; None for tensors that are not dense float32 on the CPU, and for values that are not finite:
            these are torch's to reduce.
        """
        if self._kernel is None or not (address := address_of(tensor)):
            return None
        layout = layout_of(tensor.shape, tensor.stride(), channel_axis, self._threads)
        if layout is None:
            return None
        nonzero = layout.all_nonzero
        if not self._has_room or (nonzero is not None and nonzero.size > self._nonzero.size):
            self._describe_room(0 if nonzero is None else nonzero.size)
        outcome = self._kernel.reduce(address, layout.address, self._results_address)
        if outcome == RARE:
            return None
        shape, dtype, count, axis = layout.known[:4]
        mean, squared_deviations, low, high, abs_sum, square_sum, nonzero_count = self._found.tolist()
        if nonzero is not None and outcome & WITH_ZEROS:
            nonzero = self._nonzero[: nonzero.size].copy()
        distribution = None
        if self._tables is not None and (bins := outcome >> BIN_COUNT_SHIFT):
            distribution = Distribution(low, high, count, None, self._keys[:bins].copy(), self._counts[:bins].copy())
        elif self._tables is not None:
            distribution = distribution_of(self._values[:count])
        # In the order of the fields, as this runs in every hook: 0.3 µs; calling the class takes 0.6, by keywords 1.4.
        moments = (count, mean, squared_deviations, low, high, abs_sum, square_sum)
        fields = (shape, dtype, count, axis, *moments, 0, int(nonzero_count), nonzero, distribution, None, None)
        return tuple.__new__(Reduction, fields)

    def _describe_room(self, channel_count: int) -> None:
        """Tell compiled code where to write, with room for so many channels."""
        self._nonzero = np.empty(max(channel_count, _FEWEST_CHANNELS))
        runtime = self._kernel.runtime if self._kernel else None
        self._has_room = True
        self._results.__init__(  # type: ignore[misc]  # in place: compiled code knows its address
            self._found.ctypes.data,
            self._nonzero.ctypes.data,
            None if self._tables is None else self._tables.ctypes.data,
            self._values.ctypes.data,
            EXACT_LIMIT,
            self._keys.ctypes.data,
            self._counts.ctypes.data,
            None if runtime is None else ctypes.addressof(runtime),
            SMALLEST_SQUARABLE,
            LARGEST_SQUARABLE,
            CANCELLATION_LIMIT,
            self._nonzero.size,
        )

    def parts(self, reduce: Callable[..., Any], latest: list[Any]) -> tuple[Any, ...] | None:
        """Return what `reduce` of observing.c works with, in its order; None without a library.

        Args:
            reduce: What it leaves other tensors to.
            latest: A list of one item, for the tensor that was reduced last; None at first.
        """
        if self._kernel is None or not self._kernel.address or self._tables is not None or not (read := _reader()):
            return None
        self._describe_room(0)
        layouts = _layouts[self._threads]
        if len(layouts) > _MOST_LAYOUTS:
            layouts.clear()
        return (*ALIKE, reduce, latest, layouts, [], self._threads, self._kernel.address, self._results_address, read)


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
    except RuntimeError:  # without memory: sparse, for one, or inside `torch.func`
        return 0


def useful_threads(element_count: int, threads: int) -> int:
    """Return how many of so many threads should share a tensor."""
    return threads if element_count >= _PARALLEL_ELEMENTS else 1


@lru_cache(_MOST_LAYOUTS)
def layout_of(shape: torch.Size, strides: tuple[int, ...], channel_axis: int | None, threads: int) -> Layout | None:
    """Return how such tensors lie in memory; None for those that are empty or have gaps."""
    like = torch.empty_strided(shape, strides, device="meta")
    ordered, (before, channels, after) = in_memory_order(like, channel_axis)
    count = like.numel()
    if not count or not ordered.is_contiguous():
        return None
    by_channel = channel_axis is not None
    layout = Layout(before, channels, after, by_channel, useful_threads(count, threads))
    layout.known = Reduction(tuple(shape), "float32", count, channel_axis)
    layout.all_nonzero = np.full(channels, float(before * after)) if by_channel else None
    layout.address = ctypes.addressof(layout)
    return layout


def _is_dense(tensor: Tensor) -> bool:
    """Tell whether a plain tensor is dense float32 on the CPU, and stands for no other inside `torch.func`."""
    is_strided = tensor.layout is torch.strided and not tensor.is_nested
    is_wrapper = torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # noqa: SLF001 - there is no public way
    return tensor.dtype is torch.float32 and tensor.is_cpu and is_strided and not is_wrapper


def _layout(shape: torch.Size, strides: tuple[int, ...], channel_axis: int | None, threads: int) -> object:
    """Return what observing.c reads of a layout, in its order, and last the layout itself, to keep its memory."""
    layout = layout_of(shape, strides, channel_axis, threads)
    return None if layout is None else (layout.address, layout.known, layout.all_nonzero, layout)


# What observing.c remembers of tensors, by number of threads, then by shape and strides as bytes.
_layouts: defaultdict[int, dict[bytes, tuple[object, ...]]] = defaultdict(dict)


def _described(tensor: Tensor) -> tuple[object, ...]:
    """Return what is known of tensors of one shape and strides, in the order of observing.c."""
    return tensor.shape, tensor.stride(), tensor.shape[1:], {}


class _Exchange(ctypes.Structure):
    """The start of DLPack's `DLPackExchangeAPI`."""

    _fields_ = (
        *(("version", ctypes.c_uint32 * 2), ("previous", ctypes.c_void_p)),
        *((name, ctypes.c_void_p) for name in ("allocate", "manage", "make", "read")),
    )


@cache
def _reader() -> int:
    """Return the address of torch's function that tells where a tensor's values lie; 0 if it has none."""
    capsule = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return 0
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.argtypes, pointer.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
    exchange = _Exchange.from_address(pointer(capsule, b"dlpack_exchange_api"))
    return exchange.read or 0 if exchange.version[0] == 1 else 0


# What the functions of observing.c work with, in its order.
ALIKE: tuple[Any, ...] = (
    *(Tensor, nn.Parameter, _is_dense, _described, _layout, Reduction),
    np.frombuffer,  # of float64
    *("_version", "is_neg", "channel_axis", "nodes", "axes", "layer", "call", "slot", "role", "output"),
    torch._C._current_autograd_node,  # noqa: SLF001 - the public way registers a hook
    *("second", "last", "__dict__", "dims", ""),
    *(None, True, False, 0),
)
