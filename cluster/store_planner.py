"""How many blocks each store gets: decided once for a cluster's life, as soon as model and memory are known."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from alignedserve.cluster.members import Member
from alignedserve.cluster.plan import MODEL_ROLES, PlannedRole
from alignedserve.config import Config
from alignedserve.device_memory import FREE_GAUGE, TOTAL_GAUGE, DeviceMemory, describe_plan
from alignedserve.model import ModelInfo
from alignedserve.sizing import plan_stores

logger = logging.getLogger(__name__)

MEMORY_GAUGE = "memory_available_bytes"


class StorePlanner:
    """`model_info` and `store_plan` are JSON, as the view carries them; empty until they are known."""

    def __init__(self, config: Config, planned: Iterable[PlannedRole]) -> None:
        self.model_info = ""
        self.store_plan = ""
        self._config = config
        self._awaited = {role.id for role in planned if role.role in MODEL_ROLES and role.on_gpu}
        self._devices: dict[str, tuple[str, DeviceMemory]] = {}  # instance -> role, and its GPU
        self._memory_bytes: int | None = None

    def adopt(self, model_info: str, store_plan: str) -> None:
        """What an earlier supervisor decided holds on: the stores exist."""
        self.model_info = self.model_info or model_info
        self.store_plan = self.store_plan or store_plan

    def note(self, member: Member) -> bool:
        """Take in what a process says of the model or of memory; whether something became known by it.

        Raises ResourceError where the stores do not fit.
        """
        before = (self.model_info, self.store_plan)
        # The first word of the agent counts: it was up before any weights were loaded.
        if self._memory_bytes is None and MEMORY_GAUGE in member.beat.gauges:
            self._memory_bytes = int(member.beat.gauges[MEMORY_GAUGE])
        self.model_info = self.model_info or member.beat.model_info
        self._note_device(member)
        complete = self._memory_bytes is not None and self._awaited <= self._devices.keys()
        if self.model_info and complete and not self.store_plan:
            self._plan(ModelInfo.from_json(self.model_info))
        return before != (self.model_info, self.store_plan)

    def _note_device(self, member: Member) -> None:
        """A worker says what its GPU had before it loaded anything; its successor may say another figure."""
        gauges, key = member.beat.gauges, member.key
        if key.id not in self._awaited or TOTAL_GAUGE not in gauges:
            return
        total, free = int(gauges[TOTAL_GAUGE]), int(gauges[FREE_GAUGE])
        self._devices[key.id] = (
            key.role,
            DeviceMemory(key.id, member.hello.device, total, free, member.hello.node_id),
        )

    def _plan(self, model: ModelInfo) -> None:
        assert self._memory_bytes is not None
        devices = [self._devices[instance] for instance in sorted(self._devices)]
        plan = plan_stores(self._config, model, self._memory_bytes, devices)
        self.store_plan = plan.to_json()
        logger.info("stores, in blocks: %s", self.store_plan)
        for line in describe_plan(self._config, plan.devices, devices):
            logger.info("%s", line)
