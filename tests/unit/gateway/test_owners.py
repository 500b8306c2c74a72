"""Owners of requests: a caller cannot cancel, take over or see requests that came with another API key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import pytest

from alignedserve.admin import ADMIN_HEADER
from alignedserve.client import AsyncClient, CancelledError
from alignedserve.control.rpc import open_channel
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import gateway_pb2 as gw
from alignedserve.proto import gateway_pb2_grpc as gw_grpc
from alignedserve.proto import inference_pb2 as inf
from alignedserve.proto import inference_pb2_grpc as inf_grpc
from alignedserve.proto import supervisor_pb2 as sv
from support.fake_cluster import TOKEN, FakeCluster, silent_script
from support.gateway import RunningGateway, running_gateway

ALICE, BOB = "sk-alice", "sk-bob"


@pytest.fixture
async def key_file(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.touch(0o600)
    path.write_text(f"{ALICE}\n{BOB}\n")
    return str(path)


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with FakeCluster() as cluster:
        cluster.script = silent_script
        yield cluster


@pytest.fixture
async def gateway(cluster: FakeCluster, key_file: str) -> AsyncIterator[RunningGateway]:
    async with running_gateway(cluster, api_key_file=key_file) as gateway:
        yield gateway


async def begun(cluster: FakeCluster, gateway: RunningGateway, key: str, request_id: str) -> asyncio.Task[object]:
    """A request with that API key that waits for its first token."""
    count = len(cluster.submitted)

    async def ask() -> object:
        async with AsyncClient(gateway.grpc_address, api_key=key, resume_s=0) as client:
            return await client.generate("a", request_id=request_id)

    waiting: asyncio.Task[object] = asyncio.create_task(ask())
    await cluster.wait_for(lambda: len(cluster.submitted) > count)
    return waiting


async def give_up(waiting: asyncio.Task[object]) -> None:
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def cancel(gateway: RunningGateway, request_id: str, **headers: str) -> int:
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        return (await http.post(f"/v1/requests/{request_id}/cancel", headers=headers)).status_code


async def test_another_keys_request_is_like_one_that_does_not_exist(
    cluster: FakeCluster, gateway: RunningGateway
) -> None:
    waiting = await begun(cluster, gateway, ALICE, "job-1")

    assert await cancel(gateway, "job-1", **{"x-api-key": BOB}) == 404
    async with AsyncClient(gateway.grpc_address, api_key=BOB) as bob:
        assert not await bob.cancel("job-1")
    assert not waiting.done()
    assert cluster.cancelled == []
    assert await cancel(gateway, "job-1", **{"x-api-key": ALICE}) == 200
    with pytest.raises(CancelledError):
        await waiting


async def test_two_keys_may_choose_the_same_id(cluster: FakeCluster, gateway: RunningGateway) -> None:
    of_alice = await begun(cluster, gateway, ALICE, "job-1")
    of_bob = await begun(cluster, gateway, BOB, "job-1")

    assert await cancel(gateway, "job-1", **{"x-api-key": BOB}) == 200
    with pytest.raises(CancelledError):
        await of_bob
    assert not of_alice.done()
    await give_up(of_alice)


async def test_resuming_under_another_key_leaves_the_stream_alone(
    cluster: FakeCluster, gateway: RunningGateway
) -> None:
    waiting = await begun(cluster, gateway, ALICE, "job-1")
    count = len(cluster.submitted)

    async with grpc.aio.insecure_channel(gateway.grpc_address) as channel:
        request = inf.GenerateRequest(prompt="a", request_id="job-1", seed=1, resume=[inf.Delivered(token_ids=[500])])
        call = inf_grpc.InferenceStub(channel).Generate(request, metadata=(("x-api-key", BOB),))
        await cluster.wait_for(lambda: len(cluster.submitted) > count)
        call.cancel()
    await asyncio.sleep(0.1)

    assert not waiting.done()
    await give_up(waiting)


async def test_the_admin_key_cancels_requests_of_every_key(cluster: FakeCluster, gateway: RunningGateway) -> None:
    waiting = await begun(cluster, gateway, ALICE, "job-1")

    assert await cancel(gateway, "job-1", **{"x-api-key": BOB, ADMIN_HEADER: "wrong"}) == 403
    assert not waiting.done()
    assert await cancel(gateway, "job-1", **{"x-api-key": BOB, ADMIN_HEADER: gateway.server.admin_key}) == 200
    with pytest.raises(CancelledError):
        await waiting


async def test_the_owner_counts_at_other_replicas_too(cluster: FakeCluster, key_file: str) -> None:
    async with (
        running_gateway(cluster, api_key_file=key_file) as first,
        running_gateway(cluster, gateway_id="gateway-1", api_key_file=key_file) as second,
    ):
        address = first.server.address
        view = sv.ClusterView(peers=[sv.Peer(process=pb.ProcessKey(role="gateway", id="gateway-0"), address=address)])
        await second.server.peers.follow(view)
        waiting = await begun(cluster, first, ALICE, "job-1")

        assert await cancel(second, "job-1", **{"x-api-key": BOB}) == 404
        assert not waiting.done()
        assert await cancel(second, "job-1", **{"x-api-key": ALICE}) == 200
        with pytest.raises(CancelledError):
            await waiting

        waiting = await begun(cluster, first, ALICE, "job-2")
        by_admin = {"x-api-key": BOB, ADMIN_HEADER: second.server.admin_key}
        assert await cancel(second, "job-2", **by_admin) == 200
        with pytest.raises(CancelledError):
            await waiting


async def test_a_peer_that_names_no_owner_finds_nothing_that_has_one(
    cluster: FakeCluster, gateway: RunningGateway
) -> None:
    waiting = await begun(cluster, gateway, ALICE, "job-1")
    channel = open_channel(gateway.server.address, TOKEN)
    answer = await gw_grpc.GatewayPeerStub(channel).CancelCall(gw.CallId(call_id="job-1"))
    await channel.close()

    assert not answer.found
    assert not waiting.done()
    await give_up(waiting)
