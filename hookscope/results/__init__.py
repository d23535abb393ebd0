"""What a run found, as frozen dataclasses without torch; `runs`: the run directory they are stored in."""
