"""`serve deploy` as its users run it: two models in one file, changed and deployed again while streams run."""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from alignedserve.client import AsyncClient, NotFoundError
from alignedserve.cluster.records import fetch_status
from support.endless_streams import EndlessStreams
from support.ray_head import RayHead

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(300)]

DEPLOY = Path(__file__).parents[2] / "deploy"
STREAMS = 8
CALM_S = 1.0


def two_models() -> dict[str, Any]:
    """The file that ships, on a machine that has little, and with gateways that come and go soon."""
    config: dict[str, Any] = yaml.safe_load((DEPLOY / "serve-two-models.yaml").read_text(encoding="utf-8"))
    for app in config["applications"]:
        app["args"]["kv_pool"]["size_gib"] = 0.1
    limits = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 6}
    times = {"upscale_delay_s": 0.5, "downscale_delay_s": 1, "metrics_interval_s": 0.5, "look_back_period_s": 1}
    config["applications"][1]["deployments"] = [{"name": "Gateway", "autoscaling_config": limits | times}]
    return config


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    with RayHead() as running:
        running.deploy(two_models(), by_command=True)
        yield running


CALM: dict[str, list[int]] = {}  # both applications have the same model


def streams(head: RayHead, app: str, count: int = STREAMS) -> EndlessStreams:
    url = f"{head.url}/{app}"
    return EndlessStreams(url, head.grpc_address, count=count, tokens=120, model=app, application=app, expected=CALM)


def status(head: RayHead, app: str) -> dict[str, Any]:
    return fetch_status(f"{head.url}/{app}", timeout_s=30.0)


def pids(head: RayHead, app: str) -> dict[str, int]:
    return {role["id"]: role["pid"] for role in status(head, app)["roles"]}


def assert_exact(load: EndlessStreams) -> None:
    assert load.report.answers >= STREAMS
    assert (load.report.failed, load.report.different) == ([], [])


