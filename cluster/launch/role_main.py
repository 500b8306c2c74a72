"""Runs a role as a plain process. The first line of stdin has its settings as JSON; later lines are messages.

A message has `supervisor_address`, the supervisor's new address (with `leave`: connect to it at once), or `assume`, the
settings of the role that a spare takes.

`python -m alignedserve.cluster.launch.role_main` ends when its role ends, on SIGTERM, and when stdin closes. A closed
stdin means that its launcher has ended, and no process may outlive the launcher.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from alignedserve import logs
from alignedserve.cancellation import end_tasks
from alignedserve.cluster.launch.spare import SpareServer
from alignedserve.cluster.node.supervisor_guard import guard_supervisor
from alignedserve.cluster.supervisor.plan import MODEL_ROLES
from alignedserve.control.runtime import RoleServer, RoleSettings, new_role
from alignedserve.errors import UnavailableError
from alignedserve.ranks import forks


async def host_role(role: RoleServer) -> None:
    """Run a role from start to end. A node agent guards the supervisor by itself."""
    guarding = [] if role.role == "node_agent" else [asyncio.get_running_loop().create_task(guard_supervisor(role))]
    try:
        logs.setup(role.config.log, role.role, role.settings.id)
        await role.start()
        await role.wait()
    finally:
        await end_tasks(guarding)
        await role.close()


class Seat:
    """Runs the role of a process: the role it was started with or, for a spare, the role that it was given."""

    def __init__(self, settings: RoleSettings, make: Callable[[RoleSettings], RoleServer]) -> None:
        self.settings = settings  # of `role`
        self.role = make(settings)  # the first role, or the one that a spare has taken
        self._make = make  # creates a role
        # The role that a spare is to take; done from `assume` on.
        self._given: asyncio.Future[RoleSettings] = asyncio.get_running_loop().create_future()

    def assume(self, settings: RoleSettings) -> None:
        """Take this role. Raises UnavailableError if the process is not a free spare."""
        if not isinstance(self.role, SpareServer) or self._given.done():
            raise UnavailableError(f"this process is {self.settings.id}, and cannot become {settings.id}")
        self._given.set_result(settings)

    async def run(self) -> None:
        """Returns when the role has ended."""
        loop = asyncio.get_running_loop()
        hosted = [loop.create_task(host_role(self.role))]
        try:
            first: list[asyncio.Future[Any]] = [hosted[0], self._given]
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if self._given.done() and isinstance(spare := self.role, SpareServer):
                self.settings = self._given.result()
                self.role = self._make(self.settings)
                hosted.append(loop.create_task(host_role(self.role)))
                spare.leave()
                if self.settings.role not in MODEL_ROLES:
                    await asyncio.to_thread(forks.release)
            await asyncio.gather(*hosted)
        finally:
            for task in hosted:
                task.cancel()
            await asyncio.gather(*hosted, return_exceptions=True)


async def _main() -> None:
    lines = await _stdin()
    seat = Seat(RoleSettings(**json.loads(await lines.readline())), new_role)
    loop = asyncio.get_running_loop()
    running = loop.create_task(seat.run())
    ends = [running, loop.create_task(_follow(lines, seat))]
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


async def _follow(lines: asyncio.StreamReader, seat: Seat) -> None:
    """Handle messages of the launcher until it has ended."""
    while line := await lines.readline():
        said = json.loads(line)
        if "assume" in said:
            seat.assume(RoleSettings(**said["assume"]))
        else:
            follow = seat.role.leave_for if said["leave"] else seat.role.set_supervisor
            follow(said["supervisor_address"])


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
    # Threads of the engine or of a native library must not delay the end of the process.
    os._exit(status)


if __name__ == "__main__":
    main()
