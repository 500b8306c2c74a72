"""A whole gateway in one event loop: HTTP application, gRPC service, ledger, and links to the cluster's processes.

It does not depend on Ray: `gateway/serve/app.py` runs it in a Serve replica, `standalone.py` under uvicorn:

    server = await GatewayServer.create(settings, model_path)
    uvicorn.Config(server.asgi_app, ...)
    await server.close()
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from starlette.applications import Starlette

from alignedserve.admin import admin_key
from alignedserve.config import ModelConfig
from alignedserve.config_sources import from_tree
from alignedserve.control.integrity import check_books
from alignedserve.control.role import OPEN_GAUGE, REFUSED_GAUGE, RESUBMITTED_GAUGE
from alignedserve.control.rpc import TokenChannel
from alignedserve.control.runtime import RoleServer, RoleSettings
from alignedserve.control.samples import merge
from alignedserve.control.supervisor_client import SupervisorClient, restart_json
from alignedserve.errors import UnavailableError
from alignedserve.gateway.api_keys import ApiKeys
from alignedserve.gateway.batches.service import BatchService
from alignedserve.gateway.body.planning import CacheUse, ServedModel
from alignedserve.gateway.dialects.model_dialects import NO_DIALECTS, ModelDialects, choose_dialects
from alignedserve.gateway.drain import Drain
from alignedserve.gateway.grpc_service import InferenceService
from alignedserve.gateway.health import Health, book_entry, judge, role_entry
from alignedserve.gateway.http.http_app import build_app
from alignedserve.gateway.ledger.intake import Intake
from alignedserve.gateway.ledger.ledger import Ledger
from alignedserve.gateway.live.history import RecentRequests
from alignedserve.gateway.live.service import LiveService
from alignedserve.gateway.metric_aliases import vllm_metrics
from alignedserve.gateway.metrics import GatewayMetrics
from alignedserve.gateway.peers import GatewayPeers, PeerService
from alignedserve.gateway.pinning.board import PinBoard
from alignedserve.gateway.pinning.boundary import Beginning
from alignedserve.gateway.pinning.endings import EndingNotes
from alignedserve.gateway.pinning.keeper import PinKeeper, read_beginnings
from alignedserve.gateway.pinning.orders import CacheOrders
from alignedserve.gateway.prefix_hints import PrefixHints
from alignedserve.gateway.pulse import Pulse, ask_workers
from alignedserve.gateway.request_log import RequestLog
from alignedserve.gateway.scheduler_link import SchedulerLink
from alignedserve.gateway.spec_source import SpecSource
from alignedserve.gateway.token_sink import TokenSink
from alignedserve.gateway.tracing.start import start_tracing
from alignedserve.metrics import Page
from alignedserve.model import ModelInfo, read_config
from alignedserve.proto import gateway_pb2_grpc as gw_grpc
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.text import ChatTemplate, Tokenizer
from alignedserve.text.tokenizer import read_tokenizer_config

logger = logging.getLogger(__name__)

_LOOK_S = 0.02
_TICK_S = 1.0
_UNHEARD_S = 5.0  # the supervisor counts as silent after this; a successor is found sooner

Locate = Callable[[], Awaitable[str | None]]


def _dialects(
    folder: Path, config: ModelConfig, tokenizer: Tokenizer | None, template: ChatTemplate | None
) -> ModelDialects:
    """The formats of reasoning and tool calls: configured, or those of the model. Raises ConfigError, ModelError."""
    if tokenizer is None:
        return NO_DIALECTS
    return choose_dialects(
        config.tool_parser,
        config.reasoning_parser,
        chat_template="" if template is None else template.source,
        tokenizer=tokenizer,
        architecture=read_config(folder)["model_type"],
        response_template=read_tokenizer_config(folder).get("response_template"),
    )


class GatewayServer(RoleServer):
    """Role `gateway`. `create` makes it. `asgi_app` is the HTTP application, `inference` the public gRPC service.

    Process, event loop and log belong to the caller. The state is "ready" from the start.
    """

    role: ClassVar[str] = "gateway"

    def __init__(
        self,
        settings: RoleSettings,
        model: ServedModel,
        locate: Locate | None = None,
        beginnings: Sequence[Beginning] = (),
    ) -> None:
        """`beginnings`: of prompts, which every shard is to pin."""
        super().__init__(settings)
        self.application = ""  # of Ray Serve, by the caller
        gateway = self.config.gateway
        self.state = "ready"
        self.model = model  # its `info` is None until the first view that has it
        self.tracing = start_tracing(self.config.traces, settings.id, model)  # None: traces are off
        self.admin_key = admin_key(settings.token)  # opens the operations endpoints; derived from the cluster's token
        # For operations: status, integrity, scaling, restarts. It calls the last known address.
        self.supervisor = SupervisorClient(settings.token, lambda: self.supervisor_address)
        self._locate = locate  # as for `create`
        self._metrics = GatewayMetrics(settings.id)  # counters and histograms of its requests, since its start
        log_file = gateway.request_log
        # None: not configured.
        self._request_log = RequestLog(log_file, settings.id, self._metrics) if log_file else None
        self.ledger = Ledger(gateway.max_queue, self._metrics, self._request_log)  # its open calls and requests
        self.intake = Intake(gateway.max_queue, self._metrics)  # refuses calls early, by the scheduler's last report
        # The stream to the scheduler of the last view, opened again when it breaks.
        self.scheduler = SchedulerLink(self.process, settings.token, self.ledger, self.intake, model)
        self.ledger.attach(self.scheduler)
        self.peers = GatewayPeers(settings.id, settings.token)  # the other gateways of the last view
        self._recent = RecentRequests()  # that ended here
        self.ledger.on_ended = self._recent.note
        self.ledger.on_refused = self.intake.on_refused = self._recent.refuse
        self._hints = PrefixHints(settings.token)  # what the shards of the last view have of a prompt
        model.look_up = self._hints.add if model.cache is not None else None
        # Tells the shards how requests ended.
        self._endings = EndingNotes(self.shard_channels)
        self.ledger.on_closed = self._endings.note
        board = PinBoard(self.ledger, model, self.shard_channels, lambda: self.view)
        self.cache_orders = CacheOrders(board, model)  # the operator's, about the shards' prefix caches
        # Pins in new shards what the others and the configured file have; from `on_start` to `on_close`.
        self._keeper = PinKeeper(settings.id, board, model, lambda: self.view, beginnings)
        self._ticker: asyncio.Task[None] | None = None  # ticks the ledger every _TICK_S, from `on_start` to `on_close`
        # Begins with a view that announces the end, or with `drain`; sets the state.
        self._drain = Drain(self.ledger, self._on_drain)
        # Whether tokens are generated, for the health endpoint; sends a probe if no token is recent.
        self._pulse = Pulse(self.ledger, model, lambda: ask_workers(self.view, settings.token))
        self._model_info_text = ""  # JSON that `model.info` was read from; "" until a view has it
        self._model_known = asyncio.Event()  # set with `model.info`, for good
        self._started_unix_s = time.time()  # for the status; never changes
        # The configured file's; without a file no key is required.
        self.api_keys = ApiKeys(gateway.api_key_file, secret=settings.token)
        # For the live page and `explain`; asks other processes only while there are viewers.
        self.live_service = LiveService(
            self.supervisor,
            self.ledger,
            self._recent,
            self.peers,
            self.scheduler,
            lambda: self.view,
            model,
        )
        # Runs batches of the store in `batches.folder`; without one its endpoints refuse.
        self.batches = BatchService(
            self.config.batches, gateway, settings.id, self.ledger, self.intake, model, self._metrics
        )
        self.asgi_app: Starlette = build_app(
            gateway, self.ledger, self.intake, self, self.api_keys, self.batches, self.tracing
        )
        self.inference = InferenceService(self.ledger, self.intake, model, gateway.max_body_bytes, self.cancel_call)

    @classmethod
    async def create(cls, settings: RoleSettings, model_path: str | Path, locate: Locate | None = None) -> Self:
        """Reads the tokenizer and chat template, starts the gateway's servers, and joins the supervisor.

        `model_path` is the resolved local folder. `locate` returns the address of a restarted supervisor. Raises
        ModelError if the tokenizer or chat template cannot be read, ConfigError if `batches.folder`, the file of pinned
        prompts or the exporter of traces cannot be used.
        """
        config = from_tree(settings.config)
        tokenizer = await asyncio.to_thread(Tokenizer.from_folder, model_path)
        template = None
        if tokenizer is not None:
            override = config.model.chat_template
            template = ChatTemplate.from_folder(model_path, tokenizer.special_tokens, override)
        dialects = await asyncio.to_thread(_dialects, Path(model_path), config.model, tokenizer, template)
        model = ServedModel(
            config.served_model_name,
            tokenizer,
            template,
            root=config.model_root,
            aliases=tuple(filter(None, map(str.strip, config.model.aliases.split(",")))),
            dialects=dialects,
            engine=config.engine,
            cache=CacheUse(by_key=config.gateway.cache_isolation == "key") if config.kv_pool.prefix_cache else None,
        )
        file = config.kv_pool.pinned_prompts
        server = cls(settings, model, locate, await asyncio.to_thread(read_beginnings, file) if file else ())
        await server.batches.start()
        await server.start()
        return server

    @property
    def ended_because(self) -> str:
        """Why this gateway must be replaced; "" if it must not."""
        if self.process.id in self.view.restart.retiring:
            return "a rolling restart replaces it"
        return f"it has failed: {self.failure}" if self.failure is not None else self.end_reason

    @property
    def view(self) -> sv.ClusterView:
        """The last view from the supervisor; an empty view before the first."""
        return self.host.view if self.host is not None else sv.ClusterView()

    def shard_channels(self) -> dict[str, TokenChannel]:
        """A channel to each shard of the last view, by its id."""
        return self._hints.channels

    @property
    def supervisor_address(self) -> str:
        return self.host.supervisor_address if self.host is not None else self.settings.supervisor_address

    async def wait_model(self, timeout_s: float) -> bool:
        """Waits until the model's shape is known; whether it is, after at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._model_known.wait()
        return self.model.info is not None

    async def wait_linked(self, timeout_s: float) -> bool:
        """Waits until a request would be accepted: the model is known, and the scheduler is connected.

        Returns whether this is so, after at most `timeout_s`.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self._known_health().can_serve:  # noqa: ASYNC110  (it depends on several states)
                    await asyncio.sleep(_LOOK_S)
        return self._known_health().can_serve

    def drain(self, grace_s: float) -> None:
        """Accepts no more requests. Requests that are still open after `grace_s` end with an error."""
        self._drain.begin(grace_s)

    # ---- the role's hooks

    def servicers(self) -> Sequence[tuple[Callable[[Any, Any], None], object]]:
        return [
            (gw_grpc.add_TokenSinkServicer_to_server, TokenSink(self.ledger)),
            (gw_grpc.add_SpecSourceServicer_to_server, SpecSource(self.ledger)),
            (gw_grpc.add_GatewayPeerServicer_to_server, PeerService(self.ledger, self._recent)),
        ]

    async def on_start(self) -> None:
        self.scheduler.address = self.address
        self._ticker = asyncio.get_running_loop().create_task(self._tick())
        self._keeper.start()

    async def on_view(self, view: sv.ClusterView) -> None:
        if view.ending:
            self._drain.begin(view.grace_s, for_good=False)
        else:  # the successor of a supervisor that announced the end may keep the cluster running
            self._drain.take_back()
        if view.model_info and view.model_info != self._model_info_text:
            self._model_info_text = view.model_info
            self.model.info = ModelInfo.from_json(view.model_info)
            self._model_known.set()
            logger.info("model %s: %d positions", self.model.name, self.model.info.max_positions)
        await self.scheduler.follow_view(view)
        await self.peers.follow(view)
        await self._hints.follow(view)

    async def locate_supervisor(self) -> str | None:
        return await self._locate() if self._locate is not None else None

    def describe(self) -> sv.Heartbeat:
        self.progress += 1
        gauges = {
            OPEN_GAUGE: self.ledger.interactive,
            REFUSED_GAUGE: self._metrics.refused,
            RESUBMITTED_GAUGE: self._metrics.resubmitted,
        }
        return sv.Heartbeat(holds=self._holds(), gauges=gauges, metrics=self._own_metrics())

    async def check_integrity(self) -> list[sv.BookCheck]:
        return [check_books("calls", self.process.id, self.ledger.check_integrity)]

    async def on_close(self) -> None:
        """Releases the leases of batches, and cancels all open requests."""
        await self.batches.close()
        self._pulse.close()
        self._keeper.close()
        self._endings.close()
        self._drain.close()
        self.live_service.close()
        self.ledger.close_all()
        if self._ticker is not None:
            self._ticker.cancel()
        await self.scheduler.close()

    async def close(self) -> None:
        """Cancels all open requests and leaves the cluster."""
        await super().close()
        await self.peers.close()
        await self._hints.close()
        await self.supervisor.close()
        if self._request_log is not None:
            await asyncio.to_thread(self._request_log.close)
        if self.tracing is not None:
            await self.tracing.close()

    # ---- for the operations endpoints

    async def cancel_call(self, call_id: str, owner: bytes | None) -> bool:
        """Cancels a call by id at the gateway that has it. False if no gateway has such a call of that owner.

        `owner`: as in `Ledger.cancel_call`.
        """
        return self.ledger.cancel_call(call_id, owner) or await self.peers.cancel(call_id, owner)

    async def health(self) -> Health:
        """The cluster's health. If nothing else is missing, it also checks that tokens are generated (`Pulse`)."""
        health = self._known_health()
        return health.without(await self._pulse.missing()) if health.can_serve else health

    def _known_health(self) -> Health:
        return judge(
            self.view,
            self.config.cluster,
            joined=self.host is not None and self.host.joined,
            scheduler_up=self.scheduler.up,
            model_known=self.model.info is not None,
            draining=bool(self._drain.state),
        )

    async def metrics_text(self) -> str:
        """The metrics of all roles, this gateway's included, collected now by the supervisor.

        Without a supervisor, only this gateway's.
        """
        status = await self._status()
        text = "" if status is None else status.metrics
        if f'instance="{self.process.id}"' not in text:
            text = merge([text, self._own_metrics()])
        if self.config.gateway.metric_aliases == "vllm":
            text += vllm_metrics(text, self.model.name)
        return text

    def metrics_targets(self) -> list[dict[str, Any]]:
        """The processes that have a page of metrics of their own (`cluster.role_metrics`), with labels of each.

        Raises UnavailableError before the first view.
        """
        if not self.view.peers:
            raise UnavailableError("the processes are not known yet")
        own = {"application": self.application} if self.application else {}
        return [
            {
                "targets": [f"{peer.address.rpartition(':')[0]}:{peer.metrics_port}"],
                "labels": {**own, "role": peer.process.role, "instance": peer.process.id},
            }
            for peer in self.view.peers
            if peer.metrics_port
        ]

    async def status_json(self) -> dict[str, Any]:
        """All processes and the cluster's state, for `alignedserve status`."""
        status = await self._status()
        peers = list(self.view.peers) if status is None else list(status.peers)
        mine = (self.process.role, self.process.id)
        entries = [role_entry(peer) for peer in peers if (peer.process.role, peer.process.id) != mine]
        entries.append(role_entry(self._own_peer()))
        if status is None:
            return {"roles": entries, "state": "unknown", "degraded": ["supervisor cannot be reached"]}
        return {
            "roles": entries,
            "cluster_id": status.cluster_id,
            "state": status.state,
            "missing": list(status.missing),
            "degraded": list(status.degraded),
            "restart": restart_json(status.restart, status.peers),
            "scale": {"prefill": status.prefill, "decode": status.decode, "failure": status.scale_failure.message},
        }

    async def integrity_json(self) -> dict[str, Any]:
        """The result of recounting the state of every process. Raises UnavailableError without a supervisor."""
        try:
            report = await self.supervisor.check_integrity()
        except UnavailableError as error:
            raise UnavailableError("the supervisor cannot be reached, so no process can be checked") from error
        books = [book_entry(book) for book in report.books]
        return {"sound": not any(book["problem"] for book in books), "books": books}

    async def _status(self) -> sv.ClusterStatus | None:
        """The supervisor's present status of every process; None if the supervisor cannot be reached."""
        try:
            return await self.supervisor.status()
        except UnavailableError as error:
            logger.debug("%s", error)
            return None

    # ---- internal

    def _on_drain(self) -> None:
        self.set_state(self._drain.state or "ready")
        self.live_service.feed.set_open(not self._drain.state)
        self.batches.wake()

    def _holds(self) -> str:
        return f"{len(self.ledger)} requests"

    def _own_metrics(self) -> str:
        self._metrics.open_requests.set(self.ledger.interactive)
        if self.model.grammars is None:
            return self._metrics.text()
        page = Page(instance=self.process.id)
        self.model.grammars.meter.show_metrics(page)
        return self._metrics.text() + page.text()

    def _own_peer(self) -> sv.Peer:
        return sv.Peer(
            process=self.process,
            pid=os.getpid(),
            node_id=self.settings.node_id,
            address=self.address,
            state=self.state,
            holds=self._holds(),
            started_unix_s=self._started_unix_s,
        )

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                self.ledger.tick(self._trouble(), self._patience_s())
            except Exception:  # an error with one request must not end the ticker
                logger.exception("the ledger's tick failed")

    @property
    def _unheard_s(self) -> float:
        return 0.0 if self.host is None else self.host.unheard_s

    def _trouble(self) -> str:
        """Why there is no scheduler; "" while there is one."""
        trouble = self.scheduler.trouble
        if trouble and self._unheard_s > _UNHEARD_S:
            trouble += f"; the supervisor at {self.supervisor_address} has been silent for {self._unheard_s:.0f} s"
        return trouble

    def _patience_s(self) -> float:
        """Seconds that requests wait for a scheduler during a rolling restart; 0 without one, or if the supervisor is
        silent.
        """
        ordered = bool(self.view.restart.since_ns) and not self.view.restart.done
        heard = self._unheard_s <= _UNHEARD_S
        return self.config.supervisor.start_timeout_s if ordered and heard else 0.0
