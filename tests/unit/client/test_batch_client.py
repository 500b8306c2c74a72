"""Offline batches by the client: jobs over a real gateway, lost connections at any place, bounded memory, errors."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from alignedserve.client import (
    AlignedServeError,
    AsyncBatchClient,
    BatchClient,
    BatchJob,
    BatchResult,
    ConfigError,
    DeadlineError,
    InvalidRequestError,
    Message,
    NotFoundError,
    ToolCall,
    UnavailableError,
)
from alignedserve.client import job_steps as steps
from alignedserve.client.bodies import body_of, completion_of, error_of
from alignedserve.client.calls import CallPlanner
from alignedserve.client.job_steps import Answer, Ask, LostError
from alignedserve.client.jobs import Lines
from alignedserve.gateway import grpc_service
from alignedserve.gateway.batches import service as service_module
from alignedserve.gateway.body.requests import parse_chat, parse_completion
from alignedserve.request import FinishReason, RequestSpec, TokenLogprobs
from support.fake_cluster import FakeCluster, silent_script
from support.gateway import RunningGateway, running_gateway

IDS = [[5, 6, 7], [8, 9], {"prompt_token_ids": [4], "temperature": 9.0}, {"prompt": "Go", "request_id": "mine"}]


@pytest.fixture
async def gateway(
    cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[RunningGateway]:
    monkeypatch.setattr(service_module, "POLL_S", 0.02)
    monkeypatch.setattr(steps, "FIRST_POLL_S", 0.02)
    async with running_gateway(cluster, batches={"folder": str(tmp_path / "batches"), "lease_s": 2.0}) as gateway:
        yield gateway


class Sync:
    """The blocking client, called from the test's loop."""

    def __init__(self, url: str, **settings: Any) -> None:
        self.client = BatchClient(url, **settings)

    async def __call__(self, method: str, *args: Any, **options: Any) -> Any:
        call: Callable[[], Any] = lambda: getattr(self.client, method)(*args, **options)  # noqa: E731
        return await asyncio.to_thread(call)

    async def results(self, job: BatchJob | str, **options: Any) -> list[BatchResult]:
        return await asyncio.to_thread(lambda: list(self.client.results(job, **options)))


class Async:
    def __init__(self, url: str, **settings: Any) -> None:
        self.client = AsyncBatchClient(url, **settings)

    async def __call__(self, method: str, *args: Any, **options: Any) -> Any:
        return await getattr(self.client, method)(*args, **options)

    async def results(self, job: BatchJob | str, **options: Any) -> list[BatchResult]:
        return [result async for result in self.client.results(job, **options)]


@pytest.mark.parametrize("kind", [Sync, Async])
async def test_items_are_answered_and_results_are_typed(gateway: RunningGateway, kind: Any) -> None:
    client = kind(gateway.url)
    told: list[tuple[int, int | None]] = []
    job = await client("create", iter(IDS), max_tokens=3, metadata={"mine": "1"})
    assert (job.endpoint, job.metadata["mine"], job.ended) == ("/v1/completions", "1", False)
    job = await client("wait", job, progress=lambda done, total: told.append((done, total)), timeout_s=20)
    assert (job.status, job.total, job.completed, job.failed) == ("completed", 4, 3, 1)
    assert told[-1] == (4, 4)
    results = await client.results(job)
    assert [result.custom_id for result in results] == ["0", "1", "mine", "2"], "errors come last"
    first, *_, wrong = results
    assert first.completion.usage.completion_tokens == 3
    assert (first.completion.choices[0].finish_reason, first.error) == ("length", None)
    assert first.completion.text
    assert isinstance(wrong.error, InvalidRequestError)
    assert (wrong.error.param, wrong.completion) == ("temperature", None)
    assert [found.id for found in await client("jobs")] == [job.id]
    await client("delete_files", job)
    await client("delete_files", job)
    with pytest.raises(NotFoundError):
        await client.results(job.id)


@dataclass
class City:
    name: str


