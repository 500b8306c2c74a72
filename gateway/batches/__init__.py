"""Offline batches: files, the batches over them, and the lines of batches as requests of the lowest priority."""
