"""The core: events in, actions out. Races are replayed as lists of events."""

import dataclasses

import pytest

from alignedserve.config import Config
from alignedserve.errors import InvalidRequestError, OverloadedError
from alignedserve.metrics import Page
from alignedserve.scheduler.core import events as ev
from alignedserve.scheduler.core.actions import (
    Forget,
    MarkUrgent,
    Prefetch,
    Recall,
    Reject,
    ReleasePool,
    ReportLost,
    StartPrefill,
)
from alignedserve.scheduler.core.scheduler_core import SchedulerCore
from alignedserve.scheduler.cost.pass_model import Passes
from alignedserve.scheduler.instance.plan import BufferKind
from support.core_cell import BLOCK, decode_report, key, marked, only
from support.core_cell import CoreCell as Cell

BATCH, REQUESTS = BufferKind.BATCH, BufferKind.REQUESTS

# the life of a request


def test_a_request_goes_through_every_state_and_leaves_nothing():
    cell = Cell()
    assert cell.submit("a") == [StartPrefill("p0", (key("a"),))]
    assert cell.states() == {"prefilling": 1}
    (prefetch,) = cell.prefilled("a")
    assert prefetch == Prefetch("d0", "p0", BATCH, 1, (key("a"),))
    assert cell.states() == {"prefetched": 1}
    assert cell.do(ev.Joined("d0", (key("a"),))) == []
    assert cell.states() == {"decoding": 1}
    assert cell.do(ev.Finished((key("a"),))) == [ReleasePool((key("a"),)), Forget((key("a"),))]
    assert cell.states() == {}
    assert not cell.core.needs_ticks


def test_an_idle_instance_never_waits_for_a_better_batch():
    cell = Cell(min_batch_requests=36)
    assert len(only(cell.wait("a", 10), Prefetch)) == 1


def test_a_busy_instance_with_room_waits_for_a_batch_as_long_as_it_was_told_to():
    cell = Cell(min_batch_requests=36, flush_after_s=0.5)
    assert len(only(cell.wait("a", 10), Prefetch)) == 1  # idle: at once
    cell.do(ev.Joined("d0", (key("a"),)))
    cell.do(decode_report(free=90, running=1, shortest=10, longest=10, batch_id=1))
    assert only(cell.wait("b", 60), Prefetch) == []
    assert only(cell.do(ev.Tick(), after_s=0.4), Prefetch) == []
    assert len(only(cell.do(ev.Tick(), after_s=0.2), Prefetch)) == 1
    assert only(cell.wait("c", 60), Prefetch) == []  # it has just been sent something


def test_with_room_a_request_that_matches_goes_straight_to_the_requests_buffer():
    cell = Cell()
    cell.make_busy(lengths=(10, 12), free=90)
    assert only(cell.wait("match", 13), Prefetch) == [Prefetch("d0", "p0", REQUESTS, 1, (key("match"),))]


def test_a_request_matches_what_has_joined_before_a_report_says_so():
    cell = Cell()
    cell.wait("first", 10)
    cell.do(ev.Joined("d0", (key("first"),)))
    assert only(cell.wait("second", 10), Prefetch) == [Prefetch("d0", "p0", REQUESTS, 1, (key("second"),))]


def test_too_few_for_a_batch_join_what_runs_where_there_is_room():
    cell = Cell()
    cell.make_busy(lengths=(10, 12), free=90)
    assert only(cell.wait("other", 60), Prefetch) == [Prefetch("d0", "p0", REQUESTS, 1, (key("other"),))]


def test_too_few_for_a_batch_are_one_where_the_requests_buffer_cannot_hold_them():
    cell = Cell(requests=10)
    cell.make_busy(lengths=(10, 12), free=90)
    assert only(cell.wait("other", 60), Prefetch) == [Prefetch("d0", "p0", BATCH, 2, (key("other"),))]
    assert only(cell.wait("third", 64), Prefetch) == []  # the batch buffer is taken
    assert only(cell.do(ev.Joined("d0", (key("other"),))), Prefetch) == [
        Prefetch("d0", "p0", BATCH, 3, (key("third"),))
    ]


