"""Forks roles' processes from a process that has imported what they need, so that they start without imports.

`python -m support.fork_server FD KIND` is the server; KIND is `worker` (torch, transformers and the engine), `role`
(what every role imports) or `gateway`. Each datagram on the socket FD orders a child: a module to run, its environment,
and as file descriptors its stdin, stdout, stderr and a pipe to which the server writes the child's pid and, when it has
ended, its exit status. The server opens no gRPC channel: neither gRPC's threads nor its locks survive a fork.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from alignedserve.cluster.launch.fork_server import become, import_all

ORDER_BYTES = 1 << 17
# What libraries read when they are imported or loaded. All other variables may differ between children of a server.
READ_EARLY = (
    "CUDA_",
    "GRPC_",
    "HF_",
    "LD_",
    "LRU_",
    "MALLOC_",
    "MKL_",
    "OMP_",
    "ONEDNN_",
    "PYTHON",
    "TOKENIZERS_",
    "TRITON_",
)
GRPCS_THREADS = {"event_engine", "grpc_global_tim"}
IMPORTS = {
    "gateway": ("support.gateway", "alignedserve.gateway.standalone"),
    "role": ("alignedserve.cluster.launch.role_main",),
    "worker": (
        "alignedserve.engine.eager",
        "alignedserve.engine.model.host",
        "alignedserve.engine.parallel.rank_main",
        "alignedserve.engine.runner",
        "transformers.models.auto.modeling_auto",
        "alignedserve.cluster.launch.role_main",
    ),
}

_servers: dict[tuple[str, frozenset[tuple[str, str]]], tuple[subprocess.Popen[bytes], socket.socket]] = {}


class ForkedProcess:
    """The part of `asyncio.subprocess.Process` that `ProcessLauncher` needs."""

    def __init__(self, pid: int, stdin: asyncio.StreamWriter, report: asyncio.StreamReader) -> None:
        self.pid = pid
        self.stdin = stdin
        self._ended = asyncio.get_running_loop().create_task(_status(report))

    async def wait(self) -> int:
        """The exit status; negative: the signal that ended the process."""
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        """Raises ProcessLookupError if the process has ended."""
        if self._ended.done():
            raise ProcessLookupError(self.pid)
        os.kill(self.pid, signal.SIGKILL)


async def fork_process(kind: str, module: str, environment: Mapping[str, str], out: int, err: int) -> ForkedProcess:
    """Run `python -m module` in a forked process, which writes to the descriptors `out` and `err`.

    Raises OSError if the server has ended.
    """
    stdin, stdin_writer = os.pipe()
    report_reader, report = os.pipe()
    order = json.dumps({"module": module, "environment": dict(environment), "directory": os.getcwd()}).encode()
    try:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [stdin, out, err, report]))]
        _server(kind, environment).sendmsg([order], ancillary)
    except BaseException:
        os.close(stdin_writer)
        os.close(report_reader)
        raise
    finally:
        os.close(stdin)
        os.close(report)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(report_reader, "rb"))
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, os.fdopen(stdin_writer, "wb", buffering=0)
    )
    pid = await reader.readline()
    if not pid:
        raise OSError("the fork server has ended")
    return ForkedProcess(int(pid), asyncio.StreamWriter(transport, protocol, None, loop), reader)


async def _status(report: asyncio.StreamReader) -> int:
    line = await report.readline()
    return int(line) if line else -signal.SIGKILL


def server_pids() -> set[int]:
    """The fork servers of this process, which live as long as it does."""
    return {process.pid for process, _ in _servers.values()}


def _server(kind: str, environment: Mapping[str, str]) -> socket.socket:
    """A server that imports with this environment."""
    key = kind, frozenset((name, value) for name, value in environment.items() if name.startswith(READ_EARLY))
    if key not in _servers:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "support.fork_server", str(theirs.fileno()), kind],
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        _servers[key] = process, ours
    return _servers[key][1]


def _import(kind: str) -> None:
    import_all(IMPORTS[kind])
    if GRPCS_THREADS & {path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}:
        raise RuntimeError("gRPC has started threads before the fork")


def _serve(orders: socket.socket) -> None:
    reports: dict[int, int] = {}
    wake_reader, wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_writer)
    while True:
        ready, _, _ = select.select([orders.fileno(), wake_reader], [], [])
        if wake_reader in ready:
            os.read(wake_reader, 4096)
            while reports:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                _tell(reports.pop(pid), os.waitstatus_to_exitcode(status), last=True)
        if orders.fileno() in ready:
            order, descriptors, _, _ = socket.recv_fds(orders, ORDER_BYTES, 4)
            if not order:
                return
            *streams, report = descriptors
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for descriptor in (orders.fileno(), wake_reader, wake_writer, report, *reports.values()):
                    os.close(descriptor)
                ordered = json.loads(order)
                os.chdir(ordered["directory"])
                become(ordered["module"], (), ordered["environment"], streams)
            for descriptor in streams:
                os.close(descriptor)
            reports[pid] = report
            _tell(report, pid, last=False)


def _tell(report: int, number: int, *, last: bool) -> None:
    with contextlib.suppress(BrokenPipeError):  # the process that ordered the child has ended
        os.write(report, b"%d\n" % number)
    if last:
        os.close(report)


if __name__ == "__main__":
    _import(sys.argv[2])
    _serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)
