"""Requests as bytes that no client library sends, or that only a web page sends, and the front's answer to each."""

from __future__ import annotations

import json

BODY = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
LIVE = b"GET /live HTTP/1.1\r\nHost: a\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
CANCEL = b"POST /v1/requests/cmpl-1/cancel HTTP/1.1\r\nHost: a\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
SPACES = b"10000\r\n" + b" " * 65536 + b"\r\n"
CHUNK = b"%x\r\n%s\r\n" % (len(BODY), BODY)
ORIGIN = b"Origin: http://evil.example\r\n"
GZIP = b"Content-Encoding: gzip\r\n"
FIELDS = b"".join(b"X%d: a\r\n" % number for number in range(101))

# A name, the bytes sent (in pieces), the status, and the error's code.
REFUSED: list[tuple[str, tuple[bytes, ...], int, str]] = [
    ("TLS", (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(90),), 400, "bad_request"),
    ("noise", (b"\x00\x01noise\r\n\r\n",), 400, "bad_request"),
    ("HTTP/0.9", (b"GET /live\r\n",), 400, "bad_request"),
    ("two hosts", (LIVE + b"Host: b\r\n\r\n",), 400, "bad_request"),
    ("NUL in the path", (b"GET /li\x00ve HTTP/1.1\r\nHost: a\r\n\r\n",), 400, "bad_request"),
    ("space in the path", (b"GET /li ve HTTP/1.1\r\nHost: a\r\n\r\n",), 400, "bad_request"),
    ("another host's URL", (b"GET http://b/live HTTP/1.1\r\nHost: a\r\n\r\n",), 400, "bad_request"),
    ("no colon", (LIVE + b"XY\r\n\r\n",), 400, "bad_request"),
    ("NUL in a header", (LIVE + b"X: a\x00b\r\n\r\n",), 400, "bad_request"),
    ("control character in a header", (LIVE + b"X: a\x01b\r\n\r\n",), 400, "bad_request"),
    ("two lengths", (POST + LENGTH + b"Content-Length: 5\r\n\r\n" + BODY,), 400, "bad_request"),
    ("no number", (POST + b"Content-Length: 4x\r\n\r\n" + BODY,), 400, "bad_request"),
    ("a length beyond numbers", (POST + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n",), 400, "bad_request"),
    ("no coding", (POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",), 400, "bad_request"),
    ("chunked twice", (POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",), 400, "bad_request"),
    ("gzip, chunked", (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n",), 422, "unsupported_transfer_encoding"),
    ("no chunk size", (CHUNKED + b"zz\r\nabc\r\n0\r\n\r\n",), 400, "bad_request"),
    ("no chunk size, later", (CHUNKED, b"3\r\nabc\r\n", b"zz\r\nabc\r\n0\r\n\r\n"), 400, "bad_request"),
    ("no trailer", (CHUNKED, CHUNK + b"0\r\nX Y\r\n\r\n"), 400, "bad_request"),
    ("control character in a trailer", (CHUNKED + CHUNK + b"0\r\nX: \x01y\r\n\r\n",), 400, "bad_request"),
    ("a head of 100 KB", (LIVE + b"X: " + b"a" * 100_000 + b"\r\n\r\n",), 400, "bad_request"),
    ("a head of 40 KB", (LIVE + b"X: " + b"a" * 40_000 + b"\r\n\r\n",), 431, "headers_too_large"),
    ("102 fields", (LIVE + FIELDS + b"\r\n",), 431, "headers_too_large"),
    ("a URL of 9 KB", (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",), 414, "uri_too_long"),
    ("TRACE", (b"TRACE / HTTP/1.1\r\nHost: a\r\n\r\n",), 405, "method_not_allowed"),
    ("FOO", (b"FOO / HTTP/1.1\r\nHost: a\r\n\r\n",), 405, "method_not_allowed"),
    ("get", (b"get /live HTTP/1.1\r\nHost: a\r\n\r\n",), 405, "method_not_allowed"),
    ("CONNECT", (b"CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n",), 405, "method_not_allowed"),
    ("OPTIONS", (b"OPTIONS /v1/completions HTTP/1.1\r\nHost: a\r\n" + ORIGIN + b"\r\n",), 405, "method_not_allowed"),
    ("OPTIONS *", (b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",), 404, "not_found"),
    ("no path", (b"GET live HTTP/1.1\r\nHost: a\r\n\r\n",), 404, "not_found"),
    ("%00", (b"GET /live%00 HTTP/1.1\r\nHost: a\r\n\r\n",), 404, "not_found"),
    ("a model with %00", (b"GET /v1/models/a%00b HTTP/1.1\r\nHost: a\r\n\r\n",), 404, "model_not_found"),
    ("Expect", (POST + LENGTH + b"Expect: a-miracle\r\n\r\n" + BODY,), 417, "expectation_failed"),
    ("no body", (POST + b"\r\n",), 400, "invalid_json"),
    ("too long", (POST + b"Content-Length: 20971520\r\n\r\n" + BODY,), 413, "request_too_large"),
    ("too long in chunks", (CHUNKED + SPACES * 70 + b"0\r\n\r\n",), 413, "request_too_large"),
    ("WebSocket", (POST.replace(b"POST", b"GET") + b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
                   b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n",),
     405, "method_not_allowed"),
    ("gzip", (POST + LENGTH + GZIP + b"\r\n" + BODY,), 415, "unsupported_media_type"),
    ("a page's form", (POST + LENGTH + ORIGIN + b"Content-Type: text/plain\r\n\r\n" + BODY,),
     415, "unsupported_media_type"),
    ("a page's cancel", (CANCEL + ORIGIN + b"Content-Length: 0\r\n\r\n",), 415, "unsupported_media_type"),
]  # fmt: skip

# A name, and the bytes sent. The status is 200.
TAKEN: list[tuple[str, bytes]] = [
    ("no host", b"GET /live HTTP/1.1\r\n\r\n"),
    ("HTTP/1.0", b"GET /live HTTP/1.0\r\n\r\n"),
    ("its own URL", b"GET http://a/live HTTP/1.1\r\nHost: a\r\n\r\n"),
    ("a head of 30 KB", LIVE + b"X: " + b"a" * 30_000 + b"\r\n\r\n"),
    ("another alphabet", LIVE + b"X: \xe9\xff\r\n\r\n"),
    ("an id for Serve that is no text", LIVE + b"X-Request-ID: \xff\r\n\r\n"),
    ("a session for Serve that is no text", LIVE + b"X-Session-ID: \xff\r\n\r\n"),
    ("a model for Serve that is no text", LIVE + b"serve_multiplexed_model_id: \xff\r\n\r\n"),
    ("no type", POST + LENGTH + b"\r\n" + BODY),
    ("identity", POST + LENGTH + b"Content-Encoding: identity\r\n\r\n" + BODY),
    ("100-continue", POST + LENGTH + b"Expect: 100-continue\r\n\r\n" + BODY),
    ("two equal lengths", POST + LENGTH + LENGTH + b"\r\n" + BODY),
    (
        "chunks, trailers and a length",
        POST + LENGTH + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNK + b"0\r\nX: y\r\n\r\n",
    ),
    ("a page's JSON", POST + LENGTH + ORIGIN + b"Content-Type: application/json\r\n\r\n" + BODY),
    ("Serve's own time limit", POST + LENGTH + b"X-Request-Timeout-Seconds: 0.000001\r\n\r\n" + BODY),
]
