"""Measures the time of a message between two processes, over a stream like those between roles.

`measure_message_s` starts `python -m alignedserve.control.echo ADDRESS`, with the token on standard input. That process
sends messages and receives them back.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from alignedserve.control.link import DuplexLink, Outbox, serve_stream
from alignedserve.control.rpc import RpcServer, open_channel
from alignedserve.errors import UnavailableError

MESSAGES = 200
BYTES = 256
EVERY_S = 0.005  # pause between messages, so that both processes sleep in between, as in a cluster
_SERVICE, _METHOD = "alignedserve.Echo", "Echo"
_LONGEST_S = 60.0


async def measure_message_s(token: str) -> float:
    """The median time of a message one way, in seconds, between otherwise idle processes.

    Raises UnavailableError if the other process fails.
    """
    server = RpcServer(token)
    server.add(_register, _echo)
    address = await server.start()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, address, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(_LONGEST_S):
            output, _ = await process.communicate(token.encode())
    except TimeoutError:
        raise UnavailableError(f"{MESSAGES} messages did not come back within {_LONGEST_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await server.stop()
    if process.returncode:
        raise UnavailableError(f"the process that sends messages ended with status {process.returncode}")
    both_ways_s: list[float] = json.loads(output)
    return statistics.median(both_ways_s) / 2


async def _echo(requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
    outbox: Outbox[bytes] = Outbox()
    async for message in serve_stream(requests, outbox, outbox.put):
        yield message


def _register(servicer: Any, server: Any) -> None:
    handlers = {_METHOD: grpc.stream_stream_rpc_method_handler(servicer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))


async def _send(address: str, token: str) -> list[float]:
    """The round-trip time of each message in seconds."""
    channel = open_channel(address, token)
    back: asyncio.Queue[bytes] = asyncio.Queue()
    call = channel.stream_stream(f"/{_SERVICE}/{_METHOD}")
    link: DuplexLink[bytes, bytes] = DuplexLink(call, back.put_nowait, lambda: (b"first",), reconnect=False)
    link.start()
    await back.get()
    seconds = []
    for _ in range(MESSAGES):
        begun_s = time.perf_counter()
        link.send(bytes(BYTES))
        await back.get()
        seconds.append(time.perf_counter() - begun_s)
        await asyncio.sleep(EVERY_S)
    await link.close()
    await channel.close()
    return seconds


if __name__ == "__main__":
    json.dump(asyncio.run(_send(sys.argv[1], sys.stdin.read())), sys.stdout)
