"""Ray Serve's gRPC server in a gateway's replica: what it ends before it has read a message."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from ray.serve._private import grpc_util
from ray.serve.config import gRPCOptions

from alignedserve.cluster.serve.haproxy import free_ports
from alignedserve.gateway.api_keys import ApiKeys
from alignedserve.gateway.http.guard import SERVES_OWN, ApiKeyCheck
from alignedserve.gateway.serve.ray_private import HEADROOM_BYTES, guard_grpc
from alignedserve.proto import inference_pb2 as inf
from alignedserve.proto import inference_pb2_grpc as inf_grpc
from support.haproxy_front import SERVICERS

LIMIT = 1 << 20
STREAM, GENERATE = "/alignedserve.v1.Inference/Stream", "/alignedserve.v1.Inference/Generate"
KEY = (("authorization", "Bearer sk-1"),)


def echo(service_method: str, streaming_type: Any) -> Callable[..., Any]:
    """A replica's handler: it returns the size of the message."""

    async def one(request: Any, context: Any) -> bytes:
        return inf.GenerateResponse(model=str(request.ByteSize())).SerializeToString()

    return one


@pytest.fixture
async def channel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[grpc.aio.Channel]:
    monkeypatch.setattr(grpc_util, "gRPCGenericServer", grpc_util.gRPCGenericServer)  # is put back
    keys = tmp_path / "keys"
    keys.touch(0o600)
    keys.write_text("sk-1\n")
    guard_grpc(ApiKeyCheck(ApiKeys(str(keys))), LIMIT)
    (port,) = free_ports(1)
    options = gRPCOptions(port=port, grpc_servicer_functions=SERVICERS)
    task, server = await grpc_util.start_grpc_server(echo, options, event_loop=asyncio.get_running_loop())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0.0)
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_a_call_without_a_key_ends_before_its_message_comes(channel: grpc.aio.Channel) -> None:
    for metadata in ((), (("authorization", "Bearer sk-2"),)):
        for method in (STREAM, GENERATE):
            silent = channel.stream_stream(method)(metadata=metadata, timeout=10)
            assert await silent.code() is grpc.StatusCode.UNAUTHENTICATED
    assert await channel.unary_unary(SERVES_OWN + "Healthz")(b"", timeout=10)


async def test_a_message_over_the_limit_is_not_read(channel: grpc.aio.Channel) -> None:
    generate = inf_grpc.InferenceStub(channel).Generate
    little_over = inf.GenerateRequest(prompt="x" * (LIMIT + 1))
    assert (await generate(little_over, metadata=KEY, timeout=10)).model == str(little_over.ByteSize())
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await generate(inf.GenerateRequest(prompt="x" * (LIMIT + HEADROOM_BYTES)), metadata=KEY, timeout=10)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
