"""The command `activations`."""
