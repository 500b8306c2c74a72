"""The scheduler listens only to a place's current process, and not to one that is being ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from alignedserve.control.link import Outbox, serve_stream
from alignedserve.control.rpc import RpcServer
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import decode_worker_pb2 as dw
from alignedserve.proto import decode_worker_pb2_grpc as dw_grpc
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.scheduler.core import events as ev
from alignedserve.scheduler.process.messaging import WorkerLinks, shards_changed

TOKEN = "token"


class Worker(dw_grpc.DecodeWorkerServicer):
    """A decode instance that sends scripted messages over every stream ever opened to it."""

    def __init__(self, incarnation: int) -> None:
        self.process = pb.ProcessKey(role="decode", id="decode-0", incarnation=incarnation)
        self.outboxes: list[Outbox[dw.DecodeReport]] = []
        self._server = RpcServer(TOKEN)
        self._server.add(dw_grpc.add_DecodeWorkerServicer_to_server, self)
        self.address = ""

    async def start(self) -> Worker:
        self.address = await self._server.start()
        return self

    async def stop(self) -> None:
        await self._server.stop()

    async def Control(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[dw.DecodeReport]:
        outbox: Outbox[dw.DecodeReport] = Outbox()
        self.outboxes.append(outbox)
        self.say(outbox)
        async for report in serve_stream(request_iterator, outbox, lambda command: None):
            yield report

    def say(self, outbox: Outbox[dw.DecodeReport]) -> None:
        outbox.put(dw.DecodeReport(description=dw.DecodeDescription(process=self.process)))

    def peer(self, *, fenced: bool = False) -> sv.Peer:
        state = "lost" if fenced else "ready"
        return sv.Peer(process=self.process, address=self.address, state=state, fenced=fenced)


class Heard:
    def __init__(self) -> None:
        self.incarnations: list[int] = []
        self.lost = 0
        self.links = WorkerLinks(TOKEN, self._on_report, self._on_lost)

    def _on_report(self, role: str, instance_id: str, report: dw.DecodeReport) -> None:
        self.incarnations.append(report.description.process.incarnation)

    def _on_lost(self, role: str, instance_id: str) -> None:
        self.lost += 1

    async def until(self, check: Callable[[], bool]) -> None:
        async with asyncio.timeout(10.0):
            while not check():  # noqa: ASYNC110  (nothing here has an event to wait for)
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("successor", [False, True])
async def test_a_worker_that_is_being_ended_is_lost_once_and_not_heard_when_it_wakes_up(successor: bool) -> None:
    heard, old, new = Heard(), await Worker(1).start(), await Worker(2).start()
    await heard.links.on_view(sv.ClusterView(peers=[old.peer()]))
    await heard.until(lambda: heard.incarnations == [1])
    await heard.links.on_view(sv.ClusterView(peers=[new.peer() if successor else old.peer(fenced=True)]))
    for outbox in old.outboxes:
        old.say(outbox)
    if not successor:
        await heard.links.on_view(sv.ClusterView(peers=[new.peer()]))
    await heard.until(lambda: 2 in heard.incarnations)
    for worker in (old, new):
        for outbox in worker.outboxes:
            worker.say(outbox)
    await heard.until(lambda: heard.incarnations.count(2) == 2)
    assert heard.incarnations.count(1) == 1
    assert heard.lost == 1
    await heard.links.close()
    await old.stop()
    await new.stop()


def test_the_view_says_which_shard_each_instance_writes_to() -> None:
    def peer(role: str, name: str, node_id: str) -> sv.Peer:
        return sv.Peer(process=pb.ProcessKey(role=role, id=name), node_id=node_id)

    view = sv.ClusterView(
        pools=[sv.PoolShard(pool_id="kv_pool-0", node_id="a"), sv.PoolShard(pool_id="kv_pool-1", node_id="b")],
        peers=[
            peer("prefill", "prefill-0", "b"),
            peer("decode", "decode-0", "a"),
            peer("decode", "decode-1", "gone"),
            peer("scheduler", "scheduler-0", "a"),
        ],
    )
    homes = (("decode-0", "kv_pool-0"), ("prefill-0", "kv_pool-1"))
    assert shards_changed(view) == ev.ShardsChanged(("kv_pool-0", "kv_pool-1"), homes)
