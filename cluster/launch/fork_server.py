"""Forks Ray workers from a process that has imported what an instance needs: a start takes one second instead of six.

`python -m alignedserve.cluster.launch.fork_server SOCKET MODULE...` imports the modules, says so on stdout, then serves
`fork_client` on SOCKET until its stdin closes. It runs one per node, as a child of the node agent's process.

Whatever a child could not share makes the server end, and `fork_client` starts its worker without it: threads and
CUDA's state do not survive a fork, and a module whose file has changed is out of date.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from alignedserve.ranks import forks

ORDER_BYTES = 1 << 18
ORDER_WAIT_S = 1.0
UNSUITABLE = 3  # exit status: another fork server would not be able to fork, either
GO = b"go"
NEW = "~"  # of the path while the socket cannot be connected to yet
_UCRED = struct.Struct("iII")
_CUDA_ERROR_NOT_INITIALIZED = 3  # cuda.h


def import_all(modules: Iterable[str]) -> None:
    """Import modules, and exempt them from garbage collection, so that children share their memory."""
    gc.disable()
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.enable()


def unsuitable() -> str:
    """Why this process cannot be forked; "" if it can."""
    threads = sorted(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))
    if len(threads) > 1:
        return f"an import has started threads: {', '.join(threads)}"
    if "libcuda.so" in Path("/proc/self/maps").read_text():
        status = ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
        if status != _CUDA_ERROR_NOT_INITIALIZED:
            return "an import has initialised CUDA"
    return _tried()


def _tried() -> str:
    """What is wrong with a child of this process; "" if nothing is."""
    pid = os.fork()
    if pid == 0:
        bad = 1
        try:
            torch = sys.modules.get("torch")
            bad = int(torch is not None and torch.cuda._is_in_bad_fork())
        finally:
            os._exit(bad)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return f"a child of it cannot use torch (status {status})" if status else ""


def become(module: str, arguments: Sequence[str], environment: Mapping[str, str], streams: Sequence[int]) -> NoReturn:
    """Run a module as `python -m` would, or a file whose name ends with `.py`, in a session of its own.

    `streams`: descriptors of stdin, stdout and stderr, which are closed.
    """
    status = 1
    try:
        os.setsid()
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
        for descriptor in streams:
            os.close(descriptor)
        # Closing one of these objects, when it is replaced, must not close the descriptor.
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = [module, *arguments]
        forks.prepare(int(environment.get(forks.RANKS_VARIABLE, "0")))
        if module.endswith(".py"):
            runpy.run_path(module, run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # what ran may have closed or replaced it
                stream.flush()
        os._exit(status)


Stamps = dict[str, tuple[int, int]]


def _stamps() -> Stamps:
    """When the files of all imported modules were written and replaced last, in nanoseconds of Unix time."""
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    found = {}
    for file in files:
        if file is not None:
            with contextlib.suppress(OSError):
                status = os.stat(file)
                found[file] = (status.st_mtime_ns, status.st_ctime_ns)
    return found


def _may_order(client: socket.socket) -> bool:
    _, user, _ = _UCRED.unpack(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return bool(user == os.geteuid())


def _answer(listener: socket.socket, client: socket.socket) -> None:
    """Fork a child for this client."""
    client.settimeout(ORDER_WAIT_S)
    try:
        order, streams, _, _ = socket.recv_fds(client, ORDER_BYTES, 3)
    except OSError:
        return
    if order and len(streams) == 3 and _may_order(client) and os.fork() == 0:
        try:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _obey(client, json.loads(order), streams)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)  # the server's own end is not the child's
    for descriptor in streams:
        os.close(descriptor)


def _obey(client: socket.socket, order: Mapping[str, Any], streams: Sequence[int]) -> NoReturn:
    """The client starts the worker itself unless it hears from this child, and this child does nothing without GO. So
    there is never a second worker."""
    with client:
        client.settimeout(None)
        client.send(b"%d" % os.getpid())
        if client.recv(len(GO)) != GO:
            os._exit(0)
    with contextlib.suppress(OSError):  # the folder may have been removed
        os.chdir(order["directory"])
    module, *arguments = order["command"]
    become(module, arguments, order["environment"], streams)


def serve(listener: socket.socket, stamps: Stamps) -> None:
    """Returns when stdin closes, or when an imported file has changed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
    while True:
        ready, _, _ = select.select([listener.fileno(), sys.stdin.fileno()], [], [])
        if sys.stdin.fileno() in ready:
            return
        with listener.accept()[0] as client:
            if _stamps() != stamps:
                print("a file that this fork server has imported has changed", file=sys.stderr, flush=True)
                return
            _answer(listener, client)


def main() -> None:
    path, *modules = sys.argv[1:]
    begun_ns = time.time_ns()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        new = f"{path}{NEW}"
        Path(new).unlink(missing_ok=True)
        listener.bind(new)
        listener.listen(64)  # clients wait while this process imports
        own = os.stat(new).st_ino
        os.rename(new, path)
        try:
            import_all(modules)
            if why := unsuitable():
                print(f"this fork server cannot fork: {why}", file=sys.stderr, flush=True)
                sys.exit(UNSUITABLE)
            stamps = _stamps()
            if any(begun_ns < replaced_ns <= time.time_ns() for _, replaced_ns in stamps.values()):
                print("files were replaced while this fork server imported them", file=sys.stderr, flush=True)
                return
            os.write(1, b"ready\n")  # at once: this process may be stopped at any moment
            os.dup2(2, 1)
            serve(listener, stamps)
        finally:
            with contextlib.suppress(OSError):  # another server may have taken the path
                if os.stat(path).st_ino == own:
                    Path(path).unlink()


if __name__ == "__main__":
    main()
