"""`generate_many` and `chat_many`, sync and async: order, concurrency, progress, failures and early exit."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from alignedserve.client import (
    AlignedServeError,
    AsyncClient,
    BatchError,
    Client,
    Completion,
    ConfigError,
    InvalidRequestError,
    Message,
    OverloadedError,
    Request,
)
from alignedserve.proto import inference_pb2 as pb
from alignedserve.proto.inference_pb2_grpc import InferenceServicer
from support.breaking_inference import serve
from support.inference import ask_async, ask_sync

BOTH = pytest.mark.parametrize("ask", [ask_sync, ask_async], ids=["sync", "async"])

MANY = 2000


class Echo(InferenceServicer):
    """Answers each prompt in capitals, later prompts sooner. "bad" fails; "hold" waits until the client has gone."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.open = self.most_open = 0
        self.held, self.gone = threading.Semaphore(0), threading.Semaphore(0)
        self._lock = threading.Lock()

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> pb.GenerateResponse:
        with self._lock:
            self.requests.append(request)
            number = len(self.requests)
            self.open += 1
            self.most_open = max(self.most_open, self.open)
        prompt = request.prompt or " ".join(turn.content for turn in request.conversation.messages)
        prompt = prompt or str(list(request.prompt_token_ids.ids))
        if prompt == "hold":
            context.add_callback(self.gone.release)
            self.held.release()
            while context.is_active():
                time.sleep(0.01)
        time.sleep(0.02 / number)
        with self._lock:
            self.open -= 1
        if prompt == "bad":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this one is bad [code=invalid_value]")
        choice = pb.Choice(index=0, text=prompt.upper(), token_ids=[1, 2], finish_reason="stop")
        usage = pb.Usage(prompt_tokens=1, completion_tokens=2)
        return pb.GenerateResponse(request_id=request.request_id, model="tiny", choices=[choice], usage=usage)


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def address(echo: Echo) -> Iterator[str]:
    server, address = serve(echo)
    yield address
    server.stop(0).wait()


def texts(results: list[Any]) -> list[str]:
    return [result.text if isinstance(result, Completion) else type(result).__name__ for result in results]


@BOTH
def test_answers_are_in_the_order_of_the_prompts_and_so_many_at_once(ask: Any, echo: Echo, address: str) -> None:
    prompts = [f"p{number}" for number in range(30)]
    results = ask(address, {}, "generate_many", prompts, concurrency=4, max_tokens=7)
    assert texts(results) == [prompt.upper() for prompt in prompts]
    assert 2 <= echo.most_open <= 4
    assert {request.max_tokens for request in echo.requests} == {7}
    assert len({request.request_id for request in echo.requests}) == 30


@BOTH
def test_every_prompt_may_be_of_another_kind_with_options_of_its_own(ask: Any, echo: Echo, address: str) -> None:
    items = [
        "a",
        [5, 6],
        Request(prompt="b", max_tokens=3),
        {"messages": [Message("user", "hi")], "request_id": "mine"},
    ]
    assert texts(ask(address, {}, "generate_many", items, concurrency=1, max_tokens=9)) == ["A", "[5, 6]", "B", "HI"]
    assert [request.max_tokens for request in echo.requests] == [9, 9, 3, 9]
    assert echo.requests[3].request_id == "mine"


@BOTH
def test_conversations_are_answered_too(ask: Any, address: str) -> None:
    conversations = ([{"role": "user", "content": text}] for text in ("one", "two"))
    assert texts(ask(address, {}, "chat_many", conversations)) == ["ONE", "TWO"]
    mixed: list[Any] = [[Message("user", "three")], {"messages": [Message("user", "four")], "max_tokens": 2}]
    assert texts(ask(address, {}, "chat_many", mixed)) == ["THREE", "FOUR"]
    assert ask(address, {}, "chat_many", []) == []


