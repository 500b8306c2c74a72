"""One run of a disaggregated system: separate prefill and decode, with the pool between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from alignedserve.config import SECTIONS, Config
from alignedserve.errors import ConfigError
from alignedserve.scheduler.core.guarded_policy import GuardedPolicy
from alignedserve.scheduler.cost.step import StepCost
from alignedserve.scheduler.policies.base import BatchPolicy
from alignedserve.scheduler.policies.oracle import OraclePolicy
from alignedserve.scheduler.systems import System, Topology
from alignedserve.simulator.cell import Cell
from alignedserve.simulator.decode import SimulatedDecode
from alignedserve.simulator.hardware import Hardware
from alignedserve.simulator.prefill import SimulatedPrefill
from alignedserve.simulator.report.results import RequestResult, RunResult
from alignedserve.simulator.report.steps import merge
from alignedserve.simulator.workload import Workload


def simulate(
    workload: Workload,
    system: System,
    config: Config,
    hardware: Hardware,
    prefill_cost: StepCost,
    decode_cost: StepCost,
    *,
    prefill_instances: int = 1,
    decode_instances: int = 1,
    seed: int = 0,
    refuse_for_load: bool = False,
    leap: bool = True,
    iteration_gap_s: float = 0.0,
    knows_cost: bool = True,
) -> RunResult:
    """Replay the workload to its end. Pure: the same arguments give the same result, to the last bit.

    `refuse_for_load`: whether refusals by prediction and queue limits apply, as configured; otherwise every request
    that the stores can hold is served. `seed` is only recorded: nothing here is random. `leap`: False takes every
    iteration alone, with the same results, slowly. `iteration_gap_s`: charged before each decode pass, in addition to
    the hardware's overhead. `knows_cost`: False lets the scheduler only learn from iterations, as a cluster without
    `scheduler.cost_model` does.

    Raises ConfigError if the system is a colocated one, or no request fits in the hardware's stores.
    """
    if system.topology is not Topology.DISAGGREGATED:
        raise ConfigError(f"{system.name} is a {system.topology.value} system without prefill and decode instances")
    config = as_run(config, system, prefill_instances, decode_instances, refuse_for_load)
    cell = Cell(workload, config, hardware, (prefill_cost, decode_cost), leap, iteration_gap_s)
    cell.core.prepare_policies(partial(_prepare, workload=workload))
    if knows_cost:
        cell.core.use_cost(decode_cost)
    cell.run()
    cell.check_nothing_is_left()
    instances: list[SimulatedPrefill | SimulatedDecode] = [*cell.prefills.values(), *cell.decodes.values()]
    return RunResult(
        policy=system.name,
        requests=[cell.requests[arrival.request_id].result for arrival in workload.arrivals],
        steps=merge([instance.steps for instance in instances], [instance.gap_s for instance in instances]),
        instances=tuple(instance.name for instance in instances),
        end_s=max((request.token_s[-1] for request in _results(cell) if request.token_s), default=0.0),
        pool_blocks=cell.pool.occupancy,
        counters=_counters(cell),
        configuration={
            "config": asdict(config),
            "hardware": asdict(hardware),
            "prefill_cost": prefill_cost.describe(),
            "decode_cost": decode_cost.describe(),
            "seed": seed,
            "iteration_gap_s": iteration_gap_s,
            "knows_cost": knows_cost,
        },
    )


def _prepare(policy: BatchPolicy, workload: Workload) -> None:
    """A fault of the policy ends the simulation; an oracle is told output lengths, which no cluster knows."""
    if isinstance(policy, GuardedPolicy):
        policy.strict = True
        policy = policy.inner
    if isinstance(policy, OraclePolicy):
        ends = {arrival.request_id: arrival.input_tokens + arrival.output_tokens for arrival in workload.arrivals}
        policy.reveal(ends)


def configured(config: Config, settings: Mapping[str, Any]) -> Config:
    """`config` with these keys (`section.key`) set. Raises ConfigError for an unknown key."""
    for name, value in settings.items():
        section, _, key = name.partition(".")
        if section not in SECTIONS or not hasattr(getattr(config, section), key):
            raise ConfigError(f"there is no configuration key {name}")
        config = replace(config, **{section: replace(getattr(config, section), **{key: value})})
    return config


def as_run(config: Config, system: System, prefill: int, decode: int, refuse_for_load: bool) -> Config:
    """`config` with the values that a run decides: policy and its settings, number of instances, refusals."""
    settings: dict[str, Any] = {
        "cluster.prefill": prefill,
        "cluster.decode": decode,
        "scheduler.policy": system.name,
        "scheduler.refuse_for_load": refuse_for_load,
    }
    return configured(config, {**settings, **system.settings})


def _results(cell: Cell) -> list[RequestResult]:
    return [request.result for request in cell.requests.values()]


def _counters(cell: Cell) -> dict[str, float]:
    counters: dict[str, float] = dict(sorted(cell.counters.items()))
    statuses = [decode.scheduler.status() for decode in cell.decodes.values()]
    counters["iterations"] = sum(status.iterations for status in statuses)
    counters["switch_iterations"] = sum(status.switch_iterations for status in statuses)
    counters["held_iterations"] = sum(status.held_iterations for status in statuses)
    counters["evictions"] = sum(status.evictions for status in statuses)
    counters["prefill_passes"] = sum(len(prefill.steps) for prefill in cell.prefills.values())
    counters["core_events"] = cell.core.events_handled
    counters["bypassed_prefetch"] = cell.core.bypassed_prefetch
    if cell.prefixes is not None:
        counters["prefix_queried_tokens"] = cell.prefixes.queried_tokens
        counters["prefix_hit_tokens"] = cell.prefixes.hit_tokens
    counters["refused"] = sum(bool(request.refused) for request in _results(cell))
    for name in ("from_pool", "to_pool", "from_peers", "to_peers"):
        links = [getattr(part, name) for part in (*cell.prefills.values(), *cell.decodes.values())]
        counters[f"{name}_bytes"] = sum(link.moved_bytes for link in links)
    return counters
