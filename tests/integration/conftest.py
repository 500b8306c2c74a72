"""Worker processes of this folder's clusters are forked, except in the files that test their starts and ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from alignedserve.cluster.launch import process_launcher
from alignedserve.cluster.launch.process_launcher import Process, start_process
from alignedserve.cluster.supervisor.plan import MODEL_ROLES, SPARE
from support.fork_server import fork_process

REAL_STARTS = ("test_workers", "test_losses")


async def start_worker_forked(role: str, module: str, environment: Mapping[str, str], output: int | None) -> Process:
    if role in (*MODEL_ROLES, SPARE):
        return await fork_process(module, environment, output)
    return await start_process(role, module, environment, output)


@pytest.fixture(scope="module", autouse=True)
def workers_are_forked(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not request.module.__name__.endswith(REAL_STARTS):
            patch.setattr(process_launcher, "start_process", start_worker_forked)
        yield
