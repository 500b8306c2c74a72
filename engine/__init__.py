"""Runs a model: inspection, loading, paged attention, packed forward passes, sampling.

Import the modules themselves (`alignedserve.engine.runner`, ...): this package pulls in torch only when they are.
"""
