"""Starts the processes that have an instance's ranks on further nodes (`rank_host/`). They end with the instance."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from alignedserve import logs
from alignedserve.config_sources import from_tree
from alignedserve.control.runtime import RoleSettings
from alignedserve.errors import UnavailableError

MODULE = "alignedserve.cluster.launch.rank_host_main"


@dataclass(slots=True)
class PlainRankHost:
    """One that is a plain child process."""

    settings: RoleSettings
    process: asyncio.subprocess.Process
    address: str

    async def end(self) -> None:
        """Kill it, and wait for it. Its ranks end with it."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


async def start_rank_host(settings: RoleSettings, environment: Mapping[str, str], output: int | None) -> PlainRankHost:
    """As a child process, which ends when this one does. Raises UnavailableError if it does not serve in time."""
    limit_s = from_tree(settings.config).supervisor.start_timeout_s
    reading, writing = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            MODULE,
            str(writing),
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=environment,
            pass_fds=[writing],
            start_new_session=True,
        )
    finally:
        os.close(writing)
    assert process.stdin is not None
    with os.fdopen(reading, "rb") as told:
        try:
            process.stdin.write(json.dumps(settings.to_dict()).encode() + b"\n")
            async with asyncio.timeout(limit_s):
                address = (await asyncio.to_thread(told.readline)).decode().strip()
        except BaseException as error:  # also if the start is cancelled
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            if not isinstance(error, OSError | TimeoutError):
                raise
            raise UnavailableError(f"{settings.id} does not serve within {limit_s:g} s: {error!r}") from error
    if not address:
        raise UnavailableError(f"{settings.id} could not be started: its process has ended")
    return PlainRankHost(settings, process, address)


async def host(settings: RoleSettings, on_address: Any) -> None:
    """Run the process from start to end, with its log."""
    from alignedserve.rank_host.actor import host_ranks  # imports torch

    logs.setup(from_tree(settings.config).log, "rank_host", settings.id)
    await host_ranks(settings, on_address)
