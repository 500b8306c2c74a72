"""The clock jumps by an hour while the cluster serves: no decision depends on the clock."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from alignedserve.cluster.local import LocalCluster
from alignedserve.cluster.supervisor.plan import PlannedRole
from alignedserve.cluster.supervisor.role_settings import role_settings
from alignedserve.config import ClusterConfig, Config, SupervisorConfig
from alignedserve.gateway.body.planning import CallPlan, PromptPlan
from alignedserve.gateway.body.requests import ReplyOptions
from alignedserve.gateway.ledger.calls import Call
from alignedserve.request import SamplingParams

HOUR_NS = 3600 * 10**9


def set_clock(patch: pytest.MonkeyPatch, by_ns: int) -> None:
    real = time.time_ns
    patch.setattr(time, "time_ns", lambda: real() + by_ns)


@pytest.mark.parametrize("by_ns", [HOUR_NS, -HOUR_NS])
def test_a_request_that_is_submitted_again_is_no_older_or_younger_than_it_is(
    monkeypatch: pytest.MonkeyPatch, by_ns: int
) -> None:
    prompt = PromptPlan((1, 2, 3), SamplingParams())
    answer = Call(CallPlan("call-1", (prompt,), ReplyOptions())).answers[0]
    set_clock(monkeypatch, by_ns)

    spec = answer.spec("gateway-0", "address", answer.sent_s)

    assert 0 <= time.time_ns() - spec.arrival_ns < 10**9


async def test_a_supervisor_of_a_clock_that_was_set_back_is_newer_than_its_predecessor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = Config(cluster=ClusterConfig(device="cpu"), supervisor=replace(SupervisorConfig(), heartbeat_s=0.1))
    async with LocalCluster(config, module="support.fake_roles") as cluster:
        await cluster.wait_ready(30)
        first = cluster.supervisor.core
        set_clock(monkeypatch, -HOUR_NS)

        await cluster.restart_supervisor()

        second = cluster.supervisor.core
        assert second.incarnation > first.incarnation
        assert second.view_version > first.view_version
        await cluster.wait_ready(30)
        newest = max(peer.process.incarnation for peer in cluster.view().peers)
        added = second.roster.add(PlannedRole("decode", "decode-1"))
        supervisor = cluster.supervisor
        settings = role_settings(supervisor.core, added, supervisor._tree, supervisor.identity, supervisor.address)
        assert settings.after >= newest
        second.roster.remove("decode-1")
