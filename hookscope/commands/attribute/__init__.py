"""Where a network looks: which places of a picture its answer comes from."""
