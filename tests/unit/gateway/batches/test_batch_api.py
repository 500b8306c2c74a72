"""/v1/files and /v1/batches of a gateway: OpenAI's client, owners, limits, errors of lines, overload and losses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from alignedserve.control.samples import value
from alignedserve.errors import AlignedServeError, OverloadedError, UnavailableError
from alignedserve.gateway.batches import files as files_module
from alignedserve.gateway.batches import gate as gate_module
from alignedserve.gateway.batches import lines as lines_module
from alignedserve.gateway.batches import service as service_module
from alignedserve.gateway.batches.database import StoreError
from alignedserve.request import RequestSpec
from support.fake_cluster import FakeCluster, counting_script, silent_script
from support.gateway import RunningGateway, running_gateway

ENDPOINT = "/v1/completions"
BODY = {"prompt": [5, 6, 7], "max_tokens": 3}
WITHIN_S = 20.0
BOUNDARY = "b0undary"


def rows(bodies: Iterable[dict[str, Any]], url: str = ENDPOINT) -> bytes:
    return b"".join(
        json.dumps({"custom_id": f"line-{number}", "method": "POST", "url": url, "body": body}).encode() + b"\n"
        for number, body in enumerate(bodies)
    )


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "POLL_S", 0.05)
    monkeypatch.setattr(gate_module, "LEAST_PAUSE_S", 0.01)
    monkeypatch.setattr(lines_module, "FIRST_PAUSE_S", 0.01)


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with FakeCluster() as cluster:
        yield cluster


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "batches"


@pytest.fixture
async def gateway(cluster: FakeCluster, folder: Path) -> AsyncIterator[RunningGateway]:
    async with running_gateway(cluster, batches={"folder": str(folder), "lease_s": 2.0}) as gateway:
        yield gateway
        if gateway.server.batches.config.folder:
            await gateway.server.batches.call(gateway.server.batches.batches.check_integrity)


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def begin(client: openai.AsyncOpenAI, content: bytes, endpoint: str = ENDPOINT) -> Any:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")  # type: ignore[arg-type]


async def ended(client: openai.AsyncOpenAI, batch: Any) -> Any:
    async with asyncio.timeout(WITHIN_S):
        while batch.status not in ("completed", "failed", "cancelled", "expired"):
            await asyncio.sleep(0.02)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def content(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    """The rows of a file, by custom_id."""
    assert file_id is not None
    found = [json.loads(row) for row in (await client.files.content(file_id)).read().splitlines()]
    assert len({row["custom_id"] for row in found}) == len(found)
    return {row["custom_id"]: row for row in found}


async def until(condition: Any) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():  # noqa: ASYNC110  # there is no event for any of them
            await asyncio.sleep(0.01)


async def test_a_batch_is_answered_and_its_files_are_read_and_deleted(
    client: openai.AsyncOpenAI, gateway: RunningGateway, folder: Path
) -> None:
    bodies = [BODY, {**BODY, "temperature": 9}, {**BODY, "n": 2}, {**BODY, "stream": True}, {**BODY, "model": "tiny"}]
    batch = await begin(client, rows(bodies))
    assert batch.status == "validating"
    batch = await ended(client, batch)

    assert batch.status == "completed"
    assert batch.request_counts.model_dump() == {"total": 5, "completed": 3, "failed": 2}
    answers, errors = await content(client, batch.output_file_id), await content(client, batch.error_file_id)
    assert answers.keys() == {"line-0", "line-2", "line-4"}
    response = answers["line-2"]["response"]
    assert (response["status_code"], answers["line-2"]["error"]) == (200, None)
    assert response["body"]["object"] == "text_completion"
    assert response["request_id"] == response["body"]["id"]
    assert [choice["finish_reason"] for choice in response["body"]["choices"]] == ["length"] * 2
    assert {row["response"]["status_code"] for row in errors.values()} == {400}
    assert errors["line-1"]["response"]["body"]["error"]["param"] == "temperature"
    assert errors["line-3"]["response"]["body"]["error"]["code"] == "unsupported_parameter"

    files = [file async for file in client.files.list(purpose="batch_output")]
    assert {file.id for file in files} == {batch.output_file_id, batch.error_file_id}
    for file in [file async for file in client.files.list()]:
        assert (await client.files.delete(file.id)).deleted
    assert [file async for file in client.files.list()] == []
    with pytest.raises(openai.NotFoundError):
        await client.files.content(batch.output_file_id)
    assert not list((folder / "files").iterdir())
    page = await gateway.server.metrics_text()
    assert value(page, "alignedserve_gateway_batch_lines_total", outcome="answered") == 3
    assert value(page, "alignedserve_gateway_batch_lines_total", outcome="failed") == 2
    assert value(page, "alignedserve_gateway_batches_total", status="completed") == 1
    assert value(page, "alignedserve_gateway_ttft_seconds_count") == 0  # lines of batches are not counted


async def test_chat_lines_are_answered(client: openai.AsyncOpenAI) -> None:
    url = "/v1/chat/completions"
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    batch = await ended(client, await begin(client, rows([body] * 3, url), url))
    answers = await content(client, batch.output_file_id)
    assert {row["response"]["body"]["object"] for row in answers.values()} == {"chat.completion"}
    assert len(answers) == 3


async def test_an_invalid_file_fails_its_batch(client: openai.AsyncOpenAI, cluster: FakeCluster) -> None:
    batch = await ended(client, await begin(client, rows([BODY]) + rows([BODY])))
    assert batch.status == "failed"
    assert [(error.code, error.line) for error in batch.errors.data] == [("duplicate_custom_id", 2)]
    assert (batch.output_file_id, batch.error_file_id) == (None, None)
    assert cluster.submitted == []


async def test_the_list_of_batches_has_pages(client: openai.AsyncOpenAI) -> None:
    made = [(await ended(client, await begin(client, rows([BODY])))).id for _ in range(3)]
    page = await client.batches.list(limit=2)
    assert [batch.id for batch in page.data] == made[:0:-1]
    assert page.has_more
    assert [batch.id async for batch in client.batches.list(limit=1)] == made[::-1]


async def test_a_cancelled_batch_says_which_lines_have_no_answer(
    client: openai.AsyncOpenAI, cluster: FakeCluster, gateway: RunningGateway
) -> None:
    async def script(cluster: FakeCluster, spec: RequestSpec) -> None:
        await (counting_script if len(cluster.submitted) <= 2 else silent_script)(cluster, spec)

    cluster.script = script
    batch = await begin(client, rows([BODY] * 40))
    while batch.request_counts is None or batch.request_counts.completed < 2:
        await asyncio.sleep(0.02)
        batch = await client.batches.retrieve(batch.id)
    assert (await client.batches.cancel(batch.id)).status == "cancelling"
    batch = await ended(client, batch)
    assert batch.status == "cancelled"
    answers, errors = await content(client, batch.output_file_id), await content(client, batch.error_file_id)
    assert (len(answers), len(errors)) == (2, 38)
    assert {row["error"]["code"] for row in errors.values()} == {"batch_cancelled"}
    assert answers.keys().isdisjoint(errors)
    assert len(gateway.server.ledger) == 0
    await until(lambda: not cluster.held)
    with pytest.raises(openai.NotFoundError):
        await client.batches.cancel("batch_none")


async def test_overload_and_missing_processes_are_waited_for(client: openai.AsyncOpenAI, cluster: FakeCluster) -> None:
    """Only what the server fails at again and again becomes an error."""
    seen = dict.fromkeys(range(8), 0)

    async def script(cluster: FakeCluster, spec: RequestSpec) -> None:
        number = spec.prompt_token_ids[0]
        seen[number] += 1
        if number == 7:
            cluster.emit(spec, error=AlignedServeError("the server's own fault"))
        elif seen[number] < 4:
            overload = OverloadedError("not now", retry_after_s=0.01)
            cluster.reject((overload, UnavailableError("not now"))[seen[number] % 2], spec.key)
        else:
            await counting_script(cluster, spec)

    cluster.script = script
    batch = await ended(client, await begin(client, rows([{**BODY, "prompt": [number, 9]} for number in range(8)])))
    assert batch.request_counts.model_dump() == {"total": 8, "completed": 7, "failed": 1}
    errors = await content(client, batch.error_file_id)
    assert errors["line-7"]["response"]["status_code"] == 500
    assert (seen[7], seen[0]) == (lines_module.MOST_TRIES, 4)


async def test_lines_wait_while_an_interactive_call_waits_for_its_first_token(
    client: openai.AsyncOpenAI, cluster: FakeCluster, gateway: RunningGateway
) -> None:
    waiting: list[RequestSpec] = []

    async def script(cluster: FakeCluster, spec: RequestSpec) -> None:
        if spec.prompt_token_ids == [1]:
            waiting.append(spec)
        else:
            await counting_script(cluster, spec)

    cluster.script = script
    call = asyncio.create_task(client.completions.create(model="tiny", prompt=[1], max_tokens=2))
    await until(lambda: waiting)
    batch = await begin(client, rows([BODY] * 30))
    most = 0

    def look() -> bool:
        nonlocal most
        most = max(most, gateway.server.batches._gate.lines)
        return len(cluster.submitted) > 10

    await until(look)
    assert most == 1  # a batch never stands still
    await counting_script(cluster, waiting[0])
    await call
    assert (await ended(client, batch)).request_counts.completed == 30


async def test_another_gateway_goes_on_with_what_a_dead_one_ran(
    client: openai.AsyncOpenAI, cluster: FakeCluster, gateway: RunningGateway, folder: Path
) -> None:
    async def some(cluster: FakeCluster, spec: RequestSpec) -> None:
        await (counting_script if len(cluster.submitted) <= 5 else silent_script)(cluster, spec)

    cluster.script = some
    batch = await begin(client, rows([BODY] * 25))
    while (batch.request_counts.completed if batch.request_counts else 0) < 5:
        await asyncio.sleep(0.02)
        batch = await client.batches.retrieve(batch.id)
    service = gateway.server.batches
    assert service._task is not None
    service._task.cancel()  # it renews no lease any more, as after a hang
    cluster.script = counting_script
    keys = {"folder": str(folder), "lease_s": 2.0}
    async with running_gateway(cluster, gateway_id="gateway-1", batches=keys) as second:
        client_2 = client.with_options(base_url=f"{second.url}/v1")
        batch = await ended(client_2, batch)
        assert batch.request_counts.model_dump() == {"total": 25, "completed": 25, "failed": 0}
        assert len(await content(client_2, batch.output_file_id)) == 25
    for runner in service._runners.values():
        runner.lose()
    await until(lambda: not service._runners)


async def test_lines_of_batches_are_no_open_requests(
    client: openai.AsyncOpenAI, cluster: FakeCluster, gateway: RunningGateway
) -> None:
    """`wait-idle` does not wait for lines: another gateway goes on with them."""
    cluster.script = silent_script
    await begin(client, rows([BODY] * 5))
    await until(lambda: cluster.submitted)
    call = asyncio.create_task(client.completions.create(model="tiny", prompt=[1], max_tokens=2, n=2))
    await until(lambda: gateway.server.ledger.interactive)
    assert len(gateway.server.ledger) > 2
    assert value(gateway.server._own_metrics(), "alignedserve_gateway_open_requests") == 2
    assert gateway.server.describe().gauges["open_requests"] == 2
    call.cancel()


async def test_a_download_whose_client_leaves_reads_no_more(
    gateway: RunningGateway, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "PART_BYTES", 1 << 16)
    file = await client.files.create(file=("in", b"x" * (32 << 20)), purpose="batch")
    read, reads = gateway.server.batches.files.read, list[int]()

    def counted(stored: Any, cursor: int) -> Any:
        reads.append(cursor)
        return read(stored, cursor)

    monkeypatch.setattr(gateway.server.batches.files, "read", counted)
    path = f"{gateway.url}/v1/files/{file.id}/content"
    async with httpx.AsyncClient() as http, http.stream("GET", path) as answer:
        await anext(answer.aiter_raw())
    seen = -1
    while seen != len(reads):
        seen = len(reads)
        await asyncio.sleep(0.2)
    assert seen < 500


async def test_parts_of_files_are_read(
    client: openai.AsyncOpenAI, gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "SKIPPED_ROWS", 2)
    monkeypatch.setattr(files_module, "PART_LINES", 2)
    batch = await ended(client, await begin(client, rows([BODY] * 7)))
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        for file_id in (batch.input_file_id, batch.output_file_id):
            path = f"/v1/files/{file_id}/content"
            whole = await http.get(path)
            text, size = whole.content, len(whole.content)
            assert (whole.status_code, whole.headers["accept-ranges"]) == (200, "bytes")
            row = text.index(b"\n") + 1
            ends = [(0, 0), (0, size - 1), (row - 1, row), (row, row + 3), (3 * row + 5, 6 * row), (size - 1, size - 1)]
            for begin_at, last in ends:
                answer = await http.get(path, headers={"range": f"bytes={begin_at}-{last}"})
                assert answer.status_code == 206
                assert answer.headers["content-range"] == f"bytes {begin_at}-{last}/{size}"
                assert answer.content == text[begin_at : last + 1], (begin_at, last)
            open_ends = {"5-": text[5:], f"3-{size * 2}": text[3:], "-4": text[-4:], f"-{2 * size}": text}
            for wanted, part in open_ends.items():
                answer = await http.get(path, headers={"range": f"bytes={wanted}"})
                assert (answer.status_code, answer.content) == (206, part), wanted
            for wanted in (f"bytes={size}-", "bytes=-0"):
                answer = await http.get(path, headers={"range": wanted})
                assert (answer.status_code, answer.headers["content-range"]) == (416, f"bytes */{size}")
                assert answer.json()["error"]["code"] == "range_not_satisfiable"
            for wanted in ("bytes=5-2", "bytes=0-1,3-4", "lines=1-2", "bytes=-", f"bytes={'9' * 5000}-"):
                answer = await http.get(path, headers={"range": wanted})
                assert (answer.status_code, answer.content) == (200, text), wanted


async def test_a_drain_gives_batches_away_at_once(
    client: openai.AsyncOpenAI, cluster: FakeCluster, gateway: RunningGateway
) -> None:
    cluster.script = silent_script
    await begin(client, rows([BODY] * 5))
    await until(lambda: cluster.submitted)
    gateway.server.drain(60.0)
    await until(lambda: gateway.server.state == "drained")
    rows_of = gateway.server.batches.batches._db.rows
    await until(lambda: [row["lease_s"] for row in rows_of("SELECT lease_s FROM batches")] == [0])  # not by its time


async def test_a_full_disk_holds_up_no_drain(
    client: openai.AsyncOpenAI, cluster: FakeCluster, gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = asyncio.Event()
    loop = asyncio.get_running_loop()

    def full(*given: Any) -> int:
        loop.call_soon_threadsafe(failed.set)
        raise StoreError("the disk is full")

    service = gateway.server.batches
    with monkeypatch.context() as patch:
        patch.setattr(service.batches, "record", full)
        batch = await begin(client, rows([BODY] * 5))
        await failed.wait()
        gateway.server.drain(60.0)
        await until(lambda: not service._runners)
    assert (await client.batches.retrieve(batch.id)).status == "in_progress"
    assert service._gate.lines == 0


async def test_a_gateway_that_has_ended_says_to_try_again(cluster: FakeCluster, folder: Path) -> None:
    async with (
        running_gateway(cluster, batches={"folder": str(folder)}) as gateway,
        httpx.AsyncClient(base_url=gateway.url) as http,
    ):
        await gateway.server.batches.close()
        answer = await http.get("/v1/batches")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")


async def test_without_a_folder_both_are_refused(cluster: FakeCluster) -> None:
    async with running_gateway(cluster) as gateway, httpx.AsyncClient(base_url=gateway.url) as http:
        for method, path in (("GET", "/v1/files"), ("POST", "/v1/batches"), ("GET", "/v1/batches/batch_1")):
            answer = await http.request(method, path, json={} if method == "POST" else None)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "batches_not_configured")


async def test_files_and_batches_belong_to_their_key(cluster: FakeCluster, folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.touch(0o600)
    keys.write_text("sk-alice\nsk-bob\n")
    async with running_gateway(cluster, batches={"folder": str(folder)}, api_key_file=str(keys)) as gateway:
        alice, bob = (
            openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=f"sk-{name}") for name in ("alice", "bob")
        )
        async with alice, bob:
            batch = await ended(alice, await begin(alice, rows([BODY])))
            for ask in (bob.batches.retrieve, bob.batches.cancel):
                with pytest.raises(openai.NotFoundError):
                    await ask(batch.id)
            for ask in (bob.files.retrieve, bob.files.content, bob.files.delete):
                with pytest.raises(openai.NotFoundError):
                    await ask(batch.output_file_id)
            with pytest.raises(openai.NotFoundError):
                await bob.batches.create(
                    input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
                )
            assert (await bob.files.list()).data == (await bob.batches.list()).data == []
            assert len((await alice.files.list()).data) == 2


# ---- uploads


def form(*parts: tuple[str, bytes], end: str = "--") -> bytes:
    found = b""
    for name, data in parts:
        filename = '; filename="in.jsonl"' if name == "file" else ""
        found += (
            f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{filename}\r\n\r\n'.encode() + data + b"\r\n"
        )
    return found + f"--{BOUNDARY}{end}\r\n".encode()


WRONG_FORMS = [
    (form(("purpose", b"batch")), "file"),
    (form(("file", b"x")), "purpose"),
    (form(("file", b"x"), ("purpose", b"fine-tune")), "purpose"),
    (form(("file", b"x"), ("file", b"x"), ("purpose", b"batch")), "file"),
    (form(("file", b"x"), ("purpose", b"batch"), end=""), None),
    (form(("purpose", b"p" * 5000), ("file", b"x")), None),
    (b"--other\r\n", None),
    (form(*[(f"f{number}", b"x") for number in range(40)]), None),
    (form(("file", b"x"), ("purpose", b"batch"), ("expires_after[anchor]", b"created_at")), "expires_after[seconds]"),
    (form(("file", b"x"), ("purpose", b"batch"), ("expires_after[seconds]", b"3600")), "expires_after[anchor]"),
]


@pytest.mark.parametrize("number", range(len(WRONG_FORMS)))
async def test_a_wrong_form_is_refused_and_leaves_nothing(number: int, gateway: RunningGateway, folder: Path) -> None:
    body, param = WRONG_FORMS[number]
    headers = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        answer = await http.post("/v1/files", content=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
        assert (await http.post("/v1/files", json={"purpose": "batch"})).status_code == 400
        assert (await http.get("/v1/files")).json()["data"] == []
    assert not list((folder / "files").iterdir())


async def test_a_form_is_read_however_it_is_cut(gateway: RunningGateway) -> None:
    text = b"one\r\n--b0und\r\ntwo\n"
    body = form(
        ("purpose", b"batch"),
        ("file", text),
        ("expires_after[anchor]", b"created_at"),
        ("expires_after[seconds]", b"3600"),
    )
    headers = {"content-type": f"multipart/form-data; boundary={BOUNDARY}", "content-length": str(len(body))}

    async def byte_by_byte() -> AsyncIterator[bytes]:
        for number in range(len(body)):
            yield body[number : number + 1]

    async with httpx.AsyncClient(base_url=gateway.url) as http:
        answer = await http.post("/v1/files", content=byte_by_byte(), headers=headers)
        file = answer.json()
        assert (answer.status_code, file["bytes"], file["filename"]) == (200, len(text), "in.jsonl")
        assert file["expires_at"] == file["created_at"] + 3600
        assert (await http.get(f"/v1/files/{file['id']}/content")).content == text


async def test_uploads_have_a_limit_and_a_quota(cluster: FakeCluster, folder: Path) -> None:
    keys = {"folder": str(folder), "max_file_mib": 1.0, "quota_gib": 2.5 / 1024}
    big = b"x" * (1 << 20)
    async with (
        running_gateway(cluster, batches=keys, max_body_mib=0.25) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(openai.APIStatusError, match=r"batches\.max_file_mib") as refused:
            await client.files.create(file=("in", big + b"x"), purpose="batch")
        assert refused.value.status_code == 413
        for _ in range(2):
            await client.files.create(file=("in", big), purpose="batch")
        with pytest.raises(openai.APIStatusError, match=r"batches\.quota_gib"):
            await client.files.create(file=("in", big), purpose="batch")
    assert len(list((folder / "files").iterdir())) == 2


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input_file_id": None}, "input_file_id"),
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
        ({"unknown": 1}, "unknown"),
    ],
)
async def test_wrong_fields_of_a_batch_are_named(change: dict[str, Any], param: str, gateway: RunningGateway) -> None:
    body = {"input_file_id": "file-1", "endpoint": ENDPOINT, "completion_window": "24h", **change}
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        answer = await http.post("/v1/batches", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
        for query in ("limit=0", "limit=101", "limit=x", "after=batch_0"):
            assert (await http.get(f"/v1/batches?{query}")).status_code == (404 if "after" in query else 400)
        assert (await http.get("/v1/files?order=up")).json()["error"]["param"] == "order"
