"""Builds the view that every process receives, and the status for users."""

from __future__ import annotations

from typing import TYPE_CHECKING

from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv

if TYPE_CHECKING:
    from alignedserve.cluster.supervisor.core import SupervisorCore


def view_of(core: SupervisorCore) -> sv.ClusterView:
    return sv.ClusterView(
        version=core.view_version,
        peers=[
            member.peer(lost=lost, fenced=core.roster.is_fenced(member.key.id))
            for member, lost in core.roster.members()
        ],
        model_info=core.planner.model_info,
        pairs=[
            sv.Pair(decode_id=d, prefill_id=p, link_rank=core.scaling.link_rank(d, p)) for d, p in core.scaling.pairs
        ],
        store_plan=core.planner.store_plan,
        ending=core.ending,
        told_by=core.incarnation,
        supervisor=core.supervisor,
        grace_s=core.grace_s,
        prefill=core.scaling.shape.prefill,
        decode=core.scaling.shape.decode,
        draining=core.scaling.draining,
        pools=core.nodes.pools(),
        next_node=core.nodes.next_number,
        gone_nodes=core.nodes.gone,
        incarnations=core.roster.incarnations(),
        restart=core.rolling.state,
        followed_prefill=core.scaling.followed.prefill,
        followed_decode=core.scaling.followed.decode,
        was_ready=core.has_served,
        stop_asked=core.stop_asked,
    )


def status_of(core: SupervisorCore, cluster_id: str) -> sv.ClusterStatus:
    """Living processes and problems. The server adds metrics and the supervisor itself."""
    return sv.ClusterStatus(
        peers=[member.peer(lost=False, detailed=True) for member, lost in core.roster.members() if not lost],
        model_info=core.planner.model_info,
        cluster_id=cluster_id,
        state=core.state(),
        missing=core.roster.missing(),
        degraded=core.degraded(),
        failure=core.failure,
        prefill=core.scaling.shape.prefill,
        decode=core.scaling.shape.decode,
        scale_failure=pb.Failure(message=core.scaling.failure),
        restart=core.rolling.state,
    )
