"""Tell what a file is, and read it without running anything that comes with it."""
