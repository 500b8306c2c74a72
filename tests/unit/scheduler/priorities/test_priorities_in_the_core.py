"""Requests with priorities in the core: who is refused, where there is room for whom, and what goes ahead."""

from __future__ import annotations

from alignedserve.errors import OverloadedError
from alignedserve.request import BATCH_PRIORITY
from alignedserve.scheduler.core import events as ev
from alignedserve.scheduler.core.actions import Prefetch, Recall, Reject, ReportLost, StartPrefill
from alignedserve.scheduler.instance.plan import BufferKind
from alignedserve.scheduler.priorities import BACKGROUND
from support.core_cell import CoreCell, decode_report, key, only

BATCH, REQUESTS = BufferKind.BATCH, BufferKind.REQUESTS


def started(actions: list[object]) -> list[str]:
    return [action.keys[0].request_id for action in actions if isinstance(action, StartPrefill)]


def test_a_lower_priority_is_prefilled_first() -> None:
    cell = CoreCell(queue_tokens=10)
    cell.submit("first")
    for name, priority in (("batch", BATCH_PRIORITY), ("late", 3), ("plain", 0), ("urgent", -3)):
        assert started(cell.submit(name, priority=priority)) == []
    order = []
    name = "first"
    while name:
        name = next(iter(started(cell.prefilled(name))), "")
        order.append(name)
    assert order == ["urgent", "plain", "late", "batch", ""]


def test_a_full_queue_refuses_the_last_of_the_highest_priority() -> None:
    cell = CoreCell(queue_tokens=10, max_queue=3)
    cell.submit("first")
    for name in ("b1", "b2"):
        cell.submit(name, priority=BATCH_PRIORITY)
    cell.submit("low", priority=1)
    (rejected,) = only(cell.submit("urgent", priority=-1), Reject)
    assert rejected.keys == (key("b2"),)
    assert isinstance(rejected.error, OverloadedError)
    (rejected,) = only(cell.submit("x", "y", priority=1), Reject)  # only one has a higher priority
    assert rejected.keys == (key("x"), key("y"))
    assert cell.states() == {"prefilling": 1, "queued": 3}


def test_requests_that_were_submitted_again_keep_their_places() -> None:
    cell = CoreCell(queue_tokens=10, max_queue=1)
    cell.submit("first")
    cell.do(ev.Submitted((ev.RequestMeta(key("again", 1), 10, 20, "g", "gw", priority=BATCH_PRIORITY),)))
    (rejected,) = only(cell.submit("urgent", priority=-1), Reject)
    assert rejected.keys == (key("urgent"),)


def test_a_prompt_is_dispatched_beside_pending_ones_that_let_it_go_first() -> None:
    cell = CoreCell(queue_tokens=20)
    cell.submit("b1", tokens=10, priority=BATCH_PRIORITY)
    cell.submit("b2", tokens=10, priority=BATCH_PRIORITY)
    assert started(cell.submit("b3", tokens=10, priority=BATCH_PRIORITY)) == []
    assert started(cell.submit("plain", tokens=10)) == ["plain"]
    assert started(cell.submit("second", tokens=10)) == ["second"]
    assert started(cell.submit("third", tokens=10)) == []


def test_prompts_without_hurry_leave_a_quarter_of_the_pool_to_others() -> None:
    cell = CoreCell(pool=40, growth_reserve=0.05)
    cell.make_busy()
    blocks = 0
    for name in range(20):
        if not started(cell.submit(name, tokens=16, most=20, priority=BATCH_PRIORITY)):
            break
        cell.prefilled(name, 16)
        blocks += 4
    assert 12 <= blocks <= 28
    assert started(cell.submit("plain", tokens=16, most=20)) == ["plain"]


def test_what_waits_without_hurry_loses_its_kv_to_a_prompt_that_finds_the_pool_full() -> None:
    cell = CoreCell(pool=40, growth_reserve=0.05)
    cell.make_busy()
    for name in range(4):
        cell.wait(name, 16, priority=BATCH_PRIORITY)
    blocks = cell.core._state.ledger.free
    cell.do(ev.PoolReported("pool", 40, blocks - 10))  # another writer has taken what was left
    lost, begun = [], []
    for name in ("x", "y", "z"):
        actions = cell.submit(name, tokens=16, most=20)
        lost += [one.request_id for action in only(actions, ReportLost) for one in action.keys]
        begun += started(actions)
    assert begun == ["x", "y", "z"]
    assert lost
    assert set(lost) <= {"0", "1", "2", "3"}


