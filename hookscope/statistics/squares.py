"""Sums of squares of many tensors, by compiled code that is called once: see squares.c."""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hookscope.statistics.native import address_of, layout_of, load_kernel


class _Squares(ctypes.Structure):
    """`Squares` of squares.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("values", "sizes", "sums")),
        *((name, ctypes.c_longlong) for name in ("count", "threads")),
        ("runtime", ctypes.c_void_p),
        ("taken", ctypes.c_longlong),
    )


def square_sums(tensors: Sequence[Tensor]) -> list[float | None]:
    """Return the sum of squares of each tensor, in float64; not finite where a value is not.

    Args:
        tensors: Any; None is returned for what compiled code does not read, as `FusedReducer.reduce` does, and for all
            if this installation has none.
    """
    kernel = load_kernel()
    if kernel is None:
        return [None] * len(tensors)
    addresses = np.array([_address_of(each) for each in tensors], np.uintp)
    readable = zip(tensors, addresses.tolist(), strict=True)
    sizes = np.array([each.numel() if address else 0 for each, address in readable], np.int64)
    sums = np.empty(len(tensors))
    runtime = None if kernel.runtime is None else ctypes.addressof(kernel.runtime)
    arrays = addresses.ctypes.data, sizes.ctypes.data, sums.ctypes.data
    kernel.sum_squares(ctypes.byref(_Squares(*arrays, len(tensors), torch.get_num_threads(), runtime, 0)))
    return [each if address else None for each, address in zip(sums.tolist(), addresses.tolist(), strict=True)]


def _address_of(tensor: Tensor) -> int:
    """Return where the values lie without gaps, as float32; 0 if they do not."""
    address = address_of(tensor)
    if not address or tensor.is_contiguous():
        return address
    return 0 if layout_of(tensor.shape, tensor.stride(), None, 1) is None else address