async def settled(head: RayHead, app: str, timeout_s: float = 120.0) -> None:
    """Returns when nothing is under way any more."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = await asyncio.to_thread(status, head, app)
        if found.get("state") == "ready" and found["restart"]["done"]:
            assert found["restart"]["failure"] == found["scale"]["failure"] == ""
            return
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.2)


async def test_each_model_answers_by_its_route_and_by_its_name(head: RayHead) -> None:
    async with httpx.AsyncClient(base_url=head.url, timeout=60.0) as http:
        for app, other in (("chat", "code"), ("code", "chat")):
            models = (await http.get(f"/{app}/v1/models")).json()["data"]
            assert [model["id"] for model in models] == [app]
            body = {"model": app, "prompt": "Return a list of", "max_tokens": 8, "temperature": 0}
            answer = await http.post(f"/{app}/v1/completions", json=body)
            async with AsyncClient(head.grpc_address, application=app) as client:
                assert (await client.generate("Return a list of", max_tokens=8, temperature=0)).text
                assert [model.id for model in await client.models()] == [app]
                with pytest.raises(NotFoundError):
                    await client.generate("x", model=other, max_tokens=1)
            assert answer.status_code == 200, answer.text
            page = (await http.get(f"/{app}/metrics")).text
            samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
            assert {sample.labels.get("application") for sample in samples} == {app}
    assert not set(pids(head, "chat").values()) & set(pids(head, "code").values())


def test_commands_pick_the_application_by_its_url(head: RayHead) -> None:
    refused = head.alignedserve("scale", "--decode", "2")
    assert refused.returncode == 2
    for app in ("chat", "code"):
        assert f"{head.url}/{app}" in refused.stderr
    shown = head.alignedserve("status", "--json", "--url", f"{head.url}/code")
    assert shown.returncode == 0, shown.stderr
    assert {role["id"]: role["pid"] for role in json.loads(shown.stdout)["roles"]} == pids(head, "code")
    live = head.alignedserve("doctor", "--live", "--url", f"{head.url}/code")
    assert live.returncode == 0, live.stderr
    assert live.stdout.startswith(f"{head.url}/code:")


async def test_what_is_wrong_is_told_at_once_and_everything_goes_on(head: RayHead) -> None:
    before = pids(head, "chat")
    wrong = two_models()
    wrong["applications"][0]["args"]["scheduler"] = {"polcy": "aligned"}
    with pytest.raises(RuntimeError, match=r"the nearest is 'scheduler\.policy'"):
        head.deploy(wrong)
    assert "scheduler.polcy" in head.applications()["chat"]["message"]
    async with streams(head, "chat", count=2) as load:
        await asyncio.sleep(CALM_S)
    assert (load.report.failed, load.report.different) == ([], [])
    assert pids(head, "chat") == before


async def test_a_model_that_is_not_there_ends_nothing_and_a_right_file_brings_everything_back(head: RayHead) -> None:
    """The update fails, and Serve leaves the old version as it is: open requests and new ones are answered."""
    before = pids(head, "chat")
    wrong = two_models()
    wrong["applications"][0]["args"]["model"]["path"] = "/models/no-such-model"
    async with streams(head, "chat", count=4) as load:
        with pytest.raises(RuntimeError, match=r"Failed to update the deployments \['Supervisor'\]"):
            await asyncio.to_thread(head.deploy, wrong)
        said = await asyncio.to_thread(lambda: head.applications()["chat"]["deployments"]["Supervisor"]["message"])
        assert "ModelError: model folder '/models/no-such-model' does not exist" in said
        async with streams(head, "chat", count=2) as later:
            await asyncio.sleep(CALM_S)
        await asyncio.to_thread(head.deploy, two_models())
        await settled(head, "chat")
    for report in (load.report, later.report):
        assert (report.failed, report.different) == ([], [])
    after = pids(head, "chat")
    assert {name: pid for name, pid in after.items() if not name.startswith("gateway")} == {
        name: pid for name, pid in before.items() if not name.startswith("gateway")
    }


async def test_a_changed_configuration_and_a_rolling_restart_are_seen_by_no_client(head: RayHead) -> None:
    """Of one application; the other notices nothing at all."""
    chat, code = pids(head, "chat"), pids(head, "code")
    changed = two_models()
    changed["applications"][0]["args"] |= {"scheduler": {"min_batch_requests": 20}, "gateway": {"max_queue": 900}}
    async with streams(head, "chat") as load, streams(head, "code", count=2) as others:
        await asyncio.to_thread(head.deploy, changed)
        await settled(head, "chat")
        after = await asyncio.to_thread(pids, head, "chat")
        url = f"{head.url}/chat"
        roles = ("kv_pool", "node_agent", "gateway", "supervisor")
        words = [word for role in roles for word in ("--role", role)]
        done = await asyncio.to_thread(head.alignedserve, "restart", "--url", url, *words)
        assert done.returncode == 0, done.stderr
        await asyncio.sleep(CALM_S)
    assert_exact(load)
    assert (others.report.failed, others.report.different) == ([], [])
    rolled = ("scheduler-0", "prefill-0", "decode-0", "supervisor-0")
    assert all(after[name] != chat[name] for name in rolled)
    assert all(after[name] == chat[name] for name in ("kv_pool-0", "node_agent-0"))
    last = pids(head, "chat")
    assert all(last[name] == after[name] for name in rolled[:-1])
    assert all(last[name] != after[name] for name in ("kv_pool-0", "node_agent-0", "supervisor-0"))
    assert not {name for name in last if name.startswith("gateway")} & {*chat, *after}
    assert {name: pid for name, pid in pids(head, "code").items() if name in code} == code


async def test_gateways_come_with_the_load_and_go_with_it(head: RayHead) -> None:
    def gateways() -> list[str]:
        deployment = head.applications()["code"]["deployments"]["Gateway"]
        return [replica["state"] for replica in deployment["replicas"]]

    async def wait_gateways(count: int) -> None:
        deadline = time.monotonic() + 90.0
        while await asyncio.to_thread(gateways) != ["RUNNING"] * count:
            assert time.monotonic() < deadline, await asyncio.to_thread(gateways)
            await asyncio.sleep(0.2)

    await wait_gateways(1)
    async with streams(head, "code", count=2) as few:
        async with streams(head, "code", count=2 * STREAMS) as many:
            await wait_gateways(2)
            await asyncio.sleep(CALM_S)
        await wait_gateways(1)
    assert_exact(many)
    assert (few.report.failed, few.report.different) == ([], [])


async def test_one_that_is_removed_leaves_the_other_alone(head: RayHead) -> None:
    """The last test of this cluster."""
    before = pids(head, "chat")
    remaining = copy.deepcopy(head.deployed)
    del remaining["applications"][1]
    async with streams(head, "chat", count=4) as load:
        await asyncio.to_thread(head.deploy, remaining)
        await asyncio.sleep(CALM_S)
    assert (load.report.failed, load.report.different) == ([], [])
    assert pids(head, "chat") == before
    async with httpx.AsyncClient(timeout=30.0) as http:
        assert (await http.get(f"{head.url}/code/v1/models")).status_code == 404
