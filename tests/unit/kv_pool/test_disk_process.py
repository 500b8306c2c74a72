"""The shard's process with a disk tier: over gRPC, across a death of the process and of the whole cluster."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from alignedserve.config import Config, KvPoolConfig
from alignedserve.config_sources import to_tree
from alignedserve.control.prefixes import cached_prefix
from alignedserve.control.rpc import RpcServer, open_channel
from alignedserve.control.runtime import RoleSettings
from alignedserve.control.samples import value
from alignedserve.errors import ConfigError
from alignedserve.kv_pool.actor import KvPoolServer
from alignedserve.kv_pool.records import WriterKey
from alignedserve.kv_pool.writer import PoolWriter
from alignedserve.prefill_worker.loans import Loans
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import kv_pool_pb2 as kp
from alignedserve.proto import kv_pool_pb2_grpc as kp_grpc
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.request import RequestKey
from alignedserve.sizing import StorePlan
from alignedserve.transfer.segments import SegmentServer
from support.fake_roles import MODEL

TOKEN = "token"
BLOCKS = 16
PLAN = StorePlan(block_size=16, pool=BLOCKS, prefill_cache=4, decode_cache=4, batch_buffer=4, requests_buffer=4)
WRITER = pb.ProcessKey(role="prefill", id="prefill-0", incarnation=5)
PROMPT = list(range(6 * 16))


@asynccontextmanager
async def shard(agent: SegmentServer, disk: Path, *, served: bool = False) -> AsyncIterator[tuple[KvPoolServer, str]]:
    config = Config(kv_pool=KvPoolConfig(prefix_cache=True, disk_path=str(disk), disk_gib=0.01, growth_reserve=0.0))
    settings = RoleSettings("kv_pool", "kv_pool-0", to_tree(config), "c", TOKEN, agent_socket=str(agent.socket_path))
    server = KvPoolServer(settings)
    model = replace(MODEL, path=str(Path(__file__).parent))
    view = sv.ClusterView(model_info=model.to_json(), store_plan=PLAN.to_json(), was_ready=served)
    await server.on_view(view)
    await server.on_start()
    rpc = RpcServer(TOKEN)
    for register, servicer in server.servicers():
        rpc.add(register, servicer)
    try:
        yield server, await rpc.start()
    finally:
        await rpc.stop()
        await server.on_close()


@asynccontextmanager
async def node(tmp_path: Path, name: str) -> AsyncIterator[SegmentServer]:
    agent = SegmentServer(str(tmp_path / f"{name}.sock"), TOKEN)
    agent.start()
    try:
        yield agent
    finally:
        agent.close()


def take_all(server: KvPoolServer) -> None:
    """Everything that is cached is given up for another writer."""
    other = WriterKey("decode", "decode-0", 5)
    assert server._pool is not None
    (grant,) = server._pool.want(other, BLOCKS)
    server._pool.give_back(other, grant.block_ids)


async def pin(writer: PoolWriter, name: str) -> tuple[int, int]:
    held = await asyncio.wait_for(writer.pin(RequestKey(name), cached_prefix([*PROMPT, 1], b"")), 20.0)
    writer.release([RequestKey(name)])
    return held.kv_tokens, held.disk_tokens


async def test_what_was_cached_comes_from_disk_after_a_restart_of_all(tmp_path: Path) -> None:
    async with node(tmp_path, "first") as agent, shard(agent, tmp_path / "kv") as (server, address):
        writer = PoolWriter(WRITER, TOKEN, 0)
        await writer.connect(address)
        for tokens in (PROMPT, range(1000, 1000 + 9 * 16)):  # the shard is nearly full
            blocks = await asyncio.wait_for(writer.take(len(tokens) // 16), 10.0)
            await writer.cache(RequestKey("r"), cached_prefix(tokens, b""), 0, blocks, [])
        async with asyncio.timeout(10.0):
            while (count := server._disk.count()).cached < 6:  # type: ignore[union-attr]  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await writer.close()
        pool, disk = await server.check_integrity()
        assert (pool.problem, disk.problem, disk.store) == ("", "", "kv_pool-0/disk")
        assert disk.cached_blocks >= count.cached
    async with node(tmp_path, "second") as agent:
        async with shard(agent, tmp_path / "kv") as (server, address):
            writer = PoolWriter(WRITER, TOKEN, 0)
            await writer.connect(address)
            assert await pin(writer, "a") == (96, 96)
            assert await pin(writer, "b") == (96, 0)  # it is in memory now
            metrics = server.heartbeat().metrics
            assert value(metrics, "alignedserve_kv_blocks", store="kv_pool-0/disk", state="cached") >= 6
            assert value(metrics, "alignedserve_disk_tier_on") == 2
            take_all(server)
            await writer.close()
        async with shard(agent, tmp_path / "kv", served=True) as (server, address):  # only its process was replaced
            channel = open_channel(address, TOKEN)
            found = await kp_grpc.KvPoolStub(channel).Match(cached_prefix([*PROMPT, 1], b""), timeout=5.0)
            await channel.close()
            assert found.tokens == 96
            async with asyncio.timeout(10.0):
                while not server._pool.counts().cached:  # type: ignore[union-attr]  # noqa: ASYNC110
                    await asyncio.sleep(0.01)  # the hint has begun to read


async def test_what_is_in_memory_only_is_written_when_the_cluster_ends(tmp_path: Path) -> None:
    async with node(tmp_path, "first") as agent, shard(agent, tmp_path / "kv") as (server, address):
        writer = PoolWriter(WRITER, TOKEN, 0)
        await writer.connect(address)
        blocks = await asyncio.wait_for(writer.take(6), 10.0)
        await writer.cache(RequestKey("r"), cached_prefix(PROMPT, b""), 0, blocks, [])
        await writer.close()
        assert server._disk is not None
        assert server._disk.count().cached == 0
        await server.on_view(sv.ClusterView(ending=True))
    async with node(tmp_path, "second") as agent, shard(agent, tmp_path / "kv") as (server, address):
        assert server._disk is not None
        assert server._disk.count().cached == 6
        channel = open_channel(address, TOKEN)
        order = kp.DropCached(prefix=cached_prefix(PROMPT[:20], b""))
        dropped = await kp_grpc.PrefixCacheStub(channel).Drop(order, timeout=10.0)
        shutil.copytree(tmp_path / "kv", tmp_path / "as it was then")
        await channel.close()
        assert dropped.blocks == 0, "they were on disk only"
    async with node(tmp_path, "third") as agent, shard(agent, tmp_path / "as it was then") as (server, _):
        assert server._disk is not None
        assert server._disk.count().cached == 0


async def test_an_instance_of_another_node_borrows_what_is_on_disk(tmp_path: Path) -> None:
    async with node(tmp_path, "first") as agent, shard(agent, tmp_path / "kv") as (server, address):
        writer = PoolWriter(WRITER, TOKEN, 0)
        await writer.connect(address)
        blocks = await asyncio.wait_for(writer.take(6), 10.0)
        await writer.cache(RequestKey("r"), cached_prefix(PROMPT, b""), 0, blocks, [])
        await writer.close()
        await server.on_view(sv.ClusterView(ending=True))
    async with node(tmp_path, "second") as agent, shard(agent, tmp_path / "kv") as (server, address):
        loans = Loans(TOKEN)
        view = sv.ClusterView()
        view.peers.add(process=pb.ProcessKey(role="kv_pool", id="kv_pool-0"), address=address)
        await loans.on_view(view)
        base = await loans.borrow("kv_pool-0", RequestKey("a"), cached_prefix([*PROMPT, 1], b""))
        assert base is not None
        assert (base.tokens, len(base.block_ids), base.here) == (96, 6, False)
        assert server._pool is not None
        assert server._pool.counts().owned == 6
        loans.give_back(RequestKey("a"))
        async with asyncio.timeout(10.0):
            while server._pool.counts().owned:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert server._pool.counts().cached == 6
        await loans.close()


async def test_a_folder_that_cannot_be_used_is_an_error_at_the_first_start_only(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("not a folder")
    async with node(tmp_path, "node") as agent:
        with pytest.raises(ConfigError, match="cannot be written to"):
            async with shard(agent, tmp_path / "kv"):
                pass
        async with shard(agent, tmp_path / "kv", served=True) as (server, _):
            assert server.state == "ready"
            assert value(server.heartbeat().metrics, "alignedserve_disk_tier_on") == 0
