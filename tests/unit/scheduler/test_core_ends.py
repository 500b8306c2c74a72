"""The core where a request does not complete: cancelled, repeated, superseded by a newer epoch, lost."""

import pytest

from alignedserve.errors import CancelledError
from alignedserve.scheduler.core import events as ev
from alignedserve.scheduler.core.actions import (
    CancelAt,
    Forget,
    MarkUrgent,
    Prefetch,
    Reject,
    ReleasePool,
    ReportLost,
    StartPrefill,
)
from alignedserve.scheduler.instance.plan import BufferKind
from support.core_cell import CoreCell as Cell
from support.core_cell import decode_report, key, marked, only

BATCH, REQUESTS = BufferKind.BATCH, BufferKind.REQUESTS

# cancelling


def cancel(cell, name="a"):
    return cell.do(ev.CancelRequested((key(name),)))


def test_cancelled_in_the_queue_it_ends_at_once():
    cell = Cell(queue_tokens=10)
    cell.submit("first")
    cell.submit("a")
    (reject, forget) = cancel(cell)
    assert isinstance(reject.error, CancelledError)
    assert forget == Forget((key("a"),))
    assert cell.states() == {"prefilling": 1}


def test_cancelled_in_the_pool_it_ends_at_once_and_frees_its_blocks():
    cell = Cell()
    cell.make_busy()
    cell.wait("a", 60)
    (reject, release, forget) = cancel(cell)
    assert reject.keys == release.keys == forget.keys == (key("a"),)
    assert cell.states() == {"decoding": 1}


def test_cancelled_while_it_is_prefilled_it_ends_with_the_workers_word():
    cell = Cell()
    cell.submit("a")
    assert cancel(cell) == [CancelAt("prefill", "p0", (key("a"),))]
    assert cell.states() == {"prefilling": 1}
    cell.do(ev.Finished((key("a"),)))
    assert cell.states() == {}


def test_cancelled_as_a_candidate_both_sides_of_the_copy_are_told():
    cell = Cell()
    cell.wait("a")
    assert cancel(cell) == [CancelAt("prefill", "p0", (key("a"),)), CancelAt("decode", "d0", (key("a"),))]
    assert ReleasePool((key("a"),)) in cell.do(ev.Finished((key("a"),)))
    assert cell.do(ev.Finished((key("a"),))) == []  # the other side's message


def test_cancelled_while_it_decodes_its_decode_instance_is_told():
    cell = Cell()
    cell.wait("a")
    cell.do(ev.Joined("d0", (key("a"),)))
    assert cancel(cell) == [CancelAt("decode", "d0", (key("a"),))]


@pytest.mark.parametrize("race", ["prefilled", "returned"])
def test_a_cancel_that_crosses_the_request_on_its_way_to_the_pool_still_ends_it(race):
    cell = Cell()
    cell.submit("a")
    if race == "returned":
        cell.prefilled("a")
    cancel(cell)
    actions = cell.prefilled("a") if race == "prefilled" else cell.do(ev.Returned(key("a"), 10, 3))
    assert [type(action) for action in actions] == [Reject, ReleasePool, Forget]
    assert cell.states() == {}


def test_a_lost_gateway_takes_its_requests_with_it_and_no_others():
    cell = Cell(queue_tokens=10)
    cell.submit("a", gateway="gw-0")
    cell.submit("b", gateway="gw-0")
    cell.submit("c", gateway="gw-1")
    actions = cell.do(ev.GatewayLost("gw-0"))
    assert only(actions, CancelAt) == [CancelAt("prefill", "p0", (key("a"),))]
    assert only(actions, Reject)[0].keys == (key("b"),)
    assert cell.states() == {"prefilling": 1, "queued": 1}


# duplicates, old epochs, losses


def test_duplicates_and_strangers_do_no_harm():
    cell = Cell()
    cell.wait("a")
    joined = ev.Joined("d0", (key("a"),))
    cell.do(joined)
    for event in (
        joined,
        ev.Joined("d9", (key("a"),)),
        ev.Prefilled(key("a"), 10, 3, 3),
        ev.Submitted((ev.RequestMeta(key("a"), 10, 20, "g", "gw"),)),
        ev.Finished((key("unknown"),)),
        ev.CancelRequested((key("unknown"),)),
        ev.Lost((key("unknown"),), "?"),
        ev.InstanceJoined("decode", "d0"),
        ev.InstanceLost("prefill", "p9"),
        ev.GatewayLost("gw-9"),
        decode_report("d9"),
    ):
        assert cell.do(event) == []
    assert cell.states() == {"decoding": 1}


