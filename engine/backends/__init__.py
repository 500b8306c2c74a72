"""Attention backends, by name. Each is imported on first use."""
