"""Ranks: the processes that compute an instance's model together."""
