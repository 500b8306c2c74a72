"""What a simulation says beside its figures, and the table on stdout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from alignedserve.cluster.cli.main import main
from alignedserve.errors import ConfigError
from alignedserve.simulator.replay import ComparedPolicy

MIX = "mix:short=1,requests=6,short_max=90,output_min=2,output_max=4"
WAITING = "arrival_time_s,input_tokens,output_tokens,wait_objective_s\n0,50,3,0.01\n0,50,3,60\n0,50,3,\n"


def simulate(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["simulate", *arguments]) == 0
    return capsys.readouterr().out


def summary_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(simulate(capsys, *arguments, "--json"))
    return found


def test_the_table_has_the_late_requests_and_waits_within_objectives(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text(WAITING)
    rows = {line[:24].strip(): line[24:].split() for line in simulate(capsys, "--trace", str(trace)).splitlines()}
    assert float(rows["second token P99, s"][0]) >= float(rows["second token mean, s"][0])
    assert float(rows["pool wait max, s"][0]) > 0
    assert 0 <= float(rows["wait objectives met"][0]) <= 1
    without = simulate(capsys, "--trace", MIX)
    assert "pool wait max, s" in without
    assert "wait objectives met" not in without


def test_objectives_that_nobody_reads_are_noted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text(WAITING)
    summary = summary_of(capsys, "--trace", str(trace), "--ranks", "2")
    assert summary["run"]["notes"] == ["the requests' wait objectives are not read by shared-pool"]
    summary = summary_of(capsys, "--trace", str(trace), "--policy", "aligned,vllm")
    assert summary["run"]["notes"] == ["the requests' wait objectives are not read by vllm"]


def test_a_warm_up_that_leaves_nothing_and_clients_without_a_request_are_noted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    summary = summary_of(capsys, "--trace", MIX, "--warmup-s", "900")
    (note,) = summary["run"]["notes"]
    assert note == "aligned, seed 0: every request arrived before --warmup-s 900, and none counts"
    assert summary["aligned"]["requests"] == 0
    summary = summary_of(capsys, "--trace", MIX, "--clients", "7")
    assert summary["run"]["notes"] == ["--clients 7, but only 6 requests: they arrive at time zero"]


def test_what_automatic_max_running_became_is_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--trace", MIX, "--policy", "aligned,fcfs,vllm", "--set", "fcfs.decode.max_running=7")
    policies = summary_of(capsys, *arguments, "--tpot-objective", "0.06")["run"]["configuration"]["policies"]
    assert policies["aligned"]["max_running"] in range(256, 1025, 64)
    assert policies["aligned"]["config"]["decode"]["max_running"] == 0
    assert policies["fcfs"]["max_running"] == 7
    assert "max_running" not in policies["vllm"]
    assert policies["aligned"]["config"]["scheduler"]["tpot_objective_s"] == 0.06


@pytest.mark.parametrize(
    ("policy", "setting", "decode", "reader"),
    [
        ("aligned", {"scheduler.sharing": "nearest"}, 1, "several decode instances"),
        ("aligned", {"scheduler.sharing": "nearest", "scheduler.balance_slack": "1"}, 2, ""),
        ("aligned", {"scheduler.balance_slack": "1"}, 2, ""),
        ("fcfs", {"scheduler.balance_slack": "1"}, 2, "scheduler.sharing quantiles or nearest"),
        ("fcfs", {"scheduler.balance_slack": "1"}, None, "scheduler.sharing quantiles or nearest"),
        ("aligned", {"scheduler.balance_slack": "1"}, None, ""),
    ],
)
def test_keys_of_sharing_are_read_where_there_is_something_to_share(
    policy: str, setting: dict[str, str], decode: int | None, reader: str
) -> None:
    if not reader:
        assert ComparedPolicy.of(policy, setting, None, decode=decode).config.scheduler.policy
        return
    with pytest.raises(ConfigError, match=f"this key has no effect here: {reader} read it"):
        ComparedPolicy.of(policy, setting, None, decode=decode)


def test_degrees_of_the_configuration_are_named_as_not_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    said = {}
    for text in ("decode: {tensor_parallel: 4}", "cluster: {prefill: 1}"):
        file.write_text(text)
        said[text] = " ".join(summary_of(capsys, "--trace", MIX, "--config", str(file))["run"]["notes"])
    of_degrees, other = said.values()
    assert "(prefill 1, decode 4) is not read" in of_degrees
    assert "tensor_parallel" not in other
