"""Measure tensors: hooks reduce each tensor once; reductions merge over batches and become statistics."""
