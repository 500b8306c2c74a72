"""Helpers for tests only: small random models and tokenizers. May import any component."""
