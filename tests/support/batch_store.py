"""A store of files and batches with a clock of its own, as one gateway has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignedserve.gateway.batches.batches import BatchStore, Claim, LineAnswer
from alignedserve.gateway.batches.database import Database
from alignedserve.gateway.batches.files import FileStore, StoredFile

ALICE, BOB = b"alice", b"bob"
ENDPOINT = "/v1/completions"
LEASE_S = 15.0
DAY_S = 86400.0
KEEP_S = 30 * DAY_S


@dataclass
class Clock:
    now_s: float = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now_s


class Store:
    """A store in a folder, as one gateway has it."""

    def __init__(self, folder: Path, clock: Callable[[], float], quota_bytes: int = 1 << 30) -> None:
        self.database = Database(folder, clock=clock)
        self.files = FileStore(self.database, quota_bytes, KEEP_S)
        self.batches = BatchStore(self.database, self.files)

    def upload(self, content: bytes = b"{}\n", owner: bytes = ALICE, **options: Any) -> StoredFile:
        file_id, draft = self.files.draft()
        draft.write_bytes(content)
        return self.files.add(file_id, owner, "in.jsonl", **options)

    def content(self, file_id: str, owner: bytes = ALICE) -> bytes:
        file, cursor, found = self.files.get(file_id, owner), 0, b""
        while True:
            part, cursor = self.files.read(file, cursor)
            if not part:
                return found
            found += part

    def begun(self, total: int, holder: str = "gateway-0") -> Claim:
        """A batch of `total` lines that is in progress at `holder`."""
        self.batches.create(ALICE, ENDPOINT, self.upload().id, {})
        claim = self.batches.claim(holder, LEASE_S)
        assert claim is not None
        return self.batches.begin(claim, total)


def lines(*indices: int, failed: bool = False, text: str = "answer") -> list[LineAnswer]:
    return [LineAnswer(index, failed, f"{text} {index}".encode()) for index in indices]
