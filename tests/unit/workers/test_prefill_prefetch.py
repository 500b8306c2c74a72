"""Prefetching into a candidate buffer: copies that fail, are corrupted, or outlive their decode instance."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence

import pytest

from alignedserve.control.link import Outbox
from alignedserve.control.runtime import RoleSettings
from alignedserve.geometry import KvGeometry
from alignedserve.kv_pool.remote_shards import PoolReader, RemoteShards
from alignedserve.kv_pool.stored import LastCommitted, pooled
from alignedserve.kv_pool.writer import PoolWriter
from alignedserve.prefill_worker.buffers import CandidateBuffer
from alignedserve.prefill_worker.prefetch import Prefetcher
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import prefill_worker_pb2 as pw
from alignedserve.request import RequestKey
from alignedserve.scheduler.instance.plan import BufferKind
from alignedserve.transfer.block_store import HostBlockStore
from alignedserve.transfer.completion import Completion
from alignedserve.transfer.copier import Copier, Route
from alignedserve.transfer.host_channel import HostChannel
from support.faulty_channel import FaultPlan, FaultyChannel

GEOMETRY = KvGeometry("random", "float32", 2, 2, 8, 4)
CAPACITY = 8
OWNER = "decode-0/1/0"


class Prefill:
    """A prefetcher with one buffer of `CAPACITY` blocks; copies from the pool follow `plan`."""

    def __init__(self, plan: FaultPlan) -> None:
        self.pool = HostBlockStore.private("kv_pool-0", GEOMETRY, CAPACITY)
        self.pool.blocks[:] = 7
        self.buffer = CandidateBuffer(BufferKind.BATCH, HostBlockStore.private("buffer", GEOMETRY, CAPACITY))
        self.channel = FaultyChannel(HostChannel(self.pool, self.store), plan)
        self.copier = Copier(verify=True, timeout_s=60.0)
        self.outbox: Outbox[pw.BufferEvent] = Outbox()
        writer = PoolWriter(pb.ProcessKey(role="write_back", id="prefill-0"), "", 0)
        others = RemoteShards(RoleSettings("prefill", "prefill-0", {}, "c", ""), pb.ProcessKey(), 10.0)
        readers = {BufferKind.BATCH: PoolReader(self.channel, others)}
        self.in_pool: dict[RequestKey, pb.StoredRequest] = {}
        self.decoder: tuple[Outbox[pw.BufferEvent], str] | None = (self.outbox, OWNER)
        self.committed = LastCommitted()
        buffers = {BufferKind.BATCH: self.buffer}
        self.prefetcher = Prefetcher(buffers, self.copier, readers, {}, writer, self._read, self.committed, 4)

    async def _read(self, pool_id: str, keys: Collection[RequestKey]) -> dict[RequestKey, pb.StoredRequest]:
        found = {key: self.in_pool[key] for key in keys if key in self.in_pool}
        return {key: stored for key, stored in found.items() if stored.pool_id == pool_id}

    @property
    def store(self) -> HostBlockStore:
        assert isinstance(self.buffer.store, HostBlockStore)
        return self.buffer.store

    async def prefetch(self, *requests: pb.StoredRequest) -> tuple[list[str], list[str], list[str]]:
        """The requests that were not announced: returned, missing, unreadable."""
        named = map(pooled, requests)
        command = pw.Prefetch(decode_id="decode-0", buffer=pw.BUFFER_BATCH, batch_id=1, requests=named)
        missed = await self.prefetcher.prefetch(command, lambda: self.decoder)
        assert all(stored.store_id == stored.pool_id for stored in missed.returned)
        returned = [stored.spec.key.request_id for stored in missed.returned]
        return returned, [key.request_id for key in missed.missing], [key.request_id for key in missed.unreadable]

    def stored(self, name: str, block_ids: list[int]) -> pb.StoredRequest:
        checksums = self.pool.checksums(block_ids)
        spec = pb.RequestSpec(key=pb.RequestKey(request_id=name), prompt_token_ids=[1] * 4 * len(block_ids))
        tokens = 4 * len(block_ids)
        where = {"store_id": "kv_pool-0", "pool_id": "kv_pool-0", "kv_tokens": tokens, "pool_tokens": tokens}
        self.in_pool[RequestKey(name)] = stored = pb.StoredRequest(
            spec=spec,
            block_ids=block_ids,
            pool_block_ids=block_ids,
            checksums=checksums,
            pool_checksums=checksums,
            **where,
        )
        return stored


def run(plan: FaultPlan, scenario: Callable[[Prefill], Awaitable[None]]) -> None:
    async def within() -> None:
        prefill = Prefill(plan)
        try:
            await scenario(prefill)
        finally:
            prefill.channel.close()
            prefill.copier.close()
        prefill.buffer.allocator.check_integrity()

    asyncio.run(within())


def test_what_has_arrived_is_announced_with_its_checksums() -> None:
    async def scenario(prefill: Prefill) -> None:
        stored = prefill.stored("r", [5, 2])
        assert await prefill.prefetch(stored) == ([], [], [])
        here = prefill.buffer.requests[RequestKey("r")]
        assert here.ready
        assert list(here.stored.checksums) == prefill.store.checksums(here.stored.block_ids)
        assert list(here.stored.checksums) == list(stored.pool_checksums)

    run(FaultPlan(), scenario)


@pytest.mark.parametrize("plan", [FaultPlan(flip=1.0), FaultPlan(short=1.0), FaultPlan(error=1.0)], ids=str)
def test_what_could_not_be_copied_is_lost_and_holds_nothing(plan: FaultPlan) -> None:
    async def scenario(prefill: Prefill) -> None:
        requests = prefill.stored("r", [5, 2]), prefill.stored("s", [1])
        assert await prefill.prefetch(*requests) == ([], [], ["r", "s"])
        assert prefill.buffer.allocator.free_blocks == CAPACITY
        assert prefill.copier.failures == 4  # each was tried twice

    run(plan, scenario)


def test_a_fault_of_a_moment_is_made_good_by_copying_again() -> None:
    async def scenario(prefill: Prefill) -> None:
        assert await prefill.prefetch(prefill.stored("r", [5, 2])) == ([], [], [])
        assert prefill.copier.failures == 1
        assert bool((prefill.store.blocks[list(prefill.buffer.requests[RequestKey("r")].stored.block_ids)] == 7).all())

    run(FaultPlan(flip=1.0, most=1), scenario)


def test_blocks_stay_taken_while_a_copy_for_a_lost_decode_instance_may_still_write() -> None:
    async def scenario(prefill: Prefill) -> None:
        stored = prefill.stored("r", [5, 2])
        prefetching = asyncio.ensure_future(prefill.prefetch(stored))
        for _ in range(10):  # the pool is read first
            await asyncio.sleep(0)
        assert prefill.channel.pending == 1
        assert prefill.buffer.drop_owner(OWNER) == []
        assert prefill.buffer.allocator.free_blocks == CAPACITY - 2
        prefill.channel.release()
        assert await prefetching == (["r"], [], [])
        assert prefill.buffer.allocator.free_blocks == CAPACITY

    run(FaultPlan(stuck=1.0), scenario)


def test_a_candidate_whose_shard_has_gone_is_lost_and_delays_no_other() -> None:
    async def scenario(prefill: Prefill) -> None:
        gone, here = prefill.stored("r", [5, 2]), prefill.stored("s", [1])
        gone.pool_id = gone.store_id = "kv_pool-7"
        assert await prefill.prefetch(gone, here) == ([], [], ["r"])
        assert prefill.buffer.requests[RequestKey("s")].ready
        assert prefill.buffer.allocator.free_blocks == CAPACITY - 1

    run(FaultPlan(), scenario)


def test_answers_to_one_prompt_share_blocks_in_a_buffer_only_where_they_lie_in_one_shard() -> None:
    async def scenario(prefill: Prefill) -> None:
        first, same, other = (prefill.stored(name, [5, 2]) for name in "rst")
        for stored in (first, same, other):
            stored.spec.group_id, stored.spec.group_size = "g", 3
        other.pool_id = "kv_pool-7"
        await prefill.prefetch(first)
        placed = [prefill.buffer.place(stored, OWNER) for stored in (same, other)]
        assert [placement.resident for placement in placed if placement is not None] == [2, 0]

    run(FaultPlan(), scenario)


def test_what_its_shard_does_not_have_is_missing_and_delays_no_other() -> None:
    async def scenario(prefill: Prefill) -> None:
        ended, here = prefill.stored("r", [5, 2]), prefill.stored("s", [1])
        del prefill.in_pool[RequestKey("r")]
        assert await prefill.prefetch(ended, here) == ([], ["r"], [])
        assert prefill.buffer.requests[RequestKey("s")].ready

    run(FaultPlan(), scenario)


def test_a_decode_instance_that_has_gone_while_the_pool_was_read_gets_nothing() -> None:
    async def scenario(prefill: Prefill) -> None:
        prefill.decoder = None
        assert await prefill.prefetch(prefill.stored("r", [5, 2])) == (["r"], [], [])
        assert prefill.buffer.allocator.free_blocks == CAPACITY

    run(FaultPlan(), scenario)


def test_an_unexpected_error_loses_its_own_request_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(prefill: Prefill) -> None:
        requests = prefill.stored("r", [5, 2]), prefill.stored("s", [1])
        copy = prefill.copier.copy

        def break_first(routes: Sequence[Route], destination_ids: Sequence[int], label: str) -> Completion:
            if label == "r":
                raise ValueError("a bug")
            return copy(routes, destination_ids, label)

        monkeypatch.setattr(prefill.copier, "copy", break_first)
        assert await prefill.prefetch(*requests) == ([], [], ["r"])
        assert prefill.buffer.requests[RequestKey("s")].ready
        assert prefill.buffer.allocator.free_blocks == CAPACITY - 1

    run(FaultPlan(), scenario)


def test_a_candidate_that_is_removed_during_its_copy_is_returned() -> None:
    async def scenario(prefill: Prefill) -> None:
        prefetching = asyncio.ensure_future(prefill.prefetch(prefill.stored("r", [5, 2]), prefill.stored("s", [1])))
        for _ in range(10):  # the pool is read first
            await asyncio.sleep(0)
        assert prefill.buffer.remove(RequestKey("r")) is not None
        prefill.channel.release()
        assert await prefetching == (["r"], [], [])
        assert prefill.buffer.requests[RequestKey("s")].ready

    run(FaultPlan(stuck=1.0), scenario)


def test_what_this_instance_has_just_committed_is_not_read() -> None:
    async def scenario(prefill: Prefill) -> None:
        here, elsewhere = prefill.stored("r", [5, 2]), prefill.stored("s", [1])
        prefill.committed.note(prefill.in_pool.pop(RequestKey("r")))
        assert await prefill.prefetch(here, elsewhere) == ([], [], [])
        assert prefill.buffer.requests.keys() == {RequestKey("r"), RequestKey("s")}
        prefill.buffer.remove(RequestKey("r"))
        assert await prefill.prefetch(here) == ([], ["r"], [])  # it is used once

    run(FaultPlan(), scenario)