@pytest.mark.parametrize("kind", [Sync, Async])
async def test_conversations_are_cancelled_and_waits_end(
    cluster: FakeCluster, gateway: RunningGateway, kind: Any
) -> None:
    cluster.script = silent_script
    client = kind(gateway.url)
    job = await client("create", [[Message("user", "hi")], {"messages": [{"role": "user", "content": "a"}]}])
    assert job.endpoint == "/v1/chat/completions"
    with pytest.raises(DeadlineError, match="it goes on"):
        await client("wait", job, timeout_s=0.1)
    with pytest.raises(InvalidRequestError, match="wait for its end"):
        await client.results(job)
    await client("cancel", job)
    job = await client("wait", job.id)
    assert job.status == "cancelled"
    assert (await client("cancel", job)).status == "cancelled"
    codes = [result.error and result.error.code for result in await client.results(job)]
    assert codes == ["batch_cancelled"] * 2


async def test_async_iterables_and_files_are_taken(gateway: RunningGateway, tmp_path: Path) -> None:
    async def prompts() -> AsyncIterator[str]:
        yield "Go"
        yield "on"

    path = tmp_path / "in.jsonl"
    body = {"prompt": "Go", "max_tokens": 2}
    path.write_text(json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}))
    async with AsyncBatchClient(gateway.url) as client:
        jobs = [await client.create(prompts(), max_tokens=2), await client.create_from_file(path)]
        ended = [await client.wait(job) for job in jobs]
        assert [job.completed for job in ended] == [2, 1]
        bad = tmp_path / "bad.jsonl"
        bad.write_text('{"custom_id": "a", "url": "/v1/completions"}\n')
        failed = await client.wait(await client.create_from_file(bad))
        assert failed.status == "failed"
        assert failed.problems[0].line == 1
        assert [result async for result in client.results(failed)] == []


