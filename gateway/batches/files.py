"""Files of API keys: uploaded ones on disk, and the answers of batches, whose content are rows of the database."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from alignedserve.errors import NotFoundError, TooLargeError
from alignedserve.gateway.batches.database import LINE_BITS, Database, in_list
from alignedserve.gateway.batches.states import OPEN
from alignedserve.gateway.failures import NotPossibleError

INPUT, OUTPUT = "batch", "batch_output"  # OpenAI's purposes
LEAST_CHARGED = 4096  # bytes that a file counts for at least, so that the quota also bounds their number
PART_BYTES = 1 << 20
PART_LINES = 512
SKIPPED_ROWS = 4096
SWEPT_FILES = 64  # at once: other calls of the store wait meanwhile
STRAY_AFTER_S = 3600.0  # a file without a row this old belongs to no upload


class QuotaError(TooLargeError):
    """The files of this API key take all the room that it may use."""

    code = "quota_exceeded"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file. `batch`: number of the batch whose rows it consists of; None if it is on disk. `failed`: which rows."""

    number: int
    id: str
    owner: bytes
    purpose: str
    filename: str
    bytes: int
    created_s: int
    expires_s: int
    batch: int | None
    failed: bool

    @classmethod
    def of(cls, row: sqlite3.Row) -> StoredFile:
        values = {name: row[name] for name in cls.__dataclass_fields__}
        return cls(**{**values, "failed": bool(row["failed"])})

    def to_json(self) -> dict[str, Any]:
        """OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class FileStore:
    """`quota_bytes`: for all files of one owner. `keep_s`: after this many seconds a file is deleted."""

    def __init__(self, database: Database, quota_bytes: int, keep_s: float) -> None:
        self._db = database
        self._quota_bytes = quota_bytes
        self.keep_s = int(keep_s)

    def check_room(self, owner: bytes, more: int = 0) -> None:
        """Raises QuotaError if `more` bytes do not fit into the owner's quota."""
        used = self.used_bytes(owner)
        if used + more > self._quota_bytes:
            quota = f"{self._quota_bytes / (1 << 30):g} GiB (batches.quota_gib)"
            raise QuotaError(f"the files of this API key would exceed {quota}: {used} bytes are used; delete files")

    def used_bytes(self, owner: bytes) -> int:
        """Bytes of the owner's files, and of the answers of its batches that have not ended."""
        query = "SELECT coalesce(sum(max(bytes, ?)), 0) FROM files WHERE owner = ? AND deleted = 0"
        files = self._db.rows(query, LEAST_CHARGED, owner)[0][0]
        query = f"""SELECT coalesce(sum(completed_bytes + failed_bytes), 0) FROM batches
            WHERE owner = ? AND status IN ({in_list(OPEN)})"""
        return int(files + self._db.rows(query, owner, *OPEN)[0][0])

    def draft(self) -> tuple[str, Path]:
        """The id of a new file, and the path of an empty file to which its content is to be written before `add`."""
        file_id = f"file-{uuid4().hex}"
        path = self._db.folder / "files" / f"{file_id}.part"
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        return file_id, path

    def add(self, file_id: str, owner: bytes, filename: str, expires_in_s: int | None = None) -> StoredFile:
        """Makes a draft a file of the owner. Its content is on the disk before the file exists. Raises QuotaError."""
        path = self.path_of(file_id)
        draft = path.with_suffix(".part")
        _sync(draft)
        size = draft.stat().st_size
        now_s = int(self._db.clock())
        kept_s = min(self.keep_s, expires_in_s or self.keep_s)
        draft.rename(path)
        _sync(path.parent)
        try:
            with self._db.transaction():
                self.check_room(owner, max(size, LEAST_CHARGED))
                self._db.write(
                    """INSERT INTO files (id, owner, purpose, filename, bytes, created_s, expires_s)
                    VALUES (?,?,?,?,?,?,?)""",
                    *(file_id, owner, INPUT, filename, size, now_s, now_s + kept_s),
                )
        except Exception:
            path.unlink(missing_ok=True)
            raise
        return self.get(file_id, owner)

    def path_of(self, file_id: str) -> Path:
        """The path of an uploaded file's content."""
        return self._db.folder / "files" / file_id

    def get(self, file_id: str, owner: bytes, param: str = "file_id") -> StoredFile:
        """Raises NotFoundError, also for another owner's file and for one that has expired."""
        row = self._db.row(
            "SELECT * FROM files WHERE id = ? AND owner = ? AND deleted = 0 AND expires_s > ?",
            *(file_id, owner, self._db.clock()),
        )
        if row is None:
            raise NotFoundError(f"no file {file_id[:100]!r} exists", param=param)
        return StoredFile.of(row)

    def page(
        self, owner: bytes, *, purpose: str = "", after: str = "", limit: int = 10_000, newest_first: bool = True
    ) -> tuple[list[StoredFile], bool]:
        """At most `limit` files after the one with the id `after`, and whether there are more. Raises NotFoundError."""
        query = "SELECT * FROM files WHERE owner = ? AND deleted = 0 AND expires_s > ?"
        values: list[Any] = [owner, self._db.clock()]
        if purpose:
            query += " AND purpose = ?"
            values.append(purpose)
        if after:
            query += f" AND number {'<' if newest_first else '>'} ?"
            values.append(self.get(after, owner, "after").number)
        query += f" ORDER BY number {'DESC' if newest_first else 'ASC'} LIMIT ?"
        found = [StoredFile.of(row) for row in self._db.rows(query, *values, limit + 1)]
        return found[:limit], len(found) > limit

    def delete(self, file_id: str, owner: bytes) -> None:
        """Raises NotFoundError, and NotPossibleError while a batch needs the file. Rows are removed by `sweep`."""
        with self._db.transaction():
            file = self.get(file_id, owner)
            user = self._db.row(
                f"SELECT id FROM batches WHERE input_id = ? AND status IN ({in_list(OPEN)})", file_id, *OPEN
            )
            if user is not None:
                raise NotPossibleError(f"batch {user['id']} reads file {file_id}: cancel it first", param="file_id")
            self._db.write("UPDATE files SET deleted = 1 WHERE id = ?", file_id)
        if file.batch is None:
            self.path_of(file_id).unlink(missing_ok=True)

    def read(self, file: StoredFile, cursor: int) -> tuple[bytes, int]:
        """A part of the content after `cursor` (0 at first), and the cursor after it; b"" at the end."""
        if file.batch is None:
            with self.path_of(file.id).open("rb") as opened:
                opened.seek(cursor)
                part = opened.read(PART_BYTES)
            return part, cursor + len(part)
        low = file.batch << LINE_BITS
        # The literal lets SQLite use the index of failed lines.
        query = f"""SELECT key, row FROM lines WHERE key >= ? AND key < ? AND failed = {int(file.failed)}
            ORDER BY key LIMIT ?"""
        found = self._db.rows(query, low + cursor, low + (1 << LINE_BITS), PART_LINES)
        rows: list[bytes] = []
        size = 0
        for row in found:
            rows += (row["row"], b"\n")
            size += len(row["row"]) + 1
            cursor = row["key"] - low + 1
            if size >= PART_BYTES:
                break
        return b"".join(rows), cursor

    def skip(self, file: StoredFile, cursor: int, size: int) -> tuple[int, int, bool]:
        """Goes on by `size` bytes. Returns the cursor for `read`, the bytes that are still to be dropped of what it
        reads, and whether to skip these first: at most SKIPPED_ROWS rows are skipped at once.
        """
        if file.batch is None:
            return cursor + size, 0, False
        low = file.batch << LINE_BITS
        query = f"""SELECT key, length(row) + 1 AS size FROM lines WHERE key >= ? AND key < ?
            AND failed = {int(file.failed)} ORDER BY key LIMIT ?"""
        found = self._db.rows(query, low + cursor, low + (1 << LINE_BITS), SKIPPED_ROWS)
        for row in found:
            if row["size"] > size:
                return cursor, size, False
            cursor, size = row["key"] - low + 1, size - row["size"]
        return cursor, size, bool(found) and size > 0

    def sweep(self, most_rows: int) -> bool:
        """Deletes what has expired or was deleted: at most `most_rows` rows of answers, and SWEPT_FILES files.

        Returns whether there may be more.
        """
        now_s = self._db.clock()
        with self._db.transaction():
            self._db.write(
                f"""UPDATE files SET deleted = 1 WHERE deleted = 0 AND expires_s <= ?
                AND id NOT IN (SELECT input_id FROM batches WHERE status IN ({in_list(OPEN)}))""",
                *(now_s, *OPEN),
            )
        found = self._db.rows("SELECT * FROM files WHERE deleted = 1 LIMIT ?", SWEPT_FILES)
        gone, more = list[int](), len(found) == SWEPT_FILES
        for file in map(StoredFile.of, found):
            if file.batch is None:
                self.path_of(file.id).unlink(missing_ok=True)
            else:
                most_rows -= self._take_rows(file, most_rows)
                if most_rows <= 0:
                    more = True
                    break
            gone.append(file.number)
        with self._db.transaction():
            self._db.write(f"DELETE FROM files WHERE number IN ({in_list(gone)})", *gone)
        if not more:
            self._remove_strays(now_s)
        return more

    def _take_rows(self, file: StoredFile, most: int) -> int:
        assert file.batch is not None
        low = file.batch << LINE_BITS
        with self._db.transaction():
            return self._db.write(
                f"""DELETE FROM lines WHERE key IN (SELECT key FROM lines WHERE key >= ? AND key < ?
                AND failed = {int(file.failed)} LIMIT ?)""",
                *(low, low + (1 << LINE_BITS), most),
            )

    def _remove_strays(self, now_s: float) -> None:
        """Removes content of uploads and deletions whose process died in the middle."""
        for path in (self._db.folder / "files").iterdir():
            with contextlib.suppress(OSError):
                old = path.stat().st_mtime < now_s - STRAY_AFTER_S
                if old and self._db.row("SELECT 1 FROM files WHERE id = ?", path.name) is None:
                    path.unlink()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
