"""Read the MODEL argument and load what it names."""
