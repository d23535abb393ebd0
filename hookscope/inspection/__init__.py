"""Run a network and gather what its layers show: forward, backward, and the network left as it was."""
