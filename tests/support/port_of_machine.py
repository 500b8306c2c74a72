"""`python -m support.port_of_machine SOCKET PORT`: forwards a Unix socket to the port."""

from __future__ import annotations

import asyncio
import contextlib
import sys


async def forward(path: str, port: int) -> None:
    """Serves until the process ends. A connection is closed if no process listens on the port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_copy(reader, back), _copy(there, writer))

    async with await asyncio.start_unix_server(serve, path) as server:
        await server.serve_forever()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


if __name__ == "__main__":
    asyncio.run(forward(sys.argv[1], int(sys.argv[2])))
