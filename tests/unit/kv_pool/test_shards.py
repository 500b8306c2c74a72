"""Shards on several nodes: a worker maps and writes its own, and reads the others' through their processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from alignedserve.config import Config
from alignedserve.config_sources import to_tree
from alignedserve.control.convert import spec_to_proto
from alignedserve.control.link import DuplexLink
from alignedserve.control.rpc import RpcServer, open_channel
from alignedserve.control.runtime import RoleSettings
from alignedserve.control.samples import samples
from alignedserve.errors import ChecksumError, TransferError
from alignedserve.kv_pool import stored as stored_requests
from alignedserve.kv_pool.actor import KvPoolServer
from alignedserve.kv_pool.agent_handover import AgentHandover
from alignedserve.kv_pool.attachment import PoolAttachment
from alignedserve.kv_pool.paired_link import PairedLink
from alignedserve.kv_pool.remote_shards import PoolReader
from alignedserve.kv_pool.stored import pack
from alignedserve.kv_pool.writeback import write_back
from alignedserve.kv_pool.writer import PoolWriter
from alignedserve.metrics import Page
from alignedserve.prefill_worker.jobs import Base, PrefilledJob
from alignedserve.prefill_worker.offload import Offloader
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import paired_copies_pb2 as pc
from alignedserve.proto import paired_copies_pb2_grpc as pc_grpc
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.request import RequestKey, RequestSpec, SamplingParams
from alignedserve.sizing import StorePlan
from alignedserve.transfer.block_store import HostBlockStore
from alignedserve.transfer.completion import Completion
from alignedserve.transfer.copier import Copier, Route
from alignedserve.transfer.handles import geometry_to_proto
from alignedserve.transfer.host_channel import HostChannel
from alignedserve.transfer.metrics import show_channels
from alignedserve.transfer.paired.client import PairClient
from alignedserve.transfer.paired.transport import ASKING_RANK, Wiring
from alignedserve.transfer.segments import SegmentClient, SegmentServer
from support.fake_roles import MODEL

TOKEN = "token"
BLOCKS = 40
PLAN = StorePlan(block_size=16, pool=BLOCKS, prefill_cache=4, decode_cache=4, batch_buffer=4, requests_buffer=4)
GEOMETRY = MODEL.geometry(PLAN.block_size)
TIMEOUT_S = 6.0
NODES = ("node-a", "node-b")
WORKER = pb.ProcessKey(role="decode", id="decode-0", incarnation=5)


@dataclass(slots=True)
class Shard:
    """The process of a shard, on its node."""

    server: KvPoolServer
    rpc: RpcServer
    address: str
    incarnation: int

    @property
    def store(self) -> HostBlockStore:
        assert self.server._store is not None
        return self.server._store

    def peer(self) -> sv.Peer:
        settings = self.server.settings
        process = pb.ProcessKey(role="kv_pool", id=settings.id, incarnation=self.incarnation)
        stores = list(self.server.heartbeat().stores)
        return sv.Peer(process=process, node_id=settings.node_id, address=self.address, state="ready", stores=stores)

    async def end(self) -> None:
        await self.rpc.stop()
        await self.server.on_close()


@dataclass(slots=True)
class Cell:
    """Two nodes with a shard each, and a worker on the first."""

    folder: Path
    agents: dict[str, SegmentServer] = field(default_factory=dict)
    shards: dict[str, Shard] = field(default_factory=dict)
    workers: list[sv.Peer] = field(default_factory=list)
    named: set[str] = field(default_factory=lambda: {"kv_pool-0", "kv_pool-1"})
    attachment: PoolAttachment = field(init=False)
    writer: PoolWriter = field(init=False)
    cache: HostBlockStore = field(init=False)
    reader: PoolReader = field(init=False)

    def settings(self, role: str, role_id: str, node: str) -> RoleSettings:
        socket = str(self.agents[node].socket_path)
        return RoleSettings(role, role_id, to_tree(Config()), "c", TOKEN, node_id=node, agent_socket=socket)

    async def start_shard(self, number: int) -> None:
        pool_id, node = f"kv_pool-{number}", NODES[number]
        server = KvPoolServer(self.settings("kv_pool", pool_id, node))
        await server.on_view(self.view())
        await server.on_start()
        rpc = RpcServer(TOKEN)
        for register, servicer in server.servicers():
            rpc.add(register, servicer)
        before = self.shards[pool_id].incarnation if pool_id in self.shards else 0
        self.shards[pool_id] = Shard(server, rpc, await rpc.start(), before + 1)

    def view(self) -> sv.ClusterView:
        pools = [sv.PoolShard(pool_id=f"kv_pool-{n}", node_id=node) for n, node in enumerate(NODES)]
        return sv.ClusterView(
            peers=[*(shard.peer() for shard in self.shards.values()), *self.workers],
            model_info=MODEL.to_json(),
            store_plan=PLAN.to_json(),
            pools=[pool for pool in pools if pool.pool_id in self.named],
        )

    async def tell(self) -> None:
        for shard in self.shards.values():
            await shard.server.on_view(self.view())
        await self.attachment.on_view(self.view())

    async def start(self) -> None:
        for node in NODES:
            self.agents[node] = SegmentServer(str(self.folder / node / "agent.sock"), TOKEN)
            self.agents[node].start()
        for number in range(len(NODES)):
            await self.start_shard(number)
        self.workers = [sv.Peer(process=WORKER, state="ready", node_id=NODES[0])]
        self.attachment = PoolAttachment(self.settings("decode", "decode-0", NODES[0]), WORKER, TIMEOUT_S)
        self.writer = PoolWriter(WORKER, TOKEN, 4)
        await self.tell()
        own = await self.attachment.attach(GEOMETRY, [self.writer])
        self.cache = HostBlockStore.private("decode-0/cache", GEOMETRY, BLOCKS)
        self.reader = self.attachment.reader(HostChannel(own, self.cache))
        draw = np.random.default_rng(3)
        for shard in self.shards.values():
            shard.store.blocks[:] = draw.integers(0, 256, shard.store.blocks.shape, dtype=np.uint8)

    async def close(self) -> None:
        await self.attachment.close()
        for shard in self.shards.values():
            await shard.end()
        for agent in self.agents.values():
            agent.close()


@pytest_asyncio.fixture
async def cell(tmp_path: Path) -> AsyncIterator[Cell]:
    cell = Cell(tmp_path)
    await cell.start()
    yield cell
    await cell.close()


async def test_a_worker_maps_and_writes_the_shard_of_its_node_and_reads_that_of_another(cell: Cell) -> None:
    assert cell.reader.own_id == "kv_pool-0"
    blocks = await asyncio.wait_for(cell.writer.take(2), 10.0)
    await asyncio.wait_for(cell.writer.commit(RequestKey("r"), 20, blocks), 10.0)
    held = [shard.server._pool.counts().requests for shard in cell.shards.values() if shard.server._pool is not None]
    assert held == [1, 0]

    own, other = cell.reader.channel("kv_pool-0"), cell.reader.channel("kv_pool-1")
    assert (own.name, other.name) == ("shared-memory", "gloo")
    for number, channel in enumerate((own, other)):
        theirs, ours = [7, 39, 0], [1 + 10 * number, 2 + 10 * number, 3 + 10 * number]
        await asyncio.wait_for(channel.copy(theirs, ours), 20.0)
        assert np.array_equal(cell.cache.blocks[ours], cell.shards[f"kv_pool-{number}"].store.blocks[theirs])
    assert cell.reader.channel("kv_pool-1") is other
    page = Page(instance="decode-0")
    show_channels(page, cell.attachment.others.channels)
    labels = {"source": "kv_pool-1", "destination": "decode-0/cache", "channel": "gloo", "instance": "decode-0"}
    (moved,) = samples(page.text(), "alignedserve_transfer_bytes_total")
    assert (moved.labels, moved.value) == (labels, 3 * GEOMETRY.block_bytes)


async def test_one_stream_serves_all_stores_of_a_worker(cell: Cell) -> None:
    buffer = HostBlockStore.private("prefill-0/batch", GEOMETRY, BLOCKS)
    to_buffer = cell.attachment.others.channel("kv_pool-1", buffer)
    to_cache = cell.reader.channel("kv_pool-1")
    assert to_buffer is not to_cache
    await asyncio.wait_for(asyncio.gather(_ended(to_buffer.copy([3], [4])), _ended(to_cache.copy([5], [6]))), 20.0)
    theirs = cell.shards["kv_pool-1"].store.blocks
    assert np.array_equal(buffer.blocks[4], theirs[3])
    assert np.array_equal(cell.cache.blocks[6], theirs[5])
    assert cell.attachment.others._shards["kv_pool-1"].client.sessions == 1


async def test_copies_are_checked_against_what_was_written_to_the_other_shard(cell: Cell) -> None:
    copier, theirs = Copier(verify=True, timeout_s=TIMEOUT_S), cell.shards["kv_pool-1"].store
    channel = cell.reader.channel("kv_pool-1")
    assert await asyncio.to_thread(channel.source.checksums, [1, 2]) == theirs.checksums([1, 2])
    route = Route(channel, [1, 2], theirs.checksums([1, 2]))
    await asyncio.wait_for(_ended(copier.copy([route, route], [8, 9], "r")), 20.0)
    theirs.blocks[2] ^= 1
    with pytest.raises(ChecksumError, match="block 9 of decode-0/cache, copied from block 2 of kv_pool-1"):
        await asyncio.wait_for(_ended(copier.copy([route, route], [8, 9], "r")), 20.0)
    copier.close()


async def test_a_shard_whose_process_is_replaced_is_read_through_its_successor(cell: Cell) -> None:
    channel = cell.reader.channel("kv_pool-1")
    await asyncio.wait_for(channel.copy([1], [1]), 20.0)
    expected = bytes(cell.shards["kv_pool-1"].store.blocks[2])
    await cell.shards["kv_pool-1"].end()
    copy = channel.copy([2], [2])
    await cell.start_shard(1)
    await cell.tell()
    await asyncio.wait_for(copy, 20.0)
    assert bytes(cell.cache.blocks[2]) == expected


@pytest.mark.parametrize("read_before", [True, False])
async def test_a_shard_that_was_made_anew_fails_what_was_asked_of_the_one_before(
    cell: Cell, *, read_before: bool
) -> None:
    if read_before:
        await asyncio.wait_for(cell.reader.channel("kv_pool-1").copy([1], [1]), 20.0)
    await cell.shards["kv_pool-1"].end()
    copy = cell.reader.channel("kv_pool-1").copy([2], [2])
    cell.agents["node-b"].close()  # no process holds the memory any more
    cell.agents["node-b"] = SegmentServer(str(cell.folder / "node-b" / "agent.sock"), TOKEN)
    cell.agents["node-b"].start()
    await cell.start_shard(1)
    await cell.tell()
    with pytest.raises(TransferError, match="no connection to kv_pool-1: the pair was closed"):
        await asyncio.wait_for(_ended(copy), 20.0)
    cell.shards["kv_pool-1"].store.blocks[3] = 7
    await asyncio.wait_for(cell.reader.channel("kv_pool-1").copy([3], [3]), 20.0)
    assert (cell.cache.blocks[3] == 7).all()


async def test_a_shard_that_is_named_no_more_fails_what_is_read_of_it(cell: Cell) -> None:
    channel = cell.reader.channel("kv_pool-1")
    await asyncio.wait_for(channel.copy([1], [1]), 20.0)
    cell.named = {"kv_pool-0"}
    await cell.tell()
    with pytest.raises(TransferError, match="closed"):
        await asyncio.wait_for(_ended(channel.copy([1], [1])), 20.0)
    with pytest.raises(TransferError, match="kv_pool-1 cannot be reached"):
        cell.reader.channel("kv_pool-1")
    assert cell.attachment.others.channels == []
    await asyncio.wait_for(cell.reader.channel("kv_pool-0").copy([1], [1]), 20.0)


async def test_a_shard_that_does_not_answer_fails_copies_after_its_time_and_is_no_fault_of_the_worker(
    cell: Cell,
) -> None:
    shard = cell.shards["kv_pool-1"]
    await shard.rpc.stop()  # the view names it still
    copier = Copier(verify=False, timeout_s=TIMEOUT_S / 8)
    route = Route(cell.reader.channel("kv_pool-1"), [1])
    begun = time.monotonic()
    copy = asyncio.create_task(_ended(copier.copy([route, route], [1], "r")))
    while not copy.done():
        assert copier.stuck() is None
        await asyncio.sleep(0.05)
    with pytest.raises(TransferError, match="no connection to kv_pool-1"):
        await copy
    assert TIMEOUT_S * 0.9 < time.monotonic() - begun < TIMEOUT_S + 2.0
    begun = time.monotonic()
    with pytest.raises(TransferError, match="no connection to kv_pool-1"):
        await _ended(copier.copy([route, route], [1], "s"))  # known to be away: nothing waits again
    assert time.monotonic() - begun < TIMEOUT_S / 2
    copier.close()


async def test_nothing_is_written_to_a_shard_by_another_node(cell: Cell) -> None:
    shard = cell.shards["kv_pool-1"]
    before = shard.store.blocks.copy()
    wiring = Wiring.between_workers("gloo", ASKING_RANK, "127.0.0.1", "cpu", TIMEOUT_S)
    client = PairClient(WORKER, wiring, GEOMETRY, "kv_pool-1", away_s=1.0)
    rpc = open_channel(shard.address, TOKEN)
    link = PairedLink(client, rpc)
    with pytest.raises(TransferError, match="no connection"):  # a session that could write is refused
        await asyncio.to_thread(client.checksums, "kv_pool-1", [0])
    await link.close()

    events: asyncio.Queue[pc.PairEvent] = asyncio.Queue()
    hello = pc.PairHello(
        process=WORKER, channel="gloo", geometry=geometry_to_proto(GEOMETRY), piece_bytes=1 << 20, read_only=True
    )
    push = pc.PairedCopy(number=1, push=True, store_id="kv_pool-1", block_ids=[0], layer_end=2, head_end=2)
    stream: DuplexLink[pc.PairCommand, pc.PairEvent] = DuplexLink(
        pc_grpc.PairedCopiesStub(rpc).Pair,
        events.put,
        lambda: [pc.PairCommand(hello=hello), pc.PairCommand(copy=push)],
    )
    stream.start()
    async with asyncio.timeout(20.0):
        while (event := await events.get()).WhichOneof("body") != "ended":
            pass
    assert (event.ended.number, event.ended.failure.code) == (1, TransferError.code)
    assert "read-only" in event.ended.failure.message
    await stream.close()
    await rpc.close()
    await asyncio.to_thread(client.close)
    assert np.array_equal(shard.store.blocks, before)


async def test_a_shard_that_cannot_import_torch_says_so_and_ends_well(cell: Cell) -> None:
    async def lack_torch() -> None:
        raise ImportError("No module named 'torch'")

    shard = cell.shards["kv_pool-1"]
    shard.server._copies._importing = asyncio.get_running_loop().create_task(lack_torch())
    rpc = open_channel(shard.address, TOKEN)
    hello = pc.PairCommand(hello=pc.PairHello(process=WORKER, channel="gloo", read_only=True))
    stream: DuplexLink[pc.PairCommand, pc.PairEvent] = DuplexLink(
        pc_grpc.PairedCopiesStub(rpc).Pair, lambda event: None, lambda: [hello], reconnect=False
    )
    await asyncio.wait_for(stream.start(), 20.0)
    assert "kv_pool-1 cannot take part in copies: No module named 'torch'; install torch" in stream.refusal
    await rpc.close()


async def test_a_worker_that_is_being_ended_reads_no_more(cell: Cell) -> None:
    channel = cell.reader.channel("kv_pool-1")
    await asyncio.wait_for(channel.copy([1], [1]), 20.0)
    server = cell.shards["kv_pool-1"].server
    cell.workers[0].fenced = True
    await server.on_view(cell.view())

    async def read_on() -> None:
        while True:
            await asyncio.wait_for(channel.copy([1], [1]), 20.0)

    with pytest.raises(TransferError, match=r"no connection to kv_pool-1|did not take part|was ended|broke"):
        await read_on()
    cell.workers.clear()  # it has ended: a successor is served
    await server.on_view(cell.view())
    successor = pb.ProcessKey(role="decode", id="decode-0", incarnation=6)
    attachment = PoolAttachment(cell.settings("decode", "decode-0", NODES[0]), successor, TIMEOUT_S)
    await attachment.on_view(cell.view())
    await attachment.attach(GEOMETRY, [])
    await asyncio.wait_for(attachment.others.channel("kv_pool-1", cell.cache).copy([1], [1]), 20.0)
    await attachment.close()


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_what_comes_back_is_written_to_the_own_shard_in_full_where_another_has_the_rest(
    cell: Cell, *, elsewhere: bool
) -> None:
    own = cell.shards["kv_pool-0"]
    to_pool = HostChannel(cell.cache, own.store)
    copier = Copier(verify=True, timeout_s=TIMEOUT_S)
    key = RequestKey("r")
    cell.cache.blocks[:] = np.random.default_rng(4).integers(0, 256, cell.cache.blocks.shape, dtype=np.uint8)
    held = await asyncio.wait_for(cell.writer.take(2), 10.0)
    await asyncio.wait_for(to_pool.copy([5, 6], held), 10.0)
    await cell.writer.commit(key, 20, held, checksums=own.store.checksums(held))
    stored = pb.StoredRequest(
        spec=pb.RequestSpec(key=pb.RequestKey(request_id="r")),
        store_id="decode-0/cache",
        kv_tokens=40,
        pool_id="kv_pool-1" if elsewhere else "kv_pool-0",
        pool_tokens=20,
        pool_block_ids=held,
        pool_checksums=own.store.checksums(held),
    )
    source = Route(to_pool, [5, 6, 7], cell.cache.checksums([5, 6, 7]))
    result = await asyncio.wait_for(write_back(cell.writer, copier, source, stored, PLAN.block_size), 10.0)
    assert (result.pool_id, result.store_id, result.pool_tokens) == ("kv_pool-0", "kv_pool-0", 40)
    assert (result.pool_block_ids[0] == held[0]) == (not elsewhere)
    assert own.store.checksums(result.pool_block_ids) == cell.cache.checksums([5, 6, 7])
    copier.close()
    to_pool.close()


@pytest.mark.parametrize("here", [True, False])
async def test_a_prompt_whose_base_lies_in_another_shard_is_committed_whole_in_the_own(
    cell: Cell, *, here: bool
) -> None:
    own = cell.shards["kv_pool-0"].store
    to_pool, copier = HostChannel(cell.cache, own), Copier(verify=True, timeout_s=TIMEOUT_S)
    held = await asyncio.wait_for(cell.writer.take(2), 10.0)
    await cell.writer.commit(RequestKey("r"), 32, held)
    cell.cache.blocks[:] = np.random.default_rng(4).integers(0, 256, cell.cache.blocks.shape, dtype=np.uint8)
    if here:
        await asyncio.wait_for(to_pool.copy([5, 6], held), 10.0)
    base = Base(32, held, own.checksums(held), "kv_pool-0" if here else "kv_pool-1", here)
    spec = RequestSpec(RequestKey("r", 1), list(range(40)), SamplingParams(), [1])
    job = PrefilledJob(spec.key, [spec], list(range(40)), [5, 6, 7], base)
    offloader = Offloader("prefill-0", cell.writer, copier, to_pool, "kv_pool-0", PLAN.block_size)
    (prefilled,), gone = await asyncio.wait_for(offloader.offload(job), 10.0)
    assert (prefilled.pool_id, prefilled.kv_tokens, prefilled.blocks, gone) == ("kv_pool-0", 40, 3, [])
    stored = (await cell.attachment.read("kv_pool-0", [spec.key], 64))[spec.key]
    assert (stored.pool_id, stored.pool_tokens, list(stored.spec.prompt_token_ids)) == (
        "kv_pool-0",
        40,
        list(range(40)),
    )
    assert (list(stored.block_ids[:2]) == held) == here
    assert own.checksums(stored.block_ids) == cell.cache.checksums([5, 6, 7]) == list(stored.checksums)
    assert offloader.blocks == (1 if here else 3)
    copier.close()
    to_pool.close()


async def test_what_another_shard_has_all_of_is_not_written_at_all(cell: Cell) -> None:
    to_pool = HostChannel(cell.cache, cell.shards["kv_pool-0"].store)
    copier = Copier(verify=False, timeout_s=TIMEOUT_S)
    stored = pb.StoredRequest(kv_tokens=20, pool_id="kv_pool-1", pool_tokens=20, pool_block_ids=[3, 4])
    result = await write_back(cell.writer, copier, Route(to_pool, [1, 2]), stored, PLAN.block_size)
    assert (result.store_id, result.pool_id, list(result.block_ids)) == ("kv_pool-1", "kv_pool-1", [3, 4])
    assert to_pool.counters().copies == 0
    copier.close()
    to_pool.close()


async def store(cell: Cell, request_id: str = "r") -> pb.StoredRequest:
    """A request of 20 tokens, in the shard of the worker's own node."""
    blocks = await asyncio.wait_for(cell.writer.take(2), 10.0)
    spec = spec_to_proto(RequestSpec(RequestKey(request_id), list(range(20)), SamplingParams(), [1]))
    await cell.writer.commit(RequestKey(request_id), 20, blocks, payload=pack(spec, "prefill-0", ""))
    return pb.StoredRequest(spec=spec, prefill_id="prefill-0", kv_tokens=20, block_ids=blocks, pool_id="kv_pool-0")