def test_a_full_instance_waits_for_a_batch_that_is_enough():
    cell = Cell(min_batch_requests=3)
    cell.make_busy(lengths=(10, 10))
    assert only(cell.wait("a", 40), Prefetch) == []
    assert only(cell.wait("b", 41), Prefetch) == []
    (prefetch,) = only(cell.wait("c", 42), Prefetch)
    assert set(prefetch.keys) == {key("a"), key("b"), key("c")}
    assert prefetch.buffer is BATCH


def test_requests_that_come_to_match_are_prefetched_late():
    cell = Cell()
    cell.make_busy(lengths=(10, 10))
    cell.wait("later", 20)
    report = decode_report(free=0, running=1, shortest=18, longest=18, batch_id=1)
    assert only(cell.do(report), Prefetch) == [Prefetch("d0", "p0", REQUESTS, 1, (key("later"),))]


def test_in_a_switch_late_joins_match_the_new_batch():
    cell = Cell()
    cell.make_busy(lengths=(10, 10))
    cell.do(decode_report(free=0, running=9, shortest=10, longest=200, batch_id=1, formed=(190, 200)))
    assert only(cell.wait("old", 10), Prefetch) == []
    assert only(cell.wait("new", 60), Prefetch) == []
    report = decode_report(free=0, running=9, shortest=10, longest=200, batch_id=1, formed=(60, 70))
    assert only(cell.do(report), Prefetch) == [Prefetch("d0", "p0", REQUESTS, 1, (key("new"),))]


def test_where_only_late_joins_are_left_of_a_batch_nothing_matches_it():
    cell = Cell()
    cell.make_busy(lengths=(10, 10))
    cell.do(decode_report(free=0, running=9, shortest=10, longest=20, batch_id=1, formed=(0, 0)))
    assert only(cell.wait("match", 10), Prefetch) == []


def test_a_batch_fits_the_buffer_and_the_block_limit():
    cell = Cell(batch=12, max_batch_blocks=8)
    cell.make_busy(lengths=(100, 100))
    for i in range(5):
        cell.wait(f"r{i}", 12)  # three blocks each
    sent = only(cell.do(decode_report(free=90, running=1, shortest=100, longest=100, batch_id=1)), Prefetch)
    assert [len(prefetch.keys) for prefetch in sent] == []  # two were sent when three were waiting
    assert cell.states() == {"waiting_in_pool": 3, "prefetched": 2, "decoding": 1}


def test_a_request_larger_than_every_buffer_is_pulled_from_the_pool():
    cell = Cell(batch=4, requests=2)
    assert only(cell.wait("large", 60), Prefetch) == [Prefetch("d0", None, BATCH, 1, (key("large"),))]


def test_requests_that_bypass_the_candidate_buffers_are_counted():
    cell = Cell(batch=4, requests=2)
    cell.wait("large", 60)
    assert cell.core.bypassed_prefetch == 1
    page = Page()
    cell.core.show_metrics(page, cell.now_s)
    assert "alignedserve_requests_bypassed_prefetch_total 1.0" in page.text()
    for cell in (Cell(), Cell(prefetch=False)):  # nothing bypasses buffers with room, or that are not there
        cell.wait("a", 10)
        assert cell.states() == {"prefetched": 1}
        assert cell.core.bypassed_prefetch == 0


def test_the_paired_instance_with_the_most_room_prefetches():
    cell = Cell(prefills=2)
    cell.do(ev.PrefillReported("p0", 0, 1000, 10, 10, 20, 20))
    assert only(cell.wait("a", 10), Prefetch)[0].prefill_id == "p1"


def test_without_prefetch_the_decode_instance_pulls_from_the_pool():
    cell = Cell(prefetch=False, max_batch_blocks=6)
    assert only(cell.wait("a", 12), Prefetch) == [Prefetch("d0", None, BATCH, 1, (key("a"),))]
    assert only(cell.wait("b", 12), Prefetch) == [Prefetch("d0", None, REQUESTS, 1, (key("b"),))]
    assert only(cell.wait("c", 12), Prefetch) == []  # half of K is on its way already


