"""What a run found, as frozen dataclasses. No torch."""
