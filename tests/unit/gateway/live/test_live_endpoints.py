"""The live page's endpoints: its files, the feed, requests, and the login where there are API keys."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from alignedserve.admin import ADMIN_HEADER
from alignedserve.cluster.cli import top_command
from alignedserve.cluster.cli.explain_command import described
from alignedserve.cluster.cli.main import main
from alignedserve.cluster.cli.top_command import feed, lasting, screen
from alignedserve.errors import OverloadedError, UnavailableError
from alignedserve.gateway.live import endpoints
from alignedserve.gateway.live import feed as live_feed
from alignedserve.gateway.live.feed import LiveFeed
from alignedserve.gateway.live.samples import Change, Samples
from alignedserve.gateway.live.state import live_state
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv
from support.fake_cluster import FakeCluster, counting_script, silent_script
from support.gateway import RunningGateway, running_gateway

KEYS = ("sk-first", "sk-second")
BODY = {"prompt": "a b c", "max_tokens": 3}


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with FakeCluster() as cluster:
        yield cluster


@pytest.fixture
async def gateway(cluster: FakeCluster) -> AsyncIterator[RunningGateway]:
    async with running_gateway(cluster) as gateway:
        yield gateway


@pytest.fixture
async def guarded(cluster: FakeCluster, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    path = tmp_path / "keys"
    path.write_text("\n".join(KEYS))
    path.chmod(0o600)
    async with running_gateway(cluster, api_key_file=str(path)) as gateway:
        yield gateway


@pytest.fixture
async def http(gateway: RunningGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=10.0) as client:
        yield client


async def states(client: httpx.AsyncClient, count: int, **headers: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    async with client.stream("GET", "/dashboard/feed", headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: ")))
            if len(found) == count:
                return found
    raise AssertionError("the feed has ended")


async def test_the_page_and_its_files_are_there_and_name_no_other_host(http: httpx.AsyncClient) -> None:
    for path in ("/", "/dashboard", "/dashboard/"):
        page = await http.get(path)
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'self'" in page.headers["content-security-policy"]
        assert "{{root}}" not in page.text
        assert "http://" not in page.text
        assert "https://" not in page.text
    names = [part.partition('"')[0] for part in page.text.replace("href=", "src=").split('src="/')[1:]]
    assert "dashboard/static/app.js" in names
    for name in names:
        assert (await http.get(f"/{name}")).status_code == 200, name
    for name in ("static/index.html", "static/../endpoints.py", "static/", "static/nothing.js"):
        assert (await http.get(httpx.URL(http.base_url, raw_path=f"/dashboard/{name}".encode()))).status_code == 404


async def test_the_feed_shows_the_cluster_and_reads_nothing_while_nobody_looks(
    gateway: RunningGateway, http: httpx.AsyncClient
) -> None:
    await http.post("/v1/completions", json=BODY)
    first, second = await states(http, 2)
    assert first["model"] == "tiny"
    assert first["health"]["state"] == "ready"
    assert first["rates"]["requests_per_s"] is None
    assert second["rates"]["requests_per_s"] == 0
    assert second["waiting"] == [[16, 17, 2], [256, 287, 1]]
    (decode,) = second["decode"]
    assert (decode["id"], decode["lengths"], decode["switching"]) == ("decode-0", [16, 17, 40], True)
    assert decode["candidates"] == {"batch": [100, 120], "requests": []}
    assert second["events"][-1]["text"] == "decode-0 joined"
    assert {role["role"] for role in second["roles"]} >= {"decode", "scheduler"}
    assert [one["outcome"] for one in second["slowest"]] == ["length"]
    assert second["stale"] == ""
    async with asyncio.timeout(5.0):
        while gateway.server.live_service.feed.viewers:  # noqa: ASYNC110  # the server sees the end a little later
            await asyncio.sleep(0.01)
    asked = len(gateway.server.live_service.feed._window._kept)
    await asyncio.sleep(1.2)
    assert len(gateway.server.live_service.feed._window._kept) == asked
    second["events"].append({"unix_s": 0.0, "level": "warning", "text": "[/tmp/x] is full"})
    lines = render(second)
    assert any(line.rstrip().endswith("[/tmp/x] is full") for line in lines)
    assert any(line.split()[:3] == ["decode-0", "ready", "3/8"] for line in lines)
    assert any("100 to 120" in line for line in lines)
    assert any(line.startswith("slowest of late") for line in lines)
    assert any(line.startswith("waiting by prefix length: 16 ") for line in lines)
    assert any(line.rstrip().endswith("decode-0 joined") for line in lines)


def render(state: dict[str, Any]) -> list[str]:
    from rich.console import Console

    console = Console(width=160, file=io.StringIO())
    console.print(screen("http://here", state))
    return str(console.file.getvalue()).splitlines()  # type: ignore[attr-defined]


def feed_of(*lives: sv.LiveState) -> LiveFeed:
    """A feed that reads these, one after the other."""
    left = iter(lives)

    async def read() -> sv.LiveState:
        return next(left)

    return LiveFeed(read)


def batches(*numbers: int) -> list[sv.LiveState]:
    """What a decode instance says that runs these batches."""
    status = sv.ClusterStatus(peers=[sv.Peer(process=pb.ProcessKey(role="decode", id="decode-0"))])
    said = [json.dumps({"batch": number, "switching": False}) for number in numbers]
    return [sv.LiveState(status=status, lives={"decode-0": one}) for one in said]


async def test_a_switch_of_batches_between_two_states_is_marked() -> None:
    live = feed_of(*batches(3, 4, 4))
    assert [(await live._next())["decode"][0]["switching"] for _ in range(3)] == [False, True, False]


async def test_batches_that_are_switched_while_nobody_looks_are_not_marked() -> None:
    live = feed_of(*batches(3, 9))
    await live._next()
    live.close()
    assert not (await live._next())["decode"][0]["switching"]


async def test_events_outlive_the_supervisor_that_told_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_feed, "MOST_EVENTS", 3)
    told = [[(1.0, "a"), (2.0, "b")], [], [(2.0, "b"), (3.0, "c"), (4.0, "d")]]
    events = [[sv.ClusterEvent(unix_s=at_s, level="info", text=text) for at_s, text in one] for one in told]
    live, shown = feed_of(*(sv.LiveState(events=one) for one in events)), []
    for _ in told:
        live._state = await live._next()
        shown.append([one["text"] for one in live._state["events"]])
    assert shown == [["a", "b"], ["a", "b"], ["b", "c", "d"]]


async def test_rates_begin_when_a_new_supervisor_has_heard_of_gateways() -> None:
    page = 'alignedserve_gateway_requests_total{{instance="gateway-0",outcome="stop"}} {}\n'
    pages = ("", page.format(5.0), page.format(7.0))
    live = feed_of(*(sv.LiveState(status=sv.ClusterStatus(metrics=one)) for one in pages))
    first, second, third = [(await live._next())["rates"]["requests_per_s"] for _ in pages]
    assert (first, second) == (None, None)
    assert third > 0


async def test_no_state_waits_for_a_gateway_that_hangs(
    gateway: RunningGateway, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, given_up = list[Any](), asyncio.Event()

    async def requests(*question: Any, **more: Any) -> list[Any]:
        asked.append(question)
        if len(asked) > 1:
            try:
                await asyncio.Event().wait()
            finally:
                given_up.set()
        return [{"id": "slow"}]

    monkeypatch.setattr(endpoints, "SLOWEST_EVERY_S", 0.0)
    monkeypatch.setattr(gateway.server.live_service, "requests", requests)
    async with asyncio.timeout(10.0):
        assert [state["slowest"] for state in await states(http, 3)] == [[{"id": "slow"}]] * 3
        await given_up.wait()
    assert len(asked) == 2


async def test_a_feed_without_a_supervisor_says_so(cluster: FakeCluster, http: httpx.AsyncClient) -> None:
    cluster.no_live = True
    (state,) = await states(http, 1)
    assert "supervisor" in state["stale"]
    lines = render(state)
    assert any(line.startswith("open -  queued -  prefilling -") for line in lines)
    assert "what waits in the pool is not known" in [line.rstrip() for line in lines]


def test_top_shows_what_is_unknown_as_such() -> None:
    keys = [pb.ProcessKey(role=role, id=f"{role}-0") for role in ("decode", "prefill", "kv_pool")]
    status = sv.ClusterStatus(peers=[sv.Peer(process=key, state="starting") for key in keys])
    now = Samples("", 0.0)
    state = {"model": "tiny", "slowest": [], **live_state(sv.LiveState(status=status), Change(now, now))}
    rows = {line.split()[0]: line.split() for line in render(state) if "starting" in line}
    assert rows["decode-0"] == ["decode-0", "starting", "-", "-", "-", "-/-"]
    assert rows["prefill-0"] == ["prefill-0", "starting", "-", "tokens", "-"]
    assert rows["kv_pool-0"] == ["kv_pool-0", "starting", *"-----"]


async def test_a_request_is_explained_while_it_runs_and_afterwards(
    cluster: FakeCluster, http: httpx.AsyncClient
) -> None:
    going = asyncio.Event()

    async def slowly(fake: FakeCluster, spec: Any) -> None:
        await going.wait()
        await counting_script(fake, spec)

    cluster.script = slowly
    asking = asyncio.ensure_future(http.post("/v1/completions", json=BODY, headers={"x-request-id": "mine"}))
    while not cluster.submitted:  # noqa: ASYNC110  # there is no event for this
        await asyncio.sleep(0.01)
    for order in ("newest", "slowest"):
        (listed,) = (await http.get(f"/dashboard/requests?sort={order}")).json()["requests"]
        assert (listed["outcome"], listed["request_id"]) == ("open", cluster.submitted[0].key.request_id)
    cluster.told = {cluster.submitted[0].key.request_id: "waiting"}
    call_id = cluster.submitted[0].key.request_id.rpartition("-")[0]
    found = (await http.get(f"/dashboard/requests/{call_id}")).json()
    assert found["open"]
    assert [bar["stage"] for bar in found["timeline"]] == ["queue", "prefill", "pool"]
    assert found["outcome"] == "open"
    assert (await http.get("/dashboard/requests/mine")).json()["request_id"] == found["request_id"]
    going.set()
    answer = (await asking).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    found = (await http.get(f"/dashboard/requests/{call_id}")).json()
    assert not found["open"]
    assert (found["outcome"], found["input_tokens"], found["output_tokens"]) == ("length", 3, 3)
    assert found["explanation"][0].startswith("It took ")
    assert found["others"] == []
    assert (await http.get("/dashboard/requests/mine")).json()["request_id"] == found["request_id"]
    assert described(found)[0].endswith("3 + 3 tokens")
    listed = (await http.get("/dashboard/requests?sort=newest&most=1")).json()["requests"]
    assert [one["request_id"] for one in listed] == [found["request_id"]]
    assert (await http.get("/dashboard/requests/nobody")).status_code == 404
    assert (await http.get("/dashboard/requests?id=unknown")).json() == {"requests": []}
    assert (await http.get("/dashboard/requests?id=mine")).json()["requests"][0]["id"] == found["id"]
    assert (await http.get("/dashboard/requests?sort=odd")).status_code == 400


async def test_a_request_that_ended_in_the_queue_says_how_long_it_waited(
    cluster: FakeCluster, http: httpx.AsyncClient
) -> None:
    cluster.script = silent_script
    sent = await http.post("/v1/completions", json={**BODY, "timeout_s": 0.1}, headers={"x-request-id": "late"})
    assert sent.status_code == 408
    found = (await http.get("/dashboard/requests/late")).json()
    (bar,) = found["timeline"]
    assert (bar["stage"], bar["end_s"]) == ("until_first_token", found["took_s"])
    assert bar["end_s"] - bar["begin_s"] > 0.05
    assert any("in the queue or in prefill" in one for one in found["explanation"])


async def test_a_rejected_request_is_listed_with_its_reason(cluster: FakeCluster, http: httpx.AsyncClient) -> None:
    async def refuse(fake: FakeCluster, spec: Any) -> None:
        fake.reject(OverloadedError("full"), spec.key)

    cluster.script = refuse
    assert (await http.post("/v1/completions", json=BODY)).status_code == 429
    (found,) = (await http.get("/dashboard/requests")).json()["requests"]
    assert found["outcome"] == "overloaded"


async def test_a_call_that_is_refused_on_arrival_is_explained_until_it_is_accepted(cluster: FakeCluster) -> None:
    name = {"x-request-id": "again"}
    async with (
        running_gateway(cluster, max_queue=2) as gateway,
        running_gateway(cluster, gateway_id="gateway-1") as other,
        httpx.AsyncClient(base_url=gateway.url, timeout=10.0) as http,
    ):
        gateway.server.intake.tell(0, 30.0, limited=True)
        assert (await http.post("/v1/completions", json=BODY, headers=name)).status_code == 429
        found = (await http.get("/dashboard/requests/again")).json()
        assert found["explanation"] == ["Its gateway refused it when it arrived: the cluster is full."]
        assert (found["outcome"], found["open"], found["timeline"]) == ("overloaded", False, [])
        assert described(found)[0] == f"{found['request_id']}: not read"
        (listed,) = (await http.get("/dashboard/requests?sort=slowest")).json()["requests"]
        assert (await http.get(f"/dashboard/requests/{listed['id']}")).json()["x_request_id"] == "again"

        cluster.gateways = {"gateway-0": gateway.server.address, "gateway-1": other.server.address}
        cluster.publish_view()
        await cluster.wait_for(lambda: len(gateway.server.peers._channels) == 1)
        await http.post(f"{other.url}/v1/completions", json=BODY, headers=name)
        found = (await http.get("/dashboard/requests/again")).json()
        assert (found["outcome"], [one["refused"] for one in found["others"]]) == ("length", ["the cluster is full"])

        cluster.script = silent_script
        gateway.server.intake.forget()
        waiting = asyncio.ensure_future(http.post("/v1/completions", json=BODY))
        await cluster.wait_for(lambda: len(gateway.server.ledger) == 1)
        body = {**BODY, "n": 2, "temperature": 1.0}
        assert (await http.post("/v1/completions", json=body, headers={"x-request-id": "two"})).status_code == 429
        words = (await http.get("/dashboard/requests/two")).json()["explanation"]
        assert "this gateway holds 1 requests; its limit is 2" in words[0]
        waiting.cancel()


async def test_with_keys_the_page_asks_for_one_and_a_cookie_opens_the_rest(guarded: RunningGateway) -> None:
    async with httpx.AsyncClient(base_url=guarded.url, timeout=10.0) as browser:
        form = (await browser.get("/")).text
        assert "login-form" in form
        assert "tiny" not in form
        for path in ("/dashboard/feed", "/dashboard/requests", "/dashboard/requests/x"):
            assert (await browser.get(path)).status_code == 401
        refused = await browser.post("/dashboard/login", json={"api_key": "sk-unknown"})
        assert refused.status_code == 401
        assert "set-cookie" not in refused.headers
        for odd in ({}, {"api_key": 1}, []):
            assert (await browser.post("/dashboard/login", json=odd)).status_code == 400
        entered = await browser.post("/dashboard/login", json={"api_key": KEYS[0]})
        assert entered.status_code == 204
        assert "Secure" not in entered.headers["set-cookie"]
        attributes = entered.headers["set-cookie"]
        assert all(part in attributes for part in ("HttpOnly", "SameSite=Strict", "Path=/"))
        assert KEYS[0] not in attributes
        assert "login-form" not in (await browser.get("/")).text
        assert (await states(browser, 1))[0]["model"] == "tiny"
        assert (await browser.post("/v1/completions", json=BODY)).status_code == 200
        assert len((await browser.get("/dashboard/requests")).json()["requests"]) == 1
        mine = (await browser.get("/dashboard/requests")).json()["requests"][0]["id"]
        other = {"x-api-key": KEYS[1]}
        assert (await browser.get("/dashboard/requests", headers=other)).json()["requests"] == []
        assert (await browser.get(f"/dashboard/requests/{mine}", headers=other)).status_code == 404
        await browser.post("/dashboard/logout", json={})
        assert not browser.cookies
        assert (await browser.get("/dashboard/requests")).status_code == 401


async def test_behind_a_proxy_with_tls_the_cookie_is_sent_over_tls_only(guarded: RunningGateway) -> None:
    async with httpx.AsyncClient(base_url=guarded.url, timeout=10.0) as browser:
        proxied = {"x-forwarded-proto": "https"}
        entered = await browser.post("/dashboard/login", json={"api_key": KEYS[0]}, headers=proxied)
        assert entered.headers["set-cookie"].endswith("; Secure")


async def test_with_the_admin_key_the_requests_of_all_keys_are_shown(guarded: RunningGateway) -> None:
    mine, other = ({"x-api-key": key} for key in KEYS)
    async with httpx.AsyncClient(base_url=guarded.url, timeout=10.0) as client:
        answer = (await client.post("/v1/completions", json=BODY, headers=mine)).json()
        path = f"/dashboard/requests/{answer['id']}"
        assert (await client.get(path, headers=other)).status_code == 404
        operator = {**other, ADMIN_HEADER: guarded.server.admin_key}
        assert (await client.get(path, headers=operator)).json()["id"] == answer["id"]
        listed = (await client.get("/dashboard/requests", headers=operator)).json()["requests"]
        assert [one["id"] for one in listed] == [answer["id"]]
        assert (await client.get(path, headers={ADMIN_HEADER: guarded.server.admin_key})).status_code == 401
        for asked in (path, "/dashboard/requests"):
            assert (await client.get(asked, headers={**other, ADMIN_HEADER: "wrong"})).status_code == 403


async def test_a_feed_ends_with_its_key(
    guarded: RunningGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "SLOWEST_EVERY_S", 0.0)
    async with httpx.AsyncClient(base_url=guarded.url, timeout=10.0, headers={"x-api-key": KEYS[0]}) as client:
        async with client.stream("GET", "/dashboard/feed") as answer:
            lines = answer.aiter_lines()
            assert (await anext(lines)) == "event: state"
            (tmp_path / "keys").write_text(KEYS[1])
            async with asyncio.timeout(8.0):
                async for _ in lines:
                    pass
        assert (await client.get("/dashboard/feed")).status_code == 401


async def test_no_key_keeps_others_from_looking(guarded: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "MOST_OF_ONE_KEY", 2)
    mine, other = ({"x-api-key": key} for key in KEYS)
    async with httpx.AsyncClient(base_url=guarded.url, timeout=10.0) as client, contextlib.AsyncExitStack() as looking:
        for _ in range(2):
            answer = await looking.enter_async_context(client.stream("GET", "/dashboard/feed", headers=mine))
            assert answer.status_code == 200
        assert (await client.get("/dashboard/feed", headers=mine)).status_code == 429
        assert (await states(client, 1, **other))[0]["model"] == "tiny"


async def test_top_goes_on_when_its_gateway_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is cut off in the middle of a chunk."""

    async def cut_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nf\r\ndata: {}\n\nevent\r\n99\r\nda")
        writer.close()

    server = await asyncio.start_server(cut_off, "127.0.0.1", 0)
    async with server:
        fed = await asyncio.to_thread(feed, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        assert await asyncio.to_thread(next, fed) == {}
        with pytest.raises(UnavailableError, match="does not answer any more"):
            await asyncio.to_thread(list, fed)
        url, told = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", list[str]()
        monkeypatch.setattr(top_command, "AGAIN_S", 0.0)
        endless = lasting(url, "", iter(()), told.append)  # as with --json, too
        assert [await asyncio.to_thread(next, endless) for _ in range(3)] == [{}, {}, {}]
        assert len(told) == 2
        assert all("trying again" in text for text in told)


async def test_top_tells_once_why_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = b'HTTP/1.1 429 Too Many\r\nconnection: close\r\n\r\n{"error": {"message": "too many look"}}'
    answers = iter((refused, refused, b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\ndata: {}\n\n"))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(next(answers))
        writer.close()

    monkeypatch.setattr(top_command, "AGAIN_S", 0.0)
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url, told = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", list[str]()
        endless = lasting(url, "", iter(()), told.append)
        assert await asyncio.to_thread(next, endless) == {}
    assert told == [f"{url} answered with HTTP 429: too many look; trying again"]


async def test_two_gateways_show_each_others_requests(cluster: FakeCluster, gateway: RunningGateway) -> None:
    async with (
        running_gateway(cluster, gateway_id="gateway-1") as other,
        httpx.AsyncClient(timeout=10.0) as client,
    ):
        cluster.gateways = {"gateway-0": gateway.server.address, "gateway-1": other.server.address}
        cluster.publish_view()
        await cluster.wait_for(lambda: len(gateway.server.peers._channels) == 1)
        answer = (await client.post(f"{other.url}/v1/completions", json=BODY)).json()
        found = (await client.get(f"{gateway.url}/dashboard/requests/{answer['id']}")).json()
        assert found["id"] == answer["id"]
        assert len((await client.get(f"{gateway.url}/dashboard/requests")).json()["requests"]) == 1


async def test_explain_tells_an_unknown_request_from_a_page_that_is_off(
    cluster: FakeCluster, gateway: RunningGateway, http: httpx.AsyncClient, capsys: pytest.CaptureFixture[str]
) -> None:
    async def explained(name: str, url: str) -> tuple[int, str]:
        code = await asyncio.to_thread(main, ["explain", name, "--url", url])
        said = capsys.readouterr()
        return code, said.out + said.err

    await http.post("/v1/completions", json=BODY, headers={"x-request-id": "mine"})
    code, said = await explained("mine", gateway.url)
    assert (code, "ended with length" in said) == (0, True)
    for name in ("unknown", ""):
        code, said = await explained(name, gateway.url)
        assert (code != 0, "is not open, and not among" in said) == (True, True)
    async with running_gateway(cluster, gateway_id="gateway-1", dashboard=False) as other:
        code, said = await explained("mine", other.url)
    assert (code != 0, "has no live page (gateway.dashboard)" in said) == (True, True)


async def test_without_the_page_there_is_nothing(cluster: FakeCluster) -> None:
    async with running_gateway(cluster, dashboard=False) as gateway, httpx.AsyncClient() as client:
        for path in ("/", "/dashboard", "/dashboard/feed", "/dashboard/requests"):
            assert (await client.get(gateway.url + path)).status_code == 404
