"""How ranks find each other: by values in a file that has no name, or that the process of rank 0 passes on to the other
nodes. On a node those go over the channel of each rank to its parent, so that no port has to be open for them.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch.distributed

from alignedserve.errors import RankLostError, TransferError
from alignedserve.transfer.paired.rendezvous import Rendezvous

MESSAGE_BYTES = 1 << 17
_SET, _GET = "set", "get"
_dist: Any = torch.distributed  # untyped


class FileValues:
    """Those of the ranks of one node, in a file that all can open."""

    def __init__(self, path: str, ranks: int, timeout_s: float) -> None:
        self.store: Any = _dist.FileStore(path, ranks)
        self.store.set_timeout(timedelta(seconds=timeout_s))

    def set(self, key: str, value: bytes) -> None:
        self.store.set(key, value)

    def get(self, key: str, timeout_s: float) -> bytes:
        self.store.wait([key], timedelta(seconds=timeout_s))
        return bytes(self.store.get(key))


class AskedValues:
    """The values of a rank that is not the first of its node: it asks its parent, which answers over `RankChannel`."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def set(self, key: str, value: bytes) -> None:
        self._send({_SET: key, "value": value.hex()})

    def get(self, key: str, timeout_s: float) -> bytes:
        """Raises TransferError. The parent limits the time."""
        self._send({_GET: key})
        told = json.loads(self._channel.recv(MESSAGE_BYTES) or b"{}")
        if "value" not in told:
            raise TransferError(f"the other ranks did not connect: {told.get('error', 'the first one has ended')}")
        return bytes.fromhex(told["value"])

    def _send(self, message: dict[str, str]) -> None:
        self._channel.send(json.dumps(message).encode())


class RankChannel:
    """The parent's end of a rank's channel: gives it the values that it asks for, and keeps the rest for `told`."""

    def __init__(self, channel: socket.socket, values: Rendezvous | None, timeout_s: float) -> None:
        """`values`: of ranks of several nodes; None: there are no others. `timeout_s`: how long it may wait for one."""
        self._channel, self._timeout_s = channel, timeout_s
        self._said: SimpleQueue[bytes | OSError] | None = None
        if values is not None:
            self._said = SimpleQueue()
            name = f"rank-values-{channel.fileno()}"
            threading.Thread(target=self._serve, args=(values, self._said), name=name, daemon=True).start()

    def told(self, timeout_s: float | None) -> dict[str, Any]:
        """The next message of the rank that is about more than values. Raises RankLostError if there is none."""
        try:
            if self._said is None:
                self._channel.settimeout(timeout_s)
                message: bytes | OSError = self._channel.recv(MESSAGE_BYTES)
            else:
                message = self._said.get(timeout=timeout_s)
            if isinstance(message, OSError):
                raise message
            found: dict[str, Any] = json.loads(message)
        except Exception as error:  # a timeout, a closed channel, or no message
            raise RankLostError(f"it does not say what it holds: {error!r}") from error
        return found

    def send(self, message: dict[str, Any], descriptors: list[int]) -> None:
        """Raises OSError if the rank has ended."""
        socket.send_fds(self._channel, [json.dumps(message).encode()], descriptors)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the rank has ended
            self._channel.shutdown(socket.SHUT_RDWR)  # also where a thread still reads
        self._channel.close()

    def _serve(self, values: Rendezvous, said: SimpleQueue[bytes | OSError]) -> None:
        """Until the rank says something else, which it does once: then it needs no more values."""
        try:
            while True:
                message = self._channel.recv(MESSAGE_BYTES)
                asked = json.loads(message) if message else {}
                if _SET in asked:
                    values.set(asked[_SET], bytes.fromhex(asked["value"]))
                elif _GET in asked:
                    self._channel.send(json.dumps(self._answer(values, asked[_GET])).encode())
                else:
                    said.put(message)
                    return
        except OSError as error:
            said.put(error)

    def _answer(self, values: Rendezvous, key: str) -> dict[str, str]:
        try:
            return {"value": values.get(key, self._timeout_s).hex()}
        except TransferError as error:
            return {"error": error.message}
