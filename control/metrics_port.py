"""A role's own metrics over HTTP, for Prometheus' discovery (`cluster.role_metrics`)."""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

logger = logging.getLogger(__name__)

PATH = "/metrics"
MOST_CLIENTS = 8  # at once; further ones are turned away
CLIENT_S = 10.0  # the longest time of a connection
_POLL_S = 0.05  # how late `close` may be
_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricsPort:
    """Serves `text()` at PATH in threads of its own, on a free port of `host`.

    `text` is called in these threads. There is neither key nor encryption, as at `/metrics` of a gateway's own port.
    """

    def __init__(self, host: str, text: Callable[[], str]) -> None:
        """Raises OSError if nothing can listen on `host`."""

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = self.path.partition("?")[0] == PATH
                body = text().encode() if found else b"not found\n"
                self.send_response(HTTPStatus.OK if found else HTTPStatus.NOT_FOUND)
                self.send_header("Content-Type", _TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                return

        self._server = _Server((host, 0), Handler)
        self.port = int(self._server.server_address[1])
        serve = threading.Thread(target=self._server.serve_forever, args=(_POLL_S,), name="metrics", daemon=True)
        serve.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    """A slow or hostile client costs at most one of MOST_CLIENTS threads, for CLIENT_S."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._room = threading.BoundedSemaphore(MOST_CLIENTS)
        super().__init__(address, handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return self._room.acquire(blocking=False)

    def process_request(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started for it
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        ended = threading.Timer(CLIENT_S, _end, (request,))
        ended.daemon = True
        ended.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            ended.cancel()
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a client of the metrics' port has left, or its answer failed", exc_info=True)


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended meanwhile
        connection.shutdown(socket.SHUT_RDWR)
