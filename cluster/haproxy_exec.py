"""Runs in HAProxy's place, becomes it: it then ends with the process that started it, and keeps its own ports local.

Serve has it bind its statistics on every address; nobody but this machine is to read them. Only the standard library is
used: the package may not be importable here.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys

EXECUTABLE = "ALIGNEDSERVE_HAPROXY"
PORTS = ("RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT")
PR_SET_PDEATHSIG = 1


def keep_local(config: str, ports: tuple[str, ...]) -> str:
    """HAProxy's configuration with those of its `bind` lines that name one of `ports` on loopback."""
    pattern = rf"(?m)^(\s*bind\s+)\*?:({'|'.join(map(re.escape, ports))})(?=\s|$)"
    return re.sub(pattern, r"\g<1>127.0.0.1:\g<2>", config)


def main(arguments: list[str]) -> None:
    """Replaces this process. Raises OSError where HAProxy cannot be executed."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel knew
        sys.exit(1)
    ports = tuple(os.environ[name] for name in PORTS if os.environ.get(name))
    if "-f" in arguments and ports:
        place = arguments.index("-f") + 1
        with open(arguments[place], encoding="utf-8") as file:
            config = keep_local(file.read(), ports)
        arguments[place] += ".local"
        with open(arguments[place], "w", encoding="utf-8") as file:
            file.write(config)
    executable = os.environ[EXECUTABLE]
    os.execv(executable, [executable, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
