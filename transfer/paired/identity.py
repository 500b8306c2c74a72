"""Protection of Gloo's and UCX's connections against other processes (docs/adr/0041).

Both listen on the node's addresses without authentication. Gloo takes the first process that connects for the peer. It
also keeps every further connection open, and ends the process when there are too many.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import hmac
import logging
import socket
import struct
from collections.abc import Collection, Iterator
from pathlib import Path

from alignedserve.errors import TransferError

logger = logging.getLogger(__name__)

SECRET_BYTES = PROOF_BYTES = 32
_SO_ATTACH_FILTER = 26
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_RETURN_NOTHING = struct.pack("=HBBI", 0x06, 0, 0, 0)  # a classic BPF program: drop the packet


def proof(secret: bytes, name: str, rank: int) -> bytes:
    """The proof sent by the end of this rank over the connection `name`; the secret came over the pair's stream."""
    return hmac.digest(secret, f"{name} {rank}".encode(), hashlib.sha256)


def check_proof(shown: bytes, secret: bytes, name: str, rank: int) -> None:
    """Raises TransferError if another process has connected."""
    if not hmac.compare_digest(shown, proof(secret, name, rank)):
        raise TransferError(f"the process that connected for {name} is not the other process of this pair")


def close_door(address: bytes) -> bool:
    """Make the kernel drop new connections to a listening socket of this process; open connections are kept.

    `address`: bytes that contain the socket's address in the kernel's form. Returns whether there was such a socket. It
    is not closed, since Gloo continues to accept on it and would end the process.
    """
    for listener in _listeners():
        if _kernel_address(listener) in address:
            _drop_all(listener)
            return True
    return False


def listening() -> set[tuple[str, int]]:
    """Addresses at which this process listens."""
    return {listener.getsockname()[:2] for listener in _listeners()}


def close_new_doors(before: Collection[tuple[str, int]], description: bytes) -> bool:
    """As `close_door`, for each listening socket that was not there `before`, and whose port is in the `description`.

    Other threads open sockets, too: a port that the description does not contain is one of these.
    """
    closed = False
    for listener in _listeners():
        address = listener.getsockname()[:2]
        if address not in before and struct.pack("!H", address[1]) in description:
            _drop_all(listener)
            closed = True
    return closed


def _listeners() -> Iterator[socket.socket]:
    """The listening sockets of this process, each borrowed until the next one."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), _borrowed(int(entry.name)) as listener:
            if listener.family in _FAMILIES and listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield listener


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """Use a descriptor that another owner holds. It is not duplicated.

    A duplicate would keep a socket that Gloo closes in its epoll.
    """
    found = socket.socket(fileno=descriptor)
    try:
        yield found
    finally:
        found.detach()


def _kernel_address(listener: socket.socket) -> bytes:
    """The beginning of its sockaddr: family, port and address."""
    host, port = listener.getsockname()[:2]
    family = struct.pack("=H", listener.family) + struct.pack("!H", port)
    if listener.family == socket.AF_INET6:
        return family + bytes(4) + socket.inet_pton(socket.AF_INET6, host)
    return family + socket.inet_pton(socket.AF_INET, host)


def _drop_all(listener: socket.socket) -> None:
    program = ctypes.create_string_buffer(_RETURN_NOTHING, len(_RETURN_NOTHING))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))
