"""Chooses tokens from logits, reproducibly."""
