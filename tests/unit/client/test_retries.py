"""What `alignedserve.client` sends again, when and where. No token is repeated or missing, and retries are bounded."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alignedserve.client import (
    AlignedServeError,
    AsyncClient,
    Backoff,
    Chunk,
    Client,
    ConfigError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from alignedserve.client import attempts as attempts_module
from alignedserve.client.connections import Rotation, parse_addresses
from support.breaking_inference import BREAKS, BreakingInference, Fault, serve
from support.inference import ask_async, ask_sync

BOTH = pytest.mark.parametrize("ask", [ask_sync, ask_async], ids=["sync", "async"])
FULL = (grpc.StatusCode.RESOURCE_EXHAUSTED, "full [code=overloaded retry-after-s=0.2]")
AT_ONCE = Backoff(0.0, 0.0)
SIZES = (1, 2, 1, 3)


@pytest.fixture(autouse=True)
def quick_reconnects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts_module, "_RECONNECT", AT_ONCE)


@contextmanager
def serving(service: BreakingInference) -> Iterator[str]:
    server, address = serve(service)
    try:
        yield address
    finally:
        server.stop(0).wait()


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[BreakingInference, str]]:
    """One server for the many short calls of the property tests."""
    service = BreakingInference(SIZES)
    with serving(service) as address:
        yield service, address


def joined(chunks: Sequence[Chunk], index: int) -> tuple[str, tuple[int, ...]]:
    mine = [chunk for chunk in chunks if chunk.index == index]
    return "".join(chunk.text for chunk in mine), tuple(token for chunk in mine for token in chunk.token_ids)


def check_stream(service: BreakingInference, chunks: Sequence[Chunk], n: int) -> None:
    assert [joined(chunks, index) for index in range(n)] == [service.answer(index) for index in range(n)]
    ends = [chunk.index for chunk in chunks if chunk.finish_reason]
    assert sorted(set(ends)) == list(range(n))
    assert [bool(chunk.prompt_token_ids) for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    assert len({chunk.request_id for chunk in chunks}) == 1


@BOTH
def test_a_stream_that_breaks_at_any_position_in_any_way_is_whole(
    ask: Callable[..., Any], shared: tuple[BreakingInference, str]
) -> None:
    service, address = shared
    for chunks in range(len(SIZES) + 1):
        for status, details in BREAKS:
            service.requests.clear()
            service.faults = [Fault(chunks, status, details)]
            check_stream(service, ask(address, {}, "stream", "go"), 1)
            assert len(service.requests) == (1 if chunks == len(SIZES) else 2), (chunks, status, details)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n=st.integers(1, 3),
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=5),
    faults=st.lists(
        st.tuples(st.integers(0, 6), st.sampled_from([*BREAKS, (FULL[0], "full [code=overloaded]")])), max_size=6
    ),
    usage_with_each_end=st.booleans(),
    ask=st.sampled_from([ask_sync, ask_async]),
)
def test_a_stream_that_breaks_again_and_again_is_whole(
    shared: tuple[BreakingInference, str],
    n: int,
    sizes: list[int],
    faults: list[tuple[int, tuple[grpc.StatusCode, str]]],
    usage_with_each_end: bool,
    ask: Callable[..., Any],
) -> None:
    service, address = shared
    service.requests.clear()
    service.sizes = sizes
    service.usage_with_each_end = usage_with_each_end
    service.faults = [Fault(chunks, *words) for chunks, words in faults]
    try:
        given_settings = {"max_retries": len(faults), "backoff": AT_ONCE}
        check_stream(service, ask(address, given_settings, "stream", "go", n=n), n)
        assert len({request.request_id for request in service.requests}) == 1
    finally:
        service.sizes = list(SIZES)
        service.usage_with_each_end = False
        service.faults = []


@BOTH
def test_a_stream_is_whole_with_the_ends_of_all_its_answers_not_with_its_usage(ask: Callable[..., Any]) -> None:
    service = BreakingInference([1, 2], [Fault(3, *BREAKS[0])])
    service.usage_with_each_end = True
    with serving(service) as address:
        check_stream(service, ask(address, {}, "stream", "go", n=2), 2)
    assert len(service.requests) == 2


@BOTH
@pytest.mark.parametrize("method", ["generate", "stream"])
def test_a_refusal_is_tried_again_after_what_the_server_asked_for(ask: Callable[..., Any], method: str) -> None:
    service = BreakingInference(SIZES, [Fault(0, *FULL)] * 2)
    with serving(service) as address:
        began_s = time.monotonic()
        answer = ask(address, {"backoff": AT_ONCE}, method, "go")
        assert time.monotonic() - began_s >= 0.4
    text = answer.text if method == "generate" else joined(answer, 0)[0]
    assert text == service.answer(0)[0]
    assert len(service.requests) == 3
    assert not any(request.resume for request in service.requests), "no gateway has begun it"
    if method == "generate":
        assert answer.client_timings.attempts == 3
        assert answer.client_timings.total_s >= 0.4
        assert answer.client_timings.ttft_s is None


@BOTH
@pytest.mark.parametrize(
    ("settings", "options", "calls"), [({}, {}, 3), ({"max_retries": 0}, {}, 1), ({}, {"max_retries": 1}, 2)]
)
def test_tries_are_counted(
    ask: Callable[..., Any], settings: dict[str, Any], options: dict[str, Any], calls: int
) -> None:
    service = BreakingInference(SIZES, [Fault(0, FULL[0], "full [code=overloaded retry-after-s=0.001]")] * 9)
    with serving(service) as address, pytest.raises(OverloadedError) as refused:
        ask(address, {"backoff": AT_ONCE, **settings}, "generate", "go", **options)
    assert len(service.requests) == calls
    assert refused.value.retry_after_s == 0.001
    assert refused.value.code == "overloaded"
    assert refused.value.request_id == service.requests[0].request_id != ""


def test_a_refusal_for_which_there_is_no_time_is_raised_at_once() -> None:
    for retry_after, options in (("30", {"timeout_s": 5}), ("61", {})):
        service = BreakingInference(SIZES, [Fault(0, FULL[0], f"full [code=overloaded retry-after-s={retry_after}]")])
        with serving(service) as address, Client(address) as client:
            began_s = time.monotonic()
            with pytest.raises(OverloadedError) as refused:
                client.generate("go", **options)  # type: ignore[arg-type]
            assert time.monotonic() - began_s < 4
        assert refused.value.retry_after_s == float(retry_after)
        assert len(service.requests) == 1


@pytest.mark.parametrize(
    ("details", "calls"),
    [
        ("still loading [code=unavailable retry-after-s=0.01]", 3),
        ("lost 6 times in a row [code=request_lost]", 1),  # the request may be what kills its workers
    ],
)
def test_what_is_unavailable_is_tried_again_but_not_what_was_lost(details: str, calls: int) -> None:
    service = BreakingInference(SIZES, [Fault(0, grpc.StatusCode.UNAVAILABLE, details)] * 3)
    with serving(service) as address, pytest.raises(UnavailableError) as failed:
        ask_sync(address, {"backoff": AT_ONCE}, "generate", "go")
    assert len(service.requests) == calls
    assert failed.value.code == details.split("code=")[1].split("]", maxsplit=1)[0].split(maxsplit=1)[0]


@BOTH
def test_a_stream_that_ends_before_its_answer_is_no_whole_one(ask: Callable[..., Any]) -> None:
    service = BreakingInference(SIZES, [Fault(2, grpc.StatusCode.OK, "")])
    with (
        serving(service) as address,
        pytest.raises(UnavailableError, match="ended before the answer was complete") as cut,
    ):
        ask(address, {"resume_s": 0}, "stream", "go")
    assert cut.value.request_id == service.requests[0].request_id


@BOTH
@pytest.mark.parametrize(
    ("status", "details"),
    [
        (grpc.StatusCode.NOT_FOUND, "Application metadata not set. Ping /ray.serve.RayServeAPIService/..."),
        (grpc.StatusCode.UNIMPLEMENTED, "Received http2 header with status: 404"),
    ],
)
def test_a_proxy_that_has_just_started_and_knows_nothing_yet_is_asked_again(
    ask: Callable[..., Any], status: grpc.StatusCode, details: str
) -> None:
    service = BreakingInference(SIZES, [Fault(0, status, details)] * 2)
    with serving(service) as address:
        assert ask(address, {"backoff": AT_ONCE}, "generate", "go").text == service.answer(0)[0]
        service.faults = [Fault(0, status, details)] * 4
        with pytest.raises(AlignedServeError, match=details.split(maxsplit=1)[0]) as failed:
            ask(address, {"backoff": AT_ONCE}, "generate", "go")
    assert (len(service.requests), len(service.faults)) == (6, 1)
    assert isinstance(failed.value, NotFoundError) is (status is grpc.StatusCode.NOT_FOUND)


def test_calls_that_generate_nothing_are_tried_again_too() -> None:
    service = BreakingInference(SIZES, [Fault(0, *BREAKS[0])] * 2)
    with serving(service) as address, Client(address, backoff=AT_ONCE) as client:
        assert client.models()[0].id == "tiny"
        service.faults = [Fault(0, grpc.StatusCode.INVALID_ARGUMENT, "no")] * 2
        with pytest.raises(AlignedServeError):
            client.models()
    assert len(service.faults) == 1


@BOTH
def test_a_stream_that_has_begun_is_not_counted_as_a_try(ask: Callable[..., Any]) -> None:
    service = BreakingInference([1] * 8, [Fault(1, *BREAKS[0])] * 7)
    with serving(service) as address:
        check_stream(service, ask(address, {"max_retries": 0}, "stream", "go"), 1)
    assert len(service.requests) == 8


def test_what_has_begun_is_refused_for_resume_s_at_most_whatever_the_server_asks_for() -> None:
    asked = (FULL[0], "full [code=overloaded retry-after-s=30]")
    service = BreakingInference(SIZES, [Fault(1, *BREAKS[0]), Fault(0, *asked), Fault(0, *asked)])
    with serving(service) as address:
        began_s = time.monotonic()
        with pytest.raises(OverloadedError) as refused:
            ask_sync(address, {"resume_s": 0.3}, "stream", "go")
        assert 0.3 <= time.monotonic() - began_s < 3.0
    assert refused.value.retry_after_s == 30.0
    assert len(service.requests) == 3, "once more when the time is over"


@BOTH
def test_a_gateway_that_ends_hands_over_without_a_wait(ask: Callable[..., Any]) -> None:
    ending = Fault(1, grpc.StatusCode.UNAVAILABLE, "this gateway is shutting down [code=shutting_down retry-after-s=9]")
    service = BreakingInference(SIZES, [ending])
    with serving(service) as address:
        began_s = time.monotonic()
        check_stream(service, ask(address, {}, "stream", "go"), 1)
        assert time.monotonic() - began_s < 9.0


@BOTH
def test_an_address_without_an_answer_is_left_out(ask: Callable[..., Any]) -> None:
    service = BreakingInference(SIZES)
    with serving(service) as address, socket.socket() as unserved:
        unserved.bind(("127.0.0.1", 0))
        dead = f"127.0.0.1:{unserved.getsockname()[1]}"
        began_s = time.monotonic()
        answer = ask([dead, address], {"max_retries": 0}, "generate", "go")
        assert answer.text == service.answer(0)[0]
        assert time.monotonic() - began_s < 3
        with pytest.raises(UnavailableError) as caught:
            ask([dead, "127.0.0.1:1"], {"max_retries": 0}, "models")
        assert caught.value.details["address"] in (dead, "127.0.0.1:1")


async def test_calls_at_once_do_not_hand_each_other_the_dead_addresses_for_ever() -> None:
    async with AsyncClient(["127.0.0.1:1", "127.0.0.1:2"], backoff=AT_ONCE) as client:
        with pytest.raises(UnavailableError):
            await client.models()
        async with asyncio.timeout(5):
            calls = [client.generate("go", max_retries=1, request_id=f"go-{number}") for number in range(2)]
            with count_sent() as sent:
                failed = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(error) for error in failed] == [UnavailableError] * 2
    assert sent == {"go-0": 4, "go-1": 4}, "each of two tries at both addresses"


@contextmanager
def count_sent() -> Iterator[Counter[str]]:
    """How often each call is sent, by request id."""
    sent: Counter[str] = Counter()
    send = AsyncClient._send

    def counted(client: AsyncClient, attempts: attempts_module.Attempts, **how: Any) -> Any:
        sent[attempts.request_id] += 1
        return send(client, attempts, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncClient, "_send", counted)
        yield sent


def test_later_calls_avoid_an_address_without_an_answer() -> None:
    with serving(BreakingInference(SIZES)) as address, Client(["127.0.0.1:1", address]) as client:
        attempts = [client.generate("go").client_timings.attempts for _ in range(6)]
    assert sorted(attempts) == [1, 1, 1, 1, 1, 2]


def test_calls_take_the_addresses_in_turn_and_go_on_at_the_next() -> None:
    first, second = BreakingInference(SIZES), BreakingInference(SIZES)
    with serving(first) as one, serving(second) as other, Client([one, other]) as client:
        for _ in range(4):
            client.generate("go")
        assert (len(first.requests), len(second.requests)) == (2, 2)
        first.faults = [Fault(2, *BREAKS[0])]
        stream = client.stream("go")
        answer = stream.completion()
    assert (answer.text, answer.token_ids) == first.answer(0)
    assert answer.client_timings.attempts == 2
    assert stream.client_timings.ttft_s is not None
    assert 0 < stream.client_timings.ttft_s <= answer.client_timings.total_s
    assert list(second.requests[-1].resume[0].token_ids) == list(first.answer(0)[1][:3])


def test_a_rotation_leaves_out_what_failed_until_it_works_or_all_have() -> None:
    rotation = Rotation(["a", "b", "c"])
    assert [rotation.next() for _ in range(4)] == ["a", "b", "c", "a"]
    rotation.failed("b")
    assert [rotation.next() for _ in range(3)] == ["c", "a", "c"]
    for address in "ac":
        rotation.failed(address)
    assert {rotation.next() for _ in range(3)} == {"a", "b", "c"}
    assert {rotation.next(but={"a", "b"}) for _ in range(3)} == {"c"}
    rotation.worked("b")
    assert [rotation.next() for _ in range(2)] == ["b", "b"]


@pytest.mark.parametrize(
    "address",
    [
        [],
        "",
        ["a:1", "a:1"],
        ["https://a:1"],
        [1],
        "a",
        "a:",
        ":1",
        "a:b",
        "a:0",
        "a:65536",
        "[::1]",
        "::1:9000",
        "dns:a",
        ["a:1", "b"],
    ],
)
def test_addresses_that_cannot_be_are_refused(address: Any) -> None:
    with pytest.raises(ConfigError, match="address"):
        Client(address)


@pytest.mark.parametrize(
    "address", ["a:1", "[::1]:9000", "dns:a:1", "dns:///a:1", "ipv4:1.2.3.4:5,6.7.8.9:5", "unix:a"]
)
def test_addresses_with_a_port_and_targets_of_grpc_are_taken(address: str) -> None:
    assert parse_addresses(address) == (address,)


@BOTH
def test_a_stream_goes_on_with_the_model_that_it_began_with(ask: Callable[..., Any]) -> None:
    gone = Fault(0, grpc.StatusCode.NOT_FOUND, "model 'tiny' does not exist [code=model_not_found]")
    service = BreakingInference(SIZES, [Fault(0, *BREAKS[0]), Fault(2, *BREAKS[0]), gone])
    with serving(service) as address, pytest.raises(NotFoundError, match="does not exist"):
        ask(address, {}, "stream", "go")
    assert [request.model for request in service.requests] == ["", "", "tiny"]


def test_a_backoff_grows_to_its_limit_and_keeps_to_what_the_server_asks() -> None:
    backoff = Backoff(0.5, 8.0)
    for failures in (0, 1, 2, 10, 5000):
        most_s = min(0.5 * 2.0 ** min(failures, 50), 8.0)
        waits = [backoff.wait_s(failures) for _ in range(50)]
        assert all(most_s / 2 <= wait <= most_s for wait in waits)
        assert len(set(waits)) > 1, "clients must not all come back at once"
    assert all(3.0 <= backoff.wait_s(0, 3.0) <= 3.3 for _ in range(50))
    with pytest.raises(ConfigError):
        Backoff(2.0, 1.0)
