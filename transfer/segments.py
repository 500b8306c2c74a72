"""Memory segments: anonymous memory that a node agent owns and hands out as descriptors over a Unix socket.

A segment is a `memfd`: it has no name in any file system, is not limited by `/dev/shm`, and is freed with the last
process that holds it, however that process ended. Only processes of the same user that know the token have access.

    client                            server (in the node agent; one request a connection)
      create name bytes token   ->    memfd_create, or the existing one of that name and size
                                <-    ok, bytes, and the descriptor beside it
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignedserve.errors import AlignedServeError, ResourceError, TransferError, UnavailableError, by_code
from alignedserve.memory import available_memory_bytes, describe_bytes, total_memory_bytes
from alignedserve.transfer.segment import Segment, create_descriptor, require_sealed
from alignedserve.transfer.wire import connect, listen_privately, peer_of, receive_message, send_message

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
PEER_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """`resident_bytes` of `size_bytes` have been touched and take up memory."""

    name: str
    size_bytes: int
    resident_bytes: int


class SegmentServer:
    """Owns the segments of one node and hands out their descriptors.

    It serves from daemon threads, so it never blocks the event loop of its actor. All methods are thread-safe. `info`
    is data for peers to read (small, JSON), set by the owner; assign a new dict to change it.
    """

    def __init__(
        self, socket_path: str | Path, token: str, *, available_bytes: Callable[[], int] = available_memory_bytes
    ) -> None:
        self.socket_path = Path(socket_path)
        self.info: dict[str, Any] = {}
        self._token = token.encode()
        self._available_bytes = available_bytes
        self._descriptors: dict[str, int] = {}
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._expecting_until = 0.0
        self._listener: socket.socket | None = None
        self._room = threading.BoundedSemaphore(MAX_CONNECTIONS)

    def start(self) -> None:
        """Listen. Takes over a socket file that a killed server left behind.

        Raises ConfigError if the path is too long, its folder is not private to this user, or a running server uses it.
        """
        listener = listen_privately(self.socket_path)
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), name="segment-server", daemon=True).start()

    def close(self) -> None:
        """Stop serving and release every segment; idempotent.

        Memory that other processes have attached stays valid for them.
        """
        listener, self._listener = self._listener, None
        if listener is not None:
            self.socket_path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
            listener.close()
        with self._lock:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()

    def expect(self, seconds: float) -> None:
        """Expect that a predecessor's segments are adopted within `seconds`. 0.

        Nothing is expected (the initial state). Until then `create` waits before it creates a new one, and `attach`
        before it fails for a missing one.
        """
        with self._changed:
            self._expecting_until = time.monotonic() + seconds
            self._changed.notify_all()

    def create(self, name: str, size_bytes: int) -> SegmentInfo:
        """Create a segment, or keep the existing one of the same name and size. May wait (`expect`).

        Raises TransferError if the name exists with another size, ResourceError if there is not enough memory.
        """
        if not name or len(name) > 200 or size_bytes <= 0:
            raise TransferError(f"a segment needs a name and a size; got {name!r}, {size_bytes} bytes")
        with self._changed:
            self._wait_for(name)
            existing = self._descriptors.get(name)
            if existing is not None:
                held = os.fstat(existing).st_size
                if held != size_bytes:
                    raise TransferError(f"segment {name} exists with {held} bytes, not {size_bytes}", segment=name)
                return _info(name, existing)
            self._require_memory(name, size_bytes)
            try:
                descriptor = create_descriptor(name, size_bytes)
            except OSError as error:
                raise ResourceError(f"segment {name} could not be created: {error}", segment=name) from error
            self._descriptors[name] = descriptor
            return _info(name, descriptor)

    def adopt(self, name: str, descriptor: int) -> SegmentInfo:
        """Take a segment back from a process that holds it (after a restart). The caller keeps `descriptor`.

        Idempotent for the same memory. Raises TransferError if the name already has other memory.
        """
        require_sealed(descriptor, name)
        offered = os.fstat(descriptor)
        with self._changed:
            existing = self._descriptors.get(name)
            if existing is None:
                self._descriptors[name] = existing = os.dup(descriptor)
                self._changed.notify_all()
            held = os.fstat(existing)
            if (held.st_dev, held.st_ino) != (offered.st_dev, offered.st_ino):
                raise TransferError(f"segment {name} exists here with different memory", segment=name)
            return _info(name, existing)

    def drop(self, name: str) -> bool:
        """Release a segment. Returns whether there was one. The last process that has it attached frees its memory."""
        with self._lock:
            descriptor = self._descriptors.pop(name, None)
        if descriptor is not None:
            os.close(descriptor)
        return descriptor is not None

    def segments(self) -> list[SegmentInfo]:
        with self._lock:
            return [_info(name, descriptor) for name, descriptor in self._descriptors.items()]

    def attach(self, name: str) -> Segment:
        """Map a segment in this process. Raises TransferError if there is none of that name."""
        return Segment(name, self._duplicate(name))

    def _duplicate(self, name: str) -> int:
        with self._changed:
            self._wait_for(name)
            if name not in self._descriptors:
                known = ", ".join(sorted(self._descriptors)) or "none"
                raise TransferError(f"no segment is called {name} (there are: {known})", segment=name)
            return os.dup(self._descriptors[name])

    def _wait_for(self, name: str) -> None:
        """Wait while the segment may still be adopted. Call with the lock held."""
        while name not in self._descriptors and (left := self._expecting_until - time.monotonic()) > 0.0:
            self._changed.wait(left)

    def _require_memory(self, name: str, size_bytes: int) -> None:
        # Untouched memory of other segments is promised to them, though the kernel counts it as available.
        promised = 0
        for descriptor in self._descriptors.values():
            status = os.fstat(descriptor)
            promised += max(0, status.st_size - status.st_blocks * 512)
        available = max(0, self._available_bytes() - promised)
        if size_bytes > available:
            figures = [size_bytes, available, total_memory_bytes(), promised]
            asked, free, total, others = (describe_bytes(figure) for figure in figures)
            raise ResourceError(
                f"segment {name} needs {asked} of memory, but only {free} of {total} is available "
                f"(another {others} is promised to other segments): request less",
                segment=name,
                asked_bytes=size_bytes,
                available_bytes=available,
            )

    def _accept(self, listener: socket.socket) -> None:
        while True:
            self._room.acquire()
            try:
                connection, _ = listener.accept()
            except OSError as error:
                self._room.release()
                if self._listener is not listener:
                    return
                logger.warning("segment server could not accept a connection: %s", error)
                time.sleep(0.1)  # possibly out of descriptors: do not spin
                continue
            threading.Thread(target=self._serve, args=(connection,), name="segment-peer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """One request, one answer."""
        try:
            with connection:
                connection.settimeout(PEER_TIMEOUT_S)
                self._answer(connection)
        except (OSError, EOFError) as error:
            logger.debug("a peer of the segment server disconnected: %s", error)
        except AlignedServeError as error:
            logger.warning("segment server: %s", error)
        finally:
            self._room.release()

    def _answer(self, connection: socket.socket) -> None:
        peer = peer_of(connection)
        if peer.uid != os.geteuid():
            raise TransferError(f"refused process {peer.pid} of user {peer.uid}")
        body, offered = receive_message(connection)
        answered: int | None = None
        try:
            if not hmac.compare_digest(str(body.get("token", "")).encode(), self._token):
                raise TransferError(f"refused process {peer.pid}: wrong token")
            reply, answered = self._handle(body, offered)
            send_message(connection, {"ok": True, **reply}, answered)
        except AlignedServeError as error:
            logger.info("segment server refused process %d: %s", peer.pid, error)
            send_message(connection, {"ok": False, "code": error.code, "message": error.message})
        finally:
            for descriptor in (offered, answered):
                if descriptor is not None:
                    os.close(descriptor)

    def _handle(self, body: dict[str, Any], offered: int | None) -> tuple[dict[str, Any], int | None]:
        """The reply, and a descriptor to send with it, which the caller closes."""
        operation, name = body.get("op"), str(body.get("name", ""))
        if operation == "create":
            size_bytes = body.get("bytes")
            self.create(name, size_bytes if isinstance(size_bytes, int) else 0)
            return {}, self._duplicate(name)
        if operation == "attach":
            return {}, self._duplicate(name)
        if operation == "adopt":
            if offered is None:
                raise TransferError(f"adopt of segment {name} came without a descriptor", segment=name)
            self.adopt(name, offered)
            return {}, None
        if operation == "list":
            return {"segments": [[s.name, s.size_bytes, s.resident_bytes] for s in self.segments()]}, None
        if operation == "info":
            return {"info": self.info}, None
        raise TransferError(f"the segment server does not know the operation {operation!r}")


class SegmentClient:
    """The client of a SegmentServer. Blocking calls, one connection each, so that it also reaches a restarted server.

    Every call raises UnavailableError if the server does not answer within `timeout_s`, TransferError if it refuses,
    ResourceError if there is not enough memory. Thread-safe.
    """

    def __init__(self, socket_path: str | Path, token: str, *, timeout_s: float = 5.0) -> None:
        self.socket_path = str(socket_path)
        self._token = token
        self._timeout_s = timeout_s
        self._mapped: weakref.WeakSet[Segment] = weakref.WeakSet()

    def create(self, name: str, size_bytes: int) -> Segment:
        """Create the segment, or take the existing one of that name and size, and map it."""
        _, descriptor = self._call({"op": "create", "name": name, "bytes": size_bytes})
        return self._map(name, descriptor)

    def attach(self, name: str) -> Segment:
        _, descriptor = self._call({"op": "attach", "name": name})
        return self._map(name, descriptor)

    def adopt(self, segment: Segment) -> None:
        """Return a segment that this process holds to a restarted server."""
        if segment.closed:
            raise TransferError(f"segment {segment.name} is closed", segment=segment.name)
        self._call({"op": "adopt", "name": segment.name}, segment.descriptor)

    def adopt_all(self) -> list[str]:
        """Return to a restarted server every segment that was mapped through this client and is still open.

        Returns the names under which the server has other memory by now: those segments must be attached again, and not
        be used.
        """
        refused = []
        for segment in [segment for segment in self._mapped if not segment.closed]:
            try:
                self.adopt(segment)
            except TransferError as error:
                logger.warning("the node agent did not take segment %s back: %s", segment.name, error)
                refused.append(segment.name)
        return refused

    def segments(self) -> list[SegmentInfo]:
        reply, _ = self._call({"op": "list"})
        return [SegmentInfo(name, size, resident) for name, size, resident in reply["segments"]]

    def info(self) -> dict[str, Any]:
        """The value of `SegmentServer.info`, set by the server's owner."""
        reply, _ = self._call({"op": "info"})
        return dict(reply["info"])

    def _map(self, name: str, descriptor: int | None) -> Segment:
        if descriptor is None:
            raise TransferError(f"the server sent no descriptor for segment {name}", segment=name)
        try:
            segment = Segment(name, descriptor)
        except (OSError, ValueError) as error:
            raise TransferError(f"segment {name} could not be mapped: {error}", segment=name) from error
        self._mapped.add(segment)
        return segment

    def _call(self, body: dict[str, Any], descriptor: int | None = None) -> tuple[dict[str, Any], int | None]:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(self._timeout_s)
                connect(connection, self.socket_path, self._timeout_s)
                send_message(connection, {**body, "token": self._token}, descriptor)
                reply, received = receive_message(connection)
        except (OSError, EOFError) as error:
            raise UnavailableError(f"the node agent at {self.socket_path} does not answer: {error!r}") from error
        if not reply.get("ok"):
            raise by_code(str(reply.get("code")))(str(reply.get("message")))
        return reply, received


def _info(name: str, descriptor: int) -> SegmentInfo:
    status = os.fstat(descriptor)
    return SegmentInfo(name, status.st_size, status.st_blocks * 512)