async def test_lines_for_responses_have_results(gateway: RunningGateway, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    line = {"custom_id": "a", "method": "POST", "url": "/v1/responses"}
    path.write_text(json.dumps({**line, "body": {"input": "Go", "max_output_tokens": 2}}))
    async with AsyncBatchClient(gateway.url) as client:
        job = await client.wait(await client.create_from_file(path))
        (result,) = [result async for result in client.results(job)]
    assert result.completion is not None
    assert result.body is not None
    assert result.completion.text == result.body["output"][0]["content"][0]["text"]
    assert result.completion.choices[0].finish_reason == "length"
    assert result.completion.usage.completion_tokens == 2


def test_calls_and_reasoning_of_a_response_are_read() -> None:
    body = {
        "id": "resp_1", "object": "response", "model": "tiny", "status": "completed",
        "usage": {"input_tokens": 3, "output_tokens": 9, "output_tokens_details": {"reasoning_tokens": 4}},
        "output": [
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm"}]},
            {"type": "message", "content": [{"type": "output_text", "text": '{"name": "Bern"}'}]},
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        ],
    }  # fmt: skip
    read: Callable[[str], City] = lambda text: City(**json.loads(text))  # noqa: E731
    found = completion_of(body, read)
    assert (found.reasoning, found.text, found.usage.reasoning_tokens) == ("Hm", '{"name": "Bern"}', 4)
    assert (found.tool_calls[0].name, found.choices[0].finish_reason) == ("look", "tool_calls")
    summary: list[dict[str, Any]] = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So"}]},
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** Begin"},
        {"type": "item_of_later", "content": 5},
    ]
    found = completion_of({**body, "output": summary}, None)
    assert (found.reasoning, found.tool_calls[0].arguments) == ("So", "*** Begin")
    without_call = {**body, "output": body["output"][:2]}  # type: ignore[index]
    assert completion_of(without_call, read).parsed == City("Bern")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_log_probabilities_are_read(gateway: RunningGateway, cluster: FakeCluster, path: str) -> None:
    async def scored(cluster: FakeCluster, spec: RequestSpec) -> None:
        logprobs = [TokenLogprobs(-0.5, ((301, -0.5), (302, -1.5)))] * 2
        cluster.emit(spec, [301, 302], finish=FinishReason.LENGTH, logprobs=logprobs)

    cluster.script = scored
    chat = "chat" in path
    asked = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
    scores: dict[str, Any] = {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
    for more, ids in ({}, (-1, -1)), ({"return_tokens_as_token_ids": True}, (301, 302)):
        body = {**asked, **scores, **more, "max_tokens": 2}
        async with httpx.AsyncClient(base_url=gateway.url) as http:
            (choice,) = completion_of((await http.post(path, json=body)).json(), None).choices
        assert tuple(one.token_id for one in choice.logprobs) == ids
        assert [one.logprob for one in choice.logprobs] == [-0.5, -0.5]
        assert [[top.logprob for top in one.top] for one in choice.logprobs] == [[-0.5, -1.5]] * 2


async def test_what_a_server_refuses_is_typed(gateway: RunningGateway, cluster: FakeCluster) -> None:
    async with AsyncBatchClient(gateway.url) as client:
        with pytest.raises(NotFoundError) as missing:
            await client.get("batch_x")
        with pytest.raises(InvalidRequestError) as wrong:
            await client.create(["a"], keep_s=5)
    assert missing.value.details["http_status"] == 404
    assert (wrong.value.param or "").startswith("output_expires_after")
    async with running_gateway(cluster, gateway_id="gateway-1") as other, AsyncBatchClient(other.url) as client:
        with pytest.raises(NotFoundError) as off:
            await client.create(["a"])
    assert off.value.code == "batches_not_configured"


@pytest.mark.parametrize(
    ("items", "why"),
    [
        (["a", [Message("user", "b")]], "item 1: a batch is of prompts"),
        ([{"prompt": "a", "temprature": 1}], "item 0: unknown option"),
        ([{}], "item 0"),
        (3, "iterable"),
    ],
)
def test_wrong_items_are_named_before_anything_is_sent(items: Any, why: str) -> None:
    with BatchClient("http://127.0.0.1:9", patience_s=0) as client, pytest.raises(InvalidRequestError, match=why):
        client.create(items)


@pytest.mark.parametrize("settings", [{"url": "127.0.0.1:8000"}, {"timeout_s": 0}, {"patience_s": -1}], ids=str)
def test_a_client_that_cannot_be_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        BatchClient(**settings)


def test_a_server_that_is_not_there_is_said_so() -> None:
    with BatchClient("http://127.0.0.1:9", patience_s=0.05) as client, pytest.raises(UnavailableError, match="reached"):
        client.jobs()


# ---- the same request as over gRPC

OPTIONS: list[dict[str, Any]] = [
    {"max_tokens": 3, "temperature": 0.5, "stop": "x", "logit_bias": {3: 1.5}, "seed": 4, "n": 2},
    {"logprobs": 2, "bad_words": "a", "bad_words_ids": [[1, 2]], "stop_token_ids": [4], "ignore_eos": True},
    {"response_format": City, "priority": 5, "min_p": 0.25},
    {"structured_outputs": {"choice": ["a", "b"]}},
    {"structured_outputs": {"regex": "a+"}},
    {"structured_outputs": {"json": {"type": "array"}, "whitespace_pattern": " *"}},
    {"prompt_logprobs": 1, "truncate_prompt_tokens": 5, "truncation_side": "right", "skip_special_tokens": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_line_asks_for_what_a_call_asks_for(options: Any) -> None:
    planner = CallPlanner()
    prompt, ids = planner.generate("Go", None, options).message, planner.generate(None, [1, 2], options).message
    chat = planner.chat([Message("user", "hi")], options).message
    for message in (prompt, ids):
        assert parse_completion(body_of(message)) == parse_completion(grpc_service.body_of(message))
    assert parse_chat(body_of(chat)) == parse_chat(grpc_service.body_of(chat))


def test_json_without_whitespace_is_asked_for() -> None:
    outputs = {"json": {"type": "array"}, "disable_any_whitespace": True}
    message = CallPlanner().generate("Go", None, {"structured_outputs": outputs}).message
    assert (message.grammar.HasField("whitespace"), message.grammar.whitespace) == (True, "")
    with pytest.raises(InvalidRequestError, match="disable_any_whitespace"):
        CallPlanner().generate("Go", None, {"structured_outputs": {**outputs, "whitespace_pattern": " "}})


def test_a_line_with_tools_asks_for_what_a_call_asks_for() -> None:
    def look(place: str) -> str:
        return place

    options: Any = {"tools": [look], "tool_choice": look, "reasoning_effort": "low", "max_tokens": 3}
    called = Message("assistant", tool_calls=(ToolCall("a", "look", "{}"),))
    turns = [Message("user", "hi"), called, Message("tool", "x", tool_call_id="a")]
    message = CallPlanner().chat(turns, options).message
    found = parse_chat(body_of(message))
    assert found == parse_chat(grpc_service.body_of(message))
    assert found.tool_use().forced


# ---- lost connections, without I/O


class Server:
    """Answers of a server that loses connections, as a generator gets them."""

    def __init__(self, *replies: Any) -> None:
        self.replies = list(replies)
        self.asked: list[str] = []

    def __call__(self, ask: Ask) -> Answer:
        self.asked.append(f"{ask.method} {ask.path}")
        if ask.method == "POST":
            self.last = ask
        reply = self.replies.pop(0)
        if callable(reply):
            reply = reply()
        if isinstance(reply, int):
            return Answer(reply, None, 0.0)
        if reply is None:
            raise LostError("gone")
        return Answer(200, reply)

    def run(self, asked: Any) -> Any:
        return steps.run(asked, self, lambda seconds: None)


JOB = {
    "id": "batch_1", "status": "completed", "endpoint": "/v1/completions", "created_at": 1, "expires_at": 2,
    "input_file_id": "file-1", "output_file_id": "file-2", "error_file_id": "file-3",
    "request_counts": {"total": 1, "completed": 1, "failed": 0}, "metadata": None, "errors": None,
}  # fmt: skip


def test_an_upload_whose_answer_was_lost_is_not_sent_twice(tmp_path: Path) -> None:
    server = Server(
        None,
        lambda: {"data": [{"id": "file-0", "filename": "other"}, {"id": "file-9", "filename": server.last.filename}]},
    )
    assert server.run(steps.upload(tmp_path / "x", 5.0)) == "file-9"
    assert server.asked == ["POST /v1/files", "GET /v1/files"]
    server = Server(503, None, None, {"data": []}, {"id": "file-3"})
    assert server.run(steps.upload(tmp_path / "x", 5.0)) == "file-3"
    assert server.asked == ["POST /v1/files"] * 2 + ["GET /v1/files"] * 2 + ["POST /v1/files"]


@pytest.mark.parametrize("lost", [None, 502, 504])  # a proxy's answers once its gateway had the request
def test_a_job_whose_answer_was_lost_is_not_made_twice(lost: int | None) -> None:
    server = Server(lost, lambda: {"data": [JOB, {**JOB, "id": "batch_9", "metadata": server.last.json["metadata"]}]})
    assert server.run(steps.create("file-1", "/v1/completions", {"a": "b"}, None, 5.0)).id == "batch_9"
    assert server.asked == ["POST /v1/batches", "GET /v1/batches"]


def test_a_file_without_a_job_is_deleted(tmp_path: Path) -> None:
    server = Server({"id": "file-1"}, 400, {"deleted": True})
    with pytest.raises(InvalidRequestError):
        server.run(steps.create_with(tmp_path / "x", "/v1/completions", None, None, 5.0))
    assert server.asked[-1] == "DELETE /v1/files/file-1"


def test_a_wait_goes_on_over_lost_connections_and_ends_when_patience_does() -> None:
    running = {**JOB, "status": "in_progress"}
    server = Server(running, None, 502, running, None, JOB)
    assert server.run(steps.wait("batch_1", False, None, 5.0)).status == "completed"
    with pytest.raises(UnavailableError):
        Server(running, None, None, None).run(steps.wait("batch_1", False, None, 0.0))


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (400, {"error": {"message": "no", "param": "a", "code": "invalid_value"}}, InvalidRequestError),
        (404, {"error": {"message": "no", "code": "batches_not_configured"}}, NotFoundError),
        (503, None, UnavailableError),
        (418, [], AlignedServeError),
    ],
)
def test_errors_of_http_are_typed(status: int, body: Any, kind: type[AlignedServeError]) -> None:
    error = error_of(status, body, 2.0)
    assert isinstance(error, kind)
    assert error.details["http_status"] == status
    assert error.retry_after_s == (2.0 if status == 503 else None)


# ---- reading results


def answer(number: int) -> bytes:
    body = {
        "id": f"cmpl-{number}", "model": "tiny", "object": "text_completion", "usage":
        {"prompt_tokens": 1, "completion_tokens": 2},
        "choices": [{"index": 0, "text": f'{{"name": "Zürich {number}"}}', "finish_reason": "stop"}],
    }  # fmt: skip
    row = {"custom_id": str(number), "response": {"status_code": 200, "body": body}, "error": None}
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


CONTENT = b"".join(map(answer, range(3)))


class Breaking(httpx.SyncByteStream):
    """From `begin` on; ends at byte `cut` as a connection that breaks does; with None it is whole."""

    def __init__(self, cut: int | None, begin: int = 0) -> None:
        self.cut = cut
        self.begin = begin

    def __iter__(self) -> Iterator[bytes]:
        content = CONTENT[self.begin : self.cut]
        for begin in range(0, len(content), 100):
            yield content[begin : begin + 100]
        if self.cut is not None:
            raise httpx.ReadError("gone")


@pytest.mark.parametrize("ranges", [True, False])
def test_results_go_on_after_any_byte(ranges: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_BACKOFF", steps.Backoff(0.0, 0.0))
    job = BatchJob.of({**JOB, "error_file_id": None})
    for cut in range(0, len(CONTENT), 37):
        cuts: list[Any] = [cut, min(cut + 150, len(CONTENT)), 503, None]

        def respond(request: httpx.Request, cuts: list[Any] = cuts) -> httpx.Response:
            found = cuts.pop(0)
            if found == 503:
                return httpx.Response(503)
            if ranges and (wanted := request.headers.get("range")):
                begin = int(wanted.removeprefix("bytes=").removesuffix("-"))
                assert begin > 0
                return httpx.Response(206, stream=Breaking(found, begin))
            return httpx.Response(200, stream=Breaking(found))

        with BatchClient("http://gateway") as client:
            client._http = httpx.Client(transport=httpx.MockTransport(respond), base_url="http://gateway")
            results = list(client.results(job, response_format=City))
        assert [result.completion and result.completion.parsed for result in results] == [
            City(f"Zürich {number}") for number in range(3)
        ]
        assert cuts == []


class Long(httpx.SyncByteStream):
    """Many long lines, each in parts."""

    LINES, BYTES = 300, 100_000

    def __iter__(self) -> Iterator[bytes]:
        line = answer(1).replace(b"Z", b"Z" * self.BYTES)
        for _ in range(self.LINES):
            for begin in range(0, len(line), 16_384):
                yield line[begin : begin + 16_384]


def test_memory_does_not_grow_with_the_lines(tmp_path: Path) -> None:
    def respond(request: httpx.Request) -> httpx.Response:
        if request.method == "POST" and request.url.path == "/v1/files":
            sizes.append(len(request.read()))
            return httpx.Response(200, json={"id": "file-1"})
        return httpx.Response(200, json=JOB) if request.method == "POST" else httpx.Response(200, stream=Long())

    sizes: list[int] = []
    with BatchClient("http://gateway") as client:
        client._http = httpx.Client(transport=httpx.MockTransport(respond), base_url="http://gateway")
        tracemalloc.start()
        try:
            results = client.results(BatchJob.of({**JOB, "error_file_id": None}))
            count = sum(result.completion is not None for result in results)
            lines = Lines(CallPlanner(), {"max_tokens": 4})
            with (tmp_path / "lines").open("wb") as file:
                file.writelines(map(lines.of, ("x" * Long.BYTES for _ in range(Long.LINES))))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert client.create_from_file(tmp_path / "lines").id == "batch_1"
    assert count == lines.count == Long.LINES
    assert sizes[0] > Long.LINES * Long.BYTES
    assert peak < 3 << 20


def test_a_refusal_for_load_is_tried_again_after_a_pause() -> None:
    slept: list[float] = []
    server = Server(503, JOB)
    assert steps.run(steps.get("batch_1", 5.0), server, slept.append).id == "batch_1"
    assert len(slept) == 1
    assert 0 < slept[0] <= 0.2
