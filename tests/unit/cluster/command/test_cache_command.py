"""`alignedserve cache`: what it asks of a cluster, and what it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from alignedserve.cluster.cli import cache_command
from alignedserve.cluster.cli.main import main

SHARD = {
    "shard": "kv_pool-0",
    "pins": [
        {"name": "system", "tokens": 640, "blocks": 40, "bytes": 40 << 20, "hits": 3, "idle_s": 4.2, "everywhere": True}
    ],
    "sessions": [
        {
            "name": "",
            "request_id": "chatcmpl-1-0",
            "tokens": 64,
            "blocks": 4,
            "bytes": 4 << 20,
            "hits": 1,
            "idle_s": 1.0,
            "ending": "tool_calls",
            "expected_s": 2.5,
        }
    ],
    "session_count": 7,
    "blocks": {"capacity": 100, "free": 50, "cached": 10, "pinned": 40},
    "block_bytes": 1 << 20,
    "queried_tokens": 1000,
    "hit_tokens": 250,
}


class Cluster:
    """Records orders, and answers each with what is in `answers`."""

    def __init__(self) -> None:
        self.orders: list[tuple[str, dict[str, Any]]] = []
        self.answers: dict[str, Any] = {
            "cache/pin": {
                "name": "system",
                "shards": [{"shard": "kv_pool-0", "tokens": 640, "blocks": 40, "bytes": 40 << 20}],
            },
            "cache/list": {"shards": [SHARD]},
            "cache/drop": {"pins": ["system"], "blocks": 0},
        }

    def order(self, name: str, body: dict[str, Any], timeout_s: float = 0.0) -> Any:
        self.orders.append((name, body))
        return self.answers[name]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    found = Cluster()
    monkeypatch.setattr(cache_command, "find_cluster", lambda url, key_file: found)
    return found


def test_a_beginning_is_given_as_text_as_json_or_in_files(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.json").write_text('[{"role": "system", "content": "Be brief."}]')
    (tmp_path / "p.jsonl").write_text('{"name": "a", "text": "b"}\n{"name": "c", "text": "d", "cache_salt": "s"}\n')
    messages = [{"role": "system", "content": "Be brief."}]
    assert main(["cache", "pin", "docs", "--text", "Once", "--cache-salt", "s", "--node", "node-1"]) == 0
    assert main(["cache", "pin", "chat", "--messages", f"@{tmp_path}/m.json"]) == 0
    assert main(["cache", "pin", "--file", str(tmp_path / "p.jsonl")]) == 0
    assert [body for _, body in cluster.orders] == [
        {"name": "docs", "text": "Once", "cache_salt": "s", "node": "node-1"},
        {"name": "chat", "messages": messages},
        {"name": "a", "text": "b"},
        {"name": "c", "text": "d", "cache_salt": "s"},
    ]
    cluster.orders.clear()
    assert main(["cache", "pin", "--file", str(tmp_path / "p.jsonl"), "--cache-salt", "t"]) == 0
    assert [body["cache_salt"] for _, body in cluster.orders] == ["t", "s"], "a line's own salt counts"
    assert "system: kv_pool-0 holds 640 tokens, 40 blocks, 40.0 MiB" in capsys.readouterr().out


def test_the_list_has_pins_sessions_and_totals(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "list"]) == 0
    head, _, pin, session = capsys.readouterr().out.splitlines()
    assert "free 50 (50.0 MiB)" in head
    assert "25.0% of 1000 prompt tokens" in head
    assert pin.split()[:7] == ["kv_pool-0", "pin", "system", "640", "40", "40.0", "3"]
    assert session.split()[1:3] == ["session", "chatcmpl-1-0"]
    assert session.endswith("tool_calls, back after 2.5 s")
    assert main(["cache", "list", "--json", "--sessions", "5"]) == 0
    assert json.loads(capsys.readouterr().out) == {"shards": [SHARD]}
    assert cluster.orders[-1] == ("cache/list", {"sessions": 5})


def test_a_sessions_name_cannot_write_to_the_terminal(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    (session,) = SHARD["sessions"]
    cluster.answers["cache/list"] = {"shards": [{**SHARD, "sessions": [{**session, "name": "a\x1b[2J\nb\u202ec"}]}]}
    assert main(["cache", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[-1].split()[2] == "a?[2J?b?c"


def test_a_pin_is_dropped_by_name_and_what_is_cached_with_all(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", "drop", "system"]) == 0
    assert main(["cache", "drop", "--all", "--cache-salt", "s"]) == 0
    assert [body for _, body in cluster.orders] == [{"name": "system"}, {"all": True, "cache_salt": "s"}]
    cluster.answers["cache/drop"] = {"pins": [], "blocks": 0}
    assert main(["cache", "drop", "unknown"]) == 1
    assert "no shard has a pin named 'unknown'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["pin"],
        ["pin", "a"],
        ["pin", "a", "--text", "b", "--messages", "[]"],
        ["pin", "a", "--messages", "{"],
        ["pin", "a", "--text", "@/nowhere"],
        ["pin", "a", "--file", "/nowhere"],
        ["pin", "--file", "/nowhere"],
        ["drop"],
        ["drop", "a", "--all"],
    ],
)
def test_what_makes_no_sense_is_refused_before_a_cluster_is_asked(cluster: Cluster, words: list[str]) -> None:
    assert main(["cache", *words]) == 2
    assert cluster.orders == []
