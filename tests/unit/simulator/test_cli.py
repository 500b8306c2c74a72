"""`alignedserve simulate` from its arguments to its files."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from alignedserve.cluster.cli.main import main
from alignedserve.errors import ConfigError
from alignedserve.scheduler.systems import policy_class, resolve
from alignedserve.simulator.hardware_file import FALLBACK, default_hardware
from alignedserve.simulator.options import rates_of, seeds_of

MIX = "mix:short=0.8,requests=24,long_max=2000,output_min=4,output_max=40"
KEYS = ("ttft_mean_s", "tpot_mean_s", "tpot_p99_s", "makespan_s", "itl_p99_s", "second_token_mean_s", "iteration_p99_s")


def simulate(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> tuple[Any, str]:
    """stdout, parsed if it is JSON, and stderr."""
    assert main(["simulate", *arguments]) == status
    said = capsys.readouterr()
    return (json.loads(said.out) if "--json" in arguments and status == 0 else said.out), said.err


def test_both_topologies_are_compared_and_only_json_is_on_stdout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    policies = ("aligned", "fcfs", "aligned-no-prefetch", "vllm", "sarathi", "fastgen", "orca", "static")
    arguments = ("--trace", MIX, "--rate", "40", "--policy", ",".join(policies), "--slo-ttft", "1", "--slo-tpot", "0.1")
    summary, progress = simulate(capsys, *arguments, "--json")
    assert set(summary) == {*policies, "run"}
    for policy in policies:
        found = summary[policy]
        assert (found["requests"], found["completed"], found["refused"]) == (24, 24, 0), policy
        assert all(found[key] > 0 for key in KEYS), policy
        assert 0 <= found["slo_attainment"] <= 1
    assert "[1/8] aligned at 40 requests/s, seed 0: 24 requests" in progress
    run = summary["run"]
    assert run["command"].startswith("alignedserve simulate --trace")
    assert {"commit", "version", "configuration", "trace", "cost_model"} <= set(run)
    assert len(run["trace"]["sha256"]) == 64
    assert run["configuration"]["policies"]["vllm"]["options"]["max_num_seqs"] == 256
    assert run["configuration"]["policies"]["aligned-no-prefetch"]["config"]["cluster"]["prefetch"] is False
    assert run["configuration"]["hardware"]["kv_tokens"] > 0


def test_the_example_of_a_policy_of_ones_own_is_simulated(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hardware = tmp_path / "small.toml"
    hardware.write_text("kv_tokens = 4096\nkv_bytes_per_token = 131072\npool_tokens = 65536\n")
    monkeypatch.syspath_prepend(Path(__file__).parents[3])
    name = "examples.shortest_first:ShortestFirst"
    policy = policy_class(resolve(name))
    form, batches = policy.form, []

    def recorded(*arguments: Any) -> Any:
        batches.append(form(*arguments))
        return batches[-1]

    monkeypatch.setattr(policy, "form", recorded)
    arguments = ("--trace", MIX, "--policy", f"{name},aligned", "--hardware", str(hardware))
    summary, _ = simulate(capsys, *arguments, "--json")
    for system in (name, "aligned"):
        assert (summary[system]["completed"], summary[system]["refused"]) == (24, 0)
        assert all(summary[system][key] > 0 for key in KEYS)
    lengths = [[entry.tokens for entry in batch] for batch in batches]
    assert max(map(len, lengths)) > 1
    assert lengths == [sorted(batch) for batch in lengths]


def test_what_a_policy_of_one_s_own_prints_is_not_in_the_summary(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "talkative.py").write_text(
        "from alignedserve.scheduler.colocated.orca import OrcaScheduler\nprint('imported')\n\n\n"
        "class Talkative(OrcaScheduler):\n    OPTIONS = {'max_batch': 8, 'n_workers': 1}\n\n"
        "    def plan(self, now_s):\n        print('planned')\n        return super().plan(now_s)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    name = "talkative:Talkative"
    summary, told = simulate(capsys, "--trace", MIX, "--policy", name, "--json")
    assert summary[name]["completed"] == 24
    assert "imported" in told
    assert "planned" in told


def test_the_objective_for_tpot_reaches_the_policy_that_keeps_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--trace", MIX, "--policy", "aligned-cost,aligned", "--slo-tpot", "0.1", "--json")
    summary, _ = simulate(capsys, *arguments, "--set", "aligned.scheduler.tpot_objective_s=0.2")
    configured = summary["run"]["configuration"]["policies"]
    found = {name: configured[name]["config"]["scheduler"]["tpot_objective_s"] for name in configured}
    assert found == {"aligned-cost": 0.1, "aligned": 0.2}


def test_memserve_is_the_last_of_its_steps(capsys: pytest.CaptureFixture[str]) -> None:
    trace = "chats:conversations=3,turns=2"
    arguments = ("--trace", trace, "--rate", "1", "--policy", "memserve,memserve-3", "--json")
    summary, _ = simulate(capsys, *arguments, "--set", "memserve.scheduler.max_wait_s=100")
    assert summary["memserve"] == summary["memserve-3"]
    assert summary["memserve"]["completed"] == 6


def test_the_configuration_that_ran_is_the_one_recorded(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("scheduler: {policy: fcfs, refuse_for_load: true, max_queue: 2}\ncluster: {prefill: 7}\n")
    arguments = ("--trace", MIX, "--policy", "aligned,fcfs", "--prefill", "2", "--decode", "3", "--config", str(file))
    asked = ("--set", "aligned.scheduler.refuse_for_load=true")
    summary, _ = simulate(capsys, *arguments, *asked, "--json")
    for policy, refuses in (("aligned", True), ("fcfs", False)):
        config = summary["run"]["configuration"]["policies"][policy]["config"]
        assert (config["scheduler"]["policy"], config["scheduler"]["refuse_for_load"]) == (policy, refuses)
        assert (config["cluster"]["prefill"], config["cluster"]["decode"]) == (2, 3)
        assert (summary[policy]["refused"] > 0) is refuses


def test_rates_and_seeds_are_swept_and_settings_reach_their_policy(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--trace", MIX, "--rate", "10:30:20", "--seeds", "2", "--policy", "vllm,aligned", "--limit", "12")
    settings = ("--set", "vllm.max_num_seqs=2", "--set", "aligned.scheduler.min_batch_requests=3")
    summary, _ = simulate(capsys, *arguments, *settings, "--warmup-s", "0.05", "--json")
    for policy in ("vllm", "aligned"):
        rates = summary[policy]["by_rate"]
        assert [row["rate_per_s"] for row in rates] == [10.0, 30.0]
        assert summary[policy]["rate_per_s"] == 30.0
        assert set(rates[0]["by_seed"]) == {"0", "1"}
        assert rates[0]["ci95"]["ttft_mean_s"] >= 0
    chosen = summary["run"]["configuration"]["policies"]
    assert chosen["vllm"]["options"]["max_num_seqs"] == 2
    assert chosen["aligned"]["config"]["scheduler"]["min_batch_requests"] == 3


def test_an_iteration_gap_is_charged_to_the_policy_that_it_was_set_for(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--trace", MIX, "--policy", "aligned,fcfs", "--set", "fcfs.iteration_gap_s=0.01", "--json")
    summary, _ = simulate(capsys, *arguments)
    assert summary["fcfs"]["iteration_gap_mean_s"] == pytest.approx(0.01)
    assert summary["aligned"]["iteration_gap_mean_s"] == 0
    assert summary["fcfs"]["itl_mean_s"] > summary["aligned"]["itl_mean_s"] + 0.009
    assert summary["run"]["configuration"]["policies"]["fcfs"]["iteration_gap_s"] == 0.01


def test_a_policy_may_not_know_the_cost(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--trace", MIX, "--policy", "aligned,fcfs", "--set", "aligned.knows_cost=false", "--json")
    summary, _ = simulate(capsys, *arguments)
    policies = summary["run"]["configuration"]["policies"]
    assert policies["aligned"]["knows_cost"] is False
    assert policies["fcfs"]["knows_cost"] is True


def test_files_are_written_and_are_the_same_each_time(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "t.csv"
    rows = "".join(f"{number * 0.01},{100 + 50 * number},{5 + number}\n" for number in range(12))
    trace.write_text(f"arrival_time_s,input_tokens,output_tokens\n{rows}")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        simulate(capsys, "--trace", "../t.csv", "--policy", "aligned,vllm", "--out", "out")
    files = sorted(file.name for file in (tmp_path / "a/out").iterdir())
    assert files == ["iterations.parquet", "report.html", "requests.csv", "summary.json"]
    for name in files:
        assert (tmp_path / "a/out" / name).read_bytes() == (tmp_path / "b/out" / name).read_bytes(), name
    requests = list(csv.DictReader((tmp_path / "a/out/requests.csv").read_text().splitlines()[1:]))
    assert [int(row["output_tokens"]) for row in requests] == [5 + number for number in range(12)] * 2
    summary = json.loads((tmp_path / "a/out/summary.json").read_text())
    mean = sum(float(row["ttft_s"]) for row in requests if row["policy"] == "vllm") / 12
    assert summary["vllm"]["ttft_mean_s"] == pytest.approx(mean)


def test_a_request_log_is_shown_beside_its_simulation(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    entry = {"arrival_unix_s": 5.0, "queue_unix_s": 5.0, "input_tokens": 9, "output_tokens": 3}
    entry |= {"first_token_unix_s": 5.25, "second_token_unix_s": 6.0, "last_token_unix_s": 7.25, "queue_s": 0.125}
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps(entry) + "\n")
    assert main(["simulate", "--trace", str(log)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split() == ["aligned", "in", "the", "log"]
    figures = {line.split(",")[0].strip(): line.split()[-1] for line in shown[1:]}
    assert (figures["TTFT mean"], figures["queue mean"]) == ("0.25", "0.125")
    assert "for the log's cluster give its own --cost-model" in figures.popitem()[0] + shown[-1]
    summary, _ = simulate(capsys, "--trace", str(log), "--json")
    assert summary["run"]["trace"]["measured"]["tpot_mean_s"] == 1.0
    assert sum(value or 0.0 for key, value in summary["aligned"].items() if key.startswith("stage_")) > 0.0
    out = tmp_path / "out"
    assert main(["simulate", "--trace", str(log), "--out", str(out)]) == 0
    assert "<th>in the log</th>" in (out / "report.html").read_text()
    capsys.readouterr()
    assert main(["simulate", "--trace", str(log), "--limit", "1"]) == 0
    assert "in the log" not in capsys.readouterr().out


def test_seeds_show_intervals_and_where_they_change_nothing_it_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["simulate", "--trace", MIX, "--rate", "9", "--seeds", "2"]) == 0
    out = capsys.readouterr().out
    assert "±" in out
    assert "seeds do not change them" not in out
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_time_s,input_tokens,output_tokens\n0,9,9\n")
    assert main(["simulate", "--trace", str(trace), "--seeds", "2"]) == 0
    assert "seeds do not change them" in capsys.readouterr().out


def test_refused_requests_are_told_with_the_reason(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_time_s,input_tokens,output_tokens\n0,9,9\n0,10000000,5\n")
    _, error = simulate(capsys, "--trace", str(trace), "--policy", "aligned,vllm", "--json")
    assert "aligned: 1 refused, e.g. r1: " in error
    assert "vllm: 1 refused, e.g. r1: 10000005 tokens do not fit" in error


FAULTY = """
from alignedserve.scheduler.colocated.continuous import ContinuousScheduler

