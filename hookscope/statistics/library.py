"""Load the compiled library `native.bin` if it matches its sources, and call its functions by ctypes. No torch.

Callers hold the memory at all addresses, and check bounds. `ctypes.CDLL` releases the interpreter's lock during calls.
"""

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

LIBRARY = Path(__file__).parents[1] / "native.bin"  # not .so, which Python would take for a module
SOURCES = Path(__file__).parent  # holds the .c and .h files, which wheels leave out

# Bits in the result of `reduce_tensor` in native.c, and the count of numbers that it writes.
RARE, WITH_ZEROS = 1, 2
BIN_COUNT_SHIFT = 2
NUMBERS = 7
# As in native.c: bins that a tensor may fill, counters per bin, most threads.
BINS, COUNTERS, MAX_THREADS = 17856, 8, 16


class Layout(ctypes.Structure):
    """As in native.h."""

    _fields_ = (
        *((name, ctypes.c_longlong) for name in ("before", "channels", "after", "by_channel", "threads", "kept_count")),
        ("kept", ctypes.c_void_p),
    )


class Results(ctypes.Structure):
    """As in native.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("numbers", "nonzero", "tables", "values")),
        ("exact_limit", ctypes.c_longlong),
        *((name, ctypes.c_void_p) for name in ("keys", "counts", "runtime", "kept")),
    )


class _Runtime(ctypes.Structure):
    """As in native.h."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("run", "thread_number", "thread_count"))


class _Pair(ctypes.Structure):
    """As in difference.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("a", "b")),
        *((name, ctypes.c_longlong) for name in ("before", "channels", "after")),
        *((name, ctypes.c_void_p) for name in ("squares", "sums", "counts")),
    )


_SUMS, _COUNTS = ctypes.c_double * 5, ctypes.c_longlong * 3  # lengths are `SUMS` and `COUNTS` in C


class _Channels(ctypes.Structure):
    """As in channels.c."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        *((name, ctypes.c_longlong) for name in ("inputs", "channels", "positions")),
        *((name, ctypes.c_longlong) for name in ("input_step", "channel_step", "position_step")),
        *((name, ctypes.c_void_p) for name in ("thresholds", "mean", "deviations", "high", "low", "at")),
        ("threads", ctypes.c_longlong),
        ("runtime", ctypes.c_void_p),
        ("rare", ctypes.c_longlong),
    )


class _Squares(ctypes.Structure):
    """As in squares.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("values", "sizes", "sums")),
        *((name, ctypes.c_longlong) for name in ("count", "threads")),
        ("runtime", ctypes.c_void_p),
        ("taken", ctypes.c_longlong),
    )


@dataclass(frozen=True, slots=True)
class Kernel:
    """The functions of the library in one variant.

    Attributes:
        reduce: `reduce_tensor` of native.c: takes the addresses of float32 values, a `Layout` and `Results`.
        runtime: The entry points of OpenMP for the functions; None for one thread.
    """

    reduce: Any
    _sum_differences: Any
    _sum_squares: Any
    _reduce_channels: Any
    runtime: _Runtime | None = None

    @property
    def runtime_address(self) -> int | None:
        """The address of `runtime`; None for one thread."""
        return None if self.runtime is None else ctypes.addressof(self.runtime)

    def sum_differences(
        self, a: int, b: int, sizes: tuple[int, int, int], squares: NDArray[np.float64] | None
    ) -> tuple[list[float], list[int]]:
        """Compare values at two addresses, (before, channels, after); return `sums` and `counts` of difference.c.

        Squares of differences are added to `squares`, (channels,).
        """
        sums, counts = _SUMS(), _COUNTS()
        into = None if squares is None else squares.ctypes.data
        self._sum_differences(ctypes.byref(_Pair(a, b, *sizes, into, ctypes.addressof(sums), ctypes.addressof(counts))))
        return sums[:], counts[:]

    def sum_squares(self, addresses: Iterable[int], sizes: Iterable[int], threads: int) -> list[float]:
        """Return the sum of squares of the values at each address."""
        inputs = array("Q", addresses), array("q", sizes)
        sums = array("d", bytes(8 * len(inputs[0])))
        arrays = [buffer.buffer_info()[0] for buffer in (*inputs, sums)]
        self._sum_squares(ctypes.byref(_Squares(*arrays, len(sums), threads, self.runtime_address, 0)))
        return sums.tolist()

    def reduce_channels(
        self,
        address: int,
        sizes: tuple[int, int, int],
        steps: tuple[int, int, int],
        thresholds: NDArray[np.float64] | None,
        written: Sequence[NDArray[Any]],
        threads: int,
    ) -> bool:
        """Write the results of channels.c to arrays (inputs, channels); return whether all values are finite.

        `sizes` counts inputs, channels and positions; `steps` are the steps between neighbours in memory.
        """
        limits = None if thresholds is None else thresholds.ctypes.data
        results = [output.ctypes.data for output in written]
        job = _Channels(address, *sizes, *steps, limits, *results, threads, self.runtime_address, 0)
        return bool(self._reduce_channels(ctypes.byref(job)))


def kernel_of(variant: str, torch_library: str | None = None) -> Kernel | None:
    """Load a variant of the compiled library; None if `missing_because` has a reason.

    Args:
        variant: "default", "avx2" or "avx512"; the processor must support it.
        torch_library: A library file of torch, through which torch's OpenMP is found; None for one thread.
    """
    library, _ = _opened()
    if library is None:
        return None

    def function(name: str, result: Any, arguments: int = 1) -> Any:
        symbol = getattr(library, f"{name}_{variant}")
        symbol.restype, symbol.argtypes = result, [ctypes.c_void_p] * arguments
        return symbol

    return Kernel(
        reduce=function("reduce_tensor", ctypes.c_int, 3),
        _sum_differences=function("sum_differences", None),
        _sum_squares=function("sum_squares", None),
        _reduce_channels=function("reduce_channels", ctypes.c_int),
        runtime=None if torch_library is None else _runtime_of(torch_library),
    )


def _runtime_of(torch_library: str) -> _Runtime | None:
    try:
        loaded = ctypes.CDLL(torch_library)
        names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
        return _Runtime(*(ctypes.cast(getattr(loaded, name), ctypes.c_void_p) for name in names))
    except (OSError, AttributeError):  # torch was built without GNU OpenMP
        return None


def missing_because() -> str:
    """Return why this installation has no compiled code, in a few words; "" if it has."""
    return _opened()[1]


@cache
def _opened() -> tuple[ctypes.CDLL | None, str]:
    """Return the library, or None and the reason."""
    if not LIBRARY.exists():
        return None, "it was installed without compiled code"
    try:
        library = ctypes.CDLL(str(LIBRARY))
        compiled_from = (ctypes.c_char * 64).in_dll(library, "sources_hash").value.decode()
    except (OSError, ValueError) as error:
        return None, f"{LIBRARY.name} cannot be loaded: {error}"
    sources = sorted(SOURCES.glob("*.[ch]"))
    # In a checkout, sources may change after the library was compiled.
    if sources and compiled_from != sha256(b"".join(source.read_bytes() for source in sources)).hexdigest():
        return None, f"{LIBRARY.name} was compiled from other sources than those beside it"
    return library, ""
