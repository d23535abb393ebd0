"""Run a network forward and backward, gather what its layers show, and leave the network as it was."""
