"""`alignedserve debug-bundle`: one archive for an issue report, without keys, prompts and answers."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import re
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
from alignedserve.cluster.cli.processes_here import around, environments, logs_of, stack, tail
from alignedserve.cluster.cli.status_command import record_of
from alignedserve.cluster.cli.top_command import feed, second
from alignedserve.cluster.records import fetch_json, fetch_metrics, fetch_status, operator_key, read_records
from alignedserve.errors import AlignedServeError, ConfigError, UnavailableError

ANSWERS_WITHIN_S = 20.0
SILENT_WITHIN_S = 2.0  # if the cluster did not answer before
LEAST_SECRET = 6  # shorter texts are not removed: they would be everywhere
_QUOTES = r"[\\'\"]*"
_IS = rf"{_QUOTES}\s*[:=]\s*{_QUOTES}"
_PASSWORD = r"(?:passwd|password|pwd)"  # the end of a name, as in redis-password
_NAME = r"(?:key|token|secret)"
_NUMBER = r"[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?[\]).]*(?=[\s'\",;&}\\]|$)"  # up to the value's end: `first_token: 0.25`
_KEYS = re.compile(
    rf"(?i)(bearer\s+|authorization{_IS}(?:bearer\s+|basic\s+)?|{_PASSWORD}{_IS}|--[\w-]*{_PASSWORD}\s+"
    rf"|(?:{_NAME}{_IS}|--[\w-]*{_NAME}\s+)(?!{_NUMBER}))[^\s'\",;&}}\\]+"
)
_IN_URL = re.compile(r"://[^/\s\"']+@")  # a user, and perhaps a password
_VARIABLES = ("ALIGNEDSERVE_", "RAY_", "CUDA_", "NCCL_", "OMP_", "OTEL_", "TORCH_")
_SECRET_PART = re.compile(
    r".*(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|APIKEY|CREDENTIAL)S?|KEYS?|PASS|PWD|AUTH|AUTHORIZATION|HEADERS"
)
_PASSWORD_PART = re.compile(r".*PASSWORDS?|.*PASSWD|PASS|PWD")
# Names that end so have a setting or a path, as RAY_AUTH_MODE, ALIGNEDSERVE_PREFILL__TOKEN_BUDGET and SSH_AUTH_SOCK.
_NO_SECRET_ENDS = {"MODE", "BUDGET", "FILE", "PATH", "DIR", "SOCK", "TYPE", "TIMEOUT", "TTL", "LIMIT", "SIZE", "COUNT"}
_SHELLS_OWN = {"PWD", "OLDPWD"}  # folders


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--out", metavar="FILE", help="the archive (default: alignedserve-debug-TIME.tar.gz)")
    add_url(parser)
    parser.add_argument(
        "--no-stacks", action="store_true", help="do not stop processes for a moment to read their stacks"
    )


def run(given: argparse.Namespace) -> int:
    """Raises ConfigError if the archive cannot be written, and the errors of `find_cluster`."""
    cluster, patience_s = _cluster(given.url, given.api_key_file)
    out = Path(given.out or time.strftime("alignedserve-debug-%Y%m%d-%H%M%S.tar.gz"))
    clean = Cleaner(secrets_of(cluster, given.api_key_file))
    try:
        descriptor = os.open(out, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with open(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            for name, content in contents(cluster, stacks=not given.no_stacks, patience_s=patience_s):
                _add(archive, f"{out.name.partition('.')[0]}/{name}", clean(content).encode())
                print(f"  {name}", file=sys.stderr, flush=True)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}") from error
    print(f"{out}: {out.stat().st_size / 1024:.0f} KiB. Look through it before you pass it on.")
    return 0


def _cluster(url: str | None, api_key_file: str | None) -> tuple[RunningCluster, float]:
    """The cluster, and how many seconds to wait for each of its answers. It may be one that does not answer."""
    try:
        return find_cluster(url, api_key_file), ANSWERS_WITHIN_S
    except UnavailableError as error:
        record = record_of(url) if url is not None else next(iter(read_records()), None)
        if record is None:
            raise
        print(f"{error.message}; the archive has what is known without it", file=sys.stderr)
        key = operator_key(api_key_file, record)
        silent = RunningCluster(record.url.rstrip("/"), key, record.admin_key, supervisor_pid=record.pid)
        return silent, SILENT_WITHIN_S


def contents(
    cluster: RunningCluster, *, stacks: bool, patience_s: float = ANSWERS_WITHIN_S
) -> Iterator[tuple[str, str]]:
    """(name, text) of each part. What cannot be had has its reason in place of its text."""
    url, key = cluster.url, cluster.api_key

    def ask(path: str) -> Callable[[], str]:
        headers = {ADMIN_HEADER: cluster.admin_key} if cluster.admin_key else {}  # it opens requests of all API keys
        return lambda: _pretty(fetch_json(url + path, patience_s, api_key=key, headers=headers))

    yield "versions.txt", _tried(versions)
    yield "status.json", _tried(ask("/alignedserve/status"))
    yield "health.json", _tried(ask("/health"))
    yield "integrity.json", _tried(ask("/alignedserve/integrity"))
    yield "config.yaml", _tried(lambda: str(cluster.order("config", {}, patience_s)["yaml"]))
    yield "metrics.txt", _tried(lambda: fetch_metrics(url, patience_s))
    yield "live.json", _tried(lambda: _pretty(second(feed(url, api_key=key, answers_within_s=patience_s))))
    yield "requests.json", _tried(ask("/dashboard/requests?sort=slowest&most=200"))
    here = processes(cluster, patience_s)
    for name, path in logs_of(here):
        yield f"logs/{name}", _tried(lambda path=path: tail(path))  # type: ignore[misc]
    if stacks:
        for pid, name in here.items():
            yield f"stacks/{name}.txt", _tried(lambda pid=pid: stack(pid))  # type: ignore[misc]


def processes(cluster: RunningCluster, patience_s: float) -> dict[int, str]:
    """The names of the cluster's processes on this machine, by pid: their ids, if the cluster tells."""
    found = around(cluster.supervisor_pid) if cluster.supervisor_pid else {}
    with contextlib.suppress(AlignedServeError):
        for role in fetch_status(cluster.url, patience_s, api_key=cluster.api_key).get("roles", ()):
            pid = int(role["pid"])
            if pid in found or pid in cluster.pids:
                found[pid] = str(role["id"])
    return found


