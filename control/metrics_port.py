"""A role's own metrics over HTTP, for Prometheus' discovery (`cluster.role_metrics`)."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler

PATH = "/metrics"
_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricsPort:
    """Serves `text()` at PATH in threads of its own, on a free port of `host`.

    `text` is called in these threads. There is no key: the page has counts, sizes and times only, as that of a gateway.
    """

    def __init__(self, host: str, text: Callable[[], str]) -> None:
        """Raises OSError if nothing can listen on `host`."""

        class Handler(BaseHTTPRequestHandler):
            timeout = 10.0  # of a client that sends nothing

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

        class Server(socketserver.ThreadingTCPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            daemon_threads = True
            block_on_close = False

            def handle_error(self, request: object, client_address: object) -> None:
                return  # a client that has left

        self._server = Server((host, 0), Handler)
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
