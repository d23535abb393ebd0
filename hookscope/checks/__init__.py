"""Judge what was measured of a checkpoint, or in a run of `hookscope grads`, by rules with names, levels and limits."""