def versions() -> str:
    lines = [f"alignedserve {__version__}", f"python {sys.version}", platform.platform(), f"cpus {os.cpu_count()}"]
    lines += sorted(
        f"{name}={value}"
        for name, value in os.environ.items()
        if name.startswith(_VARIABLES) and not _is_secret(name, value)
    )
    packages = {f"{one.name}=={one.version}" for one in metadata.distributions()}
    return "\n".join([*lines, *sorted(packages, key=str.lower)])


def _is_secret(variable: str, value: str) -> bool:
    """By whole parts of the variable's name. A number is a secret only as a password."""
    name = variable.upper()
    parts = name.split("_")
    if name in _SHELLS_OWN or parts[-1] in _NO_SECRET_ENDS or not any(map(_SECRET_PART.fullmatch, parts)):
        return False
    return re.fullmatch(_NUMBER, value.strip()) is None or any(map(_PASSWORD_PART.fullmatch, parts))


def secrets_of(cluster: RunningCluster, api_key_file: str | None) -> list[str]:
    """Texts that must not be in the archive: keys that this command and the cluster's processes were given."""
    found = [cluster.api_key, cluster.admin_key]
    if api_key_file:
        found += Path(api_key_file).read_text().splitlines()
    found += [value for name, value in os.environ.items() if _is_secret(name, value)]
    for name, values in environments(around(cluster.supervisor_pid) if cluster.supervisor_pid else ()).items():
        found += [value for value in values if _is_secret(name, value)]
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
