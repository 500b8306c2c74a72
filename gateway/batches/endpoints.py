"""/v1/files and /v1/batches: OpenAI's API of files and batches. Each API key sees its own."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from alignedserve.errors import InvalidRequestError, NotFoundError, OverloadedError, TooLargeError
from alignedserve.gateway.batches.database import StoreError
from alignedserve.gateway.batches.files import INPUT, StoredFile
from alignedserve.gateway.batches.ranges import RangeError, byte_range
from alignedserve.gateway.batches.requests import MOST_BATCHES, MOST_FILES, Query, parse_batch, parse_expiry
from alignedserve.gateway.batches.service import BatchService
from alignedserve.gateway.batches.upload import FORM_BYTES, Form, file_too_large
from alignedserve.gateway.body.validation_errors import shown
from alignedserve.gateway.failures import MissingFieldError
from alignedserve.gateway.http.asgi import (
    App,
    DisconnectWatch,
    Receive,
    Scope,
    Send,
    json_app,
    parse_json,
    report,
    send_error,
    start,
)
from alignedserve.gateway.http.body_reader import BodyReader
from alignedserve.gateway.ledger.calls import caller

MOST_UPLOADS = 16  # of one gateway at the same time
_CONTENT = "application/octet-stream"


class BatchEndpoints:
    """ASGI endpoints, one method each."""

    def __init__(self, service: BatchService, bodies: BodyReader) -> None:
        self._service = service
        self._bodies = bodies
        self._uploads = 0

    def routes(self) -> list[tuple[str, str, App]]:
        """Method, path and application of each endpoint."""
        return [
            ("POST", "/v1/files", json_app(self.upload)),
            ("GET", "/v1/files", json_app(self.files)),
            ("GET", "/v1/files/{file_id}", json_app(self.file)),
            ("DELETE", "/v1/files/{file_id}", json_app(self.delete)),
            ("GET", "/v1/files/{file_id}/content", self.content),
            ("POST", "/v1/batches", json_app(self.create)),
            ("GET", "/v1/batches", json_app(self.batches)),
            ("GET", "/v1/batches/{batch_id}", json_app(self.batch)),
            ("POST", "/v1/batches/{batch_id}/cancel", json_app(self.cancel)),
        ]

    # ---- files

    async def upload(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        files = self._service.files
        self._bodies.discard_whole(scope)
        if self._uploads >= MOST_UPLOADS:
            raise OverloadedError("this gateway receives too many files now; try again later", retry_after_s=1.0)
        self._uploads += 1
        try:
            await self._service.call(files.check_room, caller.get(), _length(scope))
            file_id, path = await self._service.call(files.draft)
            try:
                return (await self._receive(scope, receive, file_id, path)).to_json()
            finally:
                await asyncio.to_thread(path.unlink, missing_ok=True)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise
            raise StoreError(f"the file cannot be stored: {error.strerror}") from error
        finally:
            self._uploads -= 1

    async def _receive(self, scope: Scope, receive: Receive, file_id: str, path: Path) -> StoredFile:
        most_bytes = self._service.config.max_file_bytes
        form = Form(scope["headers"], path, most_bytes)
        try:
            await form.receive(self._bodies.pieces(scope, receive, most_bytes + FORM_BYTES))
        except TooLargeError:
            raise file_too_large(most_bytes) from None
        purpose = form.fields.get("purpose")
        if purpose is None:
            raise MissingFieldError("purpose is required", param="purpose")
        if purpose != INPUT:
            raise InvalidRequestError(f'purpose must be "{INPUT}", got {shown(purpose)}', param="purpose")
        expires_in_s = parse_expiry(form.fields)
        add = self._service.files.add
        return await self._service.call(add, file_id, caller.get(), form.filename or "", expires_in_s)

    async def files(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        query = Query(scope)
        page, more = await self._service.call(
            self._service.files.page,
            caller.get(),
            purpose=query.text("purpose"),
            after=query.text("after"),
            limit=query.number("limit", MOST_FILES, MOST_FILES),
            newest_first=query.one_of("order", "desc", "asc") == "desc",
        )
        return _list([file.to_json() for file in page], more)

    async def file(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        return (await self._file(scope)).to_json()

    async def delete(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        file_id = scope["path_params"]["file_id"]
        await self._service.call(self._service.files.delete, file_id, caller.get())
        return {"id": file_id, "object": "file", "deleted": True}

    async def content(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {"accept-ranges": "bytes"}
        try:
            file = await self._file(scope)
            headers["content-range"] = f"bytes */{file.bytes}"  # of a refusal
            asked = byte_range(scope["headers"], file.bytes)
            begin, end = asked or (0, file.bytes)
            parts = self._parts(file, begin, end)
            first = await anext(parts, b"")
        except Exception as error:
            await send_error(send, report(error), headers if isinstance(error, RangeError) else None)
            return
        headers |= {"content-length": str(end - begin), "content-range": f"bytes {begin}-{end - 1}/{file.bytes}"}
        if asked is None:
            del headers["content-range"]
        await start(send, 200 if asked is None else 206, _CONTENT, headers)
        await send({"type": "http.response.body", "body": first, "more_body": True})
        with DisconnectWatch(receive) as watch:
            async for part in parts:
                if watch.gone:  # the server would drop the rest, after reading it
                    return
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _parts(self, file: StoredFile, begin: int, end: int) -> AsyncIterator[bytes]:
        """The bytes from `begin` to `end`."""
        files = self._service.files
        cursor, skipped, more = 0, begin, begin > 0
        while more:
            cursor, skipped, more = await self._service.call(files.skip, file, cursor, skipped)
        left = end - begin
        while left:
            try:
                part, cursor = await self._service.call(files.read, file, cursor)
            except FileNotFoundError:
                raise NotFoundError(f"file {file.id} was deleted", param="file_id") from None
            if not part:
                return
            part, skipped = part[skipped : skipped + left], 0
            left -= len(part)
            yield part

    async def _file(self, scope: Scope) -> StoredFile:
        return await self._service.call(self._service.files.get, scope["path_params"]["file_id"], caller.get())

    # ---- batches

    async def create(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        store = self._service.batches
        request = parse_batch(parse_json(await self._bodies.read(scope, receive)))
        expiry = request.output_expires_after
        batch = await self._service.call(
            store.create,
            caller.get(),
            request.endpoint,
            request.input_file_id,
            request.metadata or {},
            None if expiry is None else expiry.seconds,
        )
        self._service.wake()
        return batch

    async def batches(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        query = Query(scope)
        limit = query.number("limit", 20, MOST_BATCHES)
        page, more = await self._service.call(
            self._service.batches.page, caller.get(), after=query.text("after"), limit=limit
        )
        return _list(page, more)

    async def batch(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        return await self._service.call(self._service.batches.get, scope["path_params"]["batch_id"], caller.get())

    async def cancel(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        batch_id = scope["path_params"]["batch_id"]
        batch = await self._service.call(self._service.batches.cancel, batch_id, caller.get())
        self._service.wake()
        return batch


def _list(page: list[dict[str, Any]], more: bool) -> dict[str, Any]:
    ids = [entry["id"] for entry in page]
    first, last = (ids[0], ids[-1]) if ids else (None, None)
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": more}


def _length(scope: Scope) -> int:
    """The announced size of the body; 0 without one."""
    found = dict(scope["headers"]).get(b"content-length", b"0")
    return int(found) if found.isdigit() else 0
