"""A client for the supervisor's operator interface, and the operator's orders in JSON (`ORDERS`).

To add an order, add a method to `SupervisorClient` and an entry to `ORDERS`: every gateway then serves it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from alignedserve.control.convert import failure_from_proto
from alignedserve.control.rpc import TokenChannel, open_channel
from alignedserve.errors import InvalidRequestError, UnavailableError
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.proto import supervisor_pb2_grpc as sv_grpc

STATUS_TIMEOUT_S = 2.0
INTEGRITY_TIMEOUT_S = 15.0
ORDER_TIMEOUT_S = 10.0
MOST_INSTANCES = 1024

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Order:
    """An operator's order. `carry_out` sends the order that a JSON object describes, and returns the answer as one.

    It raises InvalidRequestError for an invalid object, and the errors of `SupervisorClient`'s methods. `request` and
    `answer` are the JSON schemas of the properties, all of which are in every answer.
    """

    summary: str
    request: Json
    answer: Json
    carry_out: Callable[[SupervisorClient, Json], Awaitable[Json]]


class SupervisorClient:
    """Calls the supervisor over its own channel, on one event loop. `where` returns the address, and is called before
    each call, since a restarted supervisor has another address.

    Every method raises UnavailableError if the supervisor cannot be reached. An order that the supervisor refuses
    raises the supervisor's error, and changes nothing.
    """

    def __init__(self, token: str, where: Callable[[], str]) -> None:
        self._token = token
        self._where = where
        self._open: tuple[str, TokenChannel] | None = None  # with its address

    async def status(self) -> sv.ClusterStatus:
        """The present status of all processes, and their metrics."""
        status: sv.ClusterStatus = await self._call("GetStatus", pb.Empty(), STATUS_TIMEOUT_S)
        return status

    async def live(self, *, config: bool = False) -> sv.LiveState:
        """What all processes said in their last heartbeats, recent events and, with `config`, the configuration."""
        live: sv.LiveState = await self._call("GetLive", sv.LiveQuery(config=config), STATUS_TIMEOUT_S)
        return live

    async def check_integrity(self) -> sv.IntegrityReport:
        """Makes every process recount its stores and state now."""
        report: sv.IntegrityReport = await self._call("CheckIntegrity", pb.Empty(), INTEGRITY_TIMEOUT_S)
        return report

    async def scale(self, prefill: int = 0, decode: int = 0) -> sv.ScaleReply:
        """Sets the number of prefill and decode instances; 0 leaves a number unchanged."""
        reply: sv.ScaleReply = await self._order("Scale", sv.ScaleRequest(prefill=prefill, decode=decode))
        return reply

    async def restart(self, roles: Sequence[str] = ()) -> sv.Restart:
        """Starts a rolling restart of these roles, or of all roles if there are none."""
        reply: sv.RestartReply = await self._order("RestartRoles", sv.RestartRequest(roles=roles))
        return reply.restart

    async def stop(self) -> sv.StopReply:
        """Drains and ends the cluster."""
        reply: sv.StopReply = await self._call("Stop", pb.Empty(), ORDER_TIMEOUT_S)
        return reply

    async def close(self) -> None:
        before, self._open = self._open, None
        if before is not None:
            await before[1].close()

    async def _order(self, method: str, request: Any) -> Any:
        reply = await self._call(method, request, ORDER_TIMEOUT_S)
        if reply.HasField("refused"):
            raise failure_from_proto(reply.refused)
        return reply

    async def _call(self, method: str, request: Any, timeout_s: float) -> Any:
        address = self._where()
        before, channel = self._open or ("", None)
        if channel is None or before != address:
            stale, channel = channel, open_channel(address, self._token)
            self._open = (address, channel)
            if stale is not None:
                await stale.close()
        try:
            return await getattr(sv_grpc.SupervisorStub(channel), method)(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise UnavailableError(f"the supervisor cannot be reached: {error.code().name}") from error


# ---- orders as JSON


def restart_json(restart: sv.Restart, peers: Iterable[sv.Peer] | None = None) -> Json:
    """The state of a rolling restart, as JSON for `alignedserve restart` and `alignedserve status`.

    `peers`: the processes that there are; None: those that there were when it was ordered.
    """
    old = {name: number for name, number in restart.old.items() if name.rpartition("-")[0] in restart.roles}
    if "supervisor" in restart.roles:
        old["supervisor"] = restart.supervisor
    there = None if peers is None else {_incarnation(peer) for peer in peers}
    left = [name for name, number in old.items() if there is None or not number or (name, number) in there]
    return {
        "since_unix_s": restart.since_ns / 1e9,
        "roles": list(restart.roles),
        "doing": restart.doing,
        "processes": len(old),
        "replaced": len(old) - len(left),
        "done": restart.done,
        "failure": restart.failure,
    }


def _incarnation(peer: sv.Peer) -> tuple[str, int]:
    """As an order of a restart names it: there is one supervisor, and its id may be any."""
    key = peer.process
    return "supervisor" if key.role == "supervisor" else key.id, key.incarnation


async def _scale(supervisor: SupervisorClient, body: Json) -> Json:
    _require_known(body, "prefill", "decode")
    counts = {role: _count(role, body.get(role)) for role in ("prefill", "decode")}
    if not any(counts.values()):
        raise InvalidRequestError("prefill or decode must be given: the new number of instances")
    reply = await supervisor.scale(**counts)
    return {"prefill": reply.prefill, "decode": reply.decode}


async def _restart(supervisor: SupervisorClient, body: Json) -> Json:
    _require_known(body, "roles")
    roles = body.get("roles") or []
    if not isinstance(roles, list) or not all(isinstance(role, str) for role in roles):
        raise InvalidRequestError("roles must be a list of names", param="roles")
    return restart_json(await supervisor.restart(roles))


async def _stop(supervisor: SupervisorClient, body: Json) -> Json:
    reply = await supervisor.stop()
    return {"grace_s": reply.grace_s, "command": {"pid": reply.command_pid, "host": reply.command_host}}


async def _config(supervisor: SupervisorClient, body: Json) -> Json:
    return {"yaml": (await supervisor.live(config=True)).config}


_STRINGS = {"type": "array", "items": {"type": "string"}}
_COUNT = {"type": "integer", "minimum": 1, "maximum": MOST_INSTANCES}
_COMMAND = {"type": "object", "properties": {"pid": {"type": "integer"}, "host": {"type": "string"}}}

ORDERS: Mapping[str, Order] = {
    "scale": Order(
        "Change the number of instances",
        {"prefill": _COUNT, "decode": _COUNT},
        {"prefill": {"type": "integer"}, "decode": {"type": "integer"}},
        _scale,
    ),
    "restart": Order(
        "Replace processes, one after the other",
        {"roles": _STRINGS},
        {
            "since_unix_s": {"type": "number"},
            "roles": _STRINGS,
            "doing": {"type": "string"},
            "processes": {"type": "integer"},
            "replaced": {"type": "integer"},
            "done": {"type": "boolean"},
            "failure": {"type": "string"},
        },
        _restart,
    ),
    "config": Order("Show the cluster's configuration", {}, {"yaml": {"type": "string"}}, _config),
    "stop": Order("Drain the cluster and end it", {}, {"grace_s": {"type": "number"}, "command": _COMMAND}, _stop),
}
"""Every order by name. The gateways serve each under /alignedserve/NAME."""


def _require_known(body: Json, *names: str) -> None:
    if unknown := sorted(body.keys() - set(names)):
        raise InvalidRequestError(f"{unknown[0][:64]!r} is not known here; known fields: {' and '.join(names)}")


def _count(role: str, value: Any) -> int:
    """The requested number of instances; 0: unchanged."""
    if value is None:
        return 0
    if type(value) is not int or not 1 <= value <= MOST_INSTANCES:
        raise InvalidRequestError(f"{role} must be a whole number between 1 and {MOST_INSTANCES}", param=role)
    return value
