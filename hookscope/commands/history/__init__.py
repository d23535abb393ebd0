"""A run by its checkpoints: files in order, what changes from one to the next, and since when rules fail."""
