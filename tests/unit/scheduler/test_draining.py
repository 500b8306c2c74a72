"""Draining instances: they get nothing new, what they have returns, and they report when it has."""

from __future__ import annotations

from typing import Any

from alignedserve.scheduler.core import events as ev
from alignedserve.scheduler.core.actions import Prefetch, ReportLost, StartPrefill
from alignedserve.scheduler.instance.plan import BufferKind
from support.core_cell import CoreCell, decode_report, key, only
from support.iterations import Worker, names

BATCH, REQUESTS = BufferKind.BATCH, BufferKind.REQUESTS


def drain(cell: CoreCell, *instance_ids: str) -> list[Any]:
    return list(cell.do(ev.DrainingChanged(frozenset(instance_ids))))


# the core


def test_a_draining_decode_instance_gets_nothing_and_what_it_returns_goes_to_another() -> None:
    cell = CoreCell(decodes=2)
    cell.wait("a")
    cell.do(ev.Joined("d0", (key("a"),)))
    cell.do(decode_report("d0", free=97, running=1, shortest=10, longest=10, batch_id=1))
    assert drain(cell, "d0") == []
    assert cell.core.drained() == []
    actions = [action for name in ("b", "c", "d") for action in cell.wait(name)]
    actions += cell.do(ev.Tick(), after_s=9.0)
    sent = only(actions, Prefetch)
    assert sent
    actions += cell.do(ev.Returned(key("a"), 12, 3))
    assert cell.core.drained() == ["d0"]
    actions += cell.do(ev.Joined("d1", tuple(name for prefetch in sent for name in prefetch.keys)))
    actions += cell.do(decode_report("d1", free=91, running=3, shortest=10, longest=10, batch_id=1), after_s=9.0)
    assert only(actions, ReportLost) == []
    sent = only(actions, Prefetch)
    assert sorted(str(name.request_id) for prefetch in sent for name in prefetch.keys) == ["a", "b", "c", "d"]
    assert {prefetch.decode_id for prefetch in sent} == {"d1"}


def test_a_draining_prefill_instance_gets_no_prompt_and_no_candidate() -> None:
    cell = CoreCell(prefills=2)
    (begun,) = only(cell.submit("a"), StartPrefill)
    going, staying = begun.prefill_id, "p1" if begun.prefill_id == "p0" else "p0"
    drain(cell, going)
    assert cell.core.drained() == []
    assert {a.prefill_id for name in "bcd" for a in only(cell.submit(name), StartPrefill)} == {staying}
    prefetched = [a for name in "abcd" for a in only(cell.prefilled(name), Prefetch)]
    assert prefetched
    assert {prefetch.prefill_id for prefetch in prefetched} == {staying}
    assert cell.core.drained() == [going]


def test_candidates_in_the_buffers_of_a_draining_prefill_instance_keep_it() -> None:
    cell = CoreCell()
    (prefetch,) = only(cell.wait("a"), Prefetch)
    assert prefetch.prefill_id == "p0"
    drain(cell, "p0")
    assert cell.core.drained() == []
    cell.do(ev.Returned(key("a"), 10, 3))
    assert cell.core.drained() == ["p0"]


def test_without_a_prefill_instance_that_stays_candidates_are_pulled_from_the_pool() -> None:
    cell = CoreCell()
    cell.submit("a")
    drain(cell, "p0")
    (prefetch,) = only(cell.prefilled("a"), Prefetch)
    assert (prefetch.decode_id, prefetch.prefill_id) == ("d0", None)


def test_an_instance_that_stays_after_all_gets_work_again() -> None:
    cell = CoreCell()
    drain(cell, "d0")
    cell.wait("a")
    assert cell.states() == {"waiting_in_pool": 1}
    (prefetch,) = only(drain(cell), Prefetch)
    assert prefetch.decode_id == "d0"


def test_an_instance_that_is_not_known_here_is_drained_and_the_loss_of_a_drained_one_loses_no_request() -> None:
    cell = CoreCell(decodes=2)
    drain(cell, "d1", "d7")
    assert cell.core.drained() == ["d1", "d7"]
    assert cell.do(ev.InstanceLost("decode", "d1")) == []


# the iteration scheduler


def worker(*running: str, capacity: int = 100) -> Worker:
    """Copies complete when the test says so. These requests run, and have had an iteration."""
    found = Worker(capacity, instant=False)
    for name in running:
        offer(found, name)
    if running:
        for join in found.plan().joins:
            found.scheduler.copied_in(join.key)
        found.run(found.plan())
    return found


def offer(found: Worker, name: str) -> None:
    found.offer(name, 10, most=28)


def test_draining_sends_what_runs_to_the_pool_and_gives_candidates_back() -> None:
    instance = worker("a", "b")
    instance.scheduler.drain()
    offer(instance, "late")
    plan = instance.plan()
    assert names(plan.evictions) == ["a", "b"]
    assert all(evict.to_pool for evict in plan.evictions)
    assert (plan.run, plan.joins, names(plan.give_back.keys)) == ((), (), ["late"])
    assert not instance.scheduler.holds_nothing()
    for evict in plan.evictions:
        assert instance.scheduler.copied_out(evict.key)
    assert instance.scheduler.holds_nothing()
    assert instance.allocator.free_blocks == 100


def test_one_that_is_on_its_way_in_runs_once_and_then_leaves() -> None:
    instance = worker()
    offer(instance, "a")
    (join,) = instance.plan().joins
    instance.scheduler.drain()
    assert instance.plan().evictions == ()
    instance.scheduler.copied_in(join.key)
    plan = instance.plan()
    assert (names(plan.run), plan.evictions) == (["a"], ())
    instance.run(plan)
    (evict,) = instance.plan().evictions
    assert evict.kv_tokens == 11


def test_an_eviction_that_fails_is_tried_again_after_an_iteration() -> None:
    instance = worker("a")
    instance.scheduler.drain()
    (evict,) = instance.plan().evictions
    assert instance.scheduler.copy_failed(evict.key)
    plan = instance.plan()
    assert (names(plan.run), plan.evictions) == (["a"], ())
    instance.run(plan)
    assert names(instance.plan().evictions) == ["a"]


def test_one_that_was_on_its_way_to_the_requests_buffer_is_given_back_when_it_is_there() -> None:
    instance = worker("a", "b", capacity=10)  # two requests of 10 tokens have room to grow for a short time only
    plan = instance.plan()
    for _ in range(30):
        if plan.evictions:
            break
        instance.run(plan)
        plan = instance.plan()
    (evict,) = plan.evictions
    assert not evict.to_pool
    instance.scheduler.drain()
    instance.plan()
    instance.scheduler.copied_out(evict.key)
    assert evict.key in instance.plan().give_back.keys
