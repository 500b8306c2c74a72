"""One run of the simulator: its inputs and its stored outcome."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from alignedserve.errors import ConfigError
from alignedserve.scheduler.cost.load import default_hardware as hardware_of_cost
from alignedserve.scheduler.cost.load import load_step_cost
from alignedserve.scheduler.cost.step import StepCost
from alignedserve.scheduler.systems import Topology as Kind
from alignedserve.scheduler.systems import resolve
from alignedserve.simulator.hardware import Hardware
from alignedserve.simulator.hardware_file import default_hardware
from alignedserve.simulator.replay import ComparedPolicy, Plan
from alignedserve.simulator.report.results import RunResult
from alignedserve.simulator.report.summary import Metric, measure
from alignedserve.simulator.traces import Load
from evaluation.workloads import Source

ROOT = Path(__file__).parents[3]
# What a run is made by; docs, tests and other components do not change its figures.
CODE = ("scheduler", "simulator", "src/alignedserve/*.py", "benchmarks/paper/evaluation/runs.py")
PREFIX_CACHE = "kv_pool.prefix_cache"
LEVELS = 500  # stored quantiles of the iteration times: every 0.2 %
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Machine:
    """`bandwidth_gb_s`: of one thread block, for `no_split` mode; None: the cost model's default.

    `hardware_changes`: fields of `Hardware` that differ from the cost model's hardware.
    """

    cost_model: str
    kernel_mode: str = "split_kv"
    bandwidth_gb_s: float | None = None
    hardware_changes: tuple[tuple[str, float], ...] = ()

    @classmethod
    def parse(cls, cost_model: str, text: str) -> Machine:
        """`split_kv`, `no_split`, or `no_split:GB/S`. Raises ConfigError."""
        mode, _, bandwidth = text.partition(":")
        try:
            return cls(cost_model, mode, float(bandwidth) if bandwidth else None)
        except ValueError:
            raise ConfigError(f"--kernel-modes: {text!r} has no bandwidth in GB/s after its colon") from None

    @property
    def mode(self) -> str:
        """The kernel mode as tables name it."""
        return self.kernel_mode + ("" if self.bandwidth_gb_s is None else f", {self.bandwidth_gb_s:g} GB/s a block")

    def cost(self) -> StepCost:
        return _cost(self)

    def hardware(self) -> Hardware:
        return replace(default_hardware(hardware_of_cost(self.cost_model)), **dict(self.hardware_changes))


@dataclass(frozen=True, slots=True)
class Variant:
    """A policy with settings. `label` is its name in tables."""

    label: str
    policy: str
    settings: tuple[tuple[str, str], ...] = ()

    def candidate(self, tpot_objective_s: float | None = None) -> ComparedPolicy:
        """`tpot_objective_s`: the TPOT objective of `aligned-cost`; the others have none, as by default.

        Without a prefix cache, unless the policy or a setting asks for it: the paper's systems have none.
        """
        objective_s = tpot_objective_s if self.policy == "aligned-cost" else None
        system, settings = resolve(self.policy), dict(self.settings)
        if system.topology is Kind.DISAGGREGATED and PREFIX_CACHE not in system.settings:
            settings.setdefault(PREFIX_CACHE, "false")
        return ComparedPolicy.of(self.policy, settings, None, objective_s)


ALIGNED = Variant("aligned", "aligned")
ALIGNED_60_S = Variant(
    "aligned, 60 s", "aligned", (("scheduler.waiting_rule", "overdue"), ("scheduler.starvation_after_s", "60"))
)
ALIGNED_COST = Variant("aligned-cost", "aligned-cost")
FCFS = Variant("fcfs", "fcfs")
FCFS_10_MS = Variant("fcfs + 10 ms", "fcfs", (("iteration_gap_s", "0.01"),))
VLLM = Variant("vllm", "vllm")
FASTGEN = Variant("fastgen", "fastgen")
BASELINES = (FCFS, FCFS_10_MS, VLLM, FASTGEN)


@dataclass(frozen=True, slots=True)
class Topology:
    """Numbers of instances. Colocated policies get the sum."""

    prefill: int
    decode: int

    def __str__(self) -> str:
        return f"{self.prefill}:{self.decode}"


@dataclass(frozen=True, slots=True)
class Run:
    """`rate_per_s`: None: all requests arrive at time zero. `clients`: above 0, a closed loop of as many."""

    source: Source
    variant: Variant
    machine: Machine
    topology: Topology
    rate_per_s: float | None
    seed: int
    clients: int = 0

    def __str__(self) -> str:
        rate = "at once" if self.rate_per_s is None else f"{self.rate_per_s:.3g} requests/s"
        rate = f"{self.clients} clients" if self.clients else rate
        where = f"{self.machine.mode}, {self.topology}, {rate}, seed {self.seed}"
        return f"{self.variant.label}, {self.source.name}, {where}"

    def plan(self) -> Plan:
        return Plan(
            trace=self.source.trace(self.seed, at_once=self.rate_per_s is None),
            candidates=(self.variant.candidate(self.source.objectives.tpot_s),),
            cost=self.machine.cost(),
            hardware=self.machine.hardware(),
            load=Load(self.rate_per_s, limit=self.source.requests, clients=self.clients),
            rates=(self.rate_per_s,),
            seeds=(self.seed,),
            instances=self.topology.prefill + self.topology.decode,
            prefill=self.topology.prefill,
            decode=self.topology.decode,
        )

    def configuration(self, code: str) -> dict[str, Any]:
        """Everything that the outcome depends on, as JSON. `code`: of `code_digest`."""
        described = {
            "code": code,
            "plan": self.plan().describe(),
            "workload": self.source.describe(),
            "cost_model": self.machine.cost().describe(),
            "objectives": asdict(self.source.objectives),
            "levels": LEVELS,
        }
        found: dict[str, Any] = json.loads(json.dumps(described))
        return found


@dataclass(frozen=True, slots=True)
class Outcome:
    """`metrics`: those of the simulator's summary (docs/simulator.md), and those that `execute` adds.

    `iterations_s`: `LEVELS` + 1 quantiles of the time of a pass with decodes, including the gap before it.
    """

    metrics: dict[str, Metric]
    iterations_s: tuple[float, ...]

    def value(self, name: str) -> float:
        """The metric; NaN if the run has no value for it."""
        found = self.metrics[name]
        return float("nan") if found is None else float(found)

    def share_within(self, seconds: float) -> float:
        """Share of iterations that take at most `seconds`, to an accuracy of half of 1 / `LEVELS`."""
        levels = np.linspace(0.0, 1.0, len(self.iterations_s))
        return float(np.interp(seconds, self.iterations_s, levels, left=0.0, right=1.0))


def execute(run: Run) -> Outcome:
    """Simulate. Adds metrics.

    `charged_*`: times of decode iterations including the gap before them. `sustained_requests_per_s`: the rate at which
    requests ended, without the first and the last tenth of them.
    """
    ((result, _, _),) = run.plan().runs(lambda _: None)
    measured = measure(result, run.source.objectives)
    charged_s = measured.passes.seconds + measured.passes.gap
    metrics = {
        **measured.metrics,
        "charged_mean_s": float(charged_s.mean()),
        "charged_p99_s": float(np.percentile(charged_s, 99)),
        "sustained_requests_per_s": _sustained_per_s(result),
        "pool_peak_gib": _pool_peak_gib(result, run.machine.hardware()),
    }
    quantiles = np.quantile(charged_s, np.linspace(0.0, 1.0, LEVELS + 1))
    return Outcome(metrics, tuple(float(value) for value in quantiles))


@cache
def code_digest() -> str:
    """SHA-256 of the files in `CODE`, as they are on disk."""
    found = hashlib.sha256()
    for pattern in CODE:
        for file in sorted(ROOT.glob(f"{pattern}/**/*" if (ROOT / pattern).is_dir() else pattern)):
            if file.suffix in (".py", ".json"):
                found.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return found.hexdigest()


def digest(configuration: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(configuration, sort_keys=True).encode()).hexdigest()[:32]


def _sustained_per_s(result: RunResult) -> float | None:
    ends_s = sorted(request.token_s[-1] for request in result.requests if request.token_s)
    first, last = len(ends_s) // 10, len(ends_s) - 1 - len(ends_s) // 10
    span_s = ends_s[last] - ends_s[first] if last > first else 0.0
    return (last - first) / span_s if span_s > 0 else None


def _pool_peak_gib(result: RunResult, hardware: Hardware) -> float:
    blocks = max((blocks for _, blocks in result.pool_blocks), default=0)
    return blocks * hardware.block_size * hardware.kv_bytes_per_token / GIB


@cache
def _cost(machine: Machine) -> StepCost:
    options = {} if machine.bandwidth_gb_s is None else {"block_bandwidth": machine.bandwidth_gb_s * 1e9}
    return load_step_cost(machine.cost_model, kernel_mode=machine.kernel_mode, **options)
