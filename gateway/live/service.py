"""What a gateway shows to viewers: the cluster's state, and requests of all gateways."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from alignedserve.control.supervisor_client import SupervisorClient
from alignedserve.errors import UnavailableError
from alignedserve.gateway.body.planning import ServedModel
from alignedserve.gateway.ledger.ledger import Ledger
from alignedserve.gateway.live.explain import Told, explain
from alignedserve.gateway.live.feed import LiveFeed
from alignedserve.gateway.live.history import RecentRequests, ordered, requests_of
from alignedserve.gateway.live.queue_cause import queue_cause
from alignedserve.gateway.live.samples import Samples
from alignedserve.gateway.live.timeline import LOST, open_timeline, timeline, with_last_stay
from alignedserve.gateway.peers import GatewayPeers
from alignedserve.gateway.scheduler_link import SchedulerLink
from alignedserve.proto import gateway_pb2 as gw
from alignedserve.proto import supervisor_pb2 as sv

Json = dict[str, Any]


class LiveService:
    """`view`: the last view from the supervisor."""

    def __init__(
        self,
        supervisor: SupervisorClient,
        ledger: Ledger,
        recent: RecentRequests,
        peers: GatewayPeers,
        scheduler: SchedulerLink,
        view: Callable[[], sv.ClusterView],
        model: ServedModel,
    ) -> None:
        self.feed = LiveFeed(supervisor.live)
        self._supervisor = supervisor
        self.model_name = model.name
        self.chat = model.template is not None
        self._ledger, self._recent, self._peers, self._scheduler = ledger, recent, peers, scheduler
        self._view = view
        self._prefix_cache = model.cache is not None

    def close(self) -> None:
        self.feed.close()

    async def requests(self, owner: bytes | None, *, newest: bool, most: int, since_unix_s: float) -> list[Json]:
        """Requests that are open or ended since then, of all gateways. `owner`: a key's hash; None: of all keys."""
        query = gw.RequestsQuery(
            owner=owner or b"", whosever=owner is None, newest=newest, most=most, since_unix_s=since_unix_s
        )
        found = [*requests_of(self._ledger, self._recent, query), *await self._peers.requests(query)]
        return ordered(found, newest=newest)[:most]

    async def request(self, request_id: str, owner: bytes | None) -> Json | None:
        """One request, open or ended, with its timeline and an explanation; of a call with several, all of them.

        `others` has those after the first. None if no gateway knows it.
        """
        query = gw.RequestsQuery(id=request_id, owner=owner or b"", whosever=owner is None)
        found = requests_of(self._ledger, self._recent, query)
        if all(one["refused"] for one in found):  # another gateway may have accepted it when it was sent again
            found += await self._peers.requests(query)
        if not found:
            return None
        found.sort(key=lambda one: (bool(one["refused"]), str(one["request_id"])))
        told = await self._scheduler.told([one["request_id"] for one in found])
        waits_for = await self._queue_cause() if any(map(_is_queued, told.values())) else ""
        first, *others = [self._whole(one, told.get(one["request_id"], {"stays": []}), waits_for) for one in found]
        return {**first, "others": others}

    async def _queue_cause(self) -> str:
        try:
            live = await self._supervisor.live()
        except UnavailableError:
            return ""
        return queue_cause(Samples(live.status.metrics, time.monotonic()))

    def _whole(self, request: Json, told: Json, waits_for: str) -> Json:
        """With its timeline and an explanation. `waits_for`: what queued requests wait for now."""
        view, stays = self._view(), told["stays"]
        # One that came back before it had decoded stayed in the pool, as its stopwatch sees it.
        last = [stay["decode_id"] for stay in stays if stay["joined"] and stay["epoch"] == request["epoch"]]
        if request["outcome"] == "open" and (now := told.get("open")) is not None:
            bars = open_timeline(request, now, last)
            stages: dict[str, float] = {}
            for bar in bars:
                stages[bar["stage"]] = stages.get(bar["stage"], 0.0) + bar["end_s"] - bar["begin_s"]
            where = {key: now[key] or request[key] for key in ("prefill_id", "decode_id")}
            steps = [[bar["stage"], bar["begin_s"]] for bar in bars if bar["stage"] != LOST]
            request = {**request, **where, "stages": stages, "steps": steps}
        else:
            request = with_last_stay(request, stays)
            bars = timeline(request, last)
            if bars and bars[0]["stage"] == LOST:
                request = {**request, "stages": {**request["stages"], LOST: bars[0]["end_s"]}}
        waits_for = waits_for if _is_queued(told) else ""
        words, advice = explain(Told(request, stays, view.prefill, view.decode, self._prefix_cache, waits_for))
        shown = {key: value for key, value in request.items() if key not in ("steps", "moves")}
        is_open = request["outcome"] == "open"
        return {**shown, "open": is_open, "timeline": bars, "explanation": words, "advice": advice, "stays": stays}


def _is_queued(told: Json) -> bool:
    return bool(told.get("open", {}).get("state") == "queued")
