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
from alignedserve.scheduler.systems import CACHE_OPTIONS, Option, System, Topology
from alignedserve.simulator.cell import Cell
from alignedserve.simulator.decode import SimulatedDecode
from alignedserve.simulator.hardware import Hardware
from alignedserve.simulator.prefill import SimulatedPrefill
from alignedserve.simulator.prefix.ideal import ideal_hit_tokens
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
    options: Mapping[str, Option] = CACHE_OPTIONS,
) -> RunResult:
    """Replay the workload to its end. Pure: the same arguments give the same result, to the last bit.

    `refuse_for_load`: whether refusals by prediction and queue limits apply, as configured; otherwise every request
    that the stores can hold is served. `seed` is only recorded: nothing here is random. `leap`: False takes every
    iteration alone, with the same results, slowly. `iteration_gap_s`: charged before each decode pass, in addition to
    the hardware's overhead. `knows_cost`: False lets the scheduler only learn from iterations, as a cluster without
    `scheduler.cost_model` does. `options`: as `CACHE_OPTIONS`.

    Raises ConfigError if the system is a colocated one, or no request fits in the hardware's stores.
    """
    if system.topology is not Topology.DISAGGREGATED:
        raise ConfigError(f"{system.name} is a {system.topology.value} system without prefill and decode instances")
    config = as_run(config, system, prefill_instances, decode_instances, refuse_for_load)
    answers, at_decode = bool(options["cache_answers"]), bool(options["cache_at_decode"])
    costs = prefill_cost, decode_cost
    cell = Cell(
        workload, config, hardware, costs, leap, iteration_gap_s, cache_answers=answers, cache_at_decode=at_decode
    )
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
        pool_blocks=cell.occupancy,
        counters={**_counters(cell), **_prefix_counters(cell, workload)},
        configuration={
            "config": asdict(config),
            "hardware": asdict(hardware),
            "prefill_cost": prefill_cost.describe(),
            "decode_cost": decode_cost.describe(),
            "seed": seed,
            "iteration_gap_s": iteration_gap_s,
            "knows_cost": knows_cost,
            "options": dict(options),
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
    counters["refused"] = sum(bool(request.refused) for request in _results(cell))
    for name in ("from_pool", "to_pool", "from_peers", "to_peers"):
        links = [getattr(part, name) for part in (*cell.prefills.values(), *cell.decodes.values())]
        counters[f"{name}_bytes"] = sum(link.moved_bytes for link in links)
    return counters


def _prefix_counters(cell: Cell, workload: Workload) -> dict[str, float]:
    """Sums over the nodes. `prefix_ideal_tokens`: what a cache of endless size would find, answers included."""
    caches = [pool.prefixes for pool in cell.pools.values() if pool.prefixes is not None]
    counters: dict[str, float] = {}
    if caches:
        counters["prefix_queried_tokens"] = sum(cache.queried_tokens for cache in caches)
        counters["prefix_hit_tokens"] = sum(cache.hit_tokens for cache in caches)
        counters["prefix_ideal_tokens"] = ideal_hit_tokens(workload)
        counters["prefix_disk_hit_tokens"] = sum(cache.disk_hit_tokens for cache in caches)
        counters["prefix_disk_written_tokens"] = sum(cache.disk_written_tokens for cache in caches)
    if len(cell.pools) > 1:
        counters["network_bytes"] = sum(pool.to_nodes.moved_bytes for pool in cell.pools.values())
    return counters
