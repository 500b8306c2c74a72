"""Which prefill instance's buffers candidates go through: by link first, then by room. One block holds four tokens."""

from __future__ import annotations

from typing import Any

from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.scheduler.core import events as ev
from alignedserve.scheduler.core.actions import Action, Prefetch
from alignedserve.scheduler.instance.plan import BufferKind
from alignedserve.scheduler.process.messaging import pairs_changed
from support.core_cell import CoreCell, key, only

PAIRED = (("d0", ("p0", "p1", "p2")),)
NEAR = PAIRED, (("d0", "p0", 1),)  # the first is far, the others are near


def make_cell(batch: tuple[int, int, int] = (40, 40, 40), requests: tuple[int, int, int] = (20, 20, 20), **more: Any):
    cell = CoreCell(prefills=3, **more)
    for i in range(3):
        cell.do(ev.PrefillReported(f"p{i}", 0, 1000, batch[i], batch[i], requests[i], requests[i]))
    cell.do(ev.PairsChanged(*NEAR))
    return cell


def through(actions: list[Action]) -> list[str | None]:
    return [prefetch.prefill_id for prefetch in only(actions, Prefetch)]


def test_a_batch_goes_through_the_roomiest_of_the_best_links():
    assert through(make_cell((40, 20, 30)).wait("a")) == ["p2"]


def test_links_that_are_alike_leave_it_to_the_room():
    cell = make_cell((40, 20, 30))
    cell.do(ev.PairsChanged(PAIRED))
    assert through(cell.wait("a")) == ["p0"]
    alike = make_cell((40, 20, 30))
    alike.do(ev.PairsChanged(PAIRED, tuple(("d0", name, 2) for name in ("p0", "p1", "p2"))))
    assert through(alike.wait("a")) == ["p0"]


def test_the_next_link_is_taken_where_no_better_one_has_room():
    assert through(make_cell((40, 0, 0)).wait("a")) == ["p0"]
    assert through(make_cell((40, 2, 2)).wait("a", 10)) == ["p0"]  # three blocks
    assert through(make_cell((40, 2, 3)).wait("a", 10)) == ["p2"]


def test_a_near_buffer_with_room_for_the_least_batch_is_enough():
    def full_of(batch: tuple[int, int, int]) -> list[Action]:
        cell = make_cell(batch, requests=(0, 0, 0), min_batch_requests=3, flush_after_s=1000.0)
        cell.wait("busy", 10)
        cell.do(ev.Joined("d0", (key("busy"),)))
        cell.do(ev.DecodeReported("d0", 100, 0, 1, 10, 10, 1, 0, 0, 0, None, 10, 10))
        return [action for name in "abc" for action in cell.wait(name, 40)]

    (near,) = only(full_of((90, 30, 20)), Prefetch)
    assert (near.prefill_id, len(near.keys)) == ("p1", 3)
    (far,) = only(full_of((90, 29, 20)), Prefetch)
    assert (far.prefill_id, len(far.keys)) == ("p0", 3)


def test_one_request_that_is_too_large_for_the_near_buffers_goes_through_the_far_one():
    cell = make_cell((40, 8, 8), min_batch_requests=1)
    for name in "ab":
        cell.submit(name, tokens=10, most=20)
    cell.submit("large", tokens=60, most=80)
    cell.do(ev.PairsChanged(()))
    for name, tokens in (("a", 10), ("large", 60), ("b", 10)):
        cell.prefilled(name, tokens)
    sent = only(cell.do(ev.PairsChanged(*NEAR)), Prefetch)
    while not any(key("large") in prefetch.keys for prefetch in sent):
        sent += only(cell.do(ev.Joined("d0", sent[-1].keys)), Prefetch)
    assert [p.prefill_id for p in sent if key("large") in p.keys] == ["p0"]
    assert all(p.prefill_id != "p0" for p in sent if key("large") not in p.keys)


def test_late_candidates_fill_the_near_buffers_before_the_far_one():
    cell = make_cell(requests=(20, 3, 0))
    cell.make_busy(lengths=(10, 12), free=90)
    assert through(cell.wait("first", 10)) == ["p1"]
    assert through(cell.wait("second", 10)) == ["p0"]
    many = make_cell(requests=(20, 6, 0))
    many.make_busy(lengths=(10, 12), free=90)
    many.do(ev.PairsChanged(()))
    for name in "abcd":
        many.wait(name, 10)
    sent = [p for p in only(many.do(ev.PairsChanged(*NEAR)), Prefetch) if p.buffer is BufferKind.REQUESTS]
    assert [(p.prefill_id, len(p.keys)) for p in sent] == [("p1", 2), ("p0", 2)]


def test_without_the_near_instances_the_far_one_serves_and_with_them_again_it_does_not():
    cell = make_cell()
    for name in ("p1", "p2"):
        cell.do(ev.InstanceLost("prefill", name))
    assert through(cell.wait("a")) == ["p0"]
    cell.do(ev.Finished((key("a"),)))
    cell.do(ev.InstanceJoined("prefill", "p1"))
    cell.do(ev.PrefillReported("p1", 0, 1000, 40, 40, 20, 20))
    assert through(cell.wait("b")) == ["p1"]


def test_a_view_says_which_instances_are_paired_and_over_which_links():
    pairs = [("decode-1", "prefill-1", 0), ("decode-0", "prefill-2", 2), ("decode-0", "prefill-0", 0)]
    view = sv.ClusterView(pairs=[sv.Pair(decode_id=d, prefill_id=p, link_rank=rank) for d, p, rank in pairs])
    event = pairs_changed(sv.ClusterView.FromString(view.SerializeToString()))
    assert event.pairs == (("decode-0", ("prefill-2", "prefill-0")), ("decode-1", ("prefill-1",)))
    assert event.link_ranks == (("decode-0", "prefill-2", 2),)
    assert pairs_changed(sv.ClusterView()) == ev.PairsChanged(())