def test_a_request_goes_ahead_of_a_candidate_batch_of_a_higher_priority() -> None:
    cell = CoreCell(min_batch_requests=2)
    cell.make_busy(lengths=(100, 100))
    cell.wait("b1", 20, priority=1)
    (batch,) = only(cell.wait("b2", 20, priority=1), Prefetch)
    assert batch.buffer is BATCH
    assert only(cell.wait("same", 20, priority=1), Prefetch) == []
    (ahead,) = only(cell.wait("plain", 20), Prefetch)
    assert (ahead.buffer, ahead.keys) == (REQUESTS, (key("plain"),))


def test_a_request_takes_the_place_of_one_without_hurry_although_the_instance_is_full() -> None:
    cell = CoreCell()
    cell.wait("batch", 40, priority=BATCH_PRIORITY)
    cell.do(ev.Joined("d0", (key("batch"),)))
    cell.do(decode_report(free=0, running=1, shortest=40, longest=40, batch_id=1))
    (ahead,) = only(cell.wait("plain", 20), Prefetch)
    assert (ahead.decode_id, ahead.buffer, ahead.keys) == ("d0", REQUESTS, (key("plain"),))
    assert only(cell.wait("more", 60, priority=BATCH_PRIORITY), Prefetch) == []  # without hurry it waits for room


def test_a_candidate_batch_without_hurry_is_recalled_once_for_one_that_can_fill_its_place() -> None:
    cell = CoreCell(min_batch_requests=2, requests=0, cache=20)
    cell.make_busy(lengths=(30, 30))
    cell.wait("b1", 20, priority=BATCH_PRIORITY)
    (batch,) = only(cell.wait("b2", 20, priority=BATCH_PRIORITY), Prefetch)
    cell.do(decode_report(cache=20, free=0, running=1, shortest=70, longest=70, batch_id=1), after_s=1.0)
    (recall,) = only(cell.wait("x", 30, 40), Recall)  # it has K blocks
    assert set(recall.keys) == set(batch.keys) == {key("b1"), key("b2")}
    for name in ("y", "z"):
        assert only(cell.wait(name, 30, 40), Recall) == []
    cell.do(ev.Returned(key("b1"), 20, 5))
    sent = only(cell.do(ev.Returned(key("b2"), 20, 5)), Prefetch)
    assert [set(prefetch.keys) <= {key("x"), key("y"), key("z")} for prefetch in sent] == [True]


def test_a_backlog_without_hurry_counts_for_nothing_in_what_is_predicted_for_others() -> None:
    predicted = []
    for backlog in (0, 200):
        cell = CoreCell(queue_tokens=64, ttft_objective_s=1e9)
        cell.submit("first", tokens=20)
        for number in range(backlog):
            assert only(cell.submit(f"b{number}", tokens=200, most=210, priority=BATCH_PRIORITY), Reject) == []
        outlook = cell.core._overload.predict(20, 1, cell.now_s)
        predicted.append((outlook.first_s, outlook.tpot_s, outlook.wait_s))
        assert cell.core.room(cell.now_s).limited is False
    assert predicted[0] == predicted[1]


def test_only_the_objective_of_its_own_makes_a_request_without_hurry_overdue() -> None:
    cell = CoreCell(waiting_rule="overdue", starvation_after_s=0.5, min_batch_requests=30, max_running=1)
    cell.make_busy()
    cell.wait("batch", 40, priority=BATCH_PRIORITY)
    cell.wait("plain", 60)
    record = cell.core._state.table.get(key("batch"))
    assert record is not None
    assert record.rank == BACKGROUND
    cell.do(ev.Tick(), after_s=60.0)
    assert cell.core._state.clock.is_overdue(key("plain"))
    assert not cell.core._state.clock.is_overdue(key("batch"))