async def test_what_is_stored_with_kv_is_read_by_the_worker_that_goes_on_with_it(cell: Cell) -> None:
    stored = await store(cell)
    key, ended = RequestKey("r"), RequestKey("ended")
    found = await cell.attachment.read("kv_pool-0", [key, ended, RequestKey("r", 1)], 64)
    assert found.keys() == {key}
    assert (found[key].spec, found[key].block_ids) == (stored.spec, stored.block_ids)
    assert await cell.attachment.read("kv_pool-1", [key], 64) == {}
    assert await cell.attachment.read("kv_pool-0", [key], 10) == {}  # of tokens that the model does not have


async def test_more_than_a_message_holds_comes_in_several(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        await store(cell, name)
    monkeypatch.setattr(stored_requests, "MOST_READ_BYTES", 64)
    keys = [RequestKey(name) for name in "abc"]
    assert list(await cell.attachment.read("kv_pool-0", keys, 64)) == keys


async def test_a_read_waits_for_the_successor_of_the_shards_process_which_has_it(cell: Cell) -> None:
    stored = await store(cell)
    await cell.shards["kv_pool-0"].end()
    reading = asyncio.create_task(cell.attachment.read("kv_pool-0", [RequestKey("r")], 64))
    await asyncio.sleep(0.2)
    assert not reading.done()
    await cell.start_shard(0)
    await cell.tell()
    found = await asyncio.wait_for(reading, 10.0)
    assert found[RequestKey("r")].spec == stored.spec


async def test_a_shard_that_is_named_no_more_has_nothing_and_is_not_waited_for(cell: Cell) -> None:
    await cell.shards["kv_pool-1"].end()
    reading = asyncio.create_task(cell.attachment.read("kv_pool-1", [RequestKey("r")], 64))
    await asyncio.sleep(0.1)
    assert not reading.done()
    cell.named.discard("kv_pool-1")
    await cell.attachment.on_view(cell.view())
    assert await asyncio.wait_for(reading, 10.0) == {}


async def test_memory_is_handed_to_the_agent_of_the_own_node_alone(cell: Cell) -> None:
    client = SegmentClient(cell.agents[NODES[0]].socket_path, TOKEN)
    mapped = client.attach("kv_pool-0")
    handover = AgentHandover(client, NODES[0])

    def agent(node: str, incarnation: int) -> sv.Peer:
        process = pb.ProcessKey(role="node_agent", id=f"node_agent-{NODES.index(node)}", incarnation=incarnation)
        return sv.Peer(process=process, node_id=node, state="ready")

    await handover.on_view(sv.ClusterView(peers=[agent(NODES[1], 1), agent(NODES[0], 1)]))
    cell.agents[NODES[0]].close()
    cell.agents[NODES[0]] = successor = SegmentServer(str(cell.folder / NODES[0] / "agent.sock"), TOKEN)
    successor.start()
    await handover.on_view(sv.ClusterView(peers=[agent(NODES[1], 2), agent(NODES[0], 1)]))
    assert client.segments() == []
    await handover.on_view(sv.ClusterView(peers=[agent(NODES[1], 2), agent(NODES[0], 2)]))
    assert [segment.name for segment in client.segments()] == ["kv_pool-0"]
    mapped.close()


async def _ended(copy: Completion) -> None:
    await copy
