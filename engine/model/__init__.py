"""Inspects, loads, optimises and verifies a model."""
