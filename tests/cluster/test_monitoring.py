"""Prometheus with the files of `alignedserve monitoring`: rules are checked, each alert fires, each panel has data."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from alignedserve.cluster.cli.main import main
from alignedserve.cluster.cli.serve_process import ServeProcess, free_port
from alignedserve.cluster.monitoring.alerts import ALERTS
from support.requirements import needs

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    needs("" if all(map(shutil.which, ("prometheus", "promtool"))) else "there is no Prometheus (apt: prometheus)"),
]

INTERVAL_S = 0.5
LOAD_S = 20.0
RANGE = "10s"  # of rates
WITHIN_S = 30.0
VARIABLES = {"$job": "alignedserve", "$decode": ".*", "$prefill": ".*", "$__rate_interval": RANGE}
# Queries without data in this test's cluster, by a part that tells why.
WITHOUT_DATA = {
    "alignedserve_decode_graph_": "there is no GPU",
    "alignedserve_decode_eager_": "there is no GPU",
    "alignedserve_page_lock": "there is no GPU",
    '{job="$job", decode=~"$decode"} >= 0': "there is a cost model, so that no share is learned",
    "ALERTS": "nothing is wrong",
}

STOPPED = 'alignedserve_gateway_requests_total{outcome="stop"}'
# A cluster that answers and has a supervisor.
ANSWERS = {
    'up{job="alignedserve", instance="here:8000"}': "1x40",
    'alignedserve_role_starts_total{job="alignedserve", instance="here:8000"}': "8x40",
}
# Series, beside those of ANSWERS, with which only this alert fires after half an hour; a sample a minute.
FIRES: Mapping[str, Mapping[str, str]] = {
    "NoAnswer": {'up{job="alignedserve", instance="here:8000"}': "0x40"},
    "SupervisorMissing": {'up{job="alignedserve-metrics", instance="here:8000"}': "1x40"},
    "RoleMissing": {'alignedserve_ready_instances{role="decode"}': "0x40"},
    "RequestsFail": {STOPPED: "0+9x40", 'alignedserve_gateway_requests_total{outcome="unavailable"}': "0+1x40"},
    "NothingDecoded": {"alignedserve_gateway_output_tokens_total": "7x40", "alignedserve_requests_decoding": "2x40"},
    "KvCorrupted": {'alignedserve_kv_checksum_mismatches_total{instance="decode-0"}': "0x20 1x20"},
    "RolesRestart": {"alignedserve_role_starts_total": "8x10 14x30"},
    "RequestsRefused": {STOPPED: "0+9x40", 'alignedserve_gateway_requests_total{outcome="overloaded"}': "0+1x40"},
    "RequestsLate": {
        "alignedserve_late_requests_share": "0.3x40",
        "alignedserve_gateway_output_tokens_total": "0+100x40",
    },
    "KvDroppedForRoom": {"alignedserve_requests_dropped_for_room_total": "0+1x40"},
    "PoolNearlyFull": {
        "alignedserve_requests_queued": "3x40",
        'alignedserve_prefill_pending_tokens{instance="prefill-0"}': "0x40",
        'alignedserve_prefill_pending_tokens{instance="prefill-1"}': "0x40",
    },
    "CopiesFail": {'alignedserve_kv_copy_failures_total{instance="decode-0"}': "0+1x40"},
    "DiskTierOff": {'alignedserve_disk_tier_on{instance="kv_pool-0", doing="write"}': "0x40"},
    "RequestsUnlogged": {'alignedserve_gateway_unlogged_requests_total{instance="gateway-0"}': "0+1x40"},
    "BatchesExpire": {'alignedserve_gateway_batches_total{status="expired"}': "0x20 1x20"},
}
HEALTHY = {
    **ANSWERS,
    'alignedserve_ready_instances{role="decode"}': "1x40",
    STOPPED: "0+90x40",
    'alignedserve_gateway_requests_total{outcome="unavailable"}': "0+1x40",
    "alignedserve_gateway_output_tokens_total": "0+100x40",
    "alignedserve_requests_decoding": "2x40",
    "alignedserve_requests_queued": "3x40",
    'alignedserve_prefill_pending_tokens{instance="prefill-0"}': "0x40",
    'alignedserve_prefill_pending_tokens{instance="prefill-1"}': "500x40",
    "alignedserve_late_requests_share": "0.1x40",
}
# Nothing is asked for, after requests that were late.
IDLE = {
    **ANSWERS,
    "alignedserve_gateway_output_tokens_total": "0+100x5 500x35",
    "alignedserve_requests_decoding": "2x5 0x35",
    "alignedserve_requests_queued": "0x40",
    'alignedserve_prefill_pending_tokens{instance="prefill-0"}': "0x40",
    "alignedserve_late_requests_share": "0.3x40",
}


def run(*command: str, folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wait(until: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not until():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


# ---- the rules alone


@pytest.fixture
def written(tmp_path: Path) -> Path:
    assert main(["monitoring", "--out", str(tmp_path / "monitoring"), "--ray"]) == 0
    return tmp_path / "monitoring"


def test_promtool_accepts_configuration_and_rules(written: Path) -> None:
    assert "SUCCESS" in run("promtool", "check", "config", "prometheus.yml", folder=written)
    assert f"{len(ALERTS)} rules found" in run("promtool", "check", "rules", "alerts.yml", folder=written)


def test_each_alert_fires_alone_and_none_while_all_is_well(written: Path) -> None:
    assert list(FIRES) == [alert.name for alert in ALERTS]
    tests = [fires({**ANSWERS, **series}, {name: 1.0}) for name, series in FIRES.items()]
    tests += [fires(HEALTHY, {}), fires(IDLE, {})]
    tests.append(fires({STOPPED: "0+90x40"}, {"NoAnswer": 1.0}))  # the target has gone with its pod
    twice = {
        f'alignedserve_kv_copy_failures_total{{instance="decode-0", job="{job}"}}': "0+1x40"
        for job in ("alignedserve", "alignedserve-roles")
    }
    tests.append(fires({**ANSWERS, **twice}, {"CopiesFail": 1.0}))  # the pages of the processes have the same samples
    content = {"rule_files": ["alerts.yml"], "evaluation_interval": "1m", "tests": tests}
    (written / "test.yml").write_text(yaml.safe_dump(content))
    assert "SUCCESS" in run("promtool", "test", "rules", "test.yml", folder=written)


def fires(series: Mapping[str, str], alerts: Mapping[str, float]) -> dict[str, Any]:
    """A test of promtool: which alerts fire with these series."""
    samples = [{"labels": f'{{alertname="{name}"}}', "value": value} for name, value in alerts.items()]
    expr = 'count by (alertname) (ALERTS{alertstate="firing"})'
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": expr, "eval_time": "30m", "exp_samples": samples}],
    }


# ---- with a cluster


class Prometheus:
    """Prometheus on a free port, with the files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._log = (folder / "prometheus.log").open("wb")
        command = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
        listen = f"--web.listen-address=127.0.0.1:{self.port}"
        self._process = subprocess.Popen([*command, listen], cwd=folder, stdout=self._log, stderr=subprocess.STDOUT)

    def ask(self, path: str, **parameters: str | float) -> Any:
        """The data of an answer. Raises URLError, also for an expression that is wrong."""
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=30.0) as answer:
            return json.loads(answer.read())["data"]

    def targets(self, job: str) -> dict[str, str]:
        """The health of a job's targets, by their label `instance`."""
        try:
            found = self.ask("targets", scrapePool=job)["activeTargets"]
        except OSError:
            return {}
        return {target["labels"]["instance"]: target["health"] for target in found}

    def scrapes(self, health: str) -> bool:
        """Whether the cluster's target has this health."""
        return list(self.targets("alignedserve").values()) == [health]

    def has_data(self, expr: str, begun_s: float) -> bool:
        """Whether the expression has had a number since. Its variables are those of the dashboard."""
        for name, value in VARIABLES.items():
            expr = expr.replace(name, value)
        found = self.ask("query_range", query=expr, start=begun_s, end=time.time(), step=1)["result"]
        return any(math.isfinite(float(value)) for series in found for _, value in series["values"])

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._log.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """With everything on that has metrics of its own."""
    folder = tmp_path_factory.mktemp("cluster")
    disk = ("--kv-disk-path", str(folder / "kv"), "--kv-disk-gib", "0.05")
    cost = ("--cost-model", "rtxpro6000-llama-3.1-8b", "--verify-kv")
    more = ("--batches-folder", str(folder / "batches"), "--decode-tp", "2", "--set", "cluster.role_metrics=true")
    with ServeProcess("--model", "tiny", *disk, *cost, *more) as running:
        yield running


