"""What every role's process answers (proto/supervisor.proto, service Role), answered by a gateway."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from alignedserve.control.integrity import check_books
from alignedserve.gateway.ledger.ledger import Ledger
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.proto import supervisor_pb2_grpc as sv_grpc


class GatewayRole(sv_grpc.RoleServicer):
    def __init__(self, gateway_id: str, ledger: Ledger, heartbeat: Callable[[], sv.Heartbeat]) -> None:
        self._gateway_id = gateway_id
        self._ledger = ledger
        self._heartbeat = heartbeat

    async def Describe(self, request: pb.Empty, context: grpc.aio.ServicerContext[Any, Any]) -> sv.Heartbeat:
        return self._heartbeat()

    async def CheckIntegrity(
        self, request: pb.Empty, context: grpc.aio.ServicerContext[Any, Any]
    ) -> sv.IntegrityReport:
        return sv.IntegrityReport(books=[check_books("calls", self._gateway_id, self._ledger.check_integrity)])
