"""The form of an upload, as it is written to disk, and an upload that is refused."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from alignedserve.gateway.batches.upload import Form
from support.fake_cluster import FakeCluster
from support.gateway import running_gateway

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


async def test_an_upload_without_room_is_read_and_dropped_so_that_its_client_gets_the_answer(tmp_path: Path) -> None:
    keys = {"folder": str(tmp_path), "max_file_mib": 64.0, "quota_gib": 1 / 1024}
    async with (
        FakeCluster() as cluster,
        running_gateway(cluster, batches=keys, max_body_mib=0.25) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
    ):
        for _ in range(3):
            with pytest.raises(openai.APIStatusError, match=r"batches\.quota_gib"):
                await client.files.create(file=("in", b"x" * (40 << 20)), purpose="batch")
    assert not list((tmp_path / "files").iterdir())
