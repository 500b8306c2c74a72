"""What a report of a problem needs, in one archive: no key is in it, and what cannot be had is named."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from alignedserve.cluster.cli import processes_here
from alignedserve.cluster.cli.debug_bundle import Cleaner, contents, secrets_of, versions
from alignedserve.cluster.cli.main import main
from alignedserve.cluster.cli.operate import RunningCluster, _pids_here
from alignedserve.cluster.cli.processes_here import around, environments, logs_of, tail
from alignedserve.cluster.records import Record
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
        "redis://:first@sk-another@host:6379/0",
        "https://collector/v1?api_key=sk-another&retries=3",
        "Authorization: Basic sk-another",
        "ray::run --hf-token sk-another --redis-password=sk-another",
        'tracing:\n  password: "sk-another"',
        '{"hf_token": "sk-another"}',
        '"{\\"secret\\": \\"sk-another\\"}"',
        "Authorization: Bearer 4711-sk-another",
        "--redis-password=12345678-sk-another",
        "hf_token: 4711.5e-sk-another",
    ],
)
def test_no_key_is_left_in_a_text(text: str) -> None:
    cleaned = Cleaner([KEY])(text)
    assert KEY not in cleaned
    assert "sk-another" not in cleaned
    assert "[removed]" in cleaned


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens: 512, prompt_tokens=300",
        '{"first_token": 0.25, "api_key_file": "/etc/keys"}',
        "alignedserve_prompt_tokens_total 12",
        "http://127.0.0.1:8000/alignedserve/status",
        '{"key": 12, "first_token": 2.5e-3}, [token=4]',
        "serve --first-token 12",
    ],
)
def test_what_is_no_key_stays(text: str) -> None:
    assert Cleaner([])(text) == text


@pytest.mark.parametrize("text", ["Bearer 12345678", "Authorization: Basic 12345678", "db_password: 12345678"])
def test_a_password_may_be_a_number(text: str) -> None:
    assert "12345678" not in Cleaner([])(text)


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("PWD", "/home/ann/project", False),
        ("OLDPWD", "/home/ann/project", False),
        ("RAY_AUTH_MODE", "disabled", False),
        ("ALIGNEDSERVE_PREFILL__TOKEN_BUDGET", "131072", False),
        ("ALIGNEDSERVE_SOME_TOKENS", "131072", False),
        ("TOKENIZERS_PARALLELISM", "parallel", False),
        ("SSH_AUTH_SOCK", "/tmp/agent.1", False),
        ("ALIGNEDSERVE_GATEWAY__API_KEY_FILE", "/etc/keys", False),
        ("my_hf_token", "hf-4711", True),
        ("RAY_AUTH_TOKEN", "sk-4711", True),
        ("PGPASSWORD", "12345678", True),
        ("MYSQL_PWD", "12345678", True),
        ("OTEL_EXPORTER_OTLP_HEADERS", "x-key=4711", True),
        ("AWS_ACCESS_KEY_ID", "AKIA4711", True),
        ("OPENAI_API_KEY_2", "sk-4711", True),
    ],
)
def test_variables_are_secret_by_whole_parts_of_their_names(
    name: str, value: str, secret: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in list(os.environ):
        monkeypatch.delenv(other)
    monkeypatch.setenv(name, value)
    found = secrets_of(RunningCluster("http://127.0.0.1:9", "", ""), None)
    assert found == ([value] if secret else [])
    shown = f"{name}={value}" in versions().splitlines()
    assert shown == (name.startswith(("ALIGNEDSERVE_", "RAY_")) and not secret)


def test_of_a_long_log_the_end_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes_here, "MOST_LOG_BYTES", 5)
    (tmp_path / "log").write_bytes(b"0123456\xff89")
    assert tail(tmp_path / "log") == "56�89"


def test_the_logs_of_a_process_are_what_its_output_is_written_to(tmp_path: Path) -> None:
    with (tmp_path / "decode.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        assert logs_of({process.pid: "decode-0", 1 << 22: "gone"}) == [("decode-0-decode.log", tmp_path / "decode.log")]
        own = tmp_path / "decode-0.log"
        with own.open("w") as log:  # with --log-dir
            assert ("decode-0-decode-0.log", own) in logs_of({os.getpid(): "decode-0"})
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


@pytest.fixture
def ray_node() -> Iterator[dict[str, int]]:
    """Pids, by title, of processes that stand for those of a node of Ray."""
    titles = ["ray::ServeReplica:default:Supervisor", "ray::DecodeWorker.wait_ended", "ray::Foreign.run"]
    children = "".join(f"exec -a {title} sleep 60 & echo $!\n" for title in titles)
    node = subprocess.Popen(
        ["bash", "-c", f"{children} wait"], stdout=subprocess.PIPE, text=True, env={"MY_HF_TOKEN": "hf-4711"}
    )
    assert node.stdout is not None
    pids = {title: int(node.stdout.readline()) for title in titles}
    deadline = time.monotonic() + 10.0
    # Before its `exec` a child has the title of the shell, which contains all of them.
    while not all(Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::") for pid in pids.values()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    try:
        yield pids
    finally:
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        node.communicate()


def test_processes_are_found_without_the_cluster(ray_node: dict[str, int]) -> None:
    supervisor, decode, _ = ray_node.values()
    found = around(supervisor)
    assert found == {supervisor: f"Supervisor-{supervisor}", decode: f"DecodeWorker-{decode}"}
    assert around(1 << 22) == {}
    assert environments(found)["MY_HF_TOKEN"] == {"hf-4711"}


def test_a_cluster_that_does_not_answer_has_an_archive(
    ray_node: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALIGNEDSERVE_RUNTIME_DIR", str(tmp_path / "run"))
    supervisor, decode, _ = ray_node.values()
    Record("12345678", "http://127.0.0.1:9", supervisor, 1.0).write()
    out = tmp_path / "report.tar.gz"
    assert main(["debug-bundle", "-o", str(out)]) == 0
    found = read(out)
    assert found["status.json"].startswith("not available: ")
    assert {f"stacks/Supervisor-{supervisor}.txt", f"stacks/DecodeWorker-{decode}.txt"} <= found.keys()


async def test_what_cannot_be_had_is_named() -> None:
    cluster = RunningCluster("http://127.0.0.1:9", "", "")
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
