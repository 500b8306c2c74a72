"""Runs `alignedserve serve` as a user would: in its own process, on free ports, with a clean end."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from alignedserve.cluster.serve.haproxy import free_ports
from alignedserve.cluster.serve.haproxy_exec import PR_SET_PDEATHSIG
from alignedserve.errors import AccountingError
from alignedserve.proc_stat import parent_of

SAID_LAST = 10_000  # characters of its output, which are shown after an error


def _end_with_parent(parent: int) -> Callable[[], None]:
    """What a new process calls so that it gets SIGTERM when its parent ends. It takes no lock."""
    libc = ctypes.CDLL(None)

    def ask() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent ended before the signal was set
            os._exit(1)

    return ask


def free_port() -> int:
    """A TCP port on which no process listens now."""
    return free_ports(1)[0]


class ServeProcess:
    """In `with ServeProcess("--model", path) as server:` the server is ready; after the block it has ended.

    `start_s` is the time from the start to a healthy answer in seconds. `environment` is added to this process's
    environment; None removes a variable. `folder` is the command's working folder, by default this process's. `log` is
    the file for its output, by default a temporary file that is kept, and whose end is shown after an error in the
    block. `ends_with_this`: the kernel signals the command if the thread that starts it ends, by kill -9 too.
    """

    def __init__(
        self,
        *arguments: str,
        environment: Mapping[str, str | None] | None = None,
        folder: Path | None = None,
        log: Path | None = None,
        timeout_s: float = 120.0,
        ends_with_this: bool = False,
    ) -> None:
        self.port, self.grpc_port = free_ports(2)
        self.start_s = 0.0
        self._timeout_s = timeout_s
        self._arguments = arguments
        self._folder = folder
        merged = {**os.environ, **(environment or {})}
        self._environment = {name: value for name, value in merged.items() if value is not None}
        self._shows_log = log is None
        if log is None:
            descriptor, name = tempfile.mkstemp(prefix="alignedserve-serve-", suffix=".log")
            os.close(descriptor)
            log = Path(name)
        self._log = log
        self._ends_with_this = ends_with_this
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def command(self) -> Sequence[str]:
        ports = ("--port", str(self.port), "--grpc-port", str(self.grpc_port))
        return (sys.executable, "-m", "alignedserve.cluster.cli.main", "serve", *ports, *self._arguments)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    @property
    def output(self) -> str:
        """What the command has printed so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def start(self) -> None:
        """Start the command, without waiting for it."""
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                self.command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self._environment,
                cwd=self._folder,
                preexec_fn=_end_with_parent(os.getpid()) if self._ends_with_this else None,  # noqa: PLW1509
            )

    def __enter__(self) -> Self:
        begun = time.monotonic()
        self.start()
        try:
            self._wait_healthy(begun + self._timeout_s)
        except BaseException:
            self.stop()
            raise
        self.start_s = time.monotonic() - begun
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shows_log and error is not None:
            print(f"what `alignedserve serve` has said last:\n{self.output[-SAID_LAST:]}", file=sys.stderr)
            for log in self._logs_of_serve():
                said = log.read_text(encoding="utf-8", errors="replace")
                print(f"the end of {log.name}:\n{said[-SAID_LAST:]}", file=sys.stderr)
        self.stop()

    def _logs_of_serve(self) -> list[Path]:
        """Of Ray Serve's controller and proxies, which replace each other. A clean end removes them."""
        told = re.search(r"its processes log to (\S+)", self.output)
        folder = Path(told[1]) / "serve" if told else None
        return [] if folder is None else sorted([*folder.glob("controller_*.log"), *folder.glob("proxy_*.log")])

    def _wait_healthy(self, deadline: float) -> None:
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(f"`alignedserve serve` ended with {self.process.returncode}:\n{self.output}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"not healthy within {self._timeout_s:g} s:\n{self.output}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5.0) as response:
                    if response.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(0.05)

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 40.0) -> int:
        """Signal the command and wait for its end. Returns its exit status; raises TimeoutExpired if it stays."""
        if self._process is None:
            return 0
        if self._process.poll() is None:
            self._process.send_signal(number)
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise

    def get(self, path: str, timeout_s: float = 30.0) -> Any:
        """The parsed JSON answer to a GET."""
        with urllib.request.urlopen(self.url + path, timeout=timeout_s) as response:
            return json.loads(response.read())

    def metrics(self) -> str:
        """The text of `/metrics`, in Prometheus format."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30.0) as response:
            return str(response.read().decode())

    def post(self, path: str, body: Any) -> Any:
        """The parsed JSON answer to a POST."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300.0) as response:
            return json.loads(response.read())

    def check_integrity(self) -> None:
        """Make every process recount its stores and check its state. Raises AccountingError if one is inconsistent."""
        found = self.get("/alignedserve/integrity")
        if not found["sound"]:
            raise AccountingError(f"{self.url}: {[book for book in found['books'] if book['problem']]}")

    def pids(self, word: str) -> list[int]:
        """Pids of the command's descendants whose command line contains `word`."""
        parents: dict[int, int] = {}
        matching: list[int] = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    parents[int(entry.name)] = parent_of(int(entry.name))
                    if word.encode() in (entry / "cmdline").read_bytes():
                        matching.append(int(entry.name))
        return [pid for pid in matching if pid != self.process.pid and self.process.pid in _ancestors(pid, parents)]

    def roles(self) -> list[dict[str, Any]]:
        """The processes as `alignedserve status --json` lists them."""
        roles: list[dict[str, Any]] = self.get("/alignedserve/status")["roles"]
        return roles


def _ancestors(pid: int, parents: Mapping[int, int]) -> list[int]:
    found = []
    while (pid := parents.get(pid, 0)) and pid not in found:
        found.append(pid)
    return found
