"""Turns errors of HAProxy, and plain-text errors of servers behind it, into OpenAI's error objects.

`haproxy_exec` uses this module before it becomes HAProxy. It uses only the standard library, as explained there.
"""

from __future__ import annotations

import json
import os
import re
import sys
from typing import NamedTuple

MOST_HEAD_BYTES = 32 << 10
MOST_URL_BYTES = 8 << 10
MOST_FIELDS = 100
PARSED_FIELDS = 1024  # limit of HAProxy's parser, beyond which it can only answer 400
METHODS = "GET HEAD POST PUT PATCH DELETE OPTIONS"
ALLOWED = "GET, HEAD, POST"
_TYPES = {403: "permission_error", 408: "timeout_error", 429: "rate_limit_error"}
_RETRY = (502, 503)
_GRPC_UNAVAILABLE, _GRPC_INTERNAL = 14, 13  # on these a client retries through another connection


class Answer(NamedTuple):
    """`short` replaces `message` where HAProxy's executable has no room for it."""

    reason: str
    code: str
    message: str
    short: str = ""


ANSWERS = {
    400: Answer(
        "Bad Request",
        "bad_request",
        "the request is not valid HTTP, its head is too long, or its client closed its side",
        "not valid HTTP, or head too long",
    ),
    403: Answer("Forbidden", "forbidden", "this is not allowed"),
    404: Answer("Not Found", "not_found", "this path does not exist; /openapi.json lists all paths"),
    405: Answer("Method Not Allowed", "method_not_allowed", f"this method is not allowed; {ALLOWED} are known"),
    408: Answer("Request Timeout", "request_timeout", "the request did not come in time"),
    413: Answer("Content Too Large", "request_too_large", "the body is too large"),
    414: Answer("URI Too Long", "uri_too_long", f"the URL is over {MOST_URL_BYTES >> 10} KiB"),
    417: Answer("Expectation Failed", "expectation_failed", "Expect may only ask for 100-continue"),
    422: Answer(
        "Unprocessable Content",
        "unsupported_transfer_encoding",
        "Transfer-Encoding must be chunked",
        "must be chunked",
    ),
    429: Answer("Too Many Requests", "overloaded", "there is no room now; try again later"),
    431: Answer(
        "Request Header Fields Too Large",
        "headers_too_large",
        f"the head of the request is over {MOST_HEAD_BYTES >> 10} KiB, or has over {MOST_FIELDS} fields",
    ),
    500: Answer("Internal Server Error", "internal_error", "the server failed to answer"),
    501: Answer("Not Implemented", "not_implemented", "this HTTP feature is not supported"),
    502: Answer("Bad Gateway", "unavailable", "the gateway ended before it answered; try again"),
    503: Answer("Service Unavailable", "unavailable", "no gateway can be reached now; try again"),
    504: Answer("Gateway Timeout", "gateway_timeout", "the gateway did not answer in time"),
}
# Statuses for which HAProxy has built-in texts that files can replace.
FILES = (400, 403, 404, 405, 408, 413, 422, 429, 500, 501, 502, 503, 504)

# Headers of Ray Serve that have no use here. They would hide a client's disconnect, end requests with a text of Serve,
# and are decoded as UTF-8 even if they are not.
_SERVES_HEADERS = (
    "^(x-request-disconnect-disabled|x-request-timeout-seconds|x[-_]session[-_]id|serve[-_]multiplexed[-_]model[-_]id)$"
)


def error_object(message: str, kind: str, code: str) -> str:
    """OpenAI's error object."""
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})


def error(status: int) -> str:
    return error_object(ANSWERS[status].message, _kind(status), ANSWERS[status].code)


def returned(status: int) -> str:
    """The `return` action of an HAProxy rule."""
    more = " hdr Retry-After 1" if status in _RETRY else f' hdr Allow "{ALLOWED}"' if status == 405 else ""
    return f"return status {status} content-type application/json{more} string '{error(status)}'"


def amend(config: str, folder: str) -> str:
    """`config` with error files from `folder`.

    The gRPC proxies follow the HTTP proxies in the file. They get error files with a gRPC status instead of JSON.
    """
    config = re.sub(r"(?m)^global$", f"global\n    tune.http.maxhdr {PARSED_FIELDS}", config)
    config = re.sub(r"(?m)^\s*errorfile .*\n", "", config)
    config = re.sub(r"(?m)^defaults$", "defaults\n    errorfiles alignedserve_http", config)
    # Serve's own answers: no application has the path, or none is ready (/-/healthz, /-/routes).
    for status in (404, 503):
        plain = rf'(?m)http-request return status {status} content-type text/plain (?:lf-)?string "(?:\\.|[^"\\])*"'
        config = re.sub(plain, lambda found, status=status: f"http-request {returned(status)}", config)  # type: ignore[misc]
    before, grpc, after = config.partition("frontend grpc_frontend\n")
    if grpc:
        after = re.sub(r"(?m)^backend .*$", lambda found: f"{found[0]}\n    errorfiles alignedserve_grpc", after)
        grpc += "    errorfiles alignedserve_grpc\n"
    sections = "".join(
        f"http-errors alignedserve_{kind}\n"
        + "".join(f"    errorfile {status} {_path(folder, kind, status)}\n" for status in FILES)
        for kind in ("http", "grpc")
    )
    return before + grpc + after + sections


