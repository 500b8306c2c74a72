"""Records of this user's running clusters, by which `alignedserve status` finds them without joining Ray."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from alignedserve.cluster.runtime_dir import record_dirs, remove_stale, runtime_dir
from alignedserve.errors import AuthenticationError, ConfigError, UnavailableError
from alignedserve.gateway.api_keys import first_key
from alignedserve.proc_stat import is_alive

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 2.0
WRITE_AGAIN_S = 5.0
METRICS_PATH = "/metrics"
STATUS_PATH = "/alignedserve/status"
API_KEY_VARIABLE = "ALIGNEDSERVE_API_KEY"


@dataclass(frozen=True, slots=True)
class Record:
    """A cluster: the URL of its gateway, and the pid of its supervisor on this machine."""

    cluster_id: str
    url: str
    pid: int
    started_unix_s: float
    name: str = ""
    api_key_file: str = ""
    admin_key: str = field(default="", repr=False)

    def write(self) -> None:
        """Write a temporary file and rename it, so that no process reads a partial file."""
        path = _path(self.cluster_id)
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            draft.write_text(json.dumps(asdict(self)))
            draft.chmod(0o600)
            draft.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise

    async def keep_writing(self, every_s: float = WRITE_AGAIN_S) -> None:
        """Retry until the record is written, so that a supervisor starts even if the disk is full."""
        while True:
            try:
                self.write()
            except OSError as error:
                logger.warning("the cluster's record cannot be written, so commands do not find the cluster: %s", error)
                await asyncio.sleep(every_s)
            else:
                return

    def remove(self) -> None:
        _path(self.cluster_id).unlink(missing_ok=True)


def read_records() -> list[Record]:
    """The records of running supervisors, newest first. Others are removed, with their clusters' folders.

    If a supervisor has just died, its successor writes the record again.
    """
    records = []
    for path in (path for folder in record_dirs() for path in folder.glob("*.json")):
        try:
            record = Record(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            continue
        if is_alive(record.pid):
            records.append(record)
        else:
            path.unlink(missing_ok=True)
            remove_stale(path.parent / record.cluster_id)
    return sorted(records, key=lambda record: -record.started_unix_s)


def operator_key(api_key_file: str | None, record: Record | None = None) -> str:
    """The API key that an operator's command sends: from the given file, else from the environment, else from the file
    that the cluster reads, if this user may read it. "" if there is none. Raises ConfigError for the given file."""
    if api_key_file:
        return first_key(api_key_file)
    if found := os.environ.get(API_KEY_VARIABLE, "").strip():
        return found
    if record is not None and record.api_key_file:
        with contextlib.suppress(ConfigError):
            return first_key(record.api_key_file)
    return ""


def fetch_status(url: str, timeout_s: float = PROBE_TIMEOUT_S, *, api_key: str = "") -> dict[str, Any]:
    """The status of its cluster from the gateway at `url`. Raises the errors of `fetch_json`."""
    return fetch_json(url.rstrip("/") + STATUS_PATH, timeout_s, api_key=api_key)


def fetch_json(
    address: str,
    timeout_s: float,
    *,
    api_key: str = "",
    body: dict[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The JSON object that answers a GET, or with `body` a POST; also that of an HTTP error. Proxies named in the
    environment are not used, because the server is on this machine or was named by the user.

    Raises UnavailableError if no server answers, AuthenticationError if the API key is wrong.
    """
    request = urllib.request.Request(address, headers=dict(headers or {}))
    if api_key:
        request.add_header("authorization", f"Bearer {api_key}")
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("content-type", "application/json")
    try:
        said = json.loads(_read(request, timeout_s))
    except urllib.error.HTTPError as error:
        if error.code == AuthenticationError.http_status:
            raise AuthenticationError(
                f"{address} asks for an API key: set {API_KEY_VARIABLE}, or give --api-key-file FILE"
            ) from error
        with contextlib.suppress(ValueError, OSError):
            if isinstance(said := json.loads(error.read()), dict):
                return said
        raise UnavailableError(f"{address} answered with HTTP {error.code}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise UnavailableError(f"{address} does not answer: {reason}") from error
    if not isinstance(said, dict):
        raise UnavailableError(f"{address} is not a gateway of AlignedServe")
    return said


def fetch_metrics(url: str, timeout_s: float) -> str:
    """The cluster's metrics as Prometheus text. No key is needed. Raises UnavailableError if no server answers."""
    address = url.rstrip("/") + METRICS_PATH
    try:
        return _read(urllib.request.Request(address), timeout_s).decode()
    except (OSError, ValueError) as error:
        raise UnavailableError(f"{address} does not answer: {getattr(error, 'reason', None) or error}") from error


def _read(request: urllib.request.Request, timeout_s: float) -> bytes:
    """The response body. Raises OSError, including urllib's HTTPError."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            body: bytes = answer.read()
    except http.client.HTTPException as error:  # the answer was cut off, or is not HTTP
        raise OSError(f"its answer is not whole ({error!r})") from error
    return body


def _path(cluster_id: str) -> Path:
    return runtime_dir() / f"{cluster_id}.json"
