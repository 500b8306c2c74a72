"""Runs every policy at every rate with every seed, one after the other, and keeps no run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from alignedserve.batch_size import automatic_max_running
from alignedserve.config import Config
from alignedserve.config_sources import load, to_tree, value_of
from alignedserve.errors import ConfigError
from alignedserve.scheduler.cost.measured import MeasuredCost
from alignedserve.scheduler.cost.step import StepCost
from alignedserve.scheduler.ranks.names import placement_class
from alignedserve.scheduler.systems import (
    CACHE_OPTIONS,
    System,
    Topology,
    faults_named,
    resolve,
    unread,
    with_options,
)
from alignedserve.simulator.colocated import simulate_colocated
from alignedserve.simulator.disaggregated import as_run, simulate
from alignedserve.simulator.hardware import Hardware
from alignedserve.simulator.pipeline import PipelinedCost
from alignedserve.simulator.ranks.run import as_run as as_ranks_run
from alignedserve.simulator.ranks.run import simulate_ranks
from alignedserve.simulator.report.results import RunResult
from alignedserve.simulator.sizes import Sizes
from alignedserve.simulator.traces import Load, Trace
from alignedserve.simulator.workload import Workload

ROUTING = "routing"
TPOT_OBJECTIVE = "scheduler.tpot_objective_s"
REFUSE_FOR_LOAD = "scheduler.refuse_for_load"
# Configuration keys that options of the command decide.
DECIDED = {"scheduler.policy": "--policy", "cluster.prefill": "--prefill", "cluster.decode": "--decode"}
# Other configuration keys that a run reads: whole sections, or single keys.
_READ = (
    "scheduler.", "prefill.", "decode.", "cluster.prefetch", "kv_pool.growth_reserve", "kv_pool.prefix_cache",
    "kv_pool.cache_policy",
)  # fmt: skip
# Keys about how an engine computes, which a run leaves to the cost model.
_OF_ENGINES = frozenset((
    "prefill.layerwise_tokens", "prefill.tensor_parallel", "prefill.pipeline_parallel", "prefill.nodes",
    "decode.graphs", "decode.graph_sizes", "decode.overlap", "decode.tensor_parallel", "decode.pipeline_parallel",
    "decode.expert_parallel", "decode.placement", "decode.nodes",
))  # fmt: skip
_OF_HARDWARE = {"kv_pool.size_gib": "pool_tokens", "kv_pool.block_size": "block_size"}
# Keys that a run with ranks reads.
_READ_BY_RANKS = (
    "decode.", "prefill.token_budget", "prefill.max_requests", "prefill.queue_tokens", "prefill.cache_blocks",
    "kv_pool.growth_reserve", "scheduler.tick_s",
)  # fmt: skip
ITERATION_GAP = "iteration_gap_s"
KNOWS_COST = "knows_cost"


def has_effect(key: str) -> bool:
    """Whether this `section.key` of the configuration affects a run, and no option of the command decides it."""
    return key.startswith(_READ) and key not in DECIDED and key not in _OF_ENGINES


@dataclass(frozen=True, slots=True)
class ComparedPolicy:
    """A policy to run. `config`: for a disaggregated policy. `options`: all options of a colocated one, and
    `CACHE_OPTIONS` of a disaggregated one.

    `iteration_gap_s`: charged to a disaggregated policy before each decode iteration, on top of the hardware's
    overhead. `knows_cost`: whether it knows the cost model, or learns from iterations as in a cluster without one.
    `ranks` above 1: `name` is that of a placement.
    """

    name: str
    system: System
    config: Config
    options: Mapping[str, Any]
    routing: str
    iteration_gap_s: float = 0.0
    ranks: int = 1
    knows_cost: bool = True

    @property
    def colocated(self) -> bool:
        return self.system.topology is Topology.COLOCATED

    @property
    def refuse_for_load(self) -> bool:
        return self.config.scheduler.refuse_for_load

    @classmethod
    def of(
        cls,
        name: str,
        settings: Mapping[str, str],
        config_file: str | None,
        tpot_objective_s: float | None = None,
        decode: int | None = None,
    ) -> ComparedPolicy:
        """`settings`: texts by option (colocated), or by section.key of the configuration (or `iteration_gap_s`,
        `knows_cost`).

        `tpot_objective_s`: the objective of a disaggregated policy if neither `settings` nor the file set one.
        `decode`: the number of decode instances; with one, settings that only several read are refused. No
        request is refused for load unless `settings` ask for it: the file's value is meant for a cluster. Raises
        ConfigError.
        """
        system = resolve(name)
        own = dict(settings)
        if system.topology is Topology.COLOCATED:
            routing = own.pop(ROUTING, "least-loaded")
            return cls(name, system, Config(), with_options(system, own, (ROUTING,)), routing)
        gap_s = _gap_s(name, own.pop(ITERATION_GAP, "0"))
        knows_cost = _knows_cost(name, own.pop(KNOWS_COST, "true"))
        caching = {key: own.pop(key) for key in system.options if key in own}
        options = {**CACHE_OPTIONS, **with_options(system, caching)}
        if wrong := [key for key in own if "." not in key]:
            raise ConfigError(
                f"--set {name}.{wrong[0]}: a disaggregated policy takes {ITERATION_GAP} or SECTION.KEY of the "
                f"configuration, or {KNOWS_COST}"
            )
        for key, option in DECIDED.items():
            if key in own:
                raise ConfigError(f"--set {name}.{key}: {option} of `alignedserve simulate` sets this; use that option")
        typed = {key: value_of(key, text, "--set") for key, text in own.items()}
        if idle := [key for key in own if not has_effect(key)]:
            instead = f": see {_OF_HARDWARE[idle[0]]} of --hardware" if idle[0] in _OF_HARDWARE else ""
            raise ConfigError(f"--set {name}.{idle[0]}: this key has no effect in a simulation{instead}")
        for key, fixed in system.settings.items():
            if key in typed and typed[key] != fixed:
                raise ConfigError(f"--set {name}.{key}: this policy fixes it to {fixed}")
        flags = {REFUSE_FOR_LOAD: False, **typed, **system.settings}
        config = load(config_file, environ={}, flags=flags)
        for key, reader in unread(replace(config.scheduler, policy=name), decode).items():
            if key in typed:
                raise ConfigError(f"--set {name}.{key}: this key has no effect here: {reader}")
        if tpot_objective_s is not None and TPOT_OBJECTIVE not in typed and not config.scheduler.tpot_objective_s:
            config = load(config_file, environ={}, flags={**flags, TPOT_OBJECTIVE: tpot_objective_s})
        return cls(name, system, config, options, "", gap_s, knows_cost=knows_cost)

    @classmethod
    def of_placement(
        cls, name: str, ranks: int, settings: Mapping[str, str], config_file: str | None
    ) -> ComparedPolicy:
        """A placement on `ranks` ranks. `settings`: texts by section.key of the configuration. Raises ConfigError."""
        found = placement_class(name)
        for key in settings:
            if key in _OF_ENGINES or not key.startswith(_READ_BY_RANKS):
                reads = ", ".join(one + "*" * one.endswith(".") for one in _READ_BY_RANKS)
                raise ConfigError(f"--set {name}.{key}: a run with ranks does not read it; it reads {reads}")
        typed = {key: value_of(key, text, "--set") for key, text in settings.items()}
        summary = (found.__doc__ or "").partition("\n")[0]
        system = System(name, Topology.DISAGGREGATED, f"{found.__module__}:{found.__name__}", summary)
        return cls(name, system, load(config_file, environ={}, flags=typed), {}, "", ranks=ranks)

    def describe(self, prefill: int, decode: int) -> dict[str, object]:
        """Description of a run with these numbers of instances; a colocated policy ignores them."""
        shared = {"topology": self.system.topology.value, "target": self.system.target}
        if self.colocated:
            return {**shared, "options": dict(self.options), ROUTING: self.routing}
        if self.ranks > 1:
            return {**shared, "config": to_tree(as_ranks_run(self.config, prefill, decode)), "ranks": self.ranks}
        config = as_run(self.config, self.system, prefill, decode, self.refuse_for_load)
        options = {ITERATION_GAP: self.iteration_gap_s, KNOWS_COST: self.knows_cost}
        caching = self.options if self.system.options else {}
        return {**shared, "config": to_tree(config), **options, **caching}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be run, and on what hardware. `rank_cost`, `prefill_cost`: of one decode rank and of a prefill
    instance, if they differ from `cost`.

    `stages`: of a prefill and of a decode instance.
    """

    trace: Trace
    candidates: tuple[ComparedPolicy, ...]
    cost: MeasuredCost
    hardware: Hardware
    load: Load
    rates: tuple[float | None, ...]
    seeds: tuple[int, ...]
    instances: int
    prefill: int
    decode: int
    rank_cost: StepCost | None = None
    prefill_cost: MeasuredCost | None = None
    stages: tuple[int, int] = (1, 1)

    def describe(self) -> dict[str, object]:
        others = {"rank_cost": self.rank_cost, "prefill_cost": self.prefill_cost}
        return {
            **{name: cost.describe() for name, cost in others.items() if cost is not None},
            "policies": {one.name: self._described(one) for one in self.candidates},
            "hardware": asdict(self.hardware),
            "instances": {"colocated": self.instances, "prefill": self.prefill, "decode": self.decode},
            "stages": {"prefill": self.stages[0], "decode": self.stages[1]},
            "rates_per_s": list(self.rates),
            "cv": self.load.cv,
            "limit": self.load.limit,
            "clients": self.load.clients,
            "seeds": list(self.seeds),
        }

    def _described(self, candidate: ComparedPolicy) -> dict[str, object]:
        """With what `decode.max_running` 0 became."""
        described = candidate.describe(self.prefill, self.decode)
        if candidate.colocated:
            return described
        cache_tokens = Sizes.plan(candidate.config, self.hardware).decode_cache * self.hardware.block_size
        most = candidate.config.decode.max_running or automatic_max_running(cache_tokens)
        return {**described, "max_running": most}

    def workload(self, rate_per_s: float | None, seed: int) -> Workload:
        return self.trace.workload(replace(self.load, rate_per_s=rate_per_s), seed)

    def rehearse(self) -> None:
        """Run an empty workload with every policy, to raise ConfigError for invalid plans before the first run."""
        for candidate in self.candidates:
            self._run(candidate, Workload(()), self.seeds[0])

    @property
    def total(self) -> int:
        """The number of runs."""
        return len(self.rates) * len(self.seeds) * len(self.candidates)

    def runs(self, progress: Callable[[str], None]) -> Iterator[tuple[RunResult, float | None, int]]:
        """Yield each run with its rate and seed; `progress` is called before each."""
        done = 0
        for rate in self.rates:
            for seed in self.seeds:
                workload = self.workload(rate, seed)
                for candidate in self.candidates:
                    done += 1
                    at = "" if rate is None else f" at {rate:g} requests/s"
                    progress(
                        f"[{done}/{self.total}] {candidate.name}{at}, seed {seed}: {len(workload.arrivals)} requests"
                    )
                    yield self._run(candidate, workload, seed), rate, seed

    def _run(self, candidate: ComparedPolicy, workload: Workload, seed: int) -> RunResult:
        if candidate.colocated:
            with faults_named(candidate.system):
                return simulate_colocated(
                    workload,
                    candidate.system,
                    candidate.options,
                    self.hardware,
                    self.cost,
                    instances=self.instances,
                    seed=seed,
                    routing=candidate.routing,
                )
        if candidate.ranks > 1:
            return simulate_ranks(
                workload,
                candidate.name,
                candidate.config,
                self.hardware,
                self.prefill_cost or self.cost,
                self.rank_cost or self.cost,
                ranks=candidate.ranks,
                prefill_instances=self.prefill,
                decode_instances=self.decode,
                seed=seed,
            )
        prefill_cost = PipelinedCost.of(self.prefill_cost or self.cost, self.stages[0], self.hardware)
        undivided = 1 if self.cost.rounds_of > 1 else self.stages[1]
        decode_cost = PipelinedCost.of(self.cost, undivided, self.hardware)
        return simulate(
            workload,
            candidate.system,
            candidate.config,
            self.hardware,
            prefill_cost,
            decode_cost,
            prefill_instances=self.prefill,
            decode_instances=self.decode,
            seed=seed,
            refuse_for_load=candidate.refuse_for_load,
            iteration_gap_s=candidate.iteration_gap_s,
            knows_cost=candidate.knows_cost,
            options=candidate.options,
        )


def _gap_s(policy: str, text: str) -> float:
    try:
        gap_s = float(text)
    except ValueError:
        gap_s = -1.0
    if not 0 <= gap_s < float("inf"):
        raise ConfigError(f"--set {policy}.{ITERATION_GAP}: must be at least 0 seconds, not {text!r}")
    return gap_s


def _knows_cost(policy: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise ConfigError(f"--set {policy}.{KNOWS_COST}: must be true or false, not {text!r}")
    return text == "true"
