"""Endpoints that change the cluster, one for each order. They require the cluster's admin key.

The key is in the cluster's record file, which only the cluster's user can read. `alignedserve scale`, `restart`, `stop`
and `cache` send it.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from alignedserve.admin import ADMIN_HEADER
from alignedserve.control.supervisor_client import Order, SupervisorClient
from alignedserve.errors import ConfigError, InvalidRequestError, RequestError
from alignedserve.gateway.failures import NotPossibleError
from alignedserve.gateway.http.asgi import (
    App,
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


class NotAdminError(RequestError):
    """The admin key is missing or wrong."""

    code = "admin_key_required"
    http_status = 403


def shows_key(scope: Scope) -> bool:
    """Whether the request has an admin key, right or wrong."""
    return any(name == ADMIN_HEADER.encode() for name, _ in scope["headers"])


def check_key(scope: Scope, admin_key: str) -> None:
    """Raises NotAdminError unless the request has the admin key."""
    given = next((value for name, value in scope["headers"] if name == ADMIN_HEADER.encode()), b"")
    if not hmac.compare_digest(given, admin_key.encode()):
        message = f"this needs the cluster's admin key in {ADMIN_HEADER}; use `alignedserve` on the cluster's machine"
        raise NotAdminError(message)


def admin_endpoints(
    supervisor: SupervisorClient, admin_key: str, orders: Mapping[str, Order], most_bytes: int = MAX_BODY_BYTES
) -> dict[str, App]:
    """The ASGI endpoint of every order, by path. An order that the cluster cannot carry out is answered with 409."""
    bodies = BodyReader(most_bytes)

    def endpoint(order: Order) -> App:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                check_key(scope, admin_key)
                body = parse_json(await bodies.read(scope, receive) or b"{}")
                if not isinstance(body, dict):
                    raise InvalidRequestError("the body must be a JSON object")
                done = await order.carry_out(supervisor, body)
            except ClientGoneError:
                return
            except ConfigError as error:
                await send_error(send, NotPossibleError(error.message))
            except Exception as error:
                await send_error(send, report(error))
            else:
                await send_json(send, done)

        return answer

    return {f"/alignedserve/{name}": endpoint(order) for name, order in orders.items()}
