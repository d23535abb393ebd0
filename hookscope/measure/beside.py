"""Reduce many tensors while Python goes on with something else.

Reading a network's parameters takes as long as turning what hooks saw into rows, and needs none of Python. A thread of
its own would have to share a core with those of torch, which spin for a while after their last work: so they are the
ones that read.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from hookscope.measure.fused import (
    CANCELLED,
    RARE,
    SQUARE_SUM,
    Block,
    Fused,
    Kernel,
    Plan,
    Results,
    address_of,
    load_kernel,
    plan_of,
    recentre,
)

T = TypeVar("T")

_Meanwhile = ctypes.CFUNCTYPE(None)


class _List(ctypes.Structure):
    """`List` of fused.c."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("plans", ctypes.c_void_p),
        ("outcomes", ctypes.c_void_p),
        ("count", ctypes.c_longlong),
        ("next", ctypes.c_longlong),
        ("threads", ctypes.c_uint),
        ("meanwhile", _Meanwhile),
        ("results", Results),
    )


class Reading:
    """Tensors to be reduced, without counts per channel, on the other threads of torch while Python does its own."""

    def __init__(self, tensors: Sequence[Tensor], *, squares_alone: bool = False) -> None:
        """Plan the reading.

        Args:
            tensors: Any.
            squares_alone: Only sum the squares, which is as fast as memory can be read.
        """
        self._kernel = load_kernel()
        self._squares_alone = squares_alone
        self._tensors = tensors
        self._plans: dict[int, Plan] = {}  # of those that compiled code can read, by their place
        self._addresses: list[int] = []
        for index, tensor in enumerate(tensors) if self._kernel is not None else ():
            address = address_of(tensor)
            plan = plan_of(tensor.shape, tensor.stride(), None, 1) if address else None
            if plan is not None:
                self._plans[index] = plan
                self._addresses.append(address)
        self._block = Block(len(self._plans))
        self._outcomes: list[int] = []

    def run(self, meanwhile: Callable[[], T]) -> T:
        """Read the tensors, and call `meanwhile` on this thread; return what it returns.

        Args:
            meanwhile: Must not write to the tensors.
        """
        if self._kernel is None or not self._plans:
            return meanwhile()
        returned: list[T] = []
        raised: list[BaseException] = []

        def call() -> None:
            try:
                returned.append(meanwhile())
            except BaseException as error:  # noqa: BLE001 - it cannot pass through compiled code, so it goes around it
                raised.append(error)

        self._read(self._kernel, call)
        if not returned:
            raise raised[0] if raised else KeyboardInterrupt  # the latter comes at any moment, so between these lines
        return returned[0]

    def reductions(self) -> list[Fused | None]:
        """Return the reductions in order, after `run`; None for what `FusedReducer.reduce` would leave to torch.

        Raises:
            ValueError: If squares alone were summed.
        """
        if self._squares_alone:
            raise ValueError("There are no reductions: squares alone were summed.")
        found: list[Fused | None] = [None] * len(self._tensors)
        for row, (outcome, (index, plan)) in enumerate(zip(self._outcomes, self._plans.items(), strict=True)):
            if outcome & CANCELLED:
                recentre(self._block.found[row], self._tensors[index])
            if outcome != RARE:
                found[index] = Fused(plan.known, plan, self._block, row, -1)
        return found

    def square_sums(self) -> list[float | None]:
        """Return the sums of squares in order, after `run`, also if they are not alone; None likewise."""
        sums: list[float | None] = [None] * len(self._tensors)
        for outcome, index, square_sum in zip(
            self._outcomes, self._plans, self._block.found[:, SQUARE_SUM].tolist(), strict=True
        ):
            if outcome != RARE:
                sums[index] = square_sum
        return sums

    def _read(self, kernel: Kernel, meanwhile: Callable[[], None]) -> None:
        values = np.array(self._addresses, np.uintp)
        layouts = np.array([plan.address for plan in self._plans.values()], np.uintp)
        outcomes = np.empty(len(self._plans), np.int32)
        todo = _List(
            values.ctypes.data,
            layouts.ctypes.data,
            outcomes.ctypes.data,
            len(self._plans),
            0,
            torch.get_num_threads(),
            _Meanwhile(meanwhile),
            self._block.results(kernel.runtime),
        )
        read = kernel.sum_squares_list if self._squares_alone else kernel.reduce_list
        read(ctypes.addressof(todo))
        self._outcomes = outcomes.tolist()
