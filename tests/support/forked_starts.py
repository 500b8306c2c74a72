"""Has roles of clusters in this process forked instead of started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from alignedserve.cluster.launch import process_launcher
from alignedserve.cluster.launch.process_launcher import Process
from alignedserve.cluster.supervisor.plan import MODEL_ROLES, SPARE
from support.fork_server import fork_process


def forked_starts_except(*files: str) -> Any:
    """A fixture for all tests of a folder, but for these files, which test starts and ends of processes."""

    async def start(role: str, module: str, environment: Mapping[str, str], output: int | None) -> Process:
        holds_model = role in (*MODEL_ROLES, SPARE) and module != "support.fake_roles"
        out, err = (1, 2) if output is None else (output, output)
        return await fork_process("worker" if holds_model else "role", module, environment, out, err)

    @pytest.fixture(scope="module", autouse=True)
    def forked_starts(request: pytest.FixtureRequest) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            if request.path.stem not in files:
                patch.setattr(process_launcher, "start_process", start)
            yield

    return forked_starts
