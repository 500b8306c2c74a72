"""`places_of_ray.py`, in a process of its own.

`ray.init` makes a driver of the process that it is called in. Its threads outlive `ray.shutdown`, and it takes SIGABRT
from pytest: one that aborts ends all tests that come later, without a word.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(600)]


def test_instances_are_placed_as_they_should_be_on_ray() -> None:
    file = Path(__file__).with_name("places_of_ray.py")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout[-20_000:]}\n{done.stderr[-5_000:]}"