def rules() -> str:
    """Rules of an HTTP frontend. They refuse invalid requests, and replace plain-text errors of Serve and uvicorn.

    A plain-text 404 comes from Serve's own proxy, which answers while no gateway is up, so it becomes a 503.
    """
    known = "!{ res.hdr(content-type) -m beg application/json }"
    plain = {status: status for status in (400, 403, 405, 408, 413, 500, 502, 503, 504)} | {404: 503}
    lines = (
        f"http-request {returned(405)} if !{{ method {METHODS} }}",
        f"http-request {returned(414)} if {{ url,length gt {MOST_URL_BYTES} }}",
        f"http-request {returned(431)} if {{ req.hdrs,length gt {MOST_HEAD_BYTES} }}",
        f"http-request {returned(431)} if {{ req.fhdr_cnt gt {MOST_FIELDS} }}",
        f"http-request {returned(417)} if {{ req.hdr(expect) -m found }} !{{ req.hdr(expect) -i 100-continue }}",
        "http-request del-header upgrade",
        f"http-request del-header {_SERVES_HEADERS} -m reg",
        "http-request del-header x-request-id if { req.hdr(x-request-id) -m reg [^\\ -~] }",
        *(f"http-response {returned(told)} if {{ status {status} }} {known}" for status, told in plain.items()),
    )
    return "".join(f"    {line}\n" for line in lines)


def write_files(folder: str) -> None:
    """Write the error files that `amend` names."""
    for status in FILES:
        for kind, text in (("http", _http_file(status)), ("grpc", _grpc_file(status))):
            with open(_path(folder, kind, status), "w", encoding="ascii", newline="") as file:
                file.write(text)


def execute(executable: str, arguments: list[str]) -> None:
    """Replace this process by HAProxy. Raises OSError.

    HAProxy's built-in answers are replaced by error objects in a copy in memory. HAProxy 2.8 ignores error files for
    requests that cannot be parsed or arrive too late (github.com/haproxy/haproxy/issues/3032, fixed after 2.8). The
    executable runs unchanged if its answers have an unknown form or this machine cannot execute memory.
    """
    command = [executable, *arguments]
    with open(executable, "rb") as file:
        content = file.read()
    changed = with_own_answers(content)
    if changed != content:
        # A copy in memory does not find its libraries by itself.
        libraries = os.path.join(os.path.dirname(os.path.realpath(executable)), "lib")
        paths = [libraries, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        try:
            memory = os.memfd_create("haproxy")
            with open(memory, "wb", closefd=False) as file:
                file.write(changed)
            os.execve(memory, command, {**os.environ, "LD_LIBRARY_PATH": ":".join(paths)})
        except OSError as error:
            print(f"HAProxy answers invalid HTTP with its built-in web page: {error}", file=sys.stderr)
    os.execv(executable, command)


def with_own_answers(content: bytes) -> bytes:
    """The executable's bytes, with each built-in HTTP error replaced by an answer that is not longer."""

    def own(found: re.Match[bytes]) -> bytes:
        status = int(found[1])
        text = _builtin(status, len(found[0])) if status in ANSWERS else None
        return found[0] if text is None else text.ljust(len(found[0]), b"\0")

    return re.sub(rb"HTTP/1\.1 (\d{3}) [^\0]*?\r\n\r\n<html>[^\0]*(?=\0)", own, content)


def _builtin(status: int, room: int) -> bytes | None:
    """The answer in at most `room` bytes, shortened if necessary; None if it does not fit."""
    reason, code, message, short = ANSWERS[status]
    for text, phrase, space in ((message, reason, " "), (message, "", ""), (short, reason, " "), (short, "", "")):
        if not text:
            continue
        body = {"error": {"message": text, "type": _kind(status), "param": None, "code": code}}
        dense = json.dumps(body, separators=(",", ":"))
        head = (
            f"Content-Type:{space}application/json",
            f"Content-Length:{space}{len(dense)}",
            f"Connection:{space}close",
        )
        answer = "\r\n".join((f"HTTP/1.1 {status} {phrase}", *head, "", dense)).encode("ascii")
        if len(answer) <= room:
            return answer
    return None


def _http_file(status: int) -> str:
    body = error(status)
    head = [f"HTTP/1.1 {status} {ANSWERS[status].reason}", "Content-Type: application/json"]
    head += ["Retry-After: 1"] if status in _RETRY else []
    head += [f"Allow: {ALLOWED}"] if status == 405 else []
    return "\r\n".join((*head, f"Content-Length: {len(body)}", "", body))


def _grpc_file(status: int) -> str:
    """An answer with a gRPC status in a header; its HTTP status is always 200. It has no `code` in brackets, so
    `alignedserve.client` treats it as a broken connection and continues through another one."""
    code = _GRPC_UNAVAILABLE if status == 408 or status >= 500 else _GRPC_INTERNAL
    head = ("HTTP/1.1 200 OK", "Content-Type: application/grpc", f"Grpc-Status: {code}")
    return "\r\n".join((*head, f"Grpc-Message: {ANSWERS[status].message}", "Content-Length: 0", "", ""))


def _path(folder: str, kind: str, status: int) -> str:
    return os.path.join(folder, f"{kind}-{status}.http")


def _kind(status: int) -> str:
    return _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