def test_kv_of_a_request_that_is_not_open_is_left_to_its_next_epoch_or_the_audit():
    cell = Cell()
    assert cell.do(ev.Prefilled(key("gone"), 10, 3, 3)) == []
    assert cell.do(ev.Returned(key("gone"), 10, 3)) == []


@pytest.mark.parametrize("grown", [0, 4])
def test_a_decoding_request_that_a_buffer_gives_back_as_long_as_it_joined_is_lost_and_not_decoded_twice(grown):
    """The message of its pull may have been lost with the stream. A longer request was evicted."""
    cell = Cell()
    cell.wait("a")
    cell.do(ev.Joined("d0", (key("a"),)))
    actions = cell.do(ev.Returned(key("a"), 10 + grown, 4, from_buffer=True))
    if grown:
        assert only(actions, Prefetch)[0].keys == (key("a"),)
        return
    assert only(actions, ReportLost)[0].keys == (key("a"),)
    assert only(actions, CancelAt) == [CancelAt("decode", "d0", (key("a"),))]
    assert only(actions, Prefetch) == []
    assert cell.states() == {}


def test_a_new_epoch_replaces_the_old_wherever_that_is():
    cell = Cell()
    cell.wait("a")
    cell.do(ev.Joined("d0", (key("a"),)))
    actions = cell.do(ev.Submitted((ev.RequestMeta(key("a", 1), 12, 20, "g", "gw"),)))
    assert CancelAt("decode", "d0", (key("a"),)) in actions
    assert StartPrefill("p0", (key("a", 1),)) in actions
    assert cell.states() == {"prefilling": 1}
    assert cell.do(ev.Finished((key("a"),))) == []
    assert cell.do(ev.Submitted((ev.RequestMeta(key("a", 0), 12, 20, "g", "gw"),))) == []


def test_what_a_worker_lost_is_submitted_again_and_the_pool_keeps_its_kv_for_that():
    cell = Cell()
    cell.wait("a")
    actions = cell.do(ev.Lost((key("a"),), "the copy failed"))
    assert actions[0] == ReportLost((key("a"),), "the copy failed")
    assert only(actions, ReleasePool) == []
    assert cell.states() == {}