def test_nothing_is_prefetched_before_the_pairs_are_known():
    cell = Cell()
    cell.do(ev.PairsChanged(()))
    assert only(cell.wait("a"), Prefetch) == []
    assert len(only(cell.do(ev.PairsChanged((("d0", ("p0",)),))), Prefetch)) == 1


def test_a_request_comes_back_and_waits_again():
    cell = Cell()
    cell.wait("a", 10)
    cell.do(ev.Joined("d0", (key("a"),)))
    cell.do(decode_report(free=0, running=1, shortest=40, longest=40, batch_id=1))
    cell.do(ev.Returned(key("a"), 14, 4))
    assert cell.states() == {"waiting_in_pool": 1}


def test_what_was_given_back_is_not_sent_to_the_same_place_at_once():
    cell = Cell()
    cell.make_busy(lengths=(10, 12), free=90)
    cell.wait("a", 10)
    assert only(cell.do(ev.Returned(key("a"), 10, 3)), Prefetch) == [Prefetch("d0", "p0", BATCH, 2, (key("a"),))]
    assert only(cell.do(ev.Returned(key("a"), 10, 3)), Prefetch) == []
    assert len(only(cell.do(ev.Tick()), Prefetch)) == 1


# several instances


def test_an_idle_instance_is_preferred_to_one_that_matches():
    cell = Cell(decodes=2)
    first = only(cell.wait("a", 10), Prefetch)[0].decode_id
    assert only(cell.wait("b", 10), Prefetch)[0].decode_id != first


def test_instances_specialise_by_length():
    cell = Cell(decodes=2, prefills=2)
    for decode_id, length in ("d0", 10), ("d1", 60):
        cell.wait(f"r-{decode_id}", length)
        cell.do(ev.Joined(decode_id, (key(f"r-{decode_id}"),)))
        cell.do(decode_report(decode_id, free=90, running=1, shortest=length, longest=length, batch_id=1))
    assert only(cell.wait("long", 62), Prefetch)[0].decode_id == "d1"
    assert only(cell.wait("short", 11), Prefetch)[0].decode_id == "d0"


def _cell_of_unlike_instances(policy):
    """Two busy instances with room: d0 with a request of 10 tokens, d1 with one of 60 and passes six times as long."""
    cell = Cell(decodes=2, prefills=2, policy=policy, requests=200, cache=1000)
    for decode_id, length in ("d0", 10), ("d1", 60):
        cell.wait(f"r-{decode_id}", length)
        cell.do(ev.Joined(decode_id, (key(f"r-{decode_id}"),)))
        report = decode_report(decode_id, cache=1000, running=1, shortest=length, longest=length, batch_id=1)
        cell.do(dataclasses.replace(report, measured=Passes(10, 10, 10 * length, 10 * length * 1e-3)))
    return cell


def test_a_request_goes_elsewhere_where_the_instance_of_its_lengths_has_much_more_to_do():
    cell = _cell_of_unlike_instances("aligned")
    assert only(cell.wait("longer", 90), Prefetch)[0].decode_id == "d0"


def test_a_policy_that_does_not_go_by_length_sends_to_the_instance_with_the_least_load():
    cell = _cell_of_unlike_instances("fcfs")
    assert only(cell.wait("long", 60), Prefetch)[0].decode_id == "d0"
    assert only(cell.wait("short", 10), Prefetch)[0].decode_id == "d0"


