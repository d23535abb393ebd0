"""Measure tensors: one reduction per tensor in the hook, merged over batches, summarised at the end."""

from hookscope.statistics.background_reduction import Reading
from hookscope.statistics.native import Fused, plain
from hookscope.statistics.reducer import Measured, Pending, Reducer, collect, reduce_tensor
from hookscope.statistics.reduction import Reduction, merge
from hookscope.statistics.summary import summarise, tensor_statistics
from hookscope.statistics.torch_reductions import reduce_on_device as _reduce_without_looking

__all__ = [
    "Fused",
    "Measured",
    "Pending",
    "Reading",
    "Reducer",
    "Reduction",
    "_reduce_without_looking",
    "collect",
    "merge",
    "plain",
    "reduce_tensor",
    "summarise",
    "tensor_statistics",
]
