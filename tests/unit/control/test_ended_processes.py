"""Which processes have ended, as supervisors report it. A supervisor that has just started knows no process."""

from __future__ import annotations

from alignedserve.control.ended_processes import EndedProcesses
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv

FIRST, SECOND = 1000, 2000


def view(told_by: int, *names: tuple[str, int], draining: tuple[str, ...] = ()) -> sv.ClusterView:
    peers = [sv.Peer(process=pb.ProcessKey(id=role_id, incarnation=incarnation)) for role_id, incarnation in names]
    return sv.ClusterView(told_by=told_by, prefill=1, decode=1, peers=peers, draining=draining)


def test_a_process_that_a_supervisor_named_and_names_no_more_has_ended() -> None:
    ended = EndedProcesses()
    ended.on_view(view(FIRST, ("decode-0", 5)))
    assert not ended.has_ended("decode-0", 5)
    ended.on_view(view(FIRST))
    assert ended.has_ended("decode-0", 5)


def test_a_process_that_a_new_supervisor_does_not_know_yet_has_not_ended() -> None:
    ended = EndedProcesses()
    ended.on_view(view(FIRST, ("decode-0", 5), ("prefill-0", 6)))
    ended.on_view(view(SECOND, ("prefill-0", 6)))
    assert not ended.has_ended("decode-0", 5)
    ended.on_view(view(SECOND, ("prefill-0", 6), ("decode-0", 5)))
    assert not ended.has_ended("decode-0", 5)
    ended.on_view(view(SECOND, ("prefill-0", 6)))
    assert ended.has_ended("decode-0", 5)


def test_a_successor_or_a_full_house_says_that_one_has_ended() -> None:
    ended = EndedProcesses()
    ended.on_view(view(SECOND, ("decode-0", 7)))
    assert ended.has_ended("decode-0", 5)
    assert not ended.has_ended("decode-1", 5)
    ended.on_view(view(SECOND, ("decode-0", 7), ("prefill-0", 6), draining=("decode-1",)))
    assert not ended.has_ended("decode-1", 5)
    ended.on_view(view(SECOND, ("decode-0", 7), ("prefill-0", 6)))
    assert ended.has_ended("decode-1", 5)


def test_one_that_is_younger_than_the_view_may_be_in_the_next() -> None:
    ended = EndedProcesses()
    ended.on_view(view(FIRST, ("decode-0", 7), ("prefill-0", 6)))
    assert not ended.has_ended("prefill-0", 8)
    assert not ended.has_ended("prefill-1", 9)
