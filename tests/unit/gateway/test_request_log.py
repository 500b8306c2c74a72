"""The request log: one line for every ended request, and nothing of its text."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from alignedserve.control.convert import enter_stage, timings_from_proto, timings_to_proto
from alignedserve.control.samples import value
from alignedserve.errors import ConfigError
from alignedserve.gateway import request_log
from alignedserve.gateway.body.planning import CacheUse
from alignedserve.gateway.metrics import GatewayMetrics
from alignedserve.gateway.prompt_blocks import block_names
from alignedserve.gateway.request_log import RequestLog
from alignedserve.request import FinishReason, RequestSpec, Stage, Stopwatch
from alignedserve.simulator.traces import Load, read_trace
from support.fake_cluster import FakeCluster, silent_script
from support.gateway import running_gateway


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def answer(number: int, tokens: int = 3) -> Any:
    """As much of an answer as the log reads."""
    now_s = time.monotonic()
    return SimpleNamespace(
        request_id=f"r{number}",
        call=SimpleNamespace(
            arrival_ns=time.time_ns(),
            arrival_s=now_s,
            sent_id="mine",
            plan=SimpleNamespace(resume=(), wait_objective_s=None, priority=0, cache=None),
            error=None,
            salt=b"",
        ),
        prompt=SimpleNamespace(token_ids=[1] * 7),
        tokens=[5] * tokens,
        finish=FinishReason.STOP,
        stopwatch=Stopwatch(),
        epoch=0,
        prefill_id="prefill-0",
        decode_id="decode-0",
        cached_tokens=4,
        first_token_s=now_s + 0.25,
        second_token_s=now_s + 0.5,
        last_token_s=now_s + 1.0,
        unix_ns=lambda at_s: time.time_ns() + round((at_s - now_s) * 1e9),
    )


async def one_token(cluster: FakeCluster, spec: RequestSpec) -> None:
    cluster.emit(spec, [100], timed=True)


async def test_every_request_that_ends_has_a_line_with_its_lengths_and_times(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    async with (
        FakeCluster() as cluster,
        running_gateway(cluster, request_log=str(file)) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=20.0) as http,
    ):
        body = {"prompt": "a secret", "max_tokens": 16, "n": 2, "temperature": 1.0}
        reply = (await http.post("/v1/completions", json=body)).json()
        cluster.script = one_token
        cut = await http.post("/v1/completions", json={"prompt": "c", "timeout_s": 0.5})
        assert cut.status_code == 408, cut.text
        cluster.script = silent_script
        late = await http.post("/v1/completions", json={"prompt": "b", "timeout_s": 0.05})
        assert late.status_code == 408, late.text
    found = lines(file)  # closing the gateway has written all
    assert len(found) == 4
    done = [entry for entry in found if entry["outcome"] == "length"]
    assert len(done) == 2
    for entry in done:
        assert entry["input_tokens"] == reply["usage"]["prompt_tokens"]
        assert entry["output_tokens"] == reply["usage"]["completion_tokens"] / 2
        assert entry["arrival_unix_s"] <= entry["first_token_unix_s"] <= entry["second_token_unix_s"]
        assert entry["second_token_unix_s"] <= entry["last_token_unix_s"] <= entry["end_unix_s"] + 0.01
        assert abs(entry["arrival_unix_s"] - time.time()) < 60
        assert entry["gateway_id"] == "gateway-0"
    cut_off = [entry for entry in found if entry["outcome"] == "deadline_exceeded"]
    assert [entry["output_tokens"] for entry in cut_off] == [1, 0]
    assert ["decode_s" in entry for entry in cut_off] == [True, False]
    assert 0.0 < cut_off[0]["decode_s"] < 10.0
    assert "secret" not in file.read_text()
    assert file.stat().st_mode & 0o077 == 0


def test_stages_are_stamped_where_they_first_begin() -> None:
    stopwatch = Stopwatch(Stage.QUEUE, 1_000_000_000)
    stopwatch.enter(Stage.PREFILL, 2_000_000_000)
    message = timings_to_proto(stopwatch)
    enter_stage(message, Stage.POOL, 4_000_000_000)
    enter_stage(message, Stage.DECODE, 5_000_000_000)
    stopwatch = timings_from_proto(message)
    stopwatch.enter(Stage.POOL, 8_000_000_000)  # evicted
    stopwatch.enter(Stage.DECODE, 9_000_000_000)
    stopwatch.close(10_000_000_000)
    assert stopwatch.begun_ns == {
        Stage.QUEUE: 1_000_000_000,
        Stage.PREFILL: 2_000_000_000,
        Stage.POOL: 4_000_000_000,
        Stage.DECODE: 5_000_000_000,
    }
    assert stopwatch.spent_s == {Stage.QUEUE: 1.0, Stage.PREFILL: 2.0, Stage.POOL: 2.0, Stage.DECODE: 4.0}
    one = answer(0)
    one.stopwatch = stopwatch
    entry = request_log.entry_of(one, "gateway-0", time.time_ns())
    assert entry["x_request_id"] == "mine"
    assert (entry["queue_unix_s"], entry["pool_unix_s"], entry["decode_s"]) == (1.0, 4.0, 4.0)
    assert not {"bubble_s", "cached_tokens"} & entry.keys()  # a 0 would claim that it was measured
    one.stopwatch.waste(0.25)
    assert request_log.entry_of(one, "gateway-0", time.time_ns())["bubble_s"] == 0.25
    one.call.plan.cache = CacheUse()
    assert request_log.entry_of(one, "gateway-0", time.time_ns())["cached_tokens"] == 4


def test_several_replicas_append_whole_lines_to_one_file(tmp_path: Path) -> None:
    file = tmp_path / "log"
    logs = [RequestLog(file, f"gateway-{number}", GatewayMetrics(f"g{number}")) for number in range(3)]

    def note(log: RequestLog) -> None:
        for number in range(2000):
            log.note(answer(number))
        log.close()

    threads = [threading.Thread(target=note, args=(log,)) for log in logs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    found = lines(file)
    assert len(found) == 6000
    assert {entry["gateway_id"] for entry in found} == {"gateway-0", "gateway-1", "gateway-2"}


def test_a_full_disk_costs_lines_and_not_requests() -> None:
    metrics = GatewayMetrics("g")
    log = RequestLog("/dev/full", "gateway-0", metrics)
    for number in range(5):
        log.note(answer(number))
    log.close()
    assert 'alignedserve_gateway_unlogged_requests_total{instance="g"} 5.0' in metrics.text()


def test_what_the_disk_does_not_take_in_time_is_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_log, "MAX_WAITING", 10)
    go = threading.Event()
    write = RequestLog._write
    monkeypatch.setattr(RequestLog, "_write", lambda self, entries: (go.wait(30), write(self, entries)))
    metrics = GatewayMetrics("g")
    log = RequestLog(tmp_path / "log", "gateway-0", metrics)
    began_s = time.monotonic()
    for number in range(1000):
        log.note(answer(number))
    assert time.monotonic() - began_s < 20
    go.set()
    log.close()
    written = len(lines(tmp_path / "log"))
    assert 10 <= written < 1000
    assert f'unlogged_requests_total{{instance="g"}} {1000 - written}.0' in metrics.text()


def test_a_file_that_cannot_be_appended_to_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.request_log.*Is a directory"):
        RequestLog(tmp_path, "gateway-0", GatewayMetrics("g"))


def test_a_disk_that_fills_up_leaves_whole_lines_and_is_written_to_again_when_it_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, metrics, room = tmp_path / "log", GatewayMetrics("g"), [1000]
    write = os.write

    def write_while_there_is_room(descriptor: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room[0] -= (size := min(len(data), room[0]))
        return write(descriptor, data[:size])

    log = RequestLog(file, "gateway-0", metrics)
    with monkeypatch.context() as full:
        full.setattr(os, "write", write_while_there_is_room)
        for number in range(20):
            log.note(answer(number))
        deadline = time.monotonic() + 20.0
        while unlogged(metrics) + len(file.read_text().splitlines()) < 20 and time.monotonic() < deadline:
            time.sleep(0.01)
    log.note(answer(99))
    log.close()

    found = lines(file)
    assert len(found) > 1
    assert found[-1]["request_id"] == "r99"
    assert len(found) + unlogged(metrics) == 21


def test_half_a_line_that_another_replica_has_written_after_stays_a_line_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, metrics = tmp_path / "log", GatewayMetrics("g")
    log = RequestLog(file, "gateway-0", metrics)
    write = os.write

    def write_half(descriptor: int, data: bytes) -> int:
        if file.stat().st_size:
            with file.open("ab") as other:
                other.write(b"of another replica\n")
            monkeypatch.setattr(os, "write", write)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[:20])

    monkeypatch.setattr(os, "write", write_half)
    for number in (1, 2):
        log.note(answer(number))
        while not file.stat().st_size or (number == 1 and not unlogged(metrics)):
            time.sleep(0.01)
    log.close()

    half, blank, whole = file.read_bytes().splitlines()
    assert half.endswith(b"of another replica")
    assert blank == b""
    assert json.loads(whole)["request_id"] == "r2"
    assert unlogged(metrics) == 1


def unlogged(metrics: GatewayMetrics) -> float:
    return value(metrics.text(), "alignedserve_gateway_unlogged_requests_total")


def test_blocks_of_equal_beginnings_have_equal_names_which_the_key_alone_explains(tmp_path: Path) -> None:
    file = tmp_path / "log"
    first, second, salted = answer(0), answer(1), answer(2)
    first.prompt.token_ids, first.tokens = list(range(130)), list(range(130, 193))
    second.prompt.token_ids = list(range(200))  # the next turn: it goes on from the answer
    salted.prompt.token_ids, salted.call.salt = list(range(130)), b"tenant"
    for number, one in enumerate((first, second, salted)):
        log = RequestLog(file, f"gateway-{number}", GatewayMetrics(f"names-{number}"))  # another process: the same key
        log.note(one)
        log.close()
    found = [entry["blocks"] for entry in lines(file)]
    assert [len(names) for names in found] == [3, 3, 2]
    assert found[0] == found[1]
    assert not set(found[0]) & set(found[2])
    key = file.with_name("log.key")
    assert (key.stat().st_mode & 0o777, len(key.read_bytes())) == (0o600, 32)
    assert found[0] == block_names(key.read_bytes(), b"", list(range(192)))
    trace = read_trace(str(file)).workload(Load(), 0)
    assert trace.block_tokens == 64
    assert [(len(one.blocks), len(one.answer_blocks)) for one in trace.arrivals] == [(2, 1), (3, 0), (2, 0)]
