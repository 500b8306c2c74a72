"""Is the cluster able to serve, and what is missing or degraded; read from the supervisor's last view.

A view is what somebody said last: that tokens are made, `pulse.py` finds out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from alignedserve.config import ClusterConfig
from alignedserve.proto import supervisor_pb2 as sv

NEEDED_ROLES = ("prefill", "decode", "kv_pool", "scheduler")


@dataclass(frozen=True, slots=True)
class Health:
    missing: tuple[str, ...]
    degraded: tuple[str, ...]
    draining: bool = False

    @property
    def can_serve(self) -> bool:
        """Whether a new request would be taken."""
        return not (self.missing or self.draining)

    @property
    def status(self) -> str:
        if self.draining:
            return "draining"
        if self.missing:
            return "unavailable"
        return "degraded" if self.degraded else "ok"

    def without(self, missing: str) -> Health:
        """As this, but that this is missing as well; "": nothing is."""
        return replace(self, missing=(*self.missing, missing)) if missing else self

    def to_json(self) -> dict[str, Any]:
        return {"status": self.status, "missing": list(self.missing), "degraded": list(self.degraded)}


def judge(
    view: sv.ClusterView,
    config: ClusterConfig,
    *,
    joined: bool,
    scheduler_up: bool,
    model_known: bool,
    draining: bool = False,
) -> Health:
    """`joined`: the supervisor can be reached; `scheduler_up`: this gateway's own link to the scheduler is."""
    ready = dict.fromkeys(NEEDED_ROLES, 0)
    degraded: list[str] = []
    for peer in view.peers:
        if peer.state == "ready":
            if peer.process.role in ready:
                ready[peer.process.role] += 1
        elif peer.process.role != "gateway" and peer.process.id not in view.draining:
            why = f": {peer.failure.message}" if peer.failure.message else ""
            degraded.append(f"{peer.process.id} is {peer.state or 'unknown'}{why}")
        degraded += [f"{peer.process.id}: {alarm}" for alarm in peer.alarms]
    missing = [role for role, count in ready.items() if count == 0]
    if not missing and not scheduler_up:
        missing.append("scheduler (this gateway has no link to it)")
    if not missing and not model_known:
        missing.append("model")
    for role, wanted in (("prefill", view.prefill or config.prefill), ("decode", view.decode or config.decode)):
        if 0 < ready[role] < wanted:
            degraded.append(f"{ready[role]} of {wanted} {role} instances are ready")
    if not joined:
        degraded.append("supervisor cannot be reached")
    return Health(tuple(missing), tuple(degraded), draining)


def role_entry(peer: sv.Peer) -> dict[str, Any]:
    """One process, as `alignedserve status` lists it."""
    entry: dict[str, Any] = {
        "role": peer.process.role,
        "id": peer.process.id,
        "pid": peer.pid,
        "node": peer.node_id,
        "address": peer.address,
        "state": peer.state,
        "holds": peer.holds,
        "incarnation": peer.process.incarnation,
        "started_unix_s": peer.started_unix_s,
    }
    if peer.HasField("failure"):
        entry["failure"] = {"code": peer.failure.code, "message": peer.failure.message}
    return entry


def book_entry(book: sv.BookCheck) -> dict[str, Any]:
    """One store, or the books of one process, as `alignedserve doctor --live` lists them."""
    entry: dict[str, Any] = {"store": book.store, "instance": book.instance, "problem": book.problem}
    if book.capacity_blocks:
        for name in ("capacity", "free", "owned", "cached"):
            entry[f"{name}_blocks"] = getattr(book, f"{name}_blocks")
    return entry
