"""A role as a plain process: settings as JSON on the first line of stdin, the supervisor's address on later ones.

`python -m alignedserve.cluster.role_main` ends when the role does, on SIGTERM, and when stdin closes: its launcher is
gone then, and nobody is to be left behind.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

from alignedserve.control.runtime import RoleServer, RoleSettings, new_role


async def host_role(role: RoleServer) -> None:
    """Run a role from its start to its end."""
    try:
        await role.start()
        await role.wait()
    finally:
        await role.close()


async def _main() -> None:
    lines = await _stdin()
    settings = RoleSettings(**json.loads(await lines.readline()))
    role = new_role(settings)
    loop = asyncio.get_running_loop()
    running = loop.create_task(host_role(role))
    ends = [running, loop.create_task(_follow(lines, role))]
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ends[1].cancel)
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for task in ends:
        task.cancel()
    await asyncio.wait(ends, timeout=5.0)
    if running.done() and not running.cancelled() and (error := running.exception()) is not None:
        raise error


async def _stdin() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def _follow(lines: asyncio.StreamReader, role: RoleServer) -> None:
    """Takes in where the supervisor is now; returns when the launcher is gone."""
    while line := await lines.readline():
        if hasattr(role, "set_supervisor"):
            role.set_supervisor(json.loads(line)["supervisor_address"])


def main() -> None:
    try:
        asyncio.run(_main())
    except BaseException:
        import traceback

        traceback.print_exc()
        status = 1
    else:
        status = 0
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of the engine or of a native library must not hold up the end of a process whose role is over.
    os._exit(status)


if __name__ == "__main__":
    main()
