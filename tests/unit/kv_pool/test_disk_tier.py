"""The disk tier of a shard: what is written ahead, found again, read once, and what faults of the disk cost."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from alignedserve.geometry import KvGeometry
from alignedserve.kv_pool import removal
from alignedserve.kv_pool.disk import demotion, promotion, tier
from alignedserve.kv_pool.disk.breaker import FIRST_PAUSE_S, MOST_FAULTS
from alignedserve.kv_pool.disk.layout import PAGE_BYTES
from alignedserve.kv_pool.disk.shard import DISK
from alignedserve.kv_pool.disk.threads import DiskThreads
from alignedserve.scheduler.cost.load import load_step_cost
from support.disk_cases import (
    CAPACITY,
    PAGES,
    ROOT,
    A,
    B,
    Make,
    cache,
    forget,
    found,
    metric,
    on_disk,
    opened,
    promote,
    tiers,
)
from support.disk_tier import HeldThreads
from support.kv_pool import PREFILL, drop_prefix, leased
from support.prefix_pool import GEOMETRY


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with tiers(tmp_path / "kv") as new:
        yield new


@pytest.mark.parametrize("geometry", [GEOMETRY, PAGES], ids=["through a buffer", "straight"])
def test_blocks_written_ahead_are_found_after_a_restart_of_the_whole_cluster(make: Make, geometry: KvGeometry) -> None:
    first = opened(make(geometry=geometry))
    cache(first, A)
    cache(first, [*A[:8], *B])
    first.demote()
    assert (on_disk(first, A), on_disk(first, [*A[:8], *B])) == (5, 7)
    assert metric(first, "disk_tier_written_bytes_total") == 10 * PAGE_BYTES  # two blocks are shared
    first.kill()

    second = opened(make(geometry=geometry))
    assert second.tier.count().cached == 10
    assert promote(second, A) == 5
    assert promote(second, [*A[:8], *B]) == 7
    assert metric(second, "disk_tier_read_bytes_total") == 10 * PAGE_BYTES
    assert second.opened.promotion.breaker.faults == 0


def test_what_is_on_disk_is_not_written_again_and_only_what_is_new_is_read(make: Make) -> None:
    rig = opened(make())
    cache(rig, A[:12])
    rig.demote()
    assert metric(rig, "disk_tier_written_bytes_total") == 3 * PAGE_BYTES
    rig.demote()
    cache(rig, A)
    rig.demote()
    assert metric(rig, "disk_tier_written_bytes_total") == 5 * PAGE_BYTES
    forget(rig)
    cache(rig, A[:8])
    assert promote(rig, A) == 5
    assert metric(rig, "disk_tier_read_bytes_total") == 3 * PAGE_BYTES
    rig.demote()
    assert metric(rig, "disk_tier_written_bytes_total") == 5 * PAGE_BYTES


@pytest.mark.parametrize("few", [0, 1000], ids=["a large index", "a small one"])
def test_a_prefix_that_is_dropped_is_not_on_disk_after_a_restart_either(
    make: Make, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removal, "FEW_ENTRIES", few)
    monkeypatch.setattr(removal, "REMOVED_AT_ONCE", 2)
    monkeypatch.setattr(demotion, "ERASED_AT_ONCE", 2)
    first = opened(make())
    cache(first, A)
    cache(first, [*A[:8], *B])
    first.demote()
    first.run(first.tier.forget(ROOT, A[:12]))
    assert first.run(first.tier.erased(10.0))
    assert (on_disk(first, A), on_disk(first, [*A[:8], *B])) == (2, 7)
    first.kill()
    second = opened(make())
    assert (on_disk(second, A), on_disk(second, [*A[:8], *B])) == (2, 7)
    second.run(second.tier.forget(ROOT, []))
    assert second.run(second.tier.erased(10.0))
    assert second.tier.count().cached == 0
    second.kill()
    assert opened(make()).tier.count().cached == 0


def test_only_what_goes_next_is_written_and_only_while_few_blocks_are_free(make: Make) -> None:
    rig = opened(make(ahead=2))
    cache(rig, A)
    assert not rig.opened.demotion._is_due()  # 11 of 16 are free
    cache(rig, B)
    cache(rig, [7, *B[1:]])
    assert rig.opened.demotion._is_due()
    rig.demote()
    assert (on_disk(rig, A), on_disk(rig, B)) == (5, 0)  # two blocks go next: the last ones of the oldest prefix


def test_what_is_cached_is_written_when_the_cluster_ends(make: Make) -> None:
    first = opened(make(ahead=2))
    cache(first, A)
    cache(first, [*A[:8], *B])
    first.run(first.tier.close(flush=True))
    assert not first.calls.fds
    second = opened(make())
    assert (on_disk(second, A), on_disk(second, [*A[:8], *B])) == (5, 7)


def test_what_would_go_last_is_written_first_and_a_slow_disk_holds_up_no_end(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tier, "FLUSH_S", 0.05)
    first = opened(make())
    cache(first, A)
    cache(first, B)
    monkeypatch.setattr(first.opened.demotion, "_most", 5)  # blocks that are written at once
    HeldThreads.held = True
    closing = first.begin(first.tier.close(flush=True))
    first.work(4)  # what goes last is known, and written in two parts, then its entries
    while not closing.done():
        first.spin()
    HeldThreads.held = False
    assert "are not on disk" in caplog.text
    first.kill()
    second = opened(make())
    assert (on_disk(second, A), on_disk(second, B)) == (0, 5)


def test_a_disk_smaller_than_what_is_cached_takes_what_would_go_last_once(make: Make) -> None:
    first = opened(make(slots=6))
    cache(first, A)
    cache(first, B)
    writing = first.opened.demotion
    first.run(first.tier.close(flush=True))
    assert writing.written_bytes <= 6 * PAGE_BYTES
    assert on_disk(opened(make(slots=6)), B) == 5


def test_a_small_disk_is_not_written_to_while_nothing_changes(make: Make) -> None:
    rig = opened(make(slots=6))
    for tokens in (A, B, [7, *B[1:]]):
        cache(rig, tokens)
    rig.opened.demotion.wake()
    for _ in range(40):
        rig.spin()
    written = rig.opened.demotion.written_bytes
    assert 0 < written <= (16 + 2) * PAGE_BYTES
    for _ in range(40):
        rig.spin()
    assert rig.opened.demotion.written_bytes == written


@pytest.mark.parametrize("fault", [False, True])
def test_what_is_dropped_while_the_file_is_not_open_or_not_writable_stays_dropped(
    make: Make, monkeypatch: pytest.MonkeyPatch, fault: bool
) -> None:
    monkeypatch.setattr(demotion, "ERASE_AGAIN_S", 0.0)
    first = opened(make())
    cache(first, A)
    first.demote()
    first.kill()
    second = opened(make()) if fault else make()
    second.calls.write_faults += ["eio"] * fault
    second.run(second.tier.forget(ROOT, []))
    if not fault:
        second.start()
    second.spin()
    assert second.tier.count().cached == 0
    second.kill()
    assert opened(make()).tier.count().cached == 0


def test_a_block_whose_place_is_wanted_while_it_is_written_is_given_up(make: Make) -> None:
    rig = opened(make())
    cache(rig, A)
    HeldThreads.held = True
    step = rig.begin(rig.opened.demotion.step())
    rig.work(1)  # what goes next is known, and slots are leased
    blocks = leased(rig.pool, PREFILL, CAPACITY - 2)  # three of the five are given up
    for block in blocks:
        rig.store.read_block(block)[:] = os.urandom(GEOMETRY.block_bytes)
    rig.work(10)
    assert step.done()
    assert on_disk(rig, A) == 2
    rig.pool.give_back(PREFILL, blocks)
    forget(rig)
    HeldThreads.held = False
    assert promote(rig, A) == 2


def test_prompts_that_need_the_same_blocks_wait_for_one_read(make: Make) -> None:
    rig = opened(make())
    cache(rig, A)
    rig.demote()
    forget(rig)
    HeldThreads.held = True
    reads = rig.calls.reads
    waiting = [rig.begin(rig.opened.promotion.promote(ROOT, [*A, 0], 1000)) for _ in range(3)]
    assert rig.tier.begin(ROOT, [*A, 0]) == (5, 0.0)  # as for a gateway's hint; how fast the disk is, is not known yet
    promotion = rig.opened.promotion
    promotion._bytes_per_s = 1e9
    assert rig.tier.begin(ROOT, [*A, 0]) == (5, pytest.approx(5 * promotion._io.layout.slot_bytes / 1e9))
    rig.work(10)
    assert all(task.done() for task in waiting)
    assert (rig.calls.reads - reads, found(rig, A)) == (1, 5)
    assert rig.tier.used_tokens(rig.index.match(rig.index.chain(ROOT, A), 99)) == 20
    assert rig.tier.used_tokens(rig.index.match(rig.index.chain(ROOT, A), 99)) == 0  # from then on they are the host's


def test_what_there_is_no_room_for_is_not_read_and_nothing_gives_way_to_its_own_continuation(make: Make) -> None:
    rig = opened(make())
    cache(rig, A)
    rig.demote()
    forget(rig)
    blocks = leased(rig.pool, PREFILL, CAPACITY - 3)
    assert promote(rig, A) == 3
    rig.pool.give_back(PREFILL, blocks)
    assert promote(rig, A) == 5
    blocks = leased(rig.pool, PREFILL, CAPACITY)
    assert promote(rig, A) == 0
    rig.pool.give_back(PREFILL, blocks)


def test_reading_that_is_predicted_to_take_longer_than_computing_is_declined(make: Make) -> None:
    rig = opened(make(cost=load_step_cost("a100-opt-13b")))
    cache(rig, A)
    rig.demote()
    forget(rig)
    rig.opened.promotion._bytes_per_s = 1.0
    assert promote(rig, A) == 0
    assert metric(rig, "disk_tier_declined_total") > 0
    rig.opened.promotion._bytes_per_s = 1e9
    assert promote(rig, A) == 5


def test_a_disk_that_hangs_costs_a_miss_in_bounded_time(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion, "MOST_WAIT_S", 0.1)
    monkeypatch.setattr(promotion, "HUNG_S", 0.05)
    rig = opened(make(threads=DiskThreads))
    clock = asyncio.get_event_loop_policy().new_event_loop()
    rig.opened.promotion._clock = clock.time
    cache(rig, A)
    rig.demote()
    forget(rig)
    goes_on = threading.Event()
    read = rig.calls.read

    def hang(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        assert goes_on.wait(20.0)
        return read(fd, buffers, offset)

    rig.calls.read = hang  # type: ignore[method-assign]
    try:
        assert promote(rig, A) == 0
        assert metric(rig, "disk_tier_on", doing="read") == 0
        assert len(rig.pool._blocks.leased_to(DISK)) == 5  # the disk may still write to them
        assert promote(rig, A) == 0
    finally:
        goes_on.set()
        clock.close()
    while rig.pool._blocks.leased_to(DISK):
        rig.spin()
    rig.now = 1e9
    rig.opened.promotion.breaker.succeeded()
    assert promote(rig, A) == 5


@pytest.mark.parametrize("fault", ["eio", "short"])
def test_read_errors_cost_misses_and_switch_reading_off_for_a_while(
    make: Make, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig = opened(make())
    cache(rig, A)
    rig.demote()
    forget(rig)
    for _ in range(MOST_FAULTS):
        cache(rig, A)
        rig.demote()
        forget(rig)
        rig.calls.read_faults = [fault]
        assert promote(rig, A) == 0
    assert metric(rig, "disk_tier_on", doing="read") == 0
    assert metric(rig, "disk_tier_faults_total", doing="read") == MOST_FAULTS
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    cache(rig, A)
    rig.demote()
    forget(rig)
    assert promote(rig, A) == 0
    rig.now += FIRST_PAUSE_S + 1
    assert promote(rig, A) == 5


@pytest.mark.parametrize("few", [0, 1000], ids=["a large index", "a small one"])
def test_other_bytes_than_were_written_are_a_miss_and_forgotten(
    make: Make, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removal, "FEW_ENTRIES", few)
    rig = opened(make())
    cache(rig, A)
    rig.demote()
    forget(rig)
    rig.calls.read_faults = ["garbage"]
    assert promote(rig, A) == 0
    assert (on_disk(rig, A), metric(rig, "disk_tier_rejected_blocks_total")) == (0, 1)


@pytest.mark.parametrize("fault", ["enospc", "eio", "short"])
def test_write_errors_leave_what_is_on_disk_and_switch_writing_off_for_a_while(make: Make, fault: str) -> None:
    rig = opened(make())
    cache(rig, A)
    rig.demote()
    cache(rig, B)
    for _ in range(MOST_FAULTS):
        rig.calls.write_faults = [fault]
        rig.run(rig.opened.demotion.step())
    assert (on_disk(rig, A), on_disk(rig, B)) == (5, 0)
    assert metric(rig, "disk_tier_on", doing="write") == 0
    assert metric(rig, "disk_tier_on", doing="read") == 1
    assert rig.opened.disk.blocks.leased_blocks == 0
    rig.now += FIRST_PAUSE_S + 1
    rig.demote()
    forget(rig)
    assert promote(rig, A) == 5


def test_a_write_that_is_torn_is_a_miss(make: Make) -> None:
    rig = opened(make())
    cache(rig, A)
    rig.calls.write_faults = ["torn"]  # reported as written
    rig.demote()
    assert on_disk(rig, A) == 5
    forget(rig)
    assert promote(rig, A) == 2


def test_a_file_that_is_truncated_or_removed_costs_what_was_in_it(make: Make, tmp_path: Path) -> None:
    rig = opened(make())
    cache(rig, A)
    rig.demote()
    forget(rig)
    (path,) = (tmp_path / "kv").iterdir()
    os.truncate(path, PAGE_BYTES)
    assert promote(rig, A) == 0
    cache(rig, B)
    rig.demote()
    rig.kill()
    path.unlink()
    again = opened(make())
    assert again.tier.count().cached == 0
    cache(again, A)
    again.demote()
    assert on_disk(again, A) == 5


def test_a_damaged_entry_is_dropped_with_what_continues_it(make: Make, tmp_path: Path) -> None:
    rig = opened(make())
    cache(rig, A)
    rig.demote()
    (third,) = rig.opened.disk.index.match(rig.index.chain(ROOT, A), 99)[2:3]
    layout = rig.opened.promotion._io.layout
    rig.kill()
    (path,) = (tmp_path / "kv").iterdir()
    with path.open("r+b") as content:
        content.seek(layout.entries_at + third * layout.entry_bytes + 70)
        content.write(b"\xff")
    again = opened(make())
    assert again.tier.count().cached == 2
    assert promote(again, A) == 2
    again.demote()
    cache(again, A)
    again.demote()
    assert on_disk(again, A) == 5


def test_the_file_of_other_weights_or_another_geometry_is_discarded(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    weights = "one"
    for change in ("nothing", "weights", "geometry"):
        if change == "weights":
            weights = "another"
        geometry = PAGES if change == "geometry" else GEOMETRY
        caplog.clear()
        rig = opened(make(weights=weights, geometry=geometry))
        assert rig.tier.count().cached == 0
        assert any("begins empty" in record.message for record in caplog.records)
        cache(rig, A)
        rig.demote()
        rig.kill()
        same = opened(make(weights=weights, geometry=geometry))
        assert same.tier.count().cached == 5
        same.kill()


def test_the_order_of_eviction_on_disk_is_the_policys_and_cuts_no_prefix(make: Make) -> None:
    rig = opened(make(slots=12))
    for tokens in (A, B):
        cache(rig, tokens)
        rig.demote()
    forget(rig)
    assert promote(rig, A) == 5  # used later than B
    drop_prefix(rig.pool, ROOT, B[:4])
    cache(rig, [*A[:4], 1, 2, 3, 4, *B[:12]])
    rig.demote()
    forget(rig)
    assert (on_disk(rig, A), on_disk(rig, [*A[:4], 1, 2, 3, 4, *B[:12]])) == (5, 5)
    assert on_disk(rig, B) == 3


def test_what_is_forgotten_while_it_is_read_does_not_come_back(make: Make) -> None:
    rig = opened(make())
    cache(rig, A)
    rig.demote()
    forget(rig)
    HeldThreads.held = True
    waiting = rig.begin(rig.opened.promotion.promote(ROOT, [*A, 0], 1000))
    rig.run(rig.tier.forget(ROOT, A[:8]))
    rig.work(10)
    assert waiting.done()
    assert (found(rig, A), on_disk(rig, A)) == (0, 0)
    assert not rig.pool._blocks.leased_to(DISK)


def test_entries_that_were_erased_are_not_overwritten_by_older_pages(make: Make) -> None:
    rig = opened(make())
    cache(rig, A)
    HeldThreads.held = True
    step = rig.begin(rig.opened.demotion.step())
    while not on_disk(rig, A):
        rig.work(1)
    rig.run(rig.tier.forget(ROOT, []))
    rig.spin()
    for each in rig.threads:  # two threads write: a later call may be done first
        assert isinstance(each, HeldThreads)
        each.waiting.reverse()
    rig.work(10)
    assert step.done()
    rig.kill()
    HeldThreads.held = False
    assert opened(make()).tier.count().cached == 0


def test_a_prefix_longer_than_the_disk_is_kept_as_far_as_it_fits(make: Make) -> None:
    rig = opened(make(slots=4))
    cache(rig, A)
    rig.demote()
    assert on_disk(rig, A) == 4
    written = metric(rig, "disk_tier_written_bytes_total")
    rig.demote()
    assert metric(rig, "disk_tier_written_bytes_total") == written


def test_blocks_are_verified_on_both_ways_if_their_writers_had_checksums(make: Make) -> None:
    rig = opened(make(verify=True))
    blocks = [*range(5)]
    cache(rig, A, [1] * len(blocks))  # as if the bytes were not those that were committed
    rig.demote()
    assert on_disk(rig, A) == 0
    forget(rig)
    cache(rig, B)
    rig.demote()
    forget(rig)
    assert promote(rig, B) == 5
    blocks = rig.index.match(rig.index.chain(ROOT, B), 99)
    assert rig.index.checksums(blocks) == tuple(rig.store.checksums(blocks))
