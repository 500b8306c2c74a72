"""Whether the cluster can serve, and what is missing or degraded, according to the supervisor's last view.

The view contains what processes reported last. `pulse.py` checks that tokens are actually generated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from alignedserve.config import ClusterConfig
from alignedserve.proto import supervisor_pb2 as sv

NEEDED_ROLES = ("prefill", "decode", "kv_pool", "scheduler")


@dataclass(frozen=True, slots=True)
class Health:
    """The cluster's health. `missing`: why it cannot serve; `degraded`: problems with which it can still serve."""

    missing: tuple[str, ...]
    degraded: tuple[str, ...]
    draining: bool = False

    @property
    def can_serve(self) -> bool:
        """Whether a new request would be accepted."""
        return not (self.missing or self.draining)

    @property
    def status(self) -> str:
        if self.draining:
            return "draining"
        if self.missing:
            return "unavailable"
        return "degraded" if self.degraded else "ok"

    def without(self, missing: str) -> Health:
        """A copy in which `missing` is missing as well; if it is "", this object."""
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
    """The health of the cluster in `view`.

    `joined`: the supervisor can be reached. `scheduler_up`: this gateway's link to the scheduler is up. `model_known`:
    the model's shape is known. `draining`: this gateway drains.
    """
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
    """One process, as JSON for `alignedserve status`."""
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
    """One store, or the accounting of one process, as JSON for `alignedserve doctor --live`."""
    entry: dict[str, Any] = {"store": book.store, "instance": book.instance, "problem": book.problem}
    if book.capacity_blocks:
        for name in ("capacity", "free", "owned", "cached"):
            entry[f"{name}_blocks"] = getattr(book, f"{name}_blocks")
    return entry
