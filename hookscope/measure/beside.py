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


def reduce_beside(tensors: Sequence[Tensor], meanwhile: Callable[[], T]) -> tuple[list[Fused | None], T]:
    """Reduce tensors, without counts per channel, on the other threads of torch; call `meanwhile` on this one.

    Args:
        tensors: Any.
        meanwhile: Must not write to them.

    Returns:
        The reductions in order, None for those that `FusedReducer.reduce` would leave to torch; what `meanwhile`
        returned.
    """
    kernel = load_kernel()
    plans = {} if kernel is None else _plans(tensors)
    if kernel is None or not plans:
        return [None] * len(tensors), meanwhile()
    returned: list[T] = []
    raised: list[BaseException] = []

    def call() -> None:
        try:
            returned.append(meanwhile())
        except BaseException as error:  # noqa: BLE001 - it cannot pass through compiled code, so it goes around it
            raised.append(error)

    read = _read(kernel, [tensors[index] for index in plans], list(plans.values()), call)
    if not returned:
        raise raised[0] if raised else KeyboardInterrupt  # the latter comes at any moment, so between these lines
    reduced = dict(zip(plans, read, strict=True))
    return [reduced.get(index) for index in range(len(tensors))], returned[0]


def _plans(tensors: Sequence[Tensor]) -> dict[int, Plan]:
    """Return the plans for those that compiled code can read, by index."""
    plans = {}
    for index, tensor in enumerate(tensors):
        plan = plan_of(tensor.shape, tensor.stride(), None, 1) if address_of(tensor) else None
        if plan is not None:
            plans[index] = plan
    return plans


def _read(
    kernel: Kernel, tensors: Sequence[Tensor], plans: Sequence[Plan], meanwhile: Callable[[], None]
) -> list[Fused | None]:
    block = Block(len(tensors))
    values = np.array([tensor.data_ptr() for tensor in tensors], np.uintp)
    layouts = np.array([plan.address for plan in plans], np.uintp)
    outcomes = np.empty(len(tensors), np.int32)
    todo = _List(
        values.ctypes.data,
        layouts.ctypes.data,
        outcomes.ctypes.data,
        len(tensors),
        0,
        torch.get_num_threads(),
        _Meanwhile(meanwhile),
        block.results(kernel.runtime),
    )
    kernel.reduce_list(ctypes.addressof(todo))
    found: list[Fused | None] = []
    for row, (plan, outcome) in enumerate(zip(plans, outcomes.tolist(), strict=True)):
        if outcome & CANCELLED:
            recentre(block.found[row], tensors[row])
        found.append(None if outcome == RARE else Fused(plan.known, plan, block, row, -1))
    return found
