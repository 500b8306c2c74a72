"""A gateway without Ray in a separate process, for a LocalCluster. A test can kill it and read its counters."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from alignedserve.cluster.local import LocalCluster
from alignedserve.gateway.standalone import StandaloneGateway
from support.fork_server import ForkedProcess, fork_process
from support.gateway import joined_gateway

_READY_WITHIN_S = 60.0
_END_WITHIN_S = 10.0


class GatewayProcess:
    """`async with GatewayProcess(cluster, "gateway-0") as gateway` starts it and waits until it is ready."""

    def __init__(self, cluster: LocalCluster, gateway_id: str, batches: Mapping[str, Any] | None = None) -> None:
        """`batches`: settings of the section of this name, for this gateway only."""
        self.id = gateway_id
        self.url = ""
        self.grpc_address = ""
        told = cluster.join_info()
        self._orders = {**told, "config": {**told["config"], "batches": dict(batches or {})}, "id": gateway_id}
        self._process: ForkedProcess | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    async def __aenter__(self) -> Self:
        reader, writer = os.pipe()
        with os.fdopen(reader, "rb") as told:
            try:
                self._process = await fork_process("gateway", __name__, os.environ, writer, 2)
            finally:
                os.close(writer)
            try:
                self._process.stdin.write(json.dumps(self._orders).encode() + b"\n")
                async with asyncio.timeout(_READY_WITHIN_S):
                    ports = json.loads(await asyncio.to_thread(told.readline))
            except BaseException:
                await self._end()
                raise
        self.url = f"http://127.0.0.1:{ports['port']}"
        self.grpc_address = f"127.0.0.1:{ports['grpc_port']}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    async def _end(self) -> None:
        process = self._process
        assert process is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), _END_WITHIN_S)
        except TimeoutError:
            process.kill()
            await process.wait()


async def _serve(orders: dict[str, Any]) -> None:
    async with (
        joined_gateway(orders, gateway_id=orders["id"], wait_s=_READY_WITHIN_S) as server,
        StandaloneGateway(server) as listening,
    ):
        while not server.scheduler.up:  # noqa: ASYNC110  # there is no event for this
            await asyncio.sleep(0.01)
        print(json.dumps({"port": listening.port, "grpc_port": listening.grpc_port}), flush=True)
        await asyncio.to_thread(sys.stdin.read)  # until the parent closes it, or ends


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(json.loads(sys.stdin.readline())))
