"""A process that runs the batches of a store with an endpoint that answers at once: `python -m support.batch_process`.

Arguments: the store's folder, the process's name. It prints its resident memory in MiB at the start and at the end, and
ends when no batch is left.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from alignedserve.config import BatchesConfig, GatewayConfig
from alignedserve.gateway.batches.service import BatchService
from alignedserve.gateway.batches.states import OPEN
from alignedserve.gateway.body.planning import ServedModel
from alignedserve.gateway.ledger.intake import Intake
from alignedserve.gateway.ledger.ledger import Ledger
from alignedserve.gateway.metrics import GatewayMetrics
from support.fake_cluster import fake_model_info

ENDPOINT = "/v1/completions"


async def answer(body: Any, priority: int) -> dict[str, Any]:
    await asyncio.sleep(0.001)
    return {"id": "cmpl-1", "choices": [{"text": body["prompt"]}], "priority": priority}


async def run(folder: str, name: str) -> None:
    metrics = GatewayMetrics(name)
    ledger, intake = Ledger(1024, metrics), Intake(1024, metrics)
    model = ServedModel("tiny", None, None, fake_model_info())
    config = BatchesConfig(folder=folder, lease_s=1.0)
    service = BatchService(config, GatewayConfig(), name, ledger, intake, model, metrics)
    service.endpoints = {ENDPOINT: answer}
    await service.start()
    print(resident_mib(), flush=True)
    while await service.call(open_batches, service):  # noqa: ASYNC110  # another process may end it
        await asyncio.sleep(0.05)
    print(resident_mib(), flush=True)
    await service.close()


def open_batches(service: BatchService) -> int:
    rows = service.batches._db.rows("SELECT status FROM batches")
    return sum(row["status"] in OPEN for row in rows)


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


if __name__ == "__main__":
    asyncio.run(run(*sys.argv[1:]))
