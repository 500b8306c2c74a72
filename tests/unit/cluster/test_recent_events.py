"""What the live page's events say of gateways: deaths, refusals and new epochs."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from alignedserve.cluster.supervisor.hang_detector import HangDetector
from alignedserve.cluster.supervisor.managed_process import ManagedProcess
from alignedserve.cluster.supervisor.recent_events import RecentEvents
from alignedserve.cluster.supervisor.roster import DRAINED, Roster
from alignedserve.control.role import REFUSED_GAUGE, RESUBMITTED_GAUGE
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv

GATEWAY = pb.ProcessKey(role="gateway", id="gateway-a", incarnation=3)


@pytest.fixture
def events() -> Iterator[RecentEvents]:
    found = RecentEvents()
    logger = logging.getLogger("alignedserve.cluster.supervisor")
    before = logger.level
    logger.setLevel(logging.INFO)
    found.start()
    yield found
    found.stop()
    logger.setLevel(before)


def texts(events: RecentEvents) -> list[tuple[str, str]]:
    return [(one.level, one.text) for one in events.newest()]


def test_refusals_are_told_at_once_and_then_every_ten_seconds(events: RecentEvents) -> None:
    events.count(GATEWAY, {REFUSED_GAUGE: 100.0}, 0.0)  # before this supervisor looked
    assert texts(events) == []
    events.count(GATEWAY, {REFUSED_GAUGE: 103.0}, 1.0)
    assert texts(events) == [("warning", "3 requests were refused")]
    events.count(GATEWAY, {REFUSED_GAUGE: 110.0, RESUBMITTED_GAUGE: 0.0}, 2.0)
    events.count(GATEWAY, {REFUSED_GAUGE: 120.0, RESUBMITTED_GAUGE: 4.0}, 3.0)
    assert texts(events)[1:] == [("warning", "4 requests were submitted again")]
    events.count(GATEWAY, {REFUSED_GAUGE: 120.0, RESUBMITTED_GAUGE: 4.0}, 11.0)
    assert texts(events)[2:] == [("warning", "17 requests were refused")]
    successor = pb.ProcessKey(role="gateway", id="gateway-a", incarnation=4)
    events.count(successor, {REFUSED_GAUGE: 0.0}, 30.0)
    assert len(texts(events)) == 3


@pytest.mark.parametrize(("state", "level"), [("ready", "warning"), (DRAINED, "info")])
def test_the_end_of_a_gateway_is_an_event(events: RecentEvents, state: str, level: str) -> None:
    roster = Roster([])
    hello = sv.RoleHello(process=GATEWAY, pid=7)
    roster.guests[GATEWAY.id] = ManagedProcess(hello, HangDetector(0.0), 0.0, sv.Heartbeat(state=state))
    roster.drop_guest(GATEWAY.id, "its process has ended")
    roster.drop_guest(GATEWAY.id, "it is unknown by now")
    assert texts(events) == [(level, "gateway-a has ended: its process has ended")]