def again(name, epoch, prefix, base=0, *, whole=False):
    blocks = -(-base // 4)
    return ev.Submitted(
        (ev.RequestMeta(key(name, epoch), prefix, prefix + 10, "g", "gw", base, blocks, blocks, whole),)
    )


def test_what_the_pool_still_holds_is_not_prefilled_again():
    cell = Cell()
    cell.wait("a", 10)
    cell.do(ev.Joined("d0", (key("a"),)))
    cell.do(ev.InstanceLost("decode", "d0"))
    (start,) = only(cell.do(again("a", 1, 14, 10)), StartPrefill)
    assert start == StartPrefill("p0", (key("a", 1),), base_tokens=10)
    cell.do(ev.Prefilled(key("a", 1), 14, 4, 4))
    assert cell.states() == {"waiting_in_pool": 1}


def finish_prefill(cell):
    """The request being prefilled ends with that."""
    (view,) = cell.core._state.instances.prefill.values()
    return cell.do(ev.Finished(tuple(list(view.prefilling)[:1])))


def test_what_was_lost_is_prefilled_before_what_is_new():
    cell = Cell(queue_tokens=10)
    cell.submit("busy")
    cell.submit("new")
    cell.do(again("a", 1, 14, 10))
    cell.do(again("b", 1, 14, 12))
    order = [start.keys[0].request_id for _ in range(3) for start in only(finish_prefill(cell), StartPrefill)]
    assert order == ["a", "b", "new"]


def test_blocks_that_adopted_answers_share_count_once_at_most():
    cell = Cell(pool=100)
    for name in "abcd":
        meta = ev.RequestMeta(key(name, 1), 201, 211, "", "gw", 200, 50, own_blocks=1)
        cell.do(ev.Submitted((meta,)))
    assert cell.core._state.ledger.committed == 4


def test_a_request_whose_kv_is_whole_waits_for_a_decode_instance_at_once():
    cell = Cell()
    cell.make_busy()
    cell.wait("a", 60)
    cell.do(ev.Lost((key("a"),), "the copy failed"))
    actions = cell.do(again("a", 1, 61, 60, whole=True))
    assert only(actions, StartPrefill) == []
    assert cell.states() == {"waiting_in_pool": 1, "decoding": 1}
    (release,) = only(cell.do(ev.CancelRequested((key("a", 1),))), ReleasePool)
    assert release.keys == (key("a", 1),)


def test_kv_that_waits_for_a_prefill_makes_room_where_the_pool_is_full():
    cell = Cell(queue_tokens=10, pool=30)
    cell.submit("first", tokens=10, most=20)
    cell.do(again("a", 1, 41, 38))
    cell.do(again("b", 1, 41, 38))
    assert cell.states() == {"prefilling": 1, "queued": 2}
    actions = cell.prefilled("first", 10)
    (start,) = only(actions, StartPrefill)
    assert start.base_tokens == 38
    (drop,) = [action for action in only(actions, ReleasePool) if action.dropped]
    assert drop.keys == (key("b", 1),)
    assert drop.kv_tokens == (38,)


def test_kv_that_went_with_the_memory_of_the_pool_is_prefilled_again():
    cell = Cell(pool=100)
    cell.do(ev.InstanceLost("prefill", "p0"))
    cell.do(again("a", 1, 41, 38))
    cell.do(again("b", 1, 41, 38))
    pool = next(iter(cell.core._state.ledger.pool_ids))
    cell.do(ev.InstanceLost("kv_pool", pool))
    cell.do(ev.PoolReported(pool, 100, 90))
    cell.do(ev.PoolInventoryTaken({key("b", 1): (38, 10)}))  # its successor has this copy only
    cell.core.check_integrity()
    cell.do(ev.InstanceJoined("prefill", "p0"))
    started = only(cell.do(ev.PrefillReported("p0", 0, 100, 10, 10, 10, 10)), StartPrefill)
    assert {start.keys[0]: start.base_tokens for start in started} == {key("a", 1): 0, key("b", 1): 38}


def test_with_a_prefill_instance_go_its_prompts_and_its_candidates():
    cell = Cell(prefills=2)
    cell.make_busy()
    cell.wait("pooled", 60)
    cell.wait("a", 10)
    cell.submit("b")
    lost = []
    for name in "p0", "p1":
        lost += [k for action in only(cell.do(ev.InstanceLost("prefill", name)), ReportLost) for k in action.keys]
    assert set(lost) == {key("a"), key("b")}
    assert cell.states() == {"waiting_in_pool": 1, "decoding": 1}


def test_with_a_decode_instance_go_its_requests_and_its_buffers_are_freed():
    cell = Cell()
    cell.make_busy()
    cell.wait("a", 10)
    actions = cell.do(ev.InstanceLost("decode", "d0"))
    assert only(actions, ReportLost)[0].keys == (key("busy-d0"), key("a"))
    assert only(actions, CancelAt) == [CancelAt("prefill", "p0", (key("a"),))]
    assert cell.states() == {}
    assert not cell.core.knows("decode", "d0")


def test_with_the_pools_process_goes_nothing_but_prefills_wait_for_its_successor():
    cell = Cell(queue_tokens=10)
    cell.make_busy()
    cell.submit("a")
    cell.submit("b")
    assert cell.do(ev.InstanceLost("kv_pool", "pool")) == []
    assert cell.states() == {"decoding": 1, "prefilling": 1, "queued": 1}
    assert cell.core.max_request_tokens() == 0
    assert only(cell.prefilled("a"), StartPrefill) == []
    assert only(cell.do(ev.PoolReported("pool", 100, 100)), StartPrefill) == [StartPrefill("p0", (key("b"),))]


def test_what_waits_in_a_pool_that_has_lost_it_is_submitted_again():
    cell = Cell()
    cell.make_busy()
    cell.wait("a", 60)
    cell.wait("b", 60)
    (lost,) = only(cell.do(ev.PoolInventoryTaken({key("b"): (60, 15), key("busy-d0"): (10, 3)})), ReportLost)
    assert lost.keys == (key("a"),)


def held(name, running, epoch=0, prefill_id="p0", wait_objective_s=0.0):
    meta = ev.RequestMeta(key(name, epoch), 12, 30, "g", "gw", wait_objective_s=wait_objective_s)
    return ev.HeldRequest(meta, running, 11, 3, prefill_id, BATCH)


def test_a_new_core_takes_over_what_its_decode_instances_decide_about():
    cell = Cell()
    cell.do(ev.InventoryTaken("d0", (held("a", True), held("b", False)), restore=True))
    assert cell.states() == {"decoding": 1, "prefetched": 1}
    cell.do(ev.PoolInventoryTaken({key("a"): (11, 3), key("b"): (11, 3)}))
    (lost,) = only(cell.do(ev.InstanceLost("decode", "d0")), ReportLost)
    assert set(lost.keys) == {key("a"), key("b")}
    assert cell.states() == {}


def test_a_new_core_goes_by_the_objectives_that_it_was_told_of():
    cell = Cell(starvation_after_s=5.0)
    candidates = held("a", False), held("b", False, wait_objective_s=0.5), held("c", True, wait_objective_s=0.5)
    cell.do(ev.InventoryTaken("d0", candidates, restore=True))
    assert only(cell.do(ev.Tick(), after_s=0.4), MarkUrgent) == []
    assert marked(cell.do(ev.Tick(), after_s=0.2)) == (key("b"),)
    cell.do(ev.Returned(key("c"), 14, 4))  # evicted: it waits anew, with the same objective
    cell.do(ev.Tick(), after_s=0.6)
    assert marked(cell.do(ev.Joined("d0", (key("a"), key("b"))))) == (key("c"),)


def test_an_evicted_request_that_comes_back_has_waited_since_its_eviction():
    cell = Cell(starvation_after_s=5.0, waiting_rule="overdue")
    cell.do(ev.InventoryTaken("d0", (held("a", False), held("c", True)), restore=True))
    cell.do(ev.Returned(key("c"), 28, 7, waited_s=4.0))
    assert only(cell.do(ev.Tick(), after_s=0.9), MarkUrgent) == []
    assert marked(cell.do(ev.Tick(), after_s=0.6)) == (key("c"),)


def test_one_that_never_joined_has_waited_all_the_while_whatever_is_said_of_an_eviction_before():
    cell = Cell(starvation_after_s=5.0, waiting_rule="overdue")
    cell.make_busy()
    for name in "abc":
        cell.wait(name, 40)
    cell.do(ev.Tick(), after_s=4.0)
    cell.do(ev.Returned(key("a"), 40, 10, waited_s=0.1))
    assert marked(cell.do(ev.Tick(), after_s=1.5)) == (key("b"), key("c"))
    assert marked(cell.do(ev.Joined("d0", (key("b"), key("c"))))) == (key("a"),)


def test_what_a_core_has_given_up_is_cancelled_where_it_still_is():
    cell = Cell()
    cell.wait("a", 10)
    cell.do(ev.Joined("d0", (key("a"),)))
    actions = cell.do(ev.InventoryTaken("d0", (held("a", True), held("b", True)), restore=False))
    assert actions == [CancelAt("decode", "d0", (key("b"),))]
    assert cell.do(ev.Joined("d0", (key("c"),))) == [CancelAt("decode", "d0", (key("c"),))]


def test_a_cancelled_request_is_not_submitted_again_when_it_is_lost():
    cell = Cell()
    cell.wait("a")
    cancel(cell)
    actions = cell.do(ev.InstanceLost("decode", "d0"))
    assert only(actions, ReportLost) == []
    assert only(actions, Reject)[0].keys == (key("a"),)


def test_batches_of_a_new_core_are_not_taken_for_those_of_its_predecessor():
    """Those batches still run or lie in a buffer: one with the same number would be no switch."""
    cell = Cell(prefetch=False, cache=1000)
    cell.do(decode_report(cache=1000, free=0, running=9, shortest=300, longest=320, batch_id=2))
    sent = [p for name in range(3) for p in only(cell.wait(name, 10), Prefetch) if p.buffer is BufferKind.BATCH]
    sent += [p for p in only(cell.do(ev.Tick(), after_s=1.0), Prefetch) if p.buffer is BufferKind.BATCH]
    numbers = {prefetch.batch_id for prefetch in sent}
    assert numbers
    assert min(numbers) > 3  # the newest may be on its way still
