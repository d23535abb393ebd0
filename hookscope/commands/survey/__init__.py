"""A network over a data set: measured chunk by chunk, by any number of processes, and merged in one order."""