def test_candidates_of_a_full_instance_are_asked_back_for_an_idle_one():
    cell = Cell(decodes=2)
    cell.make_busy("d0", (10, 10), free=0)
    cell.wait("other", 10)  # for the idle one
    cell.do(ev.Joined("d1", (key("other"),)))
    cell.do(decode_report("d1", free=0, running=1, shortest=10, longest=10, batch_id=2))
    (batch,) = [prefetch for name in "abc" for prefetch in only(cell.wait(name, 50), Prefetch)]
    assert len(batch.keys) == 3
    full, idle = ("d0", "d1") if batch.decode_id == "d0" else ("d1", "d0")
    cell.do(ev.Finished((key("busy-d0" if idle == "d0" else "other"),)))
    # A request that is not announced yet would miss the recall, and no request is recalled twice.
    assert only(cell.do(decode_report(idle, running=0, batch_id=2)), Recall) == []
    assert cell.do(ev.Tick(), after_s=0.2) == [Recall(full, batch.keys[1:])]
    assert only(cell.do(decode_report(idle, running=0, batch_id=2)), Recall) == []
    (prefetch,) = only(cell.do(ev.Returned(batch.keys[2], 50, 13)), Prefetch)
    assert (prefetch.decode_id, prefetch.keys) == (idle, batch.keys[2:])


def _cell_with_a_late_candidate_of_a_full_instance():
    """Both instances are full; returns (cell, the instance with the candidate, the other)."""
    cell = Cell(decodes=2)
    for decode_id in "d0", "d1":
        cell.make_busy(decode_id, name="runs")
    (late,) = only(cell.wait("late", 10), Prefetch)
    assert late.buffer is REQUESTS
    return cell, late.decode_id, "d1" if late.decode_id == "d0" else "d0"


def _report(decode_id, free):
    return decode_report(decode_id, free=free, running=1, shortest=10, longest=10, batch_id=1)


def test_a_candidate_of_an_instance_without_a_free_slot_is_asked_back_for_an_idle_one():
    """It has enough blocks, but no place in the running batch."""
    cell = Cell(decodes=2, min_batch_requests=1, max_running=1)
    running = {}
    for name in "ab":
        (sent,) = only(cell.wait(name), Prefetch)
        running[sent.decode_id] = name
        cell.do(ev.Joined(sent.decode_id, sent.keys))
        cell.do(decode_report(sent.decode_id, free=90, running=1, shortest=10, longest=10, batch_id=1))
    (waits,) = only(cell.wait("waits", 50), Prefetch)
    (idle,) = running.keys() - {waits.decode_id}
    cell.do(ev.Finished((key(running[idle]),)))
    actions = cell.do(decode_report(idle, free=100, running=0, batch_id=2), after_s=1.0)
    assert only(actions, Recall) == [Recall(waits.decode_id, (key("waits"),))]


def test_a_late_candidate_of_a_full_instance_is_asked_back_once_for_one_that_has_room():
    cell, full, other = _cell_with_a_late_candidate_of_a_full_instance()
    assert only(cell.do(_report(other, free=90)), Recall) == []  # it may not have been announced yet
    assert only(cell.do(_report(other, free=90), after_s=0.2), Recall) == [Recall(full, (key("late"),))]
    assert only(cell.do(_report(other, free=90), after_s=0.2), Recall) == []
    (prefetch,) = only(cell.do(ev.Returned(key("late"), 10, 3)), Prefetch)
    assert (prefetch.decode_id, prefetch.keys) == (other, (key("late"),))
    cell.do(_report(other, free=0), after_s=0.2)
    assert only(cell.do(_report(full, free=90), after_s=0.2), Recall) == []


def test_a_late_candidate_that_joins_while_it_is_asked_back_stays():
    cell, full, other = _cell_with_a_late_candidate_of_a_full_instance()
    assert only(cell.do(_report(other, free=90), after_s=0.2), Recall)
    assert only(cell.do(ev.Joined(full, (key("late"),))), Prefetch) == []
    assert only(cell.do(_report(other, free=90), after_s=0.2), Recall) == []
    assert cell.states() == {"decoding": 3}


def test_one_that_was_asked_back_in_vain_is_not_asked_back_again():
    cell, full, other = _cell_with_a_late_candidate_of_a_full_instance()
    assert only(cell.do(_report(other, free=90), after_s=0.2), Recall)
    cell.do(_report(other, free=0))
    (prefetch,) = only(cell.do(ev.Returned(key("late"), 10, 3)), Prefetch)
    assert prefetch.decode_id == full
    assert only(cell.do(_report(other, free=90), after_s=0.2), Recall) == []


