"""Where measured kernel times are, for the tests that read them."""

from __future__ import annotations

import os
from pathlib import Path

from support.requirements import needs

RTX = "rtxpro6000-llama-3.1-8b"
DATA = Path(os.environ.get("ALIGNEDSERVE_DATA", Path(__file__).parents[3] / "shared/data"))
TABLES = DATA / "costmodel" / RTX
needs_tables = needs("" if TABLES.is_dir() else f"there are no measured tables in {TABLES} (ALIGNEDSERVE_DATA)")
