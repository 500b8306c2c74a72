"""Batch-formation policies by name. A new one is a file in this folder and a line here."""

from __future__ import annotations

from alignedserve.registry import Registry
from alignedserve.scheduler.policies.base import BatchPolicy

POLICIES: Registry[type[BatchPolicy]] = Registry(
    "policy",
    {
        "aligned": "alignedserve.scheduler.policies.aligned:AlignedPolicy",
        "fcfs": "alignedserve.scheduler.policies.fcfs:FcfsPolicy",
    },
)
