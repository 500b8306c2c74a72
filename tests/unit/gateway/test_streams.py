"""Many calls over one HTTP/2 connection, through HAProxy."""

from __future__ import annotations

import asyncio

import h2.config
import h2.connection
import h2.settings

from alignedserve.client import AsyncClient
from alignedserve.cluster.serve import haproxy
from alignedserve.config import Config
from alignedserve.config_sources import from_tree
from alignedserve.request import FinishReason, RequestSpec
from support.fake_cluster import FakeCluster
from support.gateway import running_gateway
from support.haproxy_front import HaProxyFront

CALLS = 300


def test_a_connection_carries_what_the_gateways_take_and_little_more() -> None:
    """Once, it allowed as many streams as HAProxy has connections, so that three clients could take them all."""
    one, three = Config(), from_tree({"gateway": {"replicas": 2, "max_replicas": 3, "max_queue": 100}})
    assert haproxy.streams(one) == one.gateway.max_queue + haproxy.SPARE_STREAMS
    assert haproxy.streams(three) == 300 + haproxy.SPARE_STREAMS


async def most_streams(port: int) -> int:
    """The stream limit that HAProxy announces to a client."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    connection.initiate_connection()
    writer.write(connection.data_to_send())
    async with asyncio.timeout(10.0):
        while (most := connection.remote_settings.max_concurrent_streams) > 1 << 20:
            connection.receive_data(await reader.read(65536))
    writer.close()
    return most


async def test_calls_beyond_the_streams_of_a_connection_wait_and_are_answered() -> None:
    at_once, most = 0, 0

    async def answer(cluster: FakeCluster, spec: RequestSpec) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.2)
        at_once -= 1
        cluster.emit(spec, [11], finish=FinishReason.LENGTH)

    narrow = from_tree({"gateway": {"max_queue": 1}})
    streams = 1 + haproxy.SPARE_STREAMS
    async with (
        FakeCluster(answer) as cluster,
        running_gateway(cluster) as gateway,
        HaProxyFront([gateway.url], [gateway.grpc_address], narrow) as front,
        AsyncClient(front.grpc_address, timeout_s=30) as client,
    ):
        assert await most_streams(front.grpc_port) == streams
        answers = await client.generate_many([[10]] * CALLS, concurrency=CALLS, max_tokens=1)
    assert [answer.token_ids for answer in answers] == [(11,)] * CALLS
    assert streams / 2 < most <= streams
