"""What a report of a problem needs, in one archive: no key is in it, and what cannot be had is named."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from alignedserve.cluster.cli import debug_bundle
from alignedserve.cluster.cli.debug_bundle import Cleaner, contents, logs_of, tail
from alignedserve.cluster.cli.main import main
from alignedserve.cluster.cli.operate import RunningCluster, _pids_here
from support.fake_cluster import FakeCluster
from support.gateway import running_gateway

KEY = "sk-first-4711"


def read(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        found = {}
        for member in archive.getmembers():
            file = archive.extractfile(member)
            assert file is not None
            found[member.name.partition("/")[2]] = file.read().decode()
        return found


@pytest.mark.parametrize(
    "text",
    [
        f"key {KEY} in words",
        "Authorization: Bearer sk-another",
        'headers {"x-api-key": "sk-another"}',
        "alignedserve-token=sk-another;",
        f"{KEY}{KEY}",
        "OTEL_EXPORTER_OTLP_ENDPOINT=https://user:sk-another@collector:4317",
    ],
)
def test_no_key_is_left_in_a_text(text: str) -> None:
    cleaned = Cleaner([KEY])(text)
    assert KEY not in cleaned
    assert "sk-another" not in cleaned
    assert "[removed]" in cleaned


def test_of_a_long_log_the_end_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug_bundle, "MOST_LOG_BYTES", 5)
    (tmp_path / "log").write_bytes(b"0123456\xff89")
    assert tail(tmp_path / "log") == "56�89"


def test_the_logs_of_a_process_are_what_its_output_is_written_to(tmp_path: Path) -> None:
    with (tmp_path / "decode.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        roles = [{"id": "decode-0", "pid": process.pid}, {"id": "gone", "pid": 1 << 22}]
        assert logs_of(roles) == [("decode-0-decode.log", tmp_path / "decode.log")]
        own = tmp_path / "decode-0.log"
        with own.open("w") as log:  # with --log-dir
            assert ("decode-0-decode-0.log", own) in logs_of([{"id": "decode-0", "pid": os.getpid()}])
            assert log.writable()
    finally:
        process.kill()
        process.communicate()


def test_processes_of_other_nodes_are_not_looked_for_here() -> None:
    roles = [
        {"role": "supervisor", "id": "supervisor-0", "pid": 10, "node": "a"},
        {"role": "decode", "id": "decode-0", "pid": 11, "node": "a"},
        {"role": "decode", "id": "decode-1", "pid": 12, "node": "b"},
    ]
    assert _pids_here(roles, 10) == {10, 11}
    assert _pids_here(roles, 99) == frozenset()
    starting = [{key: value for key, value in role.items() if key != "node"} for role in roles]
    assert _pids_here(starting, 10) == frozenset()


async def test_what_cannot_be_had_is_named() -> None:
    cluster = RunningCluster("http://127.0.0.1:9", "", "", frozenset())
    found = dict(contents(cluster, stacks=True))
    assert "alignedserve" in found["versions.txt"]
    for name in ("status.json", "metrics.txt", "config.yaml", "live.json"):
        assert found[name].startswith("not available: ")


async def test_a_running_clusters_archive(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    keys.chmod(0o600)
    async with FakeCluster() as cluster, running_gateway(cluster, api_key_file=str(keys)) as gateway:
        out = tmp_path / "report.tar.gz"
        asked = ["debug-bundle", "-o", str(out), "--url", gateway.url, "--api-key-file", str(keys)]
        assert await asyncio.to_thread(main, asked) == 0
        found = read(out)
        assert out.stat().st_mode & 0o777 == 0o600
        assert '"state": "ready"' in found["status.json"]
        assert '"waiting"' in found["live.json"]
        assert not any(KEY in text for text in found.values())
        assert await asyncio.to_thread(main, asked) == 2  # an archive that is there is not written over
