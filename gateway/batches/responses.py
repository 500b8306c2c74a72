"""Stored answers of /v1/responses. Each has its whole conversation, so it needs no earlier one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from alignedserve.errors import AccountingError, InvalidRequestError, NotFoundError
from alignedserve.gateway.batches.database import Database, in_list
from alignedserve.gateway.ledger.calls import RESPONSE

Item = dict[str, Any]
OVERHEAD_BYTES = 512  # that a response counts for beside its text, so that the limit also bounds their number
MOST_AT_ONCE = 256  # rows in one statement


class PreviousResponseError(InvalidRequestError):
    """The response that a request goes on from is not stored, or not for this API key."""

    code = "previous_response_not_found"


class ItemNotFoundError(InvalidRequestError):
    """An item that the input names by its id is not stored, or not for this API key."""

    code = "item_not_found"


class ResponseStore:
    """`most_bytes`: of all responses of one owner; the oldest give way. `keep_s`: seconds until a response is deleted.

    All methods are single transactions.
    """

    def __init__(self, database: Database, most_bytes: int, keep_s: float) -> None:
        self._db = database
        self._most_bytes = most_bytes
        self._keep_s = int(keep_s)

    def put(self, owner: bytes, response: dict[str, Any], items: Sequence[Item]) -> None:
        """Stores a response, and the items of its conversation up to it."""
        body, asked = orjson.dumps(response), orjson.dumps(items)
        size = len(body) + len(asked) + OVERHEAD_BYTES
        with self._db.transaction():
            self._db.write(
                "INSERT INTO responses (id, owner, bytes, expires_s, body, input) VALUES (?,?,?,?,?,?)",
                *(response["id"], owner, size, int(self._db.clock()) + self._keep_s, body, asked),
            )
            self._charge(owner, size)
            over = self._used(owner) - self._most_bytes
            while over > 0:
                over -= self._remove_oldest(owner, over)

    def get(self, response_id: str, owner: bytes) -> dict[str, Any]:
        """The response. Raises NotFoundError, also for another owner's and for one that has expired."""
        found: dict[str, Any] = orjson.loads(self._column("body", response_id, owner))
        return found

    def input_items(self, response_id: str, owner: bytes) -> list[Item]:
        """The items of the conversation up to the response, oldest first. Raises NotFoundError."""
        found: list[Item] = orjson.loads(self._column("input", response_id, owner))
        return found

    def conversation(self, response_id: str, owner: bytes) -> list[Item]:
        """The items up to and with the response. Raises PreviousResponseError."""
        try:
            return [*self.input_items(response_id, owner), *self.get(response_id, owner)["output"]]
        except NotFoundError as error:
            raise PreviousResponseError(error.message, param="previous_response_id") from None

    def items(self, ids: Iterable[str], owner: bytes) -> dict[str, Item]:
        """Items of stored responses' outputs, by their ids. Raises ItemNotFoundError."""
        found: dict[str, Item] = {}
        for named in ids:
            if named not in found:
                with contextlib.suppress(NotFoundError):
                    found |= {item["id"]: item for item in self.get(response_of(named), owner)["output"]}
            if named not in found:
                raise ItemNotFoundError(f"no item {named[:100]!r} is stored", param="input")
        return found

    def delete(self, response_id: str, owner: bytes) -> None:
        """Raises NotFoundError. Responses that go on from it have its items too, and stay."""
        with self._db.transaction():
            row = self._db.row("SELECT number, bytes FROM responses WHERE id = ? AND owner = ?", response_id, owner)
            if row is None:
                raise _not_found(response_id)
            self._remove(owner, [row])

    def sweep(self) -> bool:
        """Deletes responses that have expired, at most MOST_AT_ONCE. Returns whether there may be more."""
        query = "SELECT number, owner, bytes FROM responses WHERE expires_s <= ? LIMIT ?"
        if self._db.row(query, self._db.clock(), 1) is None:  # most often: no write lock is needed to see it
            return False
        with self._db.transaction():
            rows = self._db.rows(query, self._db.clock(), MOST_AT_ONCE)
            for owner in {row["owner"] for row in rows}:
                self._remove(owner, [row for row in rows if row["owner"] == owner])
        return len(rows) == MOST_AT_ONCE

    def check_integrity(self) -> None:
        """Raises AccountingError if an owner's size differs from that of its responses."""
        counted = {row["owner"]: row["bytes"] for row in self._db.rows("SELECT * FROM response_sizes WHERE bytes > 0")}
        query = "SELECT owner, sum(length(body) + length(input) + ?) AS bytes FROM responses GROUP BY owner"
        if counted != (found := {row["owner"]: row["bytes"] for row in self._db.rows(query, OVERHEAD_BYTES)}):
            raise AccountingError(f"stored responses have {found} bytes; {counted} are counted")

    # ---- internal

    def _column(self, name: str, response_id: str, owner: bytes) -> bytes:
        query = f"SELECT {name} FROM responses WHERE id = ? AND owner = ? AND expires_s > ?"
        row = self._db.row(query, response_id, owner, self._db.clock())
        if row is None:
            raise _not_found(response_id)
        found: bytes = row[name]
        return found

    def _used(self, owner: bytes) -> int:
        row = self._db.row("SELECT bytes FROM response_sizes WHERE owner = ?", owner)
        return 0 if row is None else int(row["bytes"])

    def _charge(self, owner: bytes, more: int) -> None:
        self._db.write(
            """INSERT INTO response_sizes (owner, bytes) VALUES (?, ?)
            ON CONFLICT (owner) DO UPDATE SET bytes = bytes + excluded.bytes""",
            *(owner, more),
        )

    def _remove_oldest(self, owner: bytes, wanted: int) -> int:
        """Deletes an owner's oldest responses, until `wanted` bytes are free. Returns how many bytes are."""
        query = "SELECT number, bytes FROM responses WHERE owner = ? ORDER BY number LIMIT ?"
        oldest, free = [], 0
        for row in self._db.rows(query, owner, MOST_AT_ONCE):
            oldest.append(row)
            free += row["bytes"]
            if free >= wanted:
                break
        self._remove(owner, oldest)
        return free

    def _remove(self, owner: bytes, rows: Sequence[Any]) -> None:
        numbers = [row["number"] for row in rows]
        self._db.write(f"DELETE FROM responses WHERE number IN ({in_list(numbers)})", *numbers)
        self._charge(owner, -sum(row["bytes"] for row in rows))


def item_id(kind: str, response_id: str, index: int) -> str:
    """The id of an item of a response's output, which names the response, too."""
    return f"{kind}_{response_id.removeprefix(RESPONSE)}_{index}"


def response_of(item: str) -> str:
    """The id of the response that an item is of, if `item_id` made its id."""
    return f"{RESPONSE}{item.partition('_')[2].rpartition('_')[0]}"


def _not_found(response_id: str) -> NotFoundError:
    return NotFoundError(f"no response {response_id[:100]!r} exists", param="response_id")
