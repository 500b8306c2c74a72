"""Systems by name: built in, `package.module:Class`, entry points, and options with their types."""

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from alignedserve.cluster.launch.preflight import policy_note
from alignedserve.config import Config, SchedulerConfig
from alignedserve.errors import ConfigError
from alignedserve.request import RequestKey
from alignedserve.scheduler import systems
from alignedserve.scheduler.policies.base import BatchLimits, Entry
from alignedserve.scheduler.policies.fcfs import FcfsPolicy
from alignedserve.scheduler.policies.oracle import OraclePolicy
from alignedserve.scheduler.systems import (
    ENTRY_POINTS,
    SYSTEMS,
    Topology,
    listed,
    policy_class,
    resolve,
    scheduler_class,
    with_options,
)
from alignedserve.simulator.disaggregated import simulate
from alignedserve.simulator.hardware import Hardware
from alignedserve.simulator.workload import Arrival, Workload
from alignedserve.testing.linear_cost import LinearStepCost

FCFS = "alignedserve.scheduler.policies.fcfs:FcfsPolicy"


def test_every_system_of_the_issue_has_a_name_and_says_what_it_is():
    assert list(SYSTEMS) == [
        "aligned",
        "aligned-cost",
        "fcfs",
        "aligned-no-prefetch",
        "aligned-no-prefetch-fcfs",
        "oracle",
        "memserve-basic",
        "memserve-1",
        "memserve-2",
        "memserve-3",
        "mooncake",
        "mooncake-least-loaded",
        "mooncake-random",
        "vllm",
        "sarathi",
        "fastgen",
        "batchllm",
        "orca",
        "static",
    ]
    assert all(system.summary and resolve(name) is system for name, system in SYSTEMS.items())


def test_an_unknown_name_lists_the_choices():
    with pytest.raises(ConfigError, match=r"choose one of: aligned, .*static; or package\.module:Class"):
        resolve("nonesuch")


def test_a_policy_of_ones_own_is_named_by_its_place():
    system = resolve(FCFS)
    assert (system.name, system.topology) == (FCFS, Topology.DISAGGREGATED)
    assert policy_class(system) is FcfsPolicy


def test_an_entry_point_is_a_name_like_any_other(monkeypatch):
    points = [EntryPoint("mine", FCFS, systems.ENTRY_POINTS), EntryPoint("aligned", FCFS, systems.ENTRY_POINTS)]
    monkeypatch.setattr(systems, "entry_points", lambda group: points)
    assert policy_class(resolve("mine")) is FcfsPolicy
    assert resolve("aligned") is SYSTEMS["aligned"]  # built-in names cannot be replaced
    with pytest.raises(ConfigError, match="static, mine; or"):
        resolve("nonesuch")


def test_an_unknown_name_lists_the_choices_and_the_nearest():
    with pytest.raises(ConfigError, match="unknown policy 'fcsf'; the nearest is fcfs; choose one of: aligned, "):
        resolve("fcsf")
    with pytest.raises(ConfigError, match="unknown policy 'xyz'; choose one of: aligned, "):
        resolve("xyz")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no.such.module:Class", "cannot be imported"),
        ("alignedserve.scheduler.systems:Nothing", "cannot be imported"),
        ("alignedserve.scheduler.systems:Topology", "neither a BatchPolicy nor an InstanceScheduler"),
        ("alignedserve.scheduler.policies.base:BatchPolicy", "does not implement .*form"),
        (":", "cannot be imported"),
    ],
)
def test_what_is_no_policy_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        resolve(name)


def test_a_disaggregated_system_has_no_instance_scheduler():
    with pytest.raises(ConfigError, match="disaggregated"):
        scheduler_class(SYSTEMS["fcfs"])


def test_options_keep_their_types_and_unknown_ones_are_refused():
    vllm = SYSTEMS["vllm"]
    assert with_options(vllm, {"max_num_seqs": "64", "async_scheduling": "false"})["max_num_seqs"] == 64
    assert with_options(SYSTEMS["sarathi"], {"watermark": 0})["watermark"] == 0.0
    with pytest.raises(ConfigError, match="has no option 'seqs'; it has: max_num_seqs"):
        with_options(vllm, {"seqs": 1})
    for wrong in ("many", 1.5, True):
        with pytest.raises(ConfigError, match=r"vllm\.max_num_seqs must be of type int"):
            with_options(vllm, {"max_num_seqs": wrong})


