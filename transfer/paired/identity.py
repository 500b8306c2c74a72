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

Address = tuple[str, int]  # host and port

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
    for listener, own in _listeners():
        if _kernel_address(listener.family, own) in address:
            _drop_all(listener)
            return True
    return False


def listening() -> set[Address]:
    """Addresses at which this process listens."""
    return {own for _, own in _listeners()}


def close_new_doors(new: Collection[Address], description: bytes) -> bool:
    """As `close_door`, for each listening socket with an address in `new`, and whose port is in the `description`.

    Other threads open sockets, too: a port that the description does not contain is one of these.
    """
    closed = False
    for listener, own in _listeners():
        if own in new and struct.pack("!H", own[1]) in description:
            _drop_all(listener)
            closed = True
    return closed


def _listeners() -> Iterator[tuple[socket.socket, Address]]:
    """The listening sockets of this process, each borrowed until the next one, and its address."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), _borrowed(int(entry.name)) as listener:
            if listener.family in _FAMILIES and listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield listener, listener.getsockname()[:2]


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


def _kernel_address(family: int, address: Address) -> bytes:
    """The beginning of its sockaddr: family, port and address."""
    host, port = address
    begin = struct.pack("=H", family) + struct.pack("!H", port)
    return begin + (bytes(4) if family == socket.AF_INET6 else b"") + socket.inet_pton(family, host)


def _drop_all(listener: socket.socket) -> None:
    program = ctypes.create_string_buffer(_RETURN_NOTHING, len(_RETURN_NOTHING))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))
