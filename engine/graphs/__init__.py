"""Decode iterations from CUDA graphs: static buffers, capture at start, sampling in the graph."""
