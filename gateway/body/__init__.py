"""Parsing, validation and tokenisation of request bodies."""
