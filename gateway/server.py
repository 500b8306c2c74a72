"""A whole gateway in one event loop: HTTP application, gRPC service, ledger, and its links into the cluster.

It knows nothing of Ray: `gateway/serve/app.py` runs it in a Serve replica, `standalone.py` under uvicorn:

    server = await GatewayServer.create(config, model_path, process, supervisor_address, token)
    uvicorn.Config(server.asgi_app, ...)
    await server.close()
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from starlette.applications import Starlette

from alignedserve import logs
from alignedserve.config import Config
from alignedserve.control.role import OPEN_GAUGE
from alignedserve.control.samples import merge
from alignedserve.errors import ConfigError, UnavailableError
from alignedserve.gateway.api_keys import ApiKeys
from alignedserve.gateway.backend import Backend, Locate
from alignedserve.gateway.body.planning import ServedModel
from alignedserve.gateway.drain import Drain
from alignedserve.gateway.failures import NotPossibleError
from alignedserve.gateway.grpc_service import InferenceService
from alignedserve.gateway.health import Health, book_entry, judge, restart_entry, role_entry
from alignedserve.gateway.http.http_app import build_app
from alignedserve.gateway.ledger.intake import Intake
from alignedserve.gateway.ledger.ledger import Ledger
from alignedserve.gateway.metrics import GatewayMetrics
from alignedserve.gateway.pulse import Pulse
from alignedserve.gateway.request_log import RequestLog
from alignedserve.model import ModelInfo
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.text import ChatTemplate, Tokenizer

logger = logging.getLogger(__name__)

_LOOK_S = 0.02


class GatewayServer:
    """Built by `create`, on the event loop that it is to run in. `asgi_app` is the HTTP application, `inference` the
    public gRPC service's methods.
    """

    def __init__(
        self,
        config: Config,
        model: ServedModel,
        backend: Backend,
        ledger: Ledger,
        intake: Intake,
        metrics: GatewayMetrics,
        request_log: RequestLog | None = None,
    ) -> None:
        self.config = config
        self.model = model
        self.backend = backend
        self.ledger = ledger
        self.intake = intake
        self._metrics = metrics
        self._request_log = request_log
        self._drain = Drain(ledger, backend.report)
        self._pulse = Pulse(ledger, model, backend.ask_workers)
        self._progress = 0
        self._model_info_text = ""
        self._model_known = asyncio.Event()
        self._started_unix_s = time.time()
        self._node_id = ""
        self.api_keys = ApiKeys(config.gateway.api_key_file)
        self.asgi_app: Starlette = build_app(config.gateway, ledger, intake, self, self.api_keys)
        self.inference = InferenceService(ledger, intake, model, config.gateway.max_body_bytes, backend.cancel_call)

    @classmethod
    async def create(
        cls,
        config: Config,
        model_path: str | Path,
        process: pb.ProcessKey,
        supervisor_address: str,
        token: str,
        *,
        node_id: str = "",
        host: str = "127.0.0.1",
        locate: Locate | None = None,
    ) -> Self:
        """Read the model's texts, serve token events, join the supervisor.

        `model_path` is the resolved local folder. `host` is the address of the own gRPC server, `locate` finds a
        supervisor that was restarted. Raises ModelError where tokenizer or chat template cannot be read.
        """
        tokenizer = await asyncio.to_thread(Tokenizer.from_folder, model_path)
        template = None
        if tokenizer is not None:
            override = config.model.chat_template
            template = ChatTemplate.from_folder(model_path, tokenizer.special_tokens, override)
        model = ServedModel(config.served_model_name, tokenizer, template)
        metrics = GatewayMetrics(process.id)
        log_file = config.gateway.request_log
        request_log = RequestLog(log_file, process.id, metrics) if log_file else None
        ledger = Ledger(config.gateway.max_queue, metrics, request_log)
        intake = Intake(config.gateway.max_queue, metrics)
        backend = Backend(process, supervisor_address, token, ledger, intake, model, host=host, locate=locate)
        server = cls(config, model, backend, ledger, intake, metrics, request_log)
        server._node_id = node_id
        await backend.start(
            server._heartbeat,
            server._on_view,
            node_id=node_id,
            heartbeat_s=config.supervisor.heartbeat_s,
            orphan_after_s=config.supervisor.orphan_after_s,
            start_timeout_s=config.supervisor.start_timeout_s,
        )
        return server

    @property
    def process(self) -> pb.ProcessKey:
        return self.backend.process

    @property
    def state(self) -> str:
        """ "ready", "draining" or "drained"."""
        return self._drain.state or "ready"

    @property
    def ended_because(self) -> str:
        """Why this gateway should be replaced; "" while it should not."""
        if self.process.id in self.backend.view.restart.retiring:
            return "a rolling restart replaces it"
        return self.backend.ended_because

    async def wait_model(self, timeout_s: float) -> bool:
        """True once the model's shape is known and requests can be taken."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._model_known.wait()
        return self.model.info is not None

    async def wait_linked(self, timeout_s: float) -> bool:
        """True once a request would be taken: the model is known, and the scheduler reached."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self._known_health().can_serve:  # noqa: ASYNC110  (several things tell it)
                    await asyncio.sleep(_LOOK_S)
        return self._known_health().can_serve

    def drain(self, grace_s: float) -> None:
        """Take no more requests; those that are open after `grace_s` end with an error."""
        self._drain.begin(grace_s)

    async def close(self) -> None:
        """Cancel what is open and leave the cluster."""
        self._pulse.close()
        self._drain.close()
        self.ledger.close_all()
        await self.backend.close()
        if self._request_log is not None:
            await asyncio.to_thread(self._request_log.close)

    # ---- what the operations' endpoints ask

    async def cancel_call(self, call_id: str, owner: bytes | None) -> bool:
        return await self.backend.cancel_call(call_id, owner)

    async def health(self) -> Health:
        """Asks for a token, where none was made lately and nothing is known to be in its way."""
        health = self._known_health()
        return health.without(await self._pulse.missing()) if health.can_serve else health

    def _known_health(self) -> Health:
        return judge(
            self.backend.view,
            self.config.cluster,
            joined=self.backend.joined,
            scheduler_up=self.backend.scheduler_up,
            model_known=self.model.info is not None,
            draining=bool(self._drain.state),
        )

    async def metrics_text(self) -> str:
        """Every role's metrics, taken now by the supervisor (this gateway's among them); its own without one."""
        status = await self.backend.status()
        text = "" if status is None else status.metrics
        return text if f'instance="{self.process.id}"' in text else merge([text, self._own_metrics()])

    async def status_json(self) -> dict[str, Any]:
        status = await self.backend.status()
        peers = list(self.backend.view.peers) if status is None else list(status.peers)
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
            "restart": restart_entry(status.restart),
            "scale": {"prefill": status.prefill, "decode": status.decode, "failure": status.scale_failure.message},
        }

    async def integrity_json(self) -> dict[str, Any]:
        """What every process finds when it recounts its books. Raises UnavailableError without a supervisor."""
        report = await self.backend.check_integrity()
        if report is None:
            raise UnavailableError("the supervisor cannot be reached: nobody can be asked")
        books = [book_entry(book) for book in report.books]
        return {"sound": not any(book["problem"] for book in books), "books": books}

    # ---- what its administrators ask

    @property
    def admin_key(self) -> str:
        return self.backend.admin_key

    async def scale(self, prefill: int, decode: int) -> dict[str, Any]:
        """Raises NotPossibleError where the machine has no room for it, UnavailableError."""
        try:
            reply = await self.backend.scale(prefill, decode)
        except ConfigError as error:
            raise NotPossibleError(error.message) from error
        return {"prefill": reply.prefill, "decode": reply.decode}

    async def restart(self, roles: Sequence[str]) -> dict[str, Any]:
        """Raises NotPossibleError for what is no role, UnavailableError."""
        try:
            return restart_entry(await self.backend.restart(roles))
        except ConfigError as error:
            raise NotPossibleError(error.message) from error

    async def stop(self) -> dict[str, Any]:
        reply = await self.backend.stop()
        return {"grace_s": reply.grace_s, "command": {"pid": reply.command_pid, "host": reply.command_host}}

    # ---- the supervisor's side

    def _heartbeat(self) -> sv.Heartbeat:
        self._progress += 1
        return sv.Heartbeat(
            state=self.state,
            progress=self._progress,
            holds=self._holds(),
            gauges={OPEN_GAUGE: len(self.ledger)},
            metrics=self._own_metrics(),
            alarms=filter(None, (logs.alarm(),)),
        )

    def _holds(self) -> str:
        return f"{len(self.ledger)} requests"

    def _own_metrics(self) -> str:
        self._metrics.open_requests.set(len(self.ledger))
        return self._metrics.text()

    def _own_peer(self) -> sv.Peer:
        return sv.Peer(
            process=self.process,
            pid=os.getpid(),
            node_id=self._node_id,
            address=self.backend.address,
            state=self.state,
            holds=self._holds(),
            started_unix_s=self._started_unix_s,
        )

    def _on_view(self, view: sv.ClusterView) -> None:
        if view.ending:
            self._drain.begin(view.grace_s, for_good=False)
        else:  # a supervisor that announced the end may have a successor that goes on
            self._drain.take_back()
        if view.model_info and view.model_info != self._model_info_text:
            self._model_info_text = view.model_info
            self.model.info = ModelInfo.from_json(view.model_info)
            self._model_known.set()
            logger.info("model %s: %d positions", self.model.name, self.model.info.max_positions)
