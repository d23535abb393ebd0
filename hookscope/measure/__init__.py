"""Measure tensors: one reduction per tensor in the hook, merged over batches, summarised at the end."""

from hookscope.measure.beside import Reading
from hookscope.measure.fused import Fused, plain
from hookscope.measure.reducing import Measured, Pending, Reducer, collect, reduce_tensor
from hookscope.measure.reduction import Reduction, merge
from hookscope.measure.summary import summarise, tensor_statistics
from hookscope.measure.torch_reductions import reduce_without_looking as _reduce_without_looking

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
