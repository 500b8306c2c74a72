"""The tests of pairs over NIXL, in a process of their own: UCX stays loaded, and pytest's workers live long."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.pairs import CHANNEL_VARIABLE

HERE = Path(__file__).parent
FILES = ("test_paired_channel.py", "test_paired_strangers.py")


def test_pairs_over_nixl() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", "nixl"]
    command += [str(HERE / name) for name in FILES]
    environment = {**os.environ, CHANNEL_VARIABLE: "nixl"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
