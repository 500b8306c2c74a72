"""The live page's endpoints: its files, a login where there are API keys, the feed, and single requests."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from importlib import resources
from pathlib import PurePosixPath
from typing import Any, Protocol
from urllib.parse import parse_qs

import orjson

from alignedserve import __version__
from alignedserve.errors import AuthenticationError, InvalidRequestError, NotFoundError, OverloadedError
from alignedserve.gateway.api_keys import ApiKeys
from alignedserve.gateway.failures import ShuttingDownError
from alignedserve.gateway.http.admin import NotAdminError, check_key, shows_key
from alignedserve.gateway.http.asgi import (
    App,
    ClientGoneError,
    DisconnectWatch,
    Receive,
    Scope,
    Send,
    parse_json,
    report,
    send_bytes,
    send_error,
    send_json,
    start,
)
from alignedserve.gateway.http.body_reader import BodyReader
from alignedserve.gateway.ledger.calls import caller
from alignedserve.gateway.live.feed import MOST_VIEWERS, LiveFeed
from alignedserve.gateway.live.sessions import LASTS_S

MOST_LOGIN_BYTES = 8192
MOST_OF_ONE_KEY = 16  # viewers, so that no key keeps others from looking
SLOWEST_SINCE_S = 300.0
SLOWEST = 10
SLOWEST_EVERY_S = 3.0
MOST_LISTED = 200
STATIC = "alignedserve.gateway.live"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_SECURE = {
    "content-security-policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

Json = dict[str, Any]
OwnersApp = Callable[[Scope, Receive, Send, bytes | None], Awaitable[None]]


class Source(Protocol):
    """What the endpoints need of the gateway's server."""

    feed: LiveFeed
    model_name: str
    chat: bool  # the model has a chat template

    async def requests(self, owner: bytes | None, *, newest: bool, most: int, since_unix_s: float) -> list[Json]: ...

    async def request(self, request_id: str, owner: bytes | None) -> Json | None: ...


