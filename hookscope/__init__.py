"""hookscope: see what happens inside a PyTorch network."""
