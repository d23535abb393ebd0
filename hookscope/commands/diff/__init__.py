"""Compare two networks, or one network run in two ways, layer by layer."""
