"""Instances of pipeline stages in the simulator."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.cluster.cli.main import main
from alignedserve.config import Config, PrefillConfig
from alignedserve.errors import ConfigError
from alignedserve.scheduler.cost.load import load_step_cost
from alignedserve.scheduler.cost.step import ChunkShape
from alignedserve.scheduler.systems import resolve
from alignedserve.simulator.disaggregated import simulate
from alignedserve.simulator.hardware import Hardware
from alignedserve.simulator.pipeline import PipelinedCost, lanes_of
from alignedserve.simulator.report.results import RunResult
from alignedserve.simulator.workload import Arrival, Workload
from alignedserve.testing.linear_cost import LinearStepCost

HARDWARE = Hardware(kv_tokens=60_000, kv_bytes_per_token=1 << 12, pool_tokens=600_000, message_s=0.0)
COST = LinearStepCost(longest_token_s=0.0)
lengths_st = st.lists(st.integers(1, 5000), min_size=1, max_size=60)


def staged(stages: int, layers: int = 12, hop_s: float = 0.0) -> PipelinedCost:
    return PipelinedCost(COST, layers, stages, lambda tokens: hop_s)


def run(arrivals: list[Arrival], prefill: int = 1, decode: int = 1, **options: Any) -> RunResult:
    config = Config(prefill=PrefillConfig(token_budget=256))
    return simulate(
        Workload(tuple(arrivals)), resolve("aligned"), config, HARDWARE, staged(prefill), staged(decode), **options
    )


@given(lengths_st, st.integers(1, 8))
def test_each_request_flies_in_one_lane_and_lanes_are_like_each_other(lengths: list[int], number: int) -> None:
    lanes = lanes_of(lengths, number)
    assert Counter(length for lane in lanes for length in lane) == Counter(lengths)
    assert all(lanes)
    assert len(lanes) <= number
    costs = [sum(lane) + 64 * len(lane) for lane in lanes]
    assert max(costs) <= sum(costs) / number + max(lengths) + 64


@given(lengths_st, st.integers(2, 6))
def test_a_round_takes_as_long_as_the_busiest_stage_works_or_the_slowest_lane_flies(
    lengths: list[int], stages: int
) -> None:
    lanes_s = [COST.step_s((), lane) for lane in lanes_of(lengths, stages)]
    round_s = staged(stages).step_s((), lengths)
    most_layers = -(-12 // stages)
    assert round_s == pytest.approx(max(*lanes_s, most_layers / 12 * sum(lanes_s)))
    assert staged(stages).balanced_step_s((), lengths) <= round_s


def test_unequal_layers_and_hops_make_a_round_longer() -> None:
    lengths = [1000] * 30
    lanes_s = [COST.step_s((), lane) for lane in lanes_of(lengths, 3)]
    assert staged(3, layers=10).step_s((), lengths) == pytest.approx(0.4 * sum(lanes_s))
    assert staged(3, hop_s=1.0).step_s((), lengths) == pytest.approx(3.0 + lanes_s[0])


def test_a_prompt_takes_no_less_time_but_many_follow_each_other() -> None:
    one = [Arrival("r0", 0.0, 256, 2)]
    many = [Arrival(f"r{number}", 0.0, 256, 2) for number in range(24)]
    alone = [run(one, prefill=stages).requests[0].token_s[0] for stages in (1, 4)]
    assert alone[1] == pytest.approx(alone[0])
    last = [max(request.token_s[0] for request in run(many, prefill=stages).requests) for stages in (1, 4)]
    assert last[1] == pytest.approx(last[0] * (24 + 3) / 24 / 4)


def test_chunks_of_one_prompt_follow_each_other() -> None:
    first_s = [run([Arrival("r0", 0.0, 8 * 256, 2)], prefill=stages).requests[0].token_s[0] for stages in (1, 2)]
    chunk_s = COST.step_s([ChunkShape(256)], ())
    assert first_s[0] > 8 * chunk_s
    assert first_s[1] == pytest.approx(first_s[0] * 9 / 16, rel=0.05)


def test_two_stages_decode_faster_and_a_leap_is_its_steps() -> None:
    arrivals = [Arrival(f"r{number}", 0.01 * number, 100 + 37 * number, 60 + number) for number in range(30)]
    one, two = run(arrivals), run(arrivals, prefill=2, decode=2)
    assert all(len(request.token_s) == request.arrival.output_tokens for request in two.requests)
    assert two.end_s < 0.9 * one.end_s
    assert pickle.dumps(run(arrivals, prefill=2, decode=2, leap=False)) == pickle.dumps(two)


def test_the_command_takes_stages_by_role(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    configured = tmp_path / "cluster.yaml"
    configured.write_text("cluster: {pipeline_parallel: 2}\n")
    arguments = ("--trace", "mix:short=0.8,requests=60,output_min=30,output_max=60", "--policy", "aligned", "--json")
    of_stages = ((), ("--pipeline-parallel", "2"), ("--config", str(configured), "--prefill-pp", "1"))
    summaries = []
    for stages in of_stages:
        assert main(["simulate", *arguments, *stages]) == 0
        summaries.append(json.loads(capsys.readouterr().out))
    one, both, only_decode = summaries
    assert both["run"]["configuration"]["stages"] == {"prefill": 2, "decode": 2}
    assert only_decode["run"]["configuration"]["stages"] == {"prefill": 1, "decode": 2}
    tokens_s = [found["aligned"]["decode_throughput_tokens_per_s"] for found in (one, both)]
    assert tokens_s[1] > 1.2 * tokens_s[0]
    assert both["aligned"]["ttft_mean_s"] < only_decode["aligned"]["ttft_mean_s"]


def test_decodes_that_were_measured_on_stages_are_not_divided_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    content = json.loads((files("alignedserve.scheduler.cost.data") / "rtxpro6000-llama-3.1-8b.json").read_text())
    one, two = {"tensor": 1, "stages": 1, "experts": 1}, {"tensor": 1, "stages": 2, "experts": 1}
    (tmp_path / "two.json").write_text(json.dumps(content | {"degrees": {"prefill": one, "decode": two}}))
    (tmp_path / "cluster.yaml").write_text("cluster: {pipeline_parallel: 4}\n")
    model = ("--cost-model", str(tmp_path / "two.json"))
    config = ("--config", str(tmp_path / "cluster.yaml"))
    arguments = ("simulate", "--trace", "mix:short=0.8,requests=60", "--json", "--policy")
    summaries = []
    for more in (("aligned",), ("aligned", *model), ("aligned,vllm", *model, *config)):
        assert main([*arguments, *more]) == 0
        summaries.append(json.loads(capsys.readouterr().out))
    whole, measured, configured = summaries
    assert measured["aligned"] == whole["aligned"]
    assert measured["run"]["configuration"]["stages"] == {"prefill": 1, "decode": 2}
    assert configured["run"]["configuration"]["stages"] == {"prefill": 4, "decode": 2}
    notes = " ".join(configured["run"]["notes"])
    assert "decodes of --cost-model were measured on 2 stages" in notes
    assert "vllm: computed without stages" in notes
    assert main([*arguments, "aligned", *model, "--decode-pp", "4"]) == 2
    assert "were measured on 2 stages, not on 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--decode-pp", "0"), "must be at least 1"),
        (("--decode-pp", "2", "--ranks", "2"), "shares experts"),
        (("--prefill-pp", "2", "--policy", "aligned,vllm"), "vllm has neither"),
        (("--pipeline-parallel", "33", "--policy", "aligned"), "give at most 32"),
    ],
)
def test_stages_that_cannot_be_are_named(capsys: pytest.CaptureFixture[str], arguments: Any, says: str) -> None:
    assert main(["simulate", "--trace", "mix:short=0.8,requests=4", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_hidden_states_are_sent_at_the_hardwares_rate() -> None:
    cost = load_step_cost("rtxpro6000-llama-3.1-8b")
    assert PipelinedCost.of(cost, 1, HARDWARE) is cost
    chunk = [ChunkShape(512)]
    first_s, last_s = PipelinedCost.of(cost, 2, HARDWARE).stages_s(chunk)
    sent_s = HARDWARE.collective_latency_s + 512 * 4096 * 2 / HARDWARE.collective_bandwidth
    assert first_s == pytest.approx(cost.step_s(chunk, ()) / 2 + sent_s)
    assert last_s == pytest.approx(cost.step_s(chunk, ()) / 2)
    with pytest.raises(ConfigError, match="has 32 layers"):
        PipelinedCost.of(cost, 33, HARDWARE)