@pytest.fixture(scope="module")
def files(server: ServeProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("monitoring")
    given = ["--url", server.url, "--interval", str(INTERVAL_S), "--roles"]
    assert main(["monitoring", "--out", str(folder), *given]) == 0
    return folder


@pytest.fixture(scope="module")
def prometheus(files: Path) -> Iterator[Prometheus]:
    running = Prometheus(files)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def begun_s(server: ServeProcess, prometheus: Prometheus) -> float:
    """Unix time, after which the cluster has answered requests for a while."""
    wait(lambda: prometheus.scrapes("up"), "no scrape")
    begun_s = time.time()

    def ask(number: int) -> None:
        prompt = [5 + number] * (20 + 60 * (number % 4))
        while time.time() < begun_s + LOAD_S:
            server.post("/v1/completions", {"model": "tiny", "prompt": prompt, "max_tokens": 24, "ignore_eos": True})

    chat = {"model": "tiny", "messages": [{"role": "user", "content": "Say a."}], "max_tokens": 16}
    server.post("/v1/chat/completions", {**chat, "structured_outputs": {"regex": "a{1,8}"}})
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))
    time.sleep(2 * INTERVAL_S)
    return begun_s


def test_each_query_of_the_dashboard_has_data(files: Path, prometheus: Prometheus, begun_s: float) -> None:
    board = json.loads((files / "grafana/provisioning/dashboards/alignedserve.json").read_text())
    targets = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    missing = {expr for expr in targets if not prometheus.has_data(expr, begun_s)}
    explained = {expr for expr in targets if any(part in expr for part in WITHOUT_DATA)}
    assert sorted(missing) == sorted(explained)


