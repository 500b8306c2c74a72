"""Runs in HAProxy's place, becomes it: it ends with the process that started it, and has its configuration amended.

Ray Serve writes the configuration anew before each start, and recognises its HAProxies by the file's name, so the file
is amended in place. Only the standard library is used: the package may not be importable here.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING or __package__:
    from alignedserve.cluster import haproxy_errors
else:  # as a script: its own folder is looked in
    import haproxy_errors

EXECUTABLE = "ALIGNEDSERVE_HAPROXY"
HOST = "ALIGNEDSERVE_HAPROXY_HOST"
PORTS = ("RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT")
BODY = "ALIGNEDSERVE_HAPROXY_BODY"  # largest request body in bytes
PR_SET_PDEATHSIG = 1
HOLD_MS = 20  # for so long nothing is passed on after a gateway has said that the cluster is full

OVERLOADED = haproxy_errors.error_object("the cluster is full; try again later", "rate_limit_error", "overloaded")
# A request of a client costs a gateway ten times what it costs HAProxy, so one gateway's refusal answers for those of
# the next moments.
GENERATE_RULES = """
    acl alignedserve_generate path_end /v1/completions /v1/chat/completions
    http-request set-var(txn.alignedserve_now) date(0,ms) if alignedserve_generate
    http-request return status 429 content-type application/json hdr Retry-After %[var(proc.alignedserve_retry)] \
string '{overloaded}' if alignedserve_generate {{ var(proc.alignedserve_hold),sub(txn.alignedserve_now) gt 0 }}
    http-response set-var(proc.alignedserve_retry) res.hdr(retry-after) if {{ res.hdr(x-alignedserve-hold) -m found }}
    http-response set-var(proc.alignedserve_hold) date({hold},ms) if {{ res.hdr(x-alignedserve-hold) -m found }}
    http-response del-header x-alignedserve-hold
"""
BODY_RULE = """\
    http-request return status 413 content-type application/json string '{too_large}' \
if {{ req.hdr_val(content-length) gt {limit} }}
"""


def amend(config: str, environment: Mapping[str, str]) -> str:
    """Statistics on loopback, clients on the address asked for, 503 instead of 404 while no gateway is known; and
    refusals that need no gateway: of a body over the limit, and of requests right after one that found no room."""
    ports = [environment[name] for name in PORTS if environment.get(name)]
    if host := environment.get(HOST):
        shown = f"[{host}]" if ":" in host else host
        config = re.sub(r"(?m)^(\s*bind\s+)127\.0\.0\.1:(\d+)(?=\s|$)", rf"\g<1>{shown}:\g<2>", config)
    # One application's refusal says nothing of another's room.
    several = len(set(re.findall(r"use_backend (http-\S+)", config))) > 1
    rules = "\n" if several else GENERATE_RULES.format(overloaded=OVERLOADED, hold=HOLD_MS)
    if limit := environment.get(BODY):
        message = f"the body is over the limit of {int(limit) / (1 << 20):g} MiB (gateway.max_body_mib)"
        too_large = haproxy_errors.error_object(message, "invalid_request_error", "request_too_large")
        rules += BODY_RULE.format(too_large=too_large, limit=limit)
    config = re.sub(r"(?m)^frontend http_frontend\n\s*bind .*$", lambda found: found[0] + rules.rstrip(), config)
    if ports:
        mine = "|".join(map(re.escape, ports))
        config = re.sub(rf"(?m)^(\s*bind\s+)(?:\*?|\S+):({mine})(?=\s|$)", r"\g<1>127.0.0.1:\g<2>", config)
    if "use_backend http-" not in config:
        answer = f"http-request {haproxy_errors.returned(503)}"
        config = re.sub(r"(?m)^(\s*)http-request return status 404 .*$", lambda found: found[1] + answer, config)
    return config


def main(arguments: list[str]) -> None:
    """Replaces this process. Raises OSError where HAProxy cannot be executed."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel knew
        sys.exit(1)
    executable = os.environ[EXECUTABLE]
    if "-f" in arguments:
        path = arguments[arguments.index("-f") + 1]
        folder = os.path.dirname(os.path.abspath(path))
        haproxy_errors.write_files(folder)
        with open(path, encoding="utf-8") as file:
            config = haproxy_errors.amend(amend(file.read(), os.environ), folder)
        with open(path, "w", encoding="utf-8") as file:
            file.write(config)
        try:
            executable = haproxy_errors.own_executable(executable, folder)
        except OSError as error:
            print(f"what HAProxy answers to what is not HTTP stays a web page: {error}", file=sys.stderr)
    os.execv(executable, [executable, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
