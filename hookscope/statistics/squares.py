"""Sums of squares of tensors, by compiled code beside the interpreter: see squares.c."""

import ctypes
from collections.abc import Sequence
from threading import Thread

import numpy as np
import torch
from torch import Tensor

from hookscope.statistics.native import address_of, layout_of, load_kernel


class _Squares(ctypes.Structure):
    """`Squares` of squares.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("values", "sizes", "sums")),
        *((name, ctypes.c_longlong) for name in ("count", "taken")),
    )


class SquareSums:
    """Sums that a second thread works on from now on, if torch may use two; must not be written to meanwhile."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Begin to read the tensors, of any kind."""
        kernel = load_kernel()
        self._tensors = tensors
        self._sum = None if kernel is None else kernel.sum_squares
        # Addresses are 0 for what compiled code does not read: its size is 0, too.
        self._addresses = np.array([_address_of(each) if kernel else 0 for each in tensors], np.uintp)
        readable = zip(tensors, self._addresses.tolist(), strict=True)
        self._sizes = np.array([each.numel() if address else 0 for each, address in readable], np.int64)
        self._sums = np.empty(len(tensors))
        arrays = self._addresses.ctypes.data, self._sizes.ctypes.data, self._sums.ctypes.data
        self._squares = _Squares(*arrays, len(tensors), 0)
        self._thread = Thread(target=self._work) if torch.get_num_threads() > 1 else None
        if self._thread is not None:
            self._thread.start()

    def finish(self) -> list[float | None]:
        """Sum what is left, and return the sums in float64; None for what compiled code does not read.

        Sums over values that are not finite are not finite.
        """
        self._work()
        if self._thread is not None:
            self._thread.join()
        return [each if address else None for each, address in zip(self._sums.tolist(), self._addresses, strict=True)]

    def _work(self) -> None:
        if self._sum is not None:
            self._sum(ctypes.byref(self._squares))  # lets go of the interpreter


def _address_of(tensor: Tensor) -> int:
    """Return where the values lie without gaps, as float32; 0 if they do not."""
    address = address_of(tensor)
    return address if address and layout_of(tensor.shape, tensor.stride(), None, 1) is not None else 0
