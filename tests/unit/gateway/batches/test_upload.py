"""The form of an upload, as it is written to disk."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from alignedserve.gateway.batches.upload import Form

HEADERS = [(b"content-type", b"multipart/form-data; boundary=b")]
BODY = b'--b\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\ncontent\r\n--b--\r\n'


async def test_a_thread_waits_for_the_disk_once_all_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, bool]] = []

    def fsync(descriptor: int) -> None:
        seen.append((os.fstat(descriptor).st_size, threading.current_thread() is threading.main_thread()))

    async def pieces() -> AsyncIterator[bytes]:
        for byte in BODY:
            yield bytes([byte])

    monkeypatch.setattr(os, "fsync", fsync)
    form = Form(HEADERS, tmp_path / "file", 100)
    await form.receive(pieces())
    assert seen == [(len(b"content"), False)]
    assert (tmp_path / "file").read_bytes() == b"content"
