"""What a decode instance does at the scheduler's commands, without gRPC."""

from __future__ import annotations

import pytest

from alignedserve.config import Config, DecodeConfig
from alignedserve.config_sources import to_tree
from alignedserve.control.runtime import RoleSettings
from alignedserve.decode_worker.actor import DecodeServer
from alignedserve.proto import decode_worker_pb2 as dw
from support.scripted_cell import ScriptedCell
from support.scripted_decode import Script


@pytest.mark.parametrize(("told_s", "evicted"), [([], 0), ([float("inf")], 0), ([1e9], 0), ([1e9, 0.0], 1)])
async def test_the_scheduler_says_when_requests_without_an_objective_are_overdue(
    told_s: list[float], evicted: int
) -> None:
    cell = ScriptedCell(64, 4, None, DecodeConfig(max_running=1, join_iterations=1))
    server = DecodeServer(RoleSettings("decode", "decode-0", to_tree(Config()), "cell", "token"))
    server._instance.compute = cell.loop
    cell.offer(cell.add(Script(0, [1] * 4, 20)))
    cell.turn()
    cell.end_pull()
    for objective_s in told_s:
        server._on_command(dw.DecodeCommand(default_objective_s=objective_s))
    cell.offer(cell.add(Script(1, [2] * 4, 20)))
    for _ in range(5):
        cell.turn()
    assert len(cell.evictions) == evicted  # for the overdue request
