"""What changes the cluster: its number of instances, a rolling restart, and its end. For who holds its admin key only.

The key lies in the cluster's record, which only its user can read; `alignedserve scale`, `restart` and `stop` send it.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Any, Protocol

from alignedserve.admin import ADMIN_HEADER
from alignedserve.errors import InvalidRequestError, RequestError
from alignedserve.gateway.http.asgi import (
    ClientGoneError,
    Receive,
    Scope,
    Send,
    parse_json,
    report,
    send_error,
    send_json,
)
from alignedserve.gateway.http.body_reader import BodyReader

MAX_BODY_BYTES = 4096
MOST_INSTANCES = 1024


class NotAdminError(RequestError):
    code = "admin_key_required"
    http_status = 403


class Administrator(Protocol):
    """What these endpoints ask of the server around them. All raise AlignedServeError where nothing was changed."""

    @property
    def admin_key(self) -> str: ...

    async def scale(self, prefill: int, decode: int) -> dict[str, Any]: ...

    async def restart(self, roles: Sequence[str]) -> dict[str, Any]: ...

    async def stop(self) -> dict[str, Any]: ...


def shows_key(scope: Scope) -> bool:
    """Whether the request has an admin key, right or wrong."""
    return any(name == ADMIN_HEADER.encode() for name, _ in scope["headers"])


def check_key(scope: Scope, admin_key: str) -> None:
    """Raises NotAdminError unless the request has the admin key."""
    given = next((value for name, value in scope["headers"] if name == ADMIN_HEADER.encode()), b"")
    if not hmac.compare_digest(given, admin_key.encode()):
        message = f"this needs the cluster's admin key in {ADMIN_HEADER}; `alignedserve` has it where the cluster runs"
        raise NotAdminError(message)


class Administration:
    """ASGI endpoints, one method each."""

    def __init__(self, administrator: Administrator) -> None:
        self._administrator = administrator
        self._bodies = BodyReader(MAX_BODY_BYTES)

    async def scale(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope, receive, send, self._scale)

    async def restart(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope, receive, send, self._restart)

    async def stop(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope, receive, send, self._stop)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, act: Any) -> None:
        try:
            check_key(scope, self._administrator.admin_key)
            body = parse_json(await self._bodies.read(scope, receive) or b"{}")
            if not isinstance(body, dict):
                raise InvalidRequestError("the body must be a JSON object")
            done = await act(body)
        except ClientGoneError:
            return
        except Exception as error:
            await send_error(send, report(error))
            return
        await send_json(send, done)

    async def _scale(self, body: dict[str, Any]) -> dict[str, Any]:
        if unknown := sorted(body.keys() - {"prefill", "decode"}):
            raise InvalidRequestError(f"{unknown[0][:64]!r} is not known here; there are prefill and decode")
        counts = {role: _count(role, body.get(role)) for role in ("prefill", "decode")}
        if not any(counts.values()):
            raise InvalidRequestError("prefill or decode must say how many instances there are to be")
        return await self._administrator.scale(**counts)

    async def _restart(self, body: dict[str, Any]) -> dict[str, Any]:
        if unknown := sorted(body.keys() - {"roles"}):
            raise InvalidRequestError(f"{unknown[0][:64]!r} is not known here; there are roles")
        roles = body.get("roles") or []
        if not isinstance(roles, list) or not all(isinstance(role, str) for role in roles):
            raise InvalidRequestError("roles must be a list of names", param="roles")
        return await self._administrator.restart(roles)

    async def _stop(self, body: dict[str, Any]) -> dict[str, Any]:
        return await self._administrator.stop()


def _count(role: str, value: Any) -> int:
    """How many instances are asked for; 0: as many as there are."""
    if value is None:
        return 0
    if type(value) is not int or not 1 <= value <= MOST_INSTANCES:
        raise InvalidRequestError(f"{role} must be a whole number between 1 and {MOST_INSTANCES}", param=role)
    return value
