"""Runs a model: inspection, loading, paged attention, packed forward passes, sampling.

Import the modules themselves (`alignedserve.engine.runner`, ...): the package imports torch only with them.
"""
