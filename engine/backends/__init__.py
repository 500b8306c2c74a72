"""Attention backends, by name. Each is imported when it is first asked for."""
