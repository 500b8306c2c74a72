"""Whether tokens are made: who asks for this gateway's health is told of one that came lately, or one is asked for.

A token of any request of this gateway that a decode instance made within FRESH_S is proof enough. Without one a probe
goes the whole way of a request (scheduler, prefill, pool, decode), and is cancelled after its second token. It is in no
metric and no log, and holds nothing afterwards. One runs at a time, and only while somebody asks.

Under overload a probe waits, or is refused: workers that have work and come further with it are proof as well.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import grpc

from alignedserve.control.role import SERVING_STATES
from alignedserve.control.rpc import open_channel
from alignedserve.errors import AlignedServeError
from alignedserve.gateway.body.planning import CallPlan, PromptPlan, ServedModel
from alignedserve.gateway.body.requests import ReplyOptions
from alignedserve.gateway.ledger.calls import Call
from alignedserve.gateway.ledger.ledger import Ledger
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.proto import supervisor_pb2_grpc as sv_grpc
from alignedserve.request import PROBE, SamplingParams

logger = logging.getLogger(__name__)

FRESH_S = 5.0
ANSWER_S = 3.0  # how long the answer may take that a probe is asked for
PROBE_S = 10.0  # after which one is given up, and the next who asks begins another
ENOUGH_TOKENS = 2  # the first is prefill's
MOST_TOKENS = 16  # it is cancelled long before: what ends by itself would count as a usual length
WORKERS_AFTER_S = 1.0
WORKERS_EVERY_S = 0.5
WORKER_TIMEOUT_S = 1.0
_WORKERS = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Work:
    """What a worker says of its work: whether there is any, how far it is, and how long its longest step took."""

    busy: bool
    progress: int
    step_s: float


Works = Mapping[tuple[str, int], Work]
"""By id and incarnation."""


class Pulse:
    """Used from one event loop. `ask_workers` asks those that the view names; who does not answer is left out."""

    def __init__(self, ledger: Ledger, model: ServedModel, ask_workers: Callable[[], Awaitable[Works]]) -> None:
        self._ledger = ledger
        self._model = model
        self._ask_workers = ask_workers
        self._begun_s = self._probed_s = time.monotonic()
        self._proved_s = self._token_s = float("-inf")
        self._seen: dict[tuple[str, int], tuple[int, float]] = {}  # how far each worker was, and since when
        self._probing: asyncio.Task[None] | None = None

    async def missing(self) -> str:
        """What is missing, "" where tokens are made. Takes up to ANSWER_S where that is to be found out."""
        if self._age_s() < FRESH_S:
            return ""
        if self._probing is None or self._probing.done():
            self._probed_s = time.monotonic()
            self._probing = asyncio.get_running_loop().create_task(self._probe())
        until_s = self._probed_s + ANSWER_S
        while self._age_s() >= FRESH_S and not self._probing.done() and time.monotonic() < until_s:
            await asyncio.wait([self._probing], timeout=0.05)
        if self._age_s() < FRESH_S:
            return ""
        return f"tokens (none was made for {time.monotonic() - max(self._last_s(), self._begun_s):.0f} s)"

    def close(self) -> None:
        if self._probing is not None:
            self._probing.cancel()

    def _last_s(self) -> float:
        return max(self._proved_s, self._ledger.decoded_s)

    def _age_s(self) -> float:
        return time.monotonic() - self._last_s()

    async def _probe(self) -> None:
        token_s = max(self._token_s, self._ledger.decoded_s)
        if any(token_s > since_s for _, since_s in self._seen.values()):
            self._seen.clear()  # they came further since
        watching = asyncio.get_running_loop().create_task(self._watch_workers())
        call: Call | None = None
        try:
            call = self._ledger.open(self._plan())
            needed = min(ENOUGH_TOKENS, call.plan.prompts[0].sampling.max_tokens)
            while needed > 0 and (deltas := await call.next()):
                needed -= sum(len(delta.token_ids) for delta in deltas)
            self._token_s = self._proved_s = time.monotonic()
        except AlignedServeError as error:  # refused for load, say: then workers have work
            logger.debug("a probe has failed: %s", error)
            await asyncio.sleep(max(0.0, self._probed_s + ANSWER_S - time.monotonic()))
        finally:
            watching.cancel()
            if call is not None:
                self._ledger.close(call)

    def _plan(self) -> CallPlan:
        info = self._model.require(None)
        room = min(info.max_positions, self._model.capacity_tokens or info.max_positions) - 1
        sampling = SamplingParams(temperature=0.0, max_tokens=max(1, min(MOST_TOKENS, room)), ignore_eos=True)
        name = f"{PROBE}{uuid.uuid4().hex}"
        prompts = (PromptPlan((0,), sampling),)
        return CallPlan(name, prompts, ReplyOptions(), timeout_s=PROBE_S, internal_id=name, probe=True)

    async def _watch_workers(self) -> None:
        """One that has work is proof once it has come further, or while it may still be at the same long step: what is
        seen of it lasts from one probe to the next, else one that hangs would be new to each."""
        await asyncio.sleep(WORKERS_AFTER_S)
        while True:
            works = await self._ask_workers()
            now_s = time.monotonic()
            for name, work in works.items():
                progress, since_s = self._seen.get(name, (None, now_s))
                if progress != work.progress or not work.busy:
                    self._seen[name] = (work.progress, now_s)
                moved = progress not in (None, work.progress)
                if work.busy and (moved or 0.0 < now_s - since_s < 2 * work.step_s):
                    self._proved_s = now_s
            await asyncio.sleep(WORKERS_EVERY_S)


async def ask_workers(view: sv.ClusterView, token: str) -> Works:
    """How far the view's instances are with their work, as they say themselves now."""
    workers = [peer for peer in view.peers if peer.process.role in _WORKERS and peer.state in SERVING_STATES]
    said = await asyncio.gather(*(_ask_worker(peer, token) for peer in workers))
    return {
        (peer.process.id, peer.process.incarnation): Work(beat.busy, beat.progress, beat.step_s)
        for peer, beat in zip(workers, said, strict=True)
        if beat is not None
    }


async def _ask_worker(peer: sv.Peer, token: str) -> sv.Heartbeat | None:
    channel = open_channel(peer.address, token)
    try:
        beat: sv.Heartbeat = await sv_grpc.RoleStub(channel).Describe(pb.Empty(), timeout=WORKER_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        logger.debug("%s does not say how far it is: %s", peer.process.id, error.code().name)
        return None
    finally:
        await channel.close()
    return beat
