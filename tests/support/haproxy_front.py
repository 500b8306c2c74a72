"""Starts HAProxy as `alignedserve serve` does, with Ray Serve's configuration, for gateways without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from alignedserve.cluster.serve import haproxy, haproxy_exec
from alignedserve.config import Config

_READY_WITHIN_S = 30.0
SERVICERS = ["alignedserve.proto.inference_pb2_grpc.add_InferenceServicer_to_server"]


class HaProxyFront:
    """`async with HaProxyFront([url, ...], [grpc_address, ...]) as front` forwards to these addresses.
    `variables` are Ray Serve's variables, instead of those that `alignedserve serve` sets."""

    def __init__(
        self,
        urls: Sequence[str],
        grpc_addresses: Sequence[str] = (),
        config: Config | None = None,
        variables: dict[str, str] | None = None,
    ) -> None:
        self._config = config or Config()
        self._variables = variables or {}
        self.port, self.grpc_port = haproxy.free_ports(2)
        self.url, self.grpc_address = f"http://127.0.0.1:{self.port}", f"127.0.0.1:{self.grpc_port}"
        self.live_url = ""
        self._orders = {
            "http": [url.rpartition(":")[2] for url in urls],
            "grpc": [address.rpartition(":")[2] for address in grpc_addresses],
            "port": self.port,
            "grpc_port": self.grpc_port,
        }
        self._process: asyncio.subprocess.Process | None = None
        self._folder: haproxy.HaProxyFolder | None = None

    async def __aenter__(self) -> Self:
        self._folder = haproxy.prepare(self._config)
        assert self._folder is not None, "HAProxy does not run on this machine"
        environment = self._folder.environment(self._config) | self._variables
        self.live_url = f"http://127.0.0.1:{environment[haproxy_exec.LIVE]}"
        orders = self._orders | {"folder": str(self._folder.path)}
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, json.dumps(orders), env=os.environ | environment, stdin=pipe, stdout=pipe
        )
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(_READY_WITHIN_S):
                assert await self._process.stdout.readline() == b"ready\n", "HAProxy did not start"
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    async def held(self) -> int:
        """The number of open requests that HAProxy has sent to a gateway."""
        assert self._folder is not None
        reader, writer = await asyncio.open_unix_connection(self._folder.path / "admin.sock")
        writer.write(b"show stat\n")
        rows = csv.DictReader((await reader.read()).decode().removeprefix("# ").splitlines())
        writer.close()
        return sum(
            int(row["scur"])
            for row in rows
            if row["svname"] == "BACKEND" and row["pxname"] in ("http-default", "grpc-default")
        )

    async def _end(self) -> None:
        process, folder = self._process, self._folder
        assert process is not None
        assert folder is not None
        with contextlib.suppress(ProcessLookupError):
            process.kill()  # HAProxy ends with the process that started it
        await process.wait()
        folder.remove()


async def _serve(orders: Mapping[str, Any]) -> None:
    from ray.serve._private.common import RequestProtocol
    from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
    from ray.serve.config import HTTPOptions, gRPCOptions

    def servers(ports: Sequence[str]) -> list[ServerConfig]:
        return [ServerConfig(f"gateway-{port}", "127.0.0.1", int(port)) for port in ports]

    class Api(HAProxyApi):
        """Without Serve, gateways have no gRPC health checks of Serve: a successful connection is enough."""

        def _generate_config_file_internal(self) -> None:
            super()._generate_config_file_internal()
            file = Path(self.config_file_path)
            lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
            file.write_text("".join(line for line in lines if "tcp-check" not in line), encoding="utf-8")

    folder = Path(orders["folder"])
    config = HAProxyConfig(
        is_head=True,
        has_received_routes=True,
        has_received_servers=True,
        http_options=HTTPOptions(host="127.0.0.1", port=orders["port"]),
        grpc_options=gRPCOptions(port=orders["grpc_port"], grpc_servicer_functions=SERVICERS),
    )
    backends = {
        "http-default": BackendConfig(
            "http-default", "/", app_name="default", servers=servers(orders["http"]), http_health_check_path="/live"
        )
    }
    if orders["grpc"]:
        backends["grpc-default"] = BackendConfig(
            "grpc-default", "/", app_name="default", servers=servers(orders["grpc"]), protocol=RequestProtocol.GRPC
        )
    api = Api(config, backends, str(folder / "haproxy.cfg"))
    await api.start()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the parent closes it, or ends
    await api.stop()


if __name__ == "__main__":
    asyncio.run(_serve(json.loads(sys.argv[1])))
