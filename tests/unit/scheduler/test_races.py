"""Races that the state machines found, each kept as a list of events as a regression test."""

from __future__ import annotations

import pytest

from alignedserve.config import DecodeConfig
from alignedserve.errors import AccountingError
from alignedserve.geometry import KvGeometry
from alignedserve.kv_pool.pool import KvPool
from alignedserve.kv_pool.records import WriterKey
from alignedserve.kv_pool.table import AllocationTable, table_bytes
from alignedserve.request import RequestKey
from alignedserve.scheduler.core import events as ev
from alignedserve.scheduler.core.actions import ReleasePool
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.scheduler.instance.iteration import IterationScheduler
from alignedserve.scheduler.instance.plan import BufferKind, Candidate
from support.core_cell import CoreCell, decode_report, key, only
from support.core_model import CoreModel

# the core: events in order of arrival


def submitted(*names: str, tokens: int = 10, epoch: int = 0, group: str = "group") -> ev.Submitted:
    return ev.Submitted(tuple(ev.RequestMeta(key(name, epoch), tokens, tokens + 10, group, "gw") for name in names))


def submitted_again(name: str, tokens: int, most: int, base_tokens: int, epoch: int = 1) -> ev.Submitted:
    """The pool holds its first `base_tokens`, from an older epoch."""
    return ev.Submitted(
        (ev.RequestMeta(key(name, epoch), tokens, most, "", "gw", base_tokens, *[-(-base_tokens // 4)] * 2),)
    )


CORE_RACES: dict[str, list[ev.Event]] = {
    "a request comes twice in one group": [submitted("a", "a")],
    "the first of a queued group is cancelled, and comes again": [
        ev.InstanceLost("prefill", "p0"),
        submitted("a", "b"),
        ev.CancelRequested((key("a"),)),
        submitted("a", "c"),
    ],
    "a request that needs most of the pool comes again, and the pool still holds a part of it": [
        ev.PoolReported("pool", 25, 21),
        submitted_again("a", 80, 90, 16),
    ],
    "the same, with others before and behind it": [
        ev.PoolReported("pool", 25, 15),
        ev.InstanceLost("prefill", "p0"),
        submitted_again("a", 40, 90, 12),
        submitted_again("b", 80, 90, 28),
    ],
}


@pytest.mark.parametrize("events", CORE_RACES.values(), ids=CORE_RACES.keys())
def test_core(events: list[ev.Event]) -> None:
    """The core handles each event correctly, and serves all open requests at the end."""
    model = CoreModel(CoreCell().core)
    model.instances = {"prefill": {"p0"}, "decode": {"d0"}, "kv_pool": {"pool"}}
    for event in events:
        model.do(event, 0.0)
    model.do(ev.InstanceJoined("prefill", "p0"), 0.0)
    model.do(ev.PrefillReported("p0", 0, 1000, 40, 40, 20, 20), 0.0)
    for _ in range(8):
        for name, entry in list(model.open.items()):
            if entry.state == "prefilling":
                model.do(ev.Prefilled(name, entry.meta.prefix_tokens, 3, 3), 0.0)
            elif entry.state == "prefetched":
                model.do(ev.Joined(entry.decode_id, (name,)), 0.0)
            elif entry.state == "decoding":
                model.do(ev.Finished((name,)), 0.0)
    model.check_empty()


def test_the_copy_of_a_request_that_was_taken_over_is_dropped_by_the_length_that_the_pool_knows() -> None:
    """It has decoded more. By its own length, the pool would keep the copy, which the core believes to be gone."""
    cell = CoreCell(pool=20)
    held = ev.HeldRequest(ev.RequestMeta(key("a"), 41, 50, "", "gw"), True, 40, 10, "", BufferKind.BATCH)
    cell.do(ev.InventoryTaken("d0", (held,), restore=True))
    cell.do(ev.PoolInventoryTaken({key("a"): (20, 5)}))
    cell.do(ev.PoolReported("pool", 20, 15))
    actions = cell.do(decode_report(free=0, running=2, shortest=10, longest=40, batch_id=1, waits=16))
    assert only(actions, ReleasePool) == [ReleasePool((key("a"),), dropped=True, kv_tokens=(20,))]


def test_an_inventory_of_a_decode_instance_that_is_gone_is_not_heard() -> None:
    cell = CoreCell()
    held = ev.HeldRequest(ev.RequestMeta(key("a"), 41, 50, "", "gw"), True, 40, 10, "", BufferKind.BATCH)
    cell.do(ev.InstanceLost("decode", "d0"))
    assert cell.do(ev.InventoryTaken("d0", (held,), restore=True)) == []
    assert cell.states() == {}


# the pool

GEOMETRY = KvGeometry("random", "float32", 2, 2, 8, 4)


def test_a_writer_that_died_waiting_for_blocks_is_not_granted_any() -> None:
    """Found twice: its death was not asked about, and its successor's death left it in the queue."""
    table = AllocationTable(memoryview(bytearray(table_bytes(4))), GEOMETRY, 4)
    pool = KvPool("pool", table, 4)
    first, waiting = WriterKey("decode", "d0", 1), WriterKey("prefill", "p0", 1)
    (grant,) = pool.want(first, 4)
    assert pool.want(waiting, 2) == []
    assert waiting in pool.writers()
    pool.writer_dead(WriterKey("prefill", "p0", 2))
    pool.writer_dead(waiting)
    assert pool.give_back(first, grant.block_ids) == []
    assert pool.counts().leased == 0


# the allocator


def test_a_block_named_twice_is_refused_and_nothing_changes() -> None:
    allocator = BlockAllocator(4, "store")
    blocks = allocator.allocate(2, "a")
    assert blocks is not None
    for misuse in allocator.release, allocator.retain:
        with pytest.raises(AccountingError, match="twice"):
            misuse([blocks[0], blocks[0]], "a" if misuse == allocator.release else "b")
        allocator.check_integrity()
    assert allocator.blocks_of("a") == blocks
    assert allocator.blocks_of("b") == []


# the iteration scheduler


def test_a_candidate_that_is_announced_again_with_more_than_the_cache_can_hold_is_given_back_once() -> None:
    scheduler = IterationScheduler(DecodeConfig(), BlockAllocator(4, "decode-0"), 4)
    name = RequestKey("a")
    for most in 12, 20:
        scheduler.offer(Candidate(name, 8, most, None, BufferKind.BATCH, 1), 0.0)
        scheduler.check_integrity()
    plan = scheduler.plan(0.0)
    assert (plan.joins, plan.give_back.keys) == ((), (name,))
    assert scheduler.holds_nothing()
