"""Measure tensors: one reduction per tensor in the hook, merged over batches, summarised at the end.

Names are loaded on first use: what stored values are reduced with does without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from hookscope.statistics.reduction import Reduction, merge

if TYPE_CHECKING:
    from hookscope.statistics.reducer import (
        Measured,
        Pending,
        Reducer,
        collect,
        reduce_tensor,
        summarise,
        tensor_statistics,
    )

__all__ = [
    "Measured",
    "Pending",
    "Reducer",
    "Reduction",
    "collect",
    "merge",
    "reduce_tensor",
    "summarise",
    "tensor_statistics",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'hookscope.statistics' has no attribute {name!r}")
    value: object = getattr(import_module("hookscope.statistics.reducer"), name)
    globals()[name] = value
    return value
