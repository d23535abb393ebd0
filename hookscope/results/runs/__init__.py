"""The run directory: written whole or not at all, and read back."""
