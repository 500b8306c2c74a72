"""Runs in HAProxy's place, becomes it: it ends with the process that started it, and has its configuration amended.

Ray Serve writes the configuration anew before each start, and recognises its HAProxies by the file's name, so the file
is amended in place. Only the standard library is used: the package may not be importable here.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
from collections.abc import Mapping

EXECUTABLE = "ALIGNEDSERVE_HAPROXY"
HOST = "ALIGNEDSERVE_HAPROXY_HOST"
PORTS = ("RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT")
PR_SET_PDEATHSIG = 1

UNAVAILABLE = json.dumps(
    {
        "error": {
            "message": "no gateway can be reached at the moment; try again",
            "type": "server_error",
            "param": None,
            "code": "unavailable",
        }
    }
)
ERROR_FILE = (
    "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    f"Content-Length: {len(UNAVAILABLE)}\r\n\r\n{UNAVAILABLE}"
)


def amend(config: str, environment: Mapping[str, str]) -> str:
    """Statistics on loopback, clients on the address asked for, and 503 instead of 404 while no gateway is known."""
    ports = [environment[name] for name in PORTS if environment.get(name)]
    if host := environment.get(HOST):
        shown = f"[{host}]" if ":" in host else host
        config = re.sub(r"(?m)^(\s*bind\s+)127\.0\.0\.1:(\d+)(?=\s|$)", rf"\g<1>{shown}:\g<2>", config)
    if ports:
        mine = "|".join(map(re.escape, ports))
        config = re.sub(rf"(?m)^(\s*bind\s+)(?:\*?|\S+):({mine})(?=\s|$)", r"\g<1>127.0.0.1:\g<2>", config)
    if "use_backend http-" not in config:
        answer = (
            f"http-request return status 503 content-type application/json hdr Retry-After 1 string '{UNAVAILABLE}'"
        )
        config = re.sub(r"(?m)^(\s*)http-request return status 404 .*$", lambda found: found[1] + answer, config)
    return config


def main(arguments: list[str]) -> None:
    """Replaces this process. Raises OSError where HAProxy cannot be executed."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel knew
        sys.exit(1)
    if "-f" in arguments:
        path = arguments[arguments.index("-f") + 1]
        with open(path, encoding="utf-8") as file:
            config = amend(file.read(), os.environ)
        with open(path, "w", encoding="utf-8") as file:
            file.write(config)
        if found := re.search(r"(?m)^\s*errorfile\s+503\s+(\S+)\s*$", config):
            with open(found[1], "w", encoding="utf-8", newline="") as file:
                file.write(ERROR_FILE)
    executable = os.environ[EXECUTABLE]
    os.execv(executable, [executable, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
