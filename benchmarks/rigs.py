"""Makes `tests/support` importable, here and in child processes."""

import os
import sys
from pathlib import Path

TESTS = str(Path(__file__).parents[1] / "tests")
sys.path.insert(0, TESTS)
os.environ["PYTHONPATH"] = os.pathsep.join([TESTS, *filter(None, [os.environ.get("PYTHONPATH")])])
