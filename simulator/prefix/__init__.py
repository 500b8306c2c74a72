"""Prefix caches of a simulated cell."""
