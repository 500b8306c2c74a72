"""The real roles, whose shards answer no reads while a test makes them wait. Prefill instances read every candidate.

`python -m support.slow_reads` is `role_main` with them. `SLOW_READS_FOLDER` in the environment names a folder: while
there is a file `wait` in it, no `KvPool.Read` is answered, and each shard that got one writes a file `read-<pid>`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from alignedserve.cluster.launch import role_main
from alignedserve.control import runtime
from alignedserve.control.runtime import RoleServer, RoleSettings

FOLDER = "SLOW_READS_FOLDER"


def _always_read() -> None:
    from alignedserve.kv_pool.stored import LastCommitted

    LastCommitted.take = lambda self, request: None  # type: ignore[method-assign]


def _install() -> None:
    from alignedserve.kv_pool.actor import KvPoolServer

    folder, read = Path(os.environ[FOLDER]), KvPoolServer.Read

    async def slow(self: KvPoolServer, request: Any, context: Any) -> AsyncIterator[Any]:
        while (folder / "wait").exists():
            (folder / f"read-{os.getpid()}").touch()
            await asyncio.sleep(0.02)
        async for answer in read(self, request, context):
            yield answer

    KvPoolServer.Read = slow  # type: ignore[method-assign]


def _new_role(settings: RoleSettings) -> RoleServer:
    if settings.role == "kv_pool":
        _install()
    elif settings.role == "prefill":
        _always_read()
    return runtime.new_role(settings)


if __name__ == "__main__":
    role_main.new_role = _new_role  # type: ignore[attr-defined]
    role_main.main()
