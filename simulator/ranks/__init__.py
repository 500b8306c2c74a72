"""Decode instances of several ranks that wait for each other in every iteration."""
