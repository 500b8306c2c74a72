"""Helpers for tests: small random models and tokenizers, and reference results."""
