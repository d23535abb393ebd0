"""The interface between Python and the compiled reduction of native.c. No torch."""

import ctypes

# What `reduce` in native.c returns, and how many numbers it writes.
RARE, WITH_ZEROS = 1, 2
BIN_COUNT_SHIFT = 2
FOUND = 7

# Sums of squares of float32 values outside this range lose digits at one end or overflow at the other, with up to 1e8
# of them (float32: 1e-38..3e38).
SMALLEST_SQUARABLE = 1e-15
LARGEST_SQUARABLE = 1e15
# var = E[x²] - mean² loses a digit for each factor of ten in mean²/var; from here on the centred form. Our choice.
CANCELLATION_LIMIT = 10.0


class Runtime(ctypes.Structure):
    """Entry points of the OpenMP runtime that torch has loaded."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("run", "thread_number", "thread_count"))


class BareLayout(ctypes.Structure):
    """`Layout` of native.c."""

    _fields_ = tuple((name, ctypes.c_longlong) for name in ("before", "channels", "after", "by_channel", "threads"))


class Results(ctypes.Structure):
    """As in native.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("found", "nonzero", "tables", "values")),
        ("exact_limit", ctypes.c_longlong),
        *((name, ctypes.c_void_p) for name in ("keys", "counts", "runtime")),
        *((name, ctypes.c_double) for name in ("smallest", "largest", "cancellation")),
        ("most_channels", ctypes.c_longlong),
    )
