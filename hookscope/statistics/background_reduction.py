"""Read many tensors while Python goes on with something else.

Reading a network's parameters takes as long as turning what hooks saw into rows, and needs none of Python. A thread of
its own would have to share a core with those of torch, which spin for a while after their last work: so they are the
ones that read.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from hookscope.results.distribution import EXACT_LIMIT
from hookscope.statistics.native import (
    BIN_COUNT_SHIFT,
    BINS,
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
    make_tables,
    plan_of,
    recentre,
)

# Room for the bins of so many in each tensor, over all of them; what does not fit is left to torch. Our choice: 48
# powers of two on both sides of zero, and a gradient is often spread over half as many.
_BINS_PER_TENSOR = 3072

T = TypeVar("T")
S = TypeVar("S")

_Callback = ctypes.CFUNCTYPE(None)


class _List(ctypes.Structure):
    """`List` of native.c."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("plans", ctypes.c_void_p),
        ("outcomes", ctypes.c_void_p),
        ("count", ctypes.c_longlong),
        ("reduced", ctypes.c_longlong),
        ("listed", ctypes.c_longlong),
        ("next", ctypes.c_longlong),
        ("finished", ctypes.c_longlong),
        ("threads", ctypes.c_uint),
        ("meanwhile", _Callback),
        ("then", _Callback),
        ("results", Results),
        ("starts", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("room", ctypes.c_longlong),
        ("used", ctypes.c_longlong),
    )


class Reading:
    """Tensors to be read on the other threads of torch while Python does its own.

    Some are reduced, without counts per channel; of others the squares alone are summed, which is as fast as memory.
    """

    def __init__(self, reduced: Sequence[Tensor], squared: Sequence[Tensor], *, distributions: bool = False) -> None:
        """Make room for what will be found.

        Args:
            reduced: Any tensors, to be reduced.
            squared: Any tensors, whose squares are to be summed.
            distributions: Whether to count how the values of the former are distributed.
        """
        self._kernel = load_kernel()
        self._reduced = reduced
        self._squared = squared
        count = len(reduced) + len(squared)
        self._plans: list[Plan | None] = [None] * count  # None for those that compiled code cannot read
        binned = sum(min(each.numel(), _BINS_PER_TENSOR) for each in reduced if each.numel() > EXACT_LIMIT)
        self._block = Block(count, 0, binned + BINS if distributions else 0)
        self._outcomes = np.full(count, RARE, np.int32)
        self._starts = np.zeros(count, np.int64)
        self._distributions = distributions

    def run(self, meanwhile: Callable[[], T], then: Callable[[], S]) -> tuple[T, S]:
        """Read the tensors, and call `meanwhile` and `then` on this thread; return what they return.

        Args:
            meanwhile: Called at once. Must not write to the tensors.
            then: Called when `reductions` are there; squares may still be summed. Likewise.
        """
        if self._kernel is None:
            return meanwhile(), then()
        kernel = self._kernel
        returned: list[Any] = []
        raised: list[BaseException] = []

        def call(work: Callable[[], object]) -> None:
            if raised:
                return
            try:
                returned.append(work())
            except BaseException as error:  # noqa: BLE001 - it cannot pass through compiled code, so it goes around it
                raised.append(error)

        def first() -> T:
            self._list(kernel, address)
            return meanwhile()

        count, threads = len(self._plans), torch.get_num_threads()
        values, layouts = np.empty(count, np.uintp), np.empty(count, np.uintp)
        tables = make_tables(threads) if self._distributions else None
        results = self._block.results(kernel.runtime, tables)
        keys, counts = np.empty((threads, BINS), np.int32), np.empty((threads, BINS), np.int64)
        results.keys, results.counts = keys.ctypes.data, counts.ctypes.data
        todo = _List(
            values.ctypes.data,
            layouts.ctypes.data,
            self._outcomes.ctypes.data,
            count,
            len(self._reduced),
            0,
            0,
            0,
            threads,
            results=results,
            starts=self._starts.ctypes.data,
            keys=self._block.keys.ctypes.data,
            counts=self._block.counts.ctypes.data,
            room=self._block.keys.size,
        )
        address = ctypes.addressof(todo)  # in place of what it is the address of: no cycle shall hold the tensors
        todo.meanwhile, todo.then = _Callback(partial(call, first)), _Callback(partial(call, then))
        kernel.read_list(address)
        if len(returned) < 2:
            raise raised[0] if raised else KeyboardInterrupt  # the latter comes at any moment, so between these lines
        return returned[0], returned[1]

    def reductions(self) -> list[Fused | None]:
        """Return the reductions in order, from `then` on; None for what `FusedReducer.reduce` would leave to torch."""
        found: list[Fused | None] = []
        outcomes = self._outcomes.tolist()
        for row, (tensor, plan, outcome) in enumerate(zip(self._reduced, self._plans, outcomes, strict=False)):
            if outcome & CANCELLED:
                recentre(self._block.found[row], tensor)
            if plan is None or outcome == RARE:
                found.append(None)
                continue
            begin = int(self._starts[row]) if self._distributions else -1
            found.append(Fused(plan.known, plan, self._block, row, -1, begin, outcome >> BIN_COUNT_SHIFT))
        return found

    def square_sums(self) -> list[float | None]:
        """Return the sums of squares in order, after `run`; None where they are not finite or were not read."""
        rows = slice(len(self._reduced), None)
        outcomes, sums = self._outcomes[rows].tolist(), self._block.found[rows, SQUARE_SUM].tolist()
        return [None if outcome == RARE else total for outcome, total in zip(outcomes, sums, strict=True)]

    def _list(self, kernel: Kernel, address: int) -> None:
        """List the tensors; other threads begin with the first at once."""
        for index, tensor in enumerate((*self._reduced, *self._squared)):
            values = address_of(tensor)
            plan = plan_of(tensor.shape, tensor.stride(), None, 1) if values else None
            self._plans[index] = plan
            kernel.add_to_list(address, values, plan.address if plan else 0)