class Faulty(ContinuousScheduler):
    def _fill(self, draft, now_s):
        1 / 0
"""


def test_a_colocated_policy_that_raises_is_an_error_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "faulty_policy.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(tmp_path)
    _, error = simulate(capsys, "--trace", MIX, "--policy", "faulty_policy:Faulty", status=2)
    last = error.strip().splitlines()[-1]
    assert "policy 'faulty_policy:Faulty': ZeroDivisionError('division by zero')" in last
    assert last.endswith("faulty_policy.py:6)")


def test_without_the_extra_there_is_a_summary_and_out_says_what_to_install(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    arguments = ("--trace", MIX, "--limit", "3", "--json")
    assert simulate(capsys, *arguments)[0]["aligned"]["completed"] == 3
    _, error = simulate(capsys, *arguments, "--out", str(tmp_path / "out"), status=2)
    assert "pip install 'alignedserve[simulate]'" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "--trace is missing"),
        (("--trace", "/none.csv"), "cannot read the trace /none.csv"),
        (("--trace", MIX, "--policy", "alined"), "unknown policy 'alined'; the nearest is aligned; choose"),
        (("--trace", MIX, "--policy", "vllm,vllm"), "none twice"),
        (("--trace", MIX, "--policy", ""), "give at least one policy"),
        (("--trace", MIX, "--set", "aligned.decode.max_running=auto"), "in one iteration; 0: from the cache's size"),
        (("--trace", MIX, "--cost-model", "h100"), "unknown cost model 'h100'; choose one of"),
        (("--trace", MIX, "--kernel-mode", "x"), "unknown kernel mode 'x'; choose one of: split_kv, no_split"),
        (
            ("--trace", MIX, "--policy", "vllm", "--set", "vllm.max_seqs=1"),
            "has no option 'max_seqs'; it has: max_num_seqs, max_num_batched_tokens, async_scheduling, "
            "reserve_full_isl, prefix_caching, prefix_hit_share, routing",
        ),
        (("--trace", MIX, "--set", "aligned.scheduler.leaf=1"), "unknown configuration key 'scheduler.leaf'"),
        (("--trace", MIX, "--set", "aligned.gap=1"), "takes iteration_gap_s or SECTION.KEY of the configuration"),
        (("--trace", MIX, "--set", "aligned.scheduler.policy=fcfs"), "scheduler.policy: --policy of"),
        (("--trace", MIX, "--set", "aligned.cluster.prefill=7"), "cluster.prefill: --prefill of"),
        (("--trace", MIX, "--set", "aligned.cluster.decode=1"), "cluster.decode: --decode of"),
        (("--trace", MIX, "--set", "aligned.gateway.port=81"), "gateway.port: this key has no effect in a simulation"),
        (
            ("--trace", MIX, "--set", "aligned.kv_pool.size_gib=2"),
            "no effect in a simulation: see pool_tokens of",
        ),
        (("--trace", MIX, "--set", "aligned.knows_cost=no"), "knows_cost: must be true or false, not 'no'"),
        (("--trace", MIX, "--set", "aligned.iteration_gap_s=-1"), "iteration_gap_s: must be at least 0 seconds"),
        (
            ("--trace", MIX, "--set", "aligned.iteration_gap_s=ten"),
            "iteration_gap_s: must be at least 0 seconds",
        ),
        (
            ("--trace", MIX, "--policy", "vllm", "--set", "vllm.iteration_gap_s=1"),
            "has no option 'iteration_gap_s'",
        ),
        (("--trace", MIX, "--set", "fcfs.x=1"), "with a policy of --policy (aligned)"),
        (("--trace", MIX, "--policy", ".x:Y"), "'.x:Y': .x:Y is relative"),
        (
            ("--trace", MIX, "--policy", "sarathi", "--set", "sarathi.watermark=nan"),
            "sarathi.watermark must be of type float",
        ),
        (
            ("--trace", MIX, "--kernel-mode", "no_split", "--block-bandwidth", "inf"),
            "block_bandwidth of a cost model must be a finite number above 0",
        ),
        (("--trace", MIX, "--rate", "1", "--cv", "1e-200"), "--cv must be 0, or between"),
        (("--trace", MIX, "--rate", "1e-300"), "--rate 1e-300: must be 0.000001 to 1e+12"),
        (("--trace", MIX, "--seeds", "9" * 20), "--seeds takes a count of at most 1000"),
        (("--trace", MIX, "--seeds", "1," + "9" * 20), "a seed must be a 64-bit integer"),
        (("--trace", MIX, "--seed", "9" * 20), "a seed must be a 64-bit integer"),
        (("--trace", MIX, "--rate", "fast"), "--rate takes R or A:B:STEP"),
        (("--trace", MIX, "--cv", "2"), "needs --rate"),
        (("--trace", MIX, "--clients", "0"), "--clients must be at least 1"),
        (("--trace", MIX, "--clients", "2", "--rate", "3"), "--clients 2 excludes --rate"),
        (("--trace", MIX, "--decode", "0"), "--decode must be at least 1"),
        (("--trace", MIX, "--slo-ttft", "-1"), "--slo-ttft must be more than 0"),
        (("--trace", MIX, "--hardware", "/none.toml"), "cannot read the hardware file /none.toml"),
        (
            ("--trace", MIX, "--policy", "aligned,vllm", "--set", "vllm.max_num_seqs=4096"),
            "max_num_batched_tokens must be at least 4096",
        ),
        (
            ("--trace", MIX, "--policy", "fcfs,sarathi", "--set", "sarathi.routing=nearest"),
            "unknown routing 'nearest'; choose one of",
        ),
        (
            ("--trace", MIX, "--policy", "aligned,vllm", "--set", "aligned.prefill.batch_buffer_blocks=999999"),
            "no request fits in these stores",
        ),
    ],
)
def test_what_cannot_be_is_said_in_a_line_and_ends_with_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], problem: str
) -> None:
    _, error = simulate(capsys, *arguments, status=2)
    assert error.startswith("alignedserve: error: ")
    assert problem in error
    assert error.count("\n") == 1


def test_a_model_that_says_nothing_of_its_machine_gets_as_many_bytes_whatever_its_tokens_have() -> None:
    plain, wide = (default_hardware({"kv_bytes_per_token": size}) for size in (FALLBACK.kv_bytes_per_token, 262_144))
    assert plain == FALLBACK
    assert wide.kv_tokens * wide.kv_bytes_per_token == FALLBACK.kv_tokens * FALLBACK.kv_bytes_per_token
    assert wide.pool_tokens == FALLBACK.pool_tokens // 2
    assert default_hardware({"kv_bytes_per_token": 262_144, "kv_tokens": 9}).kv_tokens == 9


def test_the_hardware_template_can_be_read_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    printed, _ = simulate(capsys, "--print-hardware")
    file = tmp_path / "machine.toml"
    file.write_text(printed.replace("block_size = 16", "block_size = 32"))
    again, _ = simulate(capsys, "--print-hardware", "--hardware", str(file))
    assert again == file.read_text()
    file.write_text('{"pool_tokens": "many"}')
    _, error = simulate(capsys, "--print-hardware", "--hardware", str(file), status=2)
    assert "pool_tokens must be a number" in error


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("kv_tokens = 1e300", "kv_tokens must be at most"),
        ('{"pool_tokens": 1' + "0" * 400 + "}", "pool_tokens must be at most"),
        ("kv_tokens = 10_000_000_000", "kv_tokens must be at most 16,777,216 blocks of 16 tokens"),
        ("kv_tokens = [1]", "kv_tokens must be a number, not list"),
        ("decode_slowdown = 3", "decode_slowdown_beside is below decode_slowdown; set both"),
        ("kv_tokens = nan", "kv_tokens must be a number, not nan"),
        ("message_s = inf", "message_s must be at most 3,600"),
        ('{"a": ' * 9000 + "1" + "}" * 9000, "nested too deeply"),
        ("a = " + "[" * 9000 + "]" * 9000, "nested too deeply"),
    ],
)
def test_a_hardware_file_that_no_machine_has_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, problem: str
) -> None:
    file = tmp_path / "machine"
    file.write_text(text)
    _, error = simulate(capsys, "--trace", MIX, "--hardware", str(file), status=2)
    assert problem in error


@pytest.mark.parametrize("text", ["[" * 9000 + "]" * 9000, '{"version": ' + "9" * 5000 + "}"])
def test_a_cost_file_that_cannot_be_read_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str
) -> None:
    file = tmp_path / "cost.json"
    file.write_text(text)
    _, error = simulate(capsys, "--trace", MIX, "--cost-model", str(file), status=2)
    assert str(file) in error


def test_rates_and_seeds() -> None:
    assert rates_of("0.5:2:0.5") == (0.5, 1.0, 1.5, 2.0)
    assert rates_of("1:2:0.3") == (1.0, 1.3, 1.6, 1.9)
    assert rates_of(None) == (None,)
    assert seeds_of(5, "3") == (5, 6, 7)
    assert seeds_of(5, "3,9") == (3, 9)
    for text in ("1:2", "2:1:1", "0", "1:2:0", "nan", "1:1e999999:1e-999999"):
        with pytest.raises(ConfigError):
            rates_of(text)
    for text in ("0", "a", "1,1"):
        with pytest.raises(ConfigError):
            seeds_of(0, text)


UNREAD = [
    ("aligned", ("starvation_after_s=60",), "scheduler.waiting_rule overdue or paper, and aligned-cost, read it"),
    ("fcfs", ("waiting_rule=paper",), "the policies aligned and aligned-no-prefetch read it"),
    ("fcfs", ("starvation_after_s=60",), "scheduler.waiting_rule overdue or paper, and aligned-cost, read it"),
    ("fcfs", ("leaf_tokens=4",), "aligned policies read it"),
    ("aligned-cost", ("waiting_rule=rounds",), "the policies aligned and aligned-no-prefetch read it"),
    (
        "alignedserve.scheduler.policies.fcfs:FcfsPolicy",
        ("waiting_rule=paper",),
        "the policies aligned and aligned-no-prefetch read it",
    ),
    ("aligned", ("sharing=quantiles",), "several decode instances read it"),
    ("aligned", ("balance_slack=0",), "several decode instances read it"),
]
READ = [
    ("aligned", ("starvation_after_s=60", "waiting_rule=overdue"), ""),
    ("aligned-no-prefetch", ("waiting_rule=paper", "starvation_after_s=60", "leaf_tokens=4"), ""),
    ("aligned-cost", ("starvation_after_s=60",), ""),
    ("alignedserve.scheduler.policies.fcfs:FcfsPolicy", ("starvation_after_s=60", "leaf_tokens=4"), ""),
]


@pytest.mark.parametrize(("policy", "settings", "reader"), [*UNREAD, *READ])
def test_a_key_that_the_policy_or_its_rule_does_not_read_is_refused(
    capsys: pytest.CaptureFixture[str], policy: str, settings: tuple[str, ...], reader: str
) -> None:
    keys = [f"{policy}.scheduler.{setting}" for setting in settings]
    chosen = [word for key in keys for word in ("--set", key)]
    _, said = simulate(capsys, "--trace", MIX, "--policy", policy, *chosen, status=2 if reader else 0)
    message = f"--set {keys[0].partition('=')[0]}: this key has no effect here: {reader}"
    assert (message in said) == bool(reader)


RANKS = ("--trace", MIX, "--rate", "40", "--cost-model", "a100-opt-13b", "--prefill", "2")


def test_placements_are_compared_on_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (*RANKS, "--ranks", "3", "--placement", "round-robin,shared-pool", "--set")
    summary, _ = simulate(capsys, *arguments, "shared-pool.decode.max_running=4", "--json")
    assert set(summary) == {"round-robin", "shared-pool", "run"}
    assert 0 < summary["shared-pool"]["idle_share"] < 1
    assert summary["shared-pool"]["counters"]["moved_bytes"] == summary["shared-pool"]["moved_bytes"]
    described = summary["run"]["configuration"]["policies"]["shared-pool"]
    assert (described["ranks"], described["config"]["decode"]["max_running"]) == (3, 4)
    table, _ = simulate(capsys, *RANKS, "--ranks", "2")
    assert "shared-pool" in table.splitlines()[0]
    assert "idle share of ranks" in table
    assert "moved between ranks, B" in table


def test_ranks_take_the_tick_and_say_that_no_join_keeps_to_the_objective(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (*RANKS, "--ranks", "2", "--set", "shared-pool.scheduler.tick_s=0.5", "--json")
    summary, _ = simulate(capsys, *arguments, "--slo-tpot", "0.1")
    described = summary["run"]["configuration"]["policies"]["shared-pool"]
    assert described["config"]["scheduler"]["tick_s"] == 0.5
    (note,) = summary["run"]["notes"]
    assert "no placement limits joins by --slo-tpot" in note
    assert 0 <= summary["shared-pool"]["slo_attainment"] <= 1
    assert simulate(capsys, *arguments)[0]["run"]["notes"] == []


def test_one_rank_is_a_run_without_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    plain, _ = simulate(capsys, *RANKS, "--json")
    one, _ = simulate(capsys, *RANKS, "--ranks", "1", "--json")
    assert plain["aligned"] == one["aligned"]
    assert plain["run"]["configuration"] == one["run"]["configuration"]
    assert "idle_share" not in one["aligned"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--ranks", "0"), "--ranks must be at least 1"),
        (("--ranks", "1025"), "--ranks must be at most 1024"),
        (("--ranks", "2", "--placement", ""), "give at least one placement"),
        (("--placement", "round-robin"), "one rank leaves nothing to choose"),
        (("--ranks", "2", "--policy", "vllm"), "vllm is a colocated policy"),
        (("--ranks", "2", "--policy", "fcfs"), "give --placement instead"),
        (
            ("--ranks", "2", "--placement", "round-robbin"),
            "did you mean round-robin? Choose one of: round-robin, least",
        ),
        (
            ("--ranks", "2", "--placement", "foo"),
            "unknown placement 'foo'; choose one of: round-robin, least-requests,",
        ),
        (("--ranks", "2", "--placement", "round-robin,round-robin"), "none twice"),
        (("--ranks", "2", "--set", "shared-pool.scheduler.waiting_rule=paper"), "a run with ranks does not read it"),
        (
            ("--ranks", "2", "--set", "shared-pool.decode.graphs=off"),
            "a run with ranks does not read it; it reads decode.*, prefill.token_budget,",
        ),
        (("--ranks", "2", "--set", "round-robin.decode.max_running=4"), "with a policy of --policy"),
    ],
)
def test_senseless_options_of_ranks_end_with_a_message(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], problem: str
) -> None:
    _, said = simulate(capsys, *RANKS, *arguments, status=2)
    assert problem in said