def test_late_candidates_are_not_asked_back_where_their_own_instance_has_room():
    cell, full, other = _cell_with_a_late_candidate_of_a_full_instance()
    cell.do(_report(full, free=90))
    assert only(cell.do(_report(other, free=90), after_s=0.2), Recall) == []


def test_an_idle_instance_does_without_the_buffers_when_they_are_full():
    cell = Cell(decodes=2, batch=14)
    cell.make_busy("d0", (10, 10), free=0)
    cell.wait("other", 10)
    cell.do(ev.Joined("d1", (key("other"),)))
    cell.do(decode_report("d1", free=0, running=1, shortest=10, longest=10, batch_id=2))
    for name in "abcd":
        cell.wait(name, 50)
    cell.do(ev.Finished((key("other"), key("busy-d0"))))
    sent = [p for d in ("d0", "d1") for p in only(cell.do(decode_report(d, running=0, batch_id=2)), Prefetch)]
    assert [prefetch.prefill_id for prefetch in sent] == ["p0", None]


def test_prompts_go_where_they_will_be_computed_first():
    cell = Cell(prefills=2, queue_tokens=100)
    assert cell.submit("a", tokens=60, most=70) == [StartPrefill("p0", (key("a"),))]
    assert cell.submit("b", tokens=20, most=30) == [StartPrefill("p1", (key("b"),))]
    assert cell.submit("c", tokens=70, most=80) == [StartPrefill("p1", (key("c"),))]
    assert cell.submit("d", tokens=60, most=70) == []  # both have enough to do
    assert cell.states() == {"queued": 1, "prefilling": 3}
    assert only(cell.prefilled("a", 60), StartPrefill) == [StartPrefill("p0", (key("d"),))]


# groups


def test_the_answers_to_one_prompt_are_prefilled_once_and_go_on_together():
    cell = Cell()
    assert cell.submit("a", "b", "c") == [StartPrefill("p0", (key("a"), key("b"), key("c")))]
    first = only(cell.prefilled("a"), Prefetch)
    rest = only(cell.prefilled("b", new_blocks=1) + cell.prefilled("c", new_blocks=1), Prefetch)
    assert {prefetch.decode_id for prefetch in first + rest} == {"d0"}
    assert cell.states() == {"prefetched": 3}


# starvation


def test_an_overdue_candidate_is_marked_urgent_where_it_waits():
    cell = Cell(starvation_after_s=2.0, requests=10, waiting_rule="overdue")
    cell.make_busy(lengths=(10, 10), free=90)
    cell.wait("other", 60)
    assert only(cell.do(ev.Tick(), after_s=1.9), MarkUrgent) == []
    (mark,) = only(cell.do(ev.Tick(), after_s=0.2), MarkUrgent)
    assert (mark.decode_id, mark.keys, mark.due_in_s) == ("d0", (key("other"),), (pytest.approx(-0.1),))
    assert only(cell.do(ev.Tick(), after_s=0.2), MarkUrgent) == []
    assert only(cell.wait("match", 10), Prefetch) == []  # no late joins while it waits
    assert len(only(cell.do(ev.Joined("d0", (key("other"),))), Prefetch)) == 1


def test_an_overdue_request_of_the_pool_goes_before_density():
    cell = Cell(starvation_after_s=2.0, min_batch_requests=3, waiting_rule="overdue")
    cell.make_busy(lengths=(10, 10))
    cell.wait("old", 90)
    actions = cell.do(ev.Tick(), after_s=2.1)
    assert only(actions, Prefetch) == [Prefetch("d0", "p0", BATCH, 2, (key("old"),))]
    assert marked(actions) == (key("old"),)
    for i in range(4):
        cell.wait(f"dense-{i}", 50)
    assert cell.core.describe()["waiting_in_pool"] == 4


# admission and the pool


def test_a_request_that_no_cache_could_hold_is_refused_at_once():
    cell = Cell(cache=25, pool=50)
    assert cell.core.max_request_tokens() == 100
    (reject, forget) = cell.submit("a", tokens=90, most=101)
    assert isinstance(reject.error, InvalidRequestError)
    assert reject.error.details["max_request_tokens"] == 100
    assert forget == Forget((key("a"),))
    assert only(cell.submit("b", tokens=90, most=100), StartPrefill)


