"""Private Unix sockets and their messages: four bytes of length, JSON, and at most one descriptor."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignedserve.errors import ConfigError, TransferError

LENGTH = struct.Struct("!I")
PEER_CREDENTIALS = struct.Struct("3i")
MAX_MESSAGE_BYTES = 1 << 20
MAX_SOCKET_PATH_BYTES = 107  # sockaddr_un


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end, according to the kernel (SO_PEERCRED)."""

    pid: int
    uid: int


def peer_of(connection: socket.socket) -> Peer:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CREDENTIALS.size)
    pid, uid, _ = PEER_CREDENTIALS.unpack(raw)
    return Peer(pid, uid)


def send_message(connection: socket.socket, body: dict[str, Any], descriptor: int | None = None) -> None:
    """Send `body`; `descriptor` stays open here. Raises OSError."""
    payload = json.dumps(body).encode()
    data = LENGTH.pack(len(payload)) + payload
    # The descriptor is sent with the first byte, so the rest of the data needs no descriptor.
    sent = connection.send(data) if descriptor is None else socket.send_fds(connection, [data], [descriptor])
    if sent < len(data):
        connection.sendall(data[sent:])


def receive_message(connection: socket.socket) -> tuple[dict[str, Any], int | None]:
    """The next message and its descriptor, which the caller closes.

    Raises EOFError if the peer has closed, TransferError for a malformed message, OSError (including TimeoutError).
    """
    held: list[int] = []
    try:
        (length,) = LENGTH.unpack(_receive(connection, LENGTH.size, held))
        if length > MAX_MESSAGE_BYTES:
            raise TransferError(f"a message of {length} bytes is over the limit of {MAX_MESSAGE_BYTES}")
        try:
            body = json.loads(_receive(connection, length, held))
        except ValueError as error:
            raise TransferError(f"a message is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise TransferError("a message is not a JSON object")
        return body, held.pop(0) if held else None
    finally:
        for descriptor in held:  # all of them after an error, else the unrequested ones beyond the first
            os.close(descriptor)


def _receive(connection: socket.socket, count: int, held: list[int]) -> bytes:
    """Exactly `count` bytes; descriptors that come with them are appended to `held`."""
    parts = []
    while count:
        data, descriptors, _, _ = socket.recv_fds(connection, count, 4, socket.MSG_CMSG_CLOEXEC)
        held.extend(descriptors)
        if not data:
            raise EOFError("the peer closed the connection")
        parts.append(data)
        count -= len(data)
    return b"".join(parts)


def listen_privately(path: Path) -> socket.socket:
    """A listening socket, mode 0600 in a private folder. Takes over a file that a killed server left behind.

    Raises ConfigError if the path is too long, its folder is not private to this user, or a running server uses it.
    """
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(f"socket path {path} is over {MAX_SOCKET_PATH_BYTES} bytes: use a shorter one")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.parent.stat()
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(f"folder {path.parent} must belong to this user and be closed to others (chmod 700)")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _locked(path.parent):
            _remove_stale(path)
            listener.bind(str(path))
            os.chmod(path, 0o600)
            listener.listen(128)
    except BaseException:
        listener.close()
        raise
    return listener


def connect(connection: socket.socket, path: str, timeout_s: float) -> None:
    """Connect; a Unix socket with a full queue returns "try again" instead of waiting, so it is retried.

    Raises OSError.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return connection.connect(path)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """A lock for servers that start at the same time, so that they check stale sockets in turn. Leaves no lock file."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_stale(path: Path) -> None:
    """Remove a socket file without a listener. Raises ConfigError if a process listens on it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:
            pass  # its queue is full: the server is running
    raise ConfigError(f"another process already serves {path}")
