"""Decisions about a whole file of requests, before the first of them is run."""