def test_where_ranks_have_a_cache_each_a_request_must_fit_in_one():
    cell = Cell(cache=25, pool=50)
    cell.do(ev.DecodeReported("d0", 25, 25, 0, 0, 0, 0, 0, 0, request_blocks=12))
    assert cell.core.max_request_tokens() == 48
    (reject, _) = cell.submit("a", tokens=40, most=49)
    assert isinstance(reject.error, InvalidRequestError)


def test_nothing_is_judged_before_every_role_has_reported():
    core = SchedulerCore(Config(), BLOCK)
    assert core.max_request_tokens() == 0
    meta = ev.RequestMeta(key("a"), 10**6, 10**6, "g", "gw")
    assert core.handle(ev.Submitted((meta,)), 0.0) == []
    for event in (
        ev.InstanceJoined("prefill", "p0"),
        ev.InstanceJoined("decode", "d0"),
        ev.PrefillReported("p0", 0, 100, 10, 10, 10, 10),
        ev.PoolReported("pool", 100, 100),
    ):
        assert core.handle(event, 0.0) == []
    (reject, _) = core.handle(decode_report(), 0.0)
    assert isinstance(reject.error, InvalidRequestError)


def test_a_full_queue_says_when_to_come_again():
    cell = Cell(max_queue=2, queue_tokens=10)
    for name in "abc":
        cell.submit(name)
    assert cell.states() == {"prefilling": 1, "queued": 2}
    (reject, _) = cell.submit("d")
    assert isinstance(reject.error, OverloadedError)
    assert reject.error.retry_after_s >= 1.0


def test_prefill_stops_before_the_reserve_of_the_pool_is_touched():
    cell = Cell(pool=20, growth_reserve=0.2, cache=20)
    cell.make_busy(lengths=(10, 10))
    started = [name for name in range(8) if only(cell.submit(name, tokens=10, most=12), StartPrefill)]
    assert started == [0, 1, 2, 3, 4]  # three blocks each; four are reserved; the running requests' copy had to go
    assert only(cell.do(ev.Finished((key(0),))), StartPrefill) == [StartPrefill("p0", (key(5),))]


def test_copies_of_running_requests_are_dropped_first():
    cell = Cell(pool=20, growth_reserve=0.2, cache=20)
    cell.make_busy(lengths=(10, 10))
    for name in range(4):
        cell.submit(name, tokens=10, most=12)
    actions = cell.submit(4, tokens=10, most=12)
    assert actions[0] == ReleasePool((key("busy-d0"),), dropped=True, kv_tokens=(10,))


def test_a_request_as_large_as_the_pool_is_served_alone():
    cell = Cell(pool=20, cache=20, growth_reserve=0.2)
    assert only(cell.submit("large", tokens=70, most=80), Reject)  # the reserve is not for prefills
    assert only(cell.submit("a", tokens=62, most=64), StartPrefill)
    assert cell.submit("b") == []
    cell.prefilled("a", 62)
    assert only(cell.do(ev.Finished((key("a"),))), StartPrefill) == [StartPrefill("p0", (key("b"),))]


def test_where_an_eviction_waits_for_the_pool_something_is_dropped_in_the_end():
    cell = Cell(pool=30, cache=30, max_batch_share=1.0)
    cell.make_busy(lengths=(10, 10))
    cell.wait("a", 40)
    cell.wait("b", 30)
    report = decode_report(cache=30, free=0, running=2, shortest=10, longest=20, batch_id=1, waits=5)
    assert only(cell.do(report), ReleasePool) == [ReleasePool((key("busy-d0"),), dropped=True, kv_tokens=(10,))]
    assert only(cell.do(ev.Tick(), after_s=0.3), ReportLost) == []
    assert only(cell.do(ev.Tick(), after_s=0.3), ReportLost) == [ReportLost((key("b"),), "the KV pool is full")]
    assert cell.core.dropped_for_room == 1
