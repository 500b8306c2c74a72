"""The gateway's HTTP application without a cluster, for tests of which requests it accepts and submits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx

from alignedserve.config import BatchesConfig, GatewayConfig
from alignedserve.control.convert import key_from_proto
from alignedserve.control.supervisor_client import SupervisorClient
from alignedserve.gateway.api_keys import ApiKeys
from alignedserve.gateway.batches.service import BatchService
from alignedserve.gateway.body.planning import ServedModel
from alignedserve.gateway.http.http_app import build_app
from alignedserve.gateway.ledger.intake import Intake
from alignedserve.gateway.ledger.ledger import Ledger
from alignedserve.gateway.metrics import GatewayMetrics
from alignedserve.gateway.pinning.board import PinBoard
from alignedserve.gateway.pinning.orders import CacheOrders
from alignedserve.model import resolve_model
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.request import RequestKey, RequestSpec
from alignedserve.text import ChatTemplate, Tokenizer
from support.fake_cluster import fake_model_info

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
TINY = resolve_model("tiny")


class RecordingPort:
    """Takes every submission, reads it as a prefill instance would, and does not answer."""

    gateway_id = "gateway-0"
    address = "127.0.0.1:1"
    down_for_s = 0.0

    def __init__(self, ledger: Ledger) -> None:
        self.heads: list[pb.RequestHead] = []
        self.submitted: list[RequestSpec] = []
        self._ledger = ledger

    def submit(self, requests: Sequence[pb.RequestHead], specs: bytes) -> bool:
        self.heads += requests
        keys = [key_from_proto(head.key) for head in requests]
        asyncio.get_running_loop().call_soon(lambda: self.submitted.extend(self._ledger.specs(keys)))
        return True

    def cancel(self, keys: Sequence[RequestKey]) -> bool:
        return True

    def ask(self, keys: Sequence[RequestKey]) -> bool:
        return True


class Front:
    """The HTTP application without a cluster."""

    def __init__(self, **model: Any) -> None:
        tokenizer = Tokenizer.from_folder(TINY)
        assert tokenizer is not None
        template = ChatTemplate.from_folder(TINY, tokenizer.special_tokens)
        values: dict[str, Any] = {"tokenizer": tokenizer, "template": template, "info": fake_model_info(), **model}
        self.model = ServedModel("tiny", **values)
        self.supervisor, self.admin_key = SupervisorClient("", lambda: "127.0.0.1:1"), "admin"
        metrics = GatewayMetrics("gateway-0")
        self.ledger = Ledger(64, metrics)
        self.port = RecordingPort(self.ledger)
        self.intake = Intake(64, metrics)
        self.ledger.attach(self.port)
        self.cache_orders = CacheOrders(PinBoard(self.ledger, self.model, dict, sv.ClusterView), self.model)
        config = GatewayConfig(max_body_mib=0.25, max_prompts=8, dashboard=False)
        off = BatchService(BatchesConfig(), config, "gateway-0", self.ledger, self.intake, self.model, metrics)
        app = build_app(config, self.ledger, self.intake, self, ApiKeys(), off)  # type: ignore[arg-type]
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=5.0)

    async def error(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await self.client.post(path, content=content, headers={"content-type": "application/json"})
        assert answer.status_code == status, answer.text
        assert answer.headers["content-type"] == "application/json"
        error: dict[str, Any] = answer.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert len(error["message"]) < 400
        assert not self.port.submitted, "a refused request reached the cluster"
        assert len(self.ledger) == 0
        return error

    async def submit(self, path: str, body: dict[str, Any]) -> list[RequestSpec]:
        """The submission that reaches the cluster. No worker answers, so the request times out."""
        await self.client.post(path, json={**body, "timeout_s": 0.01})
        submitted, self.port.submitted = self.port.submitted, []
        assert submitted
        return submitted
