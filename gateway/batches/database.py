"""The SQLite database of files, batches and responses: one file in the configured folder, opened by every gateway.

Each public operation of the store is one transaction, so a process may die between any two writes. Data of API keys is
in it, so folder and files are closed to other users.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from alignedserve.errors import ConfigError, RequestError, UnavailableError

BUSY_S = 10.0  # another gateway's transaction takes milliseconds
OTHERS = stat.S_IRWXG | stat.S_IRWXO
# File systems of several machines. SQLite's write-ahead log needs memory that all its processes share.
NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "9p", "afs"})

# A line's key is its batch's number, shifted by LINE_BITS, plus its index in the input file.
LINE_BITS = 32
_FIRST = (
    """CREATE TABLE files (
        number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner BLOB NOT NULL, purpose TEXT NOT NULL,
        filename TEXT NOT NULL, bytes INTEGER NOT NULL, created_s INTEGER NOT NULL, expires_s INTEGER NOT NULL,
        batch INTEGER, failed INTEGER, deleted INTEGER NOT NULL DEFAULT 0)""",
    "CREATE INDEX files_of_owner ON files (owner, number)",
    """CREATE TABLE batches (
        number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner BLOB NOT NULL, endpoint TEXT NOT NULL,
        input_id TEXT NOT NULL, metadata TEXT NOT NULL, status TEXT NOT NULL, expires_s INTEGER NOT NULL,
        keep_s INTEGER NOT NULL, overdue INTEGER NOT NULL DEFAULT 0, created_s INTEGER NOT NULL, in_progress_s INTEGER,
        finalizing_s INTEGER, completed_s INTEGER, failed_s INTEGER, expired_s INTEGER, cancelling_s INTEGER,
        cancelled_s INTEGER, total INTEGER, completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,
        completed_bytes INTEGER NOT NULL DEFAULT 0, failed_bytes INTEGER NOT NULL DEFAULT 0, errors TEXT,
        output_id TEXT, error_id TEXT, holder TEXT NOT NULL DEFAULT '', lease_s REAL NOT NULL DEFAULT 0,
        epoch INTEGER NOT NULL DEFAULT 0)""",
    "CREATE INDEX batches_of_owner ON batches (owner, number)",
    "CREATE INDEX batches_by_status ON batches (status)",
    "CREATE TABLE lines (key INTEGER PRIMARY KEY, failed INTEGER NOT NULL, row BLOB NOT NULL)",
    "CREATE INDEX failed_lines ON lines (key) WHERE failed = 1",
)
_SECOND = (
    """CREATE TABLE responses (
        number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner BLOB NOT NULL, bytes INTEGER NOT NULL,
        expires_s INTEGER NOT NULL, body BLOB NOT NULL, input BLOB NOT NULL)""",
    "CREATE INDEX responses_of_owner ON responses (owner, number)",
    "CREATE INDEX responses_by_expiry ON responses (expires_s)",
    "CREATE TABLE response_sizes (owner BLOB PRIMARY KEY, bytes INTEGER NOT NULL)",
)
_STEPS = (_FIRST, _SECOND)  # the statements that lead from each version to the next


class Database:
    """A connection. Use it from one thread at a time. `shared`: gateways of several nodes use the folder.

    `clock` returns Unix seconds. The clocks of all gateways of a store must agree within a fraction of the lease.
    Raises ConfigError if the folder cannot be used.
    """

    def __init__(self, folder: str | Path, *, shared: bool = False, clock: Callable[[], float] = time.time) -> None:
        self.folder = Path(folder).expanduser()
        self.clock = clock
        _prepare(self.folder)
        if not shared and (kind := file_system(self.folder)) in NETWORK:
            raise ConfigError(f"batches.folder: {self.folder} is on {kind}: set batches.shared, or use a local disk")
        file = self.folder / "batches.sqlite"
        try:
            os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # its log gets the same mode
            self._connection = sqlite3.connect(file, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
            self._connection.row_factory = sqlite3.Row
            self._open(shared)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"batches.folder: {file} cannot be opened: {error}") from error

    def close(self) -> None:
        self._connection.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Encloses writes that happen together or not at all. Raises UnavailableError if the disk or a lock fails."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            with contextlib.suppress(sqlite3.Error):  # a COMMIT that failed leaves the transaction open
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
            raise StoreError(f"the store of batches failed: {error}") from error

    def write(self, statement: str, *values: Any) -> int:
        """Within a transaction: the number of rows that changed."""
        return self._connection.execute(statement, values).rowcount

    def rows(self, query: str, *values: Any) -> list[sqlite3.Row]:
        try:
            return self._connection.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise StoreError(f"the store of batches failed: {error}") from error

    def row(self, query: str, *values: Any) -> sqlite3.Row | None:
        found = self.rows(query, *values)
        return found[0] if found else None

    def _open(self, shared: bool) -> None:
        run = self._connection.execute
        run("PRAGMA auto_vacuum = INCREMENTAL")
        run(f"PRAGMA journal_mode = {'TRUNCATE' if shared else 'WAL'}")
        run("PRAGMA synchronous = FULL")
        with self.transaction():
            version = run("PRAGMA user_version").fetchone()[0]
            if version > len(_STEPS):
                raise ConfigError(f"batches.folder: {self.folder} was written by a newer version of AlignedServe")
            for statement in (statement for step in _STEPS[version:] for statement in step):
                run(statement)
            run(f"PRAGMA user_version = {len(_STEPS)}")


class StoreError(UnavailableError):
    """The database cannot be read or written now: the disk is full or broken, or another process holds its lock."""

    code = "store_unavailable"


class BatchesOffError(RequestError):
    """This gateway has no store for files and batches."""

    code = "batches_not_configured"
    http_status = 404


def _prepare(folder: Path) -> None:
    """Creates the folder. Raises ConfigError if it is accessible to other users, as batches contain their requests."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_mode & OTHERS:
            open_to_all = f"{folder} is accessible to other users of this machine"
            raise ConfigError(f"batches.folder: {open_to_all}: chmod 700 {folder}")
        (folder / "files").mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"batches.folder: {folder} cannot be used: {error.strerror}") from error


def file_system(path: Path) -> str:
    """The type of the file system that holds `path`, as the kernel names it; "" if it cannot be told."""
    with contextlib.suppress(OSError, ValueError):
        device = path.stat().st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            fields, _, rest = line.partition(" - ")
            if fields.split()[2] == wanted:
                return rest.split()[0]
    return ""


def in_list(values: Sequence[object]) -> str:
    """Placeholders for `values` in an SQL list."""
    return ", ".join("?" * len(values))
