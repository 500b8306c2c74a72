"""Shared code of the paper's evaluation: workloads, parallel and cached simulator runs, capacity, tables."""
