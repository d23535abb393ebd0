"""Watch a training: every step briefly, some steps in full, and a line where a verdict changes."""
