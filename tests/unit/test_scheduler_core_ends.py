"""The core where a request does not get to its end: cancelled, repeated, overtaken by a newer epoch, lost."""

import pytest

from alignedserve.errors import CancelledError
from alignedserve.scheduler import events as ev
from alignedserve.scheduler.actions import CancelAt, Forget, Reject, ReleasePool, ReportLost, StartPrefill
from alignedserve.scheduler.events import BufferKind
from alignedserve.testing.core_cell import CoreCell as Cell
from alignedserve.testing.core_cell import decode_report, key, only

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
    assert cell.do(ev.Finished((key("a"),))) == []  # the other side's word


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
        ev.Finished((key("nobody"),)),
        ev.CancelRequested((key("nobody"),)),
        ev.Lost((key("nobody"),), "?"),
        ev.InstanceJoined("decode", "d0"),
        ev.InstanceLost("prefill", "p9"),
        ev.GatewayLost("gw-9"),
        decode_report("d9"),
    ):
        assert cell.do(event) == []
    assert cell.states() == {"decoding": 1}


def test_kv_of_a_request_that_has_ended_is_released():
    cell = Cell()
    assert cell.do(ev.Prefilled(key("gone"), 10, 3, 3)) == [ReleasePool((key("gone"),))]
    assert cell.do(ev.Returned(key("gone"), 10, 3)) == [ReleasePool((key("gone"),))]


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


def test_what_a_worker_lost_is_submitted_again():
    cell = Cell()
    cell.wait("a")
    actions = cell.do(ev.Lost((key("a"),), "the copy failed"))
    assert actions[0] == ReportLost((key("a"),), "the copy failed")
    assert ReleasePool((key("a"),)) in actions
    assert cell.states() == {}


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


def test_with_the_pool_goes_everything_but_the_queue():
    cell = Cell(queue_tokens=10)
    cell.make_busy()
    cell.submit("a")
    cell.submit("b")
    actions = cell.do(ev.InstanceLost("kv_pool", "pool"))
    assert set(only(actions, ReportLost)[0].keys) == {key("busy-d0"), key("a")}
    assert cell.states() == {"queued": 1}
    assert cell.core.max_request_tokens() == 0
    assert only(cell.do(ev.PoolReported("pool", 100, 100)), StartPrefill) == [StartPrefill("p0", (key("b"),))]


def test_a_cancelled_request_is_not_submitted_again_when_it_is_lost():
    cell = Cell()
    cell.wait("a")
    cancel(cell)
    actions = cell.do(ev.InstanceLost("decode", "d0"))
    assert only(actions, ReportLost) == []
    assert only(actions, Reject)[0].keys == (key("a"),)
