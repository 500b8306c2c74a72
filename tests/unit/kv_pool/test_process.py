"""The shard's process. The leases of a writer that is being fenced are quarantined until it is dead.

Its messages are dropped meanwhile. While the shard is recounted, heartbeats go on and its state does not change.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from alignedserve.config import Config
from alignedserve.config_sources import to_tree
from alignedserve.control.prefixes import cached_prefix
from alignedserve.control.rpc import RpcServer, open_channel
from alignedserve.control.runtime import RoleSettings
from alignedserve.control.samples import samples
from alignedserve.errors import AlignedServeError, TransferError
from alignedserve.kv_pool import removal
from alignedserve.kv_pool.actor import KvPoolServer
from alignedserve.kv_pool.attachment import PoolAttachment
from alignedserve.kv_pool.entries import Ids
from alignedserve.kv_pool.pool import KvPool
from alignedserve.kv_pool.writer import PoolWriter
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import kv_pool_pb2 as kp
from alignedserve.proto import kv_pool_pb2_grpc as kp_grpc
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.request import RequestKey
from alignedserve.sizing import StorePlan
from alignedserve.transfer.segments import SegmentServer
from support.fake_roles import MODEL

TOKEN = "token"
BLOCKS, LEASED = 40, 8
PLAN = StorePlan(block_size=16, pool=BLOCKS, prefill_cache=4, decode_cache=4, batch_buffer=4, requests_buffer=4)
STOPPED = pb.ProcessKey(role="decode", id="decode-0", incarnation=5)
OTHER = pb.ProcessKey(role="decode", id="decode-1", incarnation=6)


@dataclass(slots=True)
class Pool:
    server: KvPoolServer
    address: str

    async def view(self, *peers: sv.Peer) -> None:
        await self.server.on_view(view(*peers))

    def blocks(self) -> dict[str, int]:
        """Blocks by state, as scraped."""
        found = samples(self.server.heartbeat().metrics, "alignedserve_kv_blocks")
        return {sample.labels["state"]: int(sample.value) for sample in found}


def view(*peers: sv.Peer) -> sv.ClusterView:
    return sv.ClusterView(peers=peers, model_info=MODEL.to_json(), store_plan=PLAN.to_json())


def peer(process: pb.ProcessKey, *, fenced: bool = False) -> sv.Peer:
    return sv.Peer(process=process, state="lost" if fenced else "ready", fenced=fenced)


@pytest_asyncio.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    segments = SegmentServer(str(tmp_path / "agent.sock"), TOKEN)
    segments.start()
    settings = RoleSettings(
        "kv_pool", "kv_pool-0", to_tree(Config()), "c", TOKEN, agent_socket=str(segments.socket_path)
    )
    server = KvPoolServer(settings)
    await server.on_view(view())
    await server.on_start()
    rpc = RpcServer(TOKEN)
    for register, servicer in server.servicers():
        rpc.add(register, servicer)
    yield Pool(server, await rpc.start())
    await rpc.stop()
    await server.on_close()
    segments.close()


async def writer_with_lease(pool: Pool, process: pb.ProcessKey) -> tuple[PoolWriter, list[int]]:
    writer = PoolWriter(process, TOKEN, 0)
    await writer.connect(pool.address)
    return writer, await asyncio.wait_for(writer.take(LEASED), 10.0)


async def test_leased_blocks_of_a_process_that_is_being_ended_are_owned_until_it_is_dead(pool: Pool) -> None:
    writer, _ = await writer_with_lease(pool, STOPPED)
    await pool.view(peer(STOPPED))
    assert pool.blocks() == {"free": BLOCKS, "owned": 0, "cached": 0}  # leased: at hand, and free
    await pool.view(peer(STOPPED, fenced=True))
    assert pool.blocks() == {"free": BLOCKS - LEASED, "owned": LEASED, "cached": 0}
    await pool.view()
    assert pool.blocks() == {"free": BLOCKS, "owned": 0, "cached": 0}
    await writer.close()


async def test_no_other_writer_is_given_its_blocks_before_it_is_dead(pool: Pool) -> None:
    stopped, in_doubt = await writer_with_lease(pool, STOPPED)
    await pool.view(peer(STOPPED, fenced=True), peer(OTHER))
    other = PoolWriter(OTHER, TOKEN, 0)
    await other.connect(pool.address)
    rest = await asyncio.wait_for(other.take(BLOCKS - LEASED), 10.0)
    assert not set(rest) & set(in_doubt)
    waiting = asyncio.create_task(other.take(LEASED))
    await asyncio.sleep(0.3)  # the stopped process, awake again, has tried to return by now
    assert not waiting.done()
    await pool.view(peer(OTHER))
    assert sorted(await asyncio.wait_for(waiting, 10.0)) == sorted(in_doubt)
    await stopped.close()
    await other.close()


async def test_what_it_says_when_it_wakes_up_is_not_heard(pool: Pool) -> None:
    writer, block_ids = await writer_with_lease(pool, STOPPED)
    await pool.view(peer(STOPPED, fenced=True))
    late = asyncio.create_task(writer.commit(RequestKey("late"), 20, block_ids[:2]))
    await asyncio.wait([late], timeout=1.0)
    assert pool.server.heartbeat().holds.startswith("0 requests")
    assert pool.blocks()["owned"] == LEASED
    await writer.close()
    with pytest.raises(AlignedServeError):
        await asyncio.wait_for(late, 10.0)


async def test_a_stream_that_is_heard_of_too_late_does_not_silence_the_one_that_is_used(pool: Pool) -> None:
    writer, _ = await writer_with_lease(pool, STOPPED)
    channel = open_channel(pool.address, TOKEN)
    late = kp_grpc.KvPoolStub(channel).Write()  # opened before, by a process that has given it up since
    await late.write(kp.PoolWriterMessage(hello=STOPPED))
    await asyncio.wait_for(late.read(), 10.0)
    assert await asyncio.wait_for(writer.take(2 * LEASED), 10.0)
    await channel.close()
    await writer.close()


async def test_a_release_that_is_lost_with_its_stream_is_said_again(pool: Pool) -> None:
    writer, blocks = await writer_with_lease(pool, STOPPED)
    await writer.commit(RequestKey("r"), 16, blocks[:1])
    assert pool.blocks()["owned"] == 1
    link = writer._link
    assert link is not None
    assert link._outbox is not None
    link._outbox.put = lambda message: None  # type: ignore[method-assign]  # nothing arrives any more
    writer.release([RequestKey("r")])
    link.break_off("it is cut")
    async with asyncio.timeout(10.0):
        while pool.blocks()["owned"]:  # noqa: ASYNC110  # no event says so
            await asyncio.sleep(0.01)
    await writer.commit(RequestKey("s"), 16, blocks[1:2])
    assert not writer._told  # the shard's reply to a later message says that it has heard this one
    await writer.close()


async def test_blocks_that_a_writer_has_no_use_for_any_more_go_to_the_one_that_waits_for_them(pool: Pool) -> None:
    writer, blocks = await writer_with_lease(pool, STOPPED)
    other = PoolWriter(OTHER, TOKEN, 0)
    await other.connect(pool.address)
    waiting = asyncio.create_task(other.take(BLOCKS))
    await asyncio.sleep(0.2)  # the first recall has come, and found them in use
    writer.give(blocks)
    assert len(await asyncio.wait_for(waiting, 10.0)) == BLOCKS
    await writer.close()
    await other.close()


async def test_its_successor_gets_a_lease_of_its_own(pool: Pool) -> None:
    old, in_doubt = await writer_with_lease(pool, STOPPED)
    successor = pb.ProcessKey(role="decode", id="decode-0", incarnation=7)
    await pool.view(peer(STOPPED, fenced=True))
    new, blocks = await writer_with_lease(pool, successor)
    assert not set(blocks) & set(in_doubt)
    await pool.view(peer(successor))
    await new.commit(RequestKey("new"), 20, blocks[:2])
    assert pool.server.heartbeat().holds.startswith("1 requests")
    await old.close()
    await new.close()


async def test_while_the_pool_is_recounted_its_loop_goes_on_and_its_books_stand_still(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, blocks = await writer_with_lease(pool, OTHER)
    await pool.view(peer(OTHER))
    begun, end = threading.Event(), threading.Event()
    check = KvPool.check_integrity

    def slow_check(self: KvPool) -> None:
        begun.set()
        assert end.wait(20.0)
        check(self)

    monkeypatch.setattr(KvPool, "check_integrity", slow_check)
    given_up = asyncio.create_task(pool.server.check_integrity())
    try:
        assert await asyncio.to_thread(begun.wait, 10.0)
        given_up.cancel()  # the caller is cancelled; the thread goes on
        committing = asyncio.create_task(writer.commit(RequestKey("r"), 20, blocks[:2]))
        gone = asyncio.create_task(pool.view())
        asked_again = asyncio.create_task(pool.server.check_integrity())
        await asyncio.wait([committing, gone, asked_again], timeout=0.3)
        assert not committing.done()
        assert not gone.done()
        assert pool.server.heartbeat().holds == f"0 requests; blocks: 0/{BLOCKS}, {LEASED} leased"
    finally:
        end.set()
    await asyncio.wait_for(committing, 10.0)
    await asyncio.wait_for(gone, 10.0)
    (book,) = await asyncio.wait_for(asked_again, 10.0)
    assert book.problem == ""
    await writer.close()


async def test_while_a_prefix_is_looked_for_in_a_large_index_the_loop_goes_on_and_the_pool_stands_still(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removal, "FEW_ENTRIES", 0)
    monkeypatch.setattr(removal, "REMOVED_AT_ONCE", 1)
    writer, blocks = await writer_with_lease(pool, OTHER)
    await writer.cache(RequestKey("a"), cached_prefix(range(64), b""), 0, blocks[:4], [])
    begun, end = threading.Event(), threading.Event()
    find = KvPool.begun_by

    def slow_find(self: KvPool, root: bytes, token_ids: Sequence[int]) -> Ids:
        begun.set()
        assert end.wait(20.0)
        return find(self, root, token_ids)

    monkeypatch.setattr(KvPool, "begun_by", slow_find)
    channel = open_channel(pool.address, TOKEN)

    async def drop(prefix: kp.CachedPrefix) -> int:
        dropped: kp.Dropped = await kp_grpc.PrefixCacheStub(channel).Drop(kp.DropCached(prefix=prefix), timeout=20.0)
        return dropped.blocks

    given_up = asyncio.create_task(drop(cached_prefix([], b"")))
    try:
        assert await asyncio.to_thread(begun.wait, 10.0)
        given_up.cancel()  # the drop goes on
        committing = asyncio.create_task(writer.commit(RequestKey("b"), 20, blocks[4:6]))
        again = asyncio.create_task(drop(cached_prefix(range(3), b"")))
        await asyncio.wait([committing, again], timeout=0.2)
        assert not committing.done()
        assert pool.blocks() == {"free": BLOCKS - 4, "owned": 0, "cached": 4}
    finally:
        end.set()
    assert await asyncio.wait_for(again, 10.0) == 0
    await asyncio.wait_for(committing, 10.0)
    assert pool.blocks() == {"free": BLOCKS - 2, "owned": 2, "cached": 0}
    (book,) = await pool.server.check_integrity()
    assert book.problem == ""
    with pytest.raises(grpc.aio.AioRpcError, match="not whole token ids"):
        await drop(kp.CachedPrefix(token_ids=b"abc"))
    await channel.close()
    await writer.close()


async def test_a_writer_that_ends_during_a_recount_is_buried_after_it(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, _ = await writer_with_lease(pool, OTHER)
    await pool.view(peer(OTHER))
    await pool.view()  # its stream is open still
    begun, end = threading.Event(), threading.Event()

    def slow_check(self: KvPool) -> None:
        begun.set()
        assert end.wait(20.0)

    monkeypatch.setattr(KvPool, "check_integrity", slow_check)
    checking = asyncio.create_task(pool.server.check_integrity())
    try:
        assert await asyncio.to_thread(begun.wait, 10.0)
        await writer.close()
        await asyncio.sleep(0.2)  # its stream ends meanwhile
        assert pool.server.heartbeat().holds.endswith(f"{LEASED} leased")
    finally:
        end.set()
    await checking
    async with asyncio.timeout(10.0):
        while not pool.server.heartbeat().holds.endswith(" 0 leased"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_blocks_that_come_in_the_moment_in_which_their_wait_is_given_up_stay_at_hand(pool: Pool) -> None:
    writer, taken = await writer_with_lease(pool, OTHER)
    waiting = asyncio.create_task(writer.take(LEASED))
    await asyncio.sleep(0)
    writer.give(taken)  # serves the waiting call
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert writer.free_blocks >= LEASED
    await writer.close()


async def test_a_writer_that_a_new_supervisor_does_not_know_yet_is_not_buried_with_its_stream(
    pool: Pool,
) -> None:
    writer, block_ids = await writer_with_lease(pool, STOPPED)
    known = view(peer(STOPPED))
    known.told_by, known.prefill, known.decode = 1, 1, 1
    await pool.server.on_view(known)
    starting = view()
    starting.told_by, starting.prefill, starting.decode = 2, 1, 1
    await pool.server.on_view(starting)
    await writer.connect(pool.address)  # a new stream
    await asyncio.wait_for(writer.commit(RequestKey("kept"), 20, block_ids[:2]), 10.0)
    assert writer.refusal == ""
    await writer.close()


async def test_a_writer_that_was_declared_dead_is_told_so_and_must_be_replaced(pool: Pool) -> None:
    writer, _ = await writer_with_lease(pool, STOPPED)
    await pool.view(peer(STOPPED))
    await writer.close()
    await pool.view()
    attachment = PoolAttachment(pool.server.settings, OTHER, 10.0)
    served = view(sv.Peer(process=pb.ProcessKey(role="kv_pool", id="kv_pool-0"), address=pool.address, state="ready"))
    served.peers[0].stores.extend(pool.server.heartbeat().stores)
    await attachment.on_view(served)
    await attachment.attach(MODEL.geometry(PLAN.block_size), [writer])
    async with asyncio.timeout(10.0):
        while attachment.trouble() is None:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert "declared lost" in str(attachment.trouble())
    await attachment.close()


async def test_a_pool_in_other_memory_than_is_mapped_is_not_used(pool: Pool) -> None:
    attachment = PoolAttachment(pool.server.settings, OTHER, 10.0)
    served = view(sv.Peer(process=pb.ProcessKey(role="kv_pool", id="kv_pool-0"), address=pool.address, state="ready"))
    served.peers[0].stores.extend(pool.server.heartbeat().stores)
    await attachment.on_view(served)
    await attachment.attach(MODEL.geometry(PLAN.block_size), [])
    successor, stranger = copy.deepcopy(served), copy.deepcopy(served)
    successor.peers[0].process.incarnation = 2
    await attachment.on_view(successor)
    stranger.peers[0].process.incarnation = 3
    stranger.peers[0].stores[0].memory = "0:0"
    with pytest.raises(TransferError, match="created anew"):
        await attachment.on_view(stranger)
    await attachment.close()
