"""Turn results into text or pictures: one file per format."""
