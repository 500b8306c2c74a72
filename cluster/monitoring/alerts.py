"""The alert rules. docs/operations/runbooks.md has a section for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from alignedserve.cluster.monitoring.outcomes import FAILED, REFUSED
from alignedserve.cluster.monitoring.selectors import CLUSTERS, restricted

GROUP = "alignedserve"
RUNBOOKS = "docs/operations/runbooks.md"
TARGET = 'up{job=~"alignedserve(-metrics)?"}'  # Prometheus names the job of a Kubernetes service after it
_ENDED = "alignedserve_gateway_requests_total"
_OUTPUT = "alignedserve_gateway_output_tokens_total"


@dataclass(frozen=True, slots=True)
class Alert:
    """Fires once `value` has been past `bound` for `hold`. `severity` critical: an operator is to be called at once."""

    name: str
    value: str
    bound: str
    severity: Literal["critical", "warning"]
    summary: str
    description: str
    hold: str = ""

    @property
    def expr(self) -> str:
        return restricted(f"{self.value} {self.bound}", CLUSTERS)

    @property
    def runbook(self) -> str:
        return f"{RUNBOOKS}#{self.name.lower()}"

    def rule(self) -> dict[str, Any]:
        """The rule as Prometheus reads it."""
        return {
            "alert": self.name,
            "expr": self.expr,
            **({"for": self.hold} if self.hold else {}),
            "labels": {"severity": self.severity, "component": GROUP},
            "annotations": {"summary": self.summary, "description": self.description, "runbook_url": self.runbook},
        }


ALERTS = (
    Alert(
        "NoAnswer",
        TARGET,
        f"== 0 or absent({TARGET})",  # on Kubernetes the target goes with its pod
        "critical",
        "No answer from the cluster {{ $labels.instance }}",
        "No gateway has answered a scrape for a minute.",
        hold="1m",
    ),
    Alert(
        "SupervisorMissing",
        TARGET,
        "== 1 unless on (job, instance) alignedserve_role_starts_total",
        "critical",
        "The cluster at {{ $labels.instance }} has no supervisor",
        "Gateways answer, but nothing replaces processes that die. Metrics of other roles are missing.",
        hold="2m",
    ),
    Alert(
        "RoleMissing",
        "alignedserve_ready_instances",
        "== 0",
        "critical",
        "No {{ $labels.role }} is ready",
        "Without a ready instance of each role, requests wait or fail.",
        hold="2m",
    ),
    Alert(
        "RequestsFail",
        f"sum by (job) (rate({_ENDED}{FAILED}[5m])) / sum by (job) (rate({_ENDED}[5m]))",
        "> 0.05",
        "critical",
        "{{ $value | humanizePercentage }} of requests fail",
        "They fail by the cluster's fault, not the clients'.",
        hold="5m",
    ),
    Alert(
        "NothingDecoded",
        f"sum by (job) (rate({_OUTPUT}[2m]))",
        "== 0 and on (job) sum by (job) (alignedserve_requests_decoding) > 0",
        "critical",
        "Requests are at decode instances, but no token arrives",
        "For three minutes, gateways have received no token of them.",
        hold="3m",
    ),
    Alert(
        "KvCorrupted",
        "increase(alignedserve_kv_checksum_mismatches_total[1h])",
        "> 0",
        "critical",
        "KV differed after a copy to or from {{ $labels.instance }}",
        "Each block was copied or computed again, so no answer is wrong. Memory, a driver or a network may be faulty.",
    ),
    Alert(
        "RolesRestart",
        "increase(alignedserve_role_starts_total[1h])",
        "> 3",
        "warning",
        "{{ $value | humanize }} processes were started within an hour",
        "Processes die and are replaced, unless `alignedserve restart` or `scale` was run.",
    ),
    Alert(
        "RequestsRefused",
        f"sum by (job) (rate({_ENDED}{REFUSED}[5m])) / sum by (job) (rate({_ENDED}[5m]))",
        "> 0.05",
        "warning",
        "{{ $value | humanizePercentage }} of requests are refused for load",
        "Queues are full, or objectives would be missed.",
        hold="10m",
    ),
    Alert(
        "RequestsLate",
        "alignedserve_late_requests_share",
        f"> 0.2 and on (job) sum by (job) (rate({_OUTPUT}[5m])) > 0",  # the share stands still while nothing decodes
        "warning",
        "{{ $value | humanizePercentage }} of requests begin to decode late",
        "They wait in the pool past their wait objective.",
        hold="5m",
    ),
    Alert(
        "KvDroppedForRoom",
        "increase(alignedserve_requests_dropped_for_room_total[5m])",
        "> 0",
        "warning",
        "KV of {{ $value | humanize }} requests was dropped for room",
        "The last resort: the pool is too small for the running requests, which are prefilled again.",
    ),
    Alert(
        "PoolNearlyFull",
        "alignedserve_requests_queued",
        "> 0 and on (job) sum by (job) (alignedserve_prefill_pending_tokens) == 0",
        "warning",
        "{{ $value }} requests are queued, and no prefill instance has work",
        "They wait for room in the pool beside its reserve.",
        hold="10m",
    ),
    Alert(
        "CopiesFail",
        "increase(alignedserve_kv_copy_failures_total[10m])",
        "> 0",
        "warning",
        "Copies of {{ $labels.instance }} fail on every route",
        "Their requests are submitted again.",
    ),
    Alert(
        "DiskTierOff",
        "alignedserve_disk_tier_on",
        "== 0",
        "warning",
        "{{ $labels.instance }} does not {{ $labels.doing }} its disk tier",
        "It could not be opened, or was switched off after faults. Only cached prefixes are lost.",
        hold="5m",
    ),
    Alert(
        "RequestsUnlogged",
        "increase(alignedserve_gateway_unlogged_requests_total[10m])",
        "> 0",
        "warning",
        "{{ $labels.instance }} loses lines of its request log",
        "The disk is full or too slow. Requests are served.",
    ),
    Alert(
        "BatchesExpire",
        'increase(alignedserve_gateway_batches_total{status="expired"}[1h])',
        "> 0",
        "warning",
        "An offline batch has expired",
        "Its time was over before all lines were answered.",
    ),
)


def rules() -> dict[str, Any]:
    """The rules as Prometheus' file has them."""
    return {"groups": [{"name": GROUP, "rules": [alert.rule() for alert in ALERTS]}]}
