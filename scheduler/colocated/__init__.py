"""Colocated systems: schedulers of one instance whose passes hold prompt chunks and decodes together."""
