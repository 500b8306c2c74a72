"""Rigs of the tests: fakes, processes that are killed, clusters of several machines, and what they check."""
