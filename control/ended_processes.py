"""Which processes of the cluster are known to have ended, according to the supervisors' views."""

from __future__ import annotations

from alignedserve.proto import supervisor_pb2 as sv

Name = tuple[str, int]  # id and incarnation


class EndedProcesses:
    """Follows the cluster's view.

    A supervisor drops a process from its view when the process is known to be dead. A supervisor that has just started
    does not know all processes yet. So a process that is absent from its view has ended only if this supervisor has
    named it before, or names a successor of it, or names every instance that the cluster should have.
    """

    def __init__(self) -> None:
        self._supervisor = 0
        self._living: set[Name] = set()
        self._newest: dict[str, int] = {}
        self._named: set[Name] = set()
        self._complete = False  # whether the view names every instance that the cluster should have
        self._youngest = 0

    def on_view(self, view: sv.ClusterView) -> None:
        """Notes the processes in a new view."""
        if view.told_by != self._supervisor:
            self._supervisor = view.told_by
            self._named.clear()
        self._living = {(peer.process.id, peer.process.incarnation) for peer in view.peers}
        self._newest = {peer.process.id: peer.process.incarnation for peer in view.peers}
        self._named |= self._living
        self._youngest = max(self._newest.values(), default=0)
        planned = {f"prefill-{number}" for number in range(view.prefill)}
        planned |= {f"decode-{number}" for number in range(view.decode)}
        self._complete = planned.union(view.draining) <= self._newest.keys()

    def has_ended(self, role_id: str, incarnation: int) -> bool:
        """Whether this process is known to have ended."""
        name = (role_id, incarnation)
        if name in self._living:
            return False
        if name in self._named or self._newest.get(role_id, 0) > incarnation:
            return True
        return self._complete and incarnation < self._youngest  # a younger process may be in the next view
