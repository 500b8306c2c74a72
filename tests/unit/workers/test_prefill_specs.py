"""Asking gateways for prompts: one call at a time to each, and missing gateways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from alignedserve.control.convert import key_to_proto, keys_from_proto
from alignedserve.control.rpc import RpcServer
from alignedserve.errors import UnavailableError
from alignedserve.prefill_worker import specs
from alignedserve.prefill_worker.specs import SpecReader, sent_specs
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import gateway_pb2 as gw
from alignedserve.proto import gateway_pb2_grpc as gw_grpc
from alignedserve.proto import prefill_worker_pb2 as pw
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.request import RequestKey

TOKEN = "token"


class Gateway(gw_grpc.SpecSourceServicer):
    """Has every request whose id is not in `ended`; answers with one message a request while `open`."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.open = asyncio.Event()
        self.open.set()

    async def ReadSpecs(self, request: pb.RequestKeys, context: Any) -> AsyncIterator[gw.RequestSpecs]:
        keys = keys_from_proto(request)
        self.calls.append([key.request_id for key in keys])
        await self.open.wait()
        for key in keys:
            if key.request_id != "ended":
                spec = pb.RequestSpec(key=key_to_proto(key), prompt_token_ids=[1, 2])
                yield gw.RequestSpecs(requests=[spec])


@pytest.fixture
async def gateway() -> AsyncIterator[tuple[Gateway, str]]:
    gateway, server = Gateway(), RpcServer(TOKEN)
    server.add(gw_grpc.add_SpecSourceServicer_to_server, gateway)
    yield gateway, await server.start()
    await server.stop()


@pytest.fixture
async def reader() -> AsyncIterator[SpecReader]:
    reader = SpecReader(TOKEN)
    yield reader
    await reader.close()


def keys(*names: str) -> list[RequestKey]:
    return [RequestKey(name) for name in names]


async def test_what_is_wanted_during_a_call_is_asked_for_with_the_next(
    gateway: tuple[Gateway, str], reader: SpecReader
) -> None:
    asked, address = gateway
    asked.open.clear()
    first = asyncio.create_task(reader.read(address, keys("a", "b")))
    while not asked.calls:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    others = [asyncio.create_task(reader.read(address, keys(name))) for name in ("c", "ended", "d")]
    await asyncio.sleep(0.05)
    asked.open.set()
    assert (await first).keys() == set(keys("a", "b"))
    found = await asyncio.gather(*others)
    assert asked.calls == [["a", "b"], ["c", "ended", "d"]]
    assert [list(specs_found) for specs_found in found] == [keys("c"), [], keys("d")]
    assert list(found[0][RequestKey("c")].prompt_token_ids) == [1, 2]
    await reader.on_view(sv.ClusterView())  # no gateway is left
    assert (await reader.read(address, keys("e"))).keys() == set(keys("e"))


async def test_a_gateway_that_is_not_there_is_an_error_for_all_that_ask(
    gateway: tuple[Gateway, str], reader: SpecReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(specs, "PATIENCE_S", 0.2)
    reads = (reader.read("127.0.0.1:1", keys(name)) for name in "ab")
    found = await asyncio.gather(*reads, reader.read(gateway[1], keys("c")), return_exceptions=True)
    assert [type(answer) for answer in found] == [UnavailableError, UnavailableError, dict]


async def test_a_reader_that_closes_leaves_no_caller_waiting(gateway: tuple[Gateway, str], reader: SpecReader) -> None:
    gateway[0].open.clear()
    reading = asyncio.create_task(reader.read(gateway[1], keys("a")))
    await asyncio.sleep(0.05)
    await reader.close()
    with pytest.raises(asyncio.CancelledError):
        await reading


def test_what_a_gateway_sent_with_the_submission_needs_no_read() -> None:
    specs_sent = [pb.RequestSpec(key=key_to_proto(key), prompt_token_ids=[3]) for key in keys("a", "b")]
    group = pw.PrefillGroup(specs=gw.RequestSpecs(requests=specs_sent).SerializeToString())
    assert sent_specs(group) == dict(zip(keys("a", "b"), specs_sent, strict=True))


@pytest.mark.parametrize("sent", [b"", b"\xff"])
def test_a_prompt_that_was_not_sent_or_cannot_be_parsed_is_read(sent: bytes) -> None:
    assert sent_specs(pw.PrefillGroup(specs=sent)) == {}
