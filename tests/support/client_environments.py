"""Virtual environments for clients of other projects, and programs that run in them.

An environment has the versions that `tests/clients/NAME.txt` pins. It is made once, and kept in `build/clients`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from support.requirements import need

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests/clients"
KEPT = ROOT / "build/clients"
INSTALL_S = 900.0
_STAMP = "complete"


@dataclass(frozen=True, slots=True)
class Checked:
    """One check of a program; `failed` is its traceback, "" if it held."""

    name: str
    failed: str


@cache
def index_refuses() -> str:
    """Why pip's index cannot be asked for a package; "" if it answers."""
    ask = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries", "1", "--timeout", "15")
    done = subprocess.run([*ask, "index", "versions", "pip"], capture_output=True, text=True, timeout=120, check=False)
    return "" if done.returncode == 0 else f"pip's index cannot be reached: {done.stderr.strip()[:300]}"


def _environ(more: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without what tells Python, our package or a client's package where to look."""
    ours = ("PYTHON", "ALIGNEDSERVE", "OPENAI", "ANTHROPIC", "LITELLM", "LANGCHAIN", "LANGSMITH")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, "PYTHONDONTWRITEBYTECODE": "1", "NO_PROXY": "*", **more}


def environment(name: str) -> Path:
    """The Python of the client's environment. The test is skipped if it must be made and no index can be reached."""
    pins = PROGRAMS / f"{name}.txt"
    key = hashlib.sha256(pins.read_bytes() + sys.version.encode()).hexdigest()[:12]
    folder = KEPT / f"{name}-{key}"
    python = folder / "bin/python"
    if not (folder / _STAMP).exists():
        need(index_refuses())
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
        pip = (sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check")
        install = [*pip, "install", "-q", "--no-deps", "-r", str(pins)]  # it pins what its packages need, too
        done = subprocess.run(install, capture_output=True, text=True, timeout=INSTALL_S, check=False)
        assert done.returncode == 0, done.stderr
        (folder / _STAMP).touch()
    return python


def run_checks(name: str, url: str, *, timeout_s: float, **environ: str) -> list[Checked]:
    """Run `tests/clients/NAME_checks.py` against the server. Raises AssertionError if it does not run to its end."""
    program = PROGRAMS / f"{name}_checks.py"
    done = subprocess.run(
        [str(environment(name)), str(program), url],
        env=_environ(environ), capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"check": ')]
    return [Checked(line["check"], line["failed"]) for line in lines]


def checks_of(name: str) -> list[str]:
    """The names of a program's checks, in their order, as its text has them."""
    lines = (PROGRAMS / f"{name}_checks.py").read_text(encoding="utf-8").splitlines()
    after = [line for before, line in pairwise(lines) if before == "@check"]
    return [line.removeprefix("async ").removeprefix("def ").partition("(")[0] for line in after]
