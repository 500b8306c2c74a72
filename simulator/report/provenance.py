"""Provenance: the origin that every output of a simulation records, so that it can be reproduced."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from alignedserve import __version__

_GIT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a run's results come from, as JSON. `trace` and `cost_model` include hashes.

    `configuration`: every value that the run depends on.
    """

    command: str
    commit: str
    configuration: Mapping[str, object]
    trace: Mapping[str, object]
    cost_model: Mapping[str, object]
    notes: tuple[str, ...] = ()

    def describe(self) -> dict[str, object]:
        return {
            "command": self.command,
            "version": __version__,
            "commit": self.commit,
            "trace": dict(self.trace),
            "cost_model": dict(self.cost_model),
            "configuration": dict(self.configuration),
            "notes": list(self.notes),
        }

    def json(self) -> str:
        """On one line."""
        return json.dumps(self.describe(), ensure_ascii=True)


def command_of(argv: Sequence[str]) -> str:
    """The recorded command, with `DIR` for its output folder, so that the same run has the same bytes in any folder."""
    words, before = ["alignedserve"], ""
    for word in argv:
        words.append("DIR" if before == "--out" else "--out=DIR" if word.startswith("--out=") else word)
        before = word
    return shlex.join(words)


def own_commit() -> str:
    """The commit of the running code, or "unknown" for a package that was built from an archive.

    It is that of its checkout (with "-dirty" for changes to tracked files), or of what pip installed.
    """
    folder = Path(__file__).resolve().parent
    commit = _git(folder, "rev-parse", "HEAD")
    if commit and _git(folder, "ls-files", "--error-unmatch", Path(__file__).name) is not None:
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
        return commit + ("-dirty" if changed else "")
    return _installed_commit() or "unknown"


def _git(folder: Path, *arguments: str) -> str | None:
    """Output of git; None if there is no git, or the folder is not a checkout."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=False,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _installed_commit() -> str:
    """The commit that pip recorded for a package installed from a repository (PEP 610)."""
    try:
        noted = metadata.distribution("alignedserve").read_text("direct_url.json")
        return str(json.loads(noted or "{}")["vcs_info"]["commit_id"])
    except (metadata.PackageNotFoundError, ValueError, KeyError, TypeError):
        return ""
