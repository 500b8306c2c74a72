"""Pass times in a cluster: how the slowdowns are computed from the workers' counters and the cluster's shape."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from alignedserve.cluster.cli import profile_cluster
from alignedserve.cluster.cli.open_loop import Load, _Driver
from alignedserve.cluster.cli.profile_cluster import Sums, measure_in_cluster, slowdown_beside
from alignedserve.cluster.cli.serve_process import ServeProcess
from alignedserve.config import Config, GatewayConfig
from alignedserve.config_sources import from_tree, load
from alignedserve.errors import ResourceError, UnavailableError
from alignedserve.proc_stat import is_alive

CONTENT = {"hardware": {"block_size": 16, "kv_bytes_per_token": 1024}}


def test_a_slowdown_is_of_what_was_predicted_without_what_the_engine_adds() -> None:
    before, after = Sums(10, 1.0, 0.5, 100.0), Sums(30, 5.0, 2.5, 110.0)
    between = after.since(before)
    assert between == Sums(20, 4.0, 2.0, 10.0)
    assert between.busy == pytest.approx(0.4)
    assert between.slowdown(host_overhead_s=0.05) == pytest.approx((4.0 - 1.0) / 2.0)
    with pytest.raises(ResourceError, match="raise --seconds"):
        after.since(after).slowdown(0.0)


def test_beside_and_alone_together_are_what_was_measured() -> None:
    beside = slowdown_beside(1.6, alone=1.2, share=0.5)
    assert 0.5 * 1.2 + 0.5 * beside == pytest.approx(1.6)
    assert slowdown_beside(1.6, alone=1.2, share=1.0) == 1.6


def test_what_hardly_ever_happened_tells_nothing_more_than_the_mean() -> None:
    assert slowdown_beside(1.3, alone=1.2, share=0.05) == 1.3
    assert slowdown_beside(1.1, alone=1.2, share=0.9) == 1.2  # noise: a neighbour makes nothing faster


def small(config: Config) -> Config:
    return profile_cluster._small(config, CONTENT, Path("mine.json"))


def test_the_small_cluster_answers_here_alone_whatever_the_users_own_is_to_do() -> None:
    """Otherwise clients would need the user's keys, the user's log would grow, and the address would be wrong."""
    gateway = {"host": "192.0.2.1", "route_prefix": "/mine", "api_key_file": "keys", "request_log": "log.jsonl"}
    mine = from_tree(
        {"gateway": {**gateway, "proxy": "python"}, "log": {"dir": "logs"}, "model": {"path": "/my/model"}}
    )
    found = small(mine)
    assert found.gateway == GatewayConfig(proxy="python")
    assert (found.log.dir, found.model.path, found.scheduler.cost_model) == ("", "/my/model", "mine.json")


def test_what_the_environment_sets_does_not_reach_the_small_cluster() -> None:
    """Environment variables override the file, so they are removed. RAY_ADDRESS may name another cluster."""
    environ = {"ALIGNEDSERVE_CLUSTER__PREFILL": "3", "RAY_ADDRESS": "10.0.0.1:6379", "HOME": "/home/me"}
    own = ServeProcess(environment={**environ, **profile_cluster._environment(environ)})._environment
    assert own.get("HOME") == "/home/me"
    assert "RAY_ADDRESS" not in own
    assert load(environ={name: own[name] for name in environ if name in own}).cluster.prefill == 1


def test_stores_of_the_small_cluster_take_no_more_than_their_share_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def stores(memory_bytes: int) -> int:
        monkeypatch.setattr(profile_cluster, "available_memory_bytes", lambda: memory_bytes)
        found = small(Config())
        blocks = found.prefill.cache_blocks
        assert found.kv_pool.size_gib * 2**30 >= 3 * blocks * 16384
        assert (found.decode.cache_blocks, found.prefill.batch_buffer_blocks) == (2 * blocks, blocks)
        return blocks

    assert stores(1 << 40) == 60 * 72  # the crowd, each as long as any
    assert stores(1 << 30) == (1 << 28) // 8 // 16384
    assert stores(1 << 20) == 72  # the longest request has room


@pytest.mark.parametrize("vocabulary", [2, 100])
def test_prompts_are_of_the_models_vocabulary(vocabulary: int) -> None:
    driver = _Driver(Load(1, 1.0, 1.0, vocabulary=vocabulary))
    for payload in driver._payloads:
        body = json.loads(payload.data.partition(b"\r\n\r\n")[2])
        assert 0 <= min(body["prompt"]) <= max(body["prompt"]) < vocabulary


REFUSES = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 401)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_cluster_that_answers_with_an_error_is_told_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refuses(ServeProcess):
        @property
        def command(self) -> tuple[str, ...]:
            return (sys.executable, "-c", REFUSES, str(self.port))

        def stop(self, number: int = signal.SIGTERM, timeout_s: float = 40.0) -> int:
            ended.append(super().stop(number, timeout_s))
            return ended[-1]

    ended: list[int] = []
    monkeypatch.setattr(profile_cluster, "ServeProcess", Refuses)
    with pytest.raises(UnavailableError, match=r"--no-cluster.*401"):
        measure_in_cluster(Config(), CONTENT, Path("mine.json"), 1.0)
    assert ended == [-signal.SIGTERM]


PROFILES = """
import signal, sys
from pathlib import Path
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # what is ignored above stays so: below nohup, or in a shell's background
signal.signal(signal.SIGINT, signal.default_int_handler)
from alignedserve.cluster.cli import profile_cluster
from alignedserve.config import Config

class Starts(profile_cluster.ServeProcess):
    command = (sys.executable, "-c", "import time; time.sleep(60)")
    def _wait_healthy(self, deadline):
        print(self.process.pid, flush=True)
        super()._wait_healthy(deadline)

profile_cluster.ServeProcess = Starts
content = {"hardware": {"block_size": 16, "kv_bytes_per_token": 1024}}
profile_cluster.measure_in_cluster(Config(), content, Path("mine.json"), 1.0)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_leaves_no_process_and_no_file(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROFILES]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as profiles:
        assert profiles.stdout is not None
        started = int(profiles.stdout.readline())
        profiles.send_signal(number)
        assert profiles.wait(30.0) in (128 + number, -signal.SIGINT)
    assert not is_alive(started)
    assert list(tmp_path.iterdir()) == []
