"""`alignedserve debug-bundle`: one archive for an issue report, without keys, prompts and answers."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from alignedserve import __version__
from alignedserve.admin import ADMIN_HEADER
from alignedserve.cluster.cli.operate import RunningCluster, add_url, find_cluster
from alignedserve.cluster.cli.top_command import feed, second
from alignedserve.cluster.records import fetch_json, fetch_metrics, fetch_status
from alignedserve.errors import AlignedServeError, ConfigError

ANSWERS_WITHIN_S = 20.0
STACK_WITHIN_S = 20.0
MOST_LOG_BYTES = 4 << 20  # of each log, from its end
LEAST_SECRET = 6  # shorter texts are not removed: they would be everywhere
_KEYS = re.compile(r"(?i)(bearer\s+|(?:x-api-key|alignedserve[-_]token)['\"]?\s*[:=]\s*['\"]?)[^\s'\",]+")
_IN_URL = re.compile(r"://[^/@\s\"']+@")  # a user, and perhaps a password
_VARIABLES = ("ALIGNEDSERVE_", "RAY_", "CUDA_", "NCCL_", "OMP_", "OTEL_", "TORCH_")
_SECRET_NAMES = ("KEY", "TOKEN", "SECRET", "PASSWORD", "HEADERS")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--out", metavar="FILE", help="the archive (default: alignedserve-debug-TIME.tar.gz)")
    add_url(parser)
    parser.add_argument(
        "--no-stacks", action="store_true", help="do not stop processes for a moment to read their stacks"
    )


def run(given: argparse.Namespace) -> int:
    """Raises ConfigError if the archive cannot be written, and the errors of `find_cluster`."""
    cluster = find_cluster(given.url, given.api_key_file)
    out = Path(given.out or time.strftime("alignedserve-debug-%Y%m%d-%H%M%S.tar.gz"))
    clean = Cleaner(secrets_of(cluster, given.api_key_file))
    try:
        descriptor = os.open(out, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with open(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            for name, content in contents(cluster, stacks=not given.no_stacks):
                _add(archive, f"{out.name.partition('.')[0]}/{name}", clean(content).encode())
                print(f"  {name}", file=sys.stderr, flush=True)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}") from error
    print(f"{out}: {out.stat().st_size / 1024:.0f} KiB. Look through it before you pass it on.")
    return 0


def contents(cluster: RunningCluster, *, stacks: bool) -> Iterator[tuple[str, str]]:
    """(name, text) of each part. What cannot be had has its reason in place of its text."""
    url, key = cluster.url, cluster.api_key

    def ask(path: str) -> Callable[[], str]:
        headers = {ADMIN_HEADER: cluster.admin_key} if cluster.admin_key else {}  # it opens requests of all API keys
        return lambda: _pretty(fetch_json(url + path, ANSWERS_WITHIN_S, api_key=key, headers=headers))

    yield "versions.txt", _tried(versions)
    yield "status.json", _tried(ask("/alignedserve/status"))
    yield "health.json", _tried(ask("/health"))
    yield "integrity.json", _tried(ask("/alignedserve/integrity"))
    yield "config.yaml", _tried(lambda: str(cluster.order("config", {})["yaml"]))
    yield "metrics.txt", _tried(lambda: fetch_metrics(url, ANSWERS_WITHIN_S))
    yield "live.json", _tried(lambda: _pretty(second(feed(url, api_key=key))))
    yield "requests.json", _tried(ask("/dashboard/requests?sort=slowest&most=200"))
    try:
        roles = fetch_status(url, ANSWERS_WITHIN_S, api_key=key)["roles"]
    except AlignedServeError:
        return
    here = [role for role in roles if int(role["pid"]) in cluster.pids]
    for name, path in logs_of(here):
        yield f"logs/{name}", _tried(lambda path=path: tail(path))  # type: ignore[misc]
    if stacks:
        for role in here:
            yield f"stacks/{role['id']}.txt", _tried(lambda pid=int(role["pid"]): stack(pid))  # type: ignore[misc]


def versions() -> str:
    lines = [f"alignedserve {__version__}", f"python {sys.version}", platform.platform(), f"cpus {os.cpu_count()}"]
    lines += sorted(
        f"{name}={os.environ[name]}" for name in os.environ if name.startswith(_VARIABLES) and not _is_secret(name)
    )
    packages = {f"{one.name}=={one.version}" for one in metadata.distributions()}
    return "\n".join([*lines, *sorted(packages, key=str.lower)])


def _is_secret(variable: str) -> bool:
    return any(word in variable for word in _SECRET_NAMES)


def logs_of(roles: Iterable[dict[str, Any]]) -> list[tuple[str, Path]]:
    """The log files of processes of this machine, each once: what their output is written to, and their own logs."""
    found: dict[Path, str] = {}
    for role in roles:
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{role['pid']}/fd").iterdir():
                path = link.readlink()
                is_log = link.name in ("1", "2") or path.name == f"{role['id']}.log"
                if is_log and path.is_file():
                    found.setdefault(path, f"{role['id']}-{path.name}")
    return [(name, path) for path, name in found.items()]


def tail(path: Path) -> str:
    """The end of a file."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - MOST_LOG_BYTES))
        return file.read().decode("utf-8", "replace")


def stack(pid: int) -> str:
    """The stacks of a process's threads, by py-spy. Raises ConfigError if it is not installed."""
    tool = shutil.which("py-spy") or shutil.which(str(Path(sys.executable).parent / "py-spy"))
    if tool is None:
        raise ConfigError("py-spy is not installed: pip install py-spy")
    found = subprocess.run(
        [tool, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=STACK_WITHIN_S, check=False
    )
    return found.stdout or found.stderr


def secrets_of(cluster: RunningCluster, api_key_file: str | None) -> list[str]:
    """Texts that must not be in the archive: the keys that this command knows."""
    found = [cluster.api_key, cluster.admin_key]
    if api_key_file:
        found += Path(api_key_file).read_text().splitlines()
    found += [value for name, value in os.environ.items() if _is_secret(name)]
    return [text for text in map(str.strip, found) if len(text) >= LEAST_SECRET and not text.startswith("#")]


class Cleaner:
    """Removes secrets from a text."""

    def __init__(self, secrets: Iterable[str]) -> None:
        self._secrets = sorted(set(secrets), key=len, reverse=True)

    def __call__(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "[removed]")
        return _IN_URL.sub("://[removed]@", _KEYS.sub(r"\1[removed]", text))


def _tried(read: Callable[[], str]) -> str:
    try:
        return read()
    except AlignedServeError as error:
        return f"not available: {error.message}"
    except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
        return f"not available: {error!r}"


def _pretty(value: Any) -> str:
    return json.dumps(value, indent=1)


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime, entry.mode = len(content), int(time.time()), 0o600
    archive.addfile(entry, io.BytesIO(content))