def test_the_values_of_the_alerts_have_data_and_none_fires(prometheus: Prometheus, begun_s: float) -> None:
    assert [alert.name for alert in ALERTS if not prometheus.has_data(alert.value, begun_s)] == []
    (group,) = prometheus.ask("rules")["groups"]
    assert [rule["name"] for rule in group["rules"]] == [alert.name for alert in ALERTS]
    assert {rule["health"] for rule in group["rules"]} == {"ok"}
    assert [rule["name"] for rule in group["rules"] if rule["state"] == "firing"] == []


def test_the_names_that_the_variables_offer(prometheus: Prometheus, begun_s: float) -> None:
    for metric, label, values in (
        ("alignedserve_role_starts_total", "job", ["alignedserve"]),
        ("alignedserve_decode_running", "instance", ["decode-0"]),
        ("alignedserve_prefill_pending_tokens", "instance", ["prefill-0"]),
    ):
        assert prometheus.ask(f"label/{label}/values", **{"match[]": metric}) == values


def test_each_process_is_found_at_its_own_port(prometheus: Prometheus, begun_s: float) -> None:
    expected = {"scheduler-0", "kv_pool-0", "prefill-0", "decode-0"}

    def found() -> bool:
        targets = prometheus.targets("alignedserve-roles")
        return expected <= targets.keys() and set(targets.values()) == {"up"}

    wait(found, "not every process is scraped")
    for name, instance in (("decode_iterations_total", "decode-0"), ("requests_queued", "scheduler-0")):
        own = f'alignedserve_{name}{{job="alignedserve-roles", instance="{instance}"}}'
        assert prometheus.has_data(own, begun_s), own


def test_a_cluster_that_has_ended_is_noticed(server: ServeProcess, prometheus: Prometheus) -> None:
    assert server.stop() == 0
    wait(lambda: prometheus.scrapes("down"), "the target is still up")

    def alerts() -> list[str]:
        return [alert["labels"]["alertname"] for alert in prometheus.ask("alerts")["alerts"]]

    wait(lambda: alerts() == ["NoAnswer"], "no alert is pending")
