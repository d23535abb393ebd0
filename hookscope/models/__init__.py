"""Read the MODEL argument and load what it names. Nothing is imported here: `names`, for one, needs no torch."""
