"""Measure tensors: one reduction per tensor in the hook, merged over batches, summarised at the end."""
