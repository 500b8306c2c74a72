"""How calls of `alignedserve.client` end: time limits, cancellation, lost servers, closed clients."""

from __future__ import annotations

import asyncio
import gc
import inspect
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from unittest import mock

import grpc
import pytest

from alignedserve.client import (
    AlignedServeError,
    AsyncClient,
    CancelledError,
    Client,
    DeadlineError,
    UnavailableError,
)
from alignedserve.client.calls import CallPlanner
from alignedserve.client.threads import Halt
from alignedserve.errors import ConfigError
from support.breaking_inference import BreakingInference, Fault, serve
from support.inference import ScriptedInference, ask_async, ask_sync, start_server

BOTH = pytest.mark.parametrize("ask", [ask_sync, ask_async], ids=["sync", "async"])


@pytest.fixture
def service() -> ScriptedInference:
    return ScriptedInference()


@pytest.fixture
def address(service: ScriptedInference) -> Iterator[str]:
    server, address = start_server(service)
    yield address
    server.stop(0).wait()


def run_async(address: str, behaviour: Callable[[AsyncClient], Awaitable[None]]) -> None:
    async def run() -> None:
        async with AsyncClient(address) as client:
            await behaviour(client)

    asyncio.run(run())


@BOTH
@pytest.mark.parametrize("method", ["generate", "stream"])
def test_a_time_limit_ends_the_request_on_both_sides(
    ask: Callable[..., Any], method: str, service: ScriptedInference, address: str
) -> None:
    began = time.monotonic()
    with pytest.raises(DeadlineError, match="1 s") as late:
        ask(address, {"timeout_s": 60}, method, "hold", timeout_s=1.0)
    assert late.value.details["status"] == "DEADLINE_EXCEEDED"
    assert 0.9 < time.monotonic() - began < 6
    assert service.released.wait(5)
    assert service.requests[0].timeout_s == pytest.approx(1.0)


