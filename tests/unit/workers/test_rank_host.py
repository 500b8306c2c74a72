"""The process for ranks on a further node and the stream to it: who may call, and when it counts as lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import pytest

from alignedserve.config import Config
from alignedserve.config_sources import from_tree, to_tree
from alignedserve.control.runtime import RoleSettings
from alignedserve.engine.parallel.children import RankOrder
from alignedserve.errors import ModelError, RankLostError, TransferError
from alignedserve.geometry import KvGeometry
from alignedserve.proto import common_pb2 as pb
from alignedserve.rank_host.actor import RankHostServer
from alignedserve.rank_host.link import HostLink, open_hosts
from alignedserve.transfer.paired.rendezvous import Rendezvous
from support.fake_roles import MODEL

PROCESS = pb.ProcessKey(role="decode", id="decode-0", incarnation=1)


def config(heartbeat_s: float = 0.2, fence_after_s: float = 1.0) -> Config:
    return from_tree({"supervisor": {"heartbeat_s": heartbeat_s, "fence_after_s": fence_after_s}})


def settings(asked: Config, *hosts: str) -> RoleSettings:
    return RoleSettings("decode", "decode-0.1", to_tree(asked), "c", "token", node_id="node-1", rank_hosts=hosts)


@asynccontextmanager
async def serving(asked: Config) -> AsyncIterator[tuple[RankHostServer, str]]:
    server = RankHostServer(settings(asked))
    address = await server.start()
    try:
        yield server, address
    finally:
        await server.close()


@asynccontextmanager
async def linked(asked: Config) -> AsyncIterator[tuple[RankHostServer, HostLink]]:
    async with serving(asked) as (server, address):
        (link,) = await open_hosts(settings(asked, address), PROCESS, asked)
        try:
            yield server, link
        finally:
            await asyncio.to_thread(link.close)


async def wait_trouble(link: HostLink, timeout_s: float = 5.0) -> RankLostError:
    async with asyncio.timeout(timeout_s):
        while (found := link.trouble()) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return found


@pytest.mark.parametrize(("heartbeat_s", "fence_after_s"), [(0.1, 0.3), (0.1, 0.2), (1.0, 2.0)])
async def test_a_host_that_beats_is_never_silent_and_one_that_does_not_is(
    heartbeat_s: float, fence_after_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with linked(config(heartbeat_s, fence_after_s)) as (server, link):
        assert (link.node_id, list(link.devices)) == ("node-1", ["cpu"])
        await asyncio.sleep(max(0.6, 1.2 * fence_after_s))
        assert link.trouble() is None
        monkeypatch.setattr(server, "beat_s", 60.0)
        said = (await wait_trouble(link)).message
        assert f"silent for over {fence_after_s:g} s" in said
        assert "node node-1" in said


async def test_it_serves_one_instance_and_ends_with_its_stream() -> None:
    asked = config()
    async with serving(asked) as (server, address):
        (link,) = await open_hosts(settings(asked, address), PROCESS, asked)
        with pytest.raises(RankLostError, match=r"already has ranks of decode-0 \(1\)"):
            await open_hosts(settings(asked, address), PROCESS, asked)
        assert link.trouble() is None
        await asyncio.to_thread(link.close)
        async with asyncio.timeout(5.0):
            await server.wait()


async def test_the_end_of_the_host_is_trouble_and_ends_what_waits_for_it() -> None:
    asked = config()
    async with serving(asked) as (server, address):
        (link,) = await open_hosts(settings(asked, address), PROCESS, asked)
        values = link._values = Rendezvous(link.tell)
        waiting = asyncio.create_task(asyncio.to_thread(values.get, "waits/0", 30.0))
        await server.close()
        assert "the stream to it has ended" in (await wait_trouble(link)).message
        with pytest.raises(Exception, match="the stream to it has ended"):
            await waiting
        with pytest.raises(RankLostError):
            await asyncio.to_thread(link.held)
        await asyncio.to_thread(link.close)


@pytest.mark.parametrize("error", [ModelError("no such folder"), OSError("no process can be made")])
async def test_any_error_of_a_start_is_answered(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(orders: Any) -> Any:
        raise error

    async with linked(config()) as (server, link):
        monkeypatch.setattr(server, "with_model_here", failing)
        values = Rendezvous(link.tell)
        link.start([RankOrder(1, 1, 2, 1, MODEL.to_json(), False, 1, "torch")], values, lambda key, value: None)
        said = await asyncio.to_thread(link.said)
        assert said is not None
        assert str(error) in said.message
        assert isinstance(said, ModelError) == isinstance(error, ModelError)
        with pytest.raises(Exception, match=str(error)):
            values.get("waits/0", 1.0)


async def test_values_that_come_before_the_ranks_are_started_are_kept() -> None:
    async with linked(config()) as (server, link):
        link.tell("waits/0", b"address")
        async with asyncio.timeout(5.0):
            assert await asyncio.to_thread(server._values.get, "waits/0", 5.0) == b"address"
        passed: list[str] = []
        values, link._pass_on = Rendezvous(link.tell), lambda key, value: passed.append(key)
        link._values = values
        server._values.set("waits/1", b"other")
        assert await asyncio.to_thread(values.get, "waits/1", 5.0) == b"other"
        assert passed == ["waits/1"]


async def test_a_copy_that_may_still_write_ends_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Session:
        number = 1

        def copy(self, *arguments: Any) -> None:
            raise OSError("the connection stalls")

        def trouble(self, reason: str) -> None:
            pass

    async with linked(config()) as (_, link):
        link._made.set_result([])
        await asyncio.to_thread(link.store, "decode-0/cache", KvGeometry("m", "float32", 1, 1, 4, 4), 8)
        client = link._client
        assert client is not None
        monkeypatch.setattr(client, "_wait_up", Session)
        monkeypatch.setattr(client, "_away_s", 0.0)
        for push in (False, True):
            assert link.trouble() is None
            with pytest.raises(TransferError, match="the connection stalls"):
                await asyncio.to_thread(client.copy, "decode-0/cache", [0], None, push=push)
        assert "may still write to their memory" in str(link.trouble())


def test_orders_travel_as_they_are() -> None:
    order = RankOrder(3, 2, 2, 1, MODEL.to_json(), False, 1, "torch", "cuda:1", True, 2, "10.0.0.2", 300.0)
    assert RankOrder(**json.loads(json.dumps(asdict(order)))) == order
