"""Batches in the database: their states, the lease of the gateway that runs each, and the answers of their lines.

A gateway runs a batch while it holds the batch's lease. Each new lease has a new epoch, and every write of a runner
names its epoch, so a runner whose lease was taken over changes nothing any more. An answer and the counts of its batch
are written together, and a line's key is unique: no line has two answers.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import orjson

from alignedserve.errors import AccountingError, InvalidRequestError, NotFoundError, StaleError
from alignedserve.gateway.batches.database import LINE_BITS, Database, in_list
from alignedserve.gateway.batches.files import INPUT, OUTPUT, FileStore
from alignedserve.gateway.batches.states import OPEN, BatchStatus, check_move
from alignedserve.gateway.failures import NotPossibleError

WINDOW, WINDOW_S = "24h", 86400
_LINES = 1 << LINE_BITS
_FREED_PAGES = 2000  # given back to the disk in one sweep


@dataclass(frozen=True, slots=True)
class Claim:
    """The lease of a batch. `overdue`: its completion window has passed. `total`: lines; None before validation."""

    number: int
    id: str
    epoch: int
    owner: bytes
    endpoint: str
    input_id: str
    status: BatchStatus
    overdue: bool
    total: int | None

    @classmethod
    def of(cls, row: sqlite3.Row) -> Claim:
        values = {name: row[name] for name in cls.__dataclass_fields__}
        return cls(**{**values, "status": BatchStatus(row["status"]), "overdue": bool(row["overdue"])})


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """The answer of one line. `row`: a line of the output file, or if `failed` of the errors file, without its end."""

    index: int
    failed: bool
    row: bytes


class BatchStore:
    """All methods are single transactions. Those that take a claim raise StaleError once its lease was taken over."""

    def __init__(self, database: Database, files: FileStore) -> None:
        self._db = database
        self._files = files

    # ---- for clients

    def create(
        self, owner: bytes, endpoint: str, input_id: str, metadata: Mapping[str, str], keep_s: int | None = None
    ) -> dict[str, Any]:
        """A new batch over a file of the owner. `keep_s`: seconds that its answers are kept.

        Raises NotFoundError, InvalidRequestError for a file that is not for batches, QuotaError.
        """
        batch_id, now_s = f"batch_{uuid4().hex}", int(self._db.clock())
        with self._db.transaction():
            if self._files.get(input_id, owner, "input_file_id").purpose != INPUT:
                raise InvalidRequestError(f"file {input_id} is the output of a batch", param="input_file_id")
            self._files.check_room(owner)
            self._db.write(
                """INSERT INTO batches (id, owner, endpoint, input_id, metadata, status, expires_s, keep_s, created_s)
                VALUES (?,?,?,?,?,?,?,?,?)""",
                *(batch_id, owner, endpoint, input_id, orjson.dumps(metadata).decode(), BatchStatus.VALIDATING),
                *(now_s + WINDOW_S, min(self._files.keep_s, keep_s or self._files.keep_s), now_s),
            )
        return self.get(batch_id, owner)

    def get(self, batch_id: str, owner: bytes) -> dict[str, Any]:
        """OpenAI's batch object. Raises NotFoundError, also for another owner's batch."""
        return to_json(self._row(batch_id, owner))

    def page(self, owner: bytes, *, after: str = "", limit: int = 20) -> tuple[list[dict[str, Any]], bool]:
        """At most `limit` batches after the one with the id `after`, newest first, and whether there are more."""
        before = self._row(after, owner, "after")["number"] if after else _LINES
        query = "SELECT * FROM batches WHERE owner = ? AND number < ? ORDER BY number DESC LIMIT ?"
        found = [to_json(row) for row in self._db.rows(query, owner, before, limit + 1)]
        return found[:limit], len(found) > limit

    def cancel(self, batch_id: str, owner: bytes) -> dict[str, Any]:
        """Begins to cancel a batch; no effect while it is being cancelled. Raises NotFoundError, NotPossibleError."""
        with self._db.transaction():
            row = self._row(batch_id, owner)
            status = BatchStatus(row["status"])
            if status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
                self._move(row, BatchStatus.CANCELLING)
            elif status not in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
                raise NotPossibleError(f"batch {batch_id} is {status} and cannot be cancelled", param="batch_id")
        return self.get(batch_id, owner)

    # ---- leases

    def claim(self, holder: str, lease_s: float) -> Claim | None:
        """A batch that no gateway runs, for `lease_s` seconds; None if there is none.

        Owners with the fewest running batches come first, then the oldest batch.
        """
        now_s = self._db.clock()
        query = f"""SELECT batches.*, coalesce(leased.count, 0) AS running FROM batches LEFT JOIN (
                SELECT owner, count(*) AS count FROM batches WHERE lease_s > ? AND status IN ({in_list(OPEN)})
                GROUP BY owner) AS leased ON leased.owner = batches.owner
            WHERE status IN ({in_list(OPEN)}) AND lease_s <= ? ORDER BY running, number LIMIT 1"""
        if self._db.row(query, now_s, *OPEN, *OPEN, now_s) is None:  # most often: no write lock is needed to see it
            return None
        with self._db.transaction():
            row = self._db.row(query, now_s, *OPEN, *OPEN, now_s)
            if row is None:
                return None
            late = row["status"] == BatchStatus.VALIDATING and now_s >= row["expires_s"]
            self._db.write(
                """UPDATE batches SET holder = ?, lease_s = ?, epoch = epoch + 1, overdue = max(overdue, ?)
                WHERE number = ?""",
                *(holder, now_s + lease_s, int(late), row["number"]),
            )
            return Claim.of(self._by_number(row["number"]))

    def renew(self, claim: Claim, lease_s: float) -> Claim:
        """Extends the lease. Returns the batch's present state; notes that the completion window has passed."""
        now_s = self._db.clock()
        with self._db.transaction():
            row = self._held(claim)
            self._db.write("UPDATE batches SET lease_s = ? WHERE number = ?", now_s + lease_s, claim.number)
            if row["status"] == BatchStatus.IN_PROGRESS and now_s >= row["expires_s"]:
                self._db.write("UPDATE batches SET overdue = 1 WHERE number = ?", claim.number)
                self._move(row, BatchStatus.FINALIZING)
            return Claim.of(self._by_number(claim.number))

    def release(self, claim: Claim) -> None:
        """Ends the lease, so that another gateway may run the batch. No effect if it was taken over."""
        with self._db.transaction():
            self._db.write("UPDATE batches SET lease_s = 0 WHERE number = ? AND epoch = ?", claim.number, claim.epoch)

    # ---- for the runner

    def begin(self, claim: Claim, total: int) -> Claim:
        """The input file is valid and has `total` lines. A batch that is being cancelled only learns its total."""
        with self._db.transaction():
            row = self._held(claim)
            self._db.write("UPDATE batches SET total = ? WHERE number = ?", total, claim.number)
            if row["status"] == BatchStatus.VALIDATING:
                self._move(row, BatchStatus.IN_PROGRESS)
            return Claim.of(self._by_number(claim.number))

    def fail(self, claim: Claim, errors: Sequence[Mapping[str, Any]]) -> Claim:
        """The input file is not valid; `errors`: OpenAI's error objects with `code`, `line`, `message`, `param`."""
        with self._db.transaction():
            row = self._held(claim)
            if row["status"] == BatchStatus.VALIDATING:
                self._db.write(
                    "UPDATE batches SET errors = ? WHERE number = ?", orjson.dumps(errors).decode(), claim.number
                )
                self._move(row, BatchStatus.FAILED)
            return Claim.of(self._by_number(claim.number))

    def answered(self, claim: Claim, first: int, last: int) -> set[int]:
        """The indices from `first` to `last` whose lines have an answer."""
        base = claim.number << LINE_BITS
        found = self._db.rows("SELECT key FROM lines WHERE key BETWEEN ? AND ?", base + first, base + last)
        return {row["key"] - base for row in found}

    def answered_among(self, claim: Claim, indices: Sequence[int]) -> set[int]:
        """Those of these indices, which may lie anywhere in the file, whose lines have an answer."""
        base = claim.number << LINE_BITS
        query = f"SELECT key FROM lines WHERE key IN ({in_list(indices)})"
        return {row["key"] - base for row in self._db.rows(query, *(base + index for index in indices))}

    def record(self, claim: Claim, answers: Iterable[LineAnswer]) -> int:
        """Writes answers and counts them. An answer of a line that has one is dropped. Returns how many are new.

        Raises AccountingError while the batch is validated.
        """
        base = claim.number << LINE_BITS
        counts, sizes = [0, 0], [0, 0]
        with self._db.transaction():
            status = BatchStatus(self._held(claim)["status"])
            if status.ended:
                raise StaleError(f"batch {claim.id} has ended")
            if status is BatchStatus.VALIDATING:
                raise AccountingError(f"batch {claim.id} has no lines yet: it is being validated")
            for answer in answers:
                statement = "INSERT INTO lines (key, failed, row) VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
                if self._db.write(statement, base + answer.index, int(answer.failed), answer.row):
                    counts[answer.failed] += 1
                    sizes[answer.failed] += len(answer.row) + 1
            self._db.write(
                """UPDATE batches SET completed = completed + ?, failed = failed + ?,
                completed_bytes = completed_bytes + ?, failed_bytes = failed_bytes + ? WHERE number = ?""",
                *(*counts, *sizes, claim.number),
            )
        return sum(counts)

    def finish(self, claim: Claim) -> BatchStatus:
        """Ends a batch whose lines all have answers, and makes its files. A batch that was cancelled before its
        validation has none. Raises AccountingError if answers are missing.
        """
        with self._db.transaction():
            row = self._held(claim)
            if row["status"] == BatchStatus.IN_PROGRESS:
                self._move(row, BatchStatus.FINALIZING)
                row = self._by_number(claim.number)
            if row["total"] is not None and row["completed"] + row["failed"] != row["total"]:
                counts = f"{row['completed']} + {row['failed']} of {row['total']}"
                raise AccountingError(f"batch {claim.id} cannot end: {counts} lines have answers")
            for failed, column in ((0, "output_id"), (1, "error_id")):
                if row["failed" if failed else "completed"]:
                    file_id = self._add_file(row, failed)
                    self._db.write(f"UPDATE batches SET {column} = ? WHERE number = ?", file_id, claim.number)
            if row["status"] == BatchStatus.CANCELLING:
                end = BatchStatus.CANCELLED
            else:
                end = BatchStatus.EXPIRED if row["overdue"] else BatchStatus.COMPLETED
            self._move(row, end)
            return end

    # ---- housekeeping

    def sweep(self, retention_s: float) -> bool:
        """Deletes batches that ended longer ago than the retention, once their files are gone. Gives free pages of the
        database back to the disk. Returns whether many are left: a full disk needs them soon.
        """
        with self._db.transaction():
            self._db.write(
                f"""DELETE FROM batches WHERE status NOT IN ({in_list(OPEN)}) AND created_s < ?
                AND number NOT IN (SELECT batch FROM files WHERE batch IS NOT NULL)""",
                *(*OPEN, self._db.clock() - retention_s - WINDOW_S),
            )
        self._db.rows(f"PRAGMA incremental_vacuum({_FREED_PAGES})")
        return bool(self._db.rows("PRAGMA freelist_count")[0][0] > _FREED_PAGES)

    def check_integrity(self) -> None:
        """Raises AccountingError if the counts of a batch differ from its lines."""
        for row in self._db.rows("SELECT * FROM batches"):
            base = row["number"] << LINE_BITS
            gone = {
                kind
                for kind, column in ((0, "output_id"), (1, "error_id"))
                if row[column] and self._db.row("SELECT 1 FROM files WHERE id=? AND deleted=0", row[column]) is None
            }
            for failed in {0, 1} - gone:
                name = "failed" if failed else "completed"
                query = """SELECT count(*), coalesce(sum(length(row) + 1), 0) FROM lines
                    WHERE key BETWEEN ? AND ? AND failed = ?"""
                found = tuple(self._db.rows(query, base, base + _LINES - 1, failed)[0])
                if found != (row[name], row[f"{name}_bytes"]):
                    raise AccountingError(
                        f"batch {row['id']} counts {row[name]} lines {name}; a recount gives {found[0]}"
                    )

    # ---- internal

    def _row(self, batch_id: str, owner: bytes, param: str = "batch_id") -> sqlite3.Row:
        row = self._db.row("SELECT * FROM batches WHERE id = ? AND owner = ?", batch_id, owner)
        if row is None:
            raise NotFoundError(f"no batch {batch_id[:100]!r} exists", param=param)
        return row

    def _by_number(self, number: int) -> sqlite3.Row:
        row = self._db.row("SELECT * FROM batches WHERE number = ?", number)
        assert row is not None
        return row

    def _held(self, claim: Claim) -> sqlite3.Row:
        row = self._db.row("SELECT * FROM batches WHERE number = ? AND epoch = ?", claim.number, claim.epoch)
        if row is None:
            raise StaleError(f"batch {claim.id} is run by another gateway")
        return row

    def _move(self, row: sqlite3.Row, status: BatchStatus) -> None:
        check_move(BatchStatus(row["status"]), status)
        self._db.write(
            f"UPDATE batches SET status = ?, {_stamp(status)} = ? WHERE number = ?",
            *(status, int(self._db.clock()), row["number"]),
        )

    def _add_file(self, row: sqlite3.Row, failed: int) -> str:
        file_id, now_s = f"file-{uuid4().hex}", int(self._db.clock())
        name = f"{row['id']}_{'error' if failed else 'output'}.jsonl"
        size = row["failed_bytes" if failed else "completed_bytes"]
        self._db.write(
            """INSERT INTO files (id, owner, purpose, filename, bytes, created_s, expires_s, batch, failed)
            VALUES (?,?,?,?,?,?,?,?,?)""",
            *(file_id, row["owner"], OUTPUT, name, size, now_s, now_s + row["keep_s"], row["number"], failed),
        )
        return file_id


def _stamp(status: BatchStatus) -> str:
    """The column with the time at which a batch came into a state."""
    return "created_s" if status is BatchStatus.VALIDATING else f"{status}_s"


def to_json(row: sqlite3.Row) -> dict[str, Any]:
    """OpenAI's batch object."""
    errors = None if row["errors"] is None else {"object": "list", "data": orjson.loads(row["errors"])}
    counts = {"total": row["total"] or 0, "completed": row["completed"], "failed": row["failed"]}
    stamps = {f"{status}_at": row[_stamp(status)] for status in BatchStatus if status is not BatchStatus.VALIDATING}
    return {
        "id": row["id"],
        "object": "batch",
        "endpoint": row["endpoint"],
        "errors": errors,
        "input_file_id": row["input_id"],
        "completion_window": WINDOW,
        "status": row["status"],
        "output_file_id": row["output_id"],
        "error_file_id": row["error_id"],
        "created_at": row["created_s"],
        "expires_at": row["expires_s"],
        **stamps,
        "request_counts": counts,
        "metadata": orjson.loads(row["metadata"]) or None,
    }
