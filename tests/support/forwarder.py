"""A TCP forwarder between a client and servers. A test can break its connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Sequence
from types import TracebackType
from typing import Self

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER


class Forwarder:
    """Listens on `address`. Each connection goes to the first of `targets` that accepts it. Use as a context."""

    def __init__(self, targets: Sequence[str]) -> None:
        self.targets = list(targets)
        self.address = ""
        self.accepted = 0
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._flows = asyncio.Event()
        self._flows.set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        self._flows.set()
        await asyncio.sleep(0)

    def cut(self) -> int:
        """Break every connection in both directions. Returns how many were open."""
        open_now = len(self._open) // 2
        for writer in list(self._open):
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            writer.transport.abort()
        self._open.clear()
        return open_now

    def freeze(self) -> None:
        """From now on forward nothing and close nothing, as in a network partition."""
        self._flows.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        for target in self.targets:
            host, _, port = target.rpartition(":")
            try:
                there, back = await asyncio.open_connection(host, int(port))
            except OSError:
                continue
            self._open |= {writer, back}
            await asyncio.gather(self._copy(reader, back), self._copy(there, writer))
            return
        writer.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
        self._open.discard(writer)
        writer.transport.abort()
