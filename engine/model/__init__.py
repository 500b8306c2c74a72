"""Inspects, loads, optimises and proves a model."""
