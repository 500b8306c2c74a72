"""Batch-formation policies: each is a `BatchPolicy` (`base.py`); its names are in `scheduler/systems.py`."""
