"""Finds gateways that hang. Ray Serve starts and replaces gateways, and the supervisor fences those that hang."""

from __future__ import annotations

from collections.abc import Callable

from alignedserve.cluster.supervisor.actions import FenceGuest
from alignedserve.cluster.supervisor.managed_process import ManagedProcess
from alignedserve.cluster.supervisor.roster import Roster
from alignedserve.config import SupervisorConfig

IsCutOff = Callable[[str, float, float], bool]
"""Whether a node that is silent since a given time is unreachable now."""


def hung_guests(
    roster: Roster, limits: SupervisorConfig, own_pid: int, is_cut_off: IsCutOff, now: float
) -> list[FenceGuest]:
    """Gateways to fence. Each is returned once."""
    watched = [(member, _hung(member, roster, limits, is_cut_off, now)) for member in roster.guests.values()]
    # Gateways that could not join this supervisor yet. The watchdog reports which of them are dead.
    watched += [(member, member.hang_detector.stopped(now)) for member in roster.found_guests.values()]
    due = [
        FenceGuest(member.hello, hung)
        for member, hung in watched
        if hung and member.key.id not in roster.ending_guests
        # A gateway in this process does not hang.
        if member.hello.pid != own_pid
    ]
    roster.ending_guests.update(fence.hello.process.id for fence in due)
    return due


def _hung(member: ManagedProcess, roster: Roster, limits: SupervisorConfig, is_cut_off: IsCutOff, now: float) -> str:
    if member.key.id in roster.lost_guests:
        return ""
    hung = member.hang_detector.verdict(member.beat, limits, now)
    return "" if hung and is_cut_off(member.hello.node_id, member.hang_detector.heard_at, now) else hung
