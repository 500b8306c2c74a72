"""Health fails while no token is generated: a probe requests one token, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NoReturn

import httpx
import pytest

from alignedserve.control.samples import value
from alignedserve.errors import AccountingError, OverloadedError
from alignedserve.gateway import pulse
from alignedserve.gateway.ledger.calls import Answer
from alignedserve.gateway.pulse import Work, Works
from alignedserve.request import RequestSpec
from support.fake_cluster import FakeCluster, counting_script, silent_script
from support.gateway import RunningGateway, running_gateway


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"FRESH_S": 0.2, "ANSWER_S": 0.9, "WORKERS_AFTER_S": 0.05, "WORKERS_EVERY_S": 0.05}.items():
        monkeypatch.setattr(pulse, name, seconds)


@pytest.fixture
async def http(gateway: RunningGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        yield client


async def only_first_tokens(cluster: FakeCluster, spec: RequestSpec) -> None:
    cluster.emit(spec, [100], role="prefill")


async def refusing(cluster: FakeCluster, spec: RequestSpec) -> None:
    cluster.reject(OverloadedError("too much", retry_after_s=1.0), spec.key)


@pytest.mark.parametrize("script", [silent_script, only_first_tokens, refusing])
async def test_health_is_not_ok_while_no_token_is_decoded(
    cluster: FakeCluster, http: httpx.AsyncClient, script: object
) -> None:
    assert (await http.get("/health")).status_code == 200
    cluster.script = script  # type: ignore[assignment]
    await asyncio.sleep(pulse.FRESH_S)
    answer = await http.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (503, "unavailable")
    assert answer.json()["missing"][0].startswith("tokens (none was generated for ")
    assert (await http.get("/live")).status_code == 200
    cluster.script = counting_script
    await asyncio.sleep(pulse.ANSWER_S)
    for spec in list(cluster.submitted):  # a waiting probe is answered, and so is the next
        if spec.key in cluster.held:
            await counting_script(cluster, spec)
    for _ in range(500):  # until its tokens have come
        if (answer := await http.get("/health")).status_code == 200:
            break
        await asyncio.sleep(0.02)
    assert answer.json() == {"status": "ok", "missing": [], "degraded": []}


async def test_a_gateway_that_has_just_served_needs_no_probe_and_one_runs_at_a_time(
    cluster: FakeCluster, http: httpx.AsyncClient
) -> None:
    await http.post("/v1/completions", json={"prompt": [1], "max_tokens": 3})
    assert (await http.get("/health")).status_code == 200
    assert len(cluster.submitted) == 1
    cluster.script = silent_script
    await asyncio.sleep(pulse.FRESH_S)
    answers = await asyncio.gather(*(http.get("/health") for _ in range(5)))
    assert {answer.status_code for answer in answers} == {503}
    begun_s = time.monotonic()
    assert (await http.get("/health")).status_code == 503
    assert time.monotonic() - begun_s < pulse.ANSWER_S / 2  # a probe is already waiting, so health does not wait again
    assert len(cluster.submitted) == 2


async def test_a_probe_is_cancelled_and_counted_nowhere(cluster: FakeCluster, tmp_path: Path) -> None:
    async def endless(cluster: FakeCluster, spec: RequestSpec) -> None:
        cluster.emit(spec, [100], role="prefill")
        cluster.emit(spec, [101])

    cluster.script = endless
    log = tmp_path / "requests.jsonl"
    async with running_gateway(cluster, request_log=str(log)) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url) as http:
            assert (await http.get("/health")).status_code == 200
            await cluster.wait_for(lambda: [key.request_id for key in cluster.cancelled])
            assert [key.request_id for key in cluster.cancelled] == [cluster.submitted[0].key.request_id]
            metrics = (await http.get("/metrics")).text
        assert len(gateway.server.ledger) == 0
    for name in ("prompt_tokens_total", "output_tokens_total", "requests_total", "ttft_seconds_count"):
        assert value(metrics, f"alignedserve_gateway_{name}") == 0, name
    assert log.read_text() == ""


async def test_how_many_requests_are_open_is_known_without_a_walk_over_them(
    cluster: FakeCluster, gateway: RunningGateway, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each new request needs the count twice."""

    class Unwalked(dict[str, Answer]):
        def __iter__(self) -> NoReturn:
            raise AssertionError

        values = items = __iter__  # type: ignore[assignment]

    cluster.script = silent_script
    ledger = gateway.server.ledger
    asked = asyncio.ensure_future(http.post("/v1/completions", json={"prompt": [1], "n": 3, "timeout_s": 2}))
    await cluster.wait_for(lambda: len(ledger) == 3)
    await http.get("/health")
    ledger.check_integrity()
    with monkeypatch.context() as patched:
        patched.setattr(ledger, "_open", Unwalked(ledger._open))
        assert dict.__len__(ledger._open) == 4
        assert len(ledger) == 3
    with monkeypatch.context() as patched:
        patched.setattr(ledger, "_open_of_probes", 2)
        with pytest.raises(AccountingError):
            ledger.check_integrity()
    assert (await asked).status_code == 408
    assert len(ledger) == 0
    ledger.check_integrity()


async def test_overload_is_not_ill_health(
    cluster: FakeCluster, gateway: RunningGateway, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress of workers proves health; workers that stand still or have no work do not."""
    progress = 0

    async def ask() -> Works:
        nonlocal progress
        progress += moving
        return {("decode-0", 1): Work(busy, progress, step_s)}

    monkeypatch.setattr(gateway.server._pulse, "_ask_workers", ask)
    cluster.script = refusing
    for busy, moving, step_s, status in (
        (True, True, 0.0, 200),
        (True, False, 0.0, 503),
        (False, True, 0.0, 503),
        (True, False, 0.01, 503),  # it made steps before, and hangs
        (True, False, 0.01, 503),  # the next probe sees the same
        (True, False, 60.0, 200),  # one long step
    ):
        await asyncio.sleep(pulse.ANSWER_S + pulse.FRESH_S)
        assert (await http.get("/health")).status_code == status, (busy, moving, step_s)


async def test_an_end_that_was_announced_is_taken_back_by_a_supervisor_that_goes_on(
    cluster: FakeCluster, gateway: RunningGateway, http: httpx.AsyncClient
) -> None:
    cluster.announce_end(0.0)
    await cluster.wait_for(lambda: gateway.server.state == "drained")
    body = {"prompt": [1], "max_tokens": 3}
    assert (await http.post("/v1/completions", json=body)).status_code == 503
    cluster.ending = False
    cluster.publish_view()
    await cluster.wait_for(lambda: gateway.server.state == "ready")
    assert (await http.post("/v1/completions", json=body)).status_code == 200
    assert (await http.get("/health")).json()["status"] == "ok"


async def test_the_end_of_the_replica_itself_is_for_good(
    cluster: FakeCluster, gateway: RunningGateway, http: httpx.AsyncClient
) -> None:
    gateway.server.drain(1.0)
    cluster.publish_view()
    version = cluster.view().version
    await cluster.wait_for(lambda: gateway.server.view.version == version)
    assert (await http.get("/health")).json()["status"] == "draining"
