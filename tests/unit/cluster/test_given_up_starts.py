"""Starts that are given up before a process was launched: their places and spares are free again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from alignedserve.cluster.local import LocalCluster
from alignedserve.cluster.supervisor.managed_process import Phase
from alignedserve.config import ClusterConfig, Config, SupervisorConfig
from alignedserve.control.runtime import RoleSettings
from alignedserve.errors import UnavailableError

LIMITS = SupervisorConfig(heartbeat_s=0.1, fence_after_s=60.0, stall_after_s=1.0, start_timeout_s=20.0, spares=1)
CONFIG = Config(cluster=ClusterConfig(device="cpu"), supervisor=LIMITS)


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[LocalCluster]:
    async with LocalCluster(CONFIG, module="support.fake_roles") as running:
        await running.wait_ready(30)
        await running.wait_spares(1)
        yield running


class Preparing:
    """`prepare` of an instance, as with ranks on further nodes: it waits for `goes_on`, and then may fail."""

    def __init__(self, role_id: str, *, fails: bool = False) -> None:
        self.begun, self.goes_on = asyncio.Event(), asyncio.Event()
        self._role_id = role_id
        self._fails = fails

    async def prepare(self, settings: RoleSettings, *, again: bool = False) -> RoleSettings:
        if settings.id != self._role_id or self.goes_on.is_set():
            return settings
        self.begun.set()
        await self.goes_on.wait()
        if self._fails:
            raise UnavailableError("ranks of it could not be started")
        return replace(settings, rank_hosts=["127.0.0.1:1"])


async def test_an_instance_that_is_removed_while_it_is_prepared_leaves_its_place(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    preparing, supervisor = Preparing("decode-1"), cluster.supervisor
    monkeypatch.setattr(cluster.launcher, "prepare", preparing.prepare)
    await supervisor.scale(decode=2)
    await preparing.begun.wait()
    await supervisor.scale(decode=1)
    slots = supervisor.core.roster.slots
    async with asyncio.timeout(10.0):
        while slots["decode-1"].phase is not Phase.ENDING:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        preparing.goes_on.set()
        while "decode-1" in slots:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert "decode-1" not in cluster.pids
    await supervisor.scale(decode=2)
    async with asyncio.timeout(20.0):
        while not (slot := slots["decode-1"]).ready:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert slot.failures == 0


async def test_a_start_that_cannot_be_prepared_costs_no_spare(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    preparing, before, spare = Preparing("decode-0", fails=True), cluster.peer("decode-0"), cluster.peer("spare-0")
    monkeypatch.setattr(cluster.launcher, "prepare", preparing.prepare)
    cluster.kill("decode-0")
    await preparing.begun.wait()
    preparing.goes_on.set()
    after = await cluster.wait_restarted("decode-0", before.process.incarnation, 20.0)
    assert after.pid == spare.pid
    await cluster.wait_spares(1)
    assert len(cluster.pids) == len(set(cluster.pids.values()))
