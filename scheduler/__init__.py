"""Decisions without I/O: quad-tree, density-first search, iteration scheduling, block accounting, policies."""
