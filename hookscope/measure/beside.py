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
S = TypeVar("S")

_Callback = ctypes.CFUNCTYPE(None)


class _List(ctypes.Structure):
    """`List` of fused.c."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("plans", ctypes.c_void_p),
        ("outcomes", ctypes.c_void_p),
        ("count", ctypes.c_longlong),
        ("reduced", ctypes.c_longlong),
        ("next", ctypes.c_longlong),
        ("finished", ctypes.c_longlong),
        ("threads", ctypes.c_uint),
        ("meanwhile", _Callback),
        ("then", _Callback),
        ("results", Results),
    )


class Reading:
    """Tensors to be read on the other threads of torch while Python does its own.

    Some are reduced, without counts per channel; of others the squares alone are summed, which is as fast as memory.
    """

    def __init__(self, reduced: Sequence[Tensor], squared: Sequence[Tensor]) -> None:
        """Plan the reading.

        Args:
            reduced: Any tensors, to be reduced.
            squared: Any tensors, whose squares are to be summed.
        """
        self._kernel = load_kernel()
        self._reduced = reduced
        self._squared_count = len(squared)
        self._plans: dict[int, Plan] = {}  # of those that compiled code can read, by their place
        self._addresses: list[int] = []
        for index, tensor in enumerate((*reduced, *squared)) if self._kernel is not None else ():
            address = address_of(tensor)
            plan = plan_of(tensor.shape, tensor.stride(), None, 1) if address else None
            if plan is not None:
                self._plans[index] = plan
                self._addresses.append(address)
        self._reduced_count = sum(index < len(reduced) for index in self._plans)
        self._block = Block(len(self._plans))
        self._outcomes = np.empty(len(self._plans), np.int32)

    def run(self, meanwhile: Callable[[], T], then: Callable[[], S]) -> tuple[T, S]:
        """Read the tensors, and call `meanwhile` and `then` on this thread; return what they return.

        Args:
            meanwhile: Called at once. Must not write to the tensors.
            then: Called when `reductions` are there; squares may still be summed. Likewise.
        """
        if self._kernel is None or not self._plans:
            return meanwhile(), then()
        returned: list[Any] = []
        raised: list[BaseException] = []

        def call(work: Callable[[], object]) -> None:
            if raised:
                return
            try:
                returned.append(work())
            except BaseException as error:  # noqa: BLE001 - it cannot pass through compiled code, so it goes around it
                raised.append(error)

        self._read(self._kernel, partial(call, meanwhile), partial(call, then))
        if len(returned) < 2:
            raise raised[0] if raised else KeyboardInterrupt  # the latter comes at any moment, so between these lines
        return returned[0], returned[1]

    def reductions(self) -> list[Fused | None]:
        """Return the reductions in order, from `then` on; None for what `FusedReducer.reduce` would leave to torch."""
        found: list[Fused | None] = [None] * len(self._reduced)
        outcomes = self._outcomes[: self._reduced_count].tolist()
        for row, (outcome, (index, plan)) in enumerate(zip(outcomes, self._plans.items(), strict=False)):
            if outcome & CANCELLED:
                recentre(self._block.found[row], self._reduced[index])
            if outcome != RARE:
                found[index] = Fused(plan.known, plan, self._block, row, -1)
        return found

    def square_sums(self) -> list[float | None]:
        """Return the sums of squares in order, after `run`; None where they are not finite or were not read."""
        sums: list[float | None] = [None] * self._squared_count
        rows = slice(self._reduced_count, None)
        found = self._block.found[rows, SQUARE_SUM].tolist()
        for index, outcome, square_sum in zip([*self._plans][rows], self._outcomes[rows].tolist(), found, strict=True):
            if outcome != RARE:
                sums[index - len(self._reduced)] = square_sum
        return sums

    def _read(self, kernel: Kernel, meanwhile: Callable[[], None], then: Callable[[], None]) -> None:
        values = np.array(self._addresses, np.uintp)
        layouts = np.array([plan.address for plan in self._plans.values()], np.uintp)
        todo = _List(
            values.ctypes.data,
            layouts.ctypes.data,
            self._outcomes.ctypes.data,
            len(self._plans),
            self._reduced_count,
            0,
            0,
            torch.get_num_threads(),
            _Callback(meanwhile),
            _Callback(then),
            self._block.results(kernel.runtime),
        )
        kernel.read_list(ctypes.addressof(todo))