class LiveEndpoints:
    """`open_ones`: by path, without an API key; `guarded_ones` need one where there are keys.

    Who has the cluster's admin key, too, sees the requests of all API keys.
    """

    def __init__(self, source: Source, keys: ApiKeys, admin_key: str) -> None:
        self._source = source
        self._keys = keys
        self._admin_key = admin_key
        self._viewers: Counter[bytes | None] = Counter()  # of the feed, by owner
        self._bodies = BodyReader(MOST_LOGIN_BYTES)
        self._files = _static_files()

    def open_gets(self) -> Mapping[str, App]:
        pages = dict.fromkeys(("/", "/dashboard", "/dashboard/"), self.page)
        return {**pages, "/dashboard/static/{name:path}": self.file}

    def open_posts(self) -> Mapping[str, App]:
        return {"/dashboard/login": self.login, "/dashboard/logout": self.logout}

    def guarded_gets(self) -> Mapping[str, App]:
        return {
            "/dashboard/feed": self._for_owner(self.feed),
            "/dashboard/requests": self._for_owner(self.list_requests),
            "/dashboard/requests/{request_id:path}": self._for_owner(self.one_request),
        }

    # ---- files

    async def page(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The page; without a session, where keys are needed, a form that asks for a key."""
        await self._send_file(scope, send, "index.html" if self._may_look(scope) else "login.html")

    async def file(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path_params"]["name"]
        if name not in self._files or name.endswith(".html"):
            await send_error(send, NotFoundError(f"/dashboard/static/{name[:100]} does not exist"))
            return
        await self._send_file(scope, send, name)

    async def _send_file(self, scope: Scope, send: Send, name: str) -> None:
        kind = _TYPES.get(PurePosixPath(name).suffix, "text/plain")
        content = self._files[name]
        if kind == "text/html":  # a browser resolves links by the page's own path, which may be / or /dashboard
            content = content.replace(b"{{root}}", scope.get("root_path", "").rstrip("/").encode())
        await send_bytes(send, content, f"{kind}; charset=utf-8", headers=_SECURE)

    # ---- sessions

    def _may_look(self, scope: Scope) -> bool:
        try:
            self._keys.identify(scope["headers"], scope["method"])
        except AuthenticationError:
            return False
        return True

    async def login(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = parse_json(await self._bodies.read(scope, receive) or b"{}")
            key = body.get("api_key") if isinstance(body, dict) else None
            if not isinstance(key, str):
                raise InvalidRequestError("api_key must be a string", param="api_key")
            value = self._keys.begin_session(key)
        except ClientGoneError:
            return
        except Exception as error:
            await send_error(send, report(error))
            return
        await _set_cookie(scope, send, self._keys.cookie, value, int(LASTS_S))

    async def logout(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _set_cookie(scope, send, self._keys.cookie, "", 0)

    # ---- data

    def _for_owner(self, answer: OwnersApp) -> App:
        """`answer`, told whose requests may be shown: those of the caller's API key; None: of all, without keys or with
        the admin key.
        """

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            owner = caller.get() if self._keys.wanted else None
            if shows_key(scope):
                try:
                    check_key(scope, self._admin_key)
                except NotAdminError as error:
                    await send_error(send, error)
                    return
                owner = None
            await answer(scope, receive, send, owner)

        return app

    async def feed(self, scope: Scope, receive: Receive, send: Send, owner: bytes | None) -> None:
        """Server-sent events: `state` each second."""
        if not self._source.feed.open:
            await send_error(send, ShuttingDownError("this gateway is shutting down"))
            return
        if self._viewers.total() >= MOST_VIEWERS or (owner is not None and self._viewers[owner] >= MOST_OF_ONE_KEY):
            most = f"{MOST_VIEWERS} viewers, of one API key {MOST_OF_ONE_KEY}"
            await send_error(send, OverloadedError(f"too many look already: at most {most}", retry_after_s=10.0))
            return
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        self._viewers[owner] += 1
        try:
            with DisconnectWatch(receive) as watch, contextlib.suppress(ClientGoneError):
                await start(send, 200, "text/event-stream; charset=utf-8", headers)
                await watch.unless_gone(self._send_states(scope, send, owner))
        finally:
            self._viewers -= Counter([owner])

    async def _send_states(self, scope: Scope, send: Send, owner: bytes | None) -> None:
        """Ends when the viewer's API key or session does. Only the first state waits for other gateways' requests."""
        source = self._source
        about = {"version": __version__, "model": source.model_name, "chat": source.chat}
        slowest, asked_s = await self._slowest(owner), time.monotonic()
        asking: asyncio.Task[list[Json]] | None = None
        try:
            async with contextlib.aclosing(source.feed.states()) as states:
                async for state in states:
                    if asking is not None and asking.done():
                        slowest, asking = asking.result(), None
                    now_s = time.monotonic()
                    if now_s - asked_s >= SLOWEST_EVERY_S:
                        if not self._may_look(scope):
                            break
                        asked_s = now_s
                        asking = asking or asyncio.create_task(self._slowest(owner))
                    event = b"event: state\ndata: " + orjson.dumps({**about, **state, "slowest": slowest}) + b"\n\n"
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        finally:
            if asking is not None and not asking.cancel():
                asking.exception()  # else asyncio logs that no one has asked for it
        await send({"type": "http.response.body", "body": b""})

    async def _slowest(self, owner: bytes | None) -> list[Json]:
        since_s = time.time() - SLOWEST_SINCE_S
        return await self._source.requests(owner, newest=False, most=SLOWEST, since_unix_s=since_s)

    async def list_requests(self, scope: Scope, receive: Receive, send: Send, owner: bytes | None) -> None:
        query = parse_qs(scope["query_string"].decode("latin-1"))
        if wanted := query.get("id", [""])[-1]:  # no 404: a browser's console would complain of it
            one = await self._source.request(wanted, owner)
            await send_json(send, {"requests": [one] if one else []}, headers={"cache-control": "no-store"})
            return
        order, most = query.get("sort", ["slowest"])[-1], query.get("most", ["50"])[-1]
        if order not in ("slowest", "newest") or not most.isdecimal() or not 1 <= int(most) <= MOST_LISTED:
            message = f"sort must be slowest or newest, and most a number from 1 to {MOST_LISTED}"
            await send_error(send, InvalidRequestError(message))
            return
        found = await self._source.requests(owner, newest=order == "newest", most=int(most), since_unix_s=0.0)
        await send_json(send, {"requests": found}, headers={"cache-control": "no-store"})

    async def one_request(self, scope: Scope, receive: Receive, send: Send, owner: bytes | None) -> None:
        request_id = scope["path_params"]["request_id"]
        found = await self._source.request(request_id, owner)
        if found is None:
            message = f"request {request_id[:200]!r} is not open, and not among those that ended of late"
            await send_error(send, NotFoundError(message))
            return
        await send_json(send, found, headers={"cache-control": "no-store"})


def _static_files() -> dict[str, bytes]:
    """Every file of the page, by its path below the folder."""
    found: dict[str, bytes] = {}
    folders = [("", resources.files(STATIC) / "static")]
    while folders:
        prefix, folder = folders.pop()
        for item in folder.iterdir():
            if item.is_dir():
                folders.append((f"{prefix}{item.name}/", item))
            else:
                found[prefix + item.name] = item.read_bytes()
    return found


async def _set_cookie(scope: Scope, send: Send, name: str, value: str, lasts_s: int) -> None:
    proxied = (b"x-forwarded-proto", b"https") in scope["headers"]  # by a proxy with TLS in front
    secure = "; Secure" if proxied or scope.get("scheme") == "https" else ""
    cookie = f"{name}={value}; Path=/; Max-Age={lasts_s}; HttpOnly; SameSite=Strict{secure}"
    headers = {"set-cookie": cookie, "cache-control": "no-store"}
    pairs = [(name.encode(), text.encode("latin-1")) for name, text in headers.items()]
    await send({"type": "http.response.start", "status": 204, "headers": pairs})
    await send({"type": "http.response.body", "body": b""})
