"""Measure tensors: one reduction per tensor in the hook, merged over batches, summarised at the end."""

from hookscope.statistics.reducer import (
    Measured,
    Pending,
    Reducer,
    collect,
    reduce_tensor,
    summarise,
    tensor_statistics,
)
from hookscope.statistics.reduction import Reduction, merge

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