@BOTH
def test_prompts_are_taken_when_there_is_room_for_them(ask: Any, echo: Echo, address: str) -> None:
    taken: list[int] = []
    ahead: list[int] = []

    def prompts() -> Iterator[str]:
        for number in range(20):
            taken.append(threading.get_ident())
            ahead.append(number - done[0])
            yield f"p{number}"

    done = [0]

    def report(so_far: int, total: int | None) -> None:
        assert total is None
        done[0] = so_far

    results = ask(address, {}, "generate_many", prompts(), concurrency=3, progress=report)
    assert len(results) == done[0] == 20
    assert max(ahead) < 3
    assert set(taken) == {threading.get_ident()}, "a caller's generator stays in the caller's thread"


async def test_prompts_may_be_asynchronous(address: str) -> None:
    async def prompts() -> AsyncIterator[str]:
        for text in ("a", "b", "c"):
            await asyncio.sleep(0)
            yield text

    async with AsyncClient(address) as client:
        assert texts(await client.generate_many(prompts(), concurrency=2)) == ["A", "B", "C"]


@BOTH
def test_errors_take_their_places_where_they_are_asked_for(ask: Any, address: str) -> None:
    items: list[Any] = ["a", "bad", {"prompt": "c", "messages": []}, {}, {"prompt": "d", "temprature": 1}, "e", 7]
    results = ask(address, {}, "generate_many", items, return_exceptions=True)
    wrong = ["InvalidRequestError"]
    assert texts(results) == ["A", *wrong * 4, "E", *wrong]
    assert results[1].request_id.startswith("req-")
    assert "temperature" in str(results[4])


@BOTH
def test_bytes_are_no_token_ids(ask: Any, echo: Echo, address: str, tmp_path: Path) -> None:
    (path := tmp_path / "prompts.txt").write_bytes(b"one\ntwo\n")
    with path.open("rb") as lines:
        results = ask(address, {}, "generate_many", lines, return_exceptions=True)
    assert texts(results) == ["InvalidRequestError"] * 2
    assert "bytes" in str(results[0])
    assert not echo.requests


@BOTH
def test_a_conversation_that_is_none_is_an_error_in_its_place(ask: Any, address: str) -> None:
    turns = [Message("user", "a")]
    items: list[Any] = [turns, None, {"messages": 3}, {"messages": float("nan")}, {"messages": turns, 7: "x"}, turns]
    results = ask(address, {}, "chat_many", items, return_exceptions=True)
    assert texts(results) == ["A", *["InvalidRequestError"] * 4, "A"]
    assert [result.param for result in results[1:5]] == [*["messages"] * 3, "7"]


@BOTH
def test_a_failure_ends_the_taking_and_loses_nothing(ask: Any, echo: Echo, address: str) -> None:
    taken: list[str] = []

    def prompts() -> Iterator[str]:
        for text in ("a", "bad", *("c" for _ in range(MANY))):
            taken.append(text)
            yield text

    with pytest.raises(BatchError, match="failed, the first with: this one is bad") as failed:
        ask(address, {}, "generate_many", prompts(), concurrency=2)
    assert texts(failed.value.results)[:2] == ["A", "InvalidRequestError"]
    assert len(failed.value.results) == len(echo.requests) == len(taken) < MANY
    assert [type(error) for error in failed.value.errors] == [InvalidRequestError]
    assert isinstance(failed.value.__cause__, InvalidRequestError)
    assert failed.value.code == "invalid_value"
    again = pickle.loads(pickle.dumps(failed.value))  # noqa: S301  # our own bytes
    assert texts(again.results) == texts(failed.value.results)


