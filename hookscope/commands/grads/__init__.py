"""The command `grads`."""
