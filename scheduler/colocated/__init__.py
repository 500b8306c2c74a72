"""Colocated systems: schedulers of one instance whose passes mix prompt chunks and decodes."""