def test_the_oracle_takes_the_fewest_tokens_left_and_only_what_it_was_told():
    oracle = OraclePolicy(SchedulerConfig())
    oracle.reveal({"long": 500, "short": 130, "big": 4010})
    for name, tokens in (("long", 100), ("short", 120), ("big", 4000)):
        oracle.insert(Entry(RequestKey(name), tokens, tokens, 0.0))
    names = [entry.key.request_id for entry in oracle.form(BatchLimits(5000, 1, 9), None, 0.0)]
    assert names == ["big", "short", "long"]
    assert [e.key.request_id for e in oracle.form(BatchLimits(300, 1, 9), RequestKey("long"), 0.0)] == ["long"]
    oracle.remove(RequestKey("big"))
    oracle.check_integrity()
    with pytest.raises(ConfigError, match="simulator only"):
        oracle.insert(Entry(RequestKey("unknown"), 1, 1, 0.0))
    assert oracle.totals() == (2, 220)


def test_the_example_of_the_documentation_is_a_policy(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[4])
    system = resolve("examples.shortest_first:ShortestFirst")
    assert (system.topology, system.summary) == (
        Topology.DISAGGREGATED,
        "Forms batches from the shortest prefixes, as many as fit.",
    )
    policy = policy_class(system)(SchedulerConfig())
    for name, tokens in (("long", 900), ("short", 100), ("middle", 300)):
        policy.insert(Entry(RequestKey(name), tokens, tokens, 0.0))

    def names(limits, seed=None):
        return [entry.key.request_id for entry in policy.form(limits, seed, 0.0)]

    assert names(BatchLimits(450, 1, 9)) == ["short", "middle"]
    assert names(BatchLimits(950, 1, 9), RequestKey("long")) == ["long"]
    assert names(BatchLimits(50, 1, 9)) == ["short"]  # alone, although it exceeds the limit
    assert [entry.tokens for entry in policy.matching(200, 400, BatchLimits(2000, 1, 9))] == [100, 300]
    assert [entry.tokens for entry in policy.matching(200, 400, BatchLimits(350, 1, 9))] == [100]
    assert [policy.matches(tokens, 200, 400) for tokens in (100, 400, 401)] == [True, True, False]
    policy.remove(RequestKey("short"))
    assert policy.totals() == (2, 1200)
    policy.check_integrity()
    workload = Workload(tuple(Arrival(f"r{i}", 0.01 * i, 50 + 70 * (i % 7), 20 + i) for i in range(30)))
    hardware = Hardware(kv_tokens=2048, kv_bytes_per_token=1024, pool_tokens=20000)
    result = simulate(workload, system, Config(), hardware, LinearStepCost(), LinearStepCost())
    assert [len(one.token_s) for one in result.requests] == list(range(20, 50))


def test_a_start_says_what_aligned_cost_lacks():
    """Without a measured cost it is blind to unequal lengths; without an objective nothing bounds latency."""

    def said(**keys):
        return policy_note(Config(scheduler=SchedulerConfig(**keys)))

    neither = said(policy="aligned-cost")
    assert "without --cost-model" in neither
    assert "without --tpot-objective" in neither
    assert "--cost-model" not in said(policy="aligned-cost", cost_model="a100-opt-13b")
    assert "--tpot-objective" not in said(policy="aligned-cost", tpot_objective_s=0.1)
    assert said(policy="aligned-cost", cost_model="a100-opt-13b", tpot_objective_s=0.1) == said(policy="aligned") == ""


@pytest.mark.parametrize(
    ("keys", "unread"),
    [
        ({"starvation_after_s": 60.0}, "starvation_after_s"),
        ({"policy": "fcfs", "waiting_rule": "paper"}, "waiting_rule"),
        ({"policy": "fcfs", "leaf_tokens": 4}, "leaf_tokens"),
        ({"starvation_after_s": 60.0, "waiting_rule": "paper"}, ""),
        ({"policy": "fcfs"}, ""),
        ({"policy": "alignedserve.scheduler.policies.fcfs:FcfsPolicy", "starvation_after_s": 60.0}, ""),
    ],
)
def test_a_start_names_a_key_that_the_policy_does_not_read(keys, unread):
    said = policy_note(Config(scheduler=SchedulerConfig(**keys)))
    assert said.startswith(f"note: scheduler.{unread} has no effect with policy") if unread else not said
    assert said.count("note:") == bool(unread)


def test_an_entry_point_that_cannot_be_imported_is_named(monkeypatch, capsys):
    broken = EntryPoint("broken-one", "no.such.module:Class", ENTRY_POINTS)
    monkeypatch.setattr("alignedserve.scheduler.systems.entry_points", lambda group: [broken])
    assert "broken-one" not in {system.name for system in listed()}
    assert "warning: policy 'broken-one': no.such.module:Class cannot be imported" in capsys.readouterr().err
