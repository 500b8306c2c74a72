"""How many blocks each store gets: decided once for a cluster's life, as soon as model and memory are known."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from alignedserve.cluster.members import Member
from alignedserve.cluster.plan import MODEL_ROLES, PlannedRole
from alignedserve.config import Config
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
        self._on_gpu = all(role.on_gpu for role in planned if role.role in MODEL_ROLES)
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
        if self.model_info and self._memory_bytes is not None and not self.store_plan:
            model = ModelInfo.from_json(self.model_info)
            self.store_plan = plan_stores(self._config, model, self._memory_bytes, on_gpu=self._on_gpu).to_json()
            logger.info("stores, in blocks: %s", self.store_plan)
        return before != (self.model_info, self.store_plan)
