"""Batch-formation policies: each is a `BatchPolicy` (`base.py`), and has its names in `scheduler/systems.py`."""
