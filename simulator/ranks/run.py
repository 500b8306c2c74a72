"""One run with decode instances of several ranks."""

from __future__ import annotations

from dataclasses import asdict

from alignedserve.config import Config
from alignedserve.scheduler.cost.step import StepCost
from alignedserve.scheduler.ranks.names import placement_class
from alignedserve.simulator.disaggregated import configured
from alignedserve.simulator.hardware import Hardware
from alignedserve.simulator.prefill import SimulatedPrefill
from alignedserve.simulator.ranks.cell import RankCell
from alignedserve.simulator.ranks.instance import RankedInstance
from alignedserve.simulator.report.results import Barriers, RunResult
from alignedserve.simulator.report.steps import merge
from alignedserve.simulator.workload import Workload


def simulate_ranks(
    workload: Workload,
    placement: str,
    config: Config,
    hardware: Hardware,
    prefill_cost: StepCost,
    rank_cost: StepCost,
    *,
    ranks: int,
    prefill_instances: int = 1,
    decode_instances: int = 1,
    seed: int = 0,
    leap: bool = True,
) -> RunResult:
    """Replay the workload to its end, each decode instance consisting of `ranks` ranks. Pure, as `simulate`.

    `hardware.kv_tokens` and `decode.max_running` are those of one rank. Raises ConfigError for an unknown placement,
    and if no request fits in the hardware's stores.
    """
    config = as_run(config, prefill_instances, decode_instances)
    placements = [placement_class(placement)(ranks) for _ in range(decode_instances)]
    for one in placements:
        one.use_cost(rank_cost)
    cell = RankCell(workload.arrivals, config, hardware, (prefill_cost, rank_cost), placements, leap)
    cell.run()
    cell.check_nothing_is_left()
    instances: list[SimulatedPrefill | RankedInstance] = [*cell.prefills.values(), *cell.instances]
    results = [cell.requests[arrival.request_id].result for arrival in workload.arrivals]
    return RunResult(
        policy=placement,
        requests=results,
        steps=merge([instance.steps for instance in instances], [instance.gap_s for instance in instances]),
        instances=tuple(instance.name for instance in instances),
        end_s=max((request.token_s[-1] for request in results if request.token_s), default=0.0),
        pool_blocks=cell.occupancy,
        counters=_counters(cell),
        configuration={
            "config": asdict(config),
            "hardware": asdict(hardware),
            "prefill_cost": prefill_cost.describe(),
            "decode_cost": rank_cost.describe(),
            "seed": seed,
            "ranks": ranks,
        },
        barriers=_barriers(cell, ranks),
    )


def as_run(config: Config, prefill: int, decode: int) -> Config:
    """`config` with the values that a run decides."""
    return configured(config, {"cluster.prefill": prefill, "cluster.decode": decode, "cluster.prefetch": False})


def _barriers(cell: RankCell, ranks: int) -> Barriers:
    found = Barriers(
        ranks,
        cell.last_join_s,
        moved_bytes=sum(instance.moved_bytes for instance in cell.instances),
        joined_bytes=sum(rank.from_pool.moved_bytes for instance in cell.instances for rank in instance.ranks),
        evicted_bytes=sum(rank.to_pool.moved_bytes for instance in cell.instances for rank in instance.ranks),
    )
    for instance in cell.instances:
        found.start_s.extend(instance.steps.start_s)
        found.seconds.extend(instance.steps.seconds)
        found.own_s.extend(instance.own_s)
    return found


def _counters(cell: RankCell) -> dict[str, float]:
    counters: dict[str, float] = dict(sorted(cell.counters.items()))
    ranks = [rank for instance in cell.instances for rank in instance.ranks]
    counters["iterations"] = sum(len(instance.steps) for instance in cell.instances)
    counters["evictions"] = sum(rank.scheduler.status().evictions for rank in ranks)
    counters["prefill_passes"] = sum(len(prefill.steps) for prefill in cell.prefills.values())
    counters["refused"] = sum(bool(request.result.refused) for request in cell.requests.values())
    counters["from_pool_bytes"] = sum(rank.from_pool.moved_bytes for rank in ranks)
    evicted = sum(rank.to_pool.moved_bytes for rank in ranks)
    counters["to_pool_bytes"] = evicted + sum(prefill.to_pool.moved_bytes for prefill in cell.prefills.values())
    counters["evicted_bytes"] = evicted
    counters["moved_bytes"] = sum(instance.moved_bytes for instance in cell.instances)
    return counters
