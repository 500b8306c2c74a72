"""Pinned prefixes: what a prompt's beginning is in tokens, and how shards come to hold it."""
