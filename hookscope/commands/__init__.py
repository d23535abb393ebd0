"""What each command does: its folder has what measures, the result, and how the result is described."""
