"""Starts a Ray worker through its node's fork server; without it if that does not answer.

Ray runs `python -I -S fork_client.py SOCKET default_worker.py ARGUMENT...` (`py_executable` of a runtime environment).
So this file imports nothing but a few modules of Python.
"""

import json
import os
import select
import socket
import struct
import sys
import time

WAIT_S = 20.0  # the server may still import; Ray waits for a minute
LOOK_S = 0.2
REPLY_BYTES = 32
_UCRED = struct.Struct("iII")


def forked(path: str, command: list[str]) -> bool:
    """Whether the fork server at the socket `path` runs this command."""
    until = time.monotonic() + WAIT_S
    try:
        order = {"command": command, "environment": dict(os.environ), "directory": os.getcwd()}
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            server.settimeout(WAIT_S)
            server.connect(path)
            pid, _, _ = _UCRED.unpack(server.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
            socket.send_fds(server, [json.dumps(order).encode()], [0, 1, 2])
            while not select.select([server], [], [], LOOK_S)[0]:
                if _is_stopped(pid) or time.monotonic() > until:
                    return False
            if not server.recv(REPLY_BYTES):
                return False
            server.send(b"go")
    except Exception:  # whatever it is, the worker has to start
        return False
    return True


def _is_stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat", "rb") as stat:
        return stat.read().rpartition(b")")[2].split()[0] in (b"T", b"t")


if __name__ == "__main__":
    if not forked(sys.argv[1], sys.argv[2:]):
        os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