@BOTH
@pytest.mark.parametrize(
    ("prompts", "options", "param"),
    [
        ("one string", {}, "prompts"),
        ({"prompt": "one request"}, {}, "prompts"),
        (3, {}, "prompts"),
        (["a"], {"concurrency": 0}, "concurrency"),
        (["a"], {"request_id": "same"}, "request_id"),
    ],
)
def test_a_batch_that_cannot_be_is_refused_before_anything_is_sent(
    ask: Any, echo: Echo, address: str, prompts: Any, options: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        ask(address, {}, "generate_many", prompts, **options)
    assert refused.value.param == param
    assert not echo.requests


@BOTH
def test_an_error_in_the_prompts_cancels_what_is_open(ask: Any, echo: Echo, address: str) -> None:
    def prompts() -> Iterator[str]:
        yield from ("hold", "hold")
        assert echo.held.acquire(timeout=5) if ask is ask_sync else True
        raise LookupError("no more")

    with pytest.raises(LookupError):
        ask(address, {}, "generate_many", prompts(), concurrency=3)
    if ask is ask_sync:  # the async client may have ended before it sent anything
        assert echo.gone.acquire(timeout=5)


@pytest.mark.parametrize("running", [True, False])
async def test_a_request_that_another_caller_cancels_ends_the_batch(echo: Echo, address: str, running: bool) -> None:
    async with AsyncClient(address) as client:
        before = asyncio.all_tasks()
        batch = asyncio.create_task(client.generate_many(["hold"], concurrency=1))
        await asyncio.sleep(0)
        theirs = asyncio.all_tasks() - before - {batch}
        assert len(theirs) == 1
        if running:
            assert await asyncio.to_thread(echo.held.acquire, timeout=5)
        for task in theirs:
            task.cancel()
        await asyncio.wait([batch], timeout=5)
        assert batch.done()
        assert batch.cancelled()


async def test_cancelling_the_task_cancels_every_request(echo: Echo, address: str) -> None:
    async with AsyncClient(address) as client:
        task = asyncio.create_task(client.generate_many(["hold"] * 5, concurrency=3))
        for _ in range(3):
            assert await asyncio.to_thread(echo.held.acquire, timeout=5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(3):
            assert await asyncio.to_thread(echo.gone.acquire, timeout=5)
    assert len(echo.requests) == 3


@pytest.mark.parametrize("call", ["client.generate_many(['hold'] * 5, concurrency=3)", "client.generate('hold')"])
def test_ctrl_c_ends_everything_at_the_server(echo: Echo, address: str, call: str) -> None:
    # Restore SIGINT's handler: a background job ignores the signal.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += f"from alignedserve.client import Client\nwith Client({address!r}) as client:\n    {call}\n"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    requests = 3 if "many" in call else 1
    try:
        for _ in range(requests):
            assert echo.held.acquire(timeout=30)
        process.send_signal(signal.SIGINT)
        for _ in range(requests):
            assert echo.gone.acquire(timeout=10)
        assert "KeyboardInterrupt" in process.communicate(timeout=10)[1]
        assert len(echo.requests) == requests
    finally:
        process.kill()
        process.wait()


def test_a_progress_bar_counts_requests_and_tokens(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Client(address) as client:
        client.generate_many(["a", "bad", "c"], progress=True, return_exceptions=True)
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "tokens=4" in shown
    assert "failed=1" in shown


def test_without_tqdm_a_bar_is_refused_before_anything_is_sent(
    echo: Echo, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with Client(address) as client, pytest.raises(ConfigError, match="pip install tqdm"):
        client.generate_many(["a"], progress=True)
    assert not echo.requests


def test_a_batch_in_a_daemon_thread_does_not_keep_the_program_from_its_end(echo: Echo, address: str) -> None:
    program = (
        "import sys, threading; from alignedserve.client import Client\n"
        f"client = Client({address!r})\n"
        "threading.Thread(target=client.generate_many, args=(['hold'] * 2,), daemon=True).start()\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert echo.held.acquire(timeout=30)
            assert echo.held.acquire(timeout=30)
            _, said = process.communicate(timeout=15)
        finally:
            process.kill()
    assert (process.returncode, said) == (0, b"")


def test_threads_share_a_client_and_its_batches_do_not_mix(address: str) -> None:
    found: dict[int, list[str]] = {}
    with Client(address) as client:

        def run(number: int) -> None:
            found[number] = texts(client.generate_many([f"{number}-{item}" for item in range(10)], concurrency=3))

        threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert found == {number: [f"{number}-{item}" for item in range(10)] for number in range(4)}


def test_types_follow_from_return_exceptions(address: str) -> None:
    """mypy checks these lines, and they run."""
    with Client(address) as client:
        whole: list[Completion] = client.generate_many(["a"])
        either: list[Completion | AlignedServeError] = client.generate_many(["a", "bad"], return_exceptions=True)
    assert [answer.text for answer in whole] == ["A"]
    assert not [answer for answer in either if isinstance(answer, OverloadedError)]
