"""Gateways that hang: Ray Serve starts and replaces them, and the supervisor ends one that it would wait for."""

from __future__ import annotations

from collections.abc import Callable

from alignedserve.cluster.supervisor.actions import FenceGuest
from alignedserve.cluster.supervisor.managed_process import ManagedProcess
from alignedserve.cluster.supervisor.roster import Roster
from alignedserve.config import SupervisorConfig

IsCutOff = Callable[[str, float, float], bool]
"""Whether a node, silent since a time, is not reached now."""


def hung_guests(
    roster: Roster, limits: SupervisorConfig, own_pid: int, is_cut_off: IsCutOff, now: float
) -> list[FenceGuest]:
    """Those that are to be ended from now on; each is named once."""
    watched = [(member, _hung(member, roster, limits, is_cut_off, now)) for member in roster.guests.values()]
    # One that has not come to this supervisor, since it cannot. Who of these is dead, the watchdog says.
    watched += [(member, member.hang_detector.stopped(now)) for member in roster.found_guests.values()]
    due = [
        FenceGuest(member.hello, hung)
        for member, hung in watched
        if hung and member.key.id not in roster.ending_guests
        # A gateway in this very process is running.
        if member.hello.pid != own_pid
    ]
    roster.ending_guests.update(fence.hello.process.id for fence in due)
    return due


def _hung(member: ManagedProcess, roster: Roster, limits: SupervisorConfig, is_cut_off: IsCutOff, now: float) -> str:
    if member.key.id in roster.lost_guests:
        return ""
    hung = member.hang_detector.verdict(member.beat, limits, now)
    return "" if hung and is_cut_off(member.hello.node_id, member.hang_detector.heard_at, now) else hung
