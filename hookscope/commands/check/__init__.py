"""Judge a checkpoint, or a run of `hookscope grads`, by named rules with levels and limits."""
