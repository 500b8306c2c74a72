"""Checks, for this gateway's health endpoint, that the cluster generates tokens.

A token that a decode instance generated for any request of this gateway within the last FRESH_S is sufficient. Without
such a token, the gateway sends a probe: a request that passes through scheduler, prefill, pool and decode, and is
cancelled after its second token. Probes appear in no metric and no log, and leave no state behind. At most one runs at
a time, and only when the health endpoint is called.

Under overload a probe waits or is refused. Therefore, workers that make progress with their work are sufficient too.
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
ANSWER_S = 3.0  # how long a health check waits for its probe
PROBE_S = 10.0  # after this time a probe fails, and the next health check starts another
ENOUGH_TOKENS = 2  # prefill generates the first, decode the second
MOST_TOKENS = 16  # more than ENOUGH_TOKENS: a request that ends by itself would count in the usual answer lengths
WORKERS_AFTER_S = 1.0
WORKERS_EVERY_S = 0.5
WORKER_TIMEOUT_S = 1.0
_WORKERS = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Work:
    """A worker's report: whether it has work, its progress counter, and the seconds that its present step may take."""

    busy: bool
    progress: int
    step_s: float


Works = Mapping[tuple[str, int], Work]
"""By id and incarnation."""


class Pulse:
    """Use it from one event loop. `ask_workers` asks the view's workers, and leaves out those that do not answer."""

    def __init__(self, ledger: Ledger, model: ServedModel, ask_workers: Callable[[], Awaitable[Works]]) -> None:
        self._ledger = ledger
        self._model = model
        self._ask_workers = ask_workers
        self._begun_s = self._probed_s = time.monotonic()
        self._proved_s = self._token_s = float("-inf")
        self._seen: dict[tuple[str, int], tuple[int, float]] = {}  # each worker's progress, and since when
        self._probing: asyncio.Task[None] | None = None

    async def missing(self) -> str:
        """A description of what is missing; "" if tokens are generated. Takes up to ANSWER_S if a probe is needed."""
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
        return f"tokens (none was generated for {time.monotonic() - max(self._last_s(), self._begun_s):.0f} s)"

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
            self._seen.clear()  # the workers have made progress since
        watching = asyncio.get_running_loop().create_task(self._watch_workers())
        call: Call | None = None
        try:
            call = self._ledger.open(self._plan())
            needed = min(ENOUGH_TOKENS, call.plan.prompts[0].sampling.max_tokens)
            while needed > 0 and (deltas := await call.next()):
                needed -= sum(len(delta.token_ids) for delta in deltas)
            self._token_s = self._proved_s = time.monotonic()
        except AlignedServeError as error:  # for example, refused because of load: then workers have work
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
        """Counts a worker with work as proof if it has made progress, or while its present step may still take longer.

        What was seen of each worker is kept from one probe to the next; otherwise a hanging worker would look new to
        each probe.
        """
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
    """Asks the view's instances for their work. Those that do not answer within WORKER_TIMEOUT_S are left out."""
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
        logger.debug("%s does not report its progress: %s", peer.process.id, error.code().name)
        return None
    finally:
        await channel.close()
    return beat