@BOTH
@pytest.mark.parametrize(("method", "arguments"), [("models", ()), ("cancel", ("mine",))])
def test_calls_that_generate_nothing_have_time_limits_too(
    ask: Callable[..., Any], method: str, arguments: tuple[str, ...]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        with pytest.raises(DeadlineError, match=r"0\.3 s"):
            ask(f"127.0.0.1:{silent.getsockname()[1]}", {"timeout_s": 60}, method, *arguments, timeout_s=0.3)
    assert 0.25 < time.monotonic() - began < 5


@BOTH
def test_no_server_is_unavailable_at_once(ask: Callable[..., Any]) -> None:
    began = time.monotonic()
    with pytest.raises(UnavailableError) as caught:
        ask("127.0.0.1:1", {}, "models")
    assert caught.value.details["address"] == "127.0.0.1:1"
    assert time.monotonic() - began < 5


@BOTH
def test_a_proxy_in_the_environment_is_not_used_for_this_machine(
    ask: Callable[..., Any], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert ask(address, {}, "generate", "go").text == " a b"


def test_an_address_with_a_scheme_is_refused() -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            kind("http://127.0.0.1:8000")


def test_a_failure_in_the_middle_of_a_stream_follows_what_came_before(address: str) -> None:
    with Client(address, resume_s=0) as client:
        stream = client.stream("break", request_id="mine")
        assert next(stream).text == " a"
        with pytest.raises(AlignedServeError, match="the actor died") as caught:
            next(stream)
    assert caught.value.request_id == stream.request_id == "mine"


def test_leaving_a_stream_cancels_it_at_the_server(service: ScriptedInference, address: str) -> None:
    def break_out(client: Client) -> None:
        for _ in client.stream("hold"):
            break

    def leave_block(client: Client) -> None:
        with client.stream("hold") as stream:
            next(stream)

    with Client(address) as client:
        for leave in (break_out, leave_block):
            service.reset()
            leave(client)
            assert service.released.wait(5), leave


def test_leaving_an_async_stream_cancels_it_at_the_server(service: ScriptedInference, address: str) -> None:
    async def break_out(client: AsyncClient) -> None:
        async for _ in client.stream("hold"):
            break

    async def leave_block(client: AsyncClient) -> None:
        async with client.stream("hold") as stream:
            await anext(stream)

    async def behaviour(client: AsyncClient) -> None:
        for leave in (break_out, leave_block):
            service.reset()
            await leave(client)
            assert await asyncio.to_thread(service.released.wait, 5), leave

    gc.disable()  # dropping the stream is enough
    try:
        run_async(address, behaviour)
    finally:
        gc.enable()


@pytest.mark.parametrize("method", ["generate", "stream"])
def test_cancelling_a_task_cancels_its_request(method: str, service: ScriptedInference, address: str) -> None:
    async def wait_for(client: AsyncClient) -> None:
        answer = getattr(client, method)("hold")
        if method == "generate":
            await answer
        else:
            _ = [chunk async for chunk in answer]

    async def behaviour(client: AsyncClient) -> None:
        task = asyncio.create_task(wait_for(client))
        assert await asyncio.to_thread(service.held.wait, 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(service.released.wait, 5)

    run_async(address, behaviour)


def test_cancel_by_id_ends_the_request_for_its_caller(address: str) -> None:
    with Client(address) as client:
        stream = client.stream("hold")
        assert next(stream).text == " a"
        assert client.cancel(stream.request_id) is True
        with pytest.raises(CancelledError, match="by request"):
            next(stream)


def test_closing_a_stream_or_client_ends_its_reader(service: ScriptedInference, address: str) -> None:
    client = Client(address)
    closed = client.stream("go")
    closed.close()
    with pytest.raises(CancelledError):
        list(closed)
    threading.Timer(0.2, client.close).start()
    with pytest.raises(CancelledError):
        list(client.stream("hold"))
    with pytest.raises(RuntimeError, match="closed"):
        client.models()


def test_a_call_of_a_batch_that_is_cut_short_is_named() -> None:
    method = mock.Mock()
    method.future.return_value.result.side_effect = grpc.FutureCancelledError
    call = CallPlanner().generate("go", None, {"request_id": "mine"})
    with pytest.raises(CancelledError, match="closed by this client") as closed:
        Halt(threading.Event()).run(method, call)
    assert closed.value.request_id == "mine"


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("leave", ["stream", "client"])
async def test_a_stream_that_was_left_after_its_last_chunk_is_whole(kind: Any, leave: str) -> None:
    class LateStatus(BreakingInference):  # a proxy's status also arrives shortly after the last chunk
        def Stream(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            yield from super().Stream(request, context)
            left.wait(5)

    left = threading.Event()
    server, address = serve(service := LateStatus([1, 2]))
    client = kind(address)
    stream = client.stream("go")
    for _ in range(2):
        await maybe_awaited(anext(stream) if kind is AsyncClient else next(stream))
    await maybe_awaited((stream if leave == "stream" else client).close())
    answer = await maybe_awaited(stream.completion())
    assert (answer.text, answer.token_ids) == service.answer(0)
    await maybe_awaited(client.close())
    left.set()
    server.stop(0).wait()


async def maybe_awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


@pytest.mark.parametrize("method", ["generate", "stream"])
def test_closing_an_async_client_ends_calls_with_a_typed_error(
    method: str, service: ScriptedInference, address: str
) -> None:
    async def behaviour(client: AsyncClient) -> None:
        stream = client.stream("hold")
        assert (await anext(stream)).text == " a"
        waiting = asyncio.ensure_future(anext(stream) if method == "stream" else client.generate("hold"))
        await asyncio.sleep(0.2)
        await client.close()
        with pytest.raises(CancelledError):  # not asyncio's: the task was not cancelled
            await waiting
        with pytest.raises(RuntimeError, match="closed"):
            await client.models()

    run_async(address, behaviour)


@pytest.mark.parametrize("method", ["generate", "stream", "generate_many"])
def test_a_call_that_begins_while_another_thread_closes_the_client_is_closed_too(method: str, address: str) -> None:
    class ClosedInBetween(Client):
        def _method(self, *args: Any, **options: Any) -> Any:
            found = super()._method(*args, **options)
            if opened.is_set():
                self.close()
            return found

    opened = threading.Event()
    client = ClosedInBetween(address)
    client.models()
    opened.set()
    check_closed(method, call_to_the_end(client, method))


LONG_WAIT = (grpc.StatusCode.RESOURCE_EXHAUSTED, "full [code=overloaded retry-after-s=30]")


@pytest.mark.parametrize("method", ["generate", "stream", "generate_many"])
def test_closing_a_client_ends_calls_that_wait_for_their_next_try(method: str) -> None:
    service = BreakingInference([1], [Fault(0, *LONG_WAIT)] * 2)
    server, address = serve(service)
    client = Client(address)
    threading.Thread(target=close_when_refused, args=(client, service)).start()
    began_s = time.monotonic()
    try:
        check_closed(method, call_to_the_end(client, method))
    finally:
        server.stop(0).wait()
    assert time.monotonic() - began_s < 10
    with pytest.raises(RuntimeError, match="closed"):
        call_to_the_end(client, method, keep=False)


def wait_until_refused(service: BreakingInference) -> None:
    while len(service.faults) == 2:
        time.sleep(0.01)
    time.sleep(0.2)  # it is in its pause by now; the result is the same if not


def close_when_refused(client: Client, service: BreakingInference) -> None:
    wait_until_refused(service)
    client.close()


def call_to_the_end(client: Client, method: str, *, keep: bool = True) -> Any:
    """The call's result; with `keep`, CancelledError is returned instead of raised."""
    try:
        if method == "generate_many":  # the second call begins after the first has ended
            return client.generate_many(["go", "on"], concurrency=1, return_exceptions=True)
        return list(client.stream("go")) if method == "stream" else client.generate("go")
    except CancelledError as error:
        if keep:
            return error
        raise


def check_closed(method: str, outcome: Any) -> None:
    found = outcome if method == "generate_many" else [outcome]
    assert [type(one) for one in found] == [CancelledError] * (2 if method == "generate_many" else 1)
    assert "closed by this client" in str(found[0])


@pytest.mark.parametrize("method", ["generate", "stream", "generate_many"])
def test_closing_an_async_client_ends_calls_that_wait_for_their_next_try(method: str) -> None:
    service = BreakingInference([1], [Fault(0, *LONG_WAIT)] * 2)

    async def call(client: AsyncClient) -> Any:
        if method == "generate_many":
            return await client.generate_many(["go", "on"], concurrency=1, return_exceptions=True)
        if method == "stream":
            return [chunk async for chunk in client.stream("go")]
        return await client.generate("go")

    async def behaviour(client: AsyncClient) -> None:
        task = asyncio.create_task(call(client))
        await asyncio.to_thread(wait_until_refused, service)
        await client.close()
        (outcome,) = await asyncio.gather(asyncio.wait_for(task, 10), return_exceptions=True)
        check_closed(method, outcome)
        with pytest.raises(RuntimeError, match="closed"):
            await call(client)

    server, address = serve(service)
    try:
        run_async(address, behaviour)
    finally:
        server.stop(0).wait()


def test_closing_an_async_stream_ends_its_pause() -> None:
    service = BreakingInference([1], [Fault(0, *LONG_WAIT)] * 2)

    async def behaviour(client: AsyncClient) -> None:
        stream = client.stream("go")
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.to_thread(wait_until_refused, service)
        await stream.close()
        with pytest.raises(CancelledError):
            await asyncio.wait_for(waiting, 10)

    server, address = serve(service)
    try:
        run_async(address, behaviour)
    finally:
        server.stop(0).wait()


def test_a_finished_stream_stays_finished(address: str) -> None:
    async def behaviour(client: AsyncClient) -> None:
        stream = client.stream("go")
        assert len([chunk async for chunk in stream]) == 2
        assert [chunk async for chunk in stream] == []
        await stream.close()

    run_async(address, behaviour)
    with Client(address) as client:
        stream = client.stream("go")
        assert len(list(stream)) == 2
        assert list(stream) == []
        stream.close()


def test_an_async_client_stays_with_its_event_loop(address: str) -> None:
    client = AsyncClient(address)
    assert asyncio.run(client.models())
    with pytest.raises(RuntimeError, match="event loop of its first call"):
        asyncio.run(client.models())


def test_a_server_that_comes_back_is_found_soon(service: ScriptedInference) -> None:
    server, address = start_server(service)
    with Client(address, max_retries=0) as client:
        assert client.models()
        server.stop(0).wait()
        for _ in range(20):
            with pytest.raises(UnavailableError):
                client.models()
            time.sleep(0.05)
        server, _ = start_server(service, int(address.rsplit(":", 1)[1]))
        back = time.monotonic()
        while time.monotonic() - back < 4:
            try:
                assert client.models()
                break
            except UnavailableError:
                time.sleep(0.05)
        else:
            pytest.fail("the client did not come back within 4 s")
    server.stop(0).wait()


def test_both_clients_have_the_same_documented_methods() -> None:
    public = {name for name in vars(Client) if not name.startswith("_")}
    assert public == {name for name in vars(AsyncClient) if not name.startswith("_")}
    for name in public | {"__init__"}:
        ours, theirs = (inspect.signature(vars(kind)[name]).parameters for kind in (Client, AsyncClient))
        skipped = 2 if name.endswith("_many") else 0  # self and the prompts, which may be asynchronous in AsyncClient
        assert list(ours.values())[skipped:] == list(theirs.values())[skipped:], name
    for kind in (Client, AsyncClient):
        assert [name for name in public if "Example:" not in (vars(kind)[name].__doc__ or "")] == []


def test_importing_the_client_pulls_in_nothing_heavy() -> None:
    probe = "import alignedserve.client, sys; print({name.partition('.')[0] for name in sys.modules})"
    began = time.monotonic()
    modules = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout
    assert time.monotonic() - began < 5
    assert "'grpc'" in modules
    for heavy in ("ray", "torch", "transformers", "tokenizers", "numpy", "pydantic", "yaml"):
        assert f"'{heavy}'" not in modules
